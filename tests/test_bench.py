"""Measurements of cards: in processes of their own, kept, and honest about what hung or arrived changed."""

import json
import sys
from pathlib import Path

import psutil
import pytest

from rigsweep.cluster import bench as benching
from rigsweep.cluster import measurements as kept
from rigsweep.cluster import speed as speeds
from rigsweep.cluster.apart import run_apart
from rigsweep.cluster.bench import bench, read_bench
from rigsweep.cluster.cards import Card
from rigsweep.cluster.errors import MachineError
from rigsweep.cluster.measurements import Measurement, keep_measurement, measurements_file, read_measurements
from rigsweep.cluster.measuring import peer_copy
from rigsweep.cluster.speed import Speed, card_speed

PRODUCTS = {"bf16_flops_per_second": {"8": 3e9, "16": 4e9}, "fp32_flops_per_second": {"8": 2e9}, "bf16_pays": False}


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_was_measured_is_served_without_measuring_again(
    cards: list[Card], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_measurement(measurements_file(tmp_path, cards[0]), "matmul", Measurement("measured", PRODUCTS))
    monkeypatch.setattr(speeds, "measure_matmul", lambda card: pytest.fail("it was measured"))
    assert card_speed(cards[0], tmp_path) == Speed(4e9, 2e9, False)


@pytest.mark.parametrize("torn", ["", "{", "[]", '{"matmul": {"state": "measured", "values": {}}}', '{"matmul": 3}'])
def test_a_torn_file_is_measured_anew(
    torn: str, cards: list[Card], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = measurements_file(tmp_path, cards[0])
    file.parent.mkdir(parents=True)
    file.write_text(torn)
    monkeypatch.setattr(speeds, "measure_matmul", lambda card: Measurement("measured", PRODUCTS))
    assert card_speed(cards[0], tmp_path) == Speed(4e9, 2e9, False)
    assert read_measurements(file)["matmul"].state == "measured"


def test_another_torch_machine_or_gpu_has_measurements_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (Card(i, "cuda", "NVIDIA GeForce RTX 3090", f"GPU-{i}", 24 * 2**30, 1) for i in range(2))
    files = {measurements_file(tmp_path, card) for card in (one, other)} | {measurements_file(tmp_path, one, other)}
    monkeypatch.setattr(kept, "torch_version", lambda: "9.9.0")
    files.add(measurements_file(tmp_path, one))
    monkeypatch.setattr(kept.platform, "node", lambda: "another")
    files.add(measurements_file(tmp_path, one))
    assert len(files) == 5


def test_keeping_one_measurement_leaves_the_others(tmp_path: Path) -> None:
    file = tmp_path / "speed" / "card.json"
    keep_measurement(file, "memory", Measurement("measured", {"bytes_per_second": 1e9}))
    keep_measurement(file, "matmul", Measurement("hung", {}, "it did not end"))
    assert {part: found.state for part, found in read_measurements(file).items()} == {
        "memory": "measured",
        "matmul": "hung",
    }
    assert [path.name for path in file.parent.iterdir()] == ["card.json"]


def test_a_measurement_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        "import os, pathlib, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(started)!r}).write_text(f'{{os.getpid()}} {{child.pid}}');"
        "time.sleep(600)"
    )
    found = run_apart([python(code)], {}, 3)
    assert (found.state, found.reason) == ("hung", "it did not end within 3 s and was killed")
    for process in map(int, started.read_text().split()):
        assert not psutil.pid_exists(process) or psutil.Process(process).status() == psutil.STATUS_ZOMBIE


def test_the_other_of_two_processes_is_not_waited_for_when_one_fails() -> None:
    found = run_apart([python("import time; time.sleep(600)"), python("raise ValueError('no such card')")], {}, 300)
    assert (found.state, found.reason) == ("failed", "its process ended with code 1: ValueError: no such card")


def test_an_answer_is_the_last_line_and_none_is_a_failure() -> None:
    assert run_apart([python("print('hello'); print('{\"a\": 1}')")], {}, 60).values == {"a": 1}
    assert run_apart([python("print('hello')")], {}, 60).reason == "its process ended without an answer"
    assert run_apart([python("import os; os.kill(os.getpid(), 9)")], {}, 60).state == "failed"


def test_a_peer_copy_that_changes_a_word_is_found() -> None:
    rounds = []

    def corrupt(target, source) -> None:
        target.copy_(source)
        rounds.append(1)
        if len(rounds) == 3:  # only now and then, and only one way
            target[17] ^= 1

    told = {"kind": "cpu", "threads": 1, "memory_bytes": 2**20}
    whole, changed = (
        Measurement("measured", peer_copy(**told)),
        Measurement("measured", peer_copy(**told, copy=corrupt)),
    )
    assert benching._checked(whole) == whole
    found = benching._checked(changed)
    assert found.state == "wrong"
    assert found.reason == "forward: 1 of 65,536 words arrived changed"


def test_a_peer_copy_that_does_not_arrive_is_found() -> None:
    lost = peer_copy("cpu", 1, 2**20, copy=lambda target, source: None)
    assert lost["forward_wrong_words"] == lost["forward_words"]


def test_a_hang_is_a_finding_and_the_rest_is_measured_and_kept(
    cards: list[Card], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(benching.LIMIT_SECONDS, "memory", 0.01)
    said: list[str] = []
    found = bench(cards, tmp_path, lambda words, number, total: said.append(f"{number}/{total} {words}"))
    assert said == [
        "1/4 CPU, 1 thread (0): memory",
        "2/4 CPU, 1 thread (0): matmul",
        "3/4 CPU, 1 thread (0) and CPU, 1 thread (1): peer copy",
        "4/4 CPU, 1 thread (0) and CPU, 1 thread (1): all reduce",
    ]
    (card,), (pair,) = found.cards, found.pairs
    assert card.cards == tuple(cards), "cards that are alike are measured once"
    assert (card.measurements["memory"].state, card.measurements["matmul"].state) == ("hung", "measured")
    assert {part: one.state for part, one in pair.measurements.items()} == {
        "peer_copy": "measured",
        "all_reduce": "measured",
    }
    assert pair.measurements["all_reduce"].values["bus_bytes_per_second"] > 0
    assert read_bench(cards, tmp_path) == found

    measured = card.measurements["matmul"].values
    monkeypatch.setattr(speeds, "measure_matmul", lambda card: pytest.fail("it was measured"))
    assert card_speed(cards[0], tmp_path).bf16_flops_per_second == max(measured["bf16_flops_per_second"].values())

    monkeypatch.undo()
    said.clear()
    bench(cards, tmp_path, lambda words, number, total: said.append(words))
    assert said == ["CPU, 1 thread (0): memory"], "only what hung is measured anew"
    bench(cards, tmp_path, lambda words, number, total: pytest.fail("all is measured"))


def test_a_speed_that_cannot_be_measured_says_why(
    cards: list[Card], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speeds, "measure_matmul", lambda card: Measurement("failed", {}, "no kernel image"))
    with pytest.raises(MachineError, match="no kernel image; see `rigsweep bench`"):
        card_speed(cards[0], tmp_path)
    assert json.loads(measurements_file(tmp_path, cards[0]).read_text())["matmul"]["state"] == "failed"
