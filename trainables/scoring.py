"""Score what was trained: load its weights, draw, and judge what was drawn. A trial that trains nothing."""

import json
import time
from pathlib import Path
from typing import Any

import torch

from . import checkpoints
from .door import Door, Ending, Progress
from .loop import set_up
from .trial import Job

RESAMPLES = "resamples.json"
"""In a trial's folder: the metric that samples are judged by, on resampled samples."""


def score(task: Any, job: Job, door: Door) -> Ending:
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
        temporary = Path(job.folder) / f".{RESAMPLES}"
        temporary.write_text(json.dumps({"metric": job.metric, "values": [float(v) for v in found.resamples]}))
        temporary.replace(temporary.with_name(RESAMPLES))
    door.keep(progress, samples.texts, samples.images)
    door.report(progress, dict(found.metrics))
    return Ending("complete", f"drew {found.samples:,} samples")
