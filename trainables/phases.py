"""What a trial spends its time on: the causes of a card that does not compute."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

Phase = Literal["start_up", "compiling", "computing", "evaluation", "waiting"]
"""`start_up`: until the first step, with data, model and checkpoint; `compiling`: the first step of a compiled model;
`evaluation`: with sampling and saving; `waiting`: for data."""


class Phases:
    """Seconds of a trial by phase, from when this is made; any thread may read them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._lock = clock, threading.Lock()
        self._seconds: dict[str, float] = {}
        self._now: Phase = "start_up"
        self._since = clock()

    def enter(self, phase: Phase) -> None:
        """Another phase begins."""
        with self._lock:
            self._settle()
            self._now = phase

    @contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """A phase within another, which goes on afterwards."""
        before = self._now
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def spent(self, phase: Phase, seconds: float) -> None:
        """So much of the present phase's time was another's."""
        with self._lock:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
            self._seconds[self._now] = self._seconds.get(self._now, 0.0) - seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase until now."""
        with self._lock:
            self._settle()
            # What was just told to be another's may be more than has been counted by then, by a clock's tick.
            return {phase: round(max(0.0, seconds), 3) for phase, seconds in self._seconds.items()}

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self._now] = self._seconds.get(self._now, 0.0) + now - self._since
        self._since = now
