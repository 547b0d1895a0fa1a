"""Energy that cards draw, by NVML's counters. Runs in the process that trains; opens no CUDA context.

Every GPU since Volta counts its own energy (`nvmlDeviceGetTotalEnergyConsumption`, millijoules since the driver was
loaded; NVIDIA, NVML API reference, Device Queries). Older and some consumer cards say what they draw at a moment
only (`nvmlDeviceGetPowerUsage`, milliwatts), which is then integrated over time. Nothing else is a measurement: a
card without NVML has none, and `assumed_watts` says what it is taken to draw.
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cards import Card
from .node_settings import Power

BUSY = ("compiling", "computing", "evaluation")
"""What a trial does that keeps its card busy."""
_SILENT_SECONDS = 5.0
"""After which a process that trained on the same card is taken to have ended."""
_log = logging.getLogger(__name__)


class EnergyMeter:
    """The energy of some GPUs since the meter was made; `read` it at least once a second or two.

    `share` is this process's part of the cards while others train on them too. It may be changed at any time, and
    holds for what is drawn from then on.
    """

    def __init__(self, identities: Sequence[str], clock: Callable[[], float] = time.monotonic):
        """`identities` are the UUIDs of the GPUs; one that cannot be measured makes the sum unknown."""
        self.share = 1.0
        self._joules = 0.0
        self._cards = [_open(identity, clock) for identity in identities]

    def read(self) -> float | None:
        """Joules so far; None where a card cannot be measured, or there is none.

        A card that disappears adds nothing from then on: what it had drawn until then is known.
        """
        measured = [card for card in self._cards if card is not None]
        if not measured or len(measured) < len(self._cards):
            return None
        self._joules += self.share * sum(card.drawn() for card in measured)
        return self._joules


class Neighbours:
    """The processes that train on the same card at the same time; each says in a file of its own how busy it is."""

    def __init__(self, identity: str, folder: Path, process: int | None = None, clock: Callable[[], float] = time.time):
        self._identity, self._folder, self._clock = identity, folder, clock
        self._own = folder / f"{identity}.{process or os.getpid()}"
        self._told: dict[Path, tuple[float, float]] = {}
        self._rates: dict[Path, float] = {}

    def share(self, busy_seconds: float) -> float:
        """This process's part of what the card is kept busy, from 0 to 1; `busy_seconds` is its own time so far."""
        now = self._clock()
        temporary = self._own.with_name(f".{self._own.name}")
        temporary.write_text(f"{now} {busy_seconds}")
        temporary.replace(self._own)
        there = [file for file in self._folder.glob(f"{self._identity}.*") if self._look_at(file, now)]
        total = sum(self._rates[file] for file in there)
        return self._rates[self._own] / total if total else 1 / len(there)

    def _look_at(self, file: Path, now: float) -> bool:
        """Learn how busy a process is; answers whether it is still there."""
        try:
            when, busy_seconds = map(float, file.read_text().split())
        except (FileNotFoundError, ValueError):  # it has just ended, or its disk was full
            return False
        if now - when > _SILENT_SECONDS:
            return False
        before = self._told.get(file)
        if before is None:
            self._rates[file] = 1.0
        elif when > before[0]:
            self._rates[file] = max(0.0, busy_seconds - before[1]) / (when - before[0])
        self._told[file] = when, busy_seconds
        return True

    def close(self) -> None:
        """This process trains no more."""
        self._own.unlink(missing_ok=True)


def can_measure(cards: Sequence[Card]) -> bool:
    """Whether the energy of these cards is measured here."""
    return EnergyMeter([card.identity for card in cards if card.kind == "cuda"]).read() is not None


def assumed_watts(card: Card, power: Power, cards: int) -> float | None:
    """What a card, one of `cards` in its machine, is taken to draw under load where nothing measures it.

    Its even share of the whole machine, where that is told; else, if `power.estimate`, its board power with the
    CPU's share; of a CPU card, the CPU's share. None where none of these is known.
    """
    if power.box_watts is not None:
        return power.box_watts / cards
    if card.kind == "cpu":
        return power.cpu_watts or None
    if not power.estimate or card.specification is None:
        return None
    return card.specification.board_watts + power.cpu_watts


class _Card:
    """One GPU that can be measured."""

    def __init__(self, nvml: Any, identity: str, handle: Any, clock: Callable[[], float]):
        self._nvml, self._identity, self._handle, self._clock = nvml, identity, handle, clock
        self._gone = False
        try:
            self._counted_joules: float | None = self._counter()
            self._watts = 0.0
        except nvml.NVMLError_NotSupported:
            self._counted_joules = None
            self._watts = self._power()
        self._since = clock()

    def drawn(self) -> float:
        """Joules since the last call."""
        if self._gone:
            return 0.0
        try:
            return self._integrated() if self._counted_joules is None else self._counted(self._counted_joules)
        except self._nvml.NVMLError as error:
            _log.warning("the energy of card %s is not known from here on: %s", self._identity, error)
            self._gone = True
            return 0.0

    def _counted(self, before_joules: float) -> float:
        self._counted_joules = self._counter()
        # A driver that was loaded anew counts from nothing.
        return max(0.0, self._counted_joules - before_joules)

    def _integrated(self) -> float:
        """By the mean of the power at both ends (the trapezoid rule)."""
        watts, now = self._power(), self._clock()
        joules = (self._watts + watts) / 2 * (now - self._since)
        self._watts, self._since = watts, now
        return joules

    def _counter(self) -> float:
        return self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle) / 1000

    def _power(self) -> float:
        return self._nvml.nvmlDeviceGetPowerUsage(self._handle) / 1000


def _open(identity: str, clock: Callable[[], float]) -> _Card | None:
    """A card's meter; None where there is nothing to measure it by."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        # Counted by NVML, and undone with the process.
        pynvml.nvmlInit()
        return _Card(pynvml, identity, pynvml.nvmlDeviceGetHandleByUUID(identity), clock)
    except pynvml.NVMLError as error:
        _log.info("the energy of card %s cannot be measured: %s", identity, error)
        return None
