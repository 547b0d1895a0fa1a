"""Stoppers, against decisions made by hand."""

import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import Report, Trial, replay
from rigsweep.sweeps.settings import EarlyStopping
from rigsweep.sweeps.simulation import rungs_of
from rigsweep.sweeps.stoppers import STOPPERS, _Ranking
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


# The median rule.


def test_a_trial_whose_best_is_worse_than_the_median_of_the_others_averages_is_stopped() -> None:
    it = judged("early_stopping.rule=median")
    assert it.tell(0, 10, 4.0) is None
    assert it.tell(0, 30, 2.0) is None, "its average there is 3"
    assert it.tell(1, 10, 3.5) is None
    assert it.tell(1, 30, 3.0) is None, "its best is as good as the average of the base"
    assert it.tell(2, 10, 3.7) is None, "the median of 4 and 3.5 is 3.75"
    assert it.tell(2, 30, 3.2) == (
        "its best so far, 3.2, is worse than the median 3.125 of the averages of 2 others at 30 examples: "
        "validation/loss 3.2"
    )


def test_the_median_takes_the_best_so_far_not_the_last() -> None:
    it = judged("early_stopping.rule=median")
    it.tell(0, 10, 4.0)
    it.tell(0, 30, 4.0)
    assert it.tell(1, 20, 1.0) is None, "between rungs; at the first it is better"
    assert it.tell(1, 30, 9.0) is None
    assert it.tell(2, 10, 9.0) is not None


def test_the_median_leaves_its_own_trial_out_and_keeps_to_the_group() -> None:
    it = judged("early_stopping.rule=median", "early_stopping.within=model.width")
    for number, value in enumerate((1.0, 2.0, 3.0)):
        it.tell(number, 10, value, width=64)
    assert it.tell(3, 10, 9.0, width=128) is None
    reason = it.tell(4, 10, 9.5, width=128)
    assert reason is not None
    assert "of 1 other with model.width = 128 at 10 examples" in reason


@pytest.mark.parametrize("count", range(1, 8))
def test_the_median_without_one_is_that_of_the_others(count: int) -> None:
    generator = random.Random(count)
    values = [float(generator.randrange(4)) for _ in range(count + 1)]
    ranking = _Ranking()
    for number, value in enumerate(values):
        ranking.put(number, 7.0)
        ranking.put(number, value)
    for number in range(count + 1):
        others = values[:number] + values[number + 1 :]
        assert ranking.median_without(number) == statistics.median(others)


# The forecast.


def curve(it: Judged, number: int, values: tuple[float, ...], **more: Any) -> str | None:
    """A trial's values at 10, 30, 90 and 100 examples, up to where it is stopped; the reason of that."""
    for examples, value in zip((10, 30, 90, 100), values, strict=True):
        if reason := it.tell(number, examples, value, **more):
            return reason
    return None


def test_a_trial_that_cannot_catch_up_is_stopped_with_its_chance() -> None:
    it = judged("early_stopping.rule=forecast")
    assert curve(it, 0, (5.0, 4.0, 3.1, 3.0)) is None
    assert it.tell(1, 10, 5.5) is None, "the base gained 2, and a quarter more or less would not surprise"
    assert it.tell(1, 30, 4.9) == (
        "0.5% chance to beat trial 0, which ended at 3: at 30 examples: validation/loss 4.9, "
        "and 1 complete trial gained 1 ± 0.35 from there"
    )
    assert it.tell(2, 10, 8.0) is not None
    assert it.tell(3, 10, 4.0) is None


def test_nothing_is_stopped_until_a_trial_of_the_group_is_complete() -> None:
    it = judged("early_stopping.rule=forecast", "early_stopping.within=model.width")
    assert it.tell(1, 10, 99.0) is None
    curve(it, 0, (5.0, 4.0, 3.1, 3.0), width=64)
    assert it.tell(2, 10, 99.0, width=64) is not None
    assert curve(it, 3, (9.0, 9.0, 8.5, 8.0), width=128) is None
    assert it.tell(4, 10, 9.0, width=128) is None
    reason = it.tell(5, 10, 99.0, width=128)
    assert reason is not None
    assert "to beat trial 3 with model.width = 128, which ended at 8:" in reason


def test_late_bloomers_teach_the_forecast_to_wait() -> None:
    it = judged("early_stopping.rule=forecast")
    curve(it, 0, (5.0, 4.0, 3.1, 3.0))
    assert curve(it, 1, (5.2, 3.5, 2.1, 2.0)) is None, "it gained 3.2 from the first rung, the base 2"
    reason = judged_alone(5.6)
    assert reason is not None, "against the base alone"
    assert it.tell(2, 10, 5.6) is None, "though the best is better by now"


def judged_alone(value: float) -> str | None:
    it = judged("early_stopping.rule=forecast", "early_stopping.chance=30%")
    curve(it, 0, (5.0, 4.0, 3.1, 3.0))
    return it.tell(1, 10, value)


def test_a_smaller_chance_lets_more_trials_go_on() -> None:
    def stopped(chance: str) -> int:
        it = judged("early_stopping.rule=forecast", f"early_stopping.chance={chance}")
        curve(it, 0, (5.0, 4.0, 3.1, 3.0))
        return sum(it.tell(number, 10, 4.5 + number / 10) is not None for number in range(1, 30))

    assert 0 < stopped("1%") < stopped("10%") < stopped("40%")


def test_the_forecast_maximises_where_the_sweep_does() -> None:
    it = judged("early_stopping.rule=forecast", "objective={metric: validation/accuracy, goal: maximize}")
    curve(it, 0, (0.2, 0.4, 0.59, 0.6))
    assert it.tell(1, 10, 0.3) is None
    reason = it.tell(1, 90, 0.3)
    assert reason is not None
    assert reason.startswith("under 0.1% chance to beat trial 0, which ended at 0.6: at 90 examples")


def test_curves_that_gain_nothing_are_forecast_to_stay() -> None:
    it = judged("early_stopping.rule=forecast")
    curve(it, 0, (3.0, 3.0, 3.0, 3.0))
    assert it.tell(1, 10, 3.1) is not None
    assert it.tell(2, 10, 2.9) is None


def test_a_final_evaluation_that_is_repeated_teaches_nothing_new() -> None:
    one, two = (judged("early_stopping.rule=forecast") for _ in range(2))
    for it in (one, two):
        curve(it, 0, (5.0, 4.0, 3.1, 3.0))
    two.tell(0, 90, 3.1)
    two.tell(0, 100, 3.0)
    assert one.tell(1, 10, 8.0) == two.tell(1, 10, 8.0) is not None


# What holds for every rule.

RULES = sorted(set(STOPPERS) - {"none"})


def test_every_rule_that_a_file_may_name_is_there() -> None:
    allowed = EarlyStopping.model_json_schema()["properties"]["rule"]["enum"]
    assert sorted(allowed) == sorted(STOPPERS)


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_stops_the_base_or_its_repeats_or_a_trial_at_its_end(rule: str) -> None:
    it = judged(f"early_stopping.rule={rule}", "repeats=2")
    curve(it, 2, (1.0, 1.0, 1.0, 1.0), group=1)
    assert curve(it, 0, (9.0, 9.0, 9.0, 9.0), group=0) is None
    assert curve(it, 1, (9.0, 9.0, 9.0, 9.0), group=0) is None
    assert it.tell(4, 10, 99.0, group=2) is not None
    it.tell(6, 10, 0.5, group=3)
    it.tell(6, 90, 0.5, group=3)
    assert it.tell(6, 100, 9.0, group=3) is None


@pytest.mark.parametrize("rule", RULES)
def test_no_rule_decides_again_at_a_report_that_is_repeated_after_a_resume(rule: str) -> None:
    it = judged(f"early_stopping.rule={rule}")
    curve(it, 0, (5.0, 4.0, 3.1, 3.0))
    assert it.tell(1, 10, 1.0) is None
    assert it.tell(1, 10, 99.0) is None
    assert it.tell(1, 30, 99.0) is not None


def test_rungs_are_a_ladder_for_asha_and_every_evaluation_for_the_others() -> None:
    def rungs(*overrides: str) -> list[float]:
        return [round(rung, 6) for rung in sweep_of(SWEEP, *overrides).rungs([200.0, 100.0])]

    assert rungs() == [10, 30, 90]
    for rule in ("median", "forecast"):
        assert rungs(f"early_stopping.rule={rule}") == [10, 25, 50, 75]
        assert rungs(f"early_stopping.rule={rule}", "base.evaluation.every=10%") == [10, 20, 30, 40, 50, 60, 70, 80, 90]
        assert rungs(f"early_stopping.rule={rule}", "base.evaluation.every=100%") == [10]
        assert rungs(f"early_stopping.rule={rule}", "early_stopping.grace=25%") == [25, 50, 75]


def test_a_rule_that_is_misspelt_is_answered_with_the_nearest() -> None:
    with pytest.raises(WrongInput, match=r"early_stopping.rule: .*forecast.*found forcast.*did you mean forecast"):
        sweep_of(SWEEP, "early_stopping.rule=forcast")


@pytest.mark.parametrize("by", ["examples", "flops"])
@pytest.mark.parametrize("rule", RULES)
def test_replaying_the_history_gives_the_verdicts_that_were_given(tmp_path: Path, rule: str, by: str) -> None:
    sweep = sweep_of(
        SWEEP,
        f"early_stopping.rule={rule}",
        f"early_stopping.by={by}",
        "early_stopping.within=model.width",
        "trials=30",
        "searcher=random",
    )
    simulate(sweep, tmp_path / "history.jsonl", slots=3)
    stopper = STOPPERS[rule](sweep, rungs_of(sweep))
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
