"""What the loop asks of a trainable."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from .settings import Training
from .workers import ALONE, Workers

Role = Literal["matrix", "vector", "embedding", "head"]
"""What a parameter is, from which the optimizer's groups are built (and, later, muP's and Muon's)."""

Batch = Mapping[str, Tensor]
"""Named tensors whose first dimension is the rows of one micro-batch."""


@dataclass(frozen=True)
class Samples:
    """What a model made, by name: texts, and pictures for people as uint8 arrays of shape (height, width, 3)."""

    texts: Mapping[str, str] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    drawn: Any = None
    """What a model of images drew, uint8 (n, height, width, channels): the health rules look at it."""
    real: Any = None
    """As many images of the data, beside which they are judged."""


@dataclass(frozen=True)
class Score:
    """How good a model's samples are."""

    metrics: Mapping[str, float]
    samples: int
    flops: float = 0.0
    """Spent on drawing them, as far as they are known."""
    resamples: Any = None
    """The metric they are judged by, of resampled samples, float (draws,); draw r is of the same rows in all trials."""


class Task(Protocol):
    """A trainable: a model, its data and its loss. It has no loop of its own.

    Everything random in it is a function of the training's seed and the row's place in the global order, so
    that resuming, micro-batches and workers change nothing.
    """

    examples_per_row: int
    """Tokens in a sequence, or 1 for an image."""

    @classmethod
    def prepare(cls, training: Training, cache: Path, progress: Callable[[str, int, int], None]) -> dict[str, Any]:
        """Prepare the data, once for all trials that share it; returns what there is of it, for a person.

        `progress(stage, done_bytes, total_bytes)` is called now and then.
        """
        ...

    def build(self) -> nn.Module:
        """A freshly initialised model on the current default device, the same for the same seed."""
        ...

    def batch(self, first_row: int, rows: int) -> Batch:
        """Rows `first_row` to `first_row + rows` of the global training order, as CPU tensors."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Named loss terms, each a scalar and a mean over the rows; training minimises their sum."""
        ...

    def evaluate(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> dict[str, float]:
        """The metrics that the settings' METRICS name, on validation rows that never change.

        Every one of the workers calls this at the same time, takes its share, and gets the metrics of all.
        """
        ...

    def score(self, model: nn.Module, device: torch.device) -> Score:
        """Draw and judge: asked only where the settings' `scored_by` names a metric, which is among its metrics."""
        ...

    def drawing(self) -> tuple[int, float]:
        """The samples that `score` draws, and the FLOPs that they take, as far as they are known beforehand."""
        ...

    def sample(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> Samples:
        """What the model makes, from noise or a prompt that never changes; only the first worker's is kept."""
        ...

    def chance_loss(self) -> float | None:
        """The training loss of a model that knows nothing, such as ln(classes); None where there is no such figure."""
        ...

    def role(self, name: str, parameter: nn.Parameter) -> Role:
        """The role of the named parameter of the model."""
        ...

    def activation_bytes_per_row(self, precision: Literal["bf16", "fp32"]) -> int:
        """Rough bytes of live activations for one row of a micro-batch, from which its size is derived."""
        ...

    def flops_formula_per_example(self) -> float:
        """Training FLOPs of one example by the published formula: the cross-check of the traced count."""
        ...


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """The model without dropout and gradients, afterwards in the mode it was in."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)
