"""Stoppers: what ends a trial by comparison with the others. To add one, write a class and name it in STOPPERS.

A stopper sees every evaluation of the sweep in the order of the history, and is rebuilt after a resume by
seeing them again. Trials are compared at rungs, which are the same amounts of examples (or FLOPs) for all: at the
first evaluation at or past each. The base (trial 0, and its repeats) is never a candidate to stop, only one to
compare with.
"""

import bisect
import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any, ClassVar, NamedTuple, Protocol

from .history import Report, Trial
from .sweep import Sweep


class Stopper(Protocol):
    """Decides at each evaluation whether its trial goes on."""

    dials: ClassVar[tuple[str, ...]]
    """The settings of `early_stopping` that it reads."""

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        """A stopper that has seen nothing; `rungs` are where trials are compared."""
        ...

    def decide(self, trial: Trial, report: Report) -> str | None:
        """A reason to stop the trial at this report, or None. The same report twice counts once."""
        ...


class NoStopping:
    """Every trial runs to its end."""

    dials: ClassVar[tuple[str, ...]] = ()

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

    dials: ClassVar[tuple[str, ...]] = ("by", "within", "grace", "reduction")

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        self._sweep, self._ladder = sweep, _Ladder(sweep, rungs)
        self._seen: dict[tuple[int, object], _Ranking] = {}
        """At each rung and within each group: what the trials had."""

    def decide(self, trial: Trial, report: Report) -> str | None:
        """Compare at the rung that this report is the first to reach, if it is."""
        arrival = self._ladder.arrive(trial, report)
        if not arrival.rungs:
            return None
        for rung in arrival.rungs:
            ranking = self._seen.setdefault((rung, arrival.group), _Ranking())
            ranking.put(trial.number, arrival.value)
        ranking = self._seen[arrival.rungs[-1], arrival.group]
        if not arrival.decides:
            return None
        place, of = ranking.place(trial.number), len(ranking.ranked)
        if place <= max(1, of // self._sweep.settings.early_stopping.reduction):
            return None
        had = self._ladder.told(report)
        return (
            f"place {place} of {of}{arrival.where} at {had}, the best has {self._sweep.sign * ranking.ranked[0][0]:.4g}"
        )


class Median:
    """The median stopping rule (Golovin et al. 2017, Google Vizier, section 3.2.1).

    At each rung a trial is stopped when its best value so far is worse than the median of the running averages
    that the others had there.
    """

    dials: ClassVar[tuple[str, ...]] = ("by", "within", "grace")

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        self._sweep, self._ladder = sweep, _Ladder(sweep, rungs)
        self._own: dict[int, dict[int, float]] = {}
        """Values of each trial at its evaluations, by examples."""
        self._seen: dict[tuple[int, object], _Ranking] = {}
        """At each rung and within each group: the averages."""

    def decide(self, trial: Trial, report: Report) -> str | None:
        """Compare at the rung that this report is the first to reach, if it is."""
        arrival = self._ladder.arrive(trial, report)
        if math.isnan(arrival.value):
            return None
        own = self._own.setdefault(trial.number, {})
        own[report.examples] = arrival.value
        if not arrival.rungs:
            return None
        so_far = [value for examples, value in own.items() if examples <= report.examples]
        for rung in arrival.rungs:
            ranking = self._seen.setdefault((rung, arrival.group), _Ranking())
            ranking.put(trial.number, sum(so_far) / len(so_far))
        if not arrival.decides:
            return None
        ranking = self._seen[arrival.rungs[-1], arrival.group]
        others = len(ranking.ranked) - 1
        if not others:
            return None
        median = ranking.median_without(trial.number)
        best = min(so_far)
        if best <= median:
            return None
        sign = self._sweep.sign
        return (
            f"its best so far, {sign * best:.4g}, is worse than the median {sign * median:.4g} of the averages of "
            f"{others} other{'s' if others > 1 else ''}{arrival.where} at {self._ladder.told(report)}"
        )


class Forecast:
    """Stop a trial that will hardly become the best.

    At each rung a trial is taken to improve from there to its end as the complete trials did: by the mean of what they
    gained, give or take a spread. With the normal distribution this gives its chance to end better than the best
    complete trial; under `chance`, it is stopped.

    The spread is that of the complete trials, begun with a guess (`_GUESS` of the mean gain, worth `_WORTH` trials),
    since the first of them says nothing of it: a prior on the variance (Gelman et al., Bayesian Data Analysis, section
    2.6). Gains are learned over all groups; the best to beat is that of the trial's own group. Until a group has a
    complete trial nothing in it is stopped, so the first of a sweep run to their end, as many as run at once.
    """

    dials: ClassVar[tuple[str, ...]] = ("by", "within", "grace", "chance")
    _GUESS, _WORTH = 0.25, 2

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        self._sweep, self._ladder = sweep, _Ladder(sweep, rungs)
        self._passed: dict[int, dict[int, float]] = {}
        """Values of each trial at the rungs that it passed, until it is complete."""
        self._complete: set[int] = set()
        self._best: dict[object, tuple[float, int]] = {}
        """Of each group: the best complete value, and whose it is."""
        self._gains: dict[int, _Moments] = {}
        """From each rung to the end, over the complete trials."""

    def decide(self, trial: Trial, report: Report) -> str | None:
        """Forecast at the rung that this report is the first to reach, if it is."""
        arrival = self._ladder.arrive(trial, report)
        if math.isnan(arrival.value):
            return None
        passed = self._passed.setdefault(trial.number, {})
        passed.update(dict.fromkeys(arrival.rungs, arrival.value))
        if report.examples >= report.total:
            self._learn(trial.number, arrival)
            return None
        gains = self._gains.get(arrival.rungs[-1]) if arrival.decides else None
        if gains is None or arrival.group not in self._best:
            return None
        best, champion = self._best[arrival.group]
        spread = self._spread(gains)
        short = arrival.value - gains.mean - best
        chance = NormalDist().cdf(-short / spread) if spread > 0 else float(short < 0)
        if chance >= self._sweep.settings.early_stopping.chance:
            return None
        said = f"{chance:.1%} chance" if chance >= 0.001 else "under 0.1% chance"
        trials = f"{gains.count} complete trial{'s' if gains.count > 1 else ''}"
        return (
            f"{said} to beat trial {champion}{arrival.where}, which ended at {self._sweep.sign * best:.4g}: "
            f"at {self._ladder.told(report)}, and {trials} gained {gains.mean:.3g} ± {spread:.2g} from there"
        )

    def _spread(self, gains: "_Moments") -> float:
        """Standard deviation of the next trial's gain, the mean's own error included."""
        squares = gains.squares + self._WORTH * (self._GUESS * gains.mean) ** 2
        return math.sqrt(squares / (gains.count - 1 + self._WORTH) * (1 + 1 / gains.count))

    def _learn(self, number: int, arrival: "_Arrival") -> None:
        if number in self._complete:
            return
        self._complete.add(number)
        self._best[arrival.group] = min(self._best.get(arrival.group, (math.inf, -1)), (arrival.value, number))
        for rung, value in self._passed.pop(number).items():
            self._gains.setdefault(rung, _Moments()).add(value - arrival.value)


class _Arrival(NamedTuple):
    """What a report comes to."""

    value: float
    """The objective, less is better; NaN where the report has none."""
    rungs: range
    """The rungs that it is the first of its trial to reach."""
    decides: bool
    """Whether its trial may be stopped now: at a rung that is new to it, and not of the base."""
    group: Any
    where: str
    """The group in words."""


class _Ladder:
    """Which rungs the evaluations of each trial reach."""

    def __init__(self, sweep: Sweep, rungs: tuple[float, ...]):
        self._sweep, self._rungs = sweep, rungs
        self._metric, self._by = sweep.settings.objective.metric, sweep.settings.early_stopping.by
        self._reached: dict[int, list[int]] = {}
        """Of each trial, the examples at which it reached each rung."""
        self._groups: dict[int, tuple[Any, str]] = {}
        """Of each trial, its group and that in words."""

    def arrive(self, trial: Trial, report: Report) -> _Arrival:
        """Take an evaluation; one that is repeated after a resume reaches its rungs again, and decides nothing."""
        if self._metric not in report.metrics:
            return _Arrival(math.nan, range(0), False, None, "")
        reached = self._reached.setdefault(trial.number, [])
        first, end = len(reached), bisect.bisect_right(self._rungs, self._amount(report) * (1 + 1e-9))
        new = end > first
        if new:
            reached += [report.examples] * (end - first)
        else:
            first, end = bisect.bisect_left(reached, report.examples), bisect.bisect_right(reached, report.examples)
        if trial.number not in self._groups:
            group, within = self._sweep.group_of(trial.parameters), self._sweep.settings.early_stopping.within
            self._groups[trial.number] = group, f" with {within} = {group}" if within else ""
        value = self._sweep.sign * report.metrics[self._metric]
        return _Arrival(value, range(first, end), new and trial.group != 0, *self._groups[trial.number])

    def told(self, report: Report) -> str:
        """`10,000 examples: validation/loss 2.5`."""
        amount = f"{report.flops:.2g} FLOPs" if self._by == "flops" else f"{report.examples:,} examples"
        return f"{amount}: {self._metric} {report.metrics[self._metric]:.4g}"

    def _amount(self, report: Report) -> float:
        return report.flops if self._by == "flops" else report.examples


class _Ranking:
    """The values of trials, best first; of equals, the one with the lower number."""

    def __init__(self) -> None:
        self.ranked: list[tuple[float, int]] = []
        self._values: dict[int, float] = {}

    def put(self, number: int, value: float) -> None:
        """Take a trial's value (less is better), or correct it."""
        if number in self._values:
            del self.ranked[self.place(number) - 1]
        self._values[number] = value
        bisect.insort(self.ranked, (value, number))

    def place(self, number: int) -> int:
        """A trial's place, from 1."""
        return bisect.bisect_left(self.ranked, (self._values[number], number)) + 1

    def median_without(self, number: int) -> float:
        """The median of the other trials; there must be one."""
        own, others = self.place(number) - 1, len(self.ranked) - 1
        low, high = (others - 1) // 2, others // 2
        return (self.ranked[low + (low >= own)][0] + self.ranked[high + (high >= own)][0]) / 2


class _Moments:
    """Mean and squared deviations of numbers as they come (Welford 1962)."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        """Take one more."""
        self.count += 1
        off = value - self.mean
        self.mean += off / self.count
        self.squares += off * (value - self.mean)


STOPPERS: Mapping[str, type[Stopper]] = {
    "asha": Asha,
    "forecast": Forecast,
    "median": Median,
    "none": NoStopping,
}
