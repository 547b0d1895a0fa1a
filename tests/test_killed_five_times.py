"""A sweep whose driver is killed five times at random moments ends as one that was never disturbed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from rigsweep.sweeps.history import ENDS

TRIES = 20


def tries(folder: Path, slots: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The undisturbed sweep, and what became of each that was killed."""
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, [str(here), os.environ.get("PYTHONPATH")]))
    answer = subprocess.run(
        [sys.executable, "-P", str(here / "killed.py"), str(folder), str(TRIES), str(slots)],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr
    expected, *told = map(json.loads, answer.stdout.splitlines())
    assert len(told) == TRIES
    assert sum(one["kills"] for one in told) > 3 * TRIES, "most kills met the sweep at work"
    return expected, told


def test_one_trial_at_a_time_decides_and_measures_the_same_in_every_try(tmp_path: Path) -> None:
    expected, told = tries(tmp_path, slots=1)
    assert {trial["state"] for trial in expected.values()} == {"complete", "stopped"}
    assert [one["trials"] == expected for one in told] == [True] * TRIES


def test_with_two_at_a_time_every_trial_ends_once(tmp_path: Path) -> None:
    expected, told = tries(tmp_path, slots=2)
    for one in told:
        assert one["ends"] == list(range(len(expected)))
        assert all(trial["state"] in ENDS and trial["reason"] for trial in one["trials"].values())
