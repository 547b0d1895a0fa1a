"""Stoppers: what ends a trial by comparison with the others. To add one, write a class and name it in STOPPERS.

A stopper sees every evaluation of the sweep in the order of the history, and is rebuilt after a resume by
seeing them again. The base (trial 0, and its repeats) is never a candidate to stop, only one to compare with.
"""

import bisect
from collections.abc import Callable, Mapping
from typing import Protocol

from .history import Report, Trial
from .sweep import Sweep


class Stopper(Protocol):
    """Decides at each evaluation whether its trial goes on."""

    def decide(self, trial: Trial, report: Report) -> str | None:
        """A reason to stop the trial at this report, or None. The same report twice counts once."""
        ...


class NoStopping:
    """Every trial runs to its end."""

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        del sweep, rungs

    def decide(self, trial: Trial, report: Report) -> str | None:
        """Never stops."""
        del trial, report
        return None


class Asha:
    """Asynchronous successive halving by stopping (Li et al. 2018, arXiv 1810.05934).

    At each rung a trial goes on while it is among the best 1/reduction of those that have reached the rung so
    far, and at least while it is the best of them. It is asked once at each rung: a report that is repeated after
    a resume corrects its value there, and changes nothing of what was decided.
    """

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        self._sweep, self._rungs = sweep, rungs
        self._seen: dict[tuple[float, object], _Rung] = {}
        """At each rung and within each group: what the trials had."""

    def decide(self, trial: Trial, report: Report) -> str | None:
        """Compare at the rung that this report is the first to reach, if it is."""
        stopping, metric = self._sweep.settings.early_stopping, self._sweep.settings.objective.metric
        if metric not in report.metrics:
            return None
        now = _at(report, stopping.by) * (1 + 1e-9)
        earlier = [o for o in trial.reports.values() if o.examples < report.examples and metric in o.metrics]
        before = max((_at(other, stopping.by) for other in earlier), default=0.0) * (1 + 1e-9)
        reached = [rung for rung in self._rungs if before < rung <= now]
        if not reached:
            return None
        group = self._sweep.group_of(trial.parameters)
        rungs = [self._seen.setdefault((at, group), _Rung()) for at in reached]
        repeated = [rung.put(trial.number, self._sweep.sign * report.metrics[metric]) for rung in rungs]
        rung = rungs[-1]
        if trial.group == 0 or repeated[-1]:
            return None
        place, of = rung.place(trial.number), len(rung.ranked)
        if place <= max(1, of // stopping.reduction):
            return None
        where = f" with {stopping.within} = {group}" if stopping.within else ""
        amount = f"{report.flops:.2g} FLOPs" if stopping.by == "flops" else f"{report.examples:,} examples"
        best = self._sweep.sign * rung.ranked[0][0]
        return (
            f"place {place} of {of}{where} at {amount}: {metric} {report.metrics[metric]:.4g}, the best has {best:.4g}"
        )


class _Rung:
    """The trials that have reached a rung, best first; of equals, the one with the lower number."""

    def __init__(self) -> None:
        self.ranked: list[tuple[float, int]] = []
        self._values: dict[int, float] = {}

    def put(self, number: int, value: float) -> bool:
        """Take a trial's value (less is better); returns whether it had one before."""
        repeated = number in self._values
        if repeated:
            del self.ranked[self.place(number) - 1]
        self._values[number] = value
        bisect.insort(self.ranked, (value, number))
        return repeated

    def place(self, number: int) -> int:
        """A trial's place, from 1."""
        return bisect.bisect_left(self.ranked, (self._values[number], number)) + 1


def _at(report: Report, by: str) -> float:
    return report.flops if by == "flops" else report.examples


STOPPERS: Mapping[str, Callable[[Sweep, tuple[float, ...]], Stopper]] = {"asha": Asha, "none": NoStopping}
