"""`rigsweep plan` for a sweep that only samples: what is drawn, and the time it takes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cluster.cards import describe, find_cards
from ..cluster.node_settings import Node
from ..cluster.speed import card_speed, specified_speed
from ..trainables import registry
from . import source
from .planning import EFFICIENCY, flops_in_words
from .sweep import Sweep
from .tables import count, duration, number, short


def plan_scoring(
    sweep: Sweep,
    cache: Path,
    preparing: Callable[[str, int, int], None],
    runs: Path,
    *,
    cards: int | None = None,
    threads: int | None = None,
    node: Node | None = None,
) -> dict[str, Any]:
    """The plan of a sweep `from` a run, as plain data; data is prepared if it is not yet."""
    node = node or Node()
    found = find_cards(use=cards, threads=threads, node=node)
    speed = specified_speed(found[0]) if node.hardware else card_speed(found[0], cache)
    name, training = sweep.settings.trainable, sweep.training({})
    data = registry.prepare(name, training, cache, preparing)
    per_second = speed.flops_per_second(speed.precision(training.precision)) * EFFICIENCY
    shapes: list[dict[str, Any]] = []
    for parameters in [sweep.space.base_parameters(), *sweep.space.corners()]:
        task = registry.task(name, sweep.training(parameters), cache)
        samples, flops = task.drawing() if task else (0, 0.0)
        shape = {"parameters": parameters, "samples": samples, "flops": flops, "seconds": flops / per_second}
        if shape not in shapes:
            shapes.append(shape)
    confirm, mean = sweep.settings.confirm, sum(shape["seconds"] for shape in shapes) / len(shapes)
    more = mean * confirm.best * confirm.samples / shapes[0]["samples"] if confirm else 0.0
    seconds = sweep.settings.trials * mean + more
    first = source.untrained(sweep, runs)
    return {
        "sweep": sweep.name,
        "question": sweep.settings.question,
        "trainable": name,
        "from": sweep.settings.from_,
        "trained_first": first.name if first else None,
        "cards": [card.name for card in found],
        "machine": describe(found),
        "data": data,
        "base": shapes[0],
        "shapes": shapes,
        "trials": sweep.settings.trials,
        "confirm": confirm.model_dump() if confirm else None,
        "efficiency": EFFICIENCY,
        "card_seconds": seconds,
        "wall_seconds": seconds / min(len(found), sweep.settings.trials),
    }


def scoring_table(plan: Mapping[str, Any]) -> RenderableType:
    """The plan for a person."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", justify="right")
    facts.add_column()
    facts.add_row("cards", plan["machine"])
    facts.add_row("from", plan["from"])
    if plan["trained_first"]:
        facts.add_row("", f"which is trained first: `rigsweep plan {plan['from']}` plans that")
    for key, value in plan["data"].items():
        facts.add_row(key, str(value))
    shapes = Table(box=None, pad_edge=False, header_style="dim")
    keys = list(plan["shapes"][0]["parameters"])
    for key in keys:
        shapes.add_column(short(key, keys), justify="right")
    for name in ("samples", "FLOPs", "time"):
        shapes.add_column(name, justify="right")
    for shape in plan["shapes"][:12]:
        own = [number(shape["parameters"].get(key)) for key in keys]
        known = [flops_in_words(shape["flops"]), duration(shape["seconds"])]
        shapes.add_row(*own, f"{shape['samples']:,}", *(known if shape["flops"] else ["not known", "not known"]))
    times = Table.grid(padding=(0, 2))
    times.add_column(style="dim", justify="right")
    times.add_column()
    times.add_row("trials", str(plan["trials"]))
    if confirm := plan["confirm"]:
        times.add_row("then", f"the best {confirm['best']} again, by {count(confirm['samples'])} samples each")
    times.add_row("card time", duration(plan["card_seconds"]))
    times.add_row("wall time", f"about {duration(plan['wall_seconds'])} on {plan['machine']}, start-up aside")
    note = f"times are of the network alone, for {plan['efficiency']:.0%} of the card's speed"
    title = Text.assemble((plan["sweep"], "bold"), f"  {plan['question']}")
    return Group(title, facts, Text(), shapes, Text(), times, Text(note, style="dim"))
