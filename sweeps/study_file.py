"""`study.db`: the sweep as an Optuna study, for optuna-dashboard and for one's own notebooks.

A projection of the history, written when the sweep's process ends (110 ms a trial while it runs would be
noticed; nothing that decides reads it).
"""

from pathlib import Path

import optuna

from .folders import read_sweep
from .history import replay
from .study import Study
from .sweep import Sweep


def update_study(sweep: Sweep, folder: Path) -> None:
    """Write the study anew from the history, and put it in place at once."""
    study = Study(sweep)
    for event, record in replay(folder / "history.jsonl"):
        study.apply(event, record)
    temporary = folder / ".study.db"
    for leftover in folder.glob(".study.db*"):
        leftover.unlink()
    storage = optuna.storages.RDBStorage(f"sqlite:///{temporary}")
    copy = optuna.create_study(
        storage=storage, study_name=sweep.name, direction=sweep.settings.objective.goal, load_if_exists=True
    )
    copy.set_user_attr("question", sweep.settings.question)
    copy.add_trials(study.study.get_trials(deepcopy=False))
    storage.remove_session()
    storage.engine.dispose()
    temporary.replace(folder / "study.db")


def rebuild_study(folder: Path) -> None:
    """The study of a folder, from its history alone."""
    update_study(read_sweep(folder), folder)
