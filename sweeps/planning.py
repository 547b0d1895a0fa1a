"""`rigsweep plan`: every derived number, the trials and the time they take, without training."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cluster.cards import describe, find_cards
from ..cluster.memory import GIB, classical_activations_bytes, classical_bytes
from ..cluster.node_settings import Node
from ..cluster.speed import card_speed, specified_speed
from ..trainables import registry
from .history import Trial
from .money import JOULES_PER_KWH, Rates, prices_of, rates_of, refuse_unpriced
from .needs import needs_of
from .running import budgets, make_job
from .space import Parameters
from .start_from import earlier_trials
from .sweep import Sweep
from .tables import count, duration, number, short

EFFICIENCY = 0.4
"""Share of the measured matrix-product speed that a training is taken to reach: 35 to 45% is usual for an MFU."""
_STOPPING, _STOPPING_WITHIN = 0.42, 0.58
"""Share of the card time that early stopping is taken to leave: of all trials, or within groups (`make bench`)."""


def plan_sweep(
    sweep: Sweep,
    cache: Path,
    preparing: Callable[[str, int, int], None],
    runs: Path,
    *,
    cards: int | None = None,
    threads: int | None = None,
    node: Node | None = None,
) -> dict[str, Any]:
    """The plan of a sweep or training, as plain data; data is prepared if it is not yet."""
    _, starts_from = earlier_trials(sweep, runs)
    node = node or Node()
    refuse_unpriced(sweep, node)
    found = find_cards(use=cards, threads=threads, node=node)
    speed = specified_speed(found[0]) if node.hardware else card_speed(found[0], cache)
    data = registry.prepare(sweep.settings.trainable, sweep.training({}), cache, preparing)
    rungs = sweep.rungs(budgets(sweep, cache) or [1.0])
    sections = ("budget", "model", "data", "batch")
    corners: list[Parameters] = sweep.space.corners_that_change(*sections)
    workers = needs_of(sweep, found).largest
    shapes = []
    for parameters in [sweep.space.base_parameters(), *corners]:
        trial = Trial(0, 0, 0, parameters, proposed=0.0)
        job = make_job(sweep, trial, Path("plan"), cache, found[0], speed, rungs, None, workers)
        told = registry.numbers(sweep.settings.trainable, job)
        memory = registry.memory(sweep.settings.trainable, job)
        seconds = told["flops"] / (job.measured_flops_per_second * EFFICIENCY * workers)
        shown = {key: value for key, value in parameters.items() if key.split(".")[0] in sections}
        if memory is not None and sweep.settings.trainable == "gpt":
            memory["classical_bytes"] = _classical_bytes(job.training, told["parameters_count"], memory["rung"])
        shape = {"parameters": shown, "precision": job.precision, **told, "seconds": seconds}
        shapes.append({**shape, "memory": memory})
    rates = rates_of(sweep, node, found)
    trials = sweep.settings.trials * sweep.settings.repeats
    kept = [shape for shape in shapes[1:] if shape["parameters"]] or shapes[:1]
    card_seconds = trials * workers * sum(shape["seconds"] for shape in kept) / len(kept)
    within = sweep.settings.early_stopping.within
    share = (_STOPPING_WITHIN if within else _STOPPING) if rungs and trials > 1 else 1.0
    spent_seconds = card_seconds * share
    joules = rates.energy_joules(None, spent_seconds)
    return {
        "sweep": sweep.name,
        "question": sweep.settings.question,
        "trainable": sweep.settings.trainable,
        "cards": [card.name for card in found],
        "machine": describe(found),
        "speed_from": "specification" if node.hardware else "measured",
        "measured_flops_per_second": {
            "bf16": speed.bf16_flops_per_second,
            "fp32": speed.fp32_flops_per_second,
            "bf16_pays": speed.bf16_pays,
        },
        "data": data,
        "base": shapes[0],
        "shapes": kept,
        "trials": trials,
        "start_from": starts_from,
        "rungs": list(rungs),
        "rungs_by": sweep.settings.early_stopping.by,
        "efficiency": EFFICIENCY,
        "card_seconds": card_seconds,
        "card_seconds_with_stopping": spent_seconds,
        "wall_seconds": spent_seconds / min(len(found), trials * workers),
        "card_watts": rates.card_watts,
        "energy_kwh": None if joules is None else joules / JOULES_PER_KWH,
        "priced": prices_of(sweep, node).known,
        "price_per_card_hour": rates.per_card_hour,
        "cost": rates.cost(None, spent_seconds),
        "cost_limit": sweep.settings.limits.cost,
        "currency": rates.currency,
    }


def plan_table(plan: Mapping[str, Any]) -> RenderableType:
    """The plan for a person."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right")
    facts.add_column()
    measured, base = plan["measured_flops_per_second"], plan["base"]
    facts.add_row("cards", plan["machine"])
    pays = "used by auto" if measured["bf16_pays"] else "not used by auto: no gain in training"
    bf16, fp32 = flops_in_words(measured["bf16"]), flops_in_words(measured["fp32"])
    told = f"bf16 {bf16}/s ({pays}), fp32 {fp32}/s, matrix products"
    specified = plan["speed_from"] == "specification"
    facts.add_row("speed" if specified else "measured", told + ("; specification, not measured" if specified else ""))
    for key, value in plan["data"].items():
        facts.add_row(key, str(value))
    facts.add_row(
        "base",
        f"{base['steps']:,} steps of {base['rows_per_step']} rows in {base['accumulation']} × {base['micro_rows']}, "
        f"{base['precision']}, evaluated {base['evaluations']} times",
    )
    if plan["rungs"]:
        places, unit = [count(rung) for rung in plan["rungs"]], "FLOPs" if plan["rungs_by"] == "flops" else "examples"
        few = len(places) <= 4
        told = f"{', '.join(places)} {unit}" if few else f"{places[0]} to {places[-1]} {unit}, {len(places)} times"
        facts.add_row("compared at", told)
    shapes = Table(box=None, pad_edge=False, header_style="dim")
    keys = list(plan["shapes"][0]["parameters"])
    for key in keys:
        shapes.add_column(short(key, keys), justify="right")
    for name in ("parameters", "examples", "FLOPs an example", "FLOPs", "micro-batch", "memory", "time"):
        shapes.add_column(name, justify="right")
    for shape in plan["shapes"]:
        shapes.add_row(
            *(number(shape["parameters"][key]) for key in keys),
            f"{shape['parameters_count']:,}",
            count(shape["examples"]),
            flops_in_words(shape["flops_per_example"]),
            flops_in_words(shape["flops"]),
            f"{shape['accumulation']} × {shape['micro_rows']}",
            _memory(shape["memory"]),
            duration(shape["seconds"]),
        )
    helps = {told["what_would_help"] for shape in plan["shapes"] if (told := shape["memory"])} - {None}
    times = Table.grid(padding=(0, 2))
    times.add_column(style="dim", justify="right")
    times.add_column()
    for advice in helps:
        times.add_row("memory", Text(f"some do not fit: {advice}", style="red"))
    times.add_row("trials", str(plan["trials"]))
    for note in plan["start_from"]:
        times.add_row("", note)
    times.add_row(
        "card time",
        f"{duration(plan['card_seconds'])} to the end, about {duration(plan['card_seconds_with_stopping'])} "
        f"with early stopping",
    )
    times.add_row("wall time", f"about {duration(plan['wall_seconds'])} on {plan['machine']}, start-up aside")
    for name, told in _money(plan):
        times.add_row(name, told)
    of = "that" if specified else "the measured"
    note = f"times are for {plan['efficiency']:.0%} of {of} speed; a short run of your own says more"
    title = Text.assemble((plan["sweep"], "bold"), f"  {plan['question']}")
    return Group(title, facts, Text(), shapes, Text(), times, Text(note, style="dim"))


def _memory(memory: Mapping[str, Any] | None) -> str:
    """The calibrated estimate of the card's memory, in GiB, and the rung of the ladder where it is not the first."""
    if memory is None or "calibrated_bytes" not in memory:
        return ""
    told = f"{memory['calibrated_bytes'] / GIB:.3g} of {memory['card_bytes'] / GIB:.3g} GiB"
    if not memory["fits"]:
        return f"{told}, does not fit"
    rung = memory["rung"]
    climbed = f", {rung['micro_rows']} rows{' and recomputation' if rung['recompute'] else ''}"
    return told + (climbed if memory["climbed"] else "")


def _classical_bytes(training: Mapping[str, Any], parameters: int, rung: Mapping[str, Any]) -> int:
    """By the classical formula, of a GPT on its rung."""
    activations_bytes = classical_activations_bytes(
        tokens=training["data"]["sequence_length"],
        rows=rung["micro_rows"],
        width=training["model"]["width"],
        layers=training["model"]["layers"],
        recompute=rung["recompute"],
    )
    return classical_bytes(parameters, activations_bytes)


def _money(plan: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Energy and cost, as far as they can be foretold."""
    rates = Rates(currency=plan["currency"])
    if plan["energy_kwh"] is not None:
        yield "energy", f"about {number(plan['energy_kwh'])} kWh at {plan['card_watts']:,.0f} W a card"
    if plan["cost"] is not None:
        per_hour = rates.money(plan["price_per_card_hour"])
        yield "cost", f"about {rates.money(plan['cost'])} at {per_hour} a card-hour"
    elif plan["price_per_card_hour"] is None and plan["priced"]:
        yield "cost", "by the energy that the cards measure; power.box_watts in a node file would foretell it"
    if plan["cost_limit"] is not None:
        yield "cost limit", rates.money(plan["cost_limit"])


def flops_in_words(value: float) -> str:
    """`3.2 PFLOP`."""
    for scale, unit in ((1e18, "EFLOP"), (1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g} FLOP"
