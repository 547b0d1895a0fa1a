"""`rigsweep bench` as a person and a program see it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from rigsweep.cluster.bench import Bench, CardBench, PairBench
from rigsweep.cluster.cards import Card
from rigsweep.cluster.measurements import Measurement
from rigsweep.sweeps.bench_table import bench_data, bench_table, settled

COMMAND = [sys.executable, "-P", "-m", "rigsweep.sweeps.cli", "bench"]
BOX = [Card(i, "cuda", "NVIDIA GeForce RTX 3090", f"GPU-{i}", 24 * 2**30, 1) for i in range(2)]


def products(teraflops: float) -> dict[str, Measurement]:
    values = {
        "bf16_flops_per_second": {"4096": 0.9 * teraflops * 1e12, "8192": teraflops * 1e12},
        "fp32_flops_per_second": {"8192": teraflops / 2 * 1e12},
        "fp16_accumulation_flops_per_second": {"8192": 131e12},
        "bf16_pays": True,
    }
    return {"matmul": Measurement("measured", values)}


def peer_copy(wrong: int) -> Measurement:
    values = {f"{way}_bytes_per_second": 6e9 for way in ("forward", "backward")}
    words = {"forward_wrong_words": wrong, "backward_wrong_words": 0}
    reason = f"forward: {wrong} words arrived changed" if wrong else ""
    return Measurement("wrong" if wrong else "measured", values | words, reason)


def shown(bench: Bench) -> list[str]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(bench_table(bench))
    return [" ".join(line.split()) for line in capture.get().splitlines()]


def test_the_measured_stands_beside_the_specification_with_the_share_reached() -> None:
    memory = {"memory": Measurement("measured", {"bytes_per_second": 842.4e9})}
    moved = {"transfer": Measurement("measured", {"pinned_bytes_per_second": 25e9, "pageable_bytes_per_second": 9e9})}
    lines = shown(Bench("box", "2.13.0", (CardBench(tuple(BOX[:1]), memory | products(68.4) | moved),), ()))
    assert "memory copy, read and write 842.4 GB/s 936.0 GB/s 90%" in lines
    assert "bf16 matrix product, 8192 68.4 TFLOP/s 71.2 TFLOP/s 96%" in lines
    assert "TF32 matrix product, 8192 34.2 TFLOP/s 35.6 TFLOP/s 96%" in lines
    assert "fp16, fp16 accumulation matrix product, 8192 131.0 TFLOP/s 142.3 TFLOP/s 92%" in lines
    assert "host to device, pinned 25.0 GB/s – –" in lines
    assert any("24 GiB, 350 W, compute capability 8.6, from torch 1.8 and CUDA 11.1 on" in line for line in lines)


@pytest.mark.parametrize(
    ("teraflops", "said"),
    [
        (68.4, "measured 68.4, which settles it"),
        (73.0, "measured 73.0, which settles it"),
        (30.0, "measured 30.0, which settles nothing"),
        (140.0, "measured 140.0, more than the table knows"),
    ],
)
def test_a_line_says_which_of_the_quoted_peaks_it_is(teraflops: float, said: str) -> None:
    note = settled(BOX[0], products(teraflops))
    assert note is not None
    assert "71.2 TFLOP/s; 142 is fp16 accumulation" in note
    assert "285 is fp16 accumulation with sparsity" in note
    assert said in note


def test_what_was_not_measured_settles_nothing() -> None:
    assert (settled(BOX[0], {}) or "").endswith("not measured")
    assert settled(Card(0, "cuda", "NVIDIA Unknown", "GPU-0", 2**34, 1), products(60)) is None


def test_a_corrupted_copy_and_a_hang_are_told_with_what_helps() -> None:
    measured = {
        "peer_copy": peer_copy(3),
        "all_reduce": Measurement("hung", {}, "it did not end within 120 s and was killed"),
        "all_reduce_without_p2p": Measurement("measured", {"backend": "nccl", "bus_bytes_per_second": 5e9}),
    }
    cards = tuple(CardBench((card,), {}) for card in BOX)
    lines = shown(Bench("box", "2.13.0", cards, (PairBench(((BOX[0], BOX[1]),), measured),)))
    assert "peer copy 0 to 1, arrives changed 6.0 GB/s – –" in lines
    assert "peer copy 1 to 0, arrives right 6.0 GB/s – –" in lines
    assert "cards 0 and 1: peer copy wrong: forward: 3 words arrived changed" in lines
    assert "cards 0 and 1: all reduce hung: it did not end within 120 s and was killed" in lines
    assert "cards 0 and 1: the all-reduce goes well without P2P: set NCCL_P2P_DISABLE=1" in lines


def test_programs_get_every_card_and_pair_with_units_in_the_names() -> None:
    bench = Bench("box", "2.13.0", (CardBench(tuple(BOX), products(68.4)),), (PairBench(((BOX[0], BOX[1]),), {}),))
    told = json.loads(json.dumps(bench_data(bench)))
    assert [card["identity"] for card in told["cards"]] == ["GPU-0", "GPU-1"]
    assert told["cards"][0]["specification"]["bandwidth_bytes_per_second"] == 936e9
    values = told["cards"][0]["measurements"]["matmul"]["values"]
    assert values["bf16_flops_per_second"]["8192"] == pytest.approx(68.4e12)
    assert told["pairs"] == [{"cards": [0, 1], "measurements": {}}]


def test_bench_answers_on_this_machine_and_keeps_what_it_measured(tmp_path: Path) -> None:
    # No GPU is shown to it, so that the test takes seconds and is the same everywhere.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "RIGSWEEP_CACHE": str(tmp_path)}
    words = ["--threads", "1", "--cards", "1"]

    def answer(*more: str) -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *words, *more]
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=True, timeout=240)

    first, second = answer("--json"), answer()
    told = json.loads(first.stdout)
    assert "2 of 2: CPU, 1 thread (0): matmul" in first.stderr
    assert {part: found["state"] for part, found in told["cards"][0]["measurements"].items()} == {
        "memory": "measured",
        "matmul": "measured",
    }
    assert told["cards"][0]["specification"] is None
    assert second.stderr == "", "nothing was measured again"
    for text in ("memory copy, read and write", "bf16 matrix product, 1024", "host to device, pinned"):
        assert text in second.stdout
