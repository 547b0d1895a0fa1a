"""What another rule would have saved: the replay of recorded curves, and `rigsweep simulate`."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rigsweep.sweeps import folders, saving
from rigsweep.sweeps.cli import app
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import Report, Trial
from rigsweep.sweeps.simulation import Recorded, Simulation
from rigsweep.sweeps.sweep import Sweep, load

from .simulator import SWEEP, simulate, sweep_of

FULL = ("early_stopping.rule=none", "searcher=random", "base.evaluation.every=10%")
RULES = ("asha", "forecast", "median")
sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with a sweep that recorded all of its trials in full."""
    place = tmp_path_factory.mktemp("runs")
    sweep = sweep_of(SWEEP, *FULL, name="full")
    (place / "full").mkdir()
    folders.write_settings(sweep, place / "full")
    simulate(sweep, place / "full" / "history.jsonl", slots=2)
    return place


@pytest.fixture(scope="module")
def sweep(runs: Path) -> Sweep:
    return folders.read_sweep(runs / "full")


@pytest.fixture(scope="module")
def curves(runs: Path, sweep: Sweep) -> list[saving.Curve]:
    return saving.complete_curves(sweep, folders.record_of(runs / "full"))


def hand_made(*finals: float) -> list[saving.Curve]:
    """Straight lines from 10 to their ends in ten evaluations of a second each."""
    return [
        saving.Curve(
            Trial(number, number, 0, {"model.width": 64}, proposed=0.0),
            tuple(
                Report(k * 10_000, 100_000, 0.0, float(k), {"validation/loss": 10 + (final - 10) * k / 10}, 0.0)
                for k in range(1, 11)
            ),
        )
        for number, final in enumerate(finals)
    ]


def test_a_stopped_trial_costs_what_it_took_to_there(sweep: Sweep) -> None:
    asha = saving.with_stopping(sweep, rule="asha")
    lines = hand_made(5.0, 6.0, 4.0)
    done = saving.replay(asha, saving.rungs_for(asha, lines), lines, slots=1)
    assert (done.seconds, done.stopped) == (10 + 1 + 10, {1})


def test_what_runs_beside_the_base_is_forecast_only_once_the_base_is_complete(sweep: Sweep) -> None:
    forecast = saving.with_stopping(sweep, rule="forecast")
    lines = hand_made(5.0, 40.0, 40.0, 4.0)
    rungs = saving.rungs_for(forecast, lines)
    done = [saving.replay(forecast, rungs, lines, slots) for slots in (1, 2, 4)]
    assert [one.stopped for one in done] == [{1, 2}, {2}, set()]
    assert done[0].seconds == 10 + 1 + 1 + 10
    assert done[0].seconds < done[1].seconds < done[2].seconds == 40


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("slots", [1, 2])
def test_the_replay_decides_as_the_whole_machinery_does(
    tmp_path: Path, runs: Path, sweep: Sweep, curves: list[saving.Curve], rule: str, slots: int
) -> None:
    asked = saving.with_stopping(sweep, rule=rule)
    rungs = saving.rungs_for(asked, curves)
    recorded = Recorded(folders.record_of(runs / "full"))
    with Simulation(asked, tmp_path / "history.jsonl", recorded, rungs, slots=slots) as simulation:
        record = simulation.run()
    done = saving.replay(asked, rungs, curves, slots)
    assert done.stopped == {number for number, trial in record.trials.items() if trial.state == "stopped"}
    assert done.seconds == pytest.approx(sum(trial.seconds for trial in record.trials.values()))


@pytest.mark.parametrize("rule", RULES)
def test_replaying_twice_is_the_same_spends_no_more_than_all_and_keeps_the_base(
    sweep: Sweep, curves: list[saving.Curve], rule: str
) -> None:
    asked = saving.with_stopping(sweep, rule=rule)
    rungs = saving.rungs_for(asked, curves)
    full = sum(curve.reports[-1].seconds for curve in curves)
    spent = set()
    for order in saving.orders(curves, 30, seed=1):
        for slots in (1, 2, 5):
            done = saving.replay(asked, rungs, order, slots)
            assert done == saving.replay(asked, rungs, order, slots)
            assert 0 < done.seconds <= full
            assert 0 not in done.stopped
            assert len(done.stopped) < len(curves)
        spent.add(done.seconds)
    assert len(spent) > 5, "the order matters"


def test_orders_are_a_function_of_the_seed_with_the_base_first(curves: list[saving.Curve]) -> None:
    def numbers(amount: int, seed: int) -> Sequence[Sequence[int]]:
        return [[curve.trial.number for curve in order] for order in saving.orders(curves, amount, seed)]

    assert numbers(50, 0) == numbers(100, 0)[:50]
    assert numbers(5, 0) != numbers(5, 1)
    assert all(order[0] == 0 and sorted(order) == list(range(16)) for order in numbers(50, 0))
    assert len({tuple(order) for order in numbers(50, 0)}) == 50


def test_a_rule_that_stops_the_best_is_told_of(sweep: Sweep) -> None:
    # The best is second at the first rung.
    lines = hand_made(5.0, 6.0, 4.0)
    reports = [
        r if k else Report(10_000, 100_000, 0.0, 1.0, {"validation/loss": 11.0}, 0.0)
        for k, r in enumerate(lines[2].reports)
    ]
    lines[2] = saving.Curve(lines[2].trial, tuple(reports))
    told = saving.save(saving.with_stopping(sweep, rule="asha"), lines, saving.orders(lines, 20, 0), slots=1)
    assert (told.best_kept, told.close_kept, told.stopped) == (0.0, 0.0, 2)
    assert told.spent == pytest.approx((12 / 30, 12 / 30, 12 / 30))
    close = [*lines, *hand_made(9, 9, 9, 4.03)[3:]]
    told = saving.save(saving.with_stopping(sweep, rule="asha"), close, saving.orders(close, 20, 0), slots=1)
    assert (told.best_kept, told.close_kept) == (0.0, 1.0)


def test_no_rule_keeps_everything(sweep: Sweep, curves: list[saving.Curve]) -> None:
    told = saving.save(sweep, curves, saving.orders(curves, 3, 0), slots=2)
    assert told.spent == pytest.approx((1, 1, 1))
    assert (told.best_kept, told.close_kept, told.stopped) == (1, 1, 0)


@pytest.mark.parametrize("slots", [1, 2])
def test_the_default_rule_saves_half_of_the_recorded_quickstart_and_keeps_its_best(slots: int) -> None:
    import bench_saving

    default = saving.with_stopping(load("quickstart"), rule=None, grace=None, chance=None, within=None)
    recorded = bench_saving.recorded_curves()
    told = saving.save(default, recorded, saving.orders(recorded, 200, 0), slots=slots)
    assert told.spent[0] <= bench_saving.SPENT
    assert told.close_kept >= bench_saving.KEPT


def test_the_default_rule_keeps_the_best_of_crossing_curves_more_often_than_asha_does() -> None:
    import bench_saving

    kept = {}
    for rule in ("forecast", "asha"):
        asked = saving.with_stopping(load("quickstart"), rule=rule, within=None)
        families = [bench_saving.crossing_curves(draw) for draw in range(6)]
        told = [saving.save(asked, own, saving.orders(own, 20, 0), slots=1) for own in families]
        kept[rule] = math.fsum(one.close_kept for one in told) / len(told)
        assert max(one.spent[0] for one in told) < 0.75
    assert kept["forecast"] > kept["asha"] + 0.2


# The command.


def simulated(runs: Path, *words: str) -> str:
    answer = CliRunner().invoke(app, ["simulate", "full", "--runs", str(runs), *words], catch_exceptions=False)
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def test_a_person_sees_the_sweeps_own_rule_first_and_then_others(runs: Path) -> None:
    lines = simulated(runs, "--orders", "20").splitlines()
    assert lines[0] == (
        "full: 16 of 16 trials are complete; they are run again in 20 random orders, 1 at a time, the base first."
    )
    assert " ".join(lines[2].split()) == "rule device time 10–90% best kept or within 1% stopped"
    own = lines[3].split()
    assert own[:3] + own[5:] == ["none", "(this", "sweep's)", "100%–100%", "100%", "100%", "0", "of", "16"]
    assert [line.split(",")[0] for line in lines[4:8]] == ["forecast", "asha", "asha", "median"]


def test_a_program_gets_the_same_numbers_for_the_same_seed(runs: Path) -> None:
    words = ("--orders", "20", "--slots", "2", "--seed", "7", "--json")
    told = json.loads(simulated(runs, *words))
    assert json.loads(simulated(runs, *words)) == told
    assert (told["trials"], told["complete"], told["orders"], told["slots"], told["seed"]) == (16, 16, 20, 2, 7)
    full = told["device_seconds_without_stopping"]
    for rule in told["rules"]:
        seconds = rule["device_seconds"]
        assert 0 < seconds["low"] <= seconds["median"] <= seconds["high"] <= full * 1.0001
        assert 0 <= rule["best_kept"] <= rule["close_kept"] <= 1


def test_rules_and_their_dials_combine(runs: Path) -> None:
    words = (
        "--stopper",
        "asha",
        "--stopper",
        "forecast",
        "--grace",
        "20%",
        "--grace",
        "30%",
        "--within",
        "model.width",
    )
    told = json.loads(simulated(runs, *words, "--orders", "5", "--json"))
    assert [(rule["rule"], rule["grace"], rule["within"]) for rule in told["rules"]] == [
        ("none", 0.1, None),
        ("asha", 0.2, "model.width"),
        ("asha", 0.3, "model.width"),
        ("forecast", 0.2, "model.width"),
        ("forecast", 0.3, "model.width"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--stopper", "forcast"), r"--stopper: .*found forcast.*did you mean forecast"),
        (("--grace", "200%"), r"--grace: .*found 200%"),
        (("--within", "model.widht"), r"--within: model.widht is not a searched key.*did you mean model.width"),
        (("--reduction", "1"), r"--reduction: .*2.*found 1"),
    ],
)
def test_a_wrong_option_is_one_line_that_says_what_is_allowed(runs: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(WrongInput, match=said) as raised:
        simulated(runs, *words)
    assert "\n" not in str(raised.value)


def test_a_sweep_with_fewer_than_three_complete_trials_is_refused(tmp_path: Path) -> None:
    few = sweep_of(SWEEP, *FULL, "trials=2", name="full")
    (tmp_path / "full").mkdir()
    folders.write_settings(few, tmp_path / "full")
    simulate(few, tmp_path / "full" / "history.jsonl")
    with pytest.raises(WrongInput, match="full: 2 of 2 trials are complete, and at least 3 are needed"):
        simulated(tmp_path)


def test_a_sweep_that_stopped_trials_says_that_they_are_left_out(tmp_path: Path) -> None:
    stopped = sweep_of(SWEEP, "early_stopping.rule=median", "searcher=random", name="full")
    (tmp_path / "full").mkdir()
    folders.write_settings(stopped, tmp_path / "full")
    simulate(stopped, tmp_path / "full" / "history.jsonl")
    said = simulated(tmp_path, "--orders", "3")
    assert "of 16 trials are complete" in said
    assert "The trials that this sweep stopped are left out" in said
