"""Averages of the weights over training, several lengths at once; each is evaluated by itself."""

import copy
from collections.abc import Mapping

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from .settings import Length, Training, label

RAW = "raw"


class Averages:
    """A model's averages, by label; the first that a file names is the one whose metrics and samples count."""

    def __init__(self, model: nn.Module, training: Training) -> None:
        self._model = model
        self._lengths = {label(length): length for length in training.lengths}
        self.modules = {name: copy.deepcopy(model).requires_grad_(False) for name in self._lengths if name != RAW}
        """Those that are kept beside the model."""

    @property
    def evaluated(self) -> dict[str, nn.Module]:
        """By label, in the order of the file; without averages the model itself."""
        return {name: self.modules.get(name, self._model) for name in self._lengths or (RAW,)}

    @property
    def main(self) -> str:
        """The label of the one that counts."""
        return next(iter(self.evaluated))

    def told(self, evaluations: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
        """The evaluations of all: of the one that counts as they are, of another as `ema-0.9999/loss`."""
        told = dict(evaluations[self.main])
        for name, metrics in evaluations.items():
            if name != self.main:
                told |= {f"{name}/{metric.removeprefix('validation/')}": value for metric, value in metrics.items()}
        return told

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after optimizer step `step`; 1 is the first, with which every average begins."""
        weights = [parameter.detach() for parameter in self._model.parameters()]
        for name, module in self.modules.items():
            decay = decay_at(self._lengths[name], step)
            get_ema_multi_avg_fn(decay)(list(module.parameters()), weights, step)
            for mine, buffer in zip(module.buffers(), self._model.buffers(), strict=True):
                mine.copy_(buffer)


def decay_at(length: Length, step: int) -> float:
    """The share of the average that is kept at a step (from 1).

    A power function's average is as wide as a share of all steps so far (Karras et al. 2024, "Analyzing and improving
    the training dynamics of diffusion models", equations 2 and 3, and 6 for the exponent).
    """
    if step == 1:
        return 0.0
    if not isinstance(length, str):
        return length
    return float((1 - 1 / step) ** (_exponent(float(length.split()[1].rstrip("%")) / 100) + 1))


def _exponent(width: float) -> float:
    """gamma, for a deviation of `width` of the whole: (gamma + 1) / ((gamma + 2)^2 (gamma + 3)) = width^2."""
    return float(np.roots([1, 7, 16 - width**-2, 12 - width**-2]).real.max())
