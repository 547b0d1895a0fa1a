"""Points and images: the tutorial's eight Gaussians, CIFAR-10 beside a plain script, digits that a classifier reads."""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from sklearn.svm import SVC

from rigsweep.datasets.points import modes
from rigsweep.sweeps.sweep import load
from rigsweep.trainables import checkpoints, registry
from rigsweep.trainables.door import Door
from rigsweep.trainables.draws import normals, uniforms
from rigsweep.trainables.loop import train
from rigsweep.trainables.point_quality import counts_per_mode
from rigsweep.trainables.settings import Training
from rigsweep.trainables.trial import Job
from rigsweep.trainables.unet import UNetTask
from rigsweep.trainables.unet_settings import UNetTraining

BLOCKS, BATCH = (100, 40, 40), 64
"""Steps of each block; the losses of the first are compared to its end."""
CPU = torch.device("cpu")
Row = tuple[object, ...]


class Line:
    """Nobody follows."""

    rank, workers = 0, 1
    order = None
    progress: dict[str, Any] = {}  # noqa: RUF012

    def send(self, message: dict[str, Any]) -> None:
        """Say nothing."""


def rows() -> list[Row]:
    """One row a promise."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    with tempfile.TemporaryDirectory() as place:
        return [*_points(Path(place)), *_cifar(Path(place)), *_digits(Path(place))]


def _trained(trainable: str, training: Training, place: Path) -> tuple[Any, Any, list[dict[str, Any]]]:
    """The task, its trained model, and the rows of its metrics."""
    folder = Path(tempfile.mkdtemp(dir=place))
    job = Job(
        number=0,
        trainable=trainable,
        training=training.model_dump(mode="json"),
        folder=str(folder),
        cache=str(place / "cache"),
        metric="validation/loss",
        goal="minimize",
        precision="fp32",
        kind="cpu",
        threads=torch.get_num_threads(),
        memory_bytes=8 * 2**30,
        measured_flops_per_second=1e11,
    )
    task: Any = registry.task(trainable, training, place / "cache")
    door = Door(folder, Line())
    assert train(task, job, door).state == "complete"
    door.close()
    model, path = task.build(), checkpoints.latest(folder / "checkpoints")
    assert path is not None
    checkpoints.load_weights(checkpoints.weights_of(path), model)
    return task, model, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _points(place: Path) -> list[Row]:
    """The ready training, over five seeds, drawn from in the ways whose shares are known."""
    base: Any = load("eight-gaussians").training({})
    centres = torch.from_numpy(modes("eight-gaussians"))
    shares, even, losses = dict[str, list[float]](), list[int](), list[float]()
    ways = {"euler 100": 0.83, "euler 10": 0.76, "euler 5": 0.64, "euler 2": 0.12, "heun 5": 0.80}
    for seed in range(5):
        task, model, metrics = _trained("points", base.model_copy(update={"seed": seed}), place)
        losses.append(statistics.fmean(row["loss"] for row in metrics if row["examples"] > 1000 * 256))
        for way in ways:
            sampler, steps = way.split()
            sampling = task.training.sampling.model_copy(update={"sampler": sampler, "steps": int(steps)})
            task.training = task.training.model_copy(update={"sampling": sampling})
            samples = task.samples(model, CPU)
            counts = counts_per_mode(samples, centres)
            shares.setdefault(way, []).append(float(counts.sum() / len(samples)))
            if way == "euler 100":
                nearest = torch.cdist(samples, centres).argmin(1)
                even += nearest.bincount(minlength=len(centres)).tolist()
    name, mean, loss = "eight Gaussians, five seeds", statistics.fmean(shares["euler 100"]), statistics.fmean(losses)
    good, evenly = mean >= 0.81 and min(shares["euler 100"]) >= 0.78, min(even) >= 150 and max(even) <= 350
    told = f"{mean:.3f}, at least {min(shares['euler 100']):.3f}"
    found: list[Row] = [
        (f"{name}: near a mode", told, "", "", "mean 0.81, each 0.78", good),
        (
            f"{name}: nearest to each mode",
            f"{min(even)} to {max(even)}",
            "",
            "",
            "150 to 350",
            evenly,
        ),
        (f"{name}: loss of the last 3,000 steps", f"{loss:.3f}", "", "", "1.87 ± 0.05", abs(loss - 1.87) <= 0.05),
    ]
    others = [(way, statistics.fmean(shares[way]), known) for way, known in ways.items() if way != "euler 100"]
    return found + [
        (f"{name}: {way} steps", f"{share:.2f}", f"{known:.2f} known", f"{share / known:.2f}", "", None)
        for way, share, known in others
    ]


def _cifar(place: Path) -> list[Row]:
    """The loader alone; the loop beside a plain script, its losses and its speed, in interleaved blocks."""
    shared = Path(os.environ.get("RIGSWEEP_SHARED") or Path(__file__).parents[3] / "shared")
    file = shared / "data" / "cifar10" / "train.parquet"
    if not file.exists():
        return [("CIFAR-10", "skipped", "", "no folder `shared`", "", None)]
    training = UNetTraining.model_validate(
        {
            "data": {"source": str(file), "flip": True},
            "model": {"base": 32},
            "optimizer": {"learning_rate": 2e-4, "weight_decay": 0.01},
            "schedule": {"warmup": 0, "decay": "constant"},
            "batch": {"examples": BATCH, "micro": BATCH},
            "budget": {"examples": BATCH * BLOCKS[0]},
            "evaluation": {"every": 1.0, "examples": 8},
            "quality": None,
            "sampling": {"steps": 1},
        }
    )
    task = UNetTask(training, place / "cache")
    begun, loaded = time.perf_counter(), 0
    while time.perf_counter() - begun < 2:
        task.batch(loaded, 256)
        loaded += 256
    speed = loaded / (time.perf_counter() - begun)
    ours, plain, ratios, off, waiting = list[float](), list[float](), list[float](), 0.0, list[float]()
    for steps in BLOCKS:
        budget = training.budget.model_copy(update={"examples": BATCH * steps})
        _, _, metrics = _trained("unet", training.model_copy(update={"budget": budget}), place)
        reports = [row for row in metrics if "loss" in row]
        begun_at = next(i for i, row in enumerate(reports) if row["examples"] >= 10 * BATCH)
        first, last = reports[begun_at], reports[-2]
        ours.append((last["time"] - first["time"]) / (last["examples"] - first["examples"]) * BATCH)
        seconds, losses = _plain(task, training, steps)
        plain.append(seconds)
        ratios.append(plain[-1] / ours[-1])
        for row in reports:
            theirs = losses[row["examples"] // BATCH - 1]
            off = max(off, abs(row["loss"] - theirs) / theirs)
        waiting += [row["speed/waiting_for_data"] for row in reports if "speed/waiting_for_data" in row]
    ratio, name = statistics.median(ratios), "CIFAR-10 UNet, base 32, batch 64"
    images = [f"{BATCH / statistics.median(times):.0f}" for times in (ours, plain)]
    found: list[Row] = [
        (
            "CIFAR-10: the loader alone, with flips (images/s)",
            f"{speed:,.0f}",
            "",
            "",
            "at least 20,000",
            speed >= 20_000,
        ),
        (f"{name}: images/s beside a plain script", *images, f"{ratio:.3f}", "at least 0.97", ratio >= 0.97),
        (f"{name}: loss of 100 steps beside it", "", "", f"{off:.2%} off", "at most 1%", off <= 0.01),
    ]
    if waiting:
        share = statistics.fmean(waiting)
        found.append((f"{name}: waiting for data", f"{share:.2%}", "", "", "under 1%", share < 0.01))
    return found


def _plain(task: UNetTask, training: UNetTraining, steps: int) -> tuple[float, list[float]]:
    """Seconds a step and the losses of what one would write without rigsweep, on the same images, noise and times."""
    model = task.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    losses, start = list[float](), 0.0
    for step in range(steps):
        if step == 10:
            start = time.perf_counter()
        batch = task.batch(step * BATCH, BATCH)
        row = batch["row"]
        x_1 = batch["image"].float() / 127.5 - 1
        x_0 = normals(training.seed, 0, row, x_1[0].numel()).reshape(x_1.shape)
        t = uniforms(training.seed, 1, row, 1)[:, 0]
        label = torch.where(uniforms(training.seed, 2, row, 1)[:, 0] < 0.1, 10, batch["label"])
        x_t = torch.lerp(x_0, x_1, t[:, None, None, None])
        loss = (model(x_t, t, label) - (x_1 - x_0)).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    return (time.perf_counter() - start) / (steps - 10), losses


def _digits(place: Path) -> list[Row]:
    """Digits drawn by class, read by a classifier that has seen real ones alone."""
    pixels, labels = load_digits(return_X_y=True)
    train_pixels, held, train_labels, held_labels = train_test_split(pixels, labels, test_size=0.25, random_state=0)
    judge = SVC(gamma=0.001).fit(train_pixels, train_labels)
    accuracy = judge.score(held, held_labels)
    training: Any = load("digits-lr-width").training({"optimizer.learning_rate": 3e-3, "model.base": 32})
    evaluation = training.evaluation.model_copy(update={"every": 1.0})
    training = training.model_copy(update={"quality": None, "evaluation": evaluation})
    task, model, _ = _trained("unet", training, place)
    places = torch.arange(1000)
    recognised = {}
    for scale in (0.0, 1.0, 1.5, 2.0, 3.0):
        sampling = training.sampling.model_copy(update={"guidance": scale})
        drawn = task.draw(model, sampling, places, places % 10, CPU).reshape(len(places), -1)
        recognised[scale] = float((judge.predict(drawn / 255 * 16) == (places % 10).numpy()).mean())
    best = max(recognised, key=lambda scale: recognised[scale])
    name = f"digits recognised as asked, at scale {best:g} beside 0 and 1 (judge: {accuracy:.1%})"
    others = f"{recognised[0.0]:.1%} and {recognised[1.0]:.1%}"
    good = recognised[best] >= 0.95 and accuracy >= 0.97
    return [(name, f"{recognised[best]:.1%}", others, "", "at least 95%", good)]
