"""The training loop: the only one, for every trainable.

Progress is counted in examples. A step's learning rate, data and randomness are functions of the seed and of
the examples before it, so a training that goes on from a checkpoint repeats, bit for bit on a CPU, what an
undisturbed one does.
"""

import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from . import checkpoints
from .averages import RAW, Averages
from .checkpoints import Saved
from .derived import Derived, derive
from .door import Door, Ending, Progress
from .meter import Meter
from .optimizer import build_optimizer, learning_rate
from .task import Batch, Task
from .trial import Job
from .watch import Watch
from .workers import ALONE, Workers

_REPORTS = 200
"""Reports of step metrics over a training, at most."""


def train(task: Task, job: Job, door: Door, workers: Workers = ALONE) -> Ending:
    """Train a task to the end of its budget, or until the door says to leave.

    Goes on from the newest whole checkpoint in the job's folder, if there is one. Several workers run this side by
    side, each on its share of every step's rows; the first of them decides, reports and saves.
    """
    training = job.settings()
    derived = derive(task, training, job, workers=workers.size)
    device = set_up(job)
    model = task.build().to(device)
    averages = Averages(model, training)
    optimizer = build_optimizer(model, task.role, training.optimizer)
    saved = _go_on(job, door, model, averages, optimizer, derived)
    shared = workers.wrap(model)
    run: nn.Module = torch.compile(shared) if training.compile else shared  # pyright: ignore
    mine = workers.share(derived.rows_per_step)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16")
    peak = job.peak_flops_per_second
    speeds = (workers.size * job.measured_flops_per_second, peak and workers.size * peak)
    meter = Meter(derived.flops_per_example, *speeds, door.phases, compiled=training.compile)
    clock = _Clock(saved.progress.seconds)
    every = math.ceil(derived.steps / _REPORTS)
    progress, health = saved.progress, Watch(task, training, derived, job, door, saved.health)

    # Where the batch size was edited, from the last of its own whole steps.
    for step in range(progress.examples // training.batch.examples + 1, derived.steps + 1):
        if order := workers.decide(door.order, progress, **meter.shown):
            if order == "interrupt":
                if ending := workers.decide(health.keeping, progress, model):
                    return ending
                if workers.first:
                    _save(job, derived, saved.at(progress, health.state()), model, averages, optimizer)
            return Ending("interrupted" if order == "interrupt" else "stopped", "asked to leave")

        rate = learning_rate(training.schedule, training.optimizer.learning_rate, step / derived.steps)
        for group in optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed(hash((training.seed, step, workers.rank)) % 2**63)  # dropout

        # One optimizer step over the global batch, in micro-batches.
        first = (step - 1) * derived.rows_per_step
        batch: Batch = {}
        terms: dict[str, torch.Tensor] = {}
        for start in range(mine.start, mine.stop, derived.micro_rows):
            rows = min(derived.micro_rows, mine.stop - start)
            waiting = time.perf_counter()
            batch = task.batch(first + start, rows)
            meter.waited(time.perf_counter() - waiting)
            share = rows / derived.rows_per_step  # the last micro-batch may be smaller
            with workers.alone(shared, when=start + rows < mine.stop):
                with autocast:
                    losses = task.loss(run, {name: t.to(device, non_blocking=True) for name, t in batch.items()})
                # Over several workers the gradients come back as a mean, and are to be a sum.
                torch.stack(list(losses.values())).sum().mul(share * workers.size).backward()
            for name, value in losses.items():
                terms[name] = terms.get(name, 0) + value.detach() * share
        terms = workers.sum(terms)
        norm = nn.utils.clip_grad_norm_(model.parameters(), training.optimizer.clip_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        averages.update(step)
        meter.saw(training.batch.examples)
        progress = Progress(
            examples=step * training.batch.examples,
            total=derived.examples,
            flops=step * training.batch.examples * derived.flops_per_example,
            seconds=clock.seconds(),
        )

        evaluating = step in derived.evaluation_steps
        reporting = evaluating or step % every == 0
        if ending := workers.decide(health.see, progress, batch, terms, norm, now=reporting):
            return ending
        metrics: dict[str, float] = {}
        if reporting:
            metrics |= {name: value.item() for name, value in terms.items()}
            metrics |= {"optimizer/gradient_norm": norm.item(), "optimizer/learning_rate": rate, **meter.read(device)}
            metrics["memory/peak_bytes"] = workers.largest(metrics["memory/peak_bytes"])
            if ending := workers.decide(health.report, progress, metrics):
                return ending
            if not evaluating:
                door.report(progress, metrics)
        if evaluating:
            paused = meter.pause()
            with autocast:
                found = {name: task.evaluate(own, device, workers) for name, own in averages.evaluated.items()}
            evaluation = averages.told(found)
            if ending := workers.decide(health.keeping, progress, model, evaluation):
                return ending
            with autocast:
                drawn = {name: task.sample(own, device, workers) for name, own in averages.evaluated.items()}
            if ending := workers.decide(health.drew, progress, drawn[averages.main]):
                return ending
            metrics |= evaluation
            saved.evaluations.append((progress, metrics))
            if workers.first:
                for name, samples in drawn.items():
                    door.keep(progress, samples.texts, samples.images, of="" if name == averages.main else name)
                path = _save(job, derived, saved.at(progress, health.state()), model, averages, optimizer)
                door.report(progress, metrics, checkpoint=path)
            meter.go_on(paused)
        elif step in derived.milestone_steps:
            if ending := workers.decide(health.keeping, progress, model):
                return ending
            if workers.first:
                _save(job, derived, saved.at(progress, health.state()), model, averages, optimizer)
    return Ending("complete", "reached its budget")


@dataclass
class _Clock:
    """Seconds of a training's own running time, also over interruptions."""

    before: float

    def __post_init__(self) -> None:
        self._since = time.monotonic()

    def seconds(self) -> float:
        return self.before + time.monotonic() - self._since


def set_up(job: Job) -> torch.device:
    """The job's device, and what PyTorch is to know of it."""
    # One folder for all trials: the second of a shape finds what the first compiled.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(job.cache) / "inductor")
    torch.set_float32_matmul_precision("high")  # TF32 for what is not under autocast
    if job.kind == "cpu":
        torch.set_num_threads(job.threads)
    return torch.device(job.kind)


def _go_on(
    job: Job, door: Door, model: nn.Module, averages: Averages, optimizer: torch.optim.Optimizer, derived: Derived
) -> Saved:
    """Go on from the job's own checkpoint, start from another run's weights, or from nothing."""
    folder = Path(job.folder) / "checkpoints"
    weights = "model.safetensors" if averages.main == RAW else f"{averages.main}.safetensors"
    if path := checkpoints.latest(folder):
        saved = checkpoints.restore(path, model, averages.modules, optimizer)
        for progress, metrics in saved.evaluations:
            if progress.examples not in job.recorded:
                kept = checkpoints.path_at(folder, progress)
                door.report(progress, metrics, checkpoint=kept if kept.exists() else None)
        return replace(saved, progress=replace(saved.progress, total=derived.examples), weights=weights)
    if job.initial:
        checkpoints.check(Path(job.initial))
        for target in (model, *averages.modules.values()):
            checkpoints.load_weights(checkpoints.weights_of(Path(job.initial)), target)
    return Saved(Progress(total=derived.examples), [], weights=weights)


def _save(
    job: Job, derived: Derived, saved: Saved, model: nn.Module, averages: Averages, optimizer: torch.optim.Optimizer
) -> Path:
    """Save a checkpoint, and delete what is neither the latest, the best nor a milestone."""
    folder, sign = Path(job.folder) / "checkpoints", 1 if job.goal == "minimize" else -1
    path = checkpoints.save(folder, saved, model, averages.modules, optimizer)
    milestones = {step * derived.examples // derived.steps for step in derived.milestone_steps}
    kept = [other for other in checkpoints.all_in(folder) if int(other.name) in milestones]
    checkpoints.keep_only(folder, path, checkpoints.best(folder, job.metric, sign), *kept)
    return path
