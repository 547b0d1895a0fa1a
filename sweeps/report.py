"""`report.html`: one page that answers a sweep's question, on its own, for a phone and a desktop, light and dark.

`tell` says what is told, as plain data from the sweep, its record and its folder; `report.html` beside this file
says how it looks. A projection: it can be deleted and written anew at any time.
"""

import base64
import datetime
import io
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..trainables import registry
from . import charts
from .ablation import compare, is_ablation
from .charts import GROUPS, Curve, Mark, Point
from .findings import edges, importances, spells, troubles
from .history import Record, Trial
from .money import Rates
from .space import Dimension, word
from .summary import best_of, configurations, gain, saving
from .sweep import Sweep
from .tables import (
    beside,
    by_kind,
    count,
    energy_and_cost,
    number,
    outcome,
    ranked,
    scored,
    short,
    told_of_grid,
    told_of_optimum,
)
from .utilisation import CAUSES

_ROWS = 50
"""Trials in a table; the rest are counted."""
_DRAWN = 400
"""Trials in a chart: more of them are a cloud, and a large file."""
_COLUMNS = 8
"""Configurations in the table of ways of drawing."""
_WIDEST, _LARGEST_BYTES = 1400, 400_000
"""Of a picture in the page: pixels, and bytes as PNG."""
_SAMPLE = 4000
"""Characters of a text sample."""

Told = dict[str, Any]


def tell(
    sweep: Sweep,
    record: Record,
    folder: Path,
    summary: Mapping[str, Any],
) -> Told:
    """All that the page says. `summary` is `summarise`'s."""
    trials = list(record.trials.values())
    found, best = configurations(sweep, trials), best_of(sweep, trials)
    weights = importances(sweep, found) if sweep.settings.search else ""
    kinds = _kinds(sweep, trials, best)
    optimum = _optimum(sweep, summary.get("sampling"))
    objective, units = sweep.settings.objective, registry.settings_class(sweep.settings.trainable).UNITS
    return {
        "sweep": sweep.name,
        "question": sweep.settings.question,
        "trainable": sweep.settings.trainable,
        "searched": [dimension.key for dimension in sweep.space.dimensions],
        "shares": [dimension.key for dimension in sweep.space.dimensions if is_share(sweep, dimension)],
        "metric": objective.metric,
        "goal": objective.goal,
        "unit": units.get(objective.metric, ""),
        "examples": units["examples"],
        "repeats": sweep.settings.repeats,
        "within": sweep.settings.early_stopping.within,
        "state": summary["state"],
        "reason": (record.closed or {}).get("reason", ""),
        "states": Counter(trial.state.replace("_", " ") for trial in trials),
        "total": len(trials),
        "planned": sweep.settings.trials * sweep.settings.repeats,
        "spells": spells(folder / "history.jsonl"),
        "device_seconds": summary["device_seconds"],
        "energy": energy_and_cost(summary),
        "energy_measured": summary["energy_measured"],
        "spent": _spent(record, trials),
        "utilisation": summary["utilisation"],
        "causes": [(cause, name) for cause, name in CAUSES.items() if any(c[cause] for c in summary["utilisation"])],
        "best": best and found[0],
        "base": next((c for c in found if c.group == 0), None),
        "gain": gain(sweep, found) if found else None,
        "edges": edges(sweep, best.parameters) if best else [],
        "file": best and _pasted(sweep, best),
        "saved": saving(summary),
        "groups": [charts.shortened(name) for name in _groups(sweep, trials)],
        "kinds": set(kinds.values()),
        "curves": _curves(sweep, trials, kinds),
        # One parameter that was only sampled over has its chart, with intervals, among what sampling found.
        "parameters_charts": [] if optimum and optimum["charts"] else _parameters(sweep, trials, kinds, weights),
        "importances": weights,
        "best_within": [
            {"value": value, "trial": record.trials[number]} for value, number in summary["best_within"].items()
        ],
        "changes": compare(sweep, record) if is_ablation(sweep) else [],
        "optimum": optimum,
        "grid": _grid(sweep, summary.get("grid")),
        "samples": _samples(folder, [t for t in (best, record.trials.get(0)) if t]),
        "pictures": _pictures(sweep, folder, [t for t in (best, record.trials.get(0)) if t]),
        "configurations": found[:_ROWS] if sweep.settings.repeats > 1 else [],
        "trials": ranked(sweep, trials)[:_ROWS],
        "rest": max(0, len(trials) - _ROWS),
        "troubles": [{"rule": r, "text": t, "trials": of} for (r, t), of in troubles(trials).items()],
        "versions": {name: told for name, told in (record.opened.get("versions") or {}).items() if told},
        "git": record.opened.get("git"),
        "cards": Counter(card["name"] for card in record.opened.get("cards", ())),
        "nodes": sorted({trial.node for trial in trials if trial.node}),
    }


def _spent(record: Record, trials: list[Trial]) -> dict[int, Told]:
    """Energy and cost of each trial in words; empty where nothing of them is known."""
    rates = Rates.of(record)
    spent = {trial.number: rates.of_trial(trial) for trial in trials}
    if all(one.kwh is None and one.cost is None for one in spent.values()):
        return {}
    return {
        index: {
            "energy": "–" if one.kwh is None else f"{number(one.kwh)} kWh",
            "cost": "–" if one.cost is None else rates.money(one.cost),
        }
        for index, one in spent.items()
    }


def write(told: Told, folder: Path) -> Path:
    """Write `report.html` in one step."""
    temporary = folder / ".report.html"
    temporary.write_text(render(told), encoding="utf-8")
    return temporary.replace(folder / "report.html")


def render(told: Told) -> str:
    """The page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    # Autoescape: what a name or a sample holds is text, never markup.
    pages = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    pages.filters |= {
        "number": number,
        "value": value,
        "count": count,
        "duration": duration,
        "until": span,
        "percent": percent,
        "brief": lambda text: charts.shortened(text, 48),
        "outcome": outcome,
        "short": lambda key: short(key, told["searched"]),
        "said": _said(told),
    }
    return pages.get_template("report.html").render(told)


def duration(seconds: float) -> str:
    """A time span as one says it: `0.4 s`, `45 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, big, little, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= large:
            rest = whole % large // little
            return f"{whole // large} {big}" + (f" {rest} {small}" if rest else "")
    return f"{whole} s"


def span(begin: float, end: float) -> str:
    """From when to when, in the zone of this machine: `2026-03-01 14:05 to 15:10 CET`."""
    first, last = (datetime.datetime.fromtimestamp(seconds).astimezone() for seconds in (begin, end))
    day = "" if first.date() == last.date() else "%Y-%m-%d "
    return f"{first:%Y-%m-%d %H:%M} to {last.strftime(day + '%H:%M %Z')}"


def value(measured: float) -> str:
    """A measured value in four figures, the last zeros too, so that a column of them is aligned."""
    return f"{measured:#.4g}".rstrip(".") if 0.01 <= abs(measured) < 10_000 else number(float(measured))


def percent(share: float) -> str:
    """A share in two figures: `0.31%`, `2.7%`, `43%`."""
    return f"{100 * share:.2g}%" if abs(share) < 0.0995 else f"{100 * share:.0f}%"


def _said(told: Told) -> Callable[..., str]:
    """How a parameter's value is said: a share of the budget in percent."""

    def said(value: Any, key: str) -> str:
        if not isinstance(value, float):
            return word(value)
        return f"{100 * value:.3g}%" if key in told["shares"] else number(value)

    return said


def _pasted(sweep: Sweep, best: Trial) -> str:
    """The best configuration as a training file."""
    what = f"best configuration of the sweep {sweep.name} (trial {best.number})"
    head = f"# The {what if sweep.settings.search else f'training {sweep.name}'}; rigsweep train FILE trains it.\n"
    return head + sweep.training_file(best.parameters)


# Charts.


def _groups(sweep: Sweep, trials: list[Trial]) -> list[str]:
    """Names of the groups that have a colour each; none where there are too many."""
    within = sweep.settings.early_stopping.within
    if within is None:
        return []
    dimension = next(d for d in sweep.space.dimensions if d.key == within)
    found = {word(trial.parameters[within]) for trial in trials if within in trial.parameters}
    order = [word(choice) for choice in dimension.choices]
    names = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
    return names if len(names) <= GROUPS else []


def _kinds(sweep: Sweep, trials: list[Trial], best: Trial | None) -> dict[int, str]:
    """The colour of each trial, as `charts` names them."""
    groups, within = _groups(sweep, trials), sweep.settings.early_stopping.within
    kinds = {}
    for trial in trials:
        if best is not None and trial.number == best.number:
            kinds[trial.number] = "best"
        elif trial.over and trial.state != "complete":
            kinds[trial.number] = "muted" if trial.state == "stopped" else "bad"
        elif trial.number == 0:
            kinds[0] = "ink"
        else:
            name = word(trial.parameters[within]) if groups and within in trial.parameters else ""
            kinds[trial.number] = f"group{groups.index(name) if name in groups else 0}"
    return kinds


def _drawn(sweep: Sweep, trials: list[Trial]) -> list[Trial]:
    """The trials in a chart: all, or the base, the best half of them and a spread of the others."""
    if len(trials) <= _DRAWN:
        return trials
    order = sorted(ranked(sweep, trials), key=lambda trial: trial.number != 0)
    first, others = order[: _DRAWN // 2], order[_DRAWN // 2 :]
    return [*first, *others[:: -(-len(others) // (_DRAWN // 2))]]


def _curves(sweep: Sweep, trials: list[Trial], kinds: dict[int, str]) -> Told | None:
    """The learning curves; None where nothing has been evaluated, or nothing was learned."""
    metric, by = sweep.settings.objective.metric, sweep.settings.early_stopping.by
    drawn = [trial for trial in _drawn(sweep, trials) if any(metric in r.metrics for r in trial.reports.values())]
    if not drawn or sweep.settings.from_ is not None:
        return None

    def curve(trial: Trial) -> Curve:
        reports = [r for _, r in sorted(trial.reports.items()) if metric in r.metrics]
        x = [r.flops if by == "flops" else float(r.examples) for r in reports]
        return charts.thinned(Curve(x, [r.metrics[metric] for r in reports]))

    by_kind: dict[str, list[Curve]] = {}
    for trial in drawn:
        by_kind.setdefault(kinds[trial.number], []).append(curve(trial))
    groups = [by_kind.get(f"group{i}", []) for i in range(GROUPS)]
    faint = by_kind.get("muted", []) + by_kind.get("bad", [])
    base, best = by_kind.get("ink"), by_kind.get("best")
    minimize = sweep.sign > 0
    drawing = charts.learning_curves(
        "curves", faint, groups, base[0] if base else None, best[0] if best else None, minimize=minimize
    )
    return {"svg": drawing, "by": by, "shown": len(drawn)}


def _parameters(sweep: Sweep, trials: list[Trial], kinds: dict[int, str], weights: Mapping[str, float] | str) -> Any:
    """One chart for each searched parameter, the important ones first."""
    order = list(weights) if isinstance(weights, Mapping) else []
    dimensions = sorted(sweep.space.dimensions, key=lambda d: order.index(d.key) if d.key in order else len(order))
    drawn = _drawn(sweep, [trial for trial in trials if trial.over])
    found = []
    for i, dimension in enumerate(dimensions):
        marks = [
            Mark(t.number, t.parameters[dimension.key], t.value, kinds[t.number])
            for t in drawn
            if dimension.key in t.parameters
        ]
        if marks:
            share = is_share(sweep, dimension)
            drawing = charts.parameter(f"parameter{i}", dimension, marks, minimize=sweep.sign > 0, share=share)
            found.append({"key": dimension.key, "log": dimension.log, "svg": drawing, "shown": len(marks)})
    return found


def is_share(sweep: Sweep, dimension: Dimension) -> bool:
    """Whether a parameter is a share, which is written in percent: its settings allow up to 1, and 1 itself."""
    model: Any = sweep.space.model
    *sections, name = dimension.key.split(".")
    for section in sections:
        model = model.model_fields[section].annotation
    rules = model.model_fields[name].metadata
    return dimension.kind == "float" and any(getattr(rule, "le", None) == 1 for rule in rules)


# What sampling in several ways has found.


def _optimum(sweep: Sweep, found: Told | None) -> Told | None:
    """Of a sweep that only samples: its curves, with errors, what it costs in variety, and its table."""
    if not found:
        return None
    curve, best, ties = found["curve"], found["best"]["parameters"], [tie["parameters"] for tie in found["ties"]]

    def role(point: Told) -> str:
        return "best" if point["parameters"] == best else "group1" if point["parameters"] in ties else "group0"

    keys = [dimension.key for dimension in sweep.space.dimensions]
    numbers = [isinstance(point["parameters"].get(keys[0]), int | float) for point in curve]
    charted: list[Told] = []
    if len(keys) == 1 and all(numbers) and len(curve) > 1:
        names = {scored(name): name for name in curve[0]["metrics"] if not name.endswith("_se")}
        for kind in [scored(found["metric"]), *(name for name in beside(found) if name in ("fd", "fid"))]:
            errors = not charted
            points = [
                Point(
                    float(point["parameters"][keys[0]]),
                    by_kind(point)[kind],
                    point["low"] if errors else None,
                    point["high"] if errors else None,
                    role(point),
                )
                for point in curve
            ]
            drawing = charts.with_errors(f"curve{len(charted)}", points, described=f"{kind} against {keys[0]}")
            charted.append({"title": names[kind], "caption": short(keys[0], keys), "svg": drawing, "errors": errors})
    if {"precision", "recall"} <= by_kind(curve[0]).keys() and len(curve) > 1:
        marks = [
            (
                by_kind(point)["recall"],
                by_kind(point)["precision"],
                "/".join(number(value) for value in point["parameters"].values()),
                role(point),
            )
            for point in curve
        ]
        drawing = charts.tradeoff("tradeoff", marks, described="precision against recall")
        charted.append({"title": "precision", "caption": "recall", "svg": drawing, "errors": False})
    again = {str(point["parameters"]): point for point in found["confirmation"]}
    return {
        "told": told_of_optimum(found),
        "charts": charted,
        "keys": keys,
        "objective": scored(found["metric"]),
        "beside": beside(found),
        "rows": [
            point | {"metrics": by_kind(point), "role": role(point), "again": again.get(str(point["parameters"]))}
            for point in curve
        ],
        "confirmed": found["confirmed"],
    }


def _grid(sweep: Sweep, found: Told | None) -> Told | None:
    """Of a sweep over training and sampling: every configuration in every way of drawing."""
    if not found:
        return None
    keys = [dimension.key for dimension in sweep.grid]
    rows = [
        {
            "way": [way.get(key) for key in keys],
            "values": [row["values"][i] for row in found["rows"][:_COLUMNS]],
            "best": [
                row["number"] == found["best"]["number"] and way == found["best"]["sampling"]
                for row in found["rows"][:_COLUMNS]
            ],
        }
        for i, way in enumerate(found["samplings"])
    ]
    heads = [list(row["parameters"].values()) or [f"trial {row['number']}"] for row in found["rows"][:_COLUMNS]]
    told = {"told": told_of_grid(found), "metric": found["metric"], "keys": keys, "heads": heads, "rows": rows}
    return told | {"rest": max(0, len(found["rows"]) - _COLUMNS)}


# Samples.


def _pictures(sweep: Sweep, folder: Path, trials: list[Trial]) -> list[Told]:
    """The last pictures of each trial, once, as data: the page asks for no file."""
    found = []
    names = registry.settings_class(sweep.settings.trainable).PICTURES
    for trial in {trial.number: trial for trial in trials}.values():
        place = folder / "trials" / str(trial.number) / "samples"
        for name in names:
            files = sorted(place.glob(f"[0-9]*-{name}.png"))
            if files and (data := _as_data(files[-1])):
                examples = int(files[-1].name.partition("-")[0])
                found.append({"trial": trial.number, "examples": examples, "name": name, "data": data})
    return found


def _as_data(file: Path) -> str | None:
    """A picture as an address that holds it, no wider than a page; None where it cannot be read."""
    from PIL import Image

    try:
        with Image.open(file) as picture:
            if picture.width > _WIDEST:
                picture = picture.resize((_WIDEST, round(picture.height * _WIDEST / picture.width)))
            kept = io.BytesIO()
            picture.save(kept, "PNG", optimize=True)
            kind = "png"
            if kept.tell() > _LARGEST_BYTES:
                kept = io.BytesIO()
                picture.save(kept, "WEBP", quality=85)
                kind = "webp"
    except (OSError, ValueError):
        return None
    return f"data:image/{kind};base64,{base64.b64encode(kept.getvalue()).decode()}"


def _samples(folder: Path, trials: list[Trial]) -> list[Told]:
    """The last text sample of each trial, once."""
    found = []
    for trial in {trial.number: trial for trial in trials}.values():
        place = folder / "trials" / str(trial.number) / "samples"
        files = sorted(f for f in place.glob("*.txt") if not f.name.startswith(".")) if place.is_dir() else []
        if files:
            examples = files[-1].name.partition("-")[0]
            text = files[-1].read_text(encoding="utf-8", errors="replace")[:_SAMPLE]
            found.append({"trial": trial.number, "examples": int(examples) if examples.isdigit() else 0, "text": text})
    return found
