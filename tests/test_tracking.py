"""The MLflow projection, against the real MLflow on SQLite."""

import json
import math
import random
from pathlib import Path
from typing import Any

SWEEP = """
question: 哪个学习率 suits "each" width?
trainable: surface
base:
  optimizer: {learning_rate: 1.0e-3}
  budget: {examples: 400k}
  model: {width: 64}
search:
  optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
  schedule.warmup: {low: 0%, high: 10%}
  model.width: {choices: [64, 96, 128]}
trials: 16
early_stopping: {rule: none}
"""
BEGAN = 1_700_000_000.0


class Made:
    """A sweep's folder, written by hand: time goes on by a second an event."""

    def __init__(self, runs: Path, name: str = "made", trials: int = 0):
        self.folder = runs / name
        self.folder.mkdir(parents=True)
        (self.folder / "sweep.yaml").write_text(SWEEP, encoding="utf-8")
        self.name, self.now = name, BEGAN
        self.open()
        random_ = random.Random(0)
        for number in range(trials):
            rate, warmup = 10 ** random_.uniform(-4, -2), random_.uniform(0, 0.1)
            width = random_.choice([64, 96, 128])
            parameters = {"optimizer.learning_rate": rate, "schedule.warmup": warmup, "model.width": width}
            self.start(number, parameters)
            final = 1.8 + abs(math.log10(rate) + 2.7) + 0.2 * (128 - width) / 64
            stopped = number % 3 == 2
            for k in range(1, 5 if stopped else 11):
                loss = final + 2.5 * math.exp(-0.4 * k)
                for j in range(4):
                    self.row(number, 40_000 * (k - 1) + 8000 * (j + 1), loss=loss + 0.3 - 0.05 * j)
                self.row(number, 40_000 * k, **{"validation/loss": loss, "speed/mfu": 0.31})
                self.event("report", trial=number, examples=40_000 * k, flops=1e9 * k, seconds=k * 1.0,
                           metrics={"validation/loss": loss}, checkpoint=None)
            self.sample(number, 400_000, "def main():\n    return '你好'\n")
            if stopped:
                self.end(number, "stopped", "worse than 2 of 3 at 160,000 examples")
            else:
                self.end(number, "complete", "its budget is spent", value=loss)

    def event(self, kind: str, **fields: Any) -> None:
        self.now += 1
        event = {"event": kind, "time": self.now, **fields}
        with (self.folder / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, ensure_ascii=False) + "\n")

    def open(self) -> None:
        self.event("opened", version=1, sweep=self.name, trainable="surface",
                   question='哪个学习率 suits "each" width?', objective={"metric": "validation/loss", "goal": "minimize"},
                   versions={"python": "3.11.9", "torch": "2.9.0"}, git={"commit": "0123abcd" * 5, "dirty": True})

    def start(self, number: int, parameters: dict[str, Any] | None = None) -> None:
        if parameters is not None:
            self.event("proposed", trial=number, group=number, seed=0, parameters=parameters)
        self.event("started", trial=number, node="box", cards=["NVIDIA GeForce RTX 3090"], process=1)

    def end(self, number: int, state: str, reason: str, value: float | None = None) -> None:
        self.event("ended", trial=number, state=state, reason=reason, seconds=1.0, value=value)

    def row(self, number: int, examples: int, **metrics: Any) -> None:
        self.now += 0.125
        path = self.folder / "trials" / str(number) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"examples": examples, "flops": examples * 1e6, "seconds": examples / 1e4, "time": self.now, **metrics}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sample(self, number: int, examples: int, words: str) -> None:
        path = self.folder / "trials" / str(number) / "samples" / f"{examples:012d}-text.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words, encoding="utf-8")
