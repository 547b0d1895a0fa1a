"""Learning: characters of tinyshakespeare in nanoGPT's small setting, scored on the whole validation part."""

import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from rigsweep.trainables.door import Door
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.gpt_settings import GPTTraining
from rigsweep.trainables.loop import train
from rigsweep.trainables.trial import Job

NANOGPT = 1.874  # measured on two slow cores in the same setting


class Line:
    """Keeps the last evaluation."""

    rank, workers = 0, 1
    order = None
    progress: dict[str, Any] = {}  # noqa: RUF012
    loss = float("nan")

    def send(self, message: dict[str, Any]) -> None:
        """Keep it."""
        self.loss = message["metrics"]["validation/loss"]


def rows() -> list[tuple[object, ...]]:
    """The validation loss after 2,000 steps of 768 tokens."""
    shared = Path(os.environ.get("RIGSWEEP_SHARED") or Path(__file__).parents[3] / "shared")
    text = shared / "data" / "text" / "tinyshakespeare.txt"
    goal = "at most 1.72"
    if not text.exists():
        return [("learning, tinyshakespeare", "skipped", f"{NANOGPT} (nanoGPT)", "no folder `shared`", goal, None)]
    training = GPTTraining.model_validate(
        {
            "data": {
                "corpus": str(text),
                "vocabulary": "characters",
                "sequence_length": 64,
                "validation": "last 10%",
            },
            "model": {"layers": 4, "width": 128, "head_width": 32},
            "optimizer": {"learning_rate": 2e-3},
            "schedule": {"warmup": 0.05},
            "batch": {"examples": 768},
            "budget": {"examples": 768 * 2000},
            "evaluation": {"every": 1.0, "examples": 111_000},
        }
    )
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        job = Job(
            number=0,
            trainable="gpt",
            training=training.model_dump(mode="json"),
            folder=f"{place}/trial",
            cache=f"{place}/cache",
            metric="validation/loss",
            goal="minimize",
            precision="fp32",
            kind="cpu",
            threads=1,
            memory_bytes=8 * 2**30,
            measured_flops_per_second=1e11,
        )
        line = Line()
        door = Door(Path(job.folder), line)
        assert train(GPTTask(training, Path(job.cache)), job, door).state == "complete"
        door.close()
    name = "learning, tinyshakespeare, 2,000 steps (nats)"
    ratio = f"{line.loss / NANOGPT:.3f}"
    return [(name, f"{line.loss:.3f}", f"{NANOGPT} (nanoGPT)", ratio, goal, line.loss <= 1.72)]
