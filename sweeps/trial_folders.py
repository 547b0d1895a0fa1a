"""Reading what a training leaves in its trial's folder, on from where the last look ended.

`metrics.jsonl` has a row a report; `samples/<examples>-<name>.txt` (or `.png`) what the model made. Another process
writes both while they are read (`trainables/door.py`).
"""

import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from .history import Report

_log = logging.getLogger(__name__)
_BESIDE = ("examples", "total", "flops", "seconds", "time")  # of a row: where it stands, not what it says


class Point(NamedTuple):
    """One number of a row."""

    name: str
    value: float
    time: float
    examples: int


@dataclass(frozen=True)
class Look:
    """What is new in a folder; `TrialFolder.keep` it once it has arrived where it goes."""

    points: list[Point]
    samples: list[str]
    seen: set[tuple[int, str]]
    offset: int
    size: int


@dataclass
class TrialFolder:
    """A trial's folder, and how much of it has been dealt with."""

    path: Path
    offset: int = 0
    """Bytes of the rows that have been dealt with."""
    samples: list[str] = field(default_factory=list)
    until: float = float("inf")
    """When (monotonic) it need not be looked at any more."""
    _seen: set[tuple[int, str]] = field(default_factory=set)
    _size: int = -1

    def has_news(self) -> bool:
        """Whether anything was written since the last look that was kept."""
        return self._rows_size() not in (-1, self._size) or bool(self._new_samples())

    def look(self, reports: Iterable[Report]) -> Look:
        """Read on. Where there are no rows, as they lie on another machine, the history's `reports` stand in.

        A row that is repeated after a resume is the same training over again, so the first one stands: what
        was passed on as it came then equals what is passed on later in one go.
        """
        size, points = self._rows_size(), list[Point]()
        offset = self.offset if self.offset <= size else 0
        seen = set(self._seen) if offset == self.offset else set[tuple[int, str]]()
        rows: Iterable[tuple[dict[str, Any], int]]
        if size < 0:
            told = [asdict(report) for report in reports]
            rows = [(report | report.pop("metrics"), 1) for report in told]
        else:
            # With nothing in mind, what was dealt with is read again, to know it.
            rows = _read_rows(self.path / "metrics.jsonl", offset if seen else 0)
        end = offset
        for row, behind in rows:
            end = max(end, behind) if size >= 0 else 0
            for point in _points(row):
                key = (point.examples, point.name)
                if key not in seen:
                    seen.add(key)
                    if behind > offset:
                        points.append(point)
        return Look(points, self._new_samples(), seen, end, size)

    def keep(self, look: Look) -> None:
        """What was seen has been dealt with."""
        self.offset, self._seen, self._size = look.offset, look.seen, look.size
        self.samples += look.samples

    def newest_sample(self, look: Look) -> Path | None:
        """The text after the most examples, if it is still there."""
        names = [name for name in (*self.samples, *look.samples) if name.endswith(".txt")]
        path = self.path / "samples" / max(names) if names else None
        return path if path and path.exists() else None

    def _rows_size(self) -> int:
        path = self.path / "metrics.jsonl"
        return path.stat().st_size if path.exists() else -1

    def _new_samples(self) -> list[str]:
        folder = self.path / "samples"
        if not folder.is_dir():
            return []
        # A name with a dot in front is being written.
        return sorted(f.name for f in folder.iterdir() if not f.name.startswith(".") and f.name not in self.samples)


def _points(row: dict[str, Any]) -> Iterator[Point]:
    """The numbers of a row; of an evaluation also FLOPs and seconds, so that it can be drawn over them."""
    evaluation = any(name.startswith("validation/") for name in row)
    for name, value in row.items():
        if name in _BESIDE and not (evaluation and name in ("flops", "seconds")):
            continue
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield Point(name, float(value), row["time"], row["examples"])


def _read_rows(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Rows from a byte on, each with the byte behind it; a torn last line is left for the next time."""
    with path.open("rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                return
            start += len(line)
            row: dict[str, Any] = {}
            try:
                row = json.loads(line) if line.strip() else {}
                whole = not row or (isinstance(row["examples"], int) and isinstance(row["time"], int | float))
            except (ValueError, TypeError, KeyError):
                whole = False
            if not whole:
                # Half a line of a process that was killed, which its successor has ended.
                _log.warning("%s: the row that ends at byte %d is damaged and left out", path, start)
            yield row if whole else {}, start
