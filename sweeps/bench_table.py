"""`rigsweep bench`: what was measured of this machine's cards, beside their makers' figures."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..cluster.bench import Bench, CardBench, PairBench
from ..cluster.cards import Card
from ..cluster.measurements import Measurement
from ..cluster.specifications import Specification

_SETTLES = 0.7
"""The least share of the peak at which a measured product says which peak a card has."""

Row = tuple[str, float | None, float | None, str]
"""What, as measured and as specified in FLOP/s or bytes per second, and the unit: `FLOP/s` or `B/s`."""


def bench_data(bench: Bench) -> dict[str, Any]:
    """All of it as plain data for programs; units stand in the names."""
    return {
        "machine": bench.machine,
        "torch_version": bench.torch_version,
        "cards": [
            {
                **asdict(card),
                "specification": asdict(card.specification) if card.specification else None,
                "measurements": {part: asdict(found) for part, found in one.measurements.items()},
                "note": settled(card, one.measurements),
            }
            for one in bench.cards
            for card in one.cards
        ],
        "pairs": [
            {
                "cards": [a.index, b.index],
                "measurements": {part: asdict(found) for part, found in one.measurements.items()},
            }
            for one in bench.pairs
            for a, b in one.pairs
        ],
    }


def bench_table(bench: Bench) -> RenderableType:
    """All of it for a person: a table, and below it what is known of each kind of card."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for name in ("measured", "specification", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    findings: list[Text] = []
    notes: dict[str, None] = {}  # an ordered set: cards of one kind are told of once
    for one in bench.cards:
        card = one.cards[0]
        where = f"{card.name} ({', '.join(str(alike.index) for alike in one.cards)})"
        table.add_row(Text(where, style="bold"))
        for row in _card_rows(one):
            table.add_row(*_cells(row))
        findings += _findings(where, one.measurements)
        notes |= dict.fromkeys(filter(None, (_facts(card), settled(card, one.measurements))))
    for one in bench.pairs:
        where = "cards " + ", ".join(f"{a.index} and {b.index}" for a, b in one.pairs)
        table.add_row(Text(where, style="bold"))
        for row in _pair_rows(one):
            table.add_row(*_cells(row))
        findings += _findings(where, one.measurements)
    notes["kept for this machine, its cards and this torch; measure anew: rigsweep bench --again"] = None
    title = Text.assemble((bench.machine, "bold"), f"  torch {bench.torch_version}")
    return Group(title, table, Text(), *findings, *(Text(note, style="dim") for note in notes))


def settled(card: Card, measurements: Mapping[str, Measurement]) -> str | None:
    """Which of the peaks quoted for a card is which, and whether the measured product settles it; one line."""
    told = card.specification
    if told is None or told.peak_bf16_flops_per_second is None or not told.quoted:
        return None
    peak = told.peak_bf16_flops_per_second
    others = ", ".join(f"{quoted.flops_per_second / 1e12:.0f} is {quoted.means}" for quoted in told.quoted)
    said = f"{told.name}: dense bf16 with fp32 accumulation is {peak / 1e12:.1f} TFLOP/s; {others}"
    products = measurements.get("matmul")
    if products is None or products.state != "measured":
        return f"{said}; not measured"
    best = max(products.values["bf16_flops_per_second"].values())
    reached = f"{said}; measured {best / 1e12:.1f}"
    if best < _SETTLES * peak:
        return f"{reached}, which settles nothing: look at power limit, clocks and what else runs on the card"
    above = min((one.flops_per_second for one in told.quoted if one.flops_per_second > peak), default=2 * peak)
    # Boost clocks exceed the specification's by some per cent, never by half.
    return f"{reached}, which settles it" if best < (peak + above) / 2 else f"{reached}, more than the table knows"


def _card_rows(one: CardBench) -> Iterator[Row]:
    told, card = one.cards[0].specification, one.cards[0]
    if copied := _values(one.measurements, "memory"):
        bandwidth = told.bandwidth_bytes_per_second if told else None
        yield "memory copy, read and write", copied["bytes_per_second"], bandwidth, "B/s"
    if products := _values(one.measurements, "matmul"):
        # "fp32" on a GPU is TF32, where its tensor cores have it.
        fp32 = "TF32" if told and told.peak_tf32_flops_per_second else "fp32"
        peaks = {"bf16": _peak(told, "bf16"), "fp32": _peak(told, "tf32"), "fp16_accumulation": _fp16(told)}
        names = {"bf16": "bf16", "fp32": fp32, "fp16_accumulation": "fp16, fp16 accumulation"}
        for precision, name in names.items():
            for size, speed in products.get(f"{precision}_flops_per_second", {}).items():
                yield f"{name} matrix product, {size}", speed, peaks[precision], "FLOP/s"
    moved = _values(one.measurements, "transfer")
    for way in ("pinned", "pageable"):
        if moved or card.kind == "cpu":
            yield f"host to device, {way}", moved.get(f"{way}_bytes_per_second"), None, "B/s"


def _pair_rows(one: PairBench) -> Iterator[Row]:
    # Of pairs that are alike, one stands for all.
    a, b = one.pairs[0]
    if copied := _values(one.measurements, "peer_copy"):
        for way, origin, target in (("forward", a, b), ("backward", b, a)):
            arrived = "changed" if copied[f"{way}_wrong_words"] else "right"
            label = f"peer copy {origin.index} to {target.index}, arrives {arrived}"
            yield label, copied[f"{way}_bytes_per_second"], None, "B/s"
    for part, how in (("all_reduce", ""), ("all_reduce_without_p2p", ", NCCL_P2P_DISABLE=1")):
        if part == "all_reduce_without_p2p" and _measured(one.measurements.get("all_reduce")):
            continue  # of an earlier day, when the all-reduce did not go well
        if summed := _values(one.measurements, part):
            label = f"all-reduce, {summed['backend']}, bus bandwidth{how}"
            yield label, summed["bus_bytes_per_second"], None, "B/s"


def _findings(where: str, measurements: Mapping[str, Measurement]) -> Iterator[Text]:
    """What did not go well, a line each, and what helps."""
    together = _measured(measurements.get("all_reduce"))
    for part, found in measurements.items():
        if not _measured(found) and not (part == "all_reduce_without_p2p" and together):
            yield Text(f"{where}: {part.replace('_', ' ')} {found.state}: {found.reason}", style="red")
    if _measured(measurements.get("all_reduce_without_p2p")) and not together:
        yield Text(f"{where}: the all-reduce goes well without P2P: set NCCL_P2P_DISABLE=1", style="yellow")


def _cells(row: Row) -> tuple[str, str, str, str]:
    what, measured, specified, unit = row
    share = f"{measured / specified:.0%}" if measured and specified else "–"
    return f"  {what}", _amount(measured, unit), _amount(specified, unit), share


def _amount(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    for scale, prefix in ((1e12, "T"), (1e9, "G")):
        if value >= scale and not (unit == "B/s" and prefix == "T"):
            return f"{value / scale:,.1f} {prefix}{unit}"
    return f"{value / 1e6:,.1f} M{unit}"


def _facts(card: Card) -> str | None:
    told = card.specification
    if told is None:
        unknown = f"{card.name}: its maker's figures are not known here, so no share of a peak is told"
        return unknown if card.kind == "cuda" else None
    capability, torch, cuda = (
        ".".join(map(str, version)) for version in (told.compute_capability, told.first_torch, told.first_cuda)
    )
    return (
        f"{told.name}: {told.memory_bytes / 2**30:.0f} GiB, {told.board_watts:.0f} W, compute capability {capability}, "
        f"from torch {torch} and CUDA {cuda} on ({told.source})"
    )


def _peak(told: Specification | None, precision: str) -> float | None:
    return getattr(told, f"peak_{precision}_flops_per_second") if told else None


def _fp16(told: Specification | None) -> float | None:
    """The peak with fp16 accumulation, where the table has it."""
    means = "fp16 accumulation"
    quoted = told.quoted if told else ()
    return next((one.flops_per_second for one in quoted if means in one.means and "sparsity" not in one.means), None)


def _values(measurements: Mapping[str, Measurement], part: str) -> Mapping[str, Any]:
    """What was measured; empty where it was not, or hung."""
    found = measurements.get(part)
    return found.values if found is not None and found.state in ("measured", "wrong") else {}


def _measured(found: Measurement | None) -> bool:
    return found is not None and found.state == "measured"
