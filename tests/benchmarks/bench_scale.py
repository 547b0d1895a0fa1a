"""Thousands of trials: closed-form ones, two at a time, through real lanes, Ray Tune and MLflow.

Each sweep has a process of its own, whose memory is the driver's. Run by hand: `bench_scale.py random 2000`.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SWEEP = """
question: Does it stay fast?
trainable: surface
base:
  optimizer: {learning_rate: 1e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
  evaluation: {every: 25%}
  model: {noise: 0.01}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  schedule.warmup: {low: 0%, high: 10%}
  model.width: {choices: [64, 96, 128]}
"""
TRIALS = 2000
TPE_TRIALS = 500  # it slows as they grow in number, which is no news
_PART = 100  # trials at either end that are compared


def rows() -> list[tuple[object, ...]]:
    """Seconds a trial, how the last hundred compare with the first, and what the driver's memory grows by."""
    random, tpe = _apart("random", TRIALS), _apart("tpe", TPE_TRIALS)
    slower = random["last"] / random["first"]
    return [
        (
            f"{TRIALS:,} trials, two at a time, tracked",
            f"{random['each']:.3f} s a trial (random)",
            f"{tpe['each']:.3f} s (tpe, {TPE_TRIALS})",
            "",
            "at most 0.25 s",
            random["each"] <= 0.25,
        ),
        (
            "the last hundred of them",
            f"{random['last']:.3f} s a trial",
            f"{random['first']:.3f} s (the first hundred)",
            f"{slower:.2f} (tpe {tpe['last'] / tpe['first']:.2f})",
            "at most 1.5",
            slower <= 1.5,
        ),
        (
            "the driver's memory meanwhile (then the views, with the libraries that draw them)",
            f"+{random['grown_bytes'] / 1e6:.0f} MB (then +{random['views_bytes'] / 1e6:.0f} MB)",
            f"+{tpe['grown_bytes'] / 1e6:.0f} MB (tpe)",
            "",
            "at most +200 MB",
            random["grown_bytes"] <= 200e6,
        ),
    ]


def _apart(searcher: str, trials: int) -> dict[str, float]:
    command = [sys.executable, "-P", __file__, searcher, str(trials)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr[-2000:]
    return json.loads(answer.stdout.splitlines()[-1])


def measure(searcher: str, trials: int) -> dict[str, float]:
    """Run one sweep in this process."""
    import psutil

    from rigsweep.sweeps import folders
    from rigsweep.sweeps.running import run
    from rigsweep.sweeps.tables import LiveShow

    memory: list[tuple[int, int]] = []  # trials that are over, bytes of this process
    over, done = [0], threading.Event()

    class Counting(LiveShow):
        def event(self, kind: str, trial: Any) -> None:
            over[0] += kind == "ended"

    def sample() -> None:
        while not done.wait(0.5):
            memory.append((over[0], psutil.Process().memory_info().rss))

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        (place / "many.yaml").write_text(f"{SWEEP}\nsearcher: {searcher}\ntrials: {trials}\n")
        sweep, _ = folders.open_sweep(str(place / "many.yaml"), (), place / "runs", resume=False, new=False)
        watch = threading.Thread(target=sample)
        watch.start()
        began = time.perf_counter()
        run(sweep, place / "runs", place / "cache", Counting(sweep, quiet=True), cards=2, threads=1)
        seconds = time.perf_counter() - began
        done.set()
        watch.join()
        ended = sorted(trial.ended or 0.0 for trial in folders.record_of(place / "runs" / "many").trials.values())
        closed = folders.record_of(place / "runs" / "many").closed
    part = min(_PART, trials // 4)
    settled = statistics.median(size for count, size in memory if part <= count <= 2 * part)
    return {
        "each": (ended[-1] - ended[part]) / (len(ended) - 1 - part),
        "first": (ended[part] - ended[0]) / part,
        "last": (ended[-1] - ended[-1 - part]) / part,
        "grown_bytes": float(max(size for count, size in memory if count < trials) - settled),
        "views_bytes": float(max(size for _, size in memory) - settled),
        "all_seconds": seconds,
        "after_seconds": began + seconds - time.perf_counter() + time.time() - (closed or {}).get("time", 0.0),
    }


if __name__ == "__main__":
    from rigsweep.cluster.local_ray import set_environment

    set_environment()
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
