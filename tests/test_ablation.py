"""What an ablation says of records whose differences are known."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from rigsweep.sweeps.ablation import Change, as_dict, compare, holm
from rigsweep.sweeps.history import Record, Report, Trial
from rigsweep.sweeps.summary import summarise
from rigsweep.sweeps.sweep import Sweep
from rigsweep.sweeps.tables import summary_panel

from .simulator import simulate, sweep_of

ABLATION = """
trainable: surface
base:
  optimizer: {learning_rate: 1.0e-3, fused: true, betas: [0.9, 0.95]}
  budget: {examples: 100k}
  model: {width: 64}
search:
  optimizer.learning_rate: {choices: [1.0e-3, 2.0e-3]}
  optimizer.fused: {choices: [true, false]}
  model.width: {choices: [64, 96, 128]}
searcher: ablation
repeats: 3
"""
BASE = {"optimizer.learning_rate": 1e-3, "optimizer.fused": True, "model.width": 64}
CHANGES = [{}, {"optimizer.learning_rate": 2e-3}, {"optimizer.fused": False}, {"model.width": 96}, {"model.width": 128}]


def ablation(**settings: Any) -> Sweep:
    return sweep_of(ABLATION, *(f"{key}={value}" for key, value in settings.items()))


def record_of(
    values: Any, repeats: int, *, speed: Any = None, memory: Any = None, seconds: Any = None, states: Any = ()
) -> Record:
    """A record of values[group][repeat]; None is a trial that does not exist, or another state in `states`."""
    record = Record()
    for group, row in enumerate(values):
        for repeat, value in enumerate(row):
            number = group * repeats + repeat
            state = dict(states).get((group, repeat), "complete" if value is not None else None)
            if state is None:
                continue
            trial = Trial(number, group, repeat, BASE | CHANGES[group], proposed=0.0, state=state, value=value)
            trial.seconds = seconds[group] if seconds else 10.0
            for k in range(3):
                metrics = {"validation/loss": value or 0.0}
                if speed:
                    # The first stretch has the compiler in it.
                    metrics["speed/examples_per_second"] = speed[group] * (0.1 if k == 0 else 1.0)
                if memory:
                    metrics["memory/peak_bytes"] = memory[group] + 1e9 * k  # evaluations need more
                trial.reports[k] = Report(k, 3, 0.0, 0.0, metrics, 0.0)
            record.trials[number] = trial
    return record


def test_each_change_is_told_from_its_parameters_and_compared_by_seed() -> None:
    sweep = ablation()
    values = [[3.0, 3.2, 3.4], [2.9, 3.12, 3.29], [3.01, 3.19, 3.4], [3.5, 3.71, 3.9], [2.0, 2.2, 2.41]]
    found = compare(sweep, record_of(values, 3))
    assert [(c.group, c.key, c.before, c.after) for c in found] == [
        (1, "optimizer.learning_rate", 1e-3, 2e-3),
        (2, "optimizer.fused", True, False),
        (3, "model.width", 64, 96),
        (4, "model.width", 64, 128),
    ]
    assert [c.what for c in found][1:3] == ["optimizer.fused: true → false", "model.width: 64 → 96"]
    assert [c.verdict for c in found] == ["better", "tie", "worse", "better"]
    for change, row in zip(found, values[1:], strict=True):
        told = stats.ttest_rel(row, values[0])
        interval = told.confidence_interval(0.95)
        assert change.seeds == 3 and change.reason == ""
        assert change.difference == pytest.approx(np.mean(row) - np.mean(values[0]))
        assert (change.base, change.value) == (pytest.approx(3.2), pytest.approx(np.mean(row)))
        assert change.interval == pytest.approx((interval.low, interval.high))
        assert change.p_value is not None and change.p_value >= told.pvalue * (1 - 1e-9)


def test_seeds_are_paired_so_that_what_they_share_does_not_count() -> None:
    # Seeds differ by far more than the change does.
    found = compare(ablation(), record_of([[1.0, 5.0, 9.0], [0.99, 4.99, 8.991]], 3))
    assert (found[0].verdict, found[0].difference_text) == ("better", "-0.0097 ± 0.0014")


def test_where_more_is_better_the_verdicts_turn() -> None:
    text = ABLATION.replace("searcher:", "objective: {metric: validation/accuracy}\nsearcher:")
    found = compare(sweep_of(text), record_of([[0.5, 0.52, 0.51], [0.6, 0.621, 0.61], [0.4, 0.421, 0.41]], 3))
    assert [change.verdict for change in found] == ["better", "worse"]


def test_one_seed_has_a_difference_and_no_verdict() -> None:
    found = compare(ablation(repeats=1), record_of([[3.0], [2.9]], 1))
    assert (found[0].difference, found[0].interval, found[0].p_value) == (pytest.approx(-0.1), None, None)
    assert (found[0].verdict, found[0].outcome, found[0].difference_text) == (None, "one seed", "-0.1")


def test_equal_values_are_a_tie_and_rounding_is_no_difference() -> None:
    base = [3.0, 3.2, 3.4]
    found = compare(ablation(), record_of([base, base, [value + 2e-6 for value in base]], 3))
    assert [(change.verdict, change.p_value) for change in found] == [("tie", 1.0), ("tie", found[1].p_value)]
    assert found[0].difference_text == "0"
    steady = compare(ablation(), record_of([[3.0, 3.0, 3.0], [2.5, 2.5, 2.5]], 3))
    assert (steady[0].verdict, steady[0].interval) == ("better", (-0.5, -0.5))


def test_trials_that_broke_take_the_verdict_but_not_the_figures() -> None:
    states = {(1, 2): "diverged", (2, 0): "out_of_memory", (2, 1): "out_of_memory", (2, 2): "failed"}
    found = compare(
        ablation(), record_of([[3.0, 3.2, 3.4], [2.0, 2.2, None], [None, None, None]], 3, states=states.items())
    )
    assert (found[0].verdict, found[0].outcome, found[0].seeds) == (None, "1 of 3 diverged", 2)
    assert found[0].difference == pytest.approx(-1) and found[0].interval is not None
    assert (found[1].verdict, found[1].outcome) == (None, "2 of 3 out of memory, 1 of 3 failed")
    assert (found[1].difference, found[1].speed, found[1].difference_text) == (None, None, "")


def test_a_base_that_broke_is_named() -> None:
    states = {(0, k): "failed" for k in range(3)}
    found = compare(ablation(), record_of([[None] * 3, [3.0, 3.2, 3.4]], 3, states=states.items()))
    assert (found[0].verdict, found[0].outcome) == (None, "the base: 3 of 3 failed")
    states = {(0, 1): "failed"}
    found = compare(ablation(), record_of([[3.0, None, 3.4], [2.0, 2.2, 2.41]], 3, states=states.items()))
    assert (found[0].outcome, found[0].seeds) == ("better (2 of 3 seeds)", 2)


def test_an_ablation_that_is_not_over_gives_what_there_is() -> None:
    sweep = ablation()
    assert compare(sweep, Record()) == []
    assert compare(sweep, record_of([[3.0, 3.2, 3.4]], 3)) == []
    values = [[3.0, 3.2, 3.4], [2.9, 3.1, None], [3.01, None, None], [None, None, None]]
    states = {(1, 2): "running", (2, 1): "interrupted", (3, 0): "proposed"}
    found = compare(sweep, record_of(values, 3, states=states.items()))
    assert [change.outcome for change in found] == ["better (2 of 3 seeds)", "1 of 3 seeds", "0 of 3 seeds"]
    assert [change.difference is None for change in found] == [False, False, True]


def test_a_change_that_takes_a_condition_away_is_that_change() -> None:
    text = ABLATION.replace("model.width: {", "model.width: {when: {optimizer.fused: true}, ")
    record = record_of([[3.0, 3.2, 3.4], [3.0, 3.2, 3.4], [3.1, 3.3, 3.5]], 3)
    for trial in record.groups()[2]:
        del trial.parameters["model.width"]
    assert compare(sweep_of(text), record)[1].what == "optimizer.fused: true → false"


def test_speed_memory_and_time_are_ratios_to_the_base() -> None:
    record = record_of(
        [[3.0, 3.2, 3.4], [3.0, 3.2, 3.4]], 3, speed=[1000, 1900], memory=[8e9, 5e9], seconds=[60.0, 33.0]
    )
    change = compare(ablation(), record)[0]
    # The compiler's first stretch is not the speed; evaluations are not the memory of training.
    assert (change.speed, change.memory, change.card_time) == (1.9, 0.625, 0.55)
    plain = compare(ablation(), record_of([[3.0, 3.2, 3.4], [3.0, 3.2, 3.4]], 3))[0]
    assert (plain.speed, plain.memory, plain.card_time) == (None, None, 1.0)


def test_holm_is_that_of_its_paper() -> None:
    # Worked by hand: 4 × 0.01; then 3 × 0.02, 2 × 0.04 and 0.03, none below the one before it.
    assert holm({1: 0.02, 2: 0.01, 3: 0.04, 4: 0.03}, 4) == {2: 0.04, 1: 0.06, 4: 0.06, 3: 0.06}
    assert holm({1: 0.4, 2: 0.01}, 5) == {2: pytest.approx(0.05), 1: 1.0}
    assert holm({}, 5) == {}


def test_what_stands_out_alone_but_not_among_many_is_unclear() -> None:
    rows = [[3.0, 3.2, 3.4], [2.9, 3.13, 3.29]]
    only = ABLATION[: ABLATION.index("  optimizer.fused: {")] + "searcher: ablation\nrepeats: 3"
    alone = compare(sweep_of(only), record_of(rows, 3))[0]
    more = "[64, 96, 128, 160, 192, 224, 256]"
    among = compare(sweep_of(ABLATION.replace("[64, 96, 128]", more)), record_of(rows, 3))[0]
    assert alone.interval == among.interval and alone.p_value is not None
    assert among.p_value == pytest.approx(8 * alone.p_value)
    assert (alone.verdict, among.verdict) == ("better", "unclear")
    assert among.outcome == "unclear (add seeds)"


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_hold_in_95_of_100_and_false_verdicts_come_in_5_of_100_ablations(seeds: int) -> None:
    sweep, draw, ablations = ablation(repeats=seeds), np.random.default_rng(0), 1000
    holds, false, truth = 0, 0, [0.0, 0.0, 0.0, 0.05]
    for _ in range(ablations):
        shared = draw.normal(3, 0.2, seeds)
        rows = [shared + draw.normal(0, 0.01, seeds), *(shared + t + draw.normal(0, 0.01, seeds) for t in truth)]
        found = compare(sweep, record_of(np.array(rows).tolist(), seeds))
        holds += sum(c.interval[0] <= t <= c.interval[1] for c, t in zip(found, truth, strict=True) if c.interval)
        false += any(c.verdict in ("better", "worse") for c in found[:3])
        assert found[3].verdict != "better"
    # Two standard errors of a share of 5% are 0.7% over 4,000 intervals, 1.4% over 1,000 ablations.
    assert holds / (ablations * len(truth)) == pytest.approx(0.95, abs=0.008)
    # The changes share the base, so its noise makes them err together: rather fewer than 5%.
    assert 0.02 < false / ablations < 0.065


def test_without_holm_a_false_verdict_would_come_three_times_as_often() -> None:
    draw, alone, together = np.random.default_rng(1), 0, 0
    for _ in range(500):
        found = compare(ablation(), record_of(draw.normal(3, 0.01, (5, 3)).tolist(), 3))
        alone += any(change.verdict != "tie" for change in found)
        together += any(change.verdict in ("better", "worse") for change in found)
    assert alone > 2 * together and alone / 500 > 0.1


def test_differences_read_well() -> None:
    def told(difference: float, half: float | None) -> str:
        interval = None if half is None else (difference - half, difference + half)
        return Change(1, "x", 0, 1, 3, difference=difference, interval=interval).difference_text

    assert told(-0.012345, 0.0045) == "-0.0123 ± 0.0045"
    assert told(12.34, 3.2) == "+12.3 ± 3.2"
    assert told(1234.0, 321.0) == "+1234 ± 321"
    assert told(1.5e-8, 2.5e-8) == "+1.5e-08 ± 2e-08"
    assert told(0.25, None) == "+0.25"


def test_the_searchers_own_trials_are_understood(tmp_path: Path) -> None:
    sweep = sweep_of(ABLATION, "base.model.noise=0.1")
    found = compare(sweep, simulate(sweep, tmp_path / "history.jsonl", slots=2))
    assert [change.what for change in found] == [
        "optimizer.learning_rate: 0.001 → 0.002",
        "optimizer.fused: true → false",
        "model.width: 64 → 96",
        "model.width: 64 → 128",
    ]
    # The noise is the seed's, so in pairs it is gone.
    assert [(change.verdict, change.seeds) for change in found] == [("better", 3), ("tie", 3), *[("better", 3)] * 2]
    cut_short = simulate(sweep, tmp_path / "short.jsonl", slots=2, most_events=30)
    assert {change.seeds for change in compare(sweep, cut_short)} != {3}


def test_the_summary_has_it_only_where_it_is_one() -> None:
    record = record_of([[3.0, 3.2, 3.4], [2.9, 3.1, None]], 3)
    told = summarise(ablation(), record)
    assert told["ablation"] == [as_dict(change) for change in compare(ablation(), record)]
    assert told["ablation"][0]["key"] == "optimizer.learning_rate"
    assert isinstance(told["ablation"][0]["interval"], list)
    assert "ablation" not in summarise(sweep_of(), record)


def test_a_terminal_of_80_columns_shows_all_of_it() -> None:
    values = [[3.0, 3.2, 3.4], [2.9, 3.13, 3.29], [3.01, 3.19, 3.4], [None, 3.71, 3.9], [2.0, 2.2, 2.41]]
    states = {(3, 0): "out_of_memory"}
    record = record_of(values, 3, speed=[9, 8, 7, 6, 5], memory=[5, 5, 4, 3, 9], states=states.items())
    sweep = ablation()
    console = Console(width=80, no_color=True, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(summary_panel(sweep, record, summarise(sweep, record)))
    lines = capture.get().splitlines()
    assert all(len(line) <= 80 for line in lines)
    words = " ".join(capture.get().split())
    for expected in (
        "learning_rate: 0.001 →",
        "fused: true → false",
        "0.78×",
        "1.80×",
        "better",
        "tie",
        "1 of 3 out",
        "95% interval",
    ):
        assert expected in words, capture.get()
    assert "…" not in words
