"""Warm start: what earlier sweeps have found, for a searcher to know before its first trial.

A trial fits when its training would be one of this sweep's: the searched keys lie in the search, and all others
are the base's own, for a loss after another budget or on other data would be compared with what it is not. Only
the seed and what leaves the result alone may differ. What fits is written into the history at the first opening;
from then on the sweep does not depend on the other's folder.
"""

from pathlib import Path
from typing import Any

from . import folders
from .files import Keys, WrongInput
from .history import Trial
from .repeats import mean_at, outcome
from .space import Parameters, flatten, word
from .sweep import Sweep

_FREE = ("seed", "evaluation.every", "precision", "compile", "recompute", "batch.micro")


def earlier_trials(sweep: Sweep, runs: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """The trials that fit, as the history keeps them, and a line about each of the sweeps that they are from.

    Each has `trial` (sweep/number), `parameters`, `state`, `value`, `reports` (the objective by examples) and
    `reason`. Raises `WrongInput` for a sweep that does not exist, or of which nothing fits.
    """
    told: list[dict[str, Any]] = []
    notes: list[str] = []
    for i, name in enumerate(sweep.settings.start_from):
        place: Keys = ("start_from", i) if ("start_from", i) in sweep.document.places else ("start_from",)
        try:
            fitting, note = _of_sweep(sweep, _find(sweep, name, runs))
        except WrongInput as error:
            raise sweep.document.wrong(place, str(error)) from None
        told += fitting
        notes.append(note)
    return told, notes


def _find(sweep: Sweep, name: str, runs: Path) -> Path:
    path = Path(name).expanduser()
    folder = path if (path / "history.jsonl").is_file() else folders.find_sweep(runs, name)
    if folder.resolve() == (runs / sweep.name).resolve():
        raise WrongInput(f"{name} is this sweep itself; go on with it by --resume, or begin beside it by --new")
    return folder


def _of_sweep(sweep: Sweep, folder: Path) -> tuple[list[dict[str, Any]], str]:
    earlier, record = folders.read_sweep(folder), folders.record_of(folder)
    metric = sweep.settings.objective.metric
    for what, theirs, ours in (
        ("trains", earlier.settings.trainable, sweep.settings.trainable),
        ("optimises", earlier.settings.objective.metric, metric),
    ):
        if theirs != ours:
            raise WrongInput(f"{earlier.name} {what} {theirs}, this sweep {ours}")
    told: list[dict[str, Any]] = []
    misfits: list[str] = []
    for repeats in record.groups().values():
        if len(repeats) < earlier.settings.repeats or not all(trial.over for trial in repeats):
            continue
        state, value, reason = outcome(repeats)
        if state == "failed":
            continue
        parameters = _parameters(sweep, flatten(earlier.training(repeats[0].parameters).model_dump(mode="json")))
        if isinstance(parameters, str):
            misfits.append(parameters)
            continue
        told.append(
            {
                "trial": f"{earlier.name}/{repeats[0].number}",
                "parameters": parameters,
                "state": state,
                "value": value if state == "complete" else None,
                "reports": _reports(repeats, metric),
                "reason": reason,
            }
        )
    of = f"{len(told)} of the {len(told) + len(misfits)} finished trials of {earlier.name}"
    if not told:
        why = f": {misfits[0]}" if misfits else ""
        raise WrongInput(f"none of the {len(misfits)} finished trials of {earlier.name} fits{why}")
    return told, f"starts from {of}" + (f" (of the others, the first: {misfits[0]})" if misfits else "")


def _parameters(sweep: Sweep, theirs: dict[str, Any]) -> Parameters | str:
    """A training of another sweep as parameters of this one, or in what it is none."""
    parameters: Parameters = {}
    values = dict(sweep.space.values)
    for dimension in sweep.space.dimensions:
        if not dimension.active(values):
            continue
        value = theirs.get(dimension.key)
        if not dimension.holds(value):
            return f"{dimension.key} is {word(value)} there, the search has {dimension.allowed()}"
        if dimension.kind == "choice":
            value = dimension.value(dimension.index(value))
        parameters[dimension.key] = values[dimension.key] = value
    try:
        ours = flatten(sweep.training(parameters).model_dump(mode="json"))
    except WrongInput as error:
        return error.problem or str(error)
    for key in [key for key in ours | theirs if key not in _FREE and ours.get(key) != theirs.get(key)]:
        return f"{key} is {word(theirs.get(key))} there, {word(ours.get(key))} here"
    return parameters


def _reports(repeats: list[Trial], metric: str) -> dict[int, float]:
    examples = sorted({at for trial in repeats for at in trial.reports})
    means = {at: mean_at(repeats, at, metric) for at in examples}
    return {at: value for at, value in means.items() if value is not None}
