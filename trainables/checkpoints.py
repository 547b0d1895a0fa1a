"""Checkpoints: whole or not there, checked when read, without hyper-parameters.

`<trial>/checkpoints/<examples>/` holds model.safetensors, one more for each average of the weights (such as
ema-0.999.safetensors), optimizer.safetensors and progress.json; manifest.json, written last, has the size and
SHA-256 of each. The folder is written under another name and renamed into place, so that a kill at any moment
leaves the one before it.
"""

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

from ..datasets.cache import flush, sha256
from .door import Progress
from .errors import NewerVersion
from .optimizer import load_named_state, named_state

_log = logging.getLogger(__name__)
_VERSION = 1
_FILES = ("model.safetensors", "optimizer.safetensors", "progress.json")


class CheckpointError(Exception):
    """A checkpoint is damaged or does not fit; the message is one line that names it."""


@dataclass(frozen=True)
class Saved:
    """What a checkpoint says beside its weights."""

    progress: Progress
    evaluations: list[tuple[Progress, dict[str, float]]]
    """Every evaluation so far: what follows the trial may have missed the last ones."""
    health: dict[str, Any] = field(default_factory=dict)
    """What the health rules remember."""
    weights: str = "model.safetensors"
    """The file of the weights whose metrics and samples count."""

    def at(self, progress: Progress, health: dict[str, Any]) -> "Saved":
        """The same, later in the training."""
        return replace(self, progress=progress, health=health)


def save(
    folder: Path,
    saved: Saved,
    model: nn.Module,
    averages: Mapping[str, nn.Module],
    optimizer: torch.optim.Optimizer,
) -> Path:
    """Write a checkpoint into the folder of a trial's checkpoints; returns its own folder.

    A whole one of the same progress stays: it holds the same, and two folders cannot change places at once.
    """
    final = path_at(folder, saved.progress)
    if final.exists() and _is_whole(final):
        return final
    temporary = folder / f".new-{final.name}"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_model(model, str(temporary / "model.safetensors"))
        for name, average in averages.items():
            save_model(average, str(temporary / f"{name}.safetensors"))
        save_file(named_state(model, optimizer), temporary / "optimizer.safetensors")
        (temporary / "progress.json").write_text(json.dumps(asdict(saved)))
        files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in temporary.iterdir()}
        (temporary / "manifest.json").write_text(json.dumps({"version": _VERSION, "files": files}, indent=1))
        for file in [*temporary.iterdir(), temporary]:
            flush(file)
        shutil.rmtree(final, ignore_errors=True)  # a damaged one
        temporary.rename(final)
        flush(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"checkpoint {final} could not be written: {_short(str(error))}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def path_at(folder: Path, progress: Progress) -> Path:
    """Where the checkpoint of that progress is, if there is one."""
    return folder / f"{progress.examples:012d}"


def all_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("[0-9]*") if path.is_dir())


def latest(folder: Path) -> Path | None:
    """The newest checkpoint that is whole; damaged ones are passed over, and the log says so.

    Raises `NewerVersion` where the newest was written by one: to begin before it would lose what came since.
    """
    return next(filter(_is_whole, reversed(all_in(folder))), None)


def check(path: Path) -> None:
    """Raise `CheckpointError` unless every file is as its manifest says, `NewerVersion` where it is of one."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        newer = manifest["version"] > _VERSION
        told = {} if newer else {name: (file["bytes"], file["sha256"]) for name, file in manifest["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"checkpoint {path} has no readable manifest") from error
    if newer:
        raise NewerVersion(f"checkpoint {path} was written by a newer version of rigsweep; update this one")
    for name in sorted({*_FILES, *told, *(file.name for file in path.glob("*.safetensors"))}):
        try:
            found = (path / name).stat().st_size, sha256(path / name)
        except OSError:
            found = None
        if found is None or found != told.get(name):
            raise CheckpointError(f"checkpoint {path} is damaged: {name} is not what its manifest says")


def read(path: Path) -> Saved:
    """What a checkpoint says beside its weights."""
    found: dict[str, Any] = json.loads((path / "progress.json").read_text())
    return Saved(
        Progress(**found["progress"]),
        [(Progress(**progress), metrics) for progress, metrics in found["evaluations"]],
        found.get("health", {}),
        found.get("weights", "model.safetensors"),
    )


def restore(path: Path, model: nn.Module, averages: Mapping[str, nn.Module], optimizer: torch.optim.Optimizer) -> Saved:
    """Load a checkpoint into a model, its averages and its optimizer."""
    load_weights(path / "model.safetensors", model)
    for name, average in averages.items():
        # A file that was edited to have another average goes on from the one that counted.
        own = path / f"{name}.safetensors"
        load_weights(own if own.exists() else weights_of(path), average)
    load_named_state(model, optimizer, load_file(path / "optimizer.safetensors"))
    return read(path)


def weights_of(path: Path) -> Path:
    """The weights to use of a finished training: those whose metrics and samples counted."""
    return path / Path(read(path).weights).name


def load_weights(file: Path, model: nn.Module) -> None:
    """Load weights that must fit the model exactly."""
    try:
        load_model(model, str(file))
    except RuntimeError as error:
        raise CheckpointError(f"the weights in {file} do not fit this model: {_short(str(error))}") from error


def keep_only(folder: Path, *kept: Path | None) -> None:
    """Delete every checkpoint of a trial but these, and what a kill left half-written."""
    for path in [*all_in(folder), *folder.glob(".new-*")]:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def best(folder: Path, metric: str, sign: int) -> Path | None:
    """The checkpoint with the best evaluation; `sign` is 1 where less is better, else -1."""
    scored: dict[Path, float] = {}
    for path in all_in(folder):
        try:
            evaluations = read(path).evaluations
        except (OSError, ValueError, LookupError, TypeError):  # damaged
            continue
        for progress, metrics in evaluations:
            if path == path_at(folder, progress) and metric in metrics:
                scored[path] = sign * metrics[metric]
    return min(scored, key=scored.__getitem__, default=None)


def _is_whole(path: Path) -> bool:
    try:
        check(path)
    except CheckpointError as error:
        _log.warning("%s; passed over", error)
        return False
    return True


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
