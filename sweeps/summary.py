"""`summary.json`: a sweep's state for programs, and the numbers of the summary that a person reads."""

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .ablation import as_dict, compare, is_ablation
from .history import Record, Trial
from .money import Rates, card_seconds_of
from .space import Parameters
from .sweep import Sweep
from .utilisation import utilisation


def summarise(sweep: Sweep, record: Record, run_ids: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The summary of a sweep; the design's "Files of a sweep" names its keys."""
    trials = list(record.trials.values())
    within = sweep.settings.early_stopping.within
    best = best_of(sweep, trials)
    groups: dict[Any, list[Trial]] = {}
    for trial in trials:
        if within is not None and within in trial.parameters:
            groups.setdefault(sweep.group_of(trial.parameters), []).append(trial)
    best_within = {value: best_of(sweep, members) for value, members in groups.items()}
    closed, rates = record.closed or {}, Rates.of(record)
    spent = rates.of_trials(trials)
    return {
        "sweep": sweep.name,
        "trainable": sweep.settings.trainable,
        "question": sweep.settings.question,
        "objective": sweep.settings.objective.model_dump(),
        "state": closed.get("state", "running"),
        "trials": [_trial(trial, (run_ids or {}).get(trial.number), rates) for trial in trials],
        "best": best.number if best else None,
        "best_within": {
            str(value): found.number
            for value, found in sorted(best_within.items(), key=lambda item: str(item[0]))
            if found
        },
        "device_seconds": sum(card_seconds_of(trial) for trial in trials),
        "device_seconds_without_stopping": _without_stopping(trials),
        "energy_kwh": spent.kwh,
        "energy_measured": spent.measured if spent.kwh is not None else None,
        "cost": spent.cost,
        "currency": None if spent.cost is None else rates.currency,
        "utilisation": utilisation(record),
    } | ({"ablation": [as_dict(change) for change in compare(sweep, record)]} if is_ablation(sweep) else {})


def _trial(trial: Trial, run_id: str | None, rates: Rates) -> dict[str, Any]:
    spent = rates.of_trial(trial)
    return {
        "number": trial.number,
        "group": trial.group,
        "seed": trial.seed,
        "state": trial.state,
        "reason": trial.reason,
        "rule": trial.rule,
        "warnings": dict(trial.warnings),
        "parameters": trial.parameters,
        "value": trial.value,
        "examples": trial.examples,
        "flops": trial.flops,
        "seconds": trial.seconds,
        "device_seconds": card_seconds_of(trial),
        "energy_kwh": spent.kwh,
        "cost": spent.cost,
        "run_id": run_id,
        "node": trial.node,
        "cards": trial.cards,
    }


@dataclass(frozen=True)
class Configuration:
    """Parameters that were trained to the end, with every seed."""

    number: int
    """The trial of its first seed."""
    group: int
    parameters: Parameters
    values: list[float]

    @property
    def mean(self) -> float:
        """The value that the searcher saw."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; None of one."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None


@dataclass(frozen=True)
class Gain:
    """How much better the best is than the base."""

    amount: float
    """In the objective's unit; positive where the best is better."""
    share: float | None
    """Of the base's value; None where that is zero."""


def configurations(sweep: Sweep, trials: list[Trial]) -> list[Configuration]:
    """Those whose repeats are all complete, the best first."""
    groups: dict[int, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    found = []
    for group, repeats in groups.items():
        values = [trial.value for trial in repeats if trial.state == "complete" and trial.value is not None]
        if len(values) == len(repeats) == sweep.settings.repeats:
            found.append(Configuration(repeats[0].number, group, repeats[0].parameters, values))
    return sorted(found, key=lambda configuration: (sweep.sign * configuration.mean, configuration.number))


def gain(sweep: Sweep, found: list[Configuration]) -> Gain | None:
    """Of the best over the base; None where the base is the best, or not complete."""
    base = next((configuration for configuration in found if configuration.group == 0), None)
    if base is None or found[0] is base:
        return None
    amount = sweep.sign * (base.mean - found[0].mean)
    return Gain(amount, amount / abs(base.mean) if base.mean else None)


def best_of(sweep: Sweep, trials: list[Trial]) -> Trial | None:
    """The best complete trial; with repeats, the first of the configuration with the best mean."""
    found = configurations(sweep, trials)
    return next(trial for trial in trials if trial.number == found[0].number) if found else None


@dataclass(frozen=True)
class Saving:
    """What early stopping saved."""

    stopped: int
    """Trials that ended early."""
    spent: float
    """Device seconds of the trials that are complete or stopped."""
    full: float
    """Of the same trials, run to their ends."""

    @property
    def share(self) -> float:
        """Of `full`."""
        return 1 - self.spent / self.full


def saving(told: Mapping[str, Any]) -> Saving | None:
    """What a summary says of early stopping; None where none was stopped."""
    stopped = sum(trial["state"] == "stopped" for trial in told["trials"])
    spent = sum(
        trial.get("device_seconds", trial["seconds"])
        for trial in told["trials"]
        if trial["state"] in ("complete", "stopped")
    )
    full = told["device_seconds_without_stopping"]
    return Saving(stopped, spent, full) if stopped and full > 0 else None


def _without_stopping(trials: list[Trial]) -> float:
    """What the same trials would have taken to the end of their budgets; diverged ones are left out.

    A stopped trial is scaled from its last evaluation to its own budget.
    """
    total = 0.0
    for trial in trials:
        if trial.state == "complete":
            total += card_seconds_of(trial)
        elif trial.state == "stopped" and trial.last is not None and trial.last.examples:
            total += card_seconds_of(trial) * trial.last.total / trial.last.examples
    return total


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.json` atomically."""
    temporary = folder / ".summary.json"
    temporary.write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    temporary.replace(folder / "summary.json")
