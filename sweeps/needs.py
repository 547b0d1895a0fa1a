"""What each trial of a sweep needs of the machine: how many cards, or what share of one."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..cluster.cards import Card, describe
from ..cluster.placement import Need, share_of
from .history import Record, Trial
from .settings import CardRange
from .space import Parameters
from .sweep import Sweep

_SPEED, _PEAK = "speed/examples_per_second", "memory/peak_bytes"
_MARGIN = 1.15
"""Over the measured peak: for what the allocator holds and does not use."""
_CONTEXT_BYTES = {"cuda": 600e6, "cpu": 0.0}
"""Of a process on a card beside its tensors; a CPU's peak is the whole process."""
_SHAPING = ("model", "data", "batch", "precision", "compile", "recompute", "ema", "optimizer.fused")

Observe = Callable[[Trial], "tuple[str, float | None, float | None]"]
"""Of a trial: its shape in words, the share of a card that holds it, and its examples a second alone, where known."""


@dataclass(frozen=True)
class Needs:
    """What trials need, by the sweep's `cards_per_trial`."""

    asked: Any
    """A number of cards, a share of one, `auto` or a range."""
    cards: int
    """That there are."""
    observe: Observe = lambda _: ("", None, None)

    @property
    def first(self) -> float:
        """Cards, or the share of one, of the lanes to begin with."""
        return min(self.cards, _ends(self.asked)[1])

    @property
    def largest(self) -> int:
        """Whole cards of the largest trial."""
        return max(1, int(self.first))

    def of(self, trial: Trial) -> Need:
        """What a trial needs now: what was measured of others of its shape may change it."""
        if isinstance(self.asked, CardRange):
            return Need(self.asked.min, self.asked.max)
        if self.asked != "auto" and self.asked >= 1:
            return Need(self.asked, self.asked)
        shape, share, alone = self.observe(trial)
        if trial.alone:
            share = 1.0
        elif self.asked != "auto":
            share = self.asked
        return Need(share or 1.0, share or 1.0, shape, alone)


def needs_of(sweep: Sweep, cards: Sequence[Card], record: Record | None = None) -> Needs:
    """What the trials of a sweep need on these cards. Raises `WrongInput` where there are too few."""
    asked: Any = sweep.settings.cards_per_trial
    if asked is None:
        asked = "auto" if cards[0].kind == "cuda" else 1
    least, _ = _ends(asked)
    if least > len(cards):
        raise sweep.document.wrong(
            ("cards_per_trial",), f"{least:g} cards a trial, but there are {len(cards)} here ({describe(list(cards))})"
        )
    return Needs(asked, len(cards), _observer(sweep, record, cards[0])) if record else Needs(asked, len(cards))


def _observer(sweep: Sweep, record: Record, card: Card) -> Observe:
    """What the sweep's own trials have shown so far: those of a shape that had a card to themselves."""

    def observe(trial: Trial) -> tuple[str, float | None, float | None]:
        shape = shape_of(sweep, trial.parameters) or sweep.settings.trainable
        reports = [
            report
            for other in list(record.trials.values())
            if other.share == 1
            and len(other.identities) == 1
            and shape_of(sweep, other.parameters) == shape_of(sweep, trial.parameters)
            for report in list(other.reports.values())
        ]
        speeds = [report.metrics[_SPEED] for report in reports if _SPEED in report.metrics]
        peaks = [report.metrics[_PEAK] for report in reports if _PEAK in report.metrics]
        share = share_of(max(peaks) * _MARGIN + _CONTEXT_BYTES[card.kind], card.memory_bytes) if peaks else None
        return shape, share, statistics.median(speeds) if speeds else None

    return observe


def shape_of(sweep: Sweep, parameters: Parameters) -> str:
    """What decides a trial's memory and speed, of what is searched: `width 64`; nothing where nothing does."""
    keys = [key for key in parameters if key.split(".")[0] in _SHAPING]
    plain = sweep.space.plain({key: parameters[key] for key in keys})
    return ", ".join(f"{key.split('.')[-1]} {plain[key]}" for key in keys)


def _ends(asked: Any) -> tuple[float, float]:
    """The fewest and the most cards of a trial."""
    if isinstance(asked, CardRange):
        return asked.min, asked.max
    return (1, 1) if asked == "auto" else (asked, asked)
