"""The history: an append-only file that survives a kill at any byte, and the state that follows from it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.history import VERSION, History, fold, read, read_with_offsets

REPORT: dict[str, Any] = {"total": 100, "flops": 1e6, "seconds": 1.0, "checkpoint": None}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sweep" / "history.jsonl"


@pytest.fixture
def history(path: Path) -> Iterator[History]:
    history = History(path)
    yield history
    history.close()


def begin(history: History, trials: int = 1) -> None:
    history.append("opened", version=VERSION, sweep="made")
    for number in range(trials):
        history.append("proposed", trial=number, group=number, seed=0, parameters={"a": number})
        history.append("started", trial=number, node="here", cards=["cpu"], process=1)


def report(history: History, trial: int, examples: int, loss: float) -> None:
    history.append("report", trial=trial, examples=examples, metrics={"validation/loss": loss}, **REPORT)


def test_an_event_is_one_line_of_json_with_its_time(history: History, path: Path) -> None:
    begin(history)
    lines = path.read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    assert [event["event"] for event in events] == ["opened", "proposed", "started"]
    assert all(event["time"] > 1_600_000_000 for event in events)


def test_an_event_is_on_disk_before_anybody_acts_on_it(
    history: History, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: order.append(f"synced {len(path.read_bytes().splitlines())}"))
    history.listeners.append(lambda event: order.append(event["event"]))
    begin(history, trials=0)
    assert order == ["synced 1", "opened"]


def test_parameters_come_back_as_they_were(history: History, path: Path) -> None:
    parameters = {
        "data.corpus": "folder/with \"quotes\" and 'more'",
        "prompt": "two\nlines\r\n\u2028\u0085and a tab\t",
        "学习率": "哪个",
        "emoji": "🦜",
        "nothing": None,
        "betas": [0.9, 0.95],
        "rate": 1.2345678901234567e-3,
        "back\\slash": True,
    }
    history.append("opened", version=VERSION)
    history.append("proposed", trial=0, group=0, seed=0, parameters=parameters)
    assert len(path.read_bytes().splitlines()) == 2
    assert path.read_bytes().count(b"\n") == 2
    assert fold(path).trials[0].parameters == parameters


def test_values_that_are_not_finite_are_never_written(history: History, path: Path) -> None:
    begin(history)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        report(history, 0, 10, float("nan"))
    assert path.read_bytes() == before


def test_a_second_opener_is_refused_until_the_first_lets_go(history: History, path: Path) -> None:
    with pytest.raises(WrongInput, match="this sweep is running in another process; wait for it, or stop it"):
        History(path)
    history.close()
    History(path).close()


def test_a_torn_last_line_is_cut_wherever_it_was_torn(history: History, path: Path, tmp_path: Path) -> None:
    begin(history)
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    last = len(whole) - len(lines[-1])
    for size in range(last, len(whole)):
        torn = tmp_path / "torn.jsonl"
        torn.write_bytes(whole[:size])
        assert [event["event"] for event in read(torn)] == ["opened", "proposed"]
        again = History(torn)
        assert again.record.trials[0].state == "proposed"
        again.append("started", trial=0, node="here", cards=[], process=2)
        again.close()
        assert torn.read_bytes().startswith(whole[:last])
        assert fold(torn).trials[0].state == "running"


def test_a_file_with_nothing_but_a_torn_line_is_begun_again(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b'{"event": "opened", "x": "' + b"y" * 200_000)
    history = History(path)
    assert history.record.trials == {}
    history.close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "damage", [b"\x00" * 50, b'{"event": "proposed", "tr', b"[]", b"{}", b'{"event": 5}', b"\xff\xfe"]
)
def test_a_damaged_line_in_the_middle_is_refused_by_its_number(history: History, path: Path, damage: bytes) -> None:
    begin(history)
    history.close()
    lines = path.read_bytes().splitlines()
    lines[1] = damage
    path.write_bytes(b"\n".join(lines) + b"\n")
    for reader in (fold, History):
        with pytest.raises(WrongInput) as error:
            reader(path)
        assert str(error.value) == f"{path}:2: is damaged; restore the file from a copy"
    # Refusing lets go of the lock.
    path.write_bytes(b"")
    History(path).close()


@pytest.mark.parametrize("lost", [1, 2])
def test_a_line_that_does_not_follow_from_those_before_is_refused(history: History, path: Path, lost: int) -> None:
    begin(history)
    report(history, 0, 10, 1.0)
    history.close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[lost] = b'{"event": "' + [b"edited", b"ended"][lost - 1] + b'", "trial": 0, "time": 1}\n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(WrongInput, match=r"history\.jsonl:3: does not follow from the lines before"):
        fold(path)


def test_a_file_by_a_newer_version_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_text(json.dumps({"event": "opened", "version": VERSION + 1, "time": 0}) + "\n")
    for reader in (fold, History):
        with pytest.raises(WrongInput, match="was written by a newer version of rigsweep; update this one"):
            reader(path)


def test_a_repeated_report_counts_once_the_last(history: History, path: Path) -> None:
    begin(history)
    report(history, 0, 10, 3.0)
    report(history, 0, 20, 2.0)
    report(history, 0, 10, 2.5)
    trial = history.record.trials[0]
    assert {examples: told.metrics["validation/loss"] for examples, told in trial.reports.items()} == {10: 2.5, 20: 2.0}
    assert (trial.examples, trial.last and trial.last.metrics["validation/loss"]) == (20, 2.0)
    assert fold(path) == history.record


def test_a_trials_life_in_states(history: History, path: Path) -> None:
    begin(history)
    trial = history.record.trials[0]
    states = [trial.state]
    history.append("interrupted", trial=0, reason="Ctrl-C", seconds=2.0)
    states.append(trial.state)
    history.append("started", trial=0, node="there", cards=["a"], process=2)
    history.append("lost", trial=0, reason="its lane died", seconds=3.0)
    states.append(trial.state)
    history.append("ended", trial=0, state="failed", reason="twice", seconds=4.0, value=None)
    states.append(trial.state)
    assert states == ["running", "interrupted", "interrupted", "failed"]
    assert (trial.seconds, trial.lost, trial.node, trial.reason, trial.over) == (9.0, 1, "there", "twice", True)
    assert fold(path) == history.record


def test_what_a_trial_says_after_its_end_changes_nothing(history: History) -> None:
    begin(history)
    report(history, 0, 10, 2.0)
    history.append("ended", trial=0, state="stopped", reason="third of 3", seconds=1.0, value=2.0)
    report(history, 0, 20, 1.0)
    history.append("ended", trial=0, state="complete", reason="", seconds=1.0, value=1.0)
    trial = history.record.trials[0]
    assert (trial.state, trial.value, trial.examples, trial.seconds) == ("stopped", 2.0, 10, 1.0)


def test_an_edited_training_that_was_over_goes_on(history: History) -> None:
    begin(history)
    history.append("ended", trial=0, state="complete", reason="", seconds=1.0, value=1.0)
    history.append("edited", changed={"base.budget.examples": [1, 2]})
    trial = history.record.trials[0]
    assert (trial.state, trial.value, trial.ended, trial.over) == ("interrupted", None, None, False)


def test_a_clock_that_is_set_back_disturbs_nothing(path: Path) -> None:
    times = iter([1000.0, 1001.0, 1002.0, 500.0, 400.0])
    history = History(path, clock=lambda: next(times))
    begin(history)
    report(history, 0, 10, 2.0)
    history.append("ended", trial=0, state="complete", reason="", seconds=0.0, value=2.0)
    history.close()
    record = fold(path)
    assert (record.trials[0].state, record.trials[0].examples) == ("complete", 10)


def test_reading_goes_on_from_where_it_was(history: History, path: Path) -> None:
    begin(history)
    *_, (_, offset) = read_with_offsets(path)
    report(history, 0, 10, 2.0)
    path.open("ab").write(b'{"event": "torn')
    assert [event["event"] for event in read(path, offset)] == ["report"]


def test_groups_are_the_trials_of_a_configuration(history: History) -> None:
    history.append("opened", version=VERSION)
    for number in range(4):
        history.append("proposed", trial=number, group=number // 2, seed=number % 2, parameters={})
    groups = history.record.groups()
    assert {group: [trial.number for trial in trials] for group, trials in groups.items()} == {0: [0, 1], 1: [2, 3]}
    assert history.record.now_running() == []
