"""What was measured of cards, and where it is kept: a file for each machine, card (or pair) and version of torch."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from .cards import Card

State = Literal["measured", "wrong", "hung", "failed"]


@dataclass(frozen=True)
class Measurement:
    """One measurement: what came of it, its values by name (units in the names), and when, in Unix seconds.

    `wrong`: it ran, but data arrived changed. `hung`: it was killed at its time limit. `failed`: it ended with an
    error. `reason` says for these what was seen, in one line.
    """

    state: State
    values: Mapping[str, Any]
    reason: str = ""
    at: float = 0.0


def measurements_file(cache: Path, *cards: Card) -> Path:
    """Where the measurements of a card, or of a pair, are kept.

    A GPU has its own, by its UUID: two of a kind differ in slots, power limits and cooling. CPU cards of equally many
    threads share one.
    """
    names = [_slug(card.name) + (f"-{_slug(card.identity)}" if card.kind == "cuda" else "") for card in cards]
    return cache / "speed" / _slug(platform.node() or "machine") / f"{'+'.join(names)}-torch-{torch_version()}.json"


def torch_version() -> str:
    """The installed version of torch, without importing it."""
    return metadata.version("torch")


def read_measurements(file: Path) -> dict[str, Measurement]:
    """The measurements in a file, by part; empty where there are none that this version can read."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
        return {part: _known(Measurement(**fields)) for part, fields in told.items()}
    except (FileNotFoundError, ValueError, TypeError, AttributeError):
        return {}  # never measured, torn by a full disk, or by another version: measured anew


def keep_measurement(file: Path, part: str, measurement: Measurement) -> None:
    """Add or replace one measurement; the file is whole at every moment."""
    kept = {**read_measurements(file), part: measurement}
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps({part: asdict(one) for part, one in kept.items()}, indent=1), encoding="utf-8")
    temporary.replace(file)


def _known(measurement: Measurement) -> Measurement:
    if measurement.state not in get_args(State) or not isinstance(measurement.values, dict):
        raise ValueError(f"no measurement: {measurement}")
    return measurement


def _slug(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name.lower())
