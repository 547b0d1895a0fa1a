"""The second stage of a sweep that only samples: its best configurations again, by more samples, from other noise."""

from pathlib import Path
from typing import Any

import yaml

from .files import Document
from .history import Record
from .summary import configurations
from .sweep import Sweep, check


def name_of(sweep: Sweep) -> str:
    """The confirmation's own name, and its folder's."""
    return f"{sweep.name}-confirm"


def confirmation(sweep: Sweep, record: Record) -> Sweep | None:
    """The sweep that confirms another; None where it is not asked for, or fewer than two are complete.

    Its base is the best. Its noise is of another seed, as the best of many on the same noise is partly luck.
    """
    confirm, found = sweep.settings.confirm, configurations(sweep, list(record.trials.values()))
    if confirm is None or len(found) < 2:
        return None
    best = [configuration.parameters for configuration in found[: confirm.best]]
    values: dict[str, Any] = yaml.safe_load(sweep.resolved())
    base = values["base"]
    base["sampling"]["seed"] += 1
    base["quality"] = (base.get("quality") or {}) | {"samples": confirm.samples}
    for key, value in best[0].items():
        section, _, name = key.partition(".")
        base[section][name] = value
    metrics, place = list(sweep.training({}).metrics()), sweep.settings.objective.metric
    values |= {"confirm": None, "searcher": "list", "configurations": best, "trials": len(best)}
    question = f"Which of the best {len(best)} of {sweep.name} is it, by {confirm.samples:,} samples each?"
    document = Document(f"{name_of(sweep)}.yaml", values | {"question": question})
    # The metric's name says by how many samples it is: it has the same place among the metrics.
    more = list(sweep.space.model.model_validate(base).metrics())[metrics.index(place)]
    document.values["objective"] = {"metric": more}
    return check(document, name_of(sweep))


def confirmed(sweep: Sweep, folder: Path) -> Path | None:
    """The folder of a sweep's confirmation; None where there is none."""
    other = folder.with_name(name_of(sweep))
    return other if sweep.settings.confirm and (other / "sweep.yaml").is_file() else None
