"""What only tests want of the simulation: a sweep to try things on, rehearsed faults, kills, and what to compare.

A driver that was killed is a history that ends early: `cut` makes one, and `simulate` goes on with it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rigsweep.sweeps import files
from rigsweep.sweeps.history import History, Record, Trial
from rigsweep.sweeps.simulation import Answer, ClosedForm, Simulation, rungs_of
from rigsweep.sweeps.sweep import Sweep, check
from rigsweep.trainables.door import Ending
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


def no_fault(training: SurfaceTraining, share: float, attempt: int) -> str | None:
    """Nothing goes wrong."""
    return None


class Faulty(ClosedForm):
    """Closed-form curves on which things go wrong."""

    def __init__(self, sweep: Sweep, fault: Fault):
        super().__init__(sweep)
        self._fault = fault

    def answers(self, trial: Trial, rungs: tuple[float, ...]) -> Iterator[Answer]:
        """The evaluations up to the fault, if there is one."""
        training: Any = self._sweep.training(
            trial.parameters, trial.number - trial.group * self._sweep.settings.repeats
        )
        attempt = trial.lost
        for report in super().answers(trial, rungs):
            assert isinstance(report, dict)
            if wrong := self._fault(training, report["examples"] / report["total"], attempt):
                yield Ending(wrong, "its process was killed" if wrong == "lost" else f"a rehearsed end: {wrong}")
                return
            yield report


def simulate(
    sweep: Sweep, path: Path, *, slots: int = 1, fault: Fault = no_fault, most_events: int | None = None
) -> Record:
    """Run a sweep, or go on with the history at `path`; returns its state at the end.

    With `most_events` the driver is gone after so many more events of trials.
    """
    return run_trials(sweep, path, slots, fault, most_events)


def run_trials(
    sweep: Sweep, history: History | Path, slots: int = 1, fault: Fault = no_fault, most_events: int | None = None
) -> Record:
    """The same on a history that is open, and closed in the end."""
    with Simulation(sweep, history, Faulty(sweep, fault), rungs_of(sweep), slots=slots) as simulation:
        if most_events is None:
            return simulation.run()
        for _ in range(most_events):
            if not simulation.step():
                break
        return simulation.controller.record


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
