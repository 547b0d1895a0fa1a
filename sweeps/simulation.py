"""Sweeps without training: curves answer for trials, on a clock of their own.

`Simulation` puts the real controller, searcher, stopper and history to work, with a *source of curves* in the
place of lanes: `ClosedForm` (the `surface` trainable) or `Recorded` (the evaluations of another sweep's history).
Each slot runs one trial; the next event is always the one that is due first, so that a simulated sweep is a
function of its file, its curves and the number of slots. To try stoppers alone on recorded curves, see `saving.py`.
"""

import heapq
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..trainables.derived import evaluation_steps, steps_for
from ..trainables.door import Ending
from ..trainables.surface import count, loss_at
from ..trainables.surface_settings import SurfaceTraining
from .controller import Controller
from .files import WrongInput
from .history import VERSION, History, Record, Trial
from .sweep import Sweep

_BEGIN = 1_700_000_000.0
"""Where the clock of a new simulated history stands (Unix seconds)."""

Answer = dict[str, Any] | Ending
"""An evaluation as a lane sends it (`seconds` is the trial's own device time so far), or how the trial ended."""


class Curves(Protocol):
    """A source of curves."""

    def answers(self, trial: Trial, rungs: tuple[float, ...]) -> Iterator[Answer]:
        """What happens in a trial, in order, from its beginning; after the last evaluation it is complete."""
        ...


class ClosedForm:
    """The curves of a sweep over the `surface` trainable; a step takes a second at width 64, in proportion else."""

    def __init__(self, sweep: Sweep):
        self._sweep = sweep

    def answers(self, trial: Trial, rungs: tuple[float, ...]) -> Iterator[Answer]:
        """The evaluations that training would report."""
        training = self._sweep.training(trial.parameters, trial.number - trial.group * self._sweep.settings.repeats)
        assert isinstance(training, SurfaceTraining)
        parameters, flops_per_example = count(training)
        steps, batch = steps_for(training, flops_per_example, parameters), training.batch.examples
        by = self._sweep.settings.early_stopping.by
        for step in sorted(evaluation_steps(training, steps, rungs, by, flops_per_example)):
            noise = np.random.default_rng((training.seed, step)).normal() * training.model.noise
            loss = loss_at(training, step / steps) + noise
            yield {
                "examples": step * batch,
                "total": steps * batch,
                "flops": step * batch * flops_per_example,
                "seconds": step * training.model.width / 64,
                "metrics": {"validation/loss": loss, "validation/accuracy": float(np.exp(-loss))},
                "checkpoint": None,
            }


class Recorded:
    """The curves of the complete trials of a history, found by their parameters and seed."""

    def __init__(self, record: Record):
        self._trials = {_identity(trial): trial for trial in record.trials.values() if trial.state == "complete"}

    def answers(self, trial: Trial, rungs: tuple[float, ...]) -> Iterator[Answer]:
        """The evaluations as they were recorded, wherever the rungs lie. Raises `WrongInput` for an unknown trial."""
        del rungs
        known = self._trials.get(_identity(trial))
        if known is None:
            raise WrongInput(f"no complete trial was recorded with {trial.parameters} and seed {trial.seed}")
        for _, report in sorted(known.reports.items()):
            fields = ("examples", "total", "flops", "seconds", "metrics")
            yield {name: getattr(report, name) for name in fields} | {"checkpoint": None}


def _identity(trial: Trial) -> str:
    return json.dumps([trial.parameters, trial.seed], sort_keys=True)


def rungs_of(sweep: Sweep) -> tuple[float, ...]:
    """The rungs of a sweep of surfaces."""
    budgets = []
    for corner in sweep.space.corners_that_change("budget", "model", "data", "batch"):
        training = sweep.training(corner)
        assert isinstance(training, SurfaceTraining)
        parameters, flops_per_example = count(training)
        examples = steps_for(training, flops_per_example, parameters) * training.batch.examples
        budgets.append(examples * (flops_per_example if sweep.settings.early_stopping.by == "flops" else 1))
    return sweep.rungs(budgets)


class Simulation:
    """A sweep on simulated slots; goes on with the history that is there.

    Its record has device seconds by the simulation's clock. Use it as a context: it holds the history open.
    """

    def __init__(
        self, sweep: Sweep, history: History | Path, curves: Curves, rungs: tuple[float, ...], *, slots: int = 1
    ):
        self._sweep, self._curves, self._rungs, self._slots = sweep, curves, rungs, slots
        self.now = 0.0
        if isinstance(history, Path):
            # Nothing of value is lost with it, so it does not wait for the disk.
            history = History(history, clock=lambda: _BEGIN + self.now, durable=False)
        self._history = history
        self.now = max(history.record.time - _BEGIN, 0.0)
        told = {"sweep": sweep.name, "trainable": sweep.settings.trainable}
        self._history.append("opened", version=VERSION, objective=sweep.settings.objective.model_dump(), **told)
        self.controller = Controller(sweep, self._history, rungs, clock=lambda: self.now)
        self._due: list[tuple[float, int, Answer | None]] = []  # when, in which trial, what; None is its end
        self._running: dict[int, tuple[Iterator[Answer], float]] = {}  # its next answers, and when it began

    def __enter__(self) -> "Simulation":
        return self

    def __exit__(self, *error: object) -> None:
        self._history.close()

    def run(self) -> Record:
        """Run it to its end."""
        while self.step():
            pass
        return self.controller.record

    def step(self) -> bool:
        """Let the next thing happen; False when nothing is left, and the history is closed."""
        while len(self._due) < self._slots and (number := self.controller.next_trial()) is not None:
            self._begin(number)
        if not self._due:
            self.controller.close("complete", "every trial is over")
            return False
        self.now, number, answer = heapq.heappop(self._due)
        if answer is None:
            self.controller.ended(number, "complete", "reached its budget")
        elif isinstance(answer, Ending):
            if answer.state == "lost":
                self.controller.lost(number, answer.reason)
            else:
                self.controller.ended(number, answer.state, answer.reason)
        elif not self.controller.reported(number, answer):
            self._await(number)
        return True

    def _begin(self, number: int) -> None:
        trial = self.controller.record.trials[number]
        assert number not in [running for _, running, _ in self._due], "a trial runs once at a time"
        self.controller.started(number, "simulated", [f"slot {len(self._due)}"], process=0)
        known = trial.last
        # It goes on from its last evaluation, as from a checkpoint.
        begun = self.now - (known.seconds if known else 0.0)
        answers = self._curves.answers(trial, self._rungs)
        left = (a for a in answers if isinstance(a, Ending) or a["examples"] > (known.examples if known else 0))
        self._running[number] = left, begun
        self._await(number)

    def _await(self, number: int) -> None:
        answers, begun = self._running[number]
        answer = next(answers, None)
        when = begun + answer["seconds"] if isinstance(answer, dict) else self.now
        heapq.heappush(self._due, (max(self.now, when), number, answer))
