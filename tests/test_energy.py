"""Energy of cards, through a module that stands where NVML's is: what is counted, and what cannot be."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rigsweep.cluster.cards import Card
from rigsweep.cluster.energy import EnergyMeter, Neighbours, assumed_watts, can_measure
from rigsweep.cluster.node_settings import Power


class NVMLError(Exception):
    """As `pynvml.NVMLError`."""


class NotSupported(NVMLError):
    """As `pynvml.NVMLError_NotSupported`."""


class Nvml(SimpleNamespace):
    """The functions of `pynvml` that energy needs, over cards by their UUIDs."""

    NVMLError, NVMLError_NotSupported = NVMLError, NotSupported

    def __init__(self, **cards: dict[str, Any]):
        super().__init__(cards={name.replace("_", "-"): card for name, card in cards.items()})

    def nvmlInit(self) -> None:
        if not self.cards:
            raise NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> dict[str, Any]:
        if uuid not in self.cards:
            raise NVMLError("Not Found")
        return self.cards[uuid]

    def _read(self, handle: dict[str, Any], name: str) -> int:
        if handle.get("lost"):
            raise NVMLError("GPU is lost")
        if name not in handle:
            raise NotSupported("Not Supported")
        return handle[name]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: dict[str, Any]) -> int:
        return self._read(handle, "millijoules")

    def nvmlDeviceGetPowerUsage(self, handle: dict[str, Any]) -> int:
        return self._read(handle, "milliwatts")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    """Two cards that count their energy."""
    fake = Nvml(GPU_0={"millijoules": 5_000}, GPU_1={"millijoules": 70_000})
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def gpu(identity: str = "GPU-0", name: str = "NVIDIA GeForce RTX 3090") -> Card:
    return Card(0, "cuda", name, identity, 24 * 2**30, threads=1)


CPU = Card(0, "cpu", "CPU, 1 thread", "cpu-0", 2**30, threads=1)


def test_the_counter_of_exactly_the_asked_for_cards_counts_from_when_the_meter_was_made(nvml: Nvml) -> None:
    one, both = EnergyMeter(["GPU-1"]), EnergyMeter(["GPU-0", "GPU-1"])
    assert (one.read(), both.read()) == (0.0, 0.0)
    nvml.cards["GPU-0"]["millijoules"] += 1_000
    nvml.cards["GPU-1"]["millijoules"] += 250_000
    assert (one.read(), both.read()) == (250.0, 251.0)
    assert one.read() == 250.0, "it is read again without anything more"


def test_without_a_counter_the_power_is_integrated(nvml: Nvml) -> None:
    clock = Clock()
    nvml.cards["GPU-0"] = {"milliwatts": 100_000}
    meter = EnergyMeter(["GPU-0"], clock)
    clock.now += 2
    nvml.cards["GPU-0"]["milliwatts"] = 300_000
    assert meter.read() == 400.0
    clock.now += 1
    assert meter.read() == 700.0


def test_a_shared_card_is_charged_by_the_share_of_the_time_at_which_it_was_drawn(nvml: Nvml) -> None:
    meter = EnergyMeter(["GPU-0"])
    nvml.cards["GPU-0"]["millijoules"] += 10_000
    assert meter.read() == 10.0
    meter.share = 0.25
    nvml.cards["GPU-0"]["millijoules"] += 10_000
    assert meter.read() == 12.5


def test_a_card_that_disappears_keeps_what_it_had_drawn(nvml: Nvml, caplog: pytest.LogCaptureFixture) -> None:
    meter = EnergyMeter(["GPU-0", "GPU-1"])
    nvml.cards["GPU-0"]["millijoules"] += 3_000
    assert meter.read() == 3.0
    nvml.cards["GPU-0"]["lost"] = True
    nvml.cards["GPU-1"]["millijoules"] += 1_000
    assert (meter.read(), meter.read()) == (4.0, 4.0)
    assert [record.getMessage() for record in caplog.records] == [
        "the energy of card GPU-0 is not known from here on: GPU is lost"
    ]


def test_a_driver_that_was_loaded_anew_takes_nothing_back(nvml: Nvml) -> None:
    meter = EnergyMeter(["GPU-1"])
    nvml.cards["GPU-1"]["millijoules"] = 500
    assert meter.read() == 0.0
    nvml.cards["GPU-1"]["millijoules"] = 1_500
    assert meter.read() == 1.0


@pytest.mark.parametrize("fake", [None, Nvml(), Nvml(GPU_0={}), Nvml(GPU_7={"millijoules": 1})])
def test_what_cannot_be_measured_is_not_known(fake: Nvml | None, monkeypatch: pytest.MonkeyPatch) -> None:
    # No module, no driver, neither counter nor power, no such card.
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert EnergyMeter(["GPU-0"]).read() is None
    assert not can_measure([gpu()])


def test_one_card_that_cannot_be_measured_makes_the_sum_unknown(nvml: Nvml) -> None:
    nvml.cards["GPU-1"] = {}
    assert EnergyMeter(["GPU-0", "GPU-1"]).read() is None


def test_a_cpu_has_no_counter(nvml: Nvml) -> None:
    assert EnergyMeter([]).read() is None
    assert not can_measure([CPU])
    assert can_measure([gpu()])


def test_what_a_card_is_taken_to_draw_is_what_was_told_of_the_machine() -> None:
    assert assumed_watts(gpu(), Power(box_watts=1000, cpu_watts=65), 2) == 500
    assert assumed_watts(gpu(), Power(estimate=True, cpu_watts=65), 2) == 415
    assert assumed_watts(gpu(), Power(cpu_watts=65), 2) is None
    assert assumed_watts(gpu(name="Unheard of"), Power(estimate=True), 2) is None
    assert assumed_watts(CPU, Power(box_watts=60), 2) == 30
    assert assumed_watts(CPU, Power(cpu_watts=15), 2) == 15
    assert assumed_watts(CPU, Power(), 2) is None


def test_processes_on_one_card_share_it_by_how_busy_each_is(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (Neighbours("GPU-0", tmp_path, process, clock) for process in (1, 2))
    alone = Neighbours("GPU-1", tmp_path, 3, clock)
    assert (one.share(0.0), alone.share(0.0)) == (1.0, 1.0)
    assert (other.share(0.0), one.share(0.0)) == (0.5, 0.5)
    clock.now += 1
    other.share(0.25)  # a quarter of the second
    assert one.share(0.75) == 0.75
    clock.now += 1
    assert one.share(1.5) == 0.75, "the other has not been heard since"
    other.close()
    assert one.share(1.5) == 1.0
    assert alone.share(0.0) == 1.0


def test_a_process_that_was_killed_has_no_share_any_more(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (Neighbours("GPU-0", tmp_path, process, clock) for process in (1, 2))
    other.share(0.0)
    assert one.share(0.0) == 0.5
    clock.now += 60
    assert one.share(60.0) == 1.0


def test_neighbours_that_all_wait_share_evenly(tmp_path: Path) -> None:
    clock = Clock()
    one, other = (Neighbours("GPU-0", tmp_path, process, clock) for process in (1, 2))
    for _ in range(2):
        clock.now += 1
        shares = other.share(0.0), one.share(0.0)
    assert shares[1] == 0.5
