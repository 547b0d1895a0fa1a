"""What a sweep is `from`: a run that is there, or a training file that is trained first."""

from pathlib import Path

import yaml

from . import folders, sweep
from .files import Document, WrongInput
from .scoring import refuse_training
from .sweep import Sweep
from .weights import find_trial


def fill(document: Document, runs: Path) -> None:
    """Give a document the trainable and the base of the run that it is `from`. Raises `WrongInput`."""
    named, own = document.values["from"], document.values.get("base") or {}
    if not isinstance(named, str):
        raise document.wrong(("from",), f"name a run (SWEEP/NUMBER, or SWEEP for its best) or a file, found {named}")
    refuse_training(document, own, named)
    training = to_train(named, runs)
    if training is not None:
        run, found, parameters = f"{training.name}/0", training, {}
    else:
        folder, number = find_trial(named, runs)
        run, found = f"{folder.name}/{number}", folders.read_sweep(folder)
        parameters = folders.record_of(folder).trials[number].parameters
    base = yaml.safe_load(found.training_file(parameters))["base"]
    for section, values in own.items():
        inner = base.get(section)
        base[section] = inner | values if isinstance(inner, dict) and isinstance(values, dict) else values
    document.values |= {"trainable": found.settings.trainable, "base": base | {"initial": run}}


def to_train(named: str, runs: Path) -> Sweep | None:
    """The training that `from` names by its file, to be trained or gone on with first; None where it is a run."""
    if (runs / named / "history.jsonl").is_file():
        return None
    try:
        path = sweep.find(named)
    except WrongInput as error:
        try:
            find_trial(named, runs)
        except WrongInput as other:
            raise WrongInput(f"from: {named} is neither a run in {runs} nor a file ({other}; {error})") from error
        return None
    return folders.base_alone(sweep.load(str(path), (), runs))


def untrained(asked: Sweep, runs: Path) -> Sweep | None:
    """What is to be trained before a sweep can sample from it; None where that is done. Raises `WrongInput`."""
    training = to_train(str(asked.settings.from_), runs)
    if training is None:
        return None
    folder = runs / training.name
    if not (folder / "sweep.yaml").is_file():
        return training
    if differing := sweep.changed(folders.read_sweep(folder), training):
        raise WrongInput(
            f"from: {folder} was trained with another {next(iter(differing))} than {asked.settings.from_} now has; "
            f"write `from: {training.name}/0` to use it as it is, or remove the folder"
        )
    over = [trial.over for trial in folders.record_of(folder).trials.values()]
    return None if over and all(over) else training
