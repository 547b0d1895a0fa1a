"""`study.db`: the sweep as an Optuna study, for optuna-dashboard and for one's own notebooks.

A projection of the history, written when the sweep's process ends; nothing that decides reads it.
"""

import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import distribution_to_json
from optuna.storages import RDBStorage
from optuna.storages._rdb import models
from optuna.trial import FrozenTrial

from .folders import read_sweep, sqlite_uri
from .history import Record, replay
from .study import Study
from .sweep import Sweep


def update_study(sweep: Sweep, folder: Path) -> None:
    """Write the study anew from the history, and put it in place at once."""
    study, record = Study(sweep), Record()
    for event, record in replay(folder / "history.jsonl"):
        study.apply(event, record)
    trials = study.study.get_trials(deepcopy=False)
    _date(trials, record)
    temporary = folder / ".study.db"
    for leftover in folder.glob(".study.db*"):
        leftover.unlink()
    storage = RDBStorage(sqlite_uri(temporary))
    copy = optuna.create_study(storage=storage, study_name=sweep.name, direction=sweep.settings.objective.goal)
    copy.set_user_attr("question", sweep.settings.question)
    _insert(storage, copy._study_id, trials)
    storage.remove_session()
    storage.engine.dispose()
    temporary.replace(folder / "study.db")


def rebuild_study(folder: Path) -> None:
    """The study of a folder, from its history alone."""
    update_study(read_sweep(folder), folder)


def _date(trials: list[FrozenTrial], record: Record) -> None:
    """Give the trials the times of the history, not those of its being read."""
    for group, repeats in record.groups().items():
        trial = trials[len(record.told) + group]
        trial.datetime_start = _local(min(repeat.started or repeat.proposed for repeat in repeats))
        if trial.state.is_finished():
            trial.datetime_complete = _local(max(repeat.ended or 0.0 for repeat in repeats))


def _local(time: float) -> datetime.datetime:
    """Optuna's times: local, without a zone."""
    return datetime.datetime.fromtimestamp(time)


def _insert(storage: RDBStorage, study_id: int, trials: list[FrozenTrial]) -> None:
    """Add trials in one transaction.

    `Study.add_trials` asks the database dozens of questions for each, which is minutes for thousands of trials.
    """
    session = storage.scoped_session()
    with session.begin():
        for trial in trials:
            session.add_all(_rows(study_id, trial))


def _rows(study_id: int, trial: FrozenTrial) -> Iterator[Any]:
    """A trial as the rows of Optuna's own tables."""
    number, key = trial.number, trial.number + 1
    row = models.TrialModel(trial_id=key, number=number, study_id=study_id, state=trial.state)
    row.datetime_start, row.datetime_complete = trial.datetime_start, trial.datetime_complete
    yield row
    for name, distribution in trial.distributions.items():
        yield models.TrialParamModel(
            trial_id=key,
            param_name=name,
            param_value=distribution.to_internal_repr(trial.params[name]),
            distribution_json=distribution_to_json(distribution),
        )
    for objective, value in enumerate(trial.values or ()):
        stored, kind = models.TrialValueModel.value_to_stored_repr(value)
        yield models.TrialValueModel(trial_id=key, objective=objective, value=stored, value_type=kind)
    for step, value in trial.intermediate_values.items():
        stored, kind = models.TrialIntermediateValueModel.intermediate_value_to_stored_repr(value)
        yield models.TrialIntermediateValueModel(
            trial_id=key, step=step, intermediate_value=stored, intermediate_value_type=kind
        )
    for name, value in trial.user_attrs.items():
        yield models.TrialUserAttributeModel(trial_id=key, key=name, value_json=json.dumps(value))
    for name, value in trial.system_attrs.items():
        yield models.TrialSystemAttributeModel(trial_id=key, key=name, value_json=json.dumps(value))
