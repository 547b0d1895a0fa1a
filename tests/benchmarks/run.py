"""`make bench`: one row each of what rigsweep promises about speed and quality, measured here and now.

Ratios are taken within one run, as the median over interleaved blocks, since machines are noisy. Nothing else
should run meanwhile. `python tests/benchmarks/run.py loop start` runs only those.
"""

import importlib
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

from rigsweep.cluster.local_ray import set_environment


@dataclass(frozen=True)
class Row:
    """One line: what was measured, ours, the other, their ratio, and the goal that this meets or not."""

    what: str
    ours: str
    other: str
    ratio: str
    goal: str
    met: bool | None


BENCHMARKS = ("start", "loop", "learning", "images", "turnaround", "workers", "memory", "saving", "scale", "search")


def main() -> int:
    """Run the benchmarks that are named, or all; 1 if one failed to run."""
    set_environment()
    sys.path.insert(0, str(Path(__file__).parent))
    rows: list[Row] = []
    failed = False
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"… {name}", file=sys.stderr, flush=True)
        try:
            rows += [Row(*row) for row in importlib.import_module(f"bench_{name}").rows()]
        except Exception:  # noqa: BLE001 - the other benchmarks still run
            traceback.print_exc()
            failed = True
    table = [("", "ours", "other", "ratio", "goal", ""), *(_cells(row) for row in rows)]
    widths = [max(len(row[i]) for row in table) for i in range(6)]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    return int(failed)


def _cells(row: Row) -> tuple[str, ...]:
    mark = {True: "met", False: "NOT MET", None: ""}[row.met]
    return row.what, row.ours, row.other, row.ratio, row.goal, mark


if __name__ == "__main__":
    sys.exit(main())
