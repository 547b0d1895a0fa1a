"""The memory ladder: its order, what is refused, and that it changes nothing that is learned."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rigsweep.cluster.memory import observations
from rigsweep.trainables import checkpoints
from rigsweep.trainables.door import Door
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.ladder import Rung, choose, next_rung, train
from rigsweep.trainables.trial import Job

LENGTH = 16
TEXT = "".join(f"{n} bottles, {n * n} ships and a sea of {n % 7}.\n" for n in range(200))


class Line:
    rank, workers = 0, 1

    def __init__(self):
        self.order, self.progress, self.sent = None, {}, []

    def send(self, message):
        self.sent.append(message)

    def told(self, event):
        return [message for message in self.sent if message["event"] == event]


def job_of(folder, **changes):
    (folder / "text.txt").write_text(TEXT)
    settings = {
        "data": {
            "corpus": str(folder / "text.txt"),
            "vocabulary": "characters",
            "sequence_length": LENGTH,
            "validation": "last 10%",
        },
        "model": {"layers": 2, "width": 16, "head_width": 8},
        "batch": {"examples": 8 * LENGTH},
        "budget": {"examples": 6 * 8 * LENGTH},
        "evaluation": {"every": 0.5, "examples": 10 * LENGTH},
        "sampling": {"tokens": 4},
    } | changes.pop("settings", {})
    plain = {
        "number": 0,
        "trainable": "gpt",
        "training": settings,
        "folder": str(folder / "trial"),
        "cache": str(folder),
        "metric": "validation/loss",
        "goal": "minimize",
        "precision": "fp32",
        "kind": "cpu",
        "threads": 1,
        "memory_bytes": 2**30,
        "measured_flops_per_second": 1e9,
        "card_name": "CPU, 1 thread",
    }
    return Job(**(plain | changes))


def run(job, task_class=GPTTask):
    line = Line()
    door = Door(Path(job.folder), line)
    try:
        return train(lambda training: task_class(training, Path(job.cache)), job, door), line
    finally:
        door.close()


def losses_of(job):
    rows = [json.loads(line) for line in (Path(job.folder) / "metrics.jsonl").read_text().splitlines()]
    return {row["examples"]: row["loss"] for row in rows}


def chosen(job):
    return choose(lambda training: GPTTask(training, Path(job.cache)), job, always=True)


def failing_once(method, at=1):
    """A GPT task that runs out of memory in one call of a method, once."""
    calls = []

    class Failing(GPTTask):
        pass

    def fails(self, model, *args):
        if next(model.parameters()).is_meta:  # counting FLOPs
            return getattr(GPTTask, method)(self, model, *args)
        calls.append(method)
        if len(calls) == at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return getattr(GPTTask, method)(self, model, *args)

    setattr(Failing, method, fails)
    return Failing


def test_the_ladder_halves_then_recomputes_then_ends():
    rung = asked = Rung(5, recompute=False, compile=False)
    climbed = []
    while rung := next_rung(rung, asked.micro_rows, first_step=True):
        climbed.append((rung.micro_rows, rung.recompute))
    assert climbed == [(3, False), (2, False), (1, False), (5, True), (3, True), (2, True), (1, True)]


def test_compile_is_tried_off_first_on_the_very_first_step_alone():
    rung = Rung(4, recompute=False, compile=True)
    assert next_rung(rung, rung.micro_rows, first_step=True) == Rung(4, recompute=False, compile=False)
    assert next_rung(rung, rung.micro_rows, first_step=False) == Rung(2, recompute=False, compile=True)


@pytest.mark.parametrize(("method", "at"), [("loss", 1), ("evaluate", 1), ("evaluate", 2), ("sample", 1)])
def test_a_shortage_at_step_1_in_evaluation_and_in_sampling_is_climbed_over_with_the_same_losses(tmp_path, method, at):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    whole, saved = job_of(tmp_path / "a"), job_of(tmp_path / "b")
    run(whole)
    ending, line = run(saved, failing_once(method, at))
    assert ending.state == "complete"
    (warning,) = line.told("warning")
    assert (warning["rule"], warning["reason"]) == ("memory-ladder", "memory ran out: 4 rows x 2")
    assert losses_of(saved) == pytest.approx(losses_of(whole), rel=1e-5)
    reported = [message["examples"] for message in line.told("report")]
    assert reported == sorted(set(reported)), "what was reported is not reported again"


def test_a_limit_that_the_asked_micro_batch_exceeds_is_met_by_a_higher_rung_with_the_same_losses(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    model = {"model": {"layers": 6, "width": 16, "head_width": 8}}
    whole = job_of(tmp_path / "a", settings=model)
    run(whole)
    asked = chosen(whole)
    assert asked.memory is not None
    assert asked.rung.micro_rows == 8
    micro = {"batch": {"examples": 8 * LENGTH, "micro": 8}}
    limit = int(0.6 * asked.memory.corrected_bytes)
    small = job_of(tmp_path / "b", settings=model | micro, memory_bytes=limit, memory_limited=True)
    ending, line = run(small)
    assert ending.state == "complete"
    assert line.told("warning")[0]["rule"] == "memory-ladder"
    (found,) = observations(Path(small.cache), small.card_name)
    assert found.peak_bytes == found.estimate.total_bytes <= limit
    assert losses_of(small) == pytest.approx(losses_of(whole), rel=1e-5)


def test_a_shape_that_cannot_fit_is_never_started_and_says_why(tmp_path):
    job = job_of(tmp_path, memory_bytes=20_000, memory_limited=True)
    ending, line = run(job)
    assert ending.state == "out_of_memory"
    assert "estimated" in ending.reason
    assert "shorter sequence" in ending.reason
    assert line.sent == []
    assert checkpoints.latest(Path(job.folder) / "checkpoints") is None


def test_another_error_is_not_taken_for_a_shortage(tmp_path):
    class Broken(GPTTask):
        def loss(self, model, batch):
            raise ValueError("no shortage")

    with pytest.raises(ValueError, match="no shortage"):
        run(job_of(tmp_path), Broken)


def test_every_rung_has_the_same_losses(tmp_path):
    job = job_of(tmp_path)
    training = job.settings()
    rung = asked = Rung(8, recompute=False, compile=False)
    found = {}
    while rung is not None:
        folder = str(tmp_path / f"{rung.micro_rows}-{rung.recompute}")
        on_rung = replace(job, folder=folder, training=rung.of(training).model_dump(mode="json"))
        assert run(on_rung)[0].state == "complete"
        found[rung] = losses_of(on_rung)
        rung = next_rung(rung, asked.micro_rows, first_step=False)
    assert len(found) == 8
    for losses in found.values():
        assert losses == pytest.approx(found[asked], rel=1e-5)
