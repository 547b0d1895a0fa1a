"""How fast a card multiplies matrices: measured, since the advertised figure is rarely reached.

MFU is reported against the card's peak and against this figure. It is measured in a process of its own (the
driver never opens a CUDA context) and remembered per card and torch version.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from .cards import Card
from .errors import MachineError


@dataclass(frozen=True)
class Speed:
    """Matrix-product speed of one card in FLOP/s, 2 FLOPs a multiply-add, and whether bf16 is worth using."""

    bf16_flops_per_second: float
    fp32_flops_per_second: float
    bf16_pays: bool

    def flops_per_second(self, precision: str) -> float:
        """The measured speed in `bf16` or `fp32`."""
        return self.bf16_flops_per_second if precision == "bf16" else self.fp32_flops_per_second

    def precision(self, asked: str) -> str:
        """What `auto` means here: bf16 where it pays, else fp32."""
        return ("bf16" if self.bf16_pays else "fp32") if asked == "auto" else asked


def card_speed(card: Card, cache: Path) -> Speed:
    """The measured speed of a card, from `cache` if it was measured there before (about 5 s if not)."""
    file = cache / "speed" / f"{_slug(card)}-torch-{metadata.version('torch')}.json"
    try:
        return Speed(**json.loads(file.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        pass  # never measured, or by another version of this file: measure
    # -P keeps the working directory off the path, where a folder `datasets` could hide the library.
    command = [sys.executable, "-P", "-m", "rigsweep.cluster.speed", card.kind, str(card.threads)]
    environment = dict(os.environ)
    if card.kind == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = card.identity
    answer = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)  # noqa: S603
    if answer.returncode:
        raise MachineError(f"the speed of {card.name} could not be measured: {answer.stderr.strip()[-300:]}")
    speed = Speed(**json.loads(answer.stdout.splitlines()[-1]))
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(asdict(speed)))
    temporary.replace(file)
    return speed


def measure(kind: str, threads: int) -> Speed:
    """Measure the card that this process sees: the best of three sizes in each precision."""
    import torch

    if kind == "cpu":
        torch.set_num_threads(threads)
    torch.set_float32_matmul_precision("high")
    device = torch.device(kind)
    sizes = (2048, 4096, 8192) if kind == "cuda" else (256, 512, 1024)
    best = {}
    for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        best[name] = max(_matmul_flops_per_second(torch.randn(n, n, device=device, dtype=dtype)) for n in sizes)
    # Never on a CPU: products are faster in bf16 on some, but PyTorch's attention loses it all in its backward
    # pass (ten times fp32's time), and whether it pays would depend on the moment it was measured.
    pays = kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    return Speed(best["bf16"], best["fp32"], pays)


def _matmul_flops_per_second(a, seconds: float = 0.4) -> float:
    import torch

    def wait() -> None:
        if a.is_cuda:
            torch.cuda.synchronize()

    for _ in range(3):
        torch.matmul(a, a)
    wait()
    rates = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(rates) < 3:
        start = time.perf_counter()
        for _ in range(5):
            torch.matmul(a, a)
        wait()
        rates.append(5 * 2 * a.shape[0] ** 3 / (time.perf_counter() - start))
    return sorted(rates)[len(rates) // 2]


def _slug(card: Card) -> str:
    return "".join(c if c.isalnum() else "-" for c in card.name.lower())


if __name__ == "__main__":
    print(json.dumps(asdict(measure(sys.argv[1], int(sys.argv[2])))))
