"""Sampling in several ways: sweeps from a run, their optimum and its confirmation, and sweeps that train and sample."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rigsweep.sweeps import files, folders
from rigsweep.sweeps.confirming import confirmation
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import Report
from rigsweep.sweeps.mixed import over_grid
from rigsweep.sweeps.optimum import RESAMPLES, optimum
from rigsweep.sweeps.report import tell
from rigsweep.sweeps.running import run
from rigsweep.sweeps.sampling import sample_run
from rigsweep.sweeps.summary import summarise
from rigsweep.sweeps.sweep import changed, check, load
from rigsweep.sweeps.tables import told_of_optimum
from rigsweep.trainables.unet import UNetTask
from rigsweep.trainables.unet_settings import UNetTraining

from .test_running import Quiet
from .test_summary import record_of

POINTS = """
trainable: points
base:
  model: {width: 16}
  optimizer: {learning_rate: 3e-3}
  batch: {examples: 64}
  budget: {examples: 1280}
  evaluation: {every: 100%, examples: 64}
  sampling: {sampler: euler, steps: 5}
search:
  path.kind: {choices: [straight, variance-preserving]}
  sampling.steps: {choices: [2, 5]}
  sampling.sampler: {choices: [euler, heun]}
searcher: grid
objective: {metric: validation/energy_distance}
"""
GUIDANCE = """
trainable: unet
from: digits/3
base:
  budget: {examples: 1000}
  quality: {features: pca-32, samples: 1000}
  initial: digits/3
search:
  sampling.guidance: {low: 0, high: 2, step: 0.5}
searcher: grid
confirm: {best: 2, samples: 5000}
"""


def checked(text: str) -> Any:
    return check(files.parse(text, "made.yaml"), "made")


def refusal(text: str) -> str:
    with pytest.raises(WrongInput) as found:
        checked(text)
    return str(found.value)


def with_scores(folder: Path, scores: dict[float, float], spread: float, sweep: Any = None) -> Any:
    """A record of a guidance search whose trials have these scores, by scale, and resamples about them."""
    sweep, trials = sweep or checked(GUIDANCE), []
    shared = np.random.default_rng(0).normal(0, 1, 1000)
    metric = sweep.settings.objective.metric
    for number, (scale, score) in enumerate(scores.items()):
        from .test_summary import trial_of

        trial = trial_of(number, "complete", score, parameters={"sampling.guidance": scale})
        names = {metric: score} | {metric.replace("kid", name): scale for name in ("precision", "recall", "fd")}
        trial.reports[1000] = Report(1000, 1000, 1.0, 1.0, names, 0.0)
        trials.append(trial)
        place = folder / "trials" / str(number)
        place.mkdir(parents=True)
        own = np.random.default_rng(number + 1).normal(0, spread, 1000)
        values = (score + shared + own).tolist()
        (place / RESAMPLES).write_text(json.dumps({"metric": metric, "values": values}))
    return record_of(*trials)


def test_a_sweep_from_a_run_trains_nothing_and_reads_back() -> None:
    sweep = checked(GUIDANCE)
    assert sweep.settings.objective.metric == "validation/kid_pca-32_1000"
    assert sweep.settings.early_stopping.rule == "none" and sweep.settings.trials == 5
    assert changed(sweep, check(files.parse(sweep.resolved(), "again.yaml"), "made")) == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sampling.guidance: {low: 0, high: 2, step: 0.5}", "optimizer.learning_rate: {choices: [1e-3]}", "train"),
        ("confirm:", "early_stopping: {rule: asha}\nconfirm:", "there is no training to stop"),
        ("trainable: unet", "trainable: surface", "whose samples nothing scores"),
        ("best: 2", "best: 1", "confirm.best: "),
        ("quality: {features: pca-32, samples: 1000}", "class_dropout: 0", "class_dropout is 0"),
    ],
)
def test_what_would_train_again_or_compare_nothing_is_refused(old: str, new: str, message: str) -> None:
    text = GUIDANCE.replace(old, new)
    if "surface" in new:
        text = text.replace("  quality: {features: pca-32, samples: 1000}\n", "")
        text = text.replace("sampling.guidance: {low: 0, high: 2, step: 0.5}", "model.width: {choices: [64, 96]}")
        message = "would need training again"
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ("base: {model: {base: 8}}\n", "base.model: is as nowhere/3 was trained; only sampling and quality can differ"),
        ("", "nowhere/3 is neither a run in"),
    ],
)
def test_a_run_that_is_not_there_or_would_be_another_is_one_line(tmp_path: Path, base: str, message: str) -> None:
    file = tmp_path / "made.yaml"
    file.write_text(f"from: nowhere/3\n{base}search:\n  sampling.steps: {{choices: [1, 100]}}\n")
    with pytest.raises(WrongInput) as found:
        load(str(file), (), tmp_path / "runs")
    assert message in str(found.value)


def test_the_optimum_has_an_interval_and_what_cannot_be_told_from_it_is_a_tie(tmp_path: Path) -> None:
    """Noise that all trials share cancels, however large: what is left decides."""
    scores = {0.0: 3.0, 0.5: 1.02, 1.0: 1.0, 1.5: 1.5, 2.0: 4.0}
    found = optimum(checked(GUIDANCE), with_scores(tmp_path, scores, spread=0.1), tmp_path)
    assert found is not None
    assert found["best"]["parameters"] == {"sampling.guidance": 1.0} and not found["confirmed"]
    assert [tie["parameters"]["sampling.guidance"] for tie in found["ties"]] == [0.5]
    assert found["intervals"] == {"sampling.guidance": [0.5, 1.0]}
    assert found["interior"] == {"sampling.guidance": True}
    assert [point["parameters"]["sampling.guidance"] for point in found["curve"]] == sorted(scores)
    assert all(point["low"] < point["value"] < point["high"] for point in found["curve"])
    assert "not to be told from it: 0.5" in told_of_optimum(found)
    json.dumps(found, allow_nan=False)


def test_an_optimum_at_the_end_of_the_search_is_said_to_be_there(tmp_path: Path) -> None:
    found = optimum(checked(GUIDANCE), with_scores(tmp_path, {0.0: 1.0, 1.0: 2.0, 2.0: 3.0}, spread=0.01), tmp_path)
    assert found is not None and found["interior"] == {"sampling.guidance": False} and found["ties"] == []
    assert "is at the end of what was searched" in told_of_optimum(found)
    assert optimum(checked(GUIDANCE), record_of(), tmp_path) is None


def test_the_confirmation_is_of_the_best_by_more_samples_from_other_noise(tmp_path: Path) -> None:
    sweep = checked(GUIDANCE)
    record = with_scores(tmp_path / "made", {0.0: 3.0, 0.5: 1.1, 1.0: 1.0, 1.5: 2.0}, spread=0.01)
    second = confirmation(sweep, record)
    assert second is not None and second.name == "made-confirm" and second.settings.confirm is None
    assert second.settings.objective.metric == "validation/kid_pca-32_5000"
    base: Any = second.training({})
    assert (base.sampling.guidance, base.sampling.seed, base.quality.samples) == (1.0, 1, 5000)
    assert [told["sampling.guidance"] for told in second.settings.configurations] == [1.0, 0.5]
    assert confirmation(sweep, record_of(*list(record.trials.values())[:1])) is None


def test_the_page_shows_the_curve_the_tradeoff_and_the_table(tmp_path: Path) -> None:
    sweep = checked(GUIDANCE)
    record = with_scores(tmp_path, {0.0: 3.0, 1.0: 1.0, 2.0: 4.0}, spread=0.1)
    for trial in record.trials.values():
        trial.reports[1000].metrics["validation/kid_pca-32_1000_se"] = 0.1
    summary = summarise(sweep, record) | {"sampling": optimum(sweep, record, tmp_path)}
    (tmp_path / "history.jsonl").touch()
    told = tell(sweep, record, tmp_path, summary)["optimum"]
    titles = [chart["title"] for chart in told["charts"]]
    assert titles == ["validation/kid_pca-32_1000", "validation/fd_pca-32_1000", "precision"]
    assert [row["role"] for row in told["rows"]] == ["group0", "best", "group0"]
    assert all("<svg" in chart["svg"] for chart in told["charts"])


def test_training_and_sampling_are_searched_apart() -> None:
    sweep = checked(POINTS)
    assert [d.key for d in sweep.space.dimensions] == ["path.kind"] and sweep.settings.trials == 2
    assert len(sweep.samplings) == 4 and sweep.samplings[0].keys() == {"sampling.steps", "sampling.sampler"}
    assert changed(sweep, check(files.parse(sweep.resolved(), "again.yaml"), "made")) == {}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("  path.kind: {choices: [straight, variance-preserving]}\n", "", "needs no training"),
        ("{choices: [2, 5]}", "{low: 1, high: 100}", "would be scored in 200 ways, at most 64"),
        ("sampling.steps: {choices: [2, 5]}", "sampling.shift: {low: 1, high: 3}", "give choices, or low, high"),
        ("choices: [2, 5]}", "choices: [2, 5], when: {path.kind: straight}}", "leave `when` out"),
    ],
)
def test_a_grid_that_is_none_or_too_large_is_refused(old: str, new: str, message: str) -> None:
    assert message in refusal(POINTS.replace(old, new))


@pytest.mark.timeout(400)
@pytest.mark.usefixtures("one_ray")
def test_each_model_is_trained_once_scored_in_every_way_and_drawn_from_by_another_sweep(
    tmp_path: Path, cache: Path
) -> None:
    runs = tmp_path / "runs"
    (tmp_path / "paths.yaml").write_text(POINTS)
    sweep = load(str(tmp_path / "paths.yaml"), (), runs)
    outcome = run(sweep, runs, cache, Quiet(), cards=2, threads=1)
    assert outcome.state == "complete" and len(outcome.summary["trials"]) == 2
    found = outcome.summary["grid"]
    assert found["best"]["value"] == min(v for row in found["rows"] for v in row["values"])
    assert over_grid(sweep, folders.record_of(runs / "paths"), runs / "paths") == found
    assert "drawn from in every way" in (runs / "paths" / "report.html").read_text()
    # The same weights, drawn from by a sweep of its own, come to the same figures.
    (tmp_path / "steps.yaml").write_text(
        "from: paths/0\nsearch:\n  sampling.steps: {choices: [2, 5, 10]}\nsearcher: grid\n"
    )
    only = load(str(tmp_path / "steps.yaml"), (), runs)
    scored = run(only, runs, cache, Quiet(), cards=2, threads=1).summary
    values = {trial["parameters"]["sampling.steps"]: trial["value"] for trial in scored["trials"]}
    first = next(row for row in found["rows"] if row["number"] == 0)
    for way, value in zip(found["samplings"], first["values"], strict=True):
        if way["sampling.sampler"] == "euler":
            assert values[way["sampling.steps"]] == pytest.approx(value, rel=1e-6)
    assert scored["sampling"]["curve"][0]["metrics"]["sampling/calls"] == 2
    assert not list((runs / "steps").glob("trials/*/checkpoints"))
    _, pictures = sample_run("paths/0", runs, cache, ("sampling.steps=3",), tmp_path / "drawn")
    assert pictures["points"].read_bytes().startswith(b"\x89PNG")


def test_digits_are_recognised_as_what_was_asked_for(cache: Path) -> None:
    """By a classifier of real digits that has never seen a drawn one; guidance, and a class at all, make them so."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from sklearn.svm import SVC

    pixels, labels = load_digits(return_X_y=True)
    train, held, train_labels, held_labels = train_test_split(pixels, labels, test_size=0.25, random_state=0)
    judge = SVC(gamma=0.001).fit(train, train_labels)
    assert judge.score(held, held_labels) >= 0.97
    told = {"model": {"base": 16, "blocks": 1}, "budget": {"examples": 1}, "quality": None}
    task = UNetTask(UNetTraining.model_validate(told | {"sampling": {"sampler": "heun", "steps": 8}}), cache)
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), 4e-3)
    steps = 250
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        sum(task.loss(model, task.batch(step * 128, 128)).values()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    rows = torch.arange(300)

    def recognised(scale: float) -> float:
        sampling = task.training.sampling.model_copy(update={"guidance": scale})
        drawn = task.draw(model, sampling, rows, rows % 10, torch.device("cpu"))
        return float((judge.predict(drawn.reshape(len(rows), -1) / 255 * 16) == (rows % 10).numpy()).mean())

    unguided, guided = recognised(0.0), recognised(2.0)
    assert unguided < 0.3, "as often as chance has it"
    assert guided >= 0.9
