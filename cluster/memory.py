"""The memory that a training takes: by component, by the classical formula, as measured, and corrected by that.

`live_bytes.py` traces and measures; here are the figures, which need no torch. Bytes are of tensors: what a CUDA
context, the allocator's rounding and the process itself take comes on top.
"""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .measurements import torch_version

GIB = 2**30
UNCALIBRATED_MARGIN = 1.1
"""What an estimate is multiplied by before anything was measured on the card, to be safe."""
CLASSICAL_RESERVE_BYTES = round(1.2 * GIB)
"""The classical formula's allowance for the CUDA context, a chunk of logits and the allocator."""


@dataclass(frozen=True)
class Budget:
    """Bytes of live tensors at a training's peak, by component."""

    parameters_bytes: int
    """Weights, and buffers such as the tables of rotary positions."""
    gradients_bytes: int
    optimizer_bytes: int
    average_bytes: int
    """Of the exponential moving average of the weights."""
    activations_bytes: int
    """All else at the peak: what the backward pass finds, temporaries, the batch."""

    @property
    def states_bytes(self) -> int:
        """What is held whatever the micro-batch."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes + self.average_bytes

    @property
    def total_bytes(self) -> int:
        """The sum of all."""
        return self.states_bytes + self.activations_bytes


@dataclass(frozen=True)
class Observation:
    """What a real training of a shape took on a card."""

    shape: str
    """Names everything of a training that decides its memory."""
    estimate: Budget
    peak_bytes: int
    examples_per_second: float
    """0 where no speed was measured."""


# --- the classical formula ---


def classical_activations_bytes(*, tokens: int, rows: int, width: int, layers: int, recompute: bool) -> int:
    """Bytes of activations of a transformer in 16 bits: 34·s·b·h·L, or 2·s·b·h·L with recomputation.

    Korthikanti et al. 2022, equation 1 without the attention scores, which fused attention never holds; of a
    recomputed layer, only its input is kept.
    """
    return (2 if recompute else 34) * tokens * rows * width * layers


def classical_bytes(
    parameters: int, activations_bytes: int, *, frozen_parameters: int = 0, moment_bytes: int = 4
) -> int:
    """Bytes of a whole training under mixed-precision AdamW.

    16 bytes a trained parameter: weight, gradient and two moments of 4 bytes each, or `moment_bytes` of 1 with an
    8-bit optimizer; 2 bytes a frozen one, as under LoRA.
    """
    trained_bytes = (4 + 4 + 2 * moment_bytes) * parameters
    return trained_bytes + 2 * frozen_parameters + activations_bytes + CLASSICAL_RESERVE_BYTES


def lora_parameters(*, width: int, layers: int, rank: int, matrices: int = 2) -> int:
    """Parameters of LoRA adapters (Hu et al. 2021) on so many square matrices a layer: two factors each."""
    return matrices * 2 * width * rank * layers


# --- what was measured ---


def observe(cache: Path, card_name: str, observation: Observation) -> None:
    """Keep an observation of a card: one whole line, appended at once, so that several processes may."""
    file = _observations_file(cache, card_name)
    file.parent.mkdir(parents=True, exist_ok=True)
    # The line begins with its end of line: one that was torn before it does not take it along.
    line = b"\n" + json.dumps(asdict(observation)).encode() + b"\n"
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line)
    finally:
        os.close(descriptor)


def observations(cache: Path, card_name: str) -> list[Observation]:
    """All observations of a card with the installed torch, oldest first; torn lines are left out."""
    file = _observations_file(cache, card_name)
    if not file.exists():
        return []
    found = (_observation(line) for line in file.read_bytes().splitlines() if line)
    return [observation for observation in found if observation is not None]


def observed(cache: Path, card_name: str, shape: str) -> Observation | None:
    """The newest observation of a shape on a card; None where it was never measured."""
    return next((one for one in reversed(observations(cache, card_name)) if one.shape == shape), None)


def _observations_file(cache: Path, card_name: str) -> Path:
    name = "".join(c if c.isalnum() else "-" for c in card_name.lower()) or "card"
    return cache / "memory" / f"{name}-torch-{torch_version()}.jsonl"


def _observation(line: bytes) -> Observation | None:
    try:
        told: Mapping[str, Any] = json.loads(line)
        return Observation(**{**told, "estimate": Budget(**told["estimate"])})
    except (ValueError, TypeError, KeyError):
        return None  # half a line of a process that was killed, or of another version


# --- correcting an estimate by it ---


@dataclass(frozen=True)
class Calibration:
    """What turns an estimate into what is really held: states + factor x activations + constant."""

    factor: float = 1.0
    constant_bytes: float = 0.0
    observations: int = 0

    def corrected_bytes(self, estimate: Budget) -> int:
        """The estimate, corrected; without observations as it is."""
        return round(estimate.states_bytes + self.factor * estimate.activations_bytes + self.constant_bytes)

    def safe_bytes(self, estimate: Budget) -> int:
        """The same, with the margin for what was never measured."""
        return round(self.corrected_bytes(estimate) * (1 if self.observations else UNCALIBRATED_MARGIN))


def calibrate(found: Iterable[Observation]) -> Calibration:
    """Fit factor and constant, both at least 0, to observations, by least squares of the relative errors.

    The states are known exactly. One observation, or several of the same activations, gives a factor.
    """
    newest = list({one.shape: one for one in found if one.peak_bytes > 0}.values())
    # x: estimated activations, y: what is really there beside the states, w: weight
    points = [
        (one.estimate.activations_bytes, one.peak_bytes - one.estimate.states_bytes, one.peak_bytes**-2.0)
        for one in newest
    ]
    if not points:
        return Calibration()
    total = sum(w for *_, w in points)
    mean_x = sum(w * x for x, _, w in points) / total
    mean_y = sum(w * y for _, y, w in points) / total
    spread = sum(w * (x - mean_x) ** 2 for x, _, w in points)
    if len({x for x, *_ in points}) > 1 and spread > 0:
        slope = sum(w * (x - mean_x) * (y - mean_y) for x, y, w in points) / spread
        constant = mean_y - slope * mean_x
        if slope < 0:
            return Calibration(0.0, max(0.0, mean_y), len(points))
        if constant >= 0:
            return Calibration(slope, constant, len(points))
    squares = sum(w * x * x for x, _, w in points)
    through_zero = sum(w * x * y for x, y, w in points) / squares if squares else 1.0
    return Calibration(max(0.0, through_zero), 0.0, len(points))
