"""What a person sees of a sweep in MLflow's pages: names, descriptions, and the view that compares the trials.

The view is one of MLflow's saved views (a tag of the experiment), to which an address can point. It was found by
reading MLflow 3.17's pages and trying; where a version does not know it, its plain list of runs is shown.
"""

import colorsys
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .ablation import Change, is_ablation
from .history import Record, Trial
from .summary import configurations
from .sweep import Sweep


def text(value: Any) -> str:
    """A parameter's value in full."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def short(value: Any) -> str:
    """A parameter's value as a person says it."""
    return f"{value:.3g}" if isinstance(value, float) else text(value)


def title(trial: Trial, repeats: int = 1) -> str:
    """A run's name: the number, then what was searched, for lists that show nothing else."""
    told = [f"{name} {short(trial.parameters[key])}" for key, name in _short_names(trial.parameters).items()]
    seed = [f"seed {trial.seed}"] if repeats > 1 else []
    return f"trial {trial.number}: {', '.join(told + seed) or 'base'}"[:200]


def color(number: int) -> str:
    """A trial's colour, as #rrggbb: hues a golden angle apart, so that neighbours never look alike."""
    red, green, blue = colorsys.hls_to_rgb(number * 0.618034 % 1, 0.36 + 0.12 * (number % 3), 0.7)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _short_names(keys: Iterable[str]) -> dict[str, str]:
    # Lists and legends have room for some twenty letters: learning_rate is lr there, as everybody says.
    names = {key: key.rpartition(".")[2] for key in keys}
    names = {key: "".join(word[0] for word in n.split("_") if word) if "_" in n else n for key, n in names.items()}
    return {key: name if list(names.values()).count(name) == 1 else key for key, name in names.items()}


def describe_trial(trial: Trial, sample: Path | None) -> str:
    """A run's description in Markdown: how it went, warnings, the newest text sample, and what was searched."""
    lines = [f"**{trial.state.replace('_', ' ')}**" + (f": {trial.reason}" if trial.reason else "")]
    if sample is not None and sample.suffix == ".txt":
        # Of a long description MLflow shows the first lines until one asks for more: the sample is among them.
        words = sample.read_text(encoding="utf-8", errors="replace")[:3000]
        fence = "```"
        while fence in words:
            fence += "`"
        examples = sample.name.partition("-")[0].lstrip("0") or "0"
        lines[0] += f" · sample after {int(examples):,} examples:"
        lines += [fence, words, fence]
    # Ahead of the sample, which may be long.
    lines = [part for rule, why in trial.warnings.items() for part in (f"⚠ **{rule}**: {why}", "")] + lines
    searched = [f"{key} {short(value)}" for key, value in trial.parameters.items()]
    return "\n".join([*lines, "", " · ".join(searched)])


def describe_sweep(sweep: Sweep, record: Record, experiment: str, runs: Mapping[int, str], comparison: str) -> str:
    """The parent run's description in Markdown: question, state, and the best configurations."""
    objective, closed = record.opened["objective"], record.closed
    state = f"{closed['state']}: {closed['reason']}" if closed else "running"
    counts = Counter(trial.state.replace("_", " ") for trial in record.trials.values())
    best = configurations(sweep, list(record.trials.values()))[:5]
    mean = f" (mean of {sweep.settings.repeats} seeds)" if sweep.settings.repeats > 1 else ""
    page = f"#/experiments/{experiment}/runs"
    lines = [f"**{record.opened.get('question') or record.opened['sweep']}**", ""]

    def link(number: int) -> str:
        return f"[{_cell(title(record.trials[number]))}]({page}/{runs.get(number, '')})"

    for one in best[:1]:
        told = f"Best: {link(one.number)} with {objective['metric']} {one.mean:.4g}{mean}."
        lines += [f"{told} [Compare the trials]({comparison})", ""]
    lines += [
        f"The sweep is {state}. Of {len(record.trials)} trials: {', '.join(f'{n} {s}' for s, n in counts.items())}."
    ]
    if len(best) > 1:
        lines += ["", f"| best | {objective['metric']}{mean} |", "|---|---|"]
        lines += [f"| {link(one.number)} | {one.mean:.4g} |" for one in best]
    return "\n".join(lines)


ABLATION = "ablation.json"
"""The artifact of an ablation's table; MLflow's page shows it as one, as `mlflow.loggedArtifacts` names it."""


def ablation_table(changes: list[Change], metric: str) -> str:
    """An ablation as MLflow's `log_table` writes one (which would append to what is there)."""
    # MLflow's columns have room for some fifteen letters, and what comes first is seen without scrolling.
    names = _short_names(change.key for change in changes)
    rows = [
        {
            "setting": names[change.key],
            "change": f"{text(change.before)} → {text(change.after)}",
            "verdict": change.outcome,
            "difference": _rounded(change.difference),
            "speed": _rounded(change.speed),
            "memory": _rounded(change.memory),
            "card time": _rounded(change.card_time),
            metric: _rounded(change.value),
            "low": _rounded(change.interval[0] if change.interval else None),
            "high": _rounded(change.interval[1] if change.interval else None),
            "seeds": change.seeds,
        }
        for change in changes
    ]
    columns = list(rows[0]) if rows else []
    return json.dumps({"columns": columns, "data": [list(row.values()) for row in rows]}, ensure_ascii=False)


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def ablation_tags(change: Change | None) -> dict[str, str]:
    """Of a change's runs, for MLflow's list of them; None is the base."""
    return {
        "rigsweep.change": change.what if change else "base",
        "rigsweep.difference": change.difference_text if change else "",
        "rigsweep.verdict": change.outcome if change else "",
    }


def _cell(told: str) -> str:
    """Text that stays inside a cell of a Markdown table."""
    return told.replace("|", "\\|").replace("\n", " ")


def comparison_address(base: str, experiment_id: str, view: str) -> str:
    """Where a sweep's trials are compared; `base` is the server's address, `view` the saved view's name."""
    # Any filter or order in the address itself would make MLflow pass over the view.
    page = f"{base}#/experiments/{experiment_id}/runs"
    return f"{page}?viewStateShareKey={view}&compareRunsMode=CHART&workflowType=machine_learning"


def comparison_view(sweep: Sweep, key: str) -> str:
    """The saved view: this sweep's trials, best first, and the charts that answer its question."""
    objective = sweep.settings.objective
    searched = [dimension.key for dimension in sweep.space.dimensions]
    numeric = [d.key for d in sweep.space.dimensions if d.kind != "choice" or _numbers(d.choices)]
    drawn = sweep.training({}).PICTURES
    # MLflow's own charts of every metric follow in sections of theirs, which can be folded away.
    section = {"uuid": "rigsweep", "name": "Comparison", "display": True, "isReordered": True, "deleted": False}
    charts = [
        _line(objective.metric, f"{objective.metric} over examples"),
        _line("loss", "training loss over examples"),
        _line(objective.metric, f"{objective.metric} over FLOPs", over="flops"),
        _chart("BAR", "objective", metricKey="objective", displayName=f"final {objective.metric}"),
        *(_chart("IMAGE", name, imageKeys=[name], step=_last(sweep), showRunParams=True) for name in drawn),
        # MLflow would add charts of what is there only to be an axis.
        *(_line(name, name) | {"deleted": True} for name in ("flops", "seconds")),
    ]
    if numeric:
        parallel = {"selectedParams": numeric, "selectedMetrics": ["objective"], "showAllRuns": False}
        # Choices that are words have no axis there.
        charts.insert(1, _chart("PARALLEL", "searched", **parallel))
    # Every curve is asked for by itself, and more than some dozen cannot be told apart.
    few = sweep.settings.trials * sweep.settings.repeats <= 30
    state = {
        "searchFilter": f"tags.`rigsweep.opened` = '{key}' AND tags.`rigsweep.trial` != ''",
        "orderByKey": "metrics.`objective`",
        "orderByAsc": objective.goal == "minimize",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "selectedColumns": [
            "metrics.`objective`",
            f"metrics.`{objective.metric}`",
            *(f"params.`{name}`" for name in searched),
            *(f"tags.`rigsweep.{name}`" for name in ("change", "difference", "verdict") if is_ablation(sweep)),
            "tags.`rigsweep.state`",
            "tags.`rigsweep.reason`",
            "tags.`rigsweep.health`",
        ],
        "runsHiddenMode": "SHOW_ALL" if few else "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "viewMaximized": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    view = {"name": f"Comparison of {sweep.name}", "createdAt": int(key), "updatedAt": int(key)}
    return json.dumps(view | {"state": json.dumps(state)})


def _last(sweep: Sweep) -> int:
    """The step of the last pictures of a trial, as far as its settings say it."""
    training = sweep.training({})
    if sweep.settings.from_ is not None:
        return getattr(getattr(training, "quality", None), "samples", 0)
    batch, budget = training.batch.examples, training.budget.examples
    return 0 if budget is None else -(-int(budget) // batch) * batch


def _chart(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A chart of MLflow's, in the words of its pages' own state."""
    own = {"type": kind, "uuid": f"rigsweep-{kind}-{name}", "metricSectionId": "rigsweep", "runsCountToCompare": 100}
    return own | {"deleted": False, "isGenerated": False} | more


def _line(metric: str, name: str, over: str | None = None) -> dict[str, Any]:
    """Curves of a metric over examples, which are MLflow's steps, or over another metric."""
    return _chart(
        "LINE",
        f"{metric}-{over or 'examples'}",
        metricKey=metric,
        selectedMetricKeys=[metric],
        displayName=name,
        xAxisKey="metric" if over else "step",
        selectedXAxisMetricKey=over or "",
        useGlobalXaxisKey=False,
        useGlobalLineSmoothing=True,
        lineSmoothness=0,
        xAxisScaleType="linear",
        scaleType="linear",
        range={},
        yAxisKey="metric",
        yAxisExpressions=[],
        ignoreOutliers=False,
    )


def _numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
