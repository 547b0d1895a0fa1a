"""Score what was trained: load its weights, draw, and judge what was drawn.

Either as a trial of its own, which trains nothing, or at the end of a training, in several ways of drawing.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from . import checkpoints
from .door import Door, Ending, Progress
from .loop import set_up
from .settings import Training
from .task import Task
from .trial import Job

GRID = "grid.json"
"""In a trial's folder: the metrics of each way of drawing from what was trained."""
RESAMPLES = "resamples.json"
"""In a trial's folder: the metric that samples are judged by, on resampled samples."""


def score(task: Task, job: Job, door: Door) -> Ending:
    """One evaluation of the weights of `job.initial` by the settings' sampling; nothing is kept but its samples."""
    assert job.initial is not None, "nothing to score"
    started = time.monotonic()
    device = set_up(job)
    checkpoints.check(Path(job.initial))
    model = task.build().to(device)
    checkpoints.load_weights(checkpoints.weights_of(Path(job.initial)), model)
    if door.order(Progress()):
        return Ending("interrupted", "asked to leave")
    door.phases.enter("computing")
    with torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"):
        found = task.score(model, device)
        samples = task.sample(model, device)
    progress = Progress(found.samples, found.samples, found.flops, time.monotonic() - started)
    if found.resamples is not None:
        values = [float(value) for value in found.resamples]
        _write(Path(job.folder) / RESAMPLES, {"metric": job.metric, "values": values})
    door.keep(progress, samples.texts, samples.images)
    door.report(progress, dict(found.metrics))
    return Ending("complete", f"drew {found.samples:,} samples")


def score_grid(task_of: Callable[[Training], Task], job: Job, door: Door) -> Ending:
    """Score the weights that a training ended with in every way of `job.grid`, each from the same noise.

    A way that the training does not allow, such as the ancestral sampler off a chain, is left out.
    """
    file, ending = Path(job.folder) / GRID, Ending("complete", "reached its budget")
    path = checkpoints.latest(Path(job.folder) / "checkpoints")
    if door.rank or file.exists() or path is None:
        return ending
    device, training, model = set_up(job), job.settings(), None
    found: list[dict[str, Any]] = []
    for parameters in job.grid:
        if door.order(door.seen or Progress()) == "interrupt":
            return Ending("interrupted", "asked to leave")
        changed = training.model_dump()
        changed["sampling"] |= {key.partition(".")[2]: value for key, value in parameters.items()}
        try:
            task = task_of(type(training).model_validate(changed))
        except ValidationError:
            continue
        if model is None:
            model = task.build().to(device)
            checkpoints.load_weights(checkpoints.weights_of(path), model)
        with (
            door.phases.within("evaluation"),
            torch.autocast(device.type, torch.bfloat16, enabled=job.precision == "bf16"),
        ):
            score = task.score(model, device)
        found.append({"parameters": parameters, "metrics": dict(score.metrics), "samples": score.samples})
    _write(file, found)
    return ending


def _write(file: Path, values: Any) -> None:
    """JSON that is there when it is whole."""
    temporary = file.with_name(f".{file.name}")
    temporary.write_text(json.dumps(values))
    temporary.replace(file)
