"""What a sweep has found that searches how to train and how to sample: each model, scored in every way of drawing."""

import json
import math
import statistics
from pathlib import Path
from typing import Any

from .history import Record
from .summary import configurations
from .sweep import Sweep

GRID = "grid.json"


def over_grid(sweep: Sweep, record: Record, folder: Path) -> dict[str, Any] | None:
    """Every configuration against every way of drawing, as plain data; None where nothing was scored so.

    There are two optima: `best`, the best pair of a configuration and a way, and `own`, the configuration that is
    best by the base's own sampling, which is what the searcher saw, with its best way. Values are means over the seeds.
    """
    metric = _metric(sweep)
    sign = 1 if sweep.training({}).metrics()[metric] == "minimize" else -1
    rows: list[dict[str, Any]] = []
    for configuration in configurations(sweep, list(record.trials.values())):
        trials = [trial.number for trial in record.trials.values() if trial.group == configuration.group]
        scored = [_scores(folder / "trials" / str(number) / GRID, metric) for number in trials]
        values = []
        for way in sweep.samplings:
            of_seeds = [scores[key] for scores in scored if (key := _key(way)) in scores]
            values.append(statistics.fmean(of_seeds) if len(of_seeds) == len(trials) else None)
        if any(value is not None for value in values):
            own = {"number": configuration.number, "parameters": configuration.parameters}
            rows.append(own | {"value": configuration.mean, "values": values})
    if not rows:
        return None

    def standing(value: float | None) -> float:
        return math.inf if value is None else sign * value

    def best_way(row: dict[str, Any]) -> dict[str, Any]:
        at = min(range(len(sweep.samplings)), key=lambda i: standing(row["values"][i]))
        told = {"number": row["number"], "parameters": row["parameters"]}
        return told | {"sampling": sweep.samplings[at], "value": row["values"][at]}

    return {
        "metric": metric,
        "samplings": sweep.samplings,
        "rows": rows,
        "own": best_way(rows[0]),
        "best": min(map(best_way, rows), key=lambda found: standing(found["value"])),
    }


def _metric(sweep: Sweep) -> str:
    """The objective, where it is of samples; else what samples are scored by."""
    own = sweep.settings.objective.metric
    return own if own != "validation/loss" else sweep.training({}).scored_by() or own


def _scores(file: Path, metric: str) -> dict[str, float]:
    """By way of drawing; nothing where the file is not there, or not what it should be."""
    try:
        return {_key(told["parameters"]): float(told["metrics"][metric]) for told in json.loads(file.read_text())}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _key(parameters: dict[str, Any]) -> str:
    return json.dumps(parameters, sort_keys=True)
