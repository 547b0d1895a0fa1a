"""Stoppers, against decisions made by hand."""

from itertools import pairwise
from pathlib import Path

import pytest

from rigsweep.sweeps.history import Report, Trial, replay
from rigsweep.sweeps.simulation import rungs_of
from rigsweep.sweeps.stoppers import STOPPERS
from rigsweep.sweeps.sweep import Sweep

from .simulator import SWEEP, simulate, sweep_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
RUNGS = (10.0, 30.0, 90.0)


class Judged:
    """A stopper and the trials that it has seen."""

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...] = RUNGS):
        self.stopper = STOPPERS[sweep.settings.early_stopping.rule](sweep, rungs)
        self.trials: dict[int, Trial] = {}

    def tell(
        self, number: int, examples: int, value: float, *, width: int = 64, group: int | None = None
    ) -> str | None:
        """A trial's evaluation; an example takes as many FLOPs as the model is wide."""
        if number not in self.trials:
            own = number if group is None else group
            self.trials[number] = Trial(number, own, 0, {"model.width": width}, proposed=0.0)
        trial = self.trials[number]
        metrics = {"validation/loss": value, "validation/accuracy": value}
        report = Report(examples, 100, float(examples * width), 0.0, metrics, 0.0)
        trial.reports[examples] = report
        return self.stopper.decide(trial, report)


def judged(*overrides: str) -> Judged:
    return Judged(sweep_of(SWEEP, *overrides))


def test_a_trial_goes_on_while_it_is_among_the_best_third_that_have_reached_the_rung() -> None:
    it = judged()
    assert it.tell(0, 10, 2.0) is None
    assert it.tell(1, 10, 1.9) is None, "best of 2"
    assert it.tell(2, 10, 1.95) == "place 2 of 3 at 10 examples: validation/loss 1.95, the best has 1.9"
    assert it.tell(3, 10, 1.8) is None, "best of 4"
    assert it.tell(4, 10, 1.85) is not None, "second of 5, of which one goes on"
    assert it.tell(5, 10, 1.85) is not None, "third of 6"
    assert it.tell(6, 10, 1.81) is None, "second of 7, of which two go on"
    assert it.tell(7, 10, 1.82) is not None, "third of 8"
    assert it.tell(8, 10, 1.815) is None, "third of 9, of which three go on"


def test_the_base_is_only_compared_with() -> None:
    it = judged()
    assert it.tell(1, 10, 1.0) is None
    assert it.tell(0, 10, 5.0) is None
    assert it.tell(2, 10, 6.0) is not None
    it = judged("repeats=2")
    it.tell(2, 10, 1.0, group=1)
    assert it.tell(0, 10, 5.0, group=0) is None
    assert it.tell(1, 10, 5.0, group=0) is None


def test_nothing_is_decided_between_rungs() -> None:
    it = judged()
    it.tell(0, 10, 1.0)
    assert it.tell(1, 9, 9.0) is None
    assert it.tell(1, 12, 9.0) is not None, "the first evaluation at or past the rung"
    it.tell(2, 11, 0.5)
    assert it.tell(2, 20, 9.0) is None
    assert it.tell(2, 29, 9.0) is None
    it.tell(0, 30, 1.0)
    assert it.tell(2, 31, 9.0) is not None


def test_an_evaluation_past_several_rungs_is_compared_at_the_last_and_counts_at_all() -> None:
    it = judged()
    it.tell(0, 10, 1.0)
    it.tell(0, 30, 0.9)
    assert it.tell(1, 40, 0.8) is None
    assert it.tell(2, 10, 0.85) is not None, "0.8 counts at the first rung too"


def test_trials_are_compared_within_their_group_only() -> None:
    it = judged("early_stopping.within=model.width")
    it.tell(0, 10, 1.0, width=64)
    assert it.tell(1, 10, 3.0, width=128) is None
    reason = it.tell(2, 10, 3.5, width=128)
    assert reason == "place 2 of 2 with model.width = 128 at 10 examples: validation/loss 3.5, the best has 3"


def test_a_group_may_be_of_lists() -> None:
    text = SWEEP.replace("model.width:", "optimizer.betas: {choices: [[0.9, 0.95], [0.9, 0.999]]}\n  model.width:")
    sweep = sweep_of(text, "early_stopping.within=optimizer.betas")
    assert sweep.group_of({"optimizer.betas": [0.9, 0.95]}) == "[0.9, 0.95]"
    assert sweep.group_of({}) is None
    it = Judged(sweep)
    trial = Trial(1, 1, 0, {"optimizer.betas": [0.9, 0.95]}, proposed=0.0)
    assert it.stopper.decide(trial, Report(10, 100, 0, 0, {"validation/loss": 1.0}, 0)) is None


def test_by_flops_a_wide_model_is_compared_earlier() -> None:
    it = Judged(sweep_of(SWEEP, "early_stopping.by=flops"), rungs=(1000.0, 3000.0))
    it.tell(0, 10, 9.0, width=64)  # 640 FLOPs
    it.tell(0, 16, 1.0, width=64)  # 1,024
    reason = it.tell(1, 8, 2.0, width=128)  # 1,024
    assert reason == "place 2 of 2 at 1e+03 FLOPs: validation/loss 2, the best has 1"


def test_more_is_better_where_the_sweep_maximises() -> None:
    it = judged("objective={metric: validation/accuracy, goal: maximize}")
    it.tell(0, 10, 0.5)
    assert it.tell(1, 10, 0.4) == "place 2 of 2 at 10 examples: validation/accuracy 0.4, the best has 0.5"
    assert it.tell(2, 10, 0.6) is None


def test_of_equal_trials_the_earlier_goes_on() -> None:
    it = judged()
    it.tell(0, 10, 2.0)
    it.tell(2, 10, 1.0)
    assert it.tell(3, 10, 1.0) is not None
    assert it.tell(1, 10, 1.0) is None


def test_a_repeated_report_counts_once_with_its_last_value() -> None:
    it = judged()
    it.tell(0, 10, 2.0)
    assert it.tell(1, 10, 1.0) is None
    it.tell(2, 10, 0.5)
    assert it.tell(1, 10, 1.5) is None, "what was decided stays, though it is no longer the best"
    assert it.tell(3, 10, 1.2) == "place 2 of 4 at 10 examples: validation/loss 1.2, the best has 0.5"


def test_a_higher_reduction_keeps_fewer_and_none_keeps_all() -> None:
    def kept(*overrides: str) -> int:
        it = judged(*overrides)
        return sum(it.tell(number, 10, float(number)) is None for number in range(1, 13))

    assert kept("early_stopping.reduction=2") >= kept() >= kept("early_stopping.reduction=6")
    assert kept("early_stopping.rule=none") == 12


@pytest.mark.parametrize("by", ["examples", "flops"])
def test_replaying_the_history_gives_the_verdicts_that_were_given(tmp_path: Path, by: str) -> None:
    sweep = sweep_of(SWEEP, f"early_stopping.by={by}", "early_stopping.within=model.width", "trials=30")
    simulate(sweep, tmp_path / "history.jsonl", slots=3)
    stopper = STOPPERS["asha"](sweep, rungs_of(sweep))
    verdicts: dict[int, str | None] = {}
    stopped = 0
    for event, record in replay(tmp_path / "history.jsonl"):
        if event["event"] == "report":
            trial = record.trials[event["trial"]]
            verdicts[trial.number] = stopper.decide(trial, trial.reports[event["examples"]])
        elif event["event"] == "ended":
            assert verdicts[event["trial"]] == (event["reason"] if event["state"] == "stopped" else None)
            stopped += event["state"] == "stopped"
    assert stopped > 5


@pytest.mark.parametrize("by", ["examples", "flops"])
def test_every_trial_is_evaluated_at_every_rung_it_passes(tmp_path: Path, by: str) -> None:
    sweep = sweep_of(SWEEP, f"early_stopping.by={by}")
    record = simulate(sweep, tmp_path / "history.jsonl")
    rungs = rungs_of(sweep)
    assert all(later / earlier == pytest.approx(3) for earlier, later in pairwise(rungs))
    for trial in record.trials.values():
        at = sorted(report.flops if by == "flops" else report.examples for report in trial.reports.values())
        batch = 1000 * (6 * trial.parameters["model.width"] ** 2 if by == "flops" else 1)
        for rung in rungs:
            if rung <= at[-1]:
                first = next(amount for amount in at if amount >= rung * (1 - 1e-9))
                assert first < rung + batch
