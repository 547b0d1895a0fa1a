"""What a person sees of a sweep in a terminal: one live table and one summary."""

import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .ablation import Change, compare, is_ablation
from .controller import Controller
from .history import Record, Trial
from .money import Rates, Spent
from .space import word
from .summary import best_of, configurations, gain, saving
from .sweep import Sweep
from .utilisation import CAUSES, mean_shares

_COLUMNS = 6
"""Configurations that a table of ways of drawing shows."""
STYLES = {
    "proposed": "dim",
    "running": "bold cyan",
    "interrupted": "yellow",
    "complete": "green",
    "stopped": "dim",
    "diverged": "red",
    "out_of_memory": "red",
    "failed": "red",
}


def number(value: Any) -> str:
    """A value as a person reads it: 0.00123 as 1.23e-3, 4096 as it is."""
    if not isinstance(value, float):
        return word(value)
    if value == 0 or 0.01 <= abs(value) < 10_000:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    return f"{mantissa}e{int(exponent)}"


def duration(seconds: float) -> str:
    """`45 s`, `3:20`, `1:03:20`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def count(value: float) -> str:
    """`400k`, `1.5M`."""
    for scale, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.3g}"


def parameters(trial: Trial, keys: list[str] | None = None) -> str:
    """`learning_rate 1e-3, width 96`."""
    chosen = trial.parameters if keys is None else {k: trial.parameters[k] for k in keys if k in trial.parameters}
    return ", ".join(f"{short(key, list(trial.parameters))} {number(value)}" for key, value in chosen.items())


def _place(trial: Trial) -> str:
    """Where a trial runs: `RTX 3090`, `2 × RTX 3090`, `1/2 of RTX 3090`."""
    if trial.share < 1:
        return f"1/{round(1 / trial.share)} of {trial.cards[0]}"
    counts = Counter(trial.cards)
    return ", ".join(f"{count} × {name}" if count > 1 else name for name, count in counts.items())


def _tried(trial: Trial) -> str:
    return f" ({parameters(trial)})" if trial.parameters else ""


def short(key: str, keys: list[str]) -> str:
    """The last part of a dotted key, or all of it where two share that part."""
    last = key.rpartition(".")[2]
    return last if sum(other.rpartition(".")[2] == last for other in keys) == 1 else key


def trials_table(
    sweep: Sweep,
    trials: list[Trial],
    progress: Mapping[int, Mapping[str, Any]],
    *,
    best: Trial | None,
    rates: Rates | None = None,
) -> Table:
    """One row a trial; with energy and cost, by `rates`, where they are known."""
    spent = {trial.number: (rates or Rates()).of_trial(trial) for trial in trials}
    energy = any(one.kwh is not None for one in spent.values())
    cost = any(one.cost is not None for one in spent.values())
    keys = [dimension.key for dimension in sweep.space.dimensions]
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    table.add_column("trial", justify="right", no_wrap=True)
    for key in keys:
        table.add_column(short(key, keys), justify="right", no_wrap=True)
    table.add_column("progress", width=14, no_wrap=True)
    table.add_column(sweep.settings.objective.metric, justify="right", no_wrap=True)
    table.add_column("examples/s", justify="right", no_wrap=True)
    table.add_column("MFU", justify="right", no_wrap=True)
    table.add_column("left", justify="right", no_wrap=True)
    for name in ["kWh"] * energy + ["cost"] * cost:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
    for trial in trials:
        style, last = STYLES[trial.state], trial.last
        shown = progress.get(trial.number, {})
        total = float(shown.get("total") or (last.total if last else 1))
        done = max(float(shown.get("examples", 0)), float(trial.examples))
        speed = shown.get("examples_per_second") or (last.metrics.get("speed/examples_per_second") if last else None)
        mfu = shown.get("mfu") or (last.metrics.get("speed/mfu") if last else None)
        left = duration((total - done) / speed) if trial.state == "running" and speed and done < total else ""
        mark = "★ " if best is not None and trial.number == best.number else ""
        table.add_row(
            Text(f"{mark}{trial.number}", style="bold green" if mark else style),
            *(Text(number(trial.parameters[key]) if key in trial.parameters else "–", style=style) for key in keys),
            ProgressBar(total=total, completed=min(done, total), width=14, complete_style=style, finished_style=style),
            Text(number(last.metrics[sweep.settings.objective.metric]) if last else "", style=style),
            Text(count(speed) if speed else "", style="" if trial.state == "running" else "dim"),
            Text(f"{mfu:.0%}" if mfu else "", style="" if trial.state == "running" else "dim"),
            left,
            *_spent(spent[trial.number], rates or Rates(), energy=energy, cost=cost),
            Text(outcome(trial), style=style),
        )
    return table


def _spent(spent: Spent, rates: Rates, *, energy: bool, cost: bool) -> list[Text]:
    cells = [number(spent.kwh) if spent.kwh is not None else ""] * energy
    cells += [rates.money(spent.cost) if spent.cost is not None else ""] * cost
    return [Text(cell, style="dim") for cell in cells]


def outcome(trial: Trial) -> str:
    """Where a trial stands, and why; what health rules warned of."""
    state = trial.state.replace("_", " ")
    plain = {"complete", "proposed", "running"}
    again = f" (again: {trial.reason})" if trial.state == "running" and trial.lost else ""
    warned = f" ⚠ {', '.join(trial.warnings)}" if trial.warnings else ""
    return f"{state}{again}{warned}" if trial.state in plain else f"{state}{warned}: {trial.reason}"


def ranked(sweep: Sweep, trials: list[Trial]) -> list[Trial]:
    """Complete trials by value, then the others by how far they came and what they reached."""

    def standing(trial: Trial) -> tuple[bool, float, float]:
        value, done = trial.value if trial.value is not None else float("inf") * sweep.sign, trial.state == "complete"
        return not done, 0 if done else -trial.examples, sweep.sign * value

    return sorted(trials, key=standing)


def summary_panel(sweep: Sweep, record: Record, told: Mapping[str, Any]) -> RenderableType:
    """The best, the gain over the base, the best of each group, what early stopping saved."""
    lines: list[RenderableType] = []
    metric = sweep.settings.objective.metric
    best = best_of(sweep, list(record.trials.values()))
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right")
    facts.add_column()
    found = configurations(sweep, list(record.trials.values()))
    base = next((configuration for configuration in found if configuration.group == 0), None)
    mean = f", the mean of {sweep.settings.repeats} seeds" if sweep.settings.repeats > 1 else ""
    if best is not None:
        facts.add_row("best", f"trial {best.number}: {metric} {number(found[0].mean)}{mean}{_tried(best)}")
        gained = gain(sweep, found)
        if base is not None and gained is not None:
            tried = _tried(record.trials[0])
            facts.add_row("base", f"trial 0: {number(base.mean)}{tried}; the best gains {gained.amount:.4g}")
        elif best.number == 0 and len(record.trials) > 1:
            facts.add_row("base", "nothing was better than it")
    elif record.trials:
        facts.add_row("best", "no trial is complete yet")
    within = sweep.settings.early_stopping.within
    for value, trial_number in told["best_within"].items():
        trial = record.trials[trial_number]
        others = [key for key in trial.parameters if key != within]
        facts.add_row(
            f"{short(within or '', [within or ''])} {value}",
            f"trial {trial_number}: {number(trial.value)} ({parameters(trial, others)})",
        )
    states = [trial.state for trial in record.trials.values()]
    facts.add_row(
        "trials", ", ".join(f"{states.count(state)} {state.replace('_', ' ')}" for state in dict.fromkeys(states))
    )
    for rule in dict.fromkeys(rule for trial in record.trials.values() for rule in trial.warnings):
        warned = [trial for trial in record.trials.values() if rule in trial.warnings]
        numbers = ", ".join(str(trial.number) for trial in warned[:8]) + (" …" if len(warned) > 8 else "")
        trials = "trial" if len(warned) == 1 else "trials"
        facts.add_row("warning", f"⚠ {rule} ({trials} {numbers}): {warned[0].warnings[rule]}")
    if saved := saving(told):
        facts.add_row(
            "early stopping",
            f"{saved.stopped} ended early; {duration(saved.spent)} of card time instead of about "
            f"{duration(saved.full)} ({saved.share:.0%} saved)",
        )
    elif told["device_seconds"]:
        facts.add_row("card time", duration(told["device_seconds"]))
    if energy := energy_and_cost(told):
        facts.add_row("energy", energy)
    if told["utilisation"]:
        facts.add_row("cards", _busy(told["utilisation"]))
    lines.append(facts)
    if found := told.get("sampling"):
        lines += [Text(), optimum_table(sweep, found)]
    if found := told.get("grid"):
        lines += [Text(), grid_table(sweep, found)]
    if is_ablation(sweep) and (changes := compare(sweep, record)):
        lines += [Text(), ablation_table(sweep, changes)]
    return Group(*lines)


def optimum_table(sweep: Sweep, found: Mapping[str, Any]) -> RenderableType:
    """What a sweep that only samples has found, and its curve: one row a configuration."""
    keys = [dimension.key for dimension in sweep.space.dimensions]
    points = {str(point["parameters"]): point for point in found["confirmation"]}
    ties = [str(tie["parameters"]) for tie in found["ties"]]
    others = beside(found)
    table = Table(box=None, pad_edge=False, header_style="dim")
    for key in keys:
        table.add_column(short(key, keys), justify="right")
    columns = [scored(found["metric"]), "95%", *(["confirmed", "95%"] if points else []), *others]
    for column in columns:
        table.add_column(column, justify="right")
    table.add_column("")
    for point in found["curve"]:
        named = str(point["parameters"])
        again = points.get(named)
        best = named == str(found["best"]["parameters"])
        cells = [*(number(point["parameters"].get(key)) for key in keys), *_with_interval(point)]
        if points:
            cells += _with_interval(again) if again else ["", ""]
        metrics = by_kind(point)
        cells += [number(metrics[name]) if name in metrics else "" for name in others]
        style = "bold green" if best else ""
        table.add_row(*cells, "best" if best else "tie" if named in ties else "", style=style)
    return Group(Text(told_of_optimum(found)), Text(), table)


def by_kind(point: Mapping[str, Any]) -> dict[str, float]:
    """A point's metrics by their short names, which a confirmation by more samples shares."""
    # Beside KID stands its standard error, which is not a figure of its own.
    return {scored(name): value for name, value in point["metrics"].items() if not name.endswith("_se")}


def beside(found: Mapping[str, Any]) -> list[str]:
    """Short names of what a curve tells beside the objective; not of what is the same everywhere."""
    points = [by_kind(point) for point in found["curve"]]
    others = [name for name in points[0] if name not in (scored(found["metric"]), "loss")]
    return [name for name in others if len({point.get(name) for point in points}) > 1]


def told_of_optimum(found: Mapping[str, Any]) -> str:
    """What a sweep that only samples has found, in one or two sentences."""
    best = found["best"]
    how = f"confirmed by {found['samples']:,} samples" if found["confirmed"] else f"by {found['samples']:,} samples"
    words = []
    for key, value in best["parameters"].items():
        interval = found["intervals"].get(key)
        lies = f" (95%: {number(interval[0])} to {number(interval[1])})" if interval else ""
        words.append(f"{key} {number(value)}{lies}")
    told = f"best: {', '.join(words)}, {how}"
    if ties := found["ties"]:
        each = ["/".join(number(value) for value in tie["parameters"].values()) for tie in ties]
        told += f"; not to be told from it: {', '.join(each)}"
    ends = [key for key, inside in found["interior"].items() if inside is False]
    return told + "".join(f"; {key} is at the end of what was searched" for key in ends)


def grid_table(sweep: Sweep, found: Mapping[str, Any]) -> RenderableType:
    """What a sweep over training and sampling has found: one row a way of drawing, one column a configuration."""
    keys, shown = [dimension.key for dimension in sweep.grid], found["rows"][:_COLUMNS]
    table = Table(box=None, pad_edge=False, header_style="dim")
    for key in keys:
        table.add_column(short(key, keys), justify="right")
    searched = [dimension.key for dimension in sweep.space.dimensions]
    for row in shown:
        told = "\n".join(number(row["parameters"][key]) for key in searched if key in row["parameters"])
        table.add_column(told or f"trial {row['number']}", justify="right")
    best = found["best"]
    for i, way in enumerate(found["samplings"]):
        cells = [Text("–" if row["values"][i] is None else number(row["values"][i])) for row in shown]
        for cell, row in zip(cells, shown, strict=True):
            if row["number"] == best["number"] and way == best["sampling"]:
                cell.stylize("bold green")
        table.add_row(*(number(way.get(key)) for key in keys), *cells)
    more = len(found["rows"]) - len(shown)
    table.caption = f"{found['metric']}, each model drawn from in every way"
    table.caption += f"; {more} more in summary.json" if more else ""
    return Group(Text(told_of_grid(found)), Text(), table)


def told_of_grid(found: Mapping[str, Any]) -> str:
    """Both optima of a sweep over training and sampling, in one sentence."""

    def said(point: Mapping[str, Any]) -> str:
        way = ", ".join(f"{key} {number(value)}" for key, value in point["sampling"].items())
        return f"trial {point['number']} with {way} ({number(point['value'])})"

    told = f"best over the ways of drawing: {said(found['best'])}"
    same = found["own"]["number"] == found["best"]["number"]
    return told + ("" if same else f"; by the base's own sampling the best is {said(found['own'])}")


def _with_interval(point: Mapping[str, Any]) -> list[str]:
    lies = "" if point["low"] is None else f"{number(point['low'])} to {number(point['high'])}"
    return [number(point["value"]), lies]


def scored(metric: str) -> str:
    """A metric's short name: of `validation/kid_pca-64_1000`, `kid`."""
    return metric.rpartition("/")[2].partition("_")[0]


def energy_and_cost(told: Mapping[str, Any]) -> str:
    """Of a summary, in words: `1.3 kWh (measured), £0.33`; nothing where neither is known."""
    source = "measured" if told["energy_measured"] else "estimated"
    words = [f"{number(told['energy_kwh'])} kWh ({source})"] if told["energy_kwh"] is not None else []
    if told["cost"] is not None:
        words.append(Rates(currency=told["currency"]).money(told["cost"]))
    return ", ".join(words)


def _busy(cards: list[dict[str, Any]]) -> str:
    """What each card's time went into, in one line."""
    each = ", ".join(f"{card['computing']:.0%}" for card in cards)
    rest = sorted(mean_shares(cards).items(), key=lambda item: -item[1])
    told = ", ".join(f"{CAUSES[cause]} {share:.0%}" for cause, share in rest if cause != "computing" and share >= 0.005)
    return f"computing {each} of the time" + (f"; else {told}" if told else "")


def ablation_table(sweep: Sweep, changes: list[Change]) -> Table:
    """One row a change, against the base; at most 80 columns wide where keys and values are not long."""
    metric, repeats = sweep.settings.objective.metric, sweep.settings.repeats
    keys = [dimension.key for dimension in sweep.space.dimensions]
    whats = [f"{short(c.key, keys)}: {_plain(c.before)} → {_plain(c.after)}" for c in changes]
    table = Table(box=None, pad_edge=False, header_style="dim", caption_style="dim", caption_justify="left")
    table.add_column("change", overflow="fold", min_width=min(26, max(map(len, whats))))
    table.add_column(metric, justify="right", no_wrap=True)
    table.add_column("verdict", max_width=11)
    for name in ("speed", "memory", "time"):
        table.add_column(name, justify="right", no_wrap=True)
    for what, change in zip(whats, changes, strict=True):
        style = {"better": "green", "worse": "red", "unclear": "yellow"}.get(change.verdict or "", "")
        table.add_row(
            what,
            change.difference_text,
            Text(change.outcome, style=style if change.verdict else "dim"),
            *(_times(ratio) for ratio in (change.speed, change.memory, change.card_time)),
        )
    base = next((change.base for change in changes if change.seeds == repeats), None)
    table.caption = "Each change alone, against the base" + (f" ({metric} {number(base)})" if base is not None else "")
    if repeats > 1:
        table.caption += (
            f": the mean difference over {repeats} seeds, paired, with its 95% interval; "
            "verdicts are corrected for the number of changes"
        )
    table.caption += ". Speed, peak memory and card time are ratios to the base's."
    return table


def _plain(value: Any) -> str:
    """A setting as a file might have it."""
    return f"{value:g}" if isinstance(value, float) else word(value)


def _times(ratio: float | None) -> str:
    return f"{ratio:.2f}×" if ratio is not None else ""


class LiveShow:
    """The live table, or one line an event where there is no terminal."""

    def __init__(self, sweep: Sweep, *, quiet: bool = False):
        self._sweep = sweep
        # The streams as they are now: while a sweep runs, what libraries print goes to the log.
        self._file = sys.stderr if quiet else sys.stdout
        self.console = Console(file=self._file, width=None if self._file.isatty() else 160)
        self._live: Live | None = None
        self._notes: list[str] = []
        self._stage = ""
        self._started = time.monotonic()

    def __enter__(self) -> "LiveShow":
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=4, transient=True, screen=False)
            self._live.__enter__()
            self._live.update(Text("starting", style="dim"))
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.__exit__(None, None, None)

    def note(self, text: str) -> None:
        """Something to know, once."""
        self._notes = [*self._notes[-2:], text]
        if self._live is None:
            self._line(text)
        else:
            self._live.update(Group(*(Text(note, style="dim") for note in self._notes)))

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Data is being prepared."""
        if self._live is not None:
            bar = ProgressBar(total=max(total, 1), completed=done, width=40)
            self._live.update(Group(Text(f"{stage}  {done / 1e6:,.1f} of {total / 1e6:,.1f} MB", style="dim"), bar))
        elif stage != self._stage:
            self._line(stage)
        self._stage = stage

    def event(self, kind: str, trial: Trial) -> None:
        """Something happened to a trial."""
        if self._live is not None:
            return
        metric = self._sweep.settings.objective.metric
        if kind == "started":
            self._line(f"trial {trial.number}: started on {_place(trial)}{_tried(trial)}")
        elif kind == "report" and trial.last is not None:
            share = trial.examples / trial.last.total
            self._line(f"trial {trial.number}: {share:.0%}, {metric} {number(trial.last.metrics[metric])}")
        elif kind == "warned":
            rule, reason = list(trial.warnings.items())[-1]
            self._line(f"trial {trial.number}: ⚠ {rule}: {reason}")
        elif kind in ("ended", "interrupted", "lost"):
            value = f", {metric} {number(trial.value)}" if trial.state == "complete" else ""
            self._line(f"trial {trial.number}: {outcome(trial)}{value}")

    def refresh(self, controller: Controller, progress: dict[int, dict[str, Any]]) -> None:
        """Draw the table anew."""
        if self._live is None:
            return
        trials = list(controller.record.trials.values())
        best = best_of(self._sweep, trials)
        room = max(4, self.console.size.height - 6 - len(self._notes))
        running = [trial for trial in trials if not trial.over]
        rest = sorted((trial for trial in trials if trial.over), key=lambda trial: trial.ended or 0, reverse=True)
        if best is not None:
            rest = [best, *(trial for trial in rest if trial is not best)]
        shown = (running + rest)[:room]
        hidden = len(trials) - len(shown)
        over = sum(trial.over for trial in trials)
        total = self._sweep.settings.trials * self._sweep.settings.repeats
        head = Text.assemble(
            (self._sweep.name, "bold"),
            f"  {over} of {total} trials over",
            (f"  {duration(time.monotonic() - self._started)}", "dim"),
            (f"  {self._sweep.settings.question}", "dim italic"),
        )
        waiting = not any(trial.started for trial in trials)
        parts: list[RenderableType] = [head]
        if waiting:
            parts.append(Text("lanes are starting (10 to 30 s, once)", style="dim"))
        else:
            parts.append(trials_table(self._sweep, shown, progress, best=best, rates=Rates.of(controller.record)))
        if hidden:
            parts.append(Text(f"and {hidden} more that are over: rigsweep results {self._sweep.name}", style="dim"))
        parts += [Text(note, style="yellow") for note in self._notes]
        self._live.update(Group(*parts))

    def _line(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", file=self._file, flush=True)
