"""A full disk, wherever it is met: nothing half-written, nothing counted that is not there, and all goes on."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from rigsweep.cluster import disk
from rigsweep.sweeps.history import History, fold, read
from rigsweep.sweeps.tracking import Store, Tracker, TrackerActor
from rigsweep.sweeps.weights import ROOM_BYTES, checkpoints_of, delete_losers
from rigsweep.trainables.loop import train
from rigsweep.trainables.trial import run_trial

from .simulator import no_fault, outcome, run_trials, sweep_of
from .test_cli import SWEEP, begin, decided, rigsweep, wait_for
from .test_loop import Line, Linear, job_of, linear_settings
from .test_tracking import Made, copied, shown, template  # noqa: F401 - a fixture

MountDisk = Callable[[str], Path]


@contextmanager
def filled(place: Path, but_bytes: int = 0) -> Iterator[Path]:
    """Leave so little of a disk."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk_free(place))
        file.truncate(max(1, file.seek(0, os.SEEK_END) - but_bytes))
    yield ballast
    ballast.unlink(missing_ok=True)


def disk_free(place: Path) -> int:
    told = os.statvfs(place)
    return told.f_bavail * told.f_frsize


def test_a_full_disk_is_known_by_any_of_its_names_and_named(tmp_path: Path, mount_disk: MountDisk) -> None:
    place = mount_disk("1m")
    deep, line = place / "not" / "there", f"no space left on {place}: make room first"
    assert disk.full(OSError(errno.ENOSPC, "No space left on device"), deep) == line
    assert disk.full(OSError(errno.EDQUOT, "Disk quota exceeded"), deep) == line
    assert disk.full(OSError(errno.ENOSPC, "No space left on device", str(deep)), Path("/")) == line
    assert disk.full(OSError(errno.EACCES, "Permission denied"), place) is None
    with pytest.raises(ValueError, match="what came of it") as came:
        try:
            (place / "file").write_bytes(b"x" * 2**21)
        except OSError as error:
            raise ValueError("what came of it") from error
    assert disk.full(came.value, place) == line


def test_a_history_on_a_full_disk_stays_whole_and_goes_on(mount_disk: MountDisk) -> None:
    place = mount_disk("1m")
    sweep, path = sweep_of(), place / "history.jsonl"
    expected = outcome(run_trials(sweep, History(place / "whole.jsonl"), 1, no_fault, None))
    for but_bytes in (4096, 8192):
        with filled(place, but_bytes), pytest.raises(OSError, match="No space left"):
            run_trials(sweep, History(path), 1, no_fault, None)
        assert path.read_bytes().endswith(b"}\n")
        assert set(fold(path).trials) < set(expected)
    assert outcome(run_trials(sweep, History(path), 1, no_fault, None)) == expected
    ends = [event["trial"] for event in read(path) if event["event"] == "ended"]
    assert sorted(ends) == list(expected)


def test_a_line_that_did_not_fit_leaves_no_half_of_itself_before_the_next(mount_disk: MountDisk) -> None:
    place = mount_disk("1m")
    history = History(place / "history.jsonl")
    history.append("opened", version=1)
    with filled(place, 4096):
        with pytest.raises(OSError, match="No space left"):
            history.append("proposed", trial=0, group=0, seed=0, parameters={"long": "x" * 100_000})
        assert history.record.trials == {}
        history.append("proposed", trial=0, group=0, seed=0, parameters={"short": 1})
    history.close()
    assert [event["event"] for event in read(history.path)] == ["opened", "proposed"]
    assert fold(history.path) == history.record


@pytest.mark.parametrize("at", [1, 4])
def test_a_closed_form_trial_on_a_full_disk_is_interrupted_and_reports_what_was_written(
    mount_disk: MountDisk, at: int
) -> None:
    place = mount_disk("1m")
    folder = place / "trials" / "0"
    settings = {"batch": {"examples": 10}, "budget": {"examples": 1000}}

    def run(recorded: tuple[int, ...], fill_at: int | None) -> tuple[dict[str, Any], Line]:
        line = FillingLine(place, fill_at)
        job = job_of(folder, settings, recorded=recorded, trainable="surface")
        return run_trial(vars(job), line), line

    ending, line = run((), at)
    assert (ending["state"], ending["reason"]) == ("interrupted", f"no space left on {place}: make room first")
    seen = tuple(line.evaluations())
    assert 0 < len(seen) < 10
    (place / "ballast").unlink()
    ending, again = run(seen, None)
    assert ending["state"] == "complete"
    assert sorted([*seen, *again.evaluations()]) == list(range(100, 1001, 100))


class FillingLine(Line):
    """Fills the disk when it has heard so many evaluations."""

    def __init__(self, place: Path, fill_at: int | None):
        super().__init__()
        self._place, self._fill_at = place, fill_at

    def send(self, message: dict[str, Any]) -> None:
        super().send(message)
        if len(self.sent) == self._fill_at:
            with (self._place / "ballast").open("wb") as file:
                os.posix_fallocate(file.fileno(), 0, disk_free(self._place))


class Wide(Linear):
    """With weights that take some room."""

    def build(self) -> nn.Module:
        model = super().build()
        model.register_parameter("ballast", nn.Parameter(nn.init.zeros_(model[1].weight.new_empty(50_000))))
        return model

    def role(self, name: str, parameter: nn.Parameter) -> str:
        return "vector"


def test_a_training_whose_checkpoint_does_not_fit_is_interrupted_and_repeats_nothing_wrong(
    mount_disk: MountDisk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = mount_disk("4m")
    monkeypatch.setattr("rigsweep.trainables.trial.load", lambda _: lambda job, door: train(Wide(), job, door))

    def run(folder: Path, recorded: tuple[int, ...], fill_at: int | None) -> tuple[dict[str, Any], Line]:
        line = FillingLine(place, fill_at)
        return run_trial(vars(job_of(folder, linear_settings(), recorded=recorded)), line), line

    _, whole = run(tmp_path / "whole", (), None)
    ending, line = run(place / "0", (), 2)
    assert (ending["state"], ending["reason"]) == ("interrupted", f"no space left on {place}: make room first")
    assert len(line.evaluations()) == 2
    (place / "ballast").unlink()
    ending, again = run(place / "0", tuple(line.evaluations()), None)
    assert ending["state"] == "complete"
    assert line.evaluations() | again.evaluations() == whole.evaluations()
    assert not line.evaluations().keys() & again.evaluations().keys()


def test_the_mlflow_store_on_a_full_disk_catches_up(mount_disk: MountDisk, tmp_path: Path, template: Path) -> None:  # noqa: F811
    place = mount_disk("8m")
    whole, made = Made(copied(template, tmp_path / "whole"), trials=3), Made(copied(template, place / "runs"), trials=3)
    Tracker(whole.folder, Store.of(tmp_path / "whole")).catch_up()
    tracker = Tracker(made.folder, Store.of(place / "runs"))
    with filled(place, 65536):
        tracker.catch_up()
        assert tracker.behind
        assert tracker.hopeless
        actor = TrackerActor(made.folder, Store.of(place / "runs"), every=0.05)
        with pytest.raises(TimeoutError, match="MLflow is behind"):
            actor.finish(60)
    tracker.catch_up()
    assert tracker.behind is None
    assert shown(place / "runs") == shown(tmp_path / "whole")


def test_before_the_disk_is_full_the_checkpoints_of_losers_go(mount_disk: MountDisk) -> None:
    place = mount_disk("210m")
    sweep, path = sweep_of(), place / "history.jsonl"
    record = run_trials(sweep, History(path), 1, no_fault, None)
    for number in record.trials:
        checkpoints_of(place, number).mkdir(parents=True)
        (checkpoints_of(place, number) / "weights").write_bytes(b"x" * 2**20)
    assert disk_free(place) < ROOM_BYTES
    delete_losers(sweep, record, place)
    assert disk_free(place) >= ROOM_BYTES
    assert checkpoints_of(place, 0).exists(), "the base's"
    gone = {n for n in record.trials if not checkpoints_of(place, n).exists()}
    assert gone
    assert all(record.trials[number].state == "stopped" for number in gone), "losers first"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_sweep_on_a_full_disk_ends_in_one_line_and_goes_on_with_room(tmp_path: Path, mount_disk: MountDisk) -> None:
    place = mount_disk("300m")
    (tmp_path / "probe.yaml").write_text(SWEEP)
    words = ("sweep", "probe.yaml", "--cards", "1", "--runs", str(place / "runs"))
    process = begin(*words, cwd=tmp_path)
    wait_for(process, "trial 1: 20%")
    with (place / "ballast").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk_free(place))
    _, error = process.communicate(timeout=240)
    assert process.returncode == 130, error
    (line,) = error.strip().splitlines()
    assert line.startswith(f"interrupted (no space left on {place}: make room first); go on with: rigsweep sweep")
    folder = place / "runs" / "probe"
    assert (folder / "history.jsonl").read_bytes().endswith(b"}\n")
    refused = rigsweep(*words, "--resume", cwd=tmp_path)
    assert refused.returncode != 0
    assert len(refused.stderr.strip().splitlines()) == 1, refused.stderr

    (place / "ballast").unlink()
    answer = rigsweep(*words, "--resume", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    trials = decided(folder)
    assert [trial[0] for trial in trials] == list(range(6))
    assert {trial[3] for trial in trials} <= {"complete", "stopped"}
    ends = [event["trial"] for event in read(folder / "history.jsonl") if event["event"] == "ended"]
    assert sorted(ends) == list(range(6))
    told = json.loads((folder / "summary.json").read_text())
    assert all(trial["run_id"] for trial in told["trials"])
