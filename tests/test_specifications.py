"""The makers' figures for cards: what is dense bf16 with fp32 accumulation, and what is not."""

import pytest

from rigsweep.cluster.cards import Card
from rigsweep.cluster.specifications import SPECIFICATIONS, specification_of


def card(name: str, gibibytes: float = 24) -> Card:
    return Card(0, "cuda", name, "GPU-0", int(gibibytes * 2**30), 1)


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA GeForce RTX 3090", 71.2),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0),
        ("NVIDIA GeForce RTX 4080", 97.5),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5070", 61.7),
        ("NVIDIA GeForce RTX 5070 Ti", 87.9),
        ("NVIDIA GeForce RTX 5080", 112.6),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA L40S", 362),
        ("NVIDIA A100-SXM4-40GB", 312),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H200", 989),
    ],
)
def test_the_peak_is_dense_bf16_with_fp32_accumulation(name: str, teraflops: float) -> None:
    peak = card(name).peak_bf16_flops_per_second
    assert peak is not None
    assert peak / 1e12 == pytest.approx(teraflops, abs=0.06)


def test_a_card_without_bf16_has_no_peak_but_a_specification() -> None:
    for name in ("Tesla T4", "Tesla V100-SXM2-16GB"):
        told = card(name, 16).specification
        assert told is not None
        assert told.peak_bf16_flops_per_second is told.peak_tf32_flops_per_second is None
        assert card(name, 16).peak_bf16_flops_per_second is None


def test_an_unknown_card_and_a_part_of_a_card_have_no_specification() -> None:
    for name in ("NVIDIA GeForce RTX 9090", "NVIDIA A100-SXM4-80GB MIG 3g.40gb", "CPU, 1 thread"):
        assert card(name).specification is None
        assert card(name).peak_bf16_flops_per_second is None


def test_of_two_cards_with_one_name_the_memory_decides() -> None:
    ten, twelve = specification_of("RTX 3080", 10 * 2**30), specification_of("RTX 3080", 12288 * 2**20)
    assert ten is not None
    assert twelve is not None
    assert (ten.memory_bytes, twelve.memory_bytes) == (10 * 2**30, 12 * 2**30)
    assert ten.bandwidth_bytes_per_second < twelve.bandwidth_bytes_per_second


def test_what_is_quoted_for_a_card_is_told_apart_from_its_peak() -> None:
    told = {one.name: one for one in SPECIFICATIONS}
    assert [round(quoted.flops_per_second / 1e12) for quoted in told["RTX 3090"].quoted] == [142, 285]
    (accumulation, _) = told["RTX 5070 Ti"].quoted
    assert accumulation.flops_per_second / 1e12 == pytest.approx(175.8, abs=0.1)
    assert "150 to 180" in accumulation.means
    assert "fp16 accumulation" in accumulation.means
    assert [round(quoted.flops_per_second / 1e12, 1) for quoted in told["RTX A6000"].quoted] == [309.6, 77.4]


def test_the_table_is_whole() -> None:
    assert len({(one.name, one.memory_bytes) for one in SPECIFICATIONS}) == len(SPECIFICATIONS)
    for one in SPECIFICATIONS:
        assert not one.name.startswith(("NVIDIA", "GeForce")), "the table has the short name"
        assert one.source
        assert 2e11 < one.bandwidth_bytes_per_second < 1e13
        assert 50 < one.board_watts <= 1000
        assert (one.peak_bf16_flops_per_second is None) == (one.compute_capability < (8, 0))
        # FLOPs for each byte that the memory delivers: a slip of a decimal shows here.
        assert (
            30
            < (one.peak_bf16_flops_per_second or 60 * one.bandwidth_bytes_per_second) / (one.bandwidth_bytes_per_second)
            < 500
        )
    assert {one.first_cuda for one in SPECIFICATIONS if one.compute_capability >= (10, 0)} == {(12, 8)}
    assert {one.first_torch for one in SPECIFICATIONS if one.compute_capability >= (10, 0)} == {(2, 7)}
