"""The numbers that follow from a training's settings: steps, micro-batch, FLOPs, where it is evaluated.

Few dials: these are derived, never asked for, and `rigsweep plan` prints all of them.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import WrongSettings
from .settings import Training

if TYPE_CHECKING:
    from .task import Task
    from .trial import Job

_STATE_BYTES_PER_PARAMETER = 16  # weight, gradient and two AdamW moments, in fp32
_AVERAGE_BYTES_PER_PARAMETER = 4
_MEMORY_SHARE = 0.8  # the rest is for the allocator, the context, evaluation and sampling


@dataclass(frozen=True)
class Derived:
    """What a training comes to."""

    parameters: int
    flops_per_example: float
    """Training FLOPs of one example, forward and backward, 2 a multiply-add; recomputation not counted."""
    steps: int
    rows_per_step: int
    micro_rows: int
    """In one forward pass of one worker."""
    evaluation_steps: frozenset[int]
    """After which steps the model is evaluated (1 is after the first)."""
    examples: int
    workers: int = 1
    milestone_steps: frozenset[int] = frozenset()
    """After which steps a checkpoint is kept for good."""

    @property
    def accumulation(self) -> int:
        """Micro-batches of each worker in one optimizer step."""
        return math.ceil(self.rows_per_step / self.workers / self.micro_rows)

    def as_dict(self) -> dict[str, float]:
        """Everything, for `plan`."""
        return {
            "parameters_count": self.parameters,
            "flops_per_example": self.flops_per_example,
            "steps": self.steps,
            "rows_per_step": self.rows_per_step,
            "micro_rows": self.micro_rows,
            "accumulation": self.accumulation,
            "evaluations": len(self.evaluation_steps),
            "examples": self.examples,
            "flops": self.flops,
        }

    @property
    def flops(self) -> float:
        """FLOPs of the whole training."""
        return self.examples * self.flops_per_example


def derive(task: "Task", training: Training, job: "Job", *, workers: int | None = None) -> Derived:
    """Derive everything for a task on the job's card; the model is traced, never allocated.

    `workers` share the rows of a step (as many as the job asks for, where it is not known yet). Raises
    `WrongSettings` where there are more of them than rows.
    """
    parameters, flops_per_example = count(task)
    steps = steps_for(training, flops_per_example, parameters)
    rows = training.batch.examples // task.examples_per_row
    workers = workers or job.workers
    if workers > rows:
        raise WrongSettings(f"batch.examples: {rows} rows in a step cannot be shared by {workers} workers")
    mine = math.ceil(rows / workers)
    state_bytes = _STATE_BYTES_PER_PARAMETER + _AVERAGE_BYTES_PER_PARAMETER * training.averages
    free_bytes = _MEMORY_SHARE * job.memory_bytes - state_bytes * parameters
    fit = max(1, int(free_bytes // task.activation_bytes_per_row(job.precision)))
    return Derived(
        parameters=parameters,
        flops_per_example=flops_per_example,
        steps=steps,
        rows_per_step=rows,
        micro_rows=min(training.batch.micro, mine) if training.batch.micro else _even_share(mine, fit),
        evaluation_steps=evaluation_steps(training, steps, job.rungs, job.rungs_by, flops_per_example),
        examples=steps * training.batch.examples,
        workers=workers,
        milestone_steps=_shares(training.checkpoints.every, steps) if training.checkpoints.every else frozenset(),
    )


def count(task: "Task") -> tuple[int, float]:
    """The task's parameters, and its training FLOPs per example; the model is traced, never allocated."""
    import torch

    from .flops import training_flops_per_example

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in task.build().parameters())
    return parameters, training_flops_per_example(task)


def steps_for(training: Training, flops_per_example: float, parameters: int) -> int:
    """Optimizer steps that the budget comes to, rounded up to whole batches."""
    budget = training.budget
    if budget.examples is not None:
        examples: float = budget.examples
    elif budget.flops is not None:
        examples = budget.flops / flops_per_example
    else:
        assert budget.tokens_per_parameter is not None
        examples = budget.tokens_per_parameter * parameters
    return max(1, _first_at(examples / training.batch.examples))


def evaluation_steps(
    training: Training, steps: int, rungs: tuple[float, ...], rungs_by: str, flops_per_example: float
) -> frozenset[int]:
    """The steps after which a trial is evaluated: every share of its budget, at each rung, and at its end."""
    due = set(_shares(training.evaluation.every, steps))
    per_step = training.batch.examples * (flops_per_example if rungs_by == "flops" else 1)
    due |= {_first_at(rung / per_step) for rung in rungs}
    return frozenset(step for step in due if 0 < step < steps) | {steps}


def _shares(share: float, steps: int) -> frozenset[int]:
    """The steps at which every such share of them is done."""
    share = max(share, 1 / steps)
    return frozenset(_first_at(steps * share * k) for k in range(1, _first_at(1 / share)))


def _first_at(step: float) -> int:
    # Shares are not exact in binary: 100 steps x 10% x 3 is a hair over 30, and means 30.
    return math.ceil(round(step, 6))


def _even_share(rows: int, fit: int) -> int:
    # As few micro-batches as fit, of the same size but for the last, which may be smaller.
    return math.ceil(rows / math.ceil(rows / fit))
