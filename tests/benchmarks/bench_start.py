"""How soon the command line answers."""

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rigsweep.sweeps.sweep import READY

COMMAND = [sys.executable, "-P", "-m", "rigsweep.sweeps.cli"]


def rows() -> list[tuple[object, ...]]:
    """Seconds to the answer, the median of five; beside it those of an empty Python."""
    with tempfile.TemporaryDirectory() as place:
        wrong = Path(place) / "wrong.yaml"
        wrong.write_text((READY / "quickstart.yaml").read_text().replace("seed: 0", "sed: 0"))
        empty = _seconds([sys.executable, "-P", "-c", ""], 0)
        plan = _seconds([*COMMAND, "plan", str(wrong)], 2)
        helped = _seconds([*COMMAND, "--help"], 0)
    return [
        ("plan on a wrong file", f"{plan:.2f} s", f"{empty:.2f} s (empty Python)", "", "at most 2 s", plan <= 2),
        ("--help", f"{helped:.2f} s", f"{empty:.2f} s (empty Python)", "", "at most 1 s", helped <= 1),
    ]


def _seconds(command: list[str], code: int) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        answer = subprocess.run(command, capture_output=True, check=False)
        taken.append(time.perf_counter() - start)
        assert answer.returncode == code, answer.stderr
    return statistics.median(taken)
