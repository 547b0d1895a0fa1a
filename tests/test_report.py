"""The report: what it tells, that it is rebuilt with every other view, and how it looks in a real browser."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import charts, files, folders, report, summary, views
from rigsweep.sweeps.findings import Spell, edges, importances, spells, troubles
from rigsweep.sweeps.history import History
from rigsweep.sweeps.report import duration, is_share, percent, span, tell, value
from rigsweep.sweeps.sweep import READY, check, load

from .simulator import SWEEP, Fault, no_fault, simulate, sweep_of
from .test_summary import record_of, trial_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

NAMES = ["语料/中文小说/红楼梦-第一百二十回-校勘本.parquet", 'a "quoted" <b>name</b> & $x^2$ /with/slashes', "#000001"]
WITHIN = "early_stopping.within=model.width"
ABLATION = f"""{SWEEP[: SWEEP.index("search:")]}
search:
  model.width: {{choices: [64, 96, 128]}}
searcher: ablation
"""


def made(runs: Path, name: str, *overrides: str, text: str = SWEEP, fault: Fault = no_fault) -> Path:
    """The folder of a simulated sweep, as its process leaves it but for the views."""
    sweep = sweep_of(text, *overrides, name=name)
    folder = runs / name
    folder.mkdir(parents=True)
    folders.write_settings(sweep, folder)
    for number in simulate(sweep, folder / "history.jsonl", slots=2, fault=fault).trials:
        samples = folder / "trials" / str(number) / "samples"
        samples.mkdir(parents=True)
        (samples / "000000050000-sample.txt").write_text("an early one")
        (samples / "000000100000-sample.txt").write_text(f"<script>alert({number})</script>\n你好 {'x' * 300}")
    return folder


def configurations(sweep: Any, record: Any) -> list[summary.Configuration]:
    return summary.configurations(sweep, list(record.trials.values()))


def told_of(folder: Path, *, running: bool = False) -> dict[str, Any]:
    sweep, record = folders.read_sweep(folder), folders.record_of(folder)
    return tell(sweep, record, folder, views.told_of(sweep, folder, record, running=running))


def page_of(folder: Path) -> str:
    return report.render(told_of(folder))


def some(training: Any, share: float, attempt: int) -> str | None:
    """Faults of three kinds, by the learning rate."""
    rate = training.optimizer.learning_rate
    kinds = {0: "diverged", 1: "out_of_memory", 2: "failed"}
    return kinds[int(rate * 1e6) % 3] if rate > 1.5e-2 or rate < 3e-4 else None


def named() -> str:
    """A sweep over names that a person may have given to files."""
    choices = json.dumps([None, *NAMES], ensure_ascii=False)
    return SWEEP.replace("model.width: {choices: [64, 96, 128]}", f"initial: {{choices: {choices}}}")


# What is told.


def test_the_answer_is_the_best_with_its_gain_over_the_base(tmp_path: Path) -> None:
    folder = made(tmp_path, "answer", WITHIN)
    sweep, record, told = folders.read_sweep(folder), folders.record_of(folder), told_of(folder)
    complete = [trial for trial in record.trials.values() if trial.state == "complete"]
    best, base = min(complete, key=lambda trial: trial.value or 0.0), record.trials[0]
    assert (told["best"].number, told["best"].mean) == (best.number, best.value)
    assert base.value is not None
    assert best.value is not None
    assert told["gain"].amount == pytest.approx(base.value - best.value)
    assert told["gain"].share == pytest.approx((base.value - best.value) / base.value)
    page = report.render(told)
    assert f"Best: trial {best.number}" in page
    assert value(best.value) in page
    assert f"{percent(told['gain'].share)}) " in page.replace(")</p>", ") ")
    assert sweep.settings.question in page
    assert told["saved"].stopped == sum(trial.state == "stopped" for trial in record.trials.values())


def test_the_best_configuration_is_a_file_that_trains_just_that(tmp_path: Path) -> None:
    for overrides, text in (((WITHIN,), SWEEP), (("repeats=2", "trials=5"), SWEEP), ((), named())):
        folder = made(tmp_path, f"paste{len(overrides)}{len(text)}", *overrides, text=text)
        told, sweep = told_of(folder), folders.read_sweep(folder)
        pasted = check(files.parse(told["file"], "best.yaml"), "best")
        assert not pasted.settings.search
        assert pasted.training({}) == sweep.training(told["best"].parameters)
        assert pasted.settings.objective == sweep.settings.objective


def test_the_file_of_a_derived_value_has_the_number(tmp_path: Path) -> None:
    text = SWEEP.replace("width: 64, noise", "width: '= 64000 * optimizer.learning_rate', noise")
    sweep = sweep_of(
        text.replace("  model.width: {choices: [64, 96, 128]}\n", "").replace("low: 1.0e-4", "low: 1.0e-3")
    )
    parameters = {"optimizer.learning_rate": 2e-3, "schedule.warmup": 0.01}
    pasted = check(files.parse(sweep.training_file(parameters), "best.yaml"), "best")
    assert pasted.training({}) == sweep.training(parameters)
    assert sweep.training(parameters).model_dump()["model"]["width"] == 128


def test_more_is_better_where_the_objective_is_to_maximise(tmp_path: Path) -> None:
    goal = "objective={metric: validation/accuracy, goal: maximize}"
    told = told_of(made(tmp_path, "most", goal))
    values = [t.value for t in told["trials"] if t.state == "complete"]
    assert told["best"].mean == max(values)
    assert told["gain"].amount > 0
    assert "higher than the base" in report.render(told)


def test_repeats_are_told_as_mean_and_spread() -> None:
    sweep = sweep_of(SWEEP, "repeats=2")
    trials = [
        trial_of(0, "complete", 3.0, group=0),
        trial_of(1, "complete", 4.0, group=0),
        trial_of(2, "complete", 2.0, group=1),
        trial_of(3, "complete", 2.2, group=1),
        trial_of(4, "complete", 0.5, group=2),
        trial_of(5, "failed", group=2),
        trial_of(6, "complete", 0.1, group=3),
    ]
    found = configurations(sweep, record_of(*trials))
    assert [(c.number, c.mean) for c in found] == [(2, pytest.approx(2.1)), (0, 3.5)]
    assert found[0].spread == pytest.approx(0.1414, abs=1e-4)
    assert summary.gain(sweep, found) == report.gain(sweep, found)
    told = summary.gain(sweep, found)
    assert told is not None
    assert told.amount == pytest.approx(1.4)


def test_gains_of_negative_values_and_of_zero() -> None:
    sweep = sweep_of()
    negative = summary.gain(
        sweep, configurations(sweep, record_of(trial_of(0, "complete", -2.0), trial_of(1, "complete", -3.0)))
    )
    assert negative is not None
    assert (negative.amount, negative.share) == (1.0, 0.5)
    zero = summary.gain(
        sweep, configurations(sweep, record_of(trial_of(0, "complete", 0.0), trial_of(1, "complete", -3.0)))
    )
    assert zero is not None
    assert (zero.amount, zero.share) == (3.0, None)
    assert summary.gain(sweep, configurations(sweep, record_of(trial_of(0, "complete", 1.0)))) is None


def test_importances_find_what_matters_and_say_why_there_are_none(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, "trials=40", "searcher=random", "early_stopping.rule=none")
    found = configurations(sweep, simulate(sweep, tmp_path / "history.jsonl"))
    weights = importances(sweep, found)
    assert isinstance(weights, dict)
    assert next(iter(weights)) == "optimizer.learning_rate", "the surface is steepest there"
    assert sum(weights.values()) == pytest.approx(1)
    assert importances(sweep, found) == weights, "the same whenever it is asked"
    few = importances(sweep, found[:4])
    same = importances(sweep, [dataclasses.replace(c, values=[1.0]) for c in found])
    fixed = importances(sweep, [dataclasses.replace(c, parameters=sweep.space.base_parameters()) for c in found])
    one = [
        dataclasses.replace(c, parameters=sweep.space.base_parameters() | {"schedule.warmup": i / 400})
        for i, c in enumerate(found)
    ]
    assert "4" in few
    assert "same value" in same
    assert "more than one value" in fixed
    assert "Only schedule.warmup" in importances(sweep, one)


def test_a_best_at_the_edge_of_a_range_is_told_unless_the_setting_ends_there() -> None:
    sweep = sweep_of()
    inside = {"optimizer.learning_rate": 3e-3, "schedule.warmup": 0.05, "model.width": 96}
    assert edges(sweep, inside) == []
    assert "lower end" in edges(sweep, inside | {"optimizer.learning_rate": 1.1e-4})[0]
    assert "upper end" in edges(sweep, inside | {"optimizer.learning_rate": 0.1})[0]
    assert "model.width 128 is at the upper end" in edges(sweep, inside | {"model.width": 128})[0]
    assert edges(sweep, inside | {"schedule.warmup": 0.001}) == [], "a warm-up cannot be below 0%"
    assert "schedule.warmup" in edges(sweep, inside | {"schedule.warmup": 0.1})[0]
    words = sweep_of(SWEEP.replace("choices: [64, 96, 128]", "choices: [64, 128]"))
    assert edges(words, inside | {"model.width": 128}) == [], "of two one is always the larger"


def test_warnings_and_bad_ends_are_told_once_with_their_trials() -> None:
    one, two, three = trial_of(0, "complete", 1.0), trial_of(1, "diverged"), trial_of(2, "failed")
    one.warnings, two.warnings = {"low_mfu": "MFU is 3%"}, {"low_mfu": "MFU is 4%"}
    two.reason, two.rule, three.reason = "not finite", "finite_loss", "an error"
    assert {key: [t.number for t in of] for key, of in troubles([one, two, three]).items()} == {
        ("low_mfu", "MFU is 3%"): [0, 1],
        ("finite_loss", "not finite"): [1],
        ("failed", "an error"): [2],
    }


def test_it_ran_in_as_many_spells_as_it_was_opened(tmp_path: Path) -> None:
    times = [("opened", 10), ("proposed", 12), ("ended", 15), ("opened", 100), ("report", 130), ("closed", 120)]
    history = tmp_path / "history.jsonl"
    history.write_text("".join(json.dumps({"event": kind, "time": t, "version": 1}) + "\n" for kind, t in times))
    assert spells(history) == [Spell(10, 15), Spell(100, 130)]


def test_words_for_spans_and_shares() -> None:
    seconds = [0.42, 9.96, 45, 59.6, 200, 3600, 7500, 90_000]
    assert [duration(s) for s in seconds] == [
        "0.4 s", "10.0 s", "45 s", "1 min", "3 min 20 s", "1 h", "2 h 5 min", "1 d 1 h",
    ]  # fmt: skip
    assert [percent(share) for share in (0.00312, 0.0274, 0.0999, 0.4321, 1)] == ["0.31%", "2.7%", "10%", "43%", "100%"]
    assert [value(v) for v in (5.6, 2.0, 12.345, 3000.0, 1.5e-5, 0.0)] == [
        "5.600",
        "2.000",
        "12.35",
        "3000",
        "1.50e-5",
        "0",
    ]
    assert re.fullmatch(r"2023-11-1\d \d\d:\d\d to \d\d:\d\d \S+", span(1_700_000_000, 1_700_000_060))
    assert re.fullmatch(r"2023-11-1\d .* to 2023-11-1\d .*", span(1_700_000_000, 1_700_100_000))


def test_shares_are_said_in_percent() -> None:
    sweep = sweep_of()
    assert [d.key for d in sweep.space.dimensions if is_share(sweep, d)] == ["schedule.warmup"]


def test_values_have_their_units(tmp_path: Path) -> None:
    gpt = load(str(READY / "quickstart.yaml"))
    folder = tmp_path / "quickstart"
    folder.mkdir()
    folders.write_settings(gpt, folder)
    history = History(folder / "history.jsonl")
    history.append("opened", version=1, sweep="quickstart")
    history.append("proposed", trial=0, group=0, seed=0, parameters=gpt.space.base_parameters())
    history.append("started", trial=0, node="box", cards=["card"])
    metrics = {"validation/loss": 5.0}
    history.append("report", trial=0, examples=300_000, total=300_000, flops=1e9, seconds=1.0, metrics=metrics)
    history.append("ended", trial=0, state="complete", reason="", seconds=90.0, value=5.0)
    history.close()
    page = re.sub(r"<[^>]*>", "", page_of(folder))
    for told in ("5.000 nats per token", "tokens trained on", "1 min 30 s", "300k 100%"):
        assert told in page


def test_names_from_data_never_become_markup(tmp_path: Path) -> None:
    folder = made(tmp_path, "names", "early_stopping.within=initial", text=named())
    page = page_of(folder)
    assert "<b>name" not in page
    assert page.count("<script") == 1, "the copy button's"
    assert "<script>alert" not in page
    assert NAMES[0] in page
    assert not re.search(r"https?://", page), "it asks nothing of the network"


def test_the_same_history_makes_the_same_page_whatever_was_drawn_before(tmp_path: Path) -> None:
    folder = made(tmp_path, "same", WITHIN)
    assert page_of(folder) == page_of(folder)


def test_two_thousand_trials_are_a_small_page(tmp_path: Path) -> None:
    page = page_of(made(tmp_path, "many", WITHIN, "trials=2000", "searcher=random", fault=some))
    assert len(page.encode()) < 1_000_000
    assert "The best 50 of 2,000; 1,950 more" in page
    assert "400 of 2,000 trials" in page


def test_an_ablations_rows_are_a_table(tmp_path: Path) -> None:
    told = told_of(made(tmp_path, "ablation", "repeats=3", text=ABLATION))
    page = re.sub(r"<[^>]*>", " ", report.render(told))
    assert [change.what for change in told["changes"]] == ["model.width: 64 → 96", "model.width: 64 → 128"]
    for change in told["changes"]:
        assert change.difference_text.startswith("-0."), "wider is better on this surface"
        assert re.search(rf"{change.what}\s+{change.value:.4g}\d*\s+{change.difference_text}\s+{change.verdict}", page)
    assert "over 3 seeds" in page


@pytest.mark.parametrize("events", [0, 1, 2, 5])
def test_a_sweep_that_has_hardly_begun_has_a_report(tmp_path: Path, events: int) -> None:
    folder = made(tmp_path, "young", WITHIN)
    lines = (folder / "history.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "history.jsonl").write_bytes(b"".join(lines[:events]))
    page = page_of(folder)
    assert "No result" in page
    assert ("No trial has begun" in page) == (events < 2)


def test_trials_that_all_failed_and_a_training_have_a_report(tmp_path: Path) -> None:
    page = page_of(made(tmp_path, "failed", "trials=5", fault=lambda *_: "failed"))
    assert "No trial is complete" in page
    assert "trials 0, 1, 2, 3, 4" in page
    training = page_of(made(tmp_path, "training", "trials=1", text=SWEEP[: SWEEP.index("search:")]))
    assert "Training training" in training
    assert "best configuration" not in training


# Charts.


def test_labels_of_a_chart_are_text_in_the_pages_colours() -> None:
    sweep = sweep_of(named())
    dimension = sweep.space.dimensions[-1]
    marks = [charts.Mark(i, choice, 1.0 + i, "group0") for i, choice in enumerate(dimension.choices)]
    drawn = charts.parameter("x", dimension, marks, minimize=True, share=False)
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert "#000001" in texts, "a colour only where it is one"
    assert any("红" not in text and text.startswith("语料") for text in texts), "long names are shortened"
    assert "var(--group0)" in drawn
    assert not re.search(r"<[^>]*#0000", drawn)


def test_names_are_shortened_to_their_ends() -> None:
    assert charts.shortened("short") == "short"
    long = charts.shortened("beginning-of-a-name-that-goes-on/end.txt")
    assert long.startswith("beginning")
    assert long.endswith("/end.txt")
    assert len(long) <= 22
    assert len(charts.shortened("字" * 40)) <= 13


def test_curves_are_thinned_and_end_where_they_ended() -> None:
    curve = charts.Curve([float(i) for i in range(1000)], [1000.0 - i for i in range(1000)])
    thin = charts.thinned(curve)
    assert len(thin.x) == len(thin.y) <= 40
    assert (thin.x[-1], thin.y[-1]) == (999.0, 1.0)
    assert sorted(thin.x) == thin.x
    assert sorted(thin.y, reverse=True) == thin.y
    assert charts.thinned(charts.Curve([1.0], [2.0])) == ([1.0], [2.0])
