"""The memory ladder: what a training does to fit, without changing what is learned.

As asked; then smaller micro-batches with more accumulation, halved down to one row; then recomputation, with
micro-batches as large as it allows, halved again; then it ends as out of memory and says what else would help. Climbed
before the start by the estimate, and at run time when memory runs out.
"""

import gc
import json
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..cluster.memory import GIB, observed
from .door import Door, Ending, Progress
from .errors import NEVER_STARTED, is_out_of_memory
from .fitting import Memory, keep_observation, memory_of, obviously_fits, probe, room_bytes, shape_key
from .settings import Training
from .task import Task
from .trial import Job

_log = logging.getLogger(__name__)
TaskOf = Callable[[Training], Task]


@dataclass(frozen=True)
class Rung:
    """Where a training stands on the ladder."""

    micro_rows: int
    recompute: bool
    compile: bool

    def of(self, training: Training) -> Training:
        """The training on this rung."""
        batch = training.batch.model_copy(update={"micro": self.micro_rows})
        return training.model_copy(update={"batch": batch, "recompute": self.recompute, "compile": self.compile})

    def describe(self, rows: int, asked: "Rung") -> str:
        """For a person, of `rows` in a step, beside what was asked: `recomputation, 4 rows x 8`."""
        words = ["recomputation"] if self.recompute else []
        words += ["not compiled"] if asked.compile and not self.compile else []
        return ", ".join([*words, f"{self.micro_rows} rows x {math.ceil(rows / self.micro_rows)}"])


@dataclass(frozen=True)
class Choice:
    """The rung to start on, what it takes, and whether that fits the card at all."""

    rung: Rung
    rows: int
    """In one optimizer step of one worker."""
    asked: Rung
    memory: Memory | None
    """None where it obviously fits, or where the task cannot be traced."""
    fits: bool

    @property
    def share(self) -> float | None:
        """What it takes of the card's memory; None where that was not estimated."""
        return self.memory.corrected_bytes / self.memory.card_bytes if self.memory else None

    @property
    def reason(self) -> str:
        """Why it is not started."""
        assert self.memory is not None
        told, rung = self.memory, self.rung.describe(self.rows, self.asked)
        return (
            f"on the last rung of the memory ladder ({rung}) it takes an estimated "
            f"{told.estimate.total_bytes / GIB:.3g} GiB, calibrated {told.corrected_bytes / GIB:.3g} GiB, and the card "
            f"has {told.card_bytes / GIB:.3g} GiB; {HELP}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Everything, for `plan`."""
        told = self.memory.as_dict() if self.memory else {}
        rung = {"micro_rows": self.rung.micro_rows, "recompute": self.rung.recompute}
        climbed = self.rung != self.asked
        advice = None if self.fits else HELP
        return {**told, "fits": self.fits, "rung": rung, "climbed": climbed, "what_would_help": advice}


HELP = "a shorter sequence, a smaller model, an 8-bit optimizer or LoRA would help"


def next_rung(rung: Rung, recompute_rows: int, *, first_step: bool) -> Rung | None:
    """The rung above, the same on every worker; None at the ladder's end.

    Recomputation begins with micro-batches of `recompute_rows`.

    On the very first step, compiling is what is tried off first.
    """
    if first_step and rung.compile:
        return replace(rung, compile=False)
    if rung.micro_rows > 1:
        return replace(rung, micro_rows=math.ceil(rung.micro_rows / 2))
    if not rung.recompute:
        return replace(rung, micro_rows=recompute_rows, recompute=True)
    return None


def choose(task_of: TaskOf, job: Job, *, always: bool = False) -> Choice:
    """The first rung that fits by the calibrated estimate; with `always`, traced also where it obviously fits.

    What was never measured has a margin to fit in, but is only refused where it does not fit without.
    """
    from torch._subclasses import fake_tensor

    from .derived import derive

    training = job.settings()
    task = task_of(training)
    derived = derive(task, training, job)
    rows = math.ceil(derived.rows_per_step / derived.workers)
    rung = asked = Rung(derived.micro_rows, training.recompute, training.compile)
    if not always and obviously_fits(task, derived.parameters, job, rung.micro_rows):
        return Choice(rung, rows, asked, None, fits=True)
    recompute_rows = _recompute_rows(task_of, job)
    try:
        while True:
            edited = rung.of(training)
            memory = memory_of(task_of(edited), edited, job, rung.micro_rows)
            if memory.safe_bytes <= room_bytes(job):
                return Choice(rung, rows, asked, memory, fits=True)
            above = next_rung(rung, recompute_rows, first_step=False)
            if above is None:
                return Choice(rung, rows, asked, memory, fits=memory.corrected_bytes <= job.memory_bytes)
            rung = above
    except (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        fake_tensor.UnsupportedFakeTensorException,
    ) as error:
        _log.warning("the memory of this training cannot be traced, so only running it will tell: %s", error)
        return Choice(asked, rows, asked, None, fits=True)


def _recompute_rows(task_of: TaskOf, job: Job) -> int:
    """The micro-batch that is derived for the training with recomputation."""
    from .derived import derive

    recomputing = job.settings().model_copy(update={"recompute": True})
    return derive(task_of(recomputing), recomputing, job).micro_rows


def train(task_of: TaskOf, job: Job, door: Door) -> Ending:
    """Train on the first rung that fits, and climb when memory runs out all the same."""
    # The loop imports much that planning has no need of.
    from .loop import train as train_on
    from .workers import Workers

    workers, job = Workers(door.rank, door.workers), replace(job, workers=door.workers)
    choice = choose(task_of, job)
    if not choice.fits:
        return Ending("out_of_memory", choice.reason, NEVER_STARTED, choice.share)
    training, rung, asked = job.settings(), choice.rung, choice.asked
    _limit(job)
    if rung != asked:
        door.warn("memory-ladder", f"by the estimate: {rung.describe(choice.rows, asked)}", Progress())
    while True:
        edited = rung.of(training)
        task = task_of(edited)
        on_rung = replace(job, training=edited.model_dump(mode="json"))
        reported = _reported(job)
        ending, shortage = _attempt(lambda: train_on(task, on_rung, door, workers), task, on_rung)  # noqa: B023
        if ending is not None:
            if ending.state == "complete" and job.kind == "cuda" and workers.size == 1:
                _observe(task, edited, job, rung)
            return ending
        above = next_rung(rung, _recompute_rows(task_of, job), first_step=not (door.seen and door.seen.examples))
        # Of several workers the others wait for this one in the middle of a step: they cannot climb with it.
        if above is None or workers.size > 1:
            told = choice.reason if choice.memory else f"the card has {job.memory_bytes / GIB:.3g} GiB; {HELP}"
            return Ending("out_of_memory", f"{shortage}; {told}"[:600], memory_share=choice.share)
        rung = above
        job = replace(job, recorded=tuple({*job.recorded, *(_reported(job) - reported)}))
        _release()
        door.warn("memory-ladder", f"memory ran out: {rung.describe(choice.rows, asked)}", door.seen or Progress())


def _attempt(run: Callable[[], Ending], task: Task, job: Job) -> tuple[Ending | None, str]:
    """The training's ending, or None and the words in which memory ran out."""
    try:
        rows, training = job.settings().batch.micro or 1, job.settings()
        shape = shape_key(job.trainable, training, rows, job.precision)
        limited = job.kind == "cpu" and job.memory_limited
        if limited and not observed(Path(job.cache), job.card_name, shape):
            probe(task, training, job, rows)
        return run(), ""
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        _log.warning("memory ran out", exc_info=True)
        # Only words leave: the exception holds the frames, and they hold the tensors.
        return None, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:200]


def _reported(job: Job) -> set[int]:
    """Examples of the evaluations in the trial's folder."""
    file = Path(job.folder) / "metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")] if file.exists() else []
    return {row["examples"] for row in rows if any(name.startswith("validation/") for name in row)}


def _limit(job: Job) -> None:
    import torch

    if job.kind == "cuda" and job.memory_limited:
        whole_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, job.memory_bytes / whole_bytes))


def _release() -> None:
    """Give memory back before the next attempt, and forget its peak and what was compiled."""
    import sys

    import torch

    from .meter import forget_peak_memory

    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    forget_peak_memory()


def _observe(task: Task, training: Training, job: Job, rung: Rung) -> None:
    """Keep what a complete training really took on a GPU, and its median speed."""
    import statistics

    import torch

    rows = [json.loads(line) for line in (Path(job.folder) / "metrics.jsonl").read_text().splitlines()]
    speeds = [row["speed/examples_per_second"] for row in rows if row.get("speed/examples_per_second")]
    speed = statistics.median(speeds) if speeds else 0.0
    keep_observation(task, training, job, rung.micro_rows, torch.cuda.max_memory_allocated(), speed)
