"""Speed of a training between two reports."""

import ctypes
import os
import resource
import time
from pathlib import Path

import torch

from .phases import Phases

_CLEAR_REFS = Path("/proc/self/clear_refs")


class Meter:
    """Counts examples, time and waiting since the last `read`, and tells `phases` what the time goes into.

    Made when the first step begins, in which a `compiled` model is compiled.
    """

    def __init__(
        self,
        flops_per_example: float,
        measured_flops_per_second: float,
        peak_flops_per_second: float | None,
        phases: Phases | None = None,
        *,
        compiled: bool = False,
    ):
        self._phases = phases or Phases()
        self._phases.enter("compiling" if compiled else "computing")
        self._compiling = compiled
        self._flops_per_example = flops_per_example
        self._measured, self._peak = measured_flops_per_second, peak_flops_per_second
        self._examples, self._waiting, self._since = 0, 0.0, time.perf_counter()
        self.shown: dict[str, float] = {}

    def waited(self, seconds: float) -> None:
        """The step waited so long for its data."""
        self._waiting += seconds
        self._phases.spent("waiting", seconds)

    def saw(self, examples: int) -> None:
        """The step trained on so many examples."""
        self._examples += examples
        if self._compiling:
            self._phases.enter("computing")
            self._compiling = False

    def pause(self) -> float:
        """Stop counting (an evaluation begins); give the result to `go_on`."""
        self._phases.enter("evaluation")
        return time.perf_counter()

    def go_on(self, paused: float) -> None:
        """Count again; the time since `pause` is left out."""
        self._since += time.perf_counter() - paused
        self._phases.enter("computing")

    def read(self, device: torch.device) -> dict[str, float]:
        """Metrics since the last call, then start again.

        MFU (Chowdhery et al. 2022, appendix B): model FLOPs over the card's peak, or where that is not known,
        and beside it in any case, over the measured speed of its matrix products.
        """
        seconds = max(time.perf_counter() - self._since, 1e-9)
        per_second = self._examples / seconds
        achieved = per_second * self._flops_per_example
        metrics = {
            "speed/examples_per_second": per_second,
            "speed/flops_per_second": achieved,
            "speed/mfu": achieved / (self._peak or self._measured),
            "speed/mfu_of_measured": achieved / self._measured,
            "speed/waiting_for_data": self._waiting / seconds,
            "memory/peak_bytes": peak_memory_bytes(device),
        }
        self.shown = {"examples_per_second": per_second, "mfu": metrics["speed/mfu"]}
        self._examples, self._waiting, self._since = 0, 0.0, time.perf_counter()
        return metrics


def peak_memory_bytes(device: torch.device) -> float:
    """The most memory held so far: by tensors on a GPU, by the whole process on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0


def forget_peak_memory() -> None:
    """Let the peak begin anew at what is held now, so that a lane's next trial has one of its own."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # glibc keeps what was freed, and the next trial would be charged for it
    if os.access(_CLEAR_REFS, os.W_OK):
        _CLEAR_REFS.write_text("5")  # Linux: proc_pid_clear_refs(5)
