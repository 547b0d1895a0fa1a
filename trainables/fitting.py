"""Whether a training fits on its card: the memory of one optimizer step, traced, measured and corrected."""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster.memory import Budget, Observation, calibrate, observations, observe
from .settings import Training

if TYPE_CHECKING:
    from ..cluster.live_bytes import Parts
    from .task import Batch, Task
    from .trial import Job

_MEMORY_SHARE = 0.9
"""Of a card; the rest is for the context, the allocator, evaluation and sampling."""
_OBVIOUS_SHARE = 0.25
"""What takes less of the card by the task's own rough figure is not traced."""
_TRACES: dict[str, Budget] = {}
"""Traces of this process, by shape."""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a training with a micro-batch of a size takes, and what there is."""

    estimate: Budget
    corrected_bytes: int
    """The estimate corrected by what was measured on the card; the measured peak where this shape was."""
    safe_bytes: int
    """The same with a margin, as long as nothing was measured on the card."""
    card_bytes: int

    def as_dict(self) -> dict[str, int]:
        """Everything, for `plan`."""
        told = {f"estimate_{name}": value for name, value in dataclasses.asdict(self.estimate).items()}
        return {
            "estimate_bytes": self.estimate.total_bytes,
            **told,
            "calibrated_bytes": self.corrected_bytes,
            "card_bytes": self.card_bytes,
        }


def shape_key(trainable: str, training: Training, micro_rows: int, precision: str) -> str:
    """A short name of everything that decides the memory of a training."""
    told = training.model_dump(mode="json")
    parts = {name: told.get(name) for name in ("data", "model", "recompute", "compile")}
    parts |= {"averages": training.averages, "optimizer": training.optimizer.name, "micro_rows": micro_rows}
    parts["accumulates"] = training.batch.examples
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
    return f"{trainable}-{micro_rows}-{precision}-{digest}"


def memory_of(task: "Task", training: Training, job: "Job", micro_rows: int) -> Memory:
    """What a training with micro-batches of that many rows takes on the job's card; traced once a process.

    The trace is in the precision of the card, on a CPU's kernels.
    """
    shape = shape_key(job.trainable, training, micro_rows, job.precision)
    estimate = _traced(task, training, job, micro_rows, shape)
    found = observations(Path(job.cache), job.card_name)
    calibration = calibrate(found)
    same = next((one for one in reversed(found) if one.shape == shape), None)
    corrected = same.peak_bytes if same else calibration.corrected_bytes(estimate)
    safe = same.peak_bytes if same else calibration.safe_bytes(estimate)
    return Memory(estimate, corrected, safe, job.memory_bytes)


def obviously_fits(task: "Task", parameters: int, job: "Job", micro_rows: int) -> bool:
    """Whether the task's own rough figure is so far below the card's memory that nothing need be traced."""
    rough_bytes = 20 * parameters + micro_rows * task.activation_bytes_per_row(job.precision)
    return rough_bytes < _OBVIOUS_SHARE * room_bytes(job)


def room_bytes(job: "Job") -> float:
    """What tensors may take of the job's card."""
    # On a CPU, a limit is one of the tensors that are counted, and needs nothing beside it.
    return job.memory_bytes if job.kind == "cpu" and job.memory_limited else _MEMORY_SHARE * job.memory_bytes


def probe(task: "Task", training: Training, job: "Job", micro_rows: int) -> None:
    """Two real optimizer steps on a CPU card under its memory limit, kept as an observation.

    Changes nothing of the training. Raises `torch.OutOfMemoryError` where the limit is exceeded.
    """
    import torch

    from ..cluster import live_bytes

    seconds: list[float] = []

    def batch() -> "Batch":
        seconds.append(time.perf_counter())
        return task.batch(0, micro_rows)

    with torch.random.fork_rng(devices=[]):
        measured = live_bytes.measure(
            lambda: parts(task, training, job.precision, batch),
            accumulates=_accumulates(task, training, micro_rows),
            limit_bytes=job.memory_bytes,
        )
    speed = micro_rows * task.examples_per_row / max(1e-9, time.perf_counter() - seconds[-1])
    keep_observation(task, training, job, micro_rows, measured.total_bytes, speed)


def keep_observation(
    task: "Task", training: Training, job: "Job", micro_rows: int, peak_bytes: int, examples_per_second: float
) -> None:
    """Keep what a training really took, so that later estimates are corrected by it."""
    shape = shape_key(job.trainable, training, micro_rows, job.precision)
    estimate = _traced(task, training, job, micro_rows, shape)
    observe(Path(job.cache), job.card_name, Observation(shape, estimate, peak_bytes, examples_per_second))


def _traced(task: "Task", training: Training, job: "Job", micro_rows: int, shape: str) -> Budget:
    if shape not in _TRACES:
        import torch

        from ..cluster import live_bytes

        like = task.batch(0, 1)

        def batch() -> "Batch":
            return {name: torch.zeros((micro_rows, *t.shape[1:]), dtype=t.dtype) for name, t in like.items()}

        with torch.random.fork_rng(devices=[]):
            _TRACES[shape] = live_bytes.estimate(
                lambda: parts(task, training, job.precision, batch),
                accumulates=_accumulates(task, training, micro_rows),
            )
    return _TRACES[shape]


def _accumulates(task: "Task", training: Training, micro_rows: int) -> bool:
    return micro_rows * task.examples_per_row < training.batch.examples


def parts(task: "Task", training: Training, precision: str, batch: "Callable[[], Batch]") -> "Parts":
    """What the loop does in a step, as far as it takes memory."""
    import torch
    from torch import nn

    from ..cluster.live_bytes import Parts
    from .averages import Averages
    from .optimizer import build_optimizer

    model = task.build()
    averages = Averages(model, training)
    optimizer = build_optimizer(model, task.role, training.optimizer)

    def micro_step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            losses = task.loss(model, batch())
        torch.stack(list(losses.values())).sum().backward()

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), training.optimizer.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The averages take in the weights where they lie, which takes nothing more and cannot be traced.

    return Parts(
        model, nn.ModuleList(averages.modules.values()) if averages.modules else None, optimizer, micro_step, step
    )
