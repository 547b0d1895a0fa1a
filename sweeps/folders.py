"""Sweep folders: which one a command means, and what stands in it."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

from . import files
from .files import WrongInput
from .history import Record, fold
from .sweep import Sweep, changed, check, load
from .validation import nearest

_SETTINGS = "sweep.yaml"


def open_sweep(
    name_or_path: str, overrides: tuple[str, ...], runs: Path, *, resume: bool, new: bool, training: bool = False
) -> tuple[Sweep, dict[str, Any]]:
    """The sweep to run, with the name of its folder, and what was edited since. Raises `WrongInput`.

    A folder that exists is gone on with (`resume`; only in `trials`, `limits` and the like may the file of a
    sweep differ, a training's in anything), or left alone and another begun beside it (`new`). With `resume`
    and no folder, it begins.
    """
    kept = runs / name_or_path / _SETTINGS
    if resume and kept.is_file() and not Path(name_or_path).is_file():
        # The folder's own file: the one it came from may have gone, or be another by now.
        try:
            asked = load(name_or_path, overrides, runs)
        except WrongInput:
            asked = check(files.read(kept, overrides), name_or_path)
    else:
        asked = load(name_or_path, overrides, runs)
    if training:
        asked = base_alone(asked)
    folder = runs / asked.name
    if not _begun(folder):
        return asked, {}
    if new:
        names = (f"{asked.name}-{i}" for i in itertools.count(2))
        return dataclasses.replace(asked, name=next(name for name in names if not (runs / name).exists())), {}
    command = f"rigsweep {'train' if training else 'sweep'} {name_or_path}"
    if not resume:
        raise WrongInput(
            f"{folder} exists: go on with it by `{command} --resume`, or begin beside it by `{command} --new`"
        )
    if not (folder / _SETTINGS).is_file():
        raise WrongInput(f"{folder} is not a sweep's folder; begin beside it by `{command} --new`")
    differing = changed(read_sweep(folder), asked)
    if differing and not training:
        first, *others = differing
        before, after = ("nothing" if value is None else value for value in differing[first])
        more = f", and {len(others)} more: {', '.join(others[:4])}" if others else ""
        raise WrongInput(
            f"{folder} belongs to another sweep: its {first} is {before}, the file's {after}{more}; "
            f"begin beside it by `{command} --new`"
        )
    return asked, differing


def go_on(asked: Sweep, runs: Path) -> Sweep:
    """A sweep that goes on with its folder if that is its own. Raises `WrongInput`."""
    folder = runs / asked.name
    if _begun(folder) and (differing := changed(read_sweep(folder), asked)):
        raise WrongInput(f"{folder} belongs to another sweep: its {next(iter(differing))} differs; remove the folder")
    return asked


def _begun(folder: Path) -> bool:
    """Whether there is something in a sweep's folder: data that was never got ready leaves an empty history."""
    if not folder.exists() or (folder / _SETTINGS).exists():
        return folder.exists()
    history = folder / "history.jsonl"
    return history.stat().st_size > 0 if history.exists() else any(folder.iterdir())


def base_alone(asked: Sweep) -> Sweep:
    """A file's base as a sweep of one trial: what `train` trains."""
    # Named apart, so that a sweep and the training of its base can stand side by side.
    name = f"{asked.name}-base" if asked.settings.search else asked.name
    stopping = asked.settings.early_stopping.model_copy(update={"rule": "none", "within": None})
    alone = {"search": {}, "trials": 1, "repeats": 1, "start_from": [], "searcher": "tpe", "early_stopping": stopping}
    settings = asked.settings.model_copy(update=alone)
    space = dataclasses.replace(asked.space, dimensions=())
    return dataclasses.replace(asked, name=name, settings=settings, space=space, grid=())


def record_of(folder: Path) -> Record:
    """The state of a folder's sweep."""
    return fold(folder / "history.jsonl")


def read_sweep(folder: Path) -> Sweep:
    """The sweep of a folder, as it was resolved. Raises `WrongInput`."""
    if not (folder / _SETTINGS).is_file():
        raise WrongInput(f"{folder}: no sweep here")
    return check(files.read(folder / _SETTINGS), folder.name)


def write_settings(sweep: Sweep, folder: Path) -> None:
    """Write the resolved sweep file."""
    temporary = folder / f".{_SETTINGS}"
    temporary.write_text(sweep.resolved(), encoding="utf-8")
    temporary.replace(folder / _SETTINGS)


def sqlite_uri(file: Path) -> str:
    """The address of an SQLite file as SQLAlchemy reads it, for which `%` and `?` are more than characters."""
    return "sqlite:///" + str(file).replace("%", "%25").replace("?", "%3F")


def find_sweep(runs: Path, name: str | None) -> Path:
    """The folder of a sweep by name, or the newest one. Raises `WrongInput`."""
    found = sorted(runs.glob("*/history.jsonl"), key=lambda file: file.stat().st_mtime)
    if name is None:
        if not found:
            raise WrongInput(f"{runs}: no sweeps yet; begin one with `rigsweep sweep quickstart`")
        return found[-1].parent
    names = [file.parent.name for file in found]
    if name not in names:
        hint = nearest(name, names) or (f"; there are: {', '.join(names)}" if names else "")
        raise WrongInput(f"{runs / name}: no such sweep{hint}")
    return runs / name
