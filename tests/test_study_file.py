"""`study.db`: opens with Optuna, says what the history says, and can be rebuilt from it."""

from pathlib import Path

import optuna
import pytest
from optuna.trial import FrozenTrial, TrialState

from rigsweep.sweeps import folders
from rigsweep.sweeps.history import Record
from rigsweep.sweeps.study_file import rebuild_study, update_study
from rigsweep.sweeps.sweep import Sweep
from rigsweep.trainables.surface_settings import SurfaceTraining

from .simulator import SWEEP, simulate, sweep_of

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


def shortage(training: SurfaceTraining, share: float, attempt: int) -> str | None:
    return "out_of_memory" if training.model.width == 128 else None


def begun(folder: Path, most_events: int | None = None) -> tuple[Sweep, Record]:
    folder.mkdir()
    sweep = sweep_of(SWEEP, "question=哪个?", name=folder.name)
    folders.write_settings(sweep, folder)
    return sweep, simulate(sweep, folder / "history.jsonl", slots=2, fault=shortage, most_events=most_events)


def trials_in(folder: Path) -> list[FrozenTrial]:
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'study.db'}")
    assert study.direction == optuna.study.StudyDirection.MINIMIZE
    assert study.user_attrs == {"question": "哪个?"}
    return study.get_trials()


def test_it_has_every_trial_with_its_state(tmp_path: Path) -> None:
    folder = tmp_path / "made sweep 2"
    sweep, record = begun(folder)
    update_study(sweep, folder)
    told = trials_in(folder)
    assert len(told) == 16
    pruned = {"stopped", "out_of_memory"}
    for number, trial in record.trials.items():
        assert told[number].state == (TrialState.PRUNED if trial.state in pruned else TrialState.COMPLETE)
        assert told[number].params == trial.parameters
        assert told[number].user_attrs["reason"] == trial.reason
        assert told[number].constraints["memory"] == (1.0 if trial.state == "out_of_memory" else -1.0)
        assert len(told[number].intermediate_values) == len(trial.reports)
        assert [t and t.timestamp() for t in (told[number].datetime_start, told[number].datetime_complete)] == [
            trial.started,
            trial.ended,
        ]


def test_it_holds_all_that_optuna_itself_would_have_written(tmp_path: Path) -> None:
    sweep, _ = begun(tmp_path / "made", most_events=25)
    update_study(sweep, tmp_path / "made")
    ours = optuna.load_study(study_name="made", storage=f"sqlite:///{tmp_path / 'made' / 'study.db'}")
    theirs = optuna.create_study(storage=f"sqlite:///{tmp_path / 'theirs.db'}", study_name="made")
    theirs.add_trials(ours.get_trials())
    assert theirs.get_trials() == ours.get_trials()
    assert len({trial.state for trial in ours.get_trials()}) > 1
    ours.ask()  # it can be gone on with
    assert len(ours.get_trials()) == len(theirs.get_trials()) + 1


def test_trials_that_are_not_over_are_running(tmp_path: Path) -> None:
    sweep, record = begun(tmp_path / "made", most_events=12)
    update_study(sweep, tmp_path / "made")
    told = trials_in(tmp_path / "made")
    running = [number for number, trial in record.trials.items() if not trial.over]
    assert running
    assert [number for number, trial in enumerate(told) if trial.state == TrialState.RUNNING] == running


def test_it_is_rebuilt_from_the_folder_alone_and_can_be_written_again(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    sweep, _ = begun(folder)
    update_study(sweep, folder)
    first = [(trial.state, trial.params, trial.values, trial.intermediate_values) for trial in trials_in(folder)]
    (folder / "study.db").unlink()
    (folder / ".study.db-journal").write_text("left over")
    for _ in range(2):
        rebuild_study(folder)
        assert [(t.state, t.params, t.values, t.intermediate_values) for t in trials_in(folder)] == first
    assert not list(folder.glob(".study.db*"))
