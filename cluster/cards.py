"""Which cards this machine has.

A card is a GPU or, on a machine without one, `threads` CPU threads. A CPU is split into two cards by default,
so that what runs on a two-card box runs here in the same way.
"""

import csv
import os
import shutil
import subprocess
from dataclasses import dataclass, replace

import psutil

from .errors import MachineError
from .node_settings import Hardware, Node
from .specifications import Specification, specification_of


@dataclass(frozen=True)
class Card:
    """One card.

    `memory_bytes` of a CPU card is its share of the machine's memory. `identity` names the card for its lock
    file: the UUID of a GPU, the place of a CPU card.
    """

    index: int
    kind: str  # "cuda" or "cpu"
    name: str
    identity: str
    memory_bytes: int
    threads: int
    limited: bool = False
    """Whether `memory_bytes` is a limit that was set, less than the card has."""

    @property
    def specification(self) -> Specification | None:
        """The maker's figures for it; None where they are not known, and all must be measured."""
        return specification_of(self.name, self.memory_bytes)

    @property
    def peak_bf16_flops_per_second(self) -> float | None:
        """Dense bf16 peak with fp32 accumulation by the maker's figures; None where it must be measured."""
        return self.specification.peak_bf16_flops_per_second if self.specification else None


def find_cards(*, use: int | None = None, threads: int | None = None, node: Node | None = None) -> list[Card]:
    """The cards to use: every GPU, else CPU cards of `threads` threads each (half of the cores by default).

    `node` says which of them, how many threads and how much memory; `use` takes the first so many, and `threads`
    goes before the node's. Where the node describes a machine that is not here, its cards, to plan with. Raises
    `MachineError` where there are fewer than asked for.
    """
    node = node or Node()
    wanted = use if node.cards is None else len(node.cards)
    cards = _planned(node.hardware) if node.hardware else _gpus() or _cpu_cards(threads or node.threads, wanted)
    if node.cards is not None:
        cards = _chosen(cards, node.cards)
    if use is not None:
        if use > len(cards):
            where = "this machine has" if node.cards is None else "the node file allows"
            raise MachineError(f"{use} cards asked for, but {where} {len(cards)} ({describe(cards)})")
        cards = cards[:use]
    return [_limited(card, node.memory) for card in cards]


def _chosen(cards: list[Card], indexes: list[int]) -> list[Card]:
    by_index = {card.index: card for card in cards}
    missing = [str(index) for index in indexes if index not in by_index]
    if missing:
        there = ", ".join(map(str, by_index))
        raise MachineError(
            f"the node file asks for card {', '.join(missing)}, but this machine has {there} ({describe(cards)}); "
            "change its `cards`"
        )
    return [by_index[index] for index in indexes]


def _limited(card: Card, memory_bytes: int | None) -> Card:
    if memory_bytes is None or memory_bytes >= card.memory_bytes:
        return card
    return replace(card, memory_bytes=memory_bytes, limited=True)


def _planned(hardware: Hardware) -> list[Card]:
    """The cards of a machine that is not here, by their specification."""
    found = specification_of(hardware.card, hardware.memory or 0)
    if found is None:
        raise MachineError(f"the node file's hardware: no specification of {hardware.card} is known")
    return [Card(i, "cuda", found.name, f"planned-{i}", found.memory_bytes, threads=1) for i in range(hardware.count)]


def count_in_machine(card: Card) -> int:
    """How many cards like this one the machine has, used or not."""
    return max(1, len(_gpus()) if card.kind == "cuda" else _cores() // card.threads)


def gibibytes(count: int) -> str:
    """`24 GiB`, `0.28 GiB`."""
    return f"{count / 2**30:.0f} GiB" if count >= 10 * 2**30 else f"{count / 2**30:.2g} GiB"


def describe(cards: list[Card]) -> str:
    """The cards in words, for one line: `2 x RTX 3090 (24 GiB)`."""
    kinds: dict[str, int] = {}
    for card in cards:
        label = f"{card.name} ({gibibytes(card.memory_bytes)})"
        kinds[label] = kinds.get(label, 0) + 1
    return ", ".join(f"{count} × {label}" for label, count in kinds.items())


def _gpus() -> list[Card]:
    # nvidia-smi rather than torch.cuda: the driver process of a sweep must never open a CUDA context.
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,memory.total", "--format=csv,noheader,nounits"]
    answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)  # noqa: S603
    if answer.returncode:
        return []
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    found = []
    for index, uuid, name, mebibytes in csv.reader(answer.stdout.splitlines(), skipinitialspace=True):
        if allowed is None or {index, uuid} & set(allowed.split(",")):
            found.append(Card(int(index), "cuda", name, uuid, int(mebibytes) * 2**20, threads=1))
    return found


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_cards(threads: int | None, use: int | None) -> list[Card]:
    cores = _cores()
    if threads is None:
        threads = max(1, cores // (use or 2))
    if threads > cores:
        raise MachineError(f"{threads} threads a card asked for, but this machine has {cores} cores")
    count = cores // threads
    memory_bytes = psutil.virtual_memory().total // count
    name = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    return [Card(i, "cpu", name, f"cpu-{i}", memory_bytes, threads) for i in range(count)]
