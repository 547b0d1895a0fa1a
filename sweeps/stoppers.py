"""Stoppers: what ends a trial by comparison with the others. To add one, write a class and name it in STOPPERS.

A stopper sees every evaluation of the sweep in the order of the history, and is rebuilt after a resume by
seeing them again. It never sees trial 0, the base, as a candidate to stop, only as one to compare with.
"""

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
    far, and at least while it is the best of them.
    """

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        self._sweep, self._rungs = sweep, rungs
        self._seen: dict[tuple[float, object], dict[int, float]] = {}
        """At each rung and within each group: the value of each trial."""

    def decide(self, trial: Trial, report: Report) -> str | None:
        """Compare at the rung that this report is the first to reach, if it is."""
        stopping, objective = self._sweep.settings.early_stopping, self._sweep.settings.objective
        reached = {r for r in self._rungs if r <= _at(report, stopping.by) * (1 + 1e-9)}
        earlier = [other for other in trial.reports.values() if other.examples < report.examples]
        before = max((_at(other, stopping.by) for other in earlier), default=0.0) * (1 + 1e-9)
        new = [rung for rung in reached if rung > before]
        if not new:
            return None
        group = trial.parameters.get(stopping.within) if stopping.within else None
        for rung in new:
            self._seen.setdefault((rung, group), {})[trial.number] = report.metrics[objective.metric]
        if trial.number == 0:
            return None
        rung = max(new)
        values = self._seen[rung, group]
        ranked = sorted(values, key=lambda number: (self._sweep.sign * values[number], number))
        place, kept = ranked.index(trial.number) + 1, max(1, len(ranked) // stopping.reduction)
        if place <= kept:
            return None
        where = f" with {stopping.within} = {group}" if stopping.within else ""
        amount = f"{report.flops:.2g} FLOPs" if stopping.by == "flops" else f"{report.examples:,} examples"
        best = values[ranked[0]]
        return (
            f"{objective.metric} {values[trial.number]:.4g} at {amount}: place {place} of {len(ranked)}{where}, "
            f"the best has {best:.4g}"
        )


def _at(report: Report, by: str) -> float:
    return report.flops if by == "flops" else report.examples


STOPPERS: Mapping[str, Callable[[Sweep, tuple[float, ...]], Stopper]] = {"asha": Asha, "none": NoStopping}
