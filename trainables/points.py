"""Points in the plane: where every path, sampler and metric can be checked by eye and against closed forms."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from ..datasets.points import modes, points
from . import pictures, point_quality
from .draws import normals, uniforms
from .paths import path_of
from .points_settings import PointsModel, PointsTraining
from .samplers import Velocity, calls_of, draw
from .settings import Training
from .task import Batch, Role, Samples, Score
from .workers import ALONE, Workers

_NOISE, _TIME, _SAMPLES, _CHAIN = range(4)
"""Streams of random draws."""
_HELD_OUT = 2**32 - 1
"""The seed of the validation points: the same for all trials."""
_DRAWN, _WAYS = 2000, 200
"""Samples that are scored; of which a picture shows the ways from noise to data."""


class PointsNetwork(nn.Module):
    """Dense layers with SiLU: (x_t (n, 2), t (n,)) to what the path predicts (n, 2·outputs)."""

    def __init__(self, settings: PointsModel, seed: int = 0, outputs: int = 1) -> None:
        super().__init__()
        widths = [3, *[settings.width] * settings.layers, 2 * outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        generator = torch.Generator("cpu").manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if not parameter.is_meta:
                    inputs = parameter.shape[1] if parameter.ndim == 2 else math.inf
                    drawn = torch.empty(parameter.shape, device="cpu").normal_(generator=generator)
                    parameter.copy_(drawn * (2 / inputs) ** 0.5)  # He et al. 2015; biases begin at zero

    def forward(self, x_t: Tensor, t: Tensor) -> Tensor:
        h = torch.cat((x_t, t[:, None]), dim=1)
        for layer in self.layers[:-1]:
            h = functional.silu(layer(h))
        return self.layers[-1](h)


class PointsTask:
    """Points drawn from noise along a path (see `Task`)."""

    examples_per_row = 1

    def __init__(self, training: PointsTraining, cache: Path) -> None:
        self.training = training
        self.path = path_of(training.path)

    @classmethod
    def prepare(
        cls,
        training: Training,
        cache: Path,  # noqa: ARG003
        progress: Callable[[str, int, int], None],  # noqa: ARG003
    ) -> dict[str, Any]:
        """Nothing: points are drawn when they are asked for."""
        assert isinstance(training, PointsTraining)
        return {"points": f"{training.data.kind}, drawn without end"}

    def build(self) -> PointsNetwork:
        """A network with the weights of the training's seed, on the current default device."""
        return PointsNetwork(self.training.model, self.training.seed, self.path.outputs)

    def batch(self, first_row: int, rows: int) -> Batch:
        """{"x_1": points, float32 [rows, 2]; "row": their place in the global order, int64 [rows]}."""
        return self._batch(self.training.seed, np.arange(first_row, first_row + rows))

    def loss(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """{"loss"}: the mean square of what the network is off its target by, over both coordinates."""
        return self._loss(model, batch, self.training.seed)

    def evaluate(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> dict[str, float]:
        """The loss on held-out points, and how near 2,000 samples are to as many points of the data."""
        amount = self.training.evaluation.examples
        mine = workers.share(amount)
        batch = self._batch(_HELD_OUT, np.arange(mine.start, mine.stop))
        with torch.no_grad():
            loss = self._loss(model, {name: value.to(device) for name, value in batch.items()}, _HELD_OUT)["loss"]
            loss = workers.sum({"loss": loss * len(mine) / amount})["loss"].item()
            samples = self.samples(model, device)
        return {"validation/loss": loss, **self._scores(samples)}

    def score(self, model: nn.Module, device: torch.device) -> Score:
        """How near 2,000 samples are to as many points of the data."""
        metrics = self._scores(self.samples(model, device))
        calls = calls_of(self.training.sampling, self.path)
        return Score(metrics | ({"sampling/calls": calls} if calls else {}), *self.drawing())

    def drawing(self) -> tuple[int, float]:
        """Samples that are scored, and the FLOPs that they take."""
        calls = calls_of(self.training.sampling, self.path) or 0
        return _DRAWN, _DRAWN * calls * self.flops_formula_per_example() / 3

    def _scores(self, samples: Tensor) -> dict[str, float]:
        real = self._data(_HELD_OUT - 1).to(samples.device)
        metrics = {
            "validation/energy_distance": point_quality.energy_distance(samples, real),
            "validation/sliced_wasserstein": point_quality.sliced_wasserstein(samples, real),
        }
        if (centres := modes(self.training.data.kind)) is not None:
            counts = point_quality.counts_per_mode(samples, torch.from_numpy(centres).to(samples.device))
            metrics["validation/near_a_mode"] = float(counts.sum() / len(samples))
            metrics["validation/evenness"] = point_quality.evenness(counts)
        return metrics

    @torch.no_grad()
    def samples(self, model: Velocity, device: torch.device, amount: int = _DRAWN) -> Tensor:
        """Float32 (amount, 2) drawn from noise that never changes."""
        rows, seed = torch.arange(amount, device=device), _HELD_OUT - self.training.sampling.seed
        start = normals(seed, _SAMPLES, rows, 2)
        with torch.autocast(device.type, enabled=False):  # a solver adds many small steps
            return draw(
                model,
                self.path,
                self.training.sampling,
                start,
                lambda step: normals(seed, _CHAIN + step, rows, 2),
            )

    def sample(self, model: nn.Module, device: torch.device, workers: Workers = ALONE) -> Samples:
        """Samples beside the data, and the ways of some of them from noise to data."""
        if not workers.first:
            return Samples()
        ways: list[Tensor] = []

        def watched(x_t: Tensor, t: Tensor) -> Tensor:
            ways.append(x_t[:_WAYS])
            return model(x_t, t)

        samples = self.samples(watched, device)
        ways.append(samples[:_WAYS])
        panels = {"data": self._data(_HELD_OUT - 1).numpy(), "samples": samples.cpu().numpy()}
        return Samples(images={"points": pictures.points(panels, torch.stack(ways).cpu().numpy())})

    def chance_loss(self) -> None:
        """There is no such figure."""

    def role(self, name: str, parameter: nn.Parameter) -> Role:
        """Matrices, and their biases."""
        return "matrix" if parameter.ndim == 2 else "vector"

    def activation_bytes_per_row(self, precision: Literal["bf16", "fp32"]) -> int:
        """Each hidden layer's output before and after its SiLU, and as much on the way back."""
        model = self.training.model
        return 4 * 4 * model.width * model.layers

    def flops_formula_per_example(self) -> float:
        """Six for each weight: two forward and four back."""
        model = self.training.model
        return 6 * (3 * model.width + (model.layers - 1) * model.width**2 + 2 * self.path.outputs * model.width)

    def _batch(self, seed: int, rows: np.ndarray) -> Batch:
        return {
            "x_1": torch.from_numpy(points(self.training.data.kind, seed, rows)),
            "row": torch.from_numpy(rows.astype(np.int64)),
        }

    def _loss(self, model: nn.Module, batch: Batch, seed: int) -> dict[str, Tensor]:
        x_1, row = batch["x_1"], batch["row"]
        t = self.path.times(uniforms(seed, _TIME, row, 1)[:, 0], self.training.time)
        at = self.path.mix(normals(seed, _NOISE, row, 2), x_1, t)
        return {"loss": self.path.loss(model(at.x_t, at.t), at)}

    def _data(self, seed: int) -> Tensor:
        return torch.from_numpy(points(self.training.data.kind, seed, np.arange(_DRAWN)))


TASK = PointsTask
