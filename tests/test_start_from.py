"""Warm start: which trials of earlier sweeps fit, what the searcher is told of them, and that it is kept."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from rigsweep.sweeps import folders
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import VERSION, History, Record, replay
from rigsweep.sweeps.start_from import earlier_trials
from rigsweep.sweeps.study import Study
from rigsweep.sweeps.study_file import update_study
from rigsweep.sweeps.sweep import Sweep
from rigsweep.trainables.surface_settings import SurfaceTraining

from .simulator import SWEEP, cut, outcome, simulate, sweep_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
NUMBERS = SWEEP.replace("choices: [64, 96, 128]", "low: 32, high: 256, step: 32")


def ends(training: SurfaceTraining, share: float, attempt: int) -> str | None:
    warmup = training.schedule.warmup
    return "out_of_memory" if training.model.width == 128 else "failed" if warmup > 0.08 else None


def earlier(runs: Path, *overrides: str, name: str = "earlier", text: str = SWEEP, **simulated: Any) -> Record:
    """A sweep that has run."""
    sweep = sweep_of(text, "trials=30", *overrides, name=name)
    (runs / name).mkdir(parents=True)
    folders.write_settings(sweep, runs / name)
    return simulate(sweep, runs / name / "history.jsonl", **simulated)


def later(*overrides: str, text: str = SWEEP, start_from: str = "earlier") -> Sweep:
    return sweep_of(text, f"start_from={start_from}", *overrides, name="later")


def begin(sweep: Sweep, runs: Path, path: Path) -> None:
    """The first line of a sweep's history, as `running.py` writes it."""
    history = History(path)
    history.append("opened", version=VERSION, sweep=sweep.name, told=earlier_trials(sweep, runs)[0])
    history.close()


def study_of(sweep: Sweep, path: Path) -> Study:
    study = Study(sweep)
    for event, record in replay(path):
        study.apply(event, record)
    return study


def refusal_of(sweep: Sweep, runs: Path) -> str:
    with pytest.raises(WrongInput) as error:
        earlier_trials(sweep, runs)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_finished_trials_are_told_as_the_sweeps_own_would_be(tmp_path: Path) -> None:
    record = earlier(tmp_path, fault=ends)
    sweep, path = later("trials=5"), tmp_path / "history.jsonl"
    begin(sweep, tmp_path, path)
    simulate(sweep, path)
    trials = study_of(sweep, path).study.get_trials()
    finished = [trial for trial in record.trials.values() if trial.state != "failed"]
    assert {trial.state for trial in finished} == {"complete", "stopped", "out_of_memory"}
    assert 0 < len(finished) < 30
    states = {"complete": TrialState.COMPLETE, "stopped": TrialState.PRUNED, "out_of_memory": TrialState.PRUNED}
    for ours, theirs in zip(finished, trials, strict=False):
        assert theirs.state == states[ours.state]
        assert theirs.params == ours.parameters
        assert theirs.value == (ours.value if ours.state == "complete" else None)
        assert theirs.intermediate_values == {at: r.metrics["validation/loss"] for at, r in ours.reports.items()}
        assert theirs.constraints == {"memory": 1.0 if ours.state == "out_of_memory" else -1.0, "health": -1.0}
        assert theirs.user_attrs == {"start_from": f"earlier/{ours.number}", "reason": ours.reason}
    own = trials[len(finished) :]
    assert len(own) == 5
    assert own[0].params == sweep.space.base_parameters()
    assert all("start_from" not in trial.user_attrs for trial in own)


@pytest.mark.parametrize("searcher", ["tpe", "cmaes"])
def test_a_resumed_sweep_needs_the_other_no_more(tmp_path: Path, searcher: str) -> None:
    earlier(tmp_path, text=NUMBERS)
    sweep = later(f"searcher={searcher}", "trials=12", text=NUMBERS)
    path = tmp_path / "history.jsonl"
    begin(sweep, tmp_path, path)
    whole = outcome(simulate(sweep, path))
    shutil.rmtree(tmp_path / "earlier")
    lines = len(path.read_bytes().splitlines())
    for events in range(1, lines, lines // 6):
        resumed = simulate(sweep, cut(path, tmp_path / f"{events}.jsonl", events))
        assert outcome(resumed) == whole
        assert len(resumed.told) == 30
    assert len(whole) == 12, "what was told is no trial of this sweep"


@pytest.mark.parametrize("searcher", ["tpe", "gp", "cmaes"])
def test_what_was_told_guides_the_first_proposals(tmp_path: Path, searcher: str) -> None:
    record = earlier(tmp_path, text=NUMBERS, slots=2)
    best = min((t for t in record.trials.values() if t.state == "complete"), key=lambda t: t.value or 0.0)
    path = tmp_path / "history.jsonl"
    sweep = later(f"searcher={searcher}", text=NUMBERS)
    begin(sweep, tmp_path, path)
    told, cold = study_of(sweep, path), Study(later(f"searcher={searcher}", text=NUMBERS))
    told.propose(0)
    cold.propose(0)
    proposed = told.propose(1)
    assert proposed != cold.propose(1)
    rate = "optimizer.learning_rate"
    assert best.parameters[rate] / 4 < proposed[rate] < best.parameters[rate] * 4, "of three decades"


def test_repeats_are_told_as_one_with_their_mean(tmp_path: Path) -> None:
    record = earlier(tmp_path, "repeats=2", "trials=6", "early_stopping.rule=none")
    told, notes = earlier_trials(later(), tmp_path)
    assert notes == ["starts from 6 of the 6 finished trials of earlier"]
    for trial, repeats in zip(told, record.groups().values(), strict=True):
        values = [other.value for other in repeats if other.value is not None]
        assert trial["value"] == pytest.approx(sum(values) / 2)
        assert trial["trial"] == f"earlier/{repeats[0].number}"
        assert trial["reports"][100_000] == trial["value"]
    assert json.loads(json.dumps(told)) == [
        trial | {"reports": {str(at): value for at, value in trial["reports"].items()}} for trial in told
    ]


def test_trials_that_are_not_over_are_not_told(tmp_path: Path) -> None:
    record = earlier(tmp_path, slots=3, most_events=30)
    over = [trial for trial in record.trials.values() if trial.over]
    assert len(earlier_trials(later(), tmp_path)[0]) == len(over) < len(record.trials)


def test_only_what_lies_in_the_search_is_told(tmp_path: Path) -> None:
    record = earlier(tmp_path)
    sweep = later("search.optimizer.learning_rate={low: 5e-4, high: 1e-2, log: true}", "search.model.width=")
    told, (note,) = earlier_trials(sweep, tmp_path)
    expected = [
        {key: value for key, value in trial.parameters.items() if key != "model.width"}
        for trial in record.trials.values()
        if 5e-4 <= trial.parameters["optimizer.learning_rate"] <= 1e-2 and trial.parameters["model.width"] == 64
    ]
    assert [trial["parameters"] for trial in told] == expected
    assert note.startswith(f"starts from {len(told)} of the 30 finished trials of earlier (of the others, the first: ")


def test_a_wider_search_takes_in_what_was_fixed_before(tmp_path: Path) -> None:
    earlier(tmp_path)
    sweep = later("search.optimizer.weight_decay={low: 0, high: 1}", "base.seed=5", "base.precision=fp32")
    told, _ = earlier_trials(sweep, tmp_path)
    assert len(told) == 30
    assert {trial["parameters"]["optimizer.weight_decay"] for trial in told} == {0.1}


def test_values_of_several_parts_and_conditions_fit_too(tmp_path: Path) -> None:
    betas = "search.optimizer.betas={choices: [[0.9, 0.95], [0.9, 0.999], [0.8, 0.9]]}"
    decays = "search.schedule.decay={choices: [cosine, linear]}"
    cooldown = "search.schedule.cooldown={low: 10%, high: 90%, when: {schedule.decay: linear}}"
    record = earlier(tmp_path, betas, decays, cooldown)
    sweep, path = later(betas, decays, cooldown), tmp_path / "history.jsonl"
    assert [t["parameters"] for t in earlier_trials(sweep, tmp_path)[0]] == [
        trial.parameters for trial in record.trials.values()
    ]
    begin(sweep, tmp_path, path)
    assert len(study_of(sweep, path).study.get_trials()) == 30
    _, (note,) = earlier_trials(later(betas), tmp_path)
    assert "schedule.decay is linear there, cosine here" in note


def test_several_sweeps_are_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    earlier(tmp_path, "trials=3", name="one")
    earlier(tmp_path / "elsewhere", "trials=2", name="二")
    sweep = later(start_from=f"[{tmp_path / 'elsewhere' / '二'}, one]")
    told, notes = earlier_trials(sweep, tmp_path)
    assert [trial["trial"] for trial in told] == ["二/0", "二/1", "one/0", "one/1", "one/2"]
    assert len(notes) == 2


def test_what_cannot_be_started_from_is_refused_in_one_line(tmp_path: Path) -> None:
    earlier(tmp_path)
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "history.jsonl").touch()
    place = "later.yaml:19: start_from"
    text = f"{SWEEP.rstrip()}\nstart_from: NAME"
    for name, overrides, message in (
        ("earleir", (), f"{tmp_path / 'earleir'}: no such sweep; did you mean earlier?"),
        ("later", (), "later is this sweep itself; go on with it by --resume, or begin beside it by --new"),
        (
            "earlier",
            ("base.budget.examples=200k",),
            "none of the 30 finished trials of earlier fits: budget.examples is 100000 there, 200000 here",
        ),
        (
            "earlier",
            ("base.optimizer.clip_norm=null",),
            "none of the 30 finished trials of earlier fits: optimizer.clip_norm is 1.0 there, null here",
        ),
        (
            "earlier",
            ("base.model.width=256", "search.model.width={choices: [256]}"),
            "none of the 30 finished trials of earlier fits: model.width is 64 there, the search has one of 256",
        ),
        (
            "earlier",
            ("objective={metric: validation/accuracy, goal: maximize}",),
            "earlier optimises validation/loss, this sweep validation/accuracy",
        ),
    ):
        sweep = sweep_of(text.replace("NAME", name), *overrides, name="later")
        assert refusal_of(sweep, tmp_path) == f"{place}: {message}"
    gpt = sweep_of("trainable: gpt\nbase: {budget: {examples: 1M}}\nstart_from: [earlier]", name="later")
    assert refusal_of(gpt, tmp_path) == "later.yaml:3: start_from.0: earlier trains surface, this sweep gpt"


def test_the_study_file_says_where_a_trial_is_from(tmp_path: Path) -> None:
    import optuna

    earlier(tmp_path, "trials=3")
    sweep, folder = later("trials=2"), tmp_path / "later"
    folder.mkdir()
    begin(sweep, tmp_path, folder / "history.jsonl")
    simulate(sweep, folder / "history.jsonl")
    folders.write_settings(sweep, folder)
    assert folders.read_sweep(folder).settings.start_from == ["earlier"]
    update_study(sweep, folder)
    study = optuna.load_study(study_name="later", storage=f"sqlite:///{folder / 'study.db'}")
    assert [t.user_attrs.get("start_from") for t in study.trials] == [*(f"earlier/{i}" for i in range(3)), None, None]
