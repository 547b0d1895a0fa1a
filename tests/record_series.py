"""Records anew what small GPT trainings leave step by step, healthy ones and sick ones, for the tests of health rules.

    python -P tests/record_series.py [NAME …]

writes `tests/data/series.json` (all of them, or the named ones anew), some five minutes on two cores.
"""

import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from rigsweep.trainables import loop, watch
from rigsweep.trainables.door import Door
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.gpt_settings import GPTTraining
from rigsweep.trainables.health import Facts, Report, Rule, Step
from rigsweep.trainables.optimizer import learning_rate
from rigsweep.trainables.trial import Job

FILE = Path(__file__).parent / "data" / "series.json"

BASE: dict[str, Any] = {
    "data": {"corpus": "python-stdlib", "vocabulary": 4096, "sequence_length": 64},
    "model": {"layers": 2, "width": 64, "head_width": 16},
    "optimizer": {"learning_rate": 2e-3},
    "batch": {"examples": 512},
    "budget": {"examples": 300 * 512},
    "evaluation": {"every": 0.5, "examples": 512},
    "sampling": {"tokens": 4},
}
CHARACTERS = {"data.vocabulary": "characters"}

HEALTHY: dict[str, dict[str, Any]] = {
    "plain": {},
    "seed-1": {"seed": 1},
    "rate-3e-4": {"optimizer.learning_rate": 3e-4},
    "rate-1e-4-short": {"optimizer.learning_rate": 1e-4, "budget.examples": 80 * 512},
    "rate-1e-2": {"optimizer.learning_rate": 1e-2},
    "rate-1e-2-no-warmup": {"optimizer.learning_rate": 1e-2, "schedule.warmup": 0.0},
    "rate-3e-2-no-warmup": {"optimizer.learning_rate": 3e-2, "schedule.warmup": 0.0, **CHARACTERS},
    "width-32": {"model.width": 32},
    "width-128": {"model.width": 128, "budget.examples": 120 * 512},
    "deep": {"model.layers": 6, "budget.examples": 150 * 512},
    "long-warmup": {"schedule.warmup": 0.3},
    "constant": {"schedule.decay": "constant", "seed": 2},
    "linear": {"schedule.decay": "linear", "schedule.final": 0.0},
    "dropout": {"model.dropout": 0.2, "model.width": 96},
    "accumulation": {"batch.micro": 4, "seed": 4},
    "no-clipping": {"optimizer.clip_norm": None, "seed": 3},
    "gelu-untied": {"model.activation": "gelu", "model.qk_norm": False, "model.tied": False},
    "characters": {**CHARACTERS, "budget.examples": 400 * 512},
    "few-tokens": {"batch.examples": 64, "budget.examples": 600 * 64, "optimizer.learning_rate": 1e-3},
    "few-characters": {**CHARACTERS, "data.sequence_length": 16, "batch.examples": 32, "budget.examples": 600 * 32},
    "ema-bf16": {"ema": 0.99, "precision": "bf16", "budget.examples": 120 * 512},
    "quickstart": {
        "data.sequence_length": 128,
        "model": {"layers": 4, "width": 96, "head_width": 32},
        "optimizer.learning_rate": 1e-2,
        "batch.examples": 4096,
        "budget.examples": 300_000,
    },
}


def nan_at(step: int) -> Callable[[Any, int, dict[str, Any]], dict[str, Any]]:
    """The loss is not a number at a step."""
    return lambda task, now, losses: {"loss": losses["loss"] * math.nan} if now == step else losses


def leaked(batch: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
    """The targets are the inputs."""
    return {**batch, "targets": batch["tokens"]}


def scrambled(steps: range) -> Callable[[dict[str, torch.Tensor], int], dict[str, torch.Tensor]]:
    """In some steps, targets have nothing to do with inputs."""

    def spoil(batch: dict[str, torch.Tensor], step: int) -> dict[str, torch.Tensor]:
        noise = torch.randint(90, batch["targets"].shape, generator=torch.Generator().manual_seed(step))
        return {**batch, "targets": noise} if step in steps else batch

    return spoil


def growing(share: float) -> float:
    """The learning rate grows without end from the middle on."""
    return 1.0 if share < 0.5 else 1.08 ** (300 * (share - 0.5))


def kicked(share: float) -> float:
    """The learning rate is far too high for a few steps."""
    return 40.0 if 0.5 <= share < 0.515 else 1.0


SICK: dict[str, dict[str, Any]] = {
    "rate-far-too-high": {"optimizer.learning_rate": 1.0, "optimizer.clip_norm": None, "budget.examples": 150 * 512},
    "rate-too-high-characters": {"optimizer.learning_rate": 3.0, "budget.examples": 150 * 512, **CHARACTERS},
    "growing-rate": {"rate": growing, "schedule.decay": "constant"},
    "kicked-and-recovers": {"rate": kicked, "schedule.decay": "constant"},
    "scrambled-and-recovers": {"batch": scrambled(range(200, 208)), **CHARACTERS},
    "scrambled-for-good": {"batch": scrambled(range(200, 1000)), **CHARACTERS},
    "growing-rate-no-norms": {
        "rate": growing,
        "schedule.decay": "constant",
        "optimizer.clip_norm": None,
        "model.activation": "gelu",
        "model.qk_norm": False,
        "model.tied": False,
        **CHARACTERS,
    },
    "leaked": {"batch": leaked, "budget.examples": 30 * 512, "model.width": 192},
    "leaked-characters": {"batch": leaked, "budget.examples": 30 * 512, "model.width": 128, **CHARACTERS},
    "nan-at-1": {"loss": nan_at(1)},
    "nan-at-500": {"loss": nan_at(500), "batch.examples": 128, "budget.examples": 600 * 128},
    "flat": {"optimizer.learning_rate": 1e-9, "budget.examples": 150 * 512},
}


class Recorder(Rule):
    """Keeps all that it is shown."""

    name = "recorder"
    now: "Recorder"

    def __init__(self, facts: Facts):
        super().__init__(facts)
        Recorder.now = self
        self.steps: list[Step] = []
        self.reports: list[Report] = []

    def step(self, step: Step) -> None:
        self.steps.append(step)

    def report(self, report: Report) -> None:
        self.reports.append(report)

    def state(self) -> dict[str, Any]:
        return {}


class Line:
    """Whoever follows; asks to leave once a number is not finite."""

    rank, workers = 0, 1
    progress: dict[str, Any] = {}  # noqa: RUF012

    @property
    def order(self) -> str | None:
        steps = Recorder.now.steps if hasattr(Recorder, "now") else []
        return "stop" if steps and not math.isfinite(steps[-1].loss) else None

    def send(self, message: dict[str, Any]) -> None:
        """Nothing to do."""


class Task(GPTTask):
    """A GPT with something wrong."""

    spoil_batch: Any = None
    spoil_loss: Any = None
    step = 0

    def batch(self, first_row: int, rows: int) -> Any:
        self.step = first_row * self.training.data.sequence_length // self.training.batch.examples + 1
        batch = dict(super().batch(first_row, rows))
        return self.spoil_batch(batch, self.step) if self.spoil_batch else batch

    def loss(self, model: Any, batch: Any) -> dict[str, Any]:
        losses = super().loss(model, batch)
        return self.spoil_loss(self, self.step, losses) if self.spoil_loss and model.training else losses


def record(changes: dict[str, Any], cache: Path) -> dict[str, Any]:
    """Train, and return what rules were shown."""
    changes, settings = dict(changes), json.loads(json.dumps(BASE))
    batch, loss, rate = changes.pop("batch", None), changes.pop("loss", None), changes.pop("rate", None)
    for key, value in changes.items():
        *rooms, last = key.split(".")
        place = settings
        for room in rooms:
            place = place.setdefault(room, {})
        place[last] = value
    training = GPTTraining.model_validate(settings)
    task = Task(training, cache)
    task.spoil_batch, task.spoil_loss = batch, loss
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(watch, "RULES", [Recorder]):
        door = Door(Path(folder), Line())
        job = Job(
            number=0,
            trainable="gpt",
            training=training.model_dump(mode="json"),
            folder=folder,
            cache=str(cache),
            metric="validation/loss",
            goal="minimize",
            precision="bf16" if training.precision == "bf16" else "fp32",
            kind="cpu",
            threads=1,
            memory_bytes=8 * 2**30,
            measured_flops_per_second=1e11,
        )

        def patched(schedule: Any, peak: float, share: float) -> float:
            return learning_rate(schedule, peak, share) * (rate(share) if rate else 1.0)

        with mock.patch.object(loop, "learning_rate", patched):
            loop.train(task, job, door)
        door.close()
    found = Recorder.now
    return {
        "facts": asdict(found.facts),
        "loss": [short(step.loss) for step in found.steps],
        "gradient_norm": [short(step.gradient_norm) for step in found.steps],
        "reports": [
            [r.step, short(r.waiting_for_data), short(r.mfu), round(r.memory_bytes / 2**20)] for r in found.reports
        ][:: max(1, len(found.reports) // 60)],
    }


def short(value: float) -> float | str:
    """Four digits; what is not finite as a word, which JSON has no number for."""
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def main() -> None:
    """Record what is named, or everything."""
    torch.set_num_threads(1)
    cache = Path(tempfile.gettempdir()) / "rigsweep-series"
    kept: dict[str, Any] = json.loads(FILE.read_text()) if FILE.exists() else {}
    for group, cases in (("healthy", HEALTHY), ("sick", SICK)):
        for name, changes in cases.items():
            if name in sys.argv[1:] or not sys.argv[1:]:
                kept[f"{group}/{name}"] = record(changes, cache)
                loss = kept[f"{group}/{name}"]["loss"]
                print(group, name, len(loss), loss[0], loss[-1], flush=True)
                FILE.parent.mkdir(exist_ok=True)
                lines = (
                    f"{json.dumps(name)}: {json.dumps(kept[name], separators=(',', ':'))}" for name in sorted(kept)
                )
                FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
