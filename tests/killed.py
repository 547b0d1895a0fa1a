"""A sweep whose driver is killed five times with SIGKILL at random moments, over and over: a program of the tests.

    python killed.py FOLDER TRIES SLOTS

The real controller, searcher, stopper and history drive closed-form trials in a process of their own, which waits
for the disk and is killed in the middle of anything. Prints a JSON line a try: whether a kill met the sweep at
work, and what became of every trial.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from simulator import SWEEP, no_fault, outcome, run_trials, sweep_of

from rigsweep.sweeps.history import History, Record, fold, read


def drive(path: Path, slots: int) -> Record:
    """Begin the sweep of a history, or go on with it, to its end."""
    history = History(path, clock=itertools.count(1_700_000_000.0).__next__)
    return run_trials(sweep_of(SWEEP), history, slots, no_fault, most_events=None)


def in_a_process(path: Path, slots: int, kill_after: float) -> bool:
    """Drive it in a child that is killed after so many seconds; whether it was."""
    child = os.fork()
    if child == 0:
        drive(path, slots)
        os._exit(0)
    deadline = time.monotonic() + kill_after
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def main(folder: Path, tries: int, slots: int) -> None:
    """Print the undisturbed sweep, then each that was killed five times."""
    draw = random.Random(slots)
    began = time.monotonic()
    expected = outcome(drive(folder / "whole.jsonl", slots))
    took = time.monotonic() - began
    print(json.dumps(expected), flush=True)
    for number in range(tries):
        path = folder / f"{number}.jsonl"
        # Of a fifth of the way at most, so that five of them seldom outlast it.
        kills = sum(in_a_process(path, slots, draw.uniform(0, took / 4)) for _ in range(5))
        drive(path, slots)
        ends = [event["trial"] for event in read(path) if event["event"] == "ended"]
        print(json.dumps({"kills": kills, "ends": sorted(ends), "trials": outcome(fold(path))}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
