"""Sweeps without training: closed-form curves drive the real controller, searchers, stoppers and history.

Each slot runs one trial; the next event is always the one that is due first on a clock of its own, so that a
sweep is a function of its file and the number of slots. A driver that was killed is a history that ends early:
`cut` makes one, and `simulate` goes on with it.
"""

import heapq
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rigsweep.sweeps import files
from rigsweep.sweeps.controller import Controller
from rigsweep.sweeps.history import VERSION, History, Record
from rigsweep.sweeps.sweep import Sweep, check
from rigsweep.trainables.derived import evaluation_steps, steps_for
from rigsweep.trainables.surface import count, loss_at
from rigsweep.trainables.surface_settings import SurfaceTraining

SWEEP = """
question: Which learning rate and warm-up suit each width?
trainable: surface
base:
  seed: 0
  optimizer: {learning_rate: 1.0e-3}
  schedule: {warmup: 2%}
  batch: {examples: 1k}
  budget: {examples: 100k}
  evaluation: {every: 25%}
  model: {width: 64, noise: 0.05}
search:
  optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-1, log: true}
  schedule.warmup: {low: 0%, high: 10%}
  model.width: {choices: [64, 96, 128]}
searcher: tpe
trials: 16
early_stopping: {rule: asha, grace: 10%, reduction: 3}
"""

Fault = Callable[[SurfaceTraining, float, int], str | None]
"""What goes wrong at a share of a trial's budget in its n-th attempt (from 0): a state, `lost`, or nothing."""


def sweep_of(text: str = SWEEP, *overrides: str, name: str = "simulated") -> Sweep:
    """A sweep from the text of its file."""
    document = files.parse(text, f"{name}.yaml")
    files.override(document, *overrides)
    return check(document, name)


def rungs_of(sweep: Sweep) -> tuple[float, ...]:
    """The rungs of a sweep of surfaces."""
    budgets = []
    for corner in sweep.space.corners_that_change("budget", "model", "data", "batch"):
        training = sweep.training(corner)
        parameters, flops_per_example = count(training)  # pyright: ignore
        examples = steps_for(training, flops_per_example, parameters) * training.batch.examples
        budgets.append(examples * (flops_per_example if sweep.settings.early_stopping.by == "flops" else 1))
    return sweep.rungs(budgets)


def reports_of(
    sweep: Sweep, training: SurfaceTraining, rungs: tuple[float, ...], known: frozenset[int] = frozenset()
) -> Iterator[dict[str, Any]]:
    """A trial's evaluations, as a lane would send them, but for those that are known by their examples."""
    parameters, flops_per_example = count(training)
    steps, batch = steps_for(training, flops_per_example, parameters), training.batch.examples
    for step in sorted(evaluation_steps(training, steps, rungs, sweep.settings.early_stopping.by, flops_per_example)):
        if step * batch in known:
            continue
        noise = np.random.default_rng((training.seed, step)).normal() * training.model.noise
        loss = loss_at(training, step / steps) + noise
        yield {
            "examples": step * batch,
            "total": steps * batch,
            "flops": step * batch * flops_per_example,
            "seconds": float(step),
            "metrics": {"validation/loss": loss, "validation/accuracy": float(np.exp(-loss))},
            "checkpoint": None,
        }


def no_fault(training: SurfaceTraining, share: float, attempt: int) -> str | None:
    """Nothing goes wrong."""
    return None


def simulate(
    sweep: Sweep, path: Path, *, slots: int = 1, fault: Fault = no_fault, most_events: int | None = None
) -> Record:
    """Run a sweep, or go on with the history at `path`; returns its state at the end.

    With `most_events` the driver is gone after so many more events of trials.
    """
    with mock.patch("os.fsync"):  # a kill is rehearsed by `cut`; waiting for the disk would make these tests slow
        return _simulate(sweep, path, slots, fault, most_events)


def _simulate(sweep: Sweep, path: Path, slots: int, fault: Fault, most_events: int | None) -> Record:
    history = History(path, clock=itertools.count(1_700_000_000.0).__next__)
    try:
        history.append("opened", version=VERSION, sweep=sweep.name)
        rungs = rungs_of(sweep)
        controller = Controller(sweep, history, rungs)
        attempts: dict[int, int] = {}
        due: list[tuple[float, int, Iterator[dict[str, Any]]]] = []  # when, which trial, its evaluations
        now = 0.0
        for _ in itertools.count() if most_events is None else range(most_events):
            while len(due) < slots and (number := controller.next_trial()) is not None:
                trial = controller.record.trials[number]
                assert number not in [running for _, running, _ in due], "a trial runs once at a time"
                attempts[number] = trial.lost
                training = sweep.training(trial.parameters, number - trial.group * sweep.settings.repeats)
                controller.started(number, "simulated", [f"slot {len(due)}"], process=0)
                reports = reports_of(sweep, training, rungs, known=frozenset(trial.reports))
                heapq.heappush(due, (now + training.model.width / 64, number, reports))
            if not due:
                controller.close("complete", "every trial is over")
                return controller.record
            now, number, reports = heapq.heappop(due)
            trial = controller.record.trials[number]
            training = sweep.training(trial.parameters, number - trial.group * sweep.settings.repeats)
            report = next(reports, None)
            if report is None:
                controller.ended(number, "complete", "reached its budget")
                continue
            wrong = fault(training, report["examples"] / report["total"], attempts[number])
            if wrong == "lost":
                controller.lost(number, "its process was killed")
            elif wrong:
                controller.ended(number, wrong, f"a rehearsed end: {wrong}")
            elif not controller.reported(number, report):
                heapq.heappush(due, (now + training.model.width / 64, number, reports))
        return controller.record
    finally:
        history.close()


def cut(history: Path, to: Path, events: int, torn: bytes = b"") -> Path:
    """A copy of a history as a kill after so many events leaves it, with the torn beginning of the next."""
    to.parent.mkdir(parents=True, exist_ok=True)
    lines = history.read_bytes().splitlines(keepends=True)
    to.write_bytes(b"".join(lines[:events]) + torn)
    return to


def outcome(record: Record) -> dict[int, Any]:
    """All that was decided and measured of every trial; times aside."""
    return {
        number: {
            "parameters": trial.parameters,
            "seed": trial.seed,
            "state": trial.state,
            "reason": trial.reason,
            "value": trial.value,
            "reports": {examples: report.metrics for examples, report in sorted(trial.reports.items())},
        }
        for number, trial in record.trials.items()
    }
