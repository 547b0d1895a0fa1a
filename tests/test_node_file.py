"""The node file: what it may say, what is refused, and the cards, prices and folders that follow from it."""

import io
import os
from pathlib import Path
from typing import Any

import pytest

from rigsweep.cluster import cards as cards_module
from rigsweep.cluster.cards import Card, find_cards
from rigsweep.cluster.errors import MachineError
from rigsweep.cluster.local_ray import set_environment
from rigsweep.cluster.node_settings import Hardware, Node, Prices, price_per_card_hour
from rigsweep.cluster.speed import specified_speed
from rigsweep.sweeps.cli import _runs
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.node_file import (
    READY_NODES,
    THIS_MACHINE,
    known_cards,
    node_schema,
    read_node,
    refuse_if_elsewhere,
)
from rigsweep.sweeps.planning import plan_sweep, plan_table
from rigsweep.sweeps.running import cache_folder
from rigsweep.sweeps.sweep import load

FULL = """
cards: [0, 1]
threads: 1
memory: 2GB
prices: {kwh: 0.25, card_hour: 0.2, currency: £}
power: {box_watts: 1000, cpu_watts: 65, estimate: true}
nccl: {NCCL_P2P_DISABLE: 1, NCCL_SOCKET_IFNAME: eth0}
folders: {cache: ~/kept, runs: sweeps}
"""
TWO_3090 = [Card(i, "cuda", "NVIDIA GeForce RTX 3090", f"GPU-{i}", 24 * 2**30, threads=1) for i in range(2)]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def node_of(text: str) -> Node:
    Path("node.yaml").write_text(text, encoding="utf-8")
    return read_node("node.yaml")


def test_a_node_file_says_it_all() -> None:
    node = node_of(FULL)
    assert (node.cards, node.threads, node.memory) == ([0, 1], 1, 2_000_000_000)
    assert node.prices == Prices(kwh=0.25, card_hour=0.2, currency="£")
    assert (node.power.box_watts, node.power.cpu_watts, node.power.estimate) == (1000, 65, True)
    assert node.nccl == {"NCCL_P2P_DISABLE": "1", "NCCL_SOCKET_IFNAME": "eth0"}
    assert node.folders.runs == Path("sweeps")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prices: {kwh: -1}", "node.yaml:1: prices.kwh: allowed: at least 0, found -1"),
        ("prices:\n  card_hour: -0.1", "node.yaml:2: prices.card_hour: allowed: at least 0, found -0.1"),
        ("prices: {kwh: .inf}", "node.yaml:1: prices.kwh: a finite number is expected, found .inf"),
        ("price: {kwh: 1}", "node.yaml:1: price: no such key; did you mean prices?"),
        ("prices: {khw: 1}", "node.yaml:1: prices.khw: no such key; did you mean kwh?"),
        ("memory: 0", "node.yaml:1: memory: allowed: more than 0, found 0"),
        ("memory: 2h", "node.yaml:1: memory: is not a time, found 2h (h is hours)"),
        ("memory: much", "node.yaml:1: memory: allowed: a whole number, found much"),
        ("threads: 1GB", "node.yaml:1: threads: is not a size in bytes, found 1GB"),
        ("cards: [0, 0]", "node.yaml:1: cards: names a card twice: 0, 0"),
        ("power: {box_watts: 0}", "node.yaml:1: power.box_watts: allowed: more than 0, found 0"),
        (
            "\nhardware: {card: RTX 3090Ti}",
            "node.yaml:2: hardware.card: no such card in the card table, found RTX 3090Ti; did you mean RTX 3090 Ti?",
        ),
    ],
)
def test_a_mistake_is_one_line_with_its_place(text: str, message: str) -> None:
    with pytest.raises(WrongInput) as error:
        node_of(text)
    assert str(error.value) == message


def test_variables_that_are_not_nccls_are_refused() -> None:
    with pytest.raises(WrongInput, match=r"^node\.yaml:1: nccl\.PATH: .*NCCL_"):
        node_of("nccl: {PATH: /}")


def test_without_a_file_everything_is_as_it_was() -> None:
    assert read_node(None) == Node()


def test_this_machines_own_file_is_read_where_it_is_there() -> None:
    THIS_MACHINE.parent.mkdir()
    THIS_MACHINE.write_text("threads: 1\n")
    assert read_node(None).threads == 1
    assert read_node("two-3090").threads is None


def test_a_name_that_is_no_node_is_answered_with_the_nearest() -> None:
    with pytest.raises(WrongInput, match=r"^tow-3090: no such node file; did you mean two-3090\?$"):
        read_node("tow-3090")


@pytest.mark.parametrize("name", sorted(file.stem for file in READY_NODES.glob("*.yaml")))
def test_every_ready_node_is_valid(name: str) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    yaml = pytest.importorskip("yaml")
    read_node(name)
    told: Any = yaml.safe_load((READY_NODES / f"{name}.yaml").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(node_schema()).validate(told)


def test_the_schema_underlines_mistakes_and_takes_units() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(node_schema())
    assert validator.is_valid({"memory": "16GB", "nccl": {"NCCL_P2P_DISABLE": 1}})
    assert not validator.is_valid({"memroy": 1})
    assert not validator.is_valid({"hardware": {"card": "RTX 9090"}})


# Prices.


def test_the_reference_box_costs_an_eighth_of_a_pound_for_a_card_hour() -> None:
    node = read_node("two-3090")
    assert node.hardware == Hardware(card="RTX 3090", count=2)
    assert node.power.box_watts is not None
    assert price_per_card_hour(node.prices, node.power.box_watts / node.hardware.count) == 0.125


def test_a_price_of_a_card_hour_goes_before_that_of_energy() -> None:
    assert price_per_card_hour(Prices(kwh=0.25, card_hour=0.4), 500) == 0.4
    assert price_per_card_hour(Prices(card_hour=0.4), None) == 0.4
    assert price_per_card_hour(Prices(kwh=0.25), None) is None
    assert price_per_card_hour(Prices(), 500) is None


# Cards.


def test_the_node_chooses_the_cards_and_the_command_line_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards_module, "_gpus", lambda: TWO_3090)
    assert [card.index for card in find_cards(node=Node(cards=[1, 0]))] == [1, 0]
    assert [card.index for card in find_cards(use=1, node=Node(cards=[1, 0]))] == [1]
    with pytest.raises(MachineError, match=r"^2 cards asked for, but the node file allows 1 \(1 × NVIDIA .* 3090"):
        find_cards(use=2, node=Node(cards=[1]))
    with pytest.raises(MachineError, match=r"^the node file asks for card 2, but this machine has 0, 1 "):
        find_cards(node=Node(cards=[0, 2]))


def test_a_memory_limit_makes_a_card_smaller_never_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards_module, "_gpus", lambda: TWO_3090)
    limited, whole = find_cards(node=Node(memory=16 * 2**30)), find_cards(node=Node(memory=48 * 2**30))
    assert [(card.memory_bytes, card.limited) for card in limited] == [(16 * 2**30, True)] * 2
    assert [(card.memory_bytes, card.limited) for card in whole] == [(24 * 2**30, False)] * 2


def test_the_threads_of_a_cpu_card_are_the_nodes_unless_the_command_line_says_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cards_module, "_gpus", list)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    assert [card.threads for card in find_cards(node=Node(threads=2))] == [2, 2, 2, 2]
    assert [card.threads for card in find_cards(threads=8, node=Node(threads=2))] == [8]
    assert [card.index for card in find_cards(node=Node(threads=2, cards=[1, 3]))] == [1, 3]


def test_a_machine_that_is_not_here_has_cards_by_the_specification() -> None:
    found = find_cards(node=read_node("two-3090"))
    assert [(card.kind, card.name, card.memory_bytes) for card in found] == [("cuda", "RTX 3090", 24 * 2**30)] * 2
    assert specified_speed(found[0]).flops_per_second("bf16") == pytest.approx(71.2e12, rel=1e-3)


def test_a_card_that_is_sold_with_two_memories_is_told_by_them() -> None:
    for memory, found in ((None, 8), (16 * 10**9, 16), (8 * 10**9, 8)):
        node = Node(hardware=Hardware(card="RTX 4060 Ti", memory=memory))
        assert find_cards(node=node)[0].memory_bytes == found * 2**30


def test_every_known_card_has_a_peak_to_plan_with() -> None:
    for name in known_cards():
        card = find_cards(node=Node(hardware=Hardware(card=name)))[0]
        assert specified_speed(card).bf16_flops_per_second > 0


def test_nothing_runs_on_a_machine_that_is_not_here() -> None:
    with pytest.raises(WrongInput, match=r"^two-3090: describes a machine that is not here .*`rigsweep plan FILE --on"):
        refuse_if_elsewhere(read_node("two-3090"), "two-3090")
    refuse_if_elsewhere(Node(), None)


# Folders.


def test_the_environment_and_the_command_line_go_before_the_nodes_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    node = node_of(FULL)
    monkeypatch.setenv("RIGSWEEP_CACHE", "told")
    assert cache_folder(node) == Path("told")
    monkeypatch.delenv("RIGSWEEP_CACHE")
    assert cache_folder(node) == Path("~/kept").expanduser()
    assert _runs(Path("runs"), node) == Path("sweeps")
    assert _runs(Path("mine"), node) == Path("mine")
    assert _runs(Path("runs"), Node()) == Path("runs")


def test_nccls_variables_are_the_nodes_unless_they_are_set_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"NCCL_SOCKET_IFNAME": "lo"})
    set_environment(node_of(FULL).nccl)
    assert os.environ["NCCL_P2P_DISABLE"] == "1"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "lo"


# Planning.


def test_a_plan_for_a_machine_that_is_not_here_says_that_its_speed_is_not_measured(tmp_path: Path) -> None:
    from rich.console import Console

    sweep = tmp_path / "mine.yaml"
    sweep.write_text(
        "trainable: surface\nbase: {budget: {examples: 100k}, batch: {examples: 1k}}\n"
        "search: {model.width: {choices: [64, 96]}}\n"
    )
    plan = plan_sweep(load(str(sweep)), tmp_path, lambda *_: None, tmp_path / "runs", node=read_node("two-3090"))
    assert (plan["speed_from"], plan["cards"]) == ("specification", ["RTX 3090", "RTX 3090"])
    assert plan["base"]["precision"] == "bf16"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(plan_table(plan))
    assert "specification, not measured" in console.export_text()
