"""A trial as a lane runs it: the job that arrives, the training, the message at its end."""

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..cluster import disk
from .door import ClosedDoor, Door, Ending, Line
from .errors import NEVER_STARTED, NewerVersion, is_out_of_memory
from .registry import load, settings_class
from .settings import Training

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Job:
    """One trial, as plain data that crosses processes."""

    number: int
    trainable: str
    training: dict[str, Any]
    """The validated settings, as JSON."""
    folder: str
    """The trial's own folder: metrics, samples, checkpoints."""
    cache: str
    """Where prepared data and compiled code are kept."""
    metric: str
    goal: Literal["minimize", "maximize"]
    precision: Literal["bf16", "fp32"]
    kind: Literal["cpu", "cuda"]
    threads: int
    memory_bytes: int
    """Of the card, or the limit that was set."""
    measured_flops_per_second: float
    peak_flops_per_second: float | None = None
    """Of the card's specification; None where the card is not in the table."""
    memory_limited: bool = False
    """Whether `memory_bytes` is a limit that was set, less than the card has."""
    card_name: str = ""
    """What was measured of memory is kept by it."""
    rungs: tuple[float, ...] = ()
    """Where trials are compared: evaluations happen there too."""
    rungs_by: Literal["examples", "flops"] = "examples"
    recorded: tuple[int, ...] = ()
    """Examples of the evaluations that whoever follows the trial already knows."""
    initial: str | None = None
    """A checkpoint folder to start the weights from."""
    scoring: bool = False
    """Train nothing: draw from the weights of `initial` and score what is drawn."""
    grid: tuple[dict[str, Any], ...] = ()
    """Ways of drawing, as changes of the settings under `sampling`, in each of which the trained model is scored."""
    workers: int = 1
    """How many are asked for to train it together; the lane knows how many there are."""
    directory: str | None = None
    """Where the sweep was started: relative paths of a corpus or tokenizer are meant from there."""

    def settings(self) -> Training:
        """The training's settings, validated again."""
        return settings_class(self.trainable).model_validate(self.training)


def run_trial(job: dict[str, Any], line: Line) -> dict[str, Any]:
    """Run one trial in this process, which may be one of several workers, and return its last message.

    Raises nothing.
    """
    folder = Path(job["folder"])
    try:
        with (
            contextlib.chdir(job.get("directory") or "."),
            _logging_to(folder / ("log.txt" if line.rank == 0 else f"log-{line.rank}.txt")),
            contextlib.closing(Door(folder, line) if line.rank == 0 else ClosedDoor(folder, line)) as door,
        ):
            ending = load(job["trainable"])(Job(**job), door)
    except Exception as error:  # noqa: BLE001 - whatever a trial raises ends that trial, and only that
        ending = _ending(error, folder)
    ran_out = ending.state == "out_of_memory" and ending.rule != NEVER_STARTED
    retire = ran_out or "CUDA error" in ending.reason
    if not retire:
        _clear()
    return {"event": "ended", **asdict(ending), "retire": retire}


@contextlib.contextmanager
def _logging_to(file: Path) -> Iterator[None]:
    """What is logged, and the traceback of what is raised, also go to the trial's own log."""
    file.parent.mkdir(parents=True, exist_ok=True)
    log = logging.FileHandler(file, encoding="utf-8")
    log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(log)
    try:
        yield
    except Exception:
        _log.exception("the trial ends here")
        raise
    finally:
        logging.getLogger().removeHandler(log)
        log.close()


def _ending(error: Exception, folder: Path) -> Ending:
    """What an exception means for its trial."""
    if line := disk.full(error, folder):
        return Ending("interrupted", line)
    if isinstance(error, NewerVersion):
        return Ending("interrupted", str(error))
    words = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {words[0]}" if words else type(error).__name__
    if is_out_of_memory(error):
        return Ending("out_of_memory", reason[:300])
    return Ending("failed", reason[:300])


def _clear() -> None:
    """Leave nothing of a trial for the next: memory, compiled graphs (8 recompilations, then eager)."""
    import sys

    if "torch" not in sys.modules:
        return
    import gc

    import torch

    from .meter import forget_peak_memory

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    forget_peak_memory()
