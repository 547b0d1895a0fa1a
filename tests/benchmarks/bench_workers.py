"""Several workers: a lane's DDP over a bare one, the time between trials, memory over many, and the pool's own time."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from rigsweep.cluster.cards import Card

STEPS, BLOCKS, TRIALS = 40, 3, 50
BARE = """
import json, os, sys, time
import torch, torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.gpt_settings import GPTTraining
told = json.loads(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo")
training = GPTTraining.model_validate(told["training"])
task = GPTTask(training, Path(told["cache"]))
model = DistributedDataParallel(task.build(), gradient_as_bucket_view=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
rows = training.batch.examples // training.data.sequence_length // 2
for step in range(told["steps"]):
    if step == 10:
        dist.barrier()
        start = time.perf_counter()
    batch = task.batch((2 * step + dist.get_rank()) * rows, rows)
    loss = model(batch["tokens"], batch["targets"])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    loss.item()
if dist.get_rank() == 0:
    print((time.perf_counter() - start) / (told["steps"] - 10))
"""


def rows() -> list[tuple[object, ...]]:
    """A B A B …: trials in a lane of two gloo workers, and `torchrun` of a bare DDP loop of the same model."""
    import ray

    from rigsweep.cluster.lanes import start_pool
    from rigsweep.cluster.local_ray import local_ray
    from rigsweep.cluster.placement import Need

    cards = [Card(i, "cpu", "CPU, 1 thread", f"cpu-{i}", 4 * 2**30, 1) for i in range(2)]
    with tempfile.TemporaryDirectory() as text:
        place = Path(text)
        (place / "bare.py").write_text(BARE)
        with local_ray(cards, place / "log"):
            pool = start_pool(
                "rigsweep.trainables.trial:run_trial", cards, cards_per_lane=2, log=str(place), hang_seconds=300
            )
            ours, bare, ratios = [], [], []
            for block in range(BLOCKS):
                ours.append(_in_lane(pool, place, block))
                bare.append(_bare(place))
                ratios.append(bare[-1] / ours[-1])
            waits, held, spent = _many(pool, place, Need(2, 2))
            ray.get(pool.close.remote())
    ratio, grown_bytes = statistics.median(ratios), held[-1] - held[9]
    return [
        (
            "DDP of two in a lane, over a bare one (s a step)",
            f"{statistics.median(ours):.3f}",
            f"{statistics.median(bare):.3f} (torchrun)",
            f"{ratio:.3f}",
            "at least 0.95",
            ratio >= 0.95,
        ),
        (
            "from stopping a trial of two workers to the next one's first step",
            f"{statistics.median(waits):.2f} s",
            "",
            "",
            "at most 2 s",
            statistics.median(waits) <= 2,
        ),
        (
            f"a worker's memory, from the 10th to the {TRIALS}th trial",
            f"{grown_bytes / 2**20:+.0f} MB",
            f"{held[9] / 2**20:.0f} MB (after the 10th)",
            "",
            "does not grow",
            grown_bytes <= 20 * 2**20,
        ),
        (
            "the pool's own time a trial",
            f"{1000 * spent:.1f} ms",
            "",
            "",
            "under 20 ms",
            spent < 0.02,
        ),
    ]


def _training(steps: int, **changes: Any) -> dict[str, Any]:
    return {
        "data": {"corpus": "python-stdlib", "vocabulary": 4096, "sequence_length": 128},
        "model": {"layers": 4, "width": 96, "head_width": 32},
        "batch": {"examples": 4096},
        "budget": {"examples": 4096 * steps},
        "evaluation": {"every": 1.0, "examples": 128},
        "sampling": {"tokens": 1},
    } | changes


def _job(place: Path, number: int, training: dict[str, Any]) -> dict[str, Any]:
    from rigsweep.trainables.trial import Job

    job = Job(
        number=number,
        trainable="gpt",
        training=training,
        folder=str(place / f"trial-{number}"),
        cache=str(place / "cache"),
        metric="validation/loss",
        goal="minimize",
        precision="fp32",
        kind="cpu",
        threads=1,
        memory_bytes=8 * 2**30,
        measured_flops_per_second=1e11,
        workers=2,
    )
    return asdict(job)


def _in_lane(pool: Any, place: Path, number: int) -> float:
    """Seconds a step, from the tenth report to the last before the evaluation."""
    import ray

    from rigsweep.cluster.placement import Need

    ask: Any = ray.get
    host = ask(pool.acquire.remote(number, Need(2, 2)))
    ask(host.submit.remote(number, _job(place, number, _training(STEPS))))
    while (message := ask(host.next.remote(number)))["event"] != "ended":
        pass
    assert message["state"] == "complete", message
    lines = (place / f"trial-{number}" / "metrics.jsonl").read_text().splitlines()
    times = [json.loads(line)["time"] for line in lines][:-1]
    return (times[-1] - times[9]) / (len(times) - 10)


def _bare(place: Path) -> float:
    told = json.dumps({"training": _training(STEPS), "cache": str(place / "cache"), "steps": STEPS})
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    answer = subprocess.run(
        [*command, str(place / "bare.py"), told], capture_output=True, text=True, check=True, env=environment
    )
    return float(answer.stdout.splitlines()[-1])


def _many(pool: Any, place: Path, need: Any) -> tuple[list[float], list[int], float]:
    """Stop many small trials: seconds to the next one's first report, the worker's memory, the pool's seconds each."""
    import ray

    ask: Any = ray.get
    small = {"data": {"corpus": "python-stdlib", "vocabulary": 4096, "sequence_length": 32}, "batch": {"examples": 256}}
    small |= {"model": {"layers": 2, "width": 32, "head_width": 16}, "evaluation": {"every": 0.002, "examples": 64}}
    waits, held, stopped, before = [], [], None, 0.0
    own = next(p for p in psutil.process_iter() if p.name().startswith("ray::LanePool"))
    for number in range(100, 100 + TRIALS):
        host = ask(pool.acquire.remote(number, need))
        process = ask(host.submit.remote(number, _job(place, number, _training(1000, **small))))["process"]
        ask(host.next.remote(number))
        first = json.loads((place / f"trial-{number}" / "metrics.jsonl").read_text().splitlines()[0])
        if stopped is None:
            before = sum(own.cpu_times()[:2])
        else:
            waits.append(first["time"] - stopped)
        stopped = time.time()
        ask(pool.order.remote(number, "stop"))
        while ask(host.next.remote(number))["event"] != "ended":
            pass
        held.append(psutil.Process(process).memory_info().rss)
    return waits, held, (sum(own.cpu_times()[:2]) - before) / (TRIALS - 1)
