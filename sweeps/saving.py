"""What another early-stopping rule would have saved, on the curves that a sweep recorded in full.

The complete trials of a sweep are run through a stopper alone, in many random orders: no searcher, no history. The
base comes first in each order, as in a sweep. Each order is a function of the seed and its number.
"""

import copy
import heapq
import itertools
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from . import files
from .files import WrongInput
from .history import Record, Report, Trial
from .stoppers import STOPPERS
from .sweep import Sweep, check
from .tables import duration

FEWEST = 3
"""Complete trials without which there is nothing to learn."""
CLOSE = 0.01
"""A trial whose value is within this share of the best one's is as good as the best."""


@dataclass(frozen=True)
class Curve:
    """A trial and its evaluations from the first to the end of its budget."""

    trial: Trial
    reports: tuple[Report, ...]


@dataclass(frozen=True)
class Replayed:
    """What a rule did with the trials in one order."""

    seconds: float
    """Device seconds spent."""
    stopped: frozenset[int]
    """The numbers of the trials that it stopped."""


@dataclass(frozen=True)
class Saving:
    """What a rule does with the trials, over many orders; shares of 1."""

    sweep: Sweep
    """With the rule."""
    full_seconds: float
    """Device seconds of every trial to its end."""
    spent: tuple[float, float, float]
    """The share of these that is spent: median, and the 10% and 90% quantiles of the orders."""
    best_kept: float
    """In how many of the orders the best trial is not stopped."""
    close_kept: float
    """The same for any trial within `CLOSE` of the best."""
    stopped: float
    """Trials that are stopped, median."""


def complete_curves(sweep: Sweep, record: Record) -> list[Curve]:
    """The curves that a sweep recorded in full, by the trials' numbers. Raises `WrongInput` where they are too few."""
    metric = sweep.settings.objective.metric
    trials = sorted((t for t in record.trials.values() if t.state == "complete"), key=lambda trial: trial.number)
    if len(trials) < FEWEST:
        raise WrongInput(
            f"{sweep.name}: {len(trials)} of {len(record.trials)} trials are complete, and at least {FEWEST} are "
            "needed; a sweep with early_stopping.rule none completes all"
        )
    reports = (tuple(r for _, r in sorted(trial.reports.items()) if metric in r.metrics) for trial in trials)
    return [Curve(trial, own) for trial, own in zip(trials, reports, strict=True)]


def replay(sweep: Sweep, rungs: tuple[float, ...], curves: Sequence[Curve], slots: int) -> Replayed:
    """Run curves through the sweep's stopper in the order given, `slots` at a time."""
    stopper = STOPPERS[sweep.settings.early_stopping.rule](sweep, rungs)
    stopped: set[int] = set()
    spent = 0.0
    waiting = iter(curves)
    running: list[tuple[float, int, int, Curve]] = []  # when its next evaluation is due, trial, which evaluation

    def begin(now: float) -> None:
        if (curve := next(waiting, None)) is not None:
            heapq.heappush(running, (now + curve.reports[0].seconds, curve.trial.number, 0, curve))

    for _ in range(slots):
        begin(0.0)
    while running:
        now, number, k, curve = heapq.heappop(running)
        report = curve.reports[k]
        reason = stopper.decide(curve.trial, report)
        if reason or k + 1 == len(curve.reports):
            spent += report.seconds
            if reason:
                stopped.add(number)
            begin(now)
        else:
            heapq.heappush(running, (now + curve.reports[k + 1].seconds - report.seconds, number, k + 1, curve))
    return Replayed(spent, frozenset(stopped))


def orders(curves: Sequence[Curve], amount: int, seed: int) -> list[list[Curve]]:
    """Random orders of the curves, the base first."""
    base = [curve for curve in curves if curve.trial.group == 0]
    others = [curve for curve in curves if curve.trial.group != 0]
    return [base + random.Random(f"{seed}/{i}").sample(others, len(others)) for i in range(amount)]  # noqa: S311


def with_stopping(sweep: Sweep, **changes: Any) -> Sweep:
    """The sweep with other settings of early stopping, None for the default. Raises `WrongInput`."""
    document = copy.deepcopy(sweep.document)
    document.values.setdefault("early_stopping", {})
    for name, value in changes.items():
        if value is None:
            document.values["early_stopping"].pop(name, None)
        else:
            files.override(document, f"early_stopping.{name}={value}")
    return check(document, sweep.name)


def variants(sweep: Sweep, rules: Sequence[str], **choices: Sequence[Any]) -> list[Sweep]:
    """The sweep with each rule and each combination of the choices that the rule heeds. Raises `WrongInput`."""
    found: list[Sweep] = []
    for rule in rules:
        asked = {
            name: values
            for name, values in choices.items()
            if values and name in (STOPPERS[rule].dials if rule in STOPPERS else choices)
        }
        combined = (dict(zip(asked, values, strict=True)) for values in itertools.product(*asked.values()))
        found += [with_stopping(sweep, rule=rule, **one) for one in combined]
    return found


def usual_variants(sweep: Sweep) -> list[Sweep]:
    """The sweep as it is, and a handful of other rules."""
    withins = list(dict.fromkeys([sweep.settings.early_stopping.within, None]))
    found = [
        sweep,
        *variants(sweep, ["forecast"], within=withins, chance=["10%"]),
        *variants(sweep, ["asha"], within=withins, reduction=[3]),
        *variants(sweep, ["asha"], within=withins[:1], reduction=[2]),
        *variants(sweep, ["median"], within=withins[:1]),
    ]
    return list({describe(one): one for one in found}.values())


def describe(sweep: Sweep) -> str:
    """A sweep's rule in words: `asha, grace 10%, reduction 3, within model.width`."""
    stopping = sweep.settings.early_stopping
    words = [stopping.rule]
    dials = STOPPERS[stopping.rule].dials
    if "grace" in dials:
        words.append(f"grace {sweep.grace:.3g}" if sweep.grace < 0.001 else f"grace {100 * sweep.grace:.3g}%")
    if "reduction" in dials:
        words.append(f"reduction {stopping.reduction}")
    if "chance" in dials:
        words.append(f"chance {100 * stopping.chance:.3g}%")
    if "by" in dials and stopping.by == "flops":
        words.append("by flops")
    if "within" in dials and stopping.within:
        words.append(f"within {stopping.within}")
    return ", ".join(words)


def rungs_for(sweep: Sweep, curves: Sequence[Curve]) -> tuple[float, ...]:
    """The rungs of a sweep by the budgets of its curves."""
    by_flops = sweep.settings.early_stopping.by == "flops"
    return sweep.rungs([curve.reports[-1].flops if by_flops else curve.reports[-1].examples for curve in curves])


def save(
    sweep: Sweep,
    curves: Sequence[Curve],
    ordered: Sequence[Sequence[Curve]],
    *,
    slots: int,
    tick: Callable[[], None] = lambda: None,
) -> Saving:
    """Replay the sweep's rule in each order; `tick` is called after each."""
    rungs = rungs_for(sweep, curves)
    full = sum(curve.reports[-1].seconds for curve in curves)
    metric, sign = sweep.settings.objective.metric, sweep.sign
    finals = {curve.trial.number: sign * curve.reports[-1].metrics[metric] for curve in curves}
    best = min(finals.values())
    champions = {number for number, value in finals.items() if value == best}
    close = {number for number, value in finals.items() if value <= best + CLOSE * abs(best)}
    done: list[Replayed] = []
    for order in ordered:
        done.append(replay(sweep, rungs, order, slots))
        tick()
    return Saving(
        sweep,
        full,
        _quantiles([one.seconds / full for one in done]),
        statistics.fmean(not champions <= one.stopped for one in done),
        statistics.fmean(not close <= one.stopped for one in done),
        statistics.median(len(one.stopped) for one in done),
    )


def _quantiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[4], tenths[0], tenths[8]


def saving_table(savings: Sequence[Saving], own: Sweep, curves: Sequence[Curve]) -> Table:
    """One row a rule, the sweep's own marked."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("rule", no_wrap=True)
    table.add_column("device time", justify="right", no_wrap=True)
    table.add_column("10–90%", justify="right", no_wrap=True)
    table.add_column("best kept", justify="right", no_wrap=True)
    table.add_column(f"or within {CLOSE:.0%}", justify="right", no_wrap=True)
    table.add_column("stopped", justify="right", no_wrap=True)
    for saving in savings:
        median, low, high = saving.spent
        mine = describe(saving.sweep) == describe(own)
        table.add_row(
            describe(saving.sweep) + (" (this sweep's)" if mine else ""),
            f"{median:.0%}  {duration(median * saving.full_seconds)}",
            f"{low:.0%}–{high:.0%}",
            f"{saving.best_kept:.0%}",
            f"{saving.close_kept:.0%}",
            f"{saving.stopped:g} of {len(curves)}",
            style="bold" if mine else "",
        )
    return table


def as_dict(saving: Saving) -> dict[str, Any]:
    """A saving for programs; times in seconds, shares of 1."""
    median, low, high = (share * saving.full_seconds for share in saving.spent)
    return {
        **saving.sweep.settings.early_stopping.model_dump(),
        "grace": saving.sweep.grace,
        "device_seconds": {"median": median, "low": low, "high": high},
        "device_share": saving.spent[0],
        "best_kept": saving.best_kept,
        "close_kept": saving.close_kept,
        "stopped": saving.stopped,
    }
