"""The one way out of a training: everything that it reports goes through `Door.report`.

A trial's folder is written here and nowhere else; evaluations also go to whoever follows the trial. The
training knows neither Ray nor MLflow.
"""

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from .phases import Phases

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """How far a trial is: examples seen of its whole budget, FLOPs and seconds spent on them."""

    examples: int = 0
    total: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Ending:
    """How a training ended: one of the ends of a trial, or `interrupted`, and a reason a person can read."""

    state: str
    reason: str
    rule: str = ""
    """The health rule that ended it, if one did."""
    memory_share: float | None = None
    """What it takes of its card's memory by the estimate, where it ran out: 1.3 is a third too much."""


class Line(Protocol):
    """What a door needs of the line to whoever follows the trial (a lane's channel)."""

    order: str | None
    progress: dict[str, Any]
    rank: int
    """Which of a trial's workers this is; only the first (0) speaks."""
    workers: int
    phases: Callable[[], dict[str, float]]
    """Seconds by phase so far; set by whoever runs the trial."""

    def send(self, message: dict[str, Any]) -> None:
        """Deliver a message; returns once it has arrived."""
        ...


class Door:
    """Where a training reports to."""

    def __init__(self, folder: Path, line: Line):
        self._folder, self._line = folder, line
        self.rank, self.workers = line.rank, line.workers
        self.phases = Phases()
        line.phases = self.phases.read
        folder.mkdir(parents=True, exist_ok=True)
        self._warned: set[str] = set()
        self.seen: Progress | None = None
        """How far the trial was when it last asked for an order."""
        self._metrics = (folder / "metrics.jsonl").open("ab")
        _end_line(folder / "metrics.jsonl", self._metrics)

    def order(self, progress: Progress, **shown: float) -> str | None:
        """Say how far the trial is; the answer is `stop` or `interrupt` when it is to leave, else None.

        Costs nothing, so it can be asked before every step. `shown` is what a live table shows beside it.
        """
        self.seen = progress
        self._line.progress = {"examples": progress.examples, "total": progress.total, **shown}
        return self._line.order

    def keep(
        self,
        progress: Progress,
        texts: Mapping[str, str] | None = None,
        images: Mapping[str, Any] | None = None,
        of: str = "",
    ) -> None:
        """Keep samples made at `progress`: images are uint8 arrays (height, width, 3); `of` names other weights.

        Before its checkpoint is saved: a training that goes on from that draws no samples again.
        """
        for name, text in (texts or {}).items():
            with self._sample(progress, name, of, ".txt") as file:
                file.write(text.encode())
        for name, image in (images or {}).items():
            from PIL import Image

            with self._sample(progress, name, of, ".png") as file:
                Image.fromarray(image).save(file, "PNG")

    @contextlib.contextmanager
    def _sample(self, progress: Progress, name: str, of: str, suffix: str) -> Iterator[Any]:
        """A sample's file, which is there when it is whole."""
        file = self._folder / "samples" / f"{progress.examples:012d}-{name}{f'-{of}' if of else ''}{suffix}"
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_name(f".{file.name}")
        with temporary.open("wb") as opened:
            yield opened
        temporary.replace(file)

    def report(self, progress: Progress, metrics: Mapping[str, float], *, checkpoint: Path | None = None) -> None:
        """Keep metrics of the trial at `progress`.

        With metrics named `validation/...` the report is an evaluation: it is what stopping and searching
        decide on, and it is delivered before this returns. A number that is not finite has no place in JSON: it
        is null in the file and left out of what is delivered.
        """
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        row = {**asdict(progress), "time": time.time(), **dict.fromkeys(metrics), **finite}
        self._metrics.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._metrics.flush()
        if any(name.startswith("validation/") for name in metrics):
            self._line.send(
                {
                    "event": "report",
                    **asdict(progress),
                    "metrics": finite,
                    "checkpoint": checkpoint.name if checkpoint else None,
                }
            )

    def warn(self, rule: str, reason: str, progress: Progress) -> None:
        """Say, once, what a health rule has found; the trial goes on."""
        if rule not in self._warned:
            self._warned.add(rule)
            _log.warning("%s: %s", rule, reason)
            self._line.send({"event": "warning", "rule": rule, "reason": reason, "examples": progress.examples})

    def close(self) -> None:
        """Flush what was reported to disk."""
        self._metrics.flush()
        os.fsync(self._metrics.fileno())
        self._metrics.close()


class ClosedDoor(Door):
    """The door of a worker that is not the first: what it would report, the first one does."""

    def __init__(self, folder: Path, line: Line):
        self.rank, self.workers = line.rank, line.workers
        self.phases = Phases()
        self.seen = None
        folder.mkdir(parents=True, exist_ok=True)

    def order(self, progress: Progress, **shown: float) -> str | None:
        """None."""

    def keep(
        self,
        progress: Progress,
        texts: Mapping[str, str] | None = None,
        images: Mapping[str, Any] | None = None,
        of: str = "",
    ) -> None:
        """Nothing."""

    def report(self, progress: Progress, metrics: Mapping[str, float], *, checkpoint: Path | None = None) -> None:
        """Nothing."""

    def warn(self, rule: str, reason: str, progress: Progress) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


def _end_line(path: Path, file: Any) -> None:
    # A process that was killed may have left half a line; what follows must not be glued to it.
    with path.open("rb") as existing:
        if existing.seek(0, os.SEEK_END):
            existing.seek(-1, os.SEEK_END)
            if existing.read(1) != b"\n":
                file.write(b"\n")
