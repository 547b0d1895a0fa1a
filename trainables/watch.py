"""Showing a training to the health rules without making a GPU wait."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from .derived import Derived
from .door import Door, Ending, Progress
from .health import RULES, Drawn, Facts, Finding, Kept, Look, Report, Rule, Step
from .settings import Training
from .task import Batch, Samples, Task
from .trial import Job

_log = logging.getLogger(__name__)
_FIRST_BATCHES = 3


@dataclass(frozen=True)
class _Unread:
    """A step whose numbers are on their way from the card."""

    progress: Progress
    numbers: Tensor
    """The terms of the loss, then the gradient norm."""
    copied: torch.cuda.Event | None


class Watch:
    """Shows one training to its rules: warnings go to the door, the training's end is the answer."""

    def __init__(self, task: Task, training: Training, derived: Derived, job: Job, door: Door, state: dict[str, Any]):
        """`state` is of a checkpoint (`Watch.state`), or empty."""
        facts = Facts(
            steps=derived.steps,
            warmup_steps=math.ceil(derived.steps * training.schedule.warmup),
            batch_examples=training.batch.examples,
            learning_rate=training.optimizer.learning_rate,
            clip_norm=training.optimizer.clip_norm,
            precision=job.precision,
            kind=job.kind,
            fresh=job.initial is None,
            chance=task.chance_loss(),
        )
        self._task, self._derived, self._door = task, derived, door
        self._batch_examples, self._folder = training.batch.examples, Path(job.folder)
        self._device = torch.device(job.kind)
        self._rules = [rule(facts) for rule in RULES]
        for rule in self._rules:
            rule.restore(state.get(rule.name, {}))
        self._unread: deque[_Unread] = deque()
        self._batches = 0
        self._idle: list[bool] = []
        self._compiled_before = _compilations() if training.compile else (0, 0)
        self._compiles = training.compile

    def see(
        self, progress: Progress, batch: Batch, terms: Mapping[str, Tensor], norm: Tensor, *, now: bool
    ) -> Ending | None:
        """Take the last micro-batch (on the CPU), loss terms and gradient norm of the step that ended at `progress`.

        Reading a number makes the CPU wait for the step that made it, and meanwhile the GPU may run out of work; so
        unless `now`, what is read is the step before this one: the copy of it was queued right behind it.
        """
        if self._batches < _FIRST_BATCHES:
            self._batches += 1
            if ending := self._ask(progress, lambda rule: rule.batch(batch)):
                return ending
        numbers = torch.stack([*terms.values(), norm.detach()]).to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if norm.is_cuda else None
        if copied is not None:
            copied.record()
        self._unread.append(_Unread(progress, numbers, copied))
        return self._read(leave=0 if now else 1)

    def report(self, progress: Progress, metrics: Mapping[str, float]) -> Ending | None:
        """Take the meter's metrics of a report."""
        compilations, given_up = _compilations() if self._compiles else (0, 0)
        before, given_up_before = self._compiled_before
        report = Report(
            step=self._step(progress),
            # Data that is made while the card has work to do costs nothing.
            waiting_for_data=metrics["speed/waiting_for_data"] * statistics.fmean(self._idle or [1.0]),
            mfu=metrics["speed/mfu"],
            seconds_per_step=self._batch_examples / metrics["speed/examples_per_second"],
            memory_bytes=_held_memory_bytes(self._device),
            compilations=compilations - before,
            runs_eagerly=given_up > given_up_before,
        )
        self._idle.clear()
        return self._ask(progress, lambda rule: rule.report(report))

    def keeping(
        self, progress: Progress, model: nn.Module, evaluation: Mapping[str, float] | None = None
    ) -> Ending | None:
        """Look at all that is about to be kept: no checkpoint is made of a training that is over."""
        if ending := self._read(leave=0):
            return ending
        finite = bool(nn.utils.get_total_norm([parameter.detach() for parameter in model.parameters()]).isfinite())
        kept = Kept(progress.examples, finite, evaluation or {})
        return self._ask(progress, lambda rule: rule.kept(kept))

    def drew(self, progress: Progress, samples: Samples) -> Ending | None:
        """Look at the images that were drawn, beside real ones."""
        if samples.drawn is None:
            return None
        looks = Drawn(progress.examples / progress.total, Look.at(samples.drawn), Look.at(samples.real))
        return self._ask(progress, lambda rule: rule.drawn(looks))

    def state(self) -> dict[str, Any]:
        """What the rules remember, for a checkpoint."""
        return {rule.name: state for rule in self._rules if (state := rule.state())}

    def _step(self, progress: Progress) -> int:
        return progress.examples // self._batch_examples

    def _read(self, leave: int) -> Ending | None:
        """Show the rules all steps but the newest `leave`."""
        while len(self._unread) > leave:
            unread = self._unread.popleft()
            if unread.copied is not None:
                # Done before it is asked for, or asked for at once: the card has nothing to do by now.
                self._idle.append(not leave or unread.copied.query())
                unread.copied.synchronize()
            *terms, norm = unread.numbers.tolist()
            step = Step(self._step(unread.progress), unread.progress.examples, sum(terms), norm)
            if ending := self._ask(unread.progress, lambda rule, step=step: rule.step(step)):
                return ending
        return None

    def _ask(self, progress: Progress, look: Callable[[Rule], Finding | None]) -> Ending | None:
        for rule in self._rules:
            if finding := look(rule):
                if finding.state:
                    kept = f"; {self._keep_batch(progress, rule.name)}" if finding.keep_batch else ""
                    return Ending(finding.state, finding.reason + kept, rule.name)
                self._door.warn(rule.name, finding.reason, progress)
        return None

    def _keep_batch(self, progress: Progress, rule: str) -> str:
        """Keep the batch of a step beside the trial's other files; says where, and what is wrong with it."""
        step, rows = self._step(progress), self._derived.rows_per_step
        first = (step - 1) * rows
        # A batch is a function of its place, so it need not have been held.
        batch = {name: tensor.contiguous() for name, tensor in self._task.batch(first, rows).items()}
        path = self._folder / "offending-batch.safetensors"
        told = {"step": step, "examples": progress.examples, "first_row": first, "rows": rows, "rule": rule}
        try:
            save_file(batch, path, {name: str(value) for name, value in told.items()})
        except (OSError, SafetensorError) as error:
            # A full disk must not hide what happened.
            _log.exception("the offending batch could not be kept")
            return f"its batch could not be kept ({error})"
        where = f"its batch is kept in {'/'.join(path.parts[-3:])}"
        bad = [name for name, tensor in batch.items() if not tensor.isfinite().all()]
        return f"{where}, where `{bad[0]}` is not finite" if bad else where


def _compilations() -> tuple[int, int]:
    """Functions that `torch.compile` compiled in this process, and those it gave up after too many compilations."""
    from torch._dynamo.utils import counters

    given_up = sum(count for why, count in counters["unimplemented"].items() if "recompile limit" in why)
    return counters["frames"]["total"], given_up


def _held_memory_bytes(device: torch.device) -> float:
    """Memory held now: by tensors on a GPU, by the process without the files that it maps on a CPU."""
    if device.type == "cuda":
        return float(torch.cuda.memory_allocated(device))
    memory = psutil.Process().memory_info()
    return float(memory.rss - memory.shared)
