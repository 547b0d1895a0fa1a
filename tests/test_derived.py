"""The numbers that follow from a file: steps, evaluations, micro-batch, FLOPs."""

import math
from types import SimpleNamespace

import pytest
from torch import nn

from rigsweep.trainables.derived import derive, evaluation_steps, steps_for
from rigsweep.trainables.settings import Training

PARAMETERS = 1000 * 10 + 10


class Task:
    """A matrix of 1,000 by 10 over rows of four examples, each row holding `row_bytes`."""

    examples_per_row = 4
    row_bytes = 1000

    def build(self):
        return nn.Linear(1000, 10)

    def batch(self, first_row, rows):
        import torch

        return {"x": torch.zeros(rows, 1000)}

    def loss(self, model, batch):
        return {"loss": model(batch["x"]).mean()}

    def activation_bytes_per_row(self, precision):
        return self.row_bytes if precision == "bf16" else 2 * self.row_bytes


def training_of(**changes) -> Training:
    return Training(**({"budget": {"examples": 1000}, "batch": {"examples": 100}} | changes))


def numbers(rungs=(), rungs_by="examples", free_rows=10.0, precision="bf16", **changes):
    training = training_of(**changes)
    state = (20 if training.ema else 16) * PARAMETERS
    memory = math.ceil((state + free_rows * Task.row_bytes) / 0.8)
    job = SimpleNamespace(memory_bytes=memory, precision=precision, rungs=rungs, rungs_by=rungs_by, workers=1)
    return derive(Task(), training, job)


def steps_of(budget, **changes) -> int:
    return steps_for(training_of(budget=budget, **changes), flops_per_example=7.3, parameters=50)


def evaluated(steps, every, rungs=(), by="examples", flops=1.0) -> list[int]:
    return sorted(evaluation_steps(training_of(evaluation={"every": every}), steps, rungs, by, flops))


# --- the budget ---


@pytest.mark.parametrize(("examples", "steps"), [(1, 1), (99, 1), (100, 1), (101, 2), (1000, 10), (1001, 11)])
def test_a_budget_of_examples_is_rounded_up_to_whole_batches(examples, steps):
    assert steps_of({"examples": examples}) == steps


def test_a_budget_of_flops_is_rounded_up_to_whole_batches():
    assert steps_of({"flops": 7.3 * 100 * 3.01}) == 4
    assert steps_of({"flops": 1e-3}) == 1


@pytest.mark.parametrize("steps", [1, 3, 7, 49, 1001])
def test_flops_of_so_many_steps_are_so_many_steps(steps):
    assert steps_of({"flops": steps * 100 * 7.3}) == steps


def test_a_budget_of_tokens_per_parameter_counts_all_parameters():
    assert steps_of({"tokens_per_parameter": 20}) == 10
    assert steps_of({"tokens_per_parameter": 20.5}) == 11


def test_what_a_training_comes_to():
    found = numbers(budget={"examples": 950})
    assert (found.parameters, found.steps, found.examples, found.rows_per_step) == (PARAMETERS, 10, 1000, 25)
    per_row = 3 * 2 * 1000 * 10  # forward and twice that backward, two FLOPs a multiply-add
    assert found.flops_per_example == per_row / 4
    assert found.flops == 1000 * per_row / 4
    assert found.as_dict()["steps"] == 10


# --- evaluations ---


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [
        (10, 0.1, list(range(1, 11))),
        (100, 0.1, list(range(10, 101, 10))),
        (9, 1 / 3, [3, 6, 9]),
        (10, 1 / 3, [4, 7, 10]),
        (100, 1 / 3, [34, 67, 100]),
        (100, 0.07, [*range(7, 100, 7), 100]),
        (10, 0.07, list(range(1, 11))),
        (10, 1.0, [10]),
        (1, 0.1, [1]),
        (3, 1e-9, [1, 2, 3]),
        (10, 0.6, [6, 10]),
    ],
)
def test_an_evaluation_at_the_first_step_at_or_past_every_share_and_at_the_end(steps, every, expected):
    assert evaluated(steps, every) == expected


def test_shares_are_not_one_step_late_for_being_inexact_in_binary():
    for steps in (100, 300, 700, 1000):
        for percent in (1, 2, 5, 10, 20):
            every = steps * percent // 100
            assert evaluated(steps, percent / 100) == list(range(every, steps + 1, every))


def test_an_evaluation_at_the_first_step_at_or_past_every_rung():
    assert evaluated(100, 1.0, rungs=(1000, 3001, 9999)) == [10, 31, 100]
    assert evaluated(100, 0.5, rungs=(1, 5000)) == [1, 50, 100]


def test_rungs_past_the_end_or_at_nothing_are_left_out():
    assert evaluated(100, 1.0, rungs=(0, 10_000, 10_001, 1e9)) == [100]


def test_rungs_by_flops_are_reached_by_flops():
    assert evaluated(100, 1.0, rungs=(7.3 * 1000, 7.3 * 3001), by="flops", flops=7.3) == [10, 31, 100]
    found = numbers(rungs=(15_000 * 300,), rungs_by="flops", evaluation={"every": 1.0})
    assert sorted(found.evaluation_steps) == [3, 10]


def test_trials_of_different_batches_are_evaluated_at_every_rung():
    for batch in (8, 12, 100):
        training = training_of(batch={"examples": batch}, evaluation={"every": 1.0})
        rungs, steps = (250, 500), math.ceil(1000 / batch)
        found = sorted(evaluation_steps(training, steps, rungs, "examples", 1.0))
        for rung in rungs:
            assert any(rung <= step * batch < rung + batch for step in found)


# --- the micro-batch ---


@pytest.mark.parametrize(
    ("fit", "micro", "accumulation"), [(100, 25, 1), (25, 25, 1), (24, 13, 2), (5, 5, 5), (1, 1, 25)]
)
def test_the_micro_batch_takes_as_few_passes_as_fit(fit, micro, accumulation):
    found = numbers(free_rows=fit)
    assert (found.micro_rows, found.accumulation) == (micro, accumulation)


def test_every_derived_micro_batch_fits_and_covers_the_step():
    for rows in (1, 2, 23, 24, 97):
        for fit in (1, 2, 7, 22, 96, 200):
            found = numbers(free_rows=fit, batch={"examples": 4 * rows})
            assert found.micro_rows <= fit
            assert (found.accumulation - 1) * found.micro_rows < rows <= found.accumulation * found.micro_rows
            assert found.accumulation == math.ceil(rows / fit)


def test_a_card_too_small_for_one_row_still_gets_one():
    assert numbers(free_rows=-100).micro_rows == 1


def test_the_micro_batch_of_the_file_overrides_up_to_the_whole_step():
    assert numbers(batch={"examples": 100, "micro": 7}).micro_rows == 7
    assert numbers(batch={"examples": 100, "micro": 700}).micro_rows == 25


def test_precision_and_average_count_in_what_fits():
    assert numbers(free_rows=10, precision="fp32").micro_rows == 5
    assert numbers(free_rows=10, ema=0.9).micro_rows == 9  # 25 rows in three passes
    training = training_of(ema=0.9)
    memory = math.ceil((16 * PARAMETERS + 10 * Task.row_bytes) / 0.8)
    job = SimpleNamespace(memory_bytes=memory, precision="bf16", rungs=(), rungs_by="examples", workers=1)
    assert derive(Task(), training, job).micro_rows == 1  # the average's 40 kB leave no room


@pytest.mark.parametrize(("parameters", "tflops", "hours"), [(30e6, 60, 0.5), (124e6, 90, 5.7), (350e6, 110, 37.1)])
def test_twenty_tokens_a_parameter_take_so_many_hours(parameters: float, tflops: float, hours: float):
    """At 6 FLOPs a token and parameter, and what a card really gets done in a second."""
    training = training_of(budget={"tokens_per_parameter": 20}, batch={"examples": 131_072})
    flops_per_token = 6 * parameters
    tokens = steps_for(training, flops_per_token, int(parameters)) * training.batch.examples
    assert round(tokens * flops_per_token / (tflops * 1e12) / 3600, 1) == hours
