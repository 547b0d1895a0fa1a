"""The loop's overhead: tokens/s of the loop, tracked, over a bare PyTorch loop of the same model and batch."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from rigsweep.trainables.door import Door
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.gpt_settings import GPTTraining
from rigsweep.trainables.loop import train
from rigsweep.trainables.trial import Job

STEPS, BLOCKS = 50, 5
TRACK = "import sys, time; from pathlib import Path; from rigsweep.sweeps.tracking import Store, Tracker\n" + (
    "tracker = Tracker(Path(sys.argv[1]), Store.of(Path(sys.argv[1]).parent))\n"
    "while True: tracker.catch_up(); time.sleep(1)"
)


class Line:
    """Nobody follows."""

    rank, workers = 0, 1
    order = None
    progress: dict[str, Any] = {}  # noqa: RUF012

    def send(self, message: dict[str, Any]) -> None:
        """Say nothing."""


def rows() -> list[tuple[object, ...]]:
    """A B A B …: the loop and a bare loop, each in blocks of the quickstart's size."""
    torch.set_num_threads(1)
    training = GPTTraining.model_validate(
        {
            "data": {"corpus": "python-stdlib", "vocabulary": 4096, "sequence_length": 128},
            "model": {"layers": 4, "width": 96, "head_width": 32},
            "batch": {"examples": 4096},
            "budget": {"examples": 4096 * STEPS},
            "evaluation": {"every": 1.0, "examples": 128},
            "sampling": {"tokens": 1},
        }
    )
    ratios, ours, bare = [], [], []
    with tempfile.TemporaryDirectory() as place:
        cache = Path(place) / "cache"
        task = GPTTask(training, cache)
        for block in range(BLOCKS):
            folder = Path(place) / "runs" / f"block-{block}"
            ours.append(_loop(task, training, folder, cache))
            bare.append(_bare(task, training))
            ratios.append(bare[-1] / ours[-1])
    milliseconds = 1000 * (statistics.median(ours) - statistics.median(bare))
    ratio = statistics.median(ratios)
    tokens = training.batch.examples
    return [
        (
            "loop, tracked, over a bare loop (tokens/s)",
            f"{tokens / statistics.median(ours):,.0f}",
            f"{tokens / statistics.median(bare):,.0f}",
            f"{ratio:.3f} ({milliseconds:+.1f} ms a step)",
            "at least 0.97",
            ratio >= 0.97,
        )
    ]


def _loop(task: GPTTask, training: GPTTraining, folder: Path, cache: Path) -> float:
    """Seconds a step of the loop, from its first report to its last before the evaluation."""
    trial = folder / "trials" / "0"
    trial.mkdir(parents=True)
    _history(folder, training)
    tracker = subprocess.Popen([sys.executable, "-P", "-c", TRACK, str(folder)], stderr=subprocess.DEVNULL)
    try:
        time.sleep(4)  # its imports are not the loop's
        job = Job(
            number=0,
            trainable="gpt",
            training=training.model_dump(mode="json"),
            folder=str(trial),
            cache=str(cache),
            metric="validation/loss",
            goal="minimize",
            precision="fp32",
            kind="cpu",
            threads=1,
            memory_bytes=8 * 2**30,
            measured_flops_per_second=1e11,
        )
        door = Door(trial, Line())
        assert train(task, job, door).state == "complete"
        door.close()
    finally:
        tracker.kill()
        tracker.wait()
    times = [json.loads(line)["time"] for line in (trial / "metrics.jsonl").read_text().splitlines()][:-1]
    return (times[-1] - times[9]) / (len(times) - 10)


def _history(folder: Path, training: GPTTraining) -> None:
    from rigsweep.sweeps import folders, history
    from rigsweep.sweeps.files import parse

    text = json.dumps({"trainable": "gpt", "base": training.model_dump(mode="json", exclude_none=True)})
    folders.write_settings(folders.check(parse(text, "bench.yaml"), folder.name), folder)
    file = history.History(folder / "history.jsonl")
    file.append(
        "opened",
        version=1,
        sweep=folder.name,
        trainable="gpt",
        question="",
        objective={"metric": "validation/loss", "goal": "minimize"},
        versions={},
        git=None,
        cards=[],
    )
    file.append("proposed", trial=0, group=0, seed=0, parameters={})
    file.append("started", trial=0, node="here", cards=["CPU"], process=1)
    file.close()


def _bare(task: GPTTask, training: GPTTraining) -> float:
    """Seconds a step of what one would write without rigsweep: same model, batches, optimizer and clipping."""
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = training.batch.examples // training.data.sequence_length
    start = 0.0
    for step in range(STEPS - 1):
        if step == 10:
            start = time.perf_counter()
        batch = task.batch(step * rows, rows)
        loss = model(batch["tokens"], batch["targets"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss.item()
    return (time.perf_counter() - start) / (STEPS - 11)
