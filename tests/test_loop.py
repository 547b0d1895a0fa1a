"""The training loop: what it repeats, what it ends, what it reports."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from rigsweep.trainables import checkpoints, loop
from rigsweep.trainables.averages import decay_at
from rigsweep.trainables.checkpoints import CheckpointError
from rigsweep.trainables.door import Door
from rigsweep.trainables.gpt import GPTTask
from rigsweep.trainables.loop import train
from rigsweep.trainables.meter import Meter, forget_peak_memory, peak_memory_bytes
from rigsweep.trainables.registry import settings_class
from rigsweep.trainables.task import Samples
from rigsweep.trainables.trial import Job
from rigsweep.trainables.workers import ALONE

SPEED = 1e9
LENGTH = 16
TEXT = "".join(f"{n} bottles, {n * n} ships and a sea of {n % 7}.\n" for n in range(200))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Killed(BaseException):
    """Stands for a process that is gone."""


class Line:
    """Whoever follows the trial; gives an `order` from some progress on, or loses a report and with it the trial."""

    rank, workers = 0, 1

    def __init__(self, order=None, at=0, lost_at=None):
        self._order, self._at, self._lost_at = order, at, lost_at
        self.heard, self.sent = [], []

    @property
    def progress(self):
        return self.heard[-1]

    @progress.setter
    def progress(self, told):
        self.heard.append(told)

    @property
    def order(self):
        return self._order if self.heard[-1]["examples"] >= self._at else None

    def send(self, message):
        if message["examples"] == self._lost_at:
            raise Killed
        self.sent.append(message)

    def evaluations(self):
        """By examples, without what a clock says."""
        return {
            message["examples"]: {
                k: v for k, v in message["metrics"].items() if not k.startswith(("speed/", "memory/"))
            }
            for message in self.sent
        }


class Linear:
    """A linear model whose rows, weights and dropout follow from nothing but their index."""

    examples_per_row = 1

    def __init__(self, *, two_terms=False, dropout=0.0, bad_row=None, bad_slope=False, bad_evaluation=None):
        self.two_terms, self.dropout, self.bad_evaluation = two_terms, dropout, bad_evaluation
        self.bad_row, self.bad_slope = bad_row, bad_slope
        self.evaluated, self.sampled = [], 0

    def build(self):
        model = nn.Sequential(nn.Dropout(self.dropout), nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))
        for number, parameter in enumerate(model.parameters()):
            drawn = torch.randn(parameter.shape, generator=torch.Generator("cpu").manual_seed(number), device="cpu")
            parameter.data.copy_(drawn)
        return model

    def batch(self, first_row, rows):
        index = torch.arange(first_row, first_row + rows)
        x = torch.sin(index[:, None] * torch.arange(1, 7) * 0.7)
        return {"index": index, "x": x, "y": x.sum(1)}

    def loss(self, model, batch):
        error = model(batch["x"]).squeeze(1) - batch["y"]
        if self.bad_row is not None:
            bad = batch["index"] == self.bad_row
            # The square root's slope at 0 is infinite, and 0 times that is not a number.
            slope = 0 * torch.where(bad, 0 * error, 1.0).sqrt()
            error = error + slope if self.bad_slope else error.masked_fill(bad, math.nan)
        terms = {"loss": error.square().mean()}
        return terms | {"size": 0.1 * error.abs().mean()} if self.two_terms else terms

    def evaluate(self, model, device, workers=ALONE):
        self.evaluated.append([parameter.detach().clone() for parameter in model.parameters()])
        with torch.no_grad():
            batch = self.batch(10**6, 50)
            loss = (model.eval()(batch["x"]).squeeze(1) - batch["y"]).square().mean().item()
        model.train()
        return {"validation/loss": math.inf if len(self.evaluated) == self.bad_evaluation else loss}

    def sample(self, model, device, workers=ALONE):
        self.sampled += 1
        return Samples(texts={"sample": "a line"})

    def chance_loss(self):
        return None

    def role(self, name, parameter):
        return "matrix" if parameter.dim() == 2 else "vector"

    def activation_bytes_per_row(self, precision):
        return 100

    def flops_formula_per_example(self):
        return 6.0 * 28


def job_of(folder, settings, *, trainable="surface", **changes) -> Job:
    """`surface` for a hand-written task: its settings are the plain ones."""
    plain = {
        "number": 0,
        "trainable": trainable,
        "training": settings,
        "folder": str(folder),
        "cache": str(folder),
        "metric": "validation/loss",
        "goal": "minimize",
        "precision": "fp32",
        "kind": "cpu",
        "threads": 1,
        "memory_bytes": 2**30,
        "measured_flops_per_second": SPEED,
    }
    return Job(**(plain | changes))


def linear_settings(steps=10, **changes) -> dict:
    plain = {
        "batch": {"examples": 8},
        "budget": {"examples": 8 * steps},
        "evaluation": {"every": 0.2},
        "optimizer": {"learning_rate": 1e-2},
    }
    return plain | changes


def run(task, job, line=None):
    """Train through a real door, as `run_trial` does; answers (ending, line)."""
    line = line or Line()
    door = Door(Path(job.folder), line)
    try:
        return train(task, job, door), line
    finally:
        door.close()


def linear(folder, line=None, steps=10, task=None, job=None, **changes):
    return run(task or Linear(), job_of(folder, linear_settings(steps, **changes), **(job or {})), line)


def rows_of(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def state_at_end(folder) -> dict[str, torch.Tensor]:
    newest = checkpoints.latest(folder / "checkpoints")
    assert newest is not None
    return {f"{file.stem}/{name}": t for file in newest.glob("*.safetensors") for name, t in load_file(file).items()}


def assert_same_state(folder, other):
    found, expected = state_at_end(folder), state_at_end(other)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text.txt").write_text(TEXT)
    return folder


def gpt(corpus, folder, line=None, *, job=None, **changes):
    settings = {
        "data": {
            "corpus": str(corpus / "text.txt"),
            "vocabulary": "characters",
            "sequence_length": LENGTH,
            "validation": "last 10%",
        },
        "model": {"layers": 2, "width": 16, "head_width": 8},
        "batch": {"examples": 8 * LENGTH},
        "budget": {"examples": 10 * 8 * LENGTH},
        "evaluation": {"every": 0.3, "examples": 10 * LENGTH},
        "sampling": {"tokens": 4},
    } | changes
    job_ = job_of(folder, settings, trainable="gpt", **(job or {}))
    return run(GPTTask(job_.settings(), corpus), job_, line)


# --- going on ---

STEP = 8 * LENGTH


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    ending, line = gpt(corpus, folder, ema=0.9, model=dropped())
    assert ending.state == "complete"
    assert sorted(line.evaluations()) == [3 * STEP, 6 * STEP, 9 * STEP, 10 * STEP]
    return folder, line.evaluations()


def dropped():
    return {"layers": 2, "width": 16, "head_width": 8, "dropout": 0.1}


@pytest.mark.parametrize("step", [0, 1, 3, 5, 9])
def test_an_interrupted_training_ends_as_an_undisturbed_one_bit_for_bit(corpus, tmp_path, undisturbed, step):
    folder, expected = undisturbed
    ending, before = gpt(corpus, tmp_path, Line("interrupt", step * STEP), ema=0.9, model=dropped())
    assert ending.state == "interrupted"
    recorded = {"recorded": tuple(before.evaluations())}
    ending, after = gpt(corpus, tmp_path, ema=0.9, model=dropped(), job=recorded)
    assert ending.state == "complete"
    assert before.evaluations().keys() & after.evaluations().keys() == set()
    assert before.evaluations() | after.evaluations() == expected
    assert_same_state(tmp_path, folder)


def test_an_evaluation_that_was_saved_but_not_delivered_is_reported_after_the_resume(corpus, tmp_path, undisturbed):
    folder, expected = undisturbed
    line = Line(lost_at=6 * STEP)
    with pytest.raises(Killed):
        gpt(corpus, tmp_path, line, ema=0.9, model=dropped())
    assert sorted(line.evaluations()) == [3 * STEP]
    ending, after = gpt(corpus, tmp_path, ema=0.9, model=dropped(), job={"recorded": (3 * STEP,)})
    assert ending.state == "complete"
    assert after.evaluations() == {examples: expected[examples] for examples in (6 * STEP, 9 * STEP, 10 * STEP)}
    assert after.sent[0]["checkpoint"] == f"{6 * STEP:012d}"
    assert_same_state(tmp_path, folder)


def test_a_training_that_was_killed_after_its_last_checkpoint_only_reports(corpus, tmp_path, undisturbed):
    with pytest.raises(Killed):
        gpt(corpus, tmp_path, Line(lost_at=10 * STEP), ema=0.9, model=dropped())
    ending, after = gpt(corpus, tmp_path, ema=0.9, model=dropped(), job={"recorded": (3 * STEP, 6 * STEP, 9 * STEP)})
    assert ending.state == "complete"
    assert after.evaluations() == {10 * STEP: undisturbed[1][10 * STEP]}


def test_a_reported_checkpoint_exists(tmp_path):
    linear(tmp_path, Line("interrupt", 48))
    _, line = linear(tmp_path)  # nothing is known to be recorded, so all are reported again
    assert [message["examples"] for message in line.sent] == [16, 32, 48, 64, 80]
    kept = {path.name for path in checkpoints.all_in(tmp_path / "checkpoints")}
    again = line.sent[:3]
    assert again[0]["checkpoint"] is None
    assert {message["checkpoint"] for message in again if message["checkpoint"]} | {line.sent[-1]["checkpoint"]} >= kept


def test_training_goes_on_after_many_interruptions_without_losing_a_checkpoint(tmp_path):
    linear(tmp_path / "whole")
    for _ in range(3):  # at the same place, where a checkpoint is already
        ending, _ = linear(tmp_path / "parts", Line("interrupt", 32))
        assert ending.state == "interrupted"
    for step in range(5, 10):
        linear(tmp_path / "parts", Line("interrupt", 8 * step))
    assert linear(tmp_path / "parts")[0].state == "complete"
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


def test_a_damaged_newest_checkpoint_does_not_cost_the_one_that_is_saved_next(tmp_path):
    linear(tmp_path, Line("interrupt", 64))
    (tmp_path / "checkpoints" / f"{64:012d}" / "model.safetensors").write_bytes(b"half")
    shutil.rmtree(tmp_path / "checkpoints" / f"{48:012d}", ignore_errors=True)
    linear(tmp_path, Line("interrupt", 24))
    newest = checkpoints.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == f"{24:012d}"


def test_progress_never_goes_back(tmp_path):
    _, before = linear(tmp_path, Line("interrupt", 40))
    _, after = linear(tmp_path, job={"recorded": (16, 32)})
    heard = [told["examples"] for told in before.heard + after.heard]
    assert heard == sorted(heard)
    assert {told["total"] for told in before.heard + after.heard} == {80}
    seconds = [message["seconds"] for message in before.sent + after.sent]
    assert seconds == sorted(seconds)
    assert [message["flops"] for message in after.sent] == sorted(message["flops"] for message in after.sent)


def test_an_order_to_stop_ends_without_saving(tmp_path):
    ending, line = linear(tmp_path, Line("stop", 24))
    assert ending.state == "stopped"
    assert line.heard[-1]["examples"] == 24
    assert [path.name for path in checkpoints.all_in(tmp_path / "checkpoints")] == [f"{16:012d}"]


def test_an_edited_budget_and_batch_go_on_where_the_training_was(tmp_path):
    linear(tmp_path)
    _, line = linear(tmp_path, budget={"examples": 160}, batch={"examples": 20}, job={"recorded": (16, 32, 48, 64, 80)})
    assert [told["examples"] for told in line.heard] == [80, 100, 120, 140]
    assert {told["total"] for told in line.heard} == {160}
    assert line.sent[-1]["examples"] == 160


def test_a_batch_that_does_not_divide_the_progress_begins_at_its_last_whole_step(tmp_path):
    linear(tmp_path)
    _, line = linear(tmp_path, budget={"examples": 160}, batch={"examples": 32}, job={"recorded": (16, 32, 48, 64, 80)})
    assert [told["examples"] for told in line.heard] == [80, 96, 128]


# --- micro-batches, precision, recomputation ---


def losses_of(folder):
    return [row["loss"] for row in rows_of(folder)]


@pytest.mark.parametrize("micro", [1, 3, 7, 100])
def test_the_micro_batch_changes_no_loss(corpus, tmp_path, micro):
    gpt(corpus, tmp_path / "whole", batch={"examples": STEP})
    gpt(corpus, tmp_path / "parts", batch={"examples": STEP, "micro": micro})
    assert len(losses_of(tmp_path / "whole")) == 10
    assert losses_of(tmp_path / "parts") == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)


def test_every_named_term_is_reported_as_its_mean_over_the_batch(tmp_path):
    for micro in (8, 3):
        batch = {"examples": 8, "micro": micro}
        linear(tmp_path / str(micro), task=Linear(two_terms=True), batch=batch)
    whole, parts = ([(row["loss"], row["size"]) for row in rows_of(tmp_path / name)] for name in ("8", "3"))
    for found, expected in zip(parts, whole, strict=True):
        assert found == pytest.approx(expected, rel=1e-5)
    task = Linear(two_terms=True)
    first = task.loss(task.build(), task.batch(0, 8))
    assert whole[0] == pytest.approx((first["loss"].item(), first["size"].item()))


def test_recomputation_changes_no_loss(corpus, tmp_path):
    for recompute in (False, True):
        gpt(corpus, tmp_path / str(recompute), recompute=recompute, model=dropped())
    assert losses_of(tmp_path / "True") == pytest.approx(losses_of(tmp_path / "False"), rel=1e-5)


def test_bf16_is_close_to_fp32_and_keeps_fp32_weights(corpus, tmp_path):
    for precision in ("fp32", "bf16"):
        gpt(corpus, tmp_path / precision, job={"precision": precision})
    assert losses_of(tmp_path / "bf16") == pytest.approx(losses_of(tmp_path / "fp32"), rel=0.02)
    assert losses_of(tmp_path / "bf16") != losses_of(tmp_path / "fp32")
    assert {tensor.dtype for tensor in state_at_end(tmp_path / "bf16").values()} == {torch.float32}


def test_dropout_follows_seed_and_step(tmp_path):
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        torch.manual_seed(len(name))  # of no influence
        linear(tmp_path / name, task=Linear(dropout=0.5), seed=seed)
    assert losses_of(tmp_path / "first") == losses_of(tmp_path / "again") != losses_of(tmp_path / "other")


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="torch.compile needs a C++ compiler")
def test_compiling_changes_no_loss(tmp_path):
    for compile_ in (False, True):
        linear(tmp_path / str(compile_), compile=compile_)
    torch._dynamo.reset()
    assert losses_of(tmp_path / "True") == pytest.approx(losses_of(tmp_path / "False"), rel=1e-4)
    # The compiled model is the model: nothing of the wrapper gets into a checkpoint.
    assert state_at_end(tmp_path / "True").keys() == state_at_end(tmp_path / "False").keys()


# --- the optimizer step ---


def clipped_norms(monkeypatch) -> list[float]:
    """The gradient norms that the optimizer meets, filled in as a training runs."""
    norms, build = [], loop.build_optimizer

    def built(*arguments):
        optimizer = build(*arguments)

        def note(*_):
            grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
            norms.append(nn.utils.get_total_norm(grads).item())

        optimizer.register_step_pre_hook(note)
        return optimizer

    monkeypatch.setattr(loop, "build_optimizer", built)
    return norms


def test_clipping_bounds_the_norm_and_the_norm_before_it_is_reported(tmp_path, monkeypatch):
    free, clipped = {"clip_norm": None, "learning_rate": 1e-9}, {"clip_norm": 0.01, "learning_rate": 1e-9}
    norms = clipped_norms(monkeypatch)
    linear(tmp_path / "free", optimizer=free)
    told = [row["optimizer/gradient_norm"] for row in rows_of(tmp_path / "free")]
    assert told == pytest.approx(norms)
    norms.clear()
    linear(tmp_path / "clipped", optimizer=clipped)
    assert min(told) > 0.1
    assert max(norms) <= 0.01 * (1 + 1e-4)
    assert [row["optimizer/gradient_norm"] for row in rows_of(tmp_path / "clipped")] == pytest.approx(told, rel=1e-3)


def test_the_schedule_is_followed_to_its_final_share(tmp_path):
    linear(tmp_path, schedule={"warmup": 0.5, "decay": "cosine", "final": 0.1})
    rates = [row["optimizer/learning_rate"] for row in rows_of(tmp_path)]
    assert rates[:5] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01])
    assert rates[-1] == pytest.approx(0.001)


# --- the moving average ---


def test_the_average_follows_its_recurrence_and_is_what_is_evaluated(tmp_path):
    plain, averaged = Linear(), Linear()
    linear(tmp_path / "plain", task=plain, evaluation={"every": 0.1})
    linear(tmp_path / "averaged", task=averaged, evaluation={"every": 0.1}, ema=0.7)
    expected = plain.evaluated[0]
    for weights, found in zip(plain.evaluated, averaged.evaluated, strict=True):
        expected = [0.7 * e + 0.3 * w for e, w in zip(expected, weights, strict=True)]
        torch.testing.assert_close(found, expected)
    state = state_at_end(tmp_path / "averaged")
    torch.testing.assert_close(state["ema-0.7/1.weight"], expected[0])
    torch.testing.assert_close(state["model/1.weight"], plain.evaluated[-1][0])


def test_a_file_edited_to_have_an_average_goes_on_from_the_weights(tmp_path):
    plain, edited = Linear(), Linear()
    linear(tmp_path / "plain", task=plain, evaluation={"every": 0.1})
    linear(tmp_path / "edited", Line("interrupt", 40), evaluation={"every": 0.1})
    ending, _ = linear(tmp_path / "edited", task=edited, evaluation={"every": 0.1}, ema=0.7)
    assert ending.state == "complete"
    expected = [0.7 * e + 0.3 * w for e, w in zip(*plain.evaluated[4:6], strict=True)]
    torch.testing.assert_close(edited.evaluated[0], expected)


def test_several_averages_are_evaluated_each_by_itself_and_the_first_counts(tmp_path):
    alone, task = Linear(), Linear()
    linear(tmp_path / "alone", task=alone, ema=0.7)
    linear(tmp_path / "together", task=task, ema=["power 10%", 0.7, "raw"])
    rows = [row for row in rows_of(tmp_path / "together") if "validation/loss" in row]
    single = [row["validation/loss"] for row in rows_of(tmp_path / "alone") if "validation/loss" in row]
    assert [row["ema-0.7/loss"] for row in rows] == single
    assert all({row["validation/loss"], row["ema-0.7/loss"], row["raw/loss"]} != {single[0]} for row in rows)
    newest = checkpoints.latest(tmp_path / "together" / "checkpoints")
    assert checkpoints.weights_of(newest).name == "ema-power-10.safetensors"
    state = state_at_end(tmp_path / "together")
    torch.testing.assert_close(state["ema-power-10/1.weight"], task.evaluated[-3][0])
    torch.testing.assert_close(state["ema-0.7/1.weight"], task.evaluated[-2][0])
    torch.testing.assert_close(state["model/1.weight"], task.evaluated[-1][0])


def test_a_training_with_averages_that_was_interrupted_ends_as_one_that_was_not(tmp_path):
    lengths = ["power 10%", 0.7, "raw"]
    linear(tmp_path / "whole", ema=lengths)
    linear(tmp_path / "parts", Line("interrupt", 40), ema=lengths)
    linear(tmp_path / "parts", ema=lengths)
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


@pytest.mark.parametrize("width", [0.05, 0.1, 0.25])
def test_an_average_by_a_power_is_as_wide_as_it_says(width):
    weights = np.zeros(4001)
    for step in range(1, 4001):
        decay = decay_at(f"power {100 * width:g}%", step)
        weights *= decay
        weights[step] = 1 - decay
    place = np.arange(4001)
    mean = (weights * place).sum()
    assert weights.sum() == pytest.approx(1)
    assert math.sqrt((weights * (place - mean) ** 2).sum()) / 4000 == pytest.approx(width, rel=0.01)


@pytest.mark.parametrize("ema", [1.5, 0.0, "power 30%", "power", "none", [], [0.9, 0.9]])
def test_a_length_that_is_none_is_refused(ema):
    with pytest.raises(ValueError, match="allowed: "):
        settings_class("surface").model_validate({"trainable": "surface", "ema": ema})


def test_milestones_are_kept_beside_the_best_and_the_latest(tmp_path):
    linear(tmp_path / "with", checkpoints={"every": 0.3})
    linear(tmp_path / "without")
    found = {int(path.name) for path in checkpoints.all_in(tmp_path / "with" / "checkpoints")}
    best_and_latest = {int(path.name) for path in checkpoints.all_in(tmp_path / "without" / "checkpoints")}
    assert found == {24, 48, 72} | best_and_latest
    assert_same_state(tmp_path / "with", tmp_path / "without")


# --- health ---


@pytest.mark.parametrize("steps", [10, 250])  # a report at every step, and at every second one
@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_loss_that_is_not_finite_ends_the_training_and_names_the_examples(tmp_path, steps, step):
    ending, line = linear(tmp_path, steps=steps, task=Linear(bad_row=8 * step - 3))
    assert ending.state == "diverged"
    assert ending.rule == "non-finite-loss"
    assert ending.reason.startswith(f"the loss is not finite (nan) after {8 * step:,} examples; look in this order: ")
    assert all(message["examples"] < 8 * step for message in line.sent)
    assert all(math.isfinite(row["loss"]) for row in rows_of(tmp_path))
    assert line.heard[-1]["examples"] <= 8 * step


@pytest.mark.parametrize("slope", [False, True])
def test_a_last_step_that_diverges_is_not_complete(tmp_path, slope):
    ending, line = linear(tmp_path, task=Linear(bad_row=77, bad_slope=slope))
    assert ending.state == "diverged"
    assert ending.rule == ("non-finite-gradient" if slope else "non-finite-loss")
    assert "is not finite (nan) after 80 examples" in ending.reason
    assert line.sent[-1]["examples"] == 64
    assert checkpoints.all_in(tmp_path / "checkpoints")[-1].name == f"{64:012d}"


def test_an_interruption_right_after_a_step_that_diverged_saves_nothing(tmp_path):
    ending, _ = linear(tmp_path, Line("interrupt", 24), steps=250, task=Linear(bad_row=23))
    assert ending.state == "diverged"
    assert checkpoints.all_in(tmp_path / "checkpoints") == []


def test_a_validation_loss_that_is_not_finite_ends_the_training_before_anything_is_drawn(tmp_path):
    task = Linear(bad_evaluation=2)
    ending, line = linear(tmp_path, task=task)
    assert ending.state == "diverged"
    assert ending.rule == "non-finite-loss"
    assert ending.reason.startswith("validation/loss is not finite (inf) after 32 examples")
    assert [message["examples"] for message in line.sent] == [16]
    assert [path.name for path in checkpoints.all_in(tmp_path / "checkpoints")] == [f"{16:012d}"]
    assert task.sampled == 1


def test_weights_that_become_nan_in_a_gpt_are_divergence_not_an_error_of_the_sampler(corpus, tmp_path):
    optimizer = {"learning_rate": 1e30, "clip_norm": None}
    ending, _ = gpt(corpus, tmp_path, optimizer=optimizer, evaluation={"every": 0.1, "examples": LENGTH})
    assert ending.state == "diverged"


# --- checkpoints of a training ---


@pytest.mark.parametrize("goal", ["minimize", "maximize"])
def test_the_best_and_the_latest_checkpoint_are_kept(tmp_path, goal):
    _, line = linear(tmp_path, job={"goal": goal})
    found = line.evaluations()
    chosen = (min if goal == "minimize" else max)(found, key=lambda examples: found[examples]["validation/loss"])
    assert {int(path.name) for path in checkpoints.all_in(tmp_path / "checkpoints")} == {chosen, 80}


def test_initial_weights_are_those_of_another_run(tmp_path):
    linear(tmp_path / "first", ema=0.7)
    first = checkpoints.latest(tmp_path / "first" / "checkpoints")
    assert first is not None
    task = Linear()
    optimizer = {"learning_rate": 1e-12, "weight_decay": 0}
    _, line = linear(tmp_path / "second", task=task, optimizer=optimizer, job={"initial": str(first)})
    weights = load_file(first / "ema-0.7.safetensors")
    torch.testing.assert_close(task.evaluated[0], [weights[n] for n in ("1.weight", "1.bias", "3.weight", "3.bias")])
    assert line.heard[0]["examples"] == 0


def test_initial_weights_of_other_shapes_are_refused_in_one_line(corpus, tmp_path):
    gpt(corpus, tmp_path / "first")
    first = checkpoints.latest(tmp_path / "first" / "checkpoints")
    wider = {"layers": 2, "width": 32, "head_width": 8}
    with pytest.raises(CheckpointError, match=r"model\.safetensors do not fit this model: .*size mismatch") as raised:
        gpt(corpus, tmp_path / "second", model=wider, job={"initial": str(first)})
    assert "\n" not in str(raised.value)


def test_a_damaged_initial_checkpoint_is_refused(tmp_path):
    linear(tmp_path / "first")
    first = checkpoints.latest(tmp_path / "first" / "checkpoints")
    assert first is not None
    (first / "model.safetensors").write_bytes(b"half")
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors"):
        linear(tmp_path / "second", job={"initial": str(first)})


def test_an_interrupted_training_goes_on_from_its_own_weights_not_from_the_initial_ones(tmp_path):
    linear(tmp_path / "first")
    initial = {"initial": str(checkpoints.latest(tmp_path / "first" / "checkpoints"))}
    linear(tmp_path / "whole", job=initial)
    linear(tmp_path / "parts", Line("interrupt", 24), job=initial)
    linear(tmp_path / "parts", job=initial)
    assert_same_state(tmp_path / "parts", tmp_path / "whole")


# --- reports and the meter ---


def test_a_long_training_reports_at_most_two_hundred_times_between_evaluations(tmp_path):
    linear(tmp_path, steps=450)
    steps = [row["examples"] // 8 for row in rows_of(tmp_path)]
    assert steps == sorted({*range(3, 451, 3), 90, 180, 270, 360, 450})


def test_every_report_says_flops_that_were_spent(tmp_path):
    linear(tmp_path)
    rows = rows_of(tmp_path)
    assert [row["examples"] for row in rows] == [8 * step for step in range(1, 11)]
    assert [row["flops"] for row in rows] == pytest.approx([168 * row["examples"] for row in rows])  # 6 a weight
    assert {row["total"] for row in rows} == {80}


class Clock:
    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("rigsweep.trainables.meter.time.perf_counter", lambda: self.now)


def test_the_meter_counts_examples_waiting_and_mfu(monkeypatch):
    clock = Clock(monkeypatch)
    meter = Meter(flops_per_example=50.0, measured_flops_per_second=1000.0, peak_flops_per_second=2000.0)
    for _ in range(4):
        clock.now += 0.5
        meter.waited(0.1)
        meter.saw(5)
    told = meter.read(torch.device("cpu"))
    assert told["speed/examples_per_second"] == pytest.approx(10)
    assert told["speed/flops_per_second"] == pytest.approx(500)
    assert told["speed/mfu"] == pytest.approx(0.25)
    assert told["speed/mfu_of_measured"] == pytest.approx(0.5)
    assert told["speed/waiting_for_data"] == pytest.approx(0.2)
    assert told["memory/peak_bytes"] > 2**20
    assert meter.shown == {"examples_per_second": pytest.approx(10), "mfu": pytest.approx(0.25)}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_trial_is_not_charged_for_the_memory_of_the_one_before():
    cpu = torch.device("cpu")
    held = [torch.ones(2**16) for _ in range(800)]  # 200 MiB in pieces that glibc would keep
    high = peak_memory_bytes(cpu)
    del held
    assert peak_memory_bytes(cpu) >= high
    forget_peak_memory()
    assert peak_memory_bytes(cpu) < high - 150 * 2**20


def test_the_meter_leaves_evaluations_out(monkeypatch):
    clock = Clock(monkeypatch)
    meter = Meter(50.0, 1000.0, None)
    meter.read(torch.device("cpu"))
    paused = meter.pause()
    clock.now += 60
    meter.go_on(paused)
    clock.now += 2
    meter.saw(20)
    told = meter.read(torch.device("cpu"))
    assert told["speed/examples_per_second"] == pytest.approx(10)
    assert told["speed/mfu"] == told["speed/mfu_of_measured"] == pytest.approx(0.5)  # no peak is known


def test_the_speed_of_a_training_excludes_its_evaluations(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)

    class Slow(Linear):
        def batch(self, first_row, rows):
            clock.now += 0.25
            return super().batch(first_row, rows)

        def loss(self, model, batch):
            clock.now += 0.75
            return super().loss(model, batch)

        def evaluate(self, model, device, workers=ALONE):
            found = super().evaluate(model, device, workers)
            clock.now += 1000
            return found

    linear(tmp_path, task=Slow())
    rows = rows_of(tmp_path)
    assert [row["speed/examples_per_second"] for row in rows] == pytest.approx([8.0] * 10)
    assert [row["speed/waiting_for_data"] for row in rows] == pytest.approx([0.25] * 10)
