"""What a card can do by its maker's figures: peak speed, memory, bandwidth, power, and what software it needs.

The peak is dense bf16 with fp32 accumulation, 2 FLOPs a multiply-add: what training reaches for. Figures that are
quoted beside it are kept with what they mean, since they are twice or four times as much. A card that is not here
is measured, never guessed.
"""

from collections.abc import Iterator
from dataclasses import dataclass

Version = tuple[int, int]


@dataclass(frozen=True)
class Quoted:
    """A peak that people quote for a card, in FLOP/s, and what it is instead of dense bf16 with fp32 accumulation."""

    flops_per_second: float
    means: str


@dataclass(frozen=True)
class Specification:
    """One card by its maker's figures.

    `name` is what nvidia-smi prints without `NVIDIA` and `GeForce`. `peak_bf16_flops_per_second` is None where the
    tensor cores have no bf16. `first_torch` and `first_cuda` are the first versions with code built for the card.
    """

    name: str
    peak_bf16_flops_per_second: float | None
    memory_bytes: int
    bandwidth_bytes_per_second: float
    board_watts: float
    compute_capability: Version
    first_torch: Version
    first_cuda: Version
    source: str
    quoted: tuple[Quoted, ...] = ()

    @property
    def peak_tf32_flops_per_second(self) -> float | None:
        """Dense TF32, what an fp32 product takes when it is allowed to: half of bf16 on every card that has both."""
        return self.peak_bf16_flops_per_second / 2 if self.peak_bf16_flops_per_second else None


def specification_of(name: str, memory_bytes: int) -> Specification | None:
    """The specification of a card by the name that nvidia-smi prints; None where the table has none.

    Some cards are sold with two memories under one name: the one nearest to `memory_bytes` is meant.
    """
    plain = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    same = [card for card in SPECIFICATIONS if card.name == plain]
    return min(same, key=lambda card: abs(card.memory_bytes - memory_bytes), default=None)


# Compute capability, first torch, first CUDA.
_NEEDS: dict[str, tuple[Version, Version, Version]] = {
    "GV100": ((7, 0), (0, 3), (9, 0)),
    "TU104": ((7, 5), (1, 0), (10, 0)),
    "GA100": ((8, 0), (1, 7), (11, 0)),
    "GA10x": ((8, 6), (1, 8), (11, 1)),
    "AD10x": ((8, 9), (2, 0), (11, 8)),
    "GH100": ((9, 0), (2, 0), (11, 8)),
    "GB100": ((10, 0), (2, 7), (12, 8)),
    "GB20x": ((12, 0), (2, 7), (12, 8)),
}
_WHITE_PAPERS = {
    "GA10x": "NVIDIA's GA102 white paper",
    "AD10x": "NVIDIA's Ada white paper",
    "GB20x": "NVIDIA's RTX Blackwell white paper",
}

# GeForce: name, tensor cores, boost clock in MHz, memory in GiB, bandwidth in GB/s, board power in W.
_GEFORCE: dict[str, list[tuple[str, int, int, int, int, int]]] = {
    "GA10x": [
        ("RTX 3060", 112, 1777, 12, 360, 170),
        ("RTX 3060", 112, 1777, 8, 240, 170),
        ("RTX 3060 Ti", 152, 1665, 8, 448, 200),
        ("RTX 3070", 184, 1725, 8, 448, 220),
        ("RTX 3070 Ti", 192, 1770, 8, 608, 290),
        ("RTX 3080", 272, 1710, 10, 760, 320),
        ("RTX 3080", 280, 1710, 12, 912, 350),
        ("RTX 3080 Ti", 320, 1665, 12, 912, 350),
        ("RTX 3090", 328, 1695, 24, 936, 350),
        ("RTX 3090 Ti", 336, 1860, 24, 1008, 450),
    ],
    "AD10x": [
        ("RTX 4060", 96, 2460, 8, 272, 115),
        ("RTX 4060 Ti", 136, 2535, 8, 288, 160),
        ("RTX 4060 Ti", 136, 2535, 16, 288, 165),
        ("RTX 4070", 184, 2475, 12, 504, 200),
        ("RTX 4070 SUPER", 224, 2475, 12, 504, 220),
        ("RTX 4070 Ti", 240, 2610, 12, 504, 285),
        ("RTX 4070 Ti SUPER", 264, 2610, 16, 672, 285),
        ("RTX 4080", 304, 2505, 16, 717, 320),
        ("RTX 4080 SUPER", 320, 2550, 16, 736, 320),
        ("RTX 4090", 512, 2520, 24, 1008, 450),
    ],
    "GB20x": [
        ("RTX 5060 Ti", 144, 2572, 8, 448, 180),
        ("RTX 5060 Ti", 144, 2572, 16, 448, 180),
        ("RTX 5070", 192, 2512, 12, 672, 250),
        ("RTX 5070 Ti", 280, 2452, 16, 896, 300),
        ("RTX 5080", 336, 2617, 16, 960, 360),
        ("RTX 5090", 680, 2407, 32, 1792, 575),
    ],
}

# Professional and data-centre cards: name, chip, TFLOP/s, memory in GiB, bandwidth in GB/s, board power in W.
# The data sheets' bf16 figures are with sparsity for all from Ada on: halved here.
_DATA_SHEETS: list[tuple[str, str, float | None, int, int, int]] = [
    ("RTX A6000", "GA10x", 154.8, 48, 768, 300),
    ("A40", "GA10x", 149.7, 48, 696, 300),
    ("A10", "GA10x", 125.0, 24, 600, 150),
    ("RTX 6000 Ada Generation", "AD10x", 364.2, 48, 960, 300),
    ("L40S", "AD10x", 362.0, 48, 864, 350),
    ("L40", "AD10x", 181.0, 48, 864, 300),
    ("L4", "AD10x", 121.0, 24, 300, 72),
    ("Tesla T4", "TU104", None, 16, 320, 70),
    ("Tesla V100-SXM2-16GB", "GV100", None, 16, 900, 300),
    ("Tesla V100-SXM2-32GB", "GV100", None, 32, 900, 300),
    ("Tesla V100-PCIE-16GB", "GV100", None, 16, 900, 250),
    ("Tesla V100-PCIE-32GB", "GV100", None, 32, 900, 250),
    ("A100-SXM4-40GB", "GA100", 312.0, 40, 1555, 400),
    ("A100-SXM4-80GB", "GA100", 312.0, 80, 2039, 400),
    ("A100-PCIE-40GB", "GA100", 312.0, 40, 1555, 250),
    ("A100 80GB PCIe", "GA100", 312.0, 80, 1935, 300),
    ("H100 PCIe", "GH100", 756.0, 80, 2000, 350),
    ("H100 80GB HBM3", "GH100", 989.0, 80, 3350, 700),
    ("H100 NVL", "GH100", 835.5, 94, 3900, 400),
    ("H200", "GH100", 989.0, 141, 4800, 700),
    ("B200", "GB100", 2250.0, 180, 8000, 1000),
]

# Beside what can be computed: figures that go round for a card.
_GOES_ROUND = {
    "RTX 5070 Ti": "fp16 accumulation (the “150 to 180” that is quoted)",
    "RTX 3090": "fp16 accumulation (the “142” that is quoted)",
}


def _geforce() -> Iterator[Specification]:
    # A GeForce tensor core does 64 multiply-adds a clock in bf16 with fp32 accumulation, half of what the same core
    # does in a professional card: 0.128 TFLOP/s for each core and GHz. With fp16 accumulation it does twice that.
    for chip, rows in _GEFORCE.items():
        for name, tensor_cores, boost_megahertz, gibibytes, gigabytes_per_second, watts in rows:
            peak = tensor_cores * boost_megahertz * 128e6
            quoted = (
                Quoted(2 * peak, _GOES_ROUND.get(name, "fp16 accumulation")),
                Quoted(4 * peak, "fp16 accumulation with sparsity"),
            )
            source = f"{_WHITE_PAPERS[chip]}: tensor cores × boost clock × 128 FLOPs"
            bandwidth = gigabytes_per_second * 1e9
            yield Specification(name, peak, gibibytes * 2**30, bandwidth, watts, *_NEEDS[chip], source, quoted)


def _data_sheets() -> Iterator[Specification]:
    for name, chip, teraflops, gibibytes, gigabytes_per_second, watts in _DATA_SHEETS:
        peak = teraflops * 1e12 if teraflops else None
        quoted = [Quoted(2 * peak, "sparsity")] if peak and chip != "GV100" else []
        if peak and name == "RTX A6000":
            quoted.append(Quoted(peak / 2, "GeForce's half rate, which this card does not have"))
        bandwidth, source = gigabytes_per_second * 1e9, f"NVIDIA's {name} data sheet"
        yield Specification(name, peak, gibibytes * 2**30, bandwidth, watts, *_NEEDS[chip], source, tuple(quoted))


SPECIFICATIONS = (*_geforce(), *_data_sheets())
