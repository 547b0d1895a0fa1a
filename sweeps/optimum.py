"""What a sweep that only samples has found: the best way to sample, how sure that is, and what it costs in variety.

Every trial draws from the same noise and resamples its score the same way (`resamples.json`: draw r leaves out and
doubles the same samples in all of them), so that scores are compared pair by pair, and what they share cancels.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .confirming import confirmed
from .folders import read_sweep, record_of
from .history import Record, Trial
from .sweep import Sweep

RESAMPLES = "resamples.json"
_ENDS = (0.025, 0.975)


def optimum(sweep: Sweep, record: Record, folder: Path) -> dict[str, Any] | None:
    """The result, as plain data; None where nothing is complete.

    `best` is confirmed where there was a confirmation, `ties` are configurations that cannot be told from it, and
    `intervals` hold, for each searched number, where the best of the search lies in 95% of the resamples.
    """
    curve = _curve(sweep, record, folder)
    if not curve:
        return None
    other = confirmed(sweep, folder)
    second = _curve(read_sweep(other), record_of(other), other) if other else []
    judged = second or curve
    best, ties = _best_and_ties(judged, sweep.sign)
    return {
        "metric": sweep.settings.objective.metric,
        "confirmed": bool(second),
        "samples": judged[0]["samples"],
        "best": _public(best),
        "ties": [_public(tie) for tie in ties],
        "intervals": _intervals(sweep, curve),
        "interior": {d.key: _interior(curve, best, d.key) for d in sweep.space.dimensions},
        "curve": [_public(point) for point in curve],
        "confirmation": [_public(point) for point in second],
    }


def _curve(sweep: Sweep, record: Record, folder: Path) -> list[dict[str, Any]]:
    """The complete trials, the smallest values of the first parameter first."""
    found = []
    for trial in record.trials.values():
        if trial.state == "complete" and trial.value is not None and trial.last is not None:
            resamples = _resamples(folder, trial)
            low, high = (float(np.quantile(resamples, end)) for end in _ENDS) if resamples is not None else (None,) * 2
            found.append(
                {
                    "number": trial.number,
                    "parameters": trial.parameters,
                    "value": trial.value,
                    "low": low,
                    "high": high,
                    "samples": trial.last.examples,
                    "metrics": trial.last.metrics,
                    "resamples": resamples,
                }
            )
    keys = [dimension.key for dimension in sweep.space.dimensions]
    return sorted(found, key=lambda point: [_order(point["parameters"].get(key)) for key in keys])


def _order(value: Any) -> tuple[float, str]:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return (float(value), "") if number else (float("inf"), str(value))


def _resamples(folder: Path, trial: Trial) -> np.ndarray | None:
    path = folder / "trials" / str(trial.number) / RESAMPLES
    try:
        return np.asarray(json.loads(path.read_text())["values"], dtype=float)
    except (OSError, ValueError, KeyError, TypeError):  # a metric that is not resampled, or a folder that was thinned
        return None


def _best_and_ties(points: Sequence[dict[str, Any]], sign: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The best, and those whose difference from it, resampled pair by pair, may as well be none."""
    best = min(points, key=lambda point: sign * point["value"])
    if best["resamples"] is None:
        return best, []
    ties = []
    for point in points:
        if point is best or point["resamples"] is None:
            continue
        low, high = np.quantile(point["resamples"] - best["resamples"], _ENDS)
        if low <= 0 <= high:
            ties.append(point)
    return best, ties


def _intervals(sweep: Sweep, curve: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """For each searched number, the central 95% of where the best of the search lies, over the resamples."""
    told = [point for point in curve if point["resamples"] is not None]
    if len(told) < 2:
        return {}
    best = (sweep.sign * np.stack([point["resamples"] for point in told])).argmin(0)
    intervals = {}
    for dimension in sweep.space.dimensions:
        values = [point["parameters"].get(dimension.key) for point in told]
        if all(isinstance(value, int | float) for value in values):
            at = np.asarray(values, dtype=float)[best]
            intervals[dimension.key] = [float(np.quantile(at, end, method="nearest")) for end in _ENDS]
    return intervals


def _interior(curve: Sequence[dict[str, Any]], best: dict[str, Any], key: str) -> bool | None:
    """Whether the best lies between others that were tried; None for what is no number."""
    values = [point["parameters"].get(key) for point in curve]
    if not all(isinstance(value, int | float) for value in values):
        return None
    return min(values) < best["parameters"][key] < max(values)


def _public(point: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in point.items() if key != "resamples"}
