"""Everything that is measured of a machine's cards, each alone and each pair, kept beside what `card_speed` keeps."""

import platform
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from .apart import measure_apart
from .cards import Card
from .measurements import Measurement, keep_measurement, measurements_file, read_measurements, torch_version
from .speed import LIMIT_SECONDS as MATMUL_SECONDS
from .speed import arguments, visible

LIMIT_SECONDS = {
    "matmul": MATMUL_SECONDS,
    "memory": 60.0,
    "transfer": 60.0,
    "peer_copy": 60.0,
    "all_reduce": 120.0,
}
"""How long each measurement may take. All end in 20 s on an idle machine: what reaches its limit hangs."""

CARD_PARTS = ("memory", "matmul", "transfer")
PAIR_PARTS = ("peer_copy", "all_reduce")


@dataclass(frozen=True)
class CardBench:
    """What was measured of a card, by part; of CPU cards that are alike, `cards` has all, and one was measured."""

    cards: tuple[Card, ...]
    measurements: dict[str, Measurement]


@dataclass(frozen=True)
class PairBench:
    """What was measured between the two cards of each of `pairs`: one pair, or all that are alike."""

    pairs: tuple[tuple[Card, Card], ...]
    measurements: dict[str, Measurement]


@dataclass(frozen=True)
class Bench:
    """What was measured of a machine."""

    machine: str
    torch_version: str
    cards: tuple[CardBench, ...]
    pairs: tuple[PairBench, ...]


Progress = Callable[[str, int, int], None]
"""Told of each measurement before it begins: its words, its number from 1, and how many there are."""


def bench(cards: Sequence[Card], cache: Path, progress: Progress, *, again: bool = False) -> Bench:
    """Measure what is not yet measured of these cards and their pairs, or all of it `again`.

    A measurement that hangs is killed at its limit and kept as such, and the next one begins; what hung, failed or
    arrived changed is measured anew by the next call. Nothing else should run on the cards: hold their locks.
    """
    todo = [
        (group, part)
        for group in (*_alike(cards), *_alike_pairs(cards))
        for part in (CARD_PARTS if len(group[0]) == 1 else PAIR_PARTS)
        if _applies(part, group[0])
        if again or not _is_measured(read_measurements(measurements_file(cache, *group[0])).get(part))
    ]
    for number, (group, part) in enumerate(todo, 1):
        where = " and ".join(f"{card.name} ({card.index})" for card in group[0])
        progress(f"{where}: {part.replace('_', ' ')}", number, len(todo))
        for name, found in _measure(part, group[0]):
            keep_measurement(measurements_file(cache, *group[0]), name, found)
    return read_bench(cards, cache)


def read_bench(cards: Sequence[Card], cache: Path) -> Bench:
    """What is kept of earlier measurements of these cards; nothing is measured."""

    def kept(group: Sequence[Card]) -> dict[str, Measurement]:
        return read_measurements(measurements_file(cache, *group))

    return Bench(
        platform.node(),
        torch_version(),
        tuple(CardBench(tuple(card for (card,) in group), kept(group[0])) for group in _alike(cards)),
        tuple(PairBench(tuple((a, b) for a, b in group), kept(group[0])) for group in _alike_pairs(cards)),
    )


def _measure(part: str, cards: Sequence[Card]) -> Iterator[tuple[str, Measurement]]:
    """The measurement by its name; after an all-reduce between GPUs that did not go well, also one without P2P."""
    found = _measure_one(part, cards, visible(*cards))
    yield part, found
    if part == "all_reduce" and cards[0].kind == "cuda" and not _is_measured(found):
        environment = {**visible(*cards), "NCCL_P2P_DISABLE": "1"}
        yield "all_reduce_without_p2p", _measure_one(part, cards, environment)


def _measure_one(part: str, cards: Sequence[Card], environment: dict[str, str]) -> Measurement:
    limit_seconds = LIMIT_SECONDS[part]
    told = arguments(min(cards, key=lambda card: card.memory_bytes))
    if part != "all_reduce":
        return _checked(measure_apart(part, [told], environment, limit_seconds))
    # Both processes are on this machine: they meet in a file and talk over the loopback, whatever its network is.
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    network = {"GLOO_SOCKET_IFNAME": loopback, "NCCL_SOCKET_IFNAME": loopback}
    with tempfile.TemporaryDirectory(prefix="rigsweep-") as folder:
        meeting = {"meeting_file": str(Path(folder) / "meeting"), "limit_seconds": limit_seconds}
        workers: list[dict[str, Any]] = [{**told, "rank": rank, **meeting} for rank in range(2)]
        return _checked(measure_apart(part, workers, {**network, **environment}, limit_seconds))


def _checked(found: Measurement) -> Measurement:
    """The measurement, `wrong` where words arrived changed."""
    reasons = []
    for way in ("forward_", "backward_", ""):
        if wrong := found.values.get(f"{way}wrong_words"):
            total = found.values.get(f"{way}words")
            reasons.append(
                f"{way.replace('_', ': ')}{wrong:,}{f' of {total:,}' if total else ''} words arrived changed"
            )
    return replace(found, state="wrong", reason="; ".join(reasons)) if reasons else found


def _applies(part: str, cards: Sequence[Card]) -> bool:
    return part != "transfer" or cards[0].kind == "cuda"  # a CPU card's memory is the host's


def _is_measured(found: Measurement | None) -> bool:
    return found is not None and found.state == "measured"


def _alike(cards: Sequence[Card]) -> list[list[tuple[Card, ...]]]:
    """Each card, with those that share its measurements."""
    return _by_file([(card,) for card in cards])


def _alike_pairs(cards: Sequence[Card]) -> list[list[tuple[Card, ...]]]:
    """Each pair of cards, with those that share its measurements."""
    return _by_file(list(combinations(cards, 2)))


def _by_file(groups: Sequence[tuple[Card, ...]]) -> list[list[tuple[Card, ...]]]:
    alike: dict[str, list[tuple[Card, ...]]] = {}
    for group in groups:
        alike.setdefault(measurements_file(Path(), *group).name, []).append(group)
    return list(alike.values())
