"""A closed form that looks like training: no model, the same door, so a sweep can be rehearsed in seconds.

The loss falls as a power of the examples towards a floor that depends on the learning rate (best near
3e-3 / sqrt(width / 64), as wider models want smaller ones), the warm-up (best near 3%) and the width.
"""

import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from .derived import Derived, evaluation_steps, steps_for
from .door import Door, Ending, Progress
from .surface_settings import SurfaceTraining
from .trial import Job


def loss_at(training: SurfaceTraining, share: float) -> float:
    """The loss after a share of the budget, without noise."""
    width = training.model.width
    best = 3e-3 / math.sqrt(width / 64)
    off = math.log10(training.optimizer.learning_rate / best)
    floor = 2.0 - 0.1 * math.log2(width / 64) + 0.6 * off**2 + 4 * (training.schedule.warmup - 0.03) ** 2
    return floor + 2.0 * (1 + share * 60) ** -0.6


def count(training: SurfaceTraining) -> tuple[int, float]:
    """Parameters and training FLOPs per example, as if it were a model."""
    return training.model.width**2, 6.0 * training.model.width**2


def derived(training: SurfaceTraining, job: Job) -> Derived:
    """What a training comes to."""
    parameters, flops_per_example = count(training)
    steps = steps_for(training, flops_per_example, parameters)
    return Derived(
        parameters=parameters,
        flops_per_example=flops_per_example,
        steps=steps,
        rows_per_step=training.batch.examples,
        micro_rows=training.batch.examples,
        evaluation_steps=evaluation_steps(training, steps, job.rungs, job.rungs_by, flops_per_example),
        examples=steps * training.batch.examples,
    )


def train(job: Job, door: Door) -> Ending:
    """Walk along the curve, reporting as a training would."""
    training = job.settings()
    assert isinstance(training, SurfaceTraining)
    numbers = derived(training, job)
    steps, batch = numbers.steps, training.batch.examples
    checkpoint = Path(job.folder) / "checkpoints" / "surface.json"
    checkpoint.parent.mkdir(exist_ok=True)
    decide, meet = _together(door)
    done, before, evaluations = decide(_kept, checkpoint)
    started = time.monotonic() - before

    def progress(step: int, seconds: float) -> Progress:
        examples = step * batch
        return Progress(examples, numbers.examples, examples * numbers.flops_per_example, seconds)

    def save(now: Progress) -> None:
        if door.rank:
            return
        temporary = checkpoint.with_suffix(".new")
        temporary.write_text(json.dumps((now.examples // batch, now.seconds, evaluations)))
        temporary.replace(checkpoint)

    for step, seconds, metrics in evaluations:
        if step * batch not in job.recorded:
            door.report(progress(step, seconds), metrics, checkpoint=checkpoint)
    now = progress(done, before)
    door.phases.enter("computing")
    for step in range(done + 1, steps + 1):
        if order := decide(door.order, now):
            if order == "interrupt":
                save(now)
            return Ending("interrupted" if order == "interrupt" else "stopped", "asked to leave")
        if training.model.seconds_per_step:
            time.sleep(training.model.seconds_per_step)
        now = progress(step, time.monotonic() - started)
        if ending := _fault(training, now, door, Path(job.folder)):
            return ending
        meet()  # as gradients are added up: nobody is ahead of the others
        if step in numbers.evaluation_steps:
            noise = np.random.default_rng((training.seed, step)).normal() * training.model.noise
            loss = loss_at(training, step / steps) + noise
            metrics = {"loss": loss, "validation/loss": loss, "validation/accuracy": math.exp(-loss)}
            with door.phases.within("evaluation"):
                door.keep(now, {"sample": f"loss {loss:.4f}"})
                evaluations.append((step, now.seconds, metrics))
                save(now)
                door.report(now, metrics, checkpoint=checkpoint)
    return Ending("complete", "reached its budget")


def _kept(checkpoint: Path) -> tuple[int, float, list[Any]]:
    """Steps, seconds and evaluations so far."""
    return json.loads(checkpoint.read_text()) if checkpoint.exists() else (0, 0.0, [])


def _together(door: Door) -> tuple[Callable[..., Any], Callable[[], object]]:
    """How its workers decide, and how they wait for each other; alone, PyTorch is not needed for that."""
    if door.workers == 1:
        return lambda ask, *words: ask(*words), lambda: None
    from .workers import Workers

    workers = Workers(door.rank, door.workers)
    return workers.decide, lambda: workers.largest(0.0)


def _fault(training: SurfaceTraining, now: Progress, door: Door, folder: Path) -> Ending | None:
    model, share = training.model, now.examples / now.total
    if (
        model.fault is None
        or door.rank != model.fault_worker
        or share < model.fault_at
        or training.optimizer.learning_rate <= model.fault_above
    ):
        return None
    if model.fault == "diverge":
        return Ending("diverged", f"the loss is not finite (nan) after {share:.0%} of the budget", "non-finite-loss")
    if model.fault == "warn":
        door.warn("gradient-norm", "a rehearsed warning: the gradient norm is 7 times its usual 0.5", now)
        return None
    if model.fault == "raise":
        raise ValueError("a rehearsed error")
    if model.fault == "out_of_memory":
        raise MemoryError("a rehearsed shortage")
    if model.fault == "hang":
        time.sleep(10**6)
    marker = folder / "died"
    if model.fault == "die_always" or not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return None
