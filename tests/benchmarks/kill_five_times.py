"""Kill a whole sweep, with its Ray, five times with SIGKILL at random moments, and resume it: N tries.

    python -P tests/benchmarks/kill_five_times.py [TRIES]

One trial at a time, `tpe` and `asha`, closed-form trials: each try must give the trials, states and values of the
undisturbed sweep. The same without Ray, in seconds, is `tests/test_killed_five_times.py`. Prints a line a try; a try
takes six starts of Ray.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SWEEP = """
trainable: surface
base:
  optimizer: {learning_rate: 1e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
  model: {noise: 0.02, seconds_per_step: 0.02}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  schedule.warmup: {low: 0%, high: 10%}
searcher: tpe
trials: 12
early_stopping: {rule: asha}
"""
COMMAND = [
    sys.executable,
    "-P",
    "-m",
    "rigsweep.sweeps.cli",
    "sweep",
    "probe.yaml",
    "--cards",
    "1",
    "--json",
    "--resume",
]
TIMES = 5


def run(place: Path) -> list[tuple[object, ...]]:
    """The sweep to its end: what became of each trial, times aside."""
    answer = subprocess.run(COMMAND, cwd=place, capture_output=True, text=True, check=False)
    if answer.returncode:
        raise SystemExit(f"the sweep ended with {answer.returncode}: {answer.stderr}")
    trials = json.loads(answer.stdout)["trials"]
    kept = ("number", "seed", "parameters", "state", "reason", "value", "examples")
    return [tuple(json.dumps(trial[name]) for name in kept) for trial in trials]


def begin(name: str) -> Path:
    """A folder with the sweep's file."""
    place = Path(tempfile.mkdtemp(prefix=f"{name}-"))
    (place / "probe.yaml").write_text(SWEEP)
    return place


def kill(place: Path, draw: random.Random) -> None:
    """Start it, and kill it at some moment between the start of Ray and the end of the sweep's first half."""
    process = subprocess.Popen(COMMAND, cwd=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    history = place / "runs" / "probe" / "history.jsonl"
    events = len(history.read_bytes().splitlines()) if history.exists() else 0
    more = draw.randrange(0, 25)
    while process.poll() is None and len(history.read_bytes().splitlines() if history.exists() else []) < events + more:
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 0.5))
    if process.poll() is None:
        os.kill(process.pid, signal.SIGKILL)
    process.wait()


def main(tries: int) -> None:
    expected, same = run(begin("undisturbed")), 0
    for number in range(tries):
        draw, place = random.Random(number), begin(f"killed-{number}")
        for _ in range(TIMES):
            kill(place, draw)
        found = run(place)
        same += found == expected
        print(f"try {number + 1}: {'the same' if found == expected else f'differs: {place}'}", flush=True)
    print(f"{same} of {tries} tries gave the trials, states and values of the undisturbed sweep")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
