"""`summary.json`: its keys, what is best, and what stopping saved."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import summary
from rigsweep.sweeps.history import Record, Report, Trial
from rigsweep.sweeps.summary import best_of, summarise

from .simulator import SWEEP, simulate, sweep_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")
KEYS = "sweep trainable question objective state trials best best_within device_seconds "
KEYS += "device_seconds_without_stopping energy_kwh energy_measured cost currency utilisation"
TRIAL_KEYS = "number group seed state reason rule warnings parameters value examples flops seconds device_seconds "
TRIAL_KEYS += "energy_kwh cost run_id node cards"


def trial_of(
    number: int, state: Any, value: float | None = None, *, examples: int = 0, seconds: float = 0.0, **more: Any
) -> Trial:
    trial = Trial(number, more.pop("group", number), 0, more.pop("parameters", {}), proposed=0.0, **more)
    trial.state, trial.value, trial.seconds = state, value, seconds
    if examples:
        trial.reports[examples] = Report(examples, 100, 6.0 * examples, 0.0, {"validation/loss": value or 0.0}, 0.0)
    return trial


def record_of(*trials: Trial) -> Record:
    return Record(trials={trial.number: trial for trial in trials})


def test_its_keys_are_those_of_the_design(tmp_path: Path) -> None:
    sweep = sweep_of()
    told = summarise(sweep, simulate(sweep, tmp_path / "history.jsonl", slots=2), {0: "a" * 32})
    assert list(told) == KEYS.split()
    assert all(list(trial) == TRIAL_KEYS.split() for trial in told["trials"])
    assert (told["trials"][0]["run_id"], told["trials"][1]["run_id"]) == ("a" * 32, None)
    assert told["objective"] == {"metric": "validation/loss", "goal": "minimize"}
    assert (told["state"], told["question"]) == ("complete", "Which learning rate and warm-up suit each width?")
    assert [trial["number"] for trial in told["trials"]] == list(range(16))
    assert json.loads(json.dumps(told, allow_nan=False)) == told


def test_the_best_is_of_the_complete_ones_only() -> None:
    sweep = sweep_of()
    trials = [
        trial_of(0, "complete", 3.0),
        trial_of(1, "stopped", 1.0, examples=10),
        trial_of(2, "complete", 2.0),
        trial_of(3, "failed"),
        trial_of(4, "running"),
    ]
    assert summarise(sweep, record_of(*trials))["best"] == 2
    assert summarise(sweep, record_of(*trials[3:]))["best"] is None
    assert summarise(sweep, Record())["best"] is None
    most = sweep_of(SWEEP, "objective={metric: validation/accuracy, goal: maximize}")
    assert summarise(most, record_of(*trials))["best"] == 0


def test_with_repeats_the_best_is_the_first_of_the_best_mean_of_whole_configurations() -> None:
    sweep = sweep_of(SWEEP, "repeats=2")
    trials = [
        trial_of(0, "complete", 1.0, group=0),
        trial_of(1, "complete", 4.0, group=0),
        trial_of(2, "complete", 2.0, group=1),
        trial_of(3, "complete", 2.2, group=1),
        trial_of(4, "complete", 0.5, group=2),
        trial_of(5, "stopped", 0.5, group=2),
        trial_of(6, "complete", 0.1, group=3),
    ]
    best = best_of(sweep, trials)
    assert best is not None
    assert best.number == 2


def test_best_within_has_the_best_of_each_value() -> None:
    sweep = sweep_of(SWEEP, "early_stopping.within=model.width")
    trials = [
        trial_of(0, "complete", 3.0, parameters={"model.width": 64}),
        trial_of(1, "complete", 2.0, parameters={"model.width": 64}),
        trial_of(2, "complete", 2.5, parameters={"model.width": 128}),
        trial_of(3, "stopped", 1.0, parameters={"model.width": 96}, examples=10),
    ]
    told = summarise(sweep, record_of(*trials))
    assert (told["best"], told["best_within"]) == (1, {"128": 2, "64": 1})
    assert summarise(sweep_of(), record_of(*trials))["best_within"] == {}


def test_best_within_of_lists_is_named_by_them() -> None:
    text = SWEEP.replace("model.width:", "optimizer.betas: {choices: [[0.9, 0.95], [0.9, 0.999]]}\n  model.width:")
    sweep = sweep_of(text, "early_stopping.within=optimizer.betas")
    trial = trial_of(0, "complete", 3.0, parameters={"optimizer.betas": [0.9, 0.95]})
    assert summarise(sweep, record_of(trial))["best_within"] == {"[0.9, 0.95]": 0}


def test_device_seconds_without_stopping_scale_stopped_trials_to_their_budget() -> None:
    trials = [
        trial_of(0, "complete", 3.0, examples=100, seconds=50.0),
        trial_of(1, "stopped", 4.0, examples=10, seconds=6.0),  # 60 to the end
        trial_of(2, "stopped", 4.0, examples=30, seconds=15.0),  # 50 to the end
        trial_of(3, "diverged", examples=20, seconds=9.0),
        trial_of(4, "out_of_memory", seconds=1.0),
        trial_of(5, "failed", examples=50, seconds=30.0),
        trial_of(6, "interrupted", examples=50, seconds=20.0),
        trial_of(7, "proposed"),
    ]
    told = summarise(sweep_of(), record_of(*trials))
    assert told["device_seconds"] == 131.0
    assert told["device_seconds_without_stopping"] == 160.0


def test_the_state_follows_the_process() -> None:
    record = record_of(trial_of(0, "complete", 3.0))
    assert summarise(sweep_of(), record)["state"] == "running"
    record.apply({"event": "closed", "state": "interrupted", "reason": "Ctrl-C", "time": 0})
    assert summarise(sweep_of(), record)["state"] == "interrupted"
    record.apply({"event": "opened", "version": 1, "time": 0})
    assert summarise(sweep_of(), record)["state"] == "running"


def test_it_is_written_at_once_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary.write({"question": "哪个"}, tmp_path)
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("disk")))
    with pytest.raises(OSError, match="disk"):
        summary.write({"question": "other"}, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == {"question": "哪个"}
    assert re.fullmatch(r"\{\n.*\n\}", (tmp_path / "summary.json").read_text(encoding="utf-8"))
