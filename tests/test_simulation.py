"""The simulation: its clock, its slots, and its sources of curves."""

from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import Trial, fold
from rigsweep.sweeps.simulation import ClosedForm, Recorded, Simulation, rungs_of

from .simulator import SWEEP, outcome, simulate, sweep_of

FULL = ("early_stopping.rule=none", "searcher=random", "base.evaluation.every=10%")


def test_device_seconds_are_those_of_the_curves_and_the_clock_runs_by_slots(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, *FULL, "trials=6")
    for slots in (1, 2, 3):
        path = tmp_path / f"{slots}.jsonl"
        with Simulation(sweep, path, ClosedForm(sweep), (), slots=slots) as simulation:
            record = simulation.run()
            seconds = {n: 100 * t.parameters["model.width"] / 64 for n, t in record.trials.items()}
            assert {n: t.seconds for n, t in record.trials.items()} == pytest.approx(seconds)
            assert sum(seconds.values()) / slots <= simulation.now <= sum(seconds.values())
        ends = [trial.ended - trial.started for trial in record.trials.values() if trial.ended and trial.started]
        assert ends == pytest.approx(list(seconds.values()), rel=1e-6), "the history's times are the clock's"


def test_stopping_spends_less_than_every_trial_to_its_end(tmp_path: Path) -> None:
    for rule in ("asha", "median", "forecast"):
        sweep = sweep_of(SWEEP, *FULL, f"early_stopping.rule={rule}")
        record = simulate(sweep, tmp_path / f"{rule}.jsonl", slots=2)
        full = sum(100 * trial.parameters["model.width"] / 64 for trial in record.trials.values())
        assert 0 < sum(trial.seconds for trial in record.trials.values()) < full


def test_a_simulation_that_was_left_goes_on_from_its_last_evaluations(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, *FULL, "trials=3")
    whole = simulate(sweep, tmp_path / "whole.jsonl")
    path = tmp_path / "history.jsonl"
    simulate(sweep, path, most_events=14)
    resumed = simulate(sweep, path)
    assert outcome(resumed) == outcome(whole)
    for number, trial in whole.trials.items():
        assert resumed.trials[number].seconds == pytest.approx(trial.seconds)


def test_recorded_curves_answer_for_the_trials_that_they_were(tmp_path: Path) -> None:
    """The same proposals under another rule: every trial is a beginning of what was recorded."""
    recorded = simulate(sweep_of(SWEEP, *FULL), tmp_path / "recorded.jsonl")
    sweep = sweep_of(SWEEP, *FULL, "early_stopping.rule=forecast")
    with Simulation(sweep, tmp_path / "again.jsonl", Recorded(recorded), rungs_of(sweep), slots=2) as simulation:
        again = simulation.run()
    states = {trial.state for trial in again.trials.values()}
    assert states == {"complete", "stopped"}
    for number, trial in again.trials.items():
        full = recorded.trials[number]
        assert trial.parameters == full.parameters
        assert {e: r.metrics for e, r in trial.reports.items()}.items() <= {
            e: r.metrics for e, r in full.reports.items()
        }.items()
    assert outcome(fold(tmp_path / "again.jsonl")) == outcome(again)


def test_a_trial_that_was_not_recorded_is_an_error_that_says_so(tmp_path: Path) -> None:
    recorded = simulate(sweep_of(SWEEP, *FULL, "trials=2"), tmp_path / "recorded.jsonl")
    unknown = Trial(1, 1, 0, {"optimizer.learning_rate": 0.5}, proposed=0.0)
    with pytest.raises(WrongInput, match=r"no complete trial was recorded with .*0\.5.* and seed 0"):
        next(Recorded(recorded).answers(unknown, ()))


def test_curves_are_evaluated_at_the_rungs(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, "base.evaluation.every=50%")
    trial = Trial(0, 0, 0, dict(sweep.space.base_parameters()), proposed=0.0)
    answers: Any = ClosedForm(sweep).answers(trial, rungs_of(sweep))
    assert [answer["examples"] for answer in answers] == [10_000, 30_000, 50_000, 90_000, 100_000]
