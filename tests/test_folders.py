"""Sweep folders: begun, gone on with, left alone, or begun anew beside."""

from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import folders
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.sweep import Sweep

from .simulator import SWEEP, simulate


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.yaml"
    path.write_text(SWEEP)
    return str(path)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def opened(
    file: str, runs: Path, *overrides: str, resume: bool = False, new: bool = False, training: bool = False
) -> tuple[Sweep, dict[str, Any]]:
    return folders.open_sweep(file, overrides, runs, resume=resume, new=new, training=training)


def begun(file: str, runs: Path, *overrides: str, new: bool = False) -> Sweep:
    sweep, _ = opened(file, runs, *overrides, new=new)
    folder = runs / sweep.name
    folder.mkdir()
    folders.write_settings(sweep, folder)
    simulate(sweep, folder / "history.jsonl", most_events=5)
    return sweep


def refusal_of(*arguments: Any, **options: Any) -> str:
    with pytest.raises(WrongInput) as error:
        opened(*arguments, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_that_is_not_there_is_begun_with_resume_or_without(file: str, runs: Path) -> None:
    assert opened(file, runs)[0].name == "mine"
    assert opened(file, runs, resume=True)[0].name == "mine"


def test_a_folder_that_exists_is_an_error_that_names_both_ways_on(file: str, runs: Path) -> None:
    begun(file, runs)
    assert refusal_of(file, runs) == (
        f"{runs / 'mine'} exists: go on with it by `rigsweep sweep {file} --resume`, "
        f"or begin beside it by `rigsweep sweep {file} --new`"
    )


def test_a_folder_is_resumed_by_its_file_or_by_its_name(file: str, runs: Path) -> None:
    first = begun(file, runs)
    assert opened(file, runs, resume=True)[0].resolved() == first.resolved()
    Path(file).unlink()
    assert opened("mine", runs, resume=True)[0].resolved() == first.resolved()


def test_new_begins_beside_it_and_can_be_resumed(file: str, runs: Path) -> None:
    begun(file, runs)
    assert begun(file, runs, new=True).name == "mine-2"
    assert begun(file, runs, new=True).name == "mine-3"
    assert opened("mine-2", runs, resume=True)[0].name == "mine-2"


def test_trials_and_limits_may_change_at_a_resume(file: str, runs: Path) -> None:
    begun(file, runs)
    sweep, differing = opened(file, runs, "trials=99", "limits.device_time=2h", resume=True)
    assert (sweep.settings.trials, sweep.settings.limits.device_time, differing) == (99, 7200, {})


def test_a_folder_of_another_sweep_is_refused_with_what_differs(file: str, runs: Path) -> None:
    begun(file, runs)
    assert refusal_of(file, runs, "base.model.width=96", "base.seed=3", resume=True) == (
        f"{runs / 'mine'} belongs to another sweep: its base.model.width is 64, the file's 96, and 1 more: base.seed; "
        f"begin beside it by `rigsweep sweep {file} --new`"
    )
    assert "its search.model.width.choices is [64, 96, 128], the file's nothing" in refusal_of(
        file, runs, "search.model.width=", resume=True
    )


def test_a_folder_that_is_no_sweeps_is_left_alone(file: str, runs: Path) -> None:
    (runs / "mine").mkdir()
    (runs / "mine" / "thesis.tex").write_text("mine")
    assert refusal_of(file, runs).startswith(f"{runs / 'mine'} exists: ")
    assert refusal_of(file, runs, resume=True).startswith(
        f"{runs / 'mine'} is not a sweep's folder; begin beside it by"
    )


def test_a_folder_in_which_nothing_was_begun_yet_is_begun(file: str, runs: Path) -> None:
    # What is left where the data could not be prepared: the history is empty, and no settings were written.
    (runs / "mine" / "log").mkdir(parents=True)
    (runs / "mine" / "history.jsonl").touch()
    assert opened(file, runs)[0].name == "mine"
    assert opened(file, runs, resume=True)[0].name == "mine"


def test_a_training_is_the_base_alone_and_may_be_edited(file: str, runs: Path) -> None:
    sweep, _ = opened(file, runs, training=True)
    assert (sweep.name, sweep.settings.trials, sweep.space.dimensions) == ("mine-base", 1, ())
    assert sweep.training({}).optimizer.learning_rate == 1e-3
    (runs / "mine-base").mkdir()
    folders.write_settings(sweep, runs / "mine-base")
    edited, differing = opened(file, runs, "base.optimizer.learning_rate=2e-3", training=True, resume=True)
    assert differing == {"base.optimizer.learning_rate": [0.001, 0.002]}
    assert edited.training({}).optimizer.learning_rate == 2e-3


def test_a_training_of_a_sweep_that_compares_within_groups_can_be_read_again(runs: Path) -> None:
    sweep = folders.base_alone(folders.load("quickstart"))
    (runs / sweep.name).mkdir(parents=True)
    folders.write_settings(sweep, runs / sweep.name)
    assert folders.read_sweep(runs / sweep.name).settings.early_stopping == sweep.settings.early_stopping


def test_a_sweep_is_found_by_name_or_as_the_newest(file: str, runs: Path) -> None:
    with pytest.raises(WrongInput, match="no sweeps yet"):
        folders.find_sweep(runs, None)
    begun(file, runs)
    begun(file, runs, new=True)
    (runs / "mine" / "history.jsonl").touch()
    assert folders.find_sweep(runs, "mine-2") == runs / "mine-2"
    assert folders.find_sweep(runs, None) in (runs / "mine", runs / "mine-2")
    with pytest.raises(WrongInput, match="no such sweep; did you mean mine"):
        folders.find_sweep(runs, "mime")
    with pytest.raises(WrongInput, match=r"no such sweep; there are: mine"):
        folders.find_sweep(runs, "xyz")


def test_the_settings_of_a_folder_are_the_sweep(file: str, runs: Path) -> None:
    sweep = begun(file, runs)
    assert folders.read_sweep(runs / "mine").resolved() == sweep.resolved()
    assert len(folders.record_of(runs / "mine").trials) > 0
    with pytest.raises(WrongInput, match="no sweep here"):
        folders.read_sweep(runs)
