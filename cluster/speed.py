"""How fast a card multiplies matrices: measured, since the advertised figure is rarely reached.

MFU is reported against the card's peak and against this figure. It is measured in a process of its own (the
driver never opens a CUDA context) and kept for each machine, card and version of torch, where `rigsweep bench` keeps
all that it measures.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .apart import measure_apart
from .cards import Card
from .errors import MachineError
from .measurements import Measurement, keep_measurement, measurements_file, read_measurements

LIMIT_SECONDS = 180.0
"""Of the matrix products: about 5 s, but more where other processes keep the cores busy."""


@dataclass(frozen=True)
class Speed:
    """Matrix-product speed of one card in FLOP/s, 2 FLOPs a multiply-add, and whether bf16 is worth using."""

    bf16_flops_per_second: float
    fp32_flops_per_second: float
    bf16_pays: bool

    def flops_per_second(self, precision: str) -> float:
        """The measured speed in `bf16` or `fp32`."""
        return self.bf16_flops_per_second if precision == "bf16" else self.fp32_flops_per_second

    def precision(self, asked: str) -> str:
        """What `auto` means here: bf16 where it pays, else fp32."""
        return ("bf16" if self.bf16_pays else "fp32") if asked == "auto" else asked


def card_speed(card: Card, cache: Path) -> Speed:
    """The measured speed of a card, from `cache` if it was measured there before (about 5 s if not)."""
    file = measurements_file(cache, card)
    kept = read_measurements(file).get("matmul")
    if kept is not None and kept.state == "measured" and (speed := _speed(kept.values)) is not None:
        return speed
    found = measure_matmul(card)
    keep_measurement(file, "matmul", found)
    speed = _speed(found.values)
    if speed is None:
        raise MachineError(f"the speed of {card.name} could not be measured: {found.reason}; see `rigsweep bench`")
    return speed


def measure_matmul(card: Card) -> Measurement:
    """Matrix products at three sizes in bf16 and fp32: see `measuring.matmul` for the values."""
    return measure_apart("matmul", [arguments(card)], visible(card), LIMIT_SECONDS)


def specified_speed(card: Card) -> Speed:
    """The speed of a GPU by its specification: what no card quite reaches. Its fp32 is TF32, as in `measure`.

    Raises `MachineError` where the specification has none.
    """
    found = card.specification
    if found is None or not found.peak_bf16_flops_per_second or not found.peak_tf32_flops_per_second:
        raise MachineError(f"no bf16 peak of {card.name} is known to plan with; plan on the machine itself")
    return Speed(found.peak_bf16_flops_per_second, found.peak_tf32_flops_per_second, bf16_pays=True)


def arguments(card: Card) -> dict[str, Any]:
    """What a measurement is told of a card."""
    return {"kind": card.kind, "threads": card.threads, "memory_bytes": card.memory_bytes}


def visible(*cards: Card) -> dict[str, str]:
    """The environment in which a process sees these cards alone, in this order."""
    return {"CUDA_VISIBLE_DEVICES": ",".join(card.identity if card.kind == "cuda" else "" for card in cards).strip(",")}


def _speed(values: Mapping[str, Any]) -> Speed | None:
    """The best of the sizes in each precision; None where they were not measured."""
    try:
        bf16, fp32 = (max(values[f"{name}_flops_per_second"].values()) for name in ("bf16", "fp32"))
        return Speed(bf16, fp32, values["bf16_pays"])
    except (KeyError, ValueError, AttributeError):
        return None
