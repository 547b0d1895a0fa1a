"""The memory estimate after calibration, against the measured peak of live tensor bytes of real steps."""

import tempfile
from itertools import product
from pathlib import Path

import torch

from rigsweep.cluster import live_bytes
from rigsweep.cluster.memory import Budget, Observation, calibrate
from rigsweep.trainables.fitting import parts, shape_key
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.gpt_settings import GPTTraining

WIDTHS, LENGTHS, ROWS = (64, 128, 256), (64, 256), 4


def rows() -> list[tuple[object, ...]]:
    """Twelve shapes, measured for real: calibrated on every second one, tested on the others."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        found = [_observation(*shape, Path(place)) for shape in product(WIDTHS, LENGTHS, (False, True))]
    # Neighbours differ in recomputation: of each four, the outer ones calibrate and the inner ones test.
    known = [one for number, one in enumerate(found) if number % 4 in (0, 3)]
    tested = [one for number, one in enumerate(found) if number % 4 in (1, 2)]
    calibration = calibrate(known)
    off = [calibration.corrected_bytes(one.estimate) / one.peak_bytes - 1 for one in tested]
    worst = max(off, key=abs)
    return [
        (
            "memory estimate after calibration (worst of 6 shapes)",
            f"{max(one.estimate.total_bytes for one in tested) / 2**20:,.0f} MiB at most",
            f"{max(one.peak_bytes for one in tested) / 2**20:,.0f} MiB measured",
            f"{worst:+.1%}",
            "within 10%",
            abs(worst) <= 0.1,
        )
    ]


def _observation(width: int, length: int, recompute: bool, cache: Path) -> Observation:
    corpus = cache / "text.txt"
    corpus.write_text("".join(f"{n} bottles, {n * n} ships and a sea of {n % 7}.\n" for n in range(2000)))
    training = GPTTraining.model_validate(
        {
            "data": {"corpus": str(corpus), "vocabulary": "characters", "sequence_length": length},
            "model": {"layers": 4, "width": width, "head_width": 32},
            "batch": {"examples": 2 * ROWS * length},
            "budget": {"examples": 20 * ROWS * length},
            "evaluation": {"every": 1.0, "examples": length},
            "recompute": recompute,
        }
    )
    task = GPTTask(training, cache)
    estimate: Budget = live_bytes.estimate(lambda: parts(task, training, "fp32", lambda: _like(task)), accumulates=True)
    measured = live_bytes.measure(lambda: parts(task, training, "fp32", lambda: task.batch(0, ROWS)), accumulates=True)
    return Observation(shape_key("gpt", training, ROWS, "fp32"), estimate, measured.total_bytes, 0.0)


def _like(task: GPTTask) -> dict[str, torch.Tensor]:
    like = {"tokens": torch.int64, "targets": torch.int64}
    return {name: torch.zeros((ROWS, task.examples_per_row), dtype=dtype) for name, dtype in like.items()}
