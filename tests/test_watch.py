"""Real trainings under watch: what is kept of those that end, what is never kept, what is passed on."""

import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from rigsweep.sweeps.controller import Controller
from rigsweep.sweeps.history import VERSION, History
from rigsweep.trainables import checkpoints, watch
from rigsweep.trainables.door import Door
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.health import Rule, Step
from rigsweep.trainables.loop import train
from rigsweep.trainables.trial import Job, run_trial

from .simulator import sweep_of

LENGTH, STEP = 16, 4 * 16
TEXT = "".join(f"{n} bottles, {n * n} ships and a sea of {n % 7}.\n" for n in range(200))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(TEXT)
    return folder


class Line:
    """Whoever follows the trial; gives an order from some progress on."""

    rank, workers = 0, 1

    def __init__(self, order: str | None = None, at: int = 0):
        self._order, self._at, self.progress, self.sent = order, at, {}, []

    @property
    def order(self) -> str | None:
        return self._order if self.progress["examples"] >= self._at else None

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def warnings(self) -> list[str]:
        return [message["rule"] for message in self.sent if message["event"] == "warning"]


class Sick(GPTTask):
    """A GPT whose loss, or only its gradient, is not finite at a step; or whose targets leak."""

    bad_step: int | None = None
    only_gradient = False
    leaks = False
    mask: torch.Tensor | None = None

    def batch(self, first_row, rows):
        self._step = first_row // 4 + 1
        batch = dict(super().batch(first_row, rows))
        if self.leaks:
            batch["targets"] = batch["tokens"]
        return batch | ({} if self.mask is None else {"mask": self.mask})

    def loss(self, model, batch):
        loss = super().loss(model, batch)["loss"]
        if model.training and self._step == self.bad_step:
            # The square root's slope at 0 is infinite, and 0 times that is not a number.
            loss = loss + (0 * loss).sqrt() if self.only_gradient else loss * math.inf
        return {"loss": loss}


def settings(corpus: Path, steps: int = 20, **changes: Any) -> dict[str, Any]:
    return {
        "data": {
            "corpus": str(corpus / "text.txt"),
            "vocabulary": "characters",
            "sequence_length": LENGTH,
            "validation": "last 10%",
        },
        "model": {"layers": 1, "width": 16, "head_width": 8},
        "batch": {"examples": STEP},
        "budget": {"examples": steps * STEP},
        "evaluation": {"every": 0.25, "examples": 4 * LENGTH},
        "sampling": {"tokens": 2},
    } | changes


def job_of(folder: Path, training: dict[str, Any], cache: Path, **changes: Any) -> Job:
    plain = {
        "number": 3,
        "trainable": "gpt",
        "training": training,
        "folder": str(folder),
        "cache": str(cache),
        "metric": "validation/loss",
        "goal": "minimize",
        "precision": "fp32",
        "kind": "cpu",
        "threads": 1,
        "memory_bytes": 2**30,
        "measured_flops_per_second": 1e9,
    }
    return Job(**(plain | changes))


def run(corpus: Path, folder: Path, line: Line | None = None, *, steps: int = 20, job: Any = None, **wrong: Any):
    """Train a sick GPT; its attributes are `wrong`. Answers (ending, line)."""
    changes = wrong.pop("settings", {})
    job_ = job_of(folder, settings(corpus, steps, **changes), corpus, **(job or {}))
    task = Sick(job_.settings(), corpus)  # pyright: ignore
    for name, value in wrong.items():
        setattr(task, name, value)
    line = line or Line()
    door = Door(folder, line)
    try:
        return train(task, job_, door), line
    finally:
        door.close()


def assert_finite_checkpoints(folder: Path) -> int:
    """How many checkpoints there are, every number in them finite."""
    found = checkpoints.all_in(folder / "checkpoints")
    for path in found:
        for file in path.glob("*.safetensors"):
            assert all(tensor.isfinite().all() for tensor in load_file(file).values()), file
    return len(found)


# What is not finite.


@pytest.mark.parametrize("only_gradient", [False, True])
@pytest.mark.parametrize(("step", "steps"), [(1, 20), (500, 600)])
def test_nan_at_step_1_and_at_step_500(
    corpus: Path, tmp_path: Path, step: int, steps: int, only_gradient: bool
) -> None:
    folder = tmp_path / "trials" / "3"
    ending, line = run(corpus, folder, steps=steps, bad_step=step, only_gradient=only_gradient)
    rule = "non-finite-gradient" if only_gradient else "non-finite-loss"
    assert (ending.state, ending.rule) == ("diverged", rule)
    assert f"after {step * STEP:,} examples" in ending.reason
    assert "look in this order: a tenth of the learning rate" in ending.reason
    assert ending.reason.endswith("its batch is kept in trials/3/offending-batch.safetensors")
    assert all(message["examples"] < step * STEP for message in line.sent)
    assert bool(assert_finite_checkpoints(folder)) == (step > 1)
    job = job_of(folder, settings(corpus, steps), corpus)
    expected = GPTTask(job.settings(), corpus).batch(4 * (step - 1), 4)  # pyright: ignore
    kept = load_file(folder / "offending-batch.safetensors")
    assert kept.keys() == expected.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    with safe_open(folder / "offending-batch.safetensors", "pt") as file:
        told = file.metadata()
    assert told == {
        "step": str(step),
        "examples": str(step * STEP),
        "first_row": str(4 * (step - 1)),
        "rows": "4",
        "rule": rule,
    }


@pytest.mark.parametrize("bad_step", [4, 5])
@pytest.mark.parametrize("only_gradient", [False, True])
@pytest.mark.parametrize("order_at", [4, 5, 6])
def test_an_interruption_near_a_bad_step_saves_nothing_of_it(corpus, tmp_path, bad_step, only_gradient, order_at):
    # With so many steps most are looked at one step late.
    line = Line("interrupt", order_at * STEP)
    ending, _ = run(corpus, tmp_path, line, steps=1000, bad_step=bad_step, only_gradient=only_gradient)
    assert ending.state == ("interrupted" if order_at < bad_step else "diverged")
    assert assert_finite_checkpoints(tmp_path) == (ending.state == "interrupted")


@pytest.mark.parametrize("steps", [1, 20])
def test_weights_that_a_finite_step_ruined_are_not_saved(corpus: Path, tmp_path: Path, steps: int) -> None:
    # The first step's loss and gradient are finite, its learning rate takes the weights beyond fp32. Then comes an
    # evaluation, or an interruption.
    far = {"optimizer": {"learning_rate": 1e39, "clip_norm": None}, "schedule": {"warmup": 0.0}}
    ending, _ = run(corpus, tmp_path, Line("interrupt", STEP), steps=steps, settings=far)
    assert (ending.state, ending.rule) == ("diverged", "non-finite-weights")
    assert assert_finite_checkpoints(tmp_path) == 0


def test_a_batch_that_is_not_finite_itself_is_named(corpus: Path, tmp_path: Path) -> None:
    mask = torch.ones(4, LENGTH)
    mask[2, 3] = math.nan
    ending, _ = run(corpus, tmp_path, bad_step=2, mask=mask)
    assert ending.reason.endswith("offending-batch.safetensors, where `mask` is not finite")


def test_a_full_disk_does_not_hide_what_happened(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "save_file", full)
    ending, _ = run(corpus, tmp_path, bad_step=2)
    assert (ending.state, ending.rule) == ("diverged", "non-finite-loss")
    assert "its batch could not be kept ([Errno 28] No space left on device)" in ending.reason


def test_after_a_trial_that_diverged_the_sweep_goes_on(corpus: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """The controller and real trainings, in one process: the middle one of three is sick."""
    base = settings(corpus) | {"optimizer": {"learning_rate": 1e-3}}
    text = json.dumps({"trainable": "gpt", "base": base, "trials": 3, "searcher": "random"} | SEARCH)
    sweep, history = sweep_of(text), History(tmp_path / "history.jsonl")
    history.append("opened", version=VERSION)
    controller = Controller(sweep, history, (STEP * 5.0,))

    class Follower(Line):
        def send(self, message: dict[str, Any]) -> None:
            if message["event"] == "warning":
                controller.warned(number, message["rule"], message["reason"], message["examples"])
            else:
                controller.reported(number, message)

    while (number := controller.next_trial()) is not None:
        monkeypatch.setattr("rigsweep.trainables.gpt.TASK", Sick)
        monkeypatch.setattr(Sick, "bad_step", 7 if number == 1 else None)
        training = sweep.training(controller.record.trials[number].parameters).model_dump(mode="json")
        controller.started(number, "here", ["CPU"], 1)
        job = job_of(tmp_path / "trials" / str(number), training, corpus, number=number)
        last = run_trial(vars(job), Follower())
        controller.ended(number, last["state"], last["reason"], last["rule"])
    history.close()
    trials = controller.record.trials
    assert [trial.state for trial in trials.values()] == ["complete", "diverged", "complete"]
    assert [trial.rule for trial in trials.values()] == ["", "non-finite-loss", ""]
    assert (tmp_path / "trials" / "1" / "offending-batch.safetensors").exists()
    assert assert_finite_checkpoints(tmp_path / "trials" / "1") == 1


SEARCH = {
    "search": {"optimizer.learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}},
    "early_stopping": {"rule": "none"},
}


# Chance, masks, warnings.


def test_a_gpt_that_sees_its_targets_fails_at_once_unless_it_starts_from_weights(corpus: Path, tmp_path: Path) -> None:
    wide = {"model": {"layers": 1, "width": 192, "head_width": 32}}
    ending, _ = run(corpus, tmp_path / "leaking", steps=400, leaks=True, settings=wide)
    assert (ending.state, ending.rule) == ("failed", "targets-leaked")
    ending, _ = run(corpus, tmp_path / "whole", settings=wide)
    assert ending.state == "complete"
    initial = {"initial": str(checkpoints.latest(tmp_path / "whole" / "checkpoints"))}
    ending, _ = run(corpus, tmp_path / "more", leaks=True, settings=wide, job=initial)
    assert ending.state == "complete"


def test_a_closed_mask_is_a_warning_once_and_is_in_the_trials_log(corpus, tmp_path, caplog) -> None:
    mask = torch.ones(4, LENGTH, dtype=torch.bool)
    mask[1] = False
    with caplog.at_level(logging.WARNING):
        ending, line = run(corpus, tmp_path, mask=mask)
    assert ending.state == "complete"
    assert line.warnings() == ["masked-attention-row"]
    (said,) = [message for message in line.sent if message["event"] == "warning"]
    assert said["examples"] == STEP
    assert said["reason"].startswith("1 of 4 rows of `mask` are masked as a whole")
    assert [record.getMessage() for record in caplog.records] == [f"masked-attention-row: {said['reason']}"]


def test_a_compiled_function_that_changes_with_every_call_is_counted() -> None:
    @torch.compile(backend="eager")
    def scaled(x: torch.Tensor, by: str) -> torch.Tensor:
        return x * len(by)

    before, given_up = watch._compilations()
    for n in range(1, 4):
        scaled(torch.ones(3), "x" * n)
    assert watch._compilations() == (before + 3, given_up)
    for n in range(4, 12):
        scaled(torch.ones(3), "x" * n)
    assert watch._compilations()[1] == given_up + 1
    torch._dynamo.reset()


# What rules remember.


class Counting(Rule):
    """Ends a training at its fifteenth step, by its own count."""

    name = "counting"

    def __init__(self, facts):
        super().__init__(facts)
        self.seen: list[float] = []

    def step(self, step: Step):
        self.seen.append(step.loss)
        return watch.Finding(f"{self.seen}", "diverged") if len(self.seen) == 15 else None


@pytest.mark.parametrize("interrupted_at", [0, 3, 5, 12])
@pytest.mark.parametrize("steps", [20, 1000])
def test_rules_remember_over_an_interruption(corpus, tmp_path, monkeypatch, interrupted_at, steps) -> None:
    monkeypatch.setattr(watch, "RULES", [Counting])
    whole, _ = run(corpus, tmp_path / "whole", steps=steps)
    run(corpus, tmp_path / "parts", Line("interrupt", interrupted_at * STEP), steps=steps)
    parts, _ = run(corpus, tmp_path / "parts", steps=steps)
    assert parts == whole
    assert whole.state == "diverged"


def test_a_checkpoint_from_before_there_were_rules_is_read(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, Line("interrupt", 7 * STEP))
    path = checkpoints.latest(tmp_path / "checkpoints")
    assert path is not None
    told = json.loads((path / "progress.json").read_text())
    assert told.pop("health").keys() >= {"gradient-norm", "no-progress"}
    (path / "progress.json").write_text(json.dumps(told))
    assert checkpoints.read(path).health == {}
