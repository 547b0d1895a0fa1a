"""`summary.json`: a sweep's state for programs, and the numbers of the summary that a person reads."""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .ablation import as_dict, compare, is_ablation
from .history import Record, Trial
from .sweep import Sweep


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
    closed = record.closed or {}
    return {
        "sweep": sweep.name,
        "trainable": sweep.settings.trainable,
        "question": sweep.settings.question,
        "objective": sweep.settings.objective.model_dump(),
        "state": closed.get("state", "running"),
        "trials": [_trial(trial, (run_ids or {}).get(trial.number)) for trial in trials],
        "best": best.number if best else None,
        "best_within": {
            str(value): found.number
            for value, found in sorted(best_within.items(), key=lambda item: str(item[0]))
            if found
        },
        "device_seconds": sum(trial.seconds for trial in trials),
        "device_seconds_without_stopping": _without_stopping(trials),
    } | ({"ablation": [as_dict(change) for change in compare(sweep, record)]} if is_ablation(sweep) else {})


def _trial(trial: Trial, run_id: str | None) -> dict[str, Any]:
    return {
        "number": trial.number,
        "group": trial.group,
        "seed": trial.seed,
        "state": trial.state,
        "reason": trial.reason,
        "rule": trial.rule,
        "warnings": trial.warnings,
        "parameters": trial.parameters,
        "value": trial.value,
        "examples": trial.examples,
        "flops": trial.flops,
        "seconds": trial.seconds,
        "energy_kwh": None,
        "cost": None,
        "run_id": run_id,
        "node": trial.node,
        "cards": trial.cards,
    }


def best_of(sweep: Sweep, trials: list[Trial]) -> Trial | None:
    """The best complete trial; with repeats, the first of the configuration with the best mean."""
    groups: dict[int, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.group, []).append(trial)
    means = {
        group: statistics.fmean(trial.value for trial in members if trial.value is not None)
        for group, members in groups.items()
        if len(members) == sweep.settings.repeats and all(trial.state == "complete" for trial in members)
    }
    return groups[min(means, key=lambda group: sweep.sign * means[group])][0] if means else None


def _without_stopping(trials: list[Trial]) -> float:
    """What the same trials would have taken to the end of their budgets; diverged ones are left out.

    A stopped trial is scaled from its last evaluation to its own budget.
    """
    total = 0.0
    for trial in trials:
        if trial.state == "complete":
            total += trial.seconds
        elif trial.state == "stopped" and trial.last is not None and trial.last.examples:
            total += trial.seconds * trial.last.total / trial.last.examples
    return total


def write(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.json` atomically."""
    temporary = folder / ".summary.json"
    temporary.write_text(json.dumps(summary, indent=1, ensure_ascii=False), encoding="utf-8")
    temporary.replace(folder / "summary.json")
