"""What is measured of cards, each in a process of its own: `python -P -m rigsweep.cluster.measuring PART JSON`.

A measurement may hang in a driver, or end its process: so nothing here runs in the process that asks. What it found
is the last line of its output, as JSON. All speeds are medians over repeated rounds. Bytes count what is read and
what is written where both happen in one memory, FLOPs two a multiply-add.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

MATRIX_SIZES = {"cuda": (2048, 4096, 8192), "cpu": (256, 512, 1024)}
_COPIED_BYTES = {"cuda": 2**30, "cpu": 2**27}
_MOVED_BYTES = {"cuda": 2**28, "cpu": 2**25}
_PEER_ROUNDS = 8


def matmul(kind: str, threads: int, memory_bytes: int) -> dict[str, Any]:  # noqa: ARG001 - told to every part
    """Matrix products at three sizes in bf16 and fp32 (TF32 where the card has it), in FLOP/s by size.

    `bf16_pays` is whether `auto` should train in bf16. On CUDA there is also fp16 with fp16 accumulation at the
    largest size: the figure that is often quoted for a card's speed.
    """
    torch = _torch(threads)
    torch.set_float32_matmul_precision("high")

    def at(size: int, dtype: Any) -> float:
        return _matmul_flops_per_second(torch.randn(size, size, device=kind).to(dtype))

    sizes = MATRIX_SIZES[kind]
    found: dict[str, Any] = {
        f"{name}_flops_per_second": {str(size): at(size, dtype) for size in sizes}
        for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32))
    }
    # Never on a CPU: products are faster in bf16 on some, but PyTorch's attention loses it all in its backward
    # pass (ten times fp32's time), and whether it pays would depend on the moment it was measured.
    found["bf16_pays"] = kind == "cuda" and torch.cuda.get_device_capability() >= (8, 0)
    if kind == "cuda" and torch.cuda.get_device_capability() >= (7, 0):
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        found["fp16_accumulation_flops_per_second"] = {str(sizes[-1]): at(sizes[-1], torch.float16)}
    return found


def memory(kind: str, threads: int, memory_bytes: int) -> dict[str, Any]:
    """A copy inside the card's memory that no cache holds, in bytes read and written per second."""
    torch = _torch(threads)
    copied_bytes = min(_COPIED_BYTES[kind], memory_bytes // 8)
    source = torch.ones(copied_bytes // 4, dtype=torch.float32, device=kind)
    target = torch.empty_like(source)
    seconds = _seconds(lambda: target.copy_(source), _wait(kind))
    return {"copied_bytes": copied_bytes, "bytes_per_second": 2 * copied_bytes / seconds}


def transfer(kind: str, threads: int, memory_bytes: int) -> dict[str, Any]:
    """Copies from the host's memory to a CUDA card, pinned and pageable, in bytes per second."""
    torch = _torch(threads)
    moved_bytes = min(_MOVED_BYTES[kind], memory_bytes // 8)
    target = torch.empty(moved_bytes, dtype=torch.uint8, device=kind)
    found: dict[str, Any] = {"copied_bytes": moved_bytes}
    for name, pinned in (("pinned", True), ("pageable", False)):
        source = torch.ones(moved_bytes, dtype=torch.uint8, pin_memory=pinned)
        copy = _copier(target, source)
        found[f"{name}_bytes_per_second"] = moved_bytes / _seconds(copy, _wait(kind))
    return found


def peer_copy(kind: str, threads: int, memory_bytes: int, copy: Callable[[Any, Any], object] | None = None) -> dict:
    """Copies between two cards, both ways: bytes per second, and how many words arrived changed.

    Every round copies other numbers. The receiving card makes the numbers that must arrive by itself and compares
    all of them: a path between cards that corrupts does so silently, and often only some of the time.
    """
    torch = _torch(threads)
    ends = [torch.device("cuda", i) for i in range(2)] if kind == "cuda" else [torch.device("cpu")] * 2
    words = min(_MOVED_BYTES[kind], memory_bytes // 16) // 8
    copy = copy or (lambda target, source: target.copy_(source, non_blocking=True))
    wait = _wait(kind, *ends)
    found: dict[str, Any] = {"copied_bytes": words * 8}
    if kind == "cuda":
        found["peer_access"] = all(torch.cuda.can_device_access_peer(a, b) for a, b in (ends, ends[::-1]))
    for name, (origin, destination) in (("forward", ends), ("backward", ends[::-1])):
        target, wrong = torch.empty(words, dtype=torch.int64, device=destination), 0
        for seed in range(_PEER_ROUNDS):
            source = _pattern(words, seed, origin)
            target.fill_(-1)  # what does not arrive must not look like what did
            wait()
            copy(target, source)
            wait()
            wrong += int((target != _pattern(words, seed, destination)).sum())
        source = _pattern(words, 0, origin)
        found[f"{name}_bytes_per_second"] = words * 8 / _seconds(_copier(target, source), wait)
        found[f"{name}_words"], found[f"{name}_wrong_words"] = words * _PEER_ROUNDS, wrong
    return found


def all_reduce(
    kind: str, threads: int, memory_bytes: int, rank: int, meeting_file: str, limit_seconds: float
) -> dict[str, Any]:
    """One of two processes that add up a tensor over two cards: bus bandwidth in bytes per second, and the sum.

    Bus bandwidth is that of NCCL's own tests: bytes x 2(n - 1)/n / time, which for two is bytes / time.
    """
    torch = _torch(threads)
    from torch import distributed

    device = torch.device("cuda", rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    distributed.init_process_group(
        backend,
        init_method=f"file://{meeting_file}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=limit_seconds),
    )
    summed_bytes = min(_MOVED_BYTES[kind], memory_bytes // 8)
    tensor = torch.full((summed_bytes // 4,), float(rank + 1), device=device)
    distributed.all_reduce(tensor)
    wrong = int((tensor != 3.0).sum())
    tensor.zero_()  # so that it stays finite, however often it is added to itself
    rounds = []
    for _ in range(10):
        # Not `_seconds`: both processes must do the same number of rounds.
        _wait(kind, device)()
        start = time.perf_counter()
        distributed.all_reduce(tensor)
        _wait(kind, device)()
        rounds.append(time.perf_counter() - start)
    seconds = statistics.median(rounds)
    distributed.destroy_process_group()
    return {
        "backend": backend,
        "summed_bytes": summed_bytes,
        "wrong_words": wrong,
        "bus_bytes_per_second": summed_bytes / seconds,
    }


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "matmul": matmul,
    "memory": memory,
    "transfer": transfer,
    "peer_copy": peer_copy,
    "all_reduce": all_reduce,
}


def _torch(threads: int) -> Any:
    import torch

    torch.set_num_threads(threads)  # of a CPU card; beside a GPU, one thread starts its work
    return torch


def _wait(kind: str, *devices: Any) -> Callable[[], None]:
    """Waits until what was begun on the cards (the current one, if none is named) is done."""

    def wait() -> None:
        import torch

        for device in devices or (None,):
            torch.cuda.synchronize(device)

    return wait if kind == "cuda" else lambda: None


def _copier(target: Any, source: Any) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _seconds(work: Callable[[], object], wait: Callable[[], None], *, at_a_time: int = 5, budget: float = 0.4) -> float:
    """Median seconds of one `work`, by rounds of `at_a_time` for `budget` seconds, at least three rounds."""
    for _ in range(3):
        work()
    wait()
    rounds: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(rounds) < 3:
        start = time.perf_counter()
        for _ in range(at_a_time):
            work()
        wait()
        rounds.append((time.perf_counter() - start) / at_a_time)
    return statistics.median(rounds)


def _matmul_flops_per_second(a: Any) -> float:
    import torch

    return 2 * a.shape[0] ** 3 / _seconds(lambda: torch.matmul(a, a), _wait(a.device.type))


def _pattern(words: int, seed: int, device: Any) -> Any:
    """Numbers of 64 bits that follow from place and seed, the same on every device: multiplied modulo 2**64."""
    import torch

    return (torch.arange(words, dtype=torch.int64, device=device) + 1 + seed * words) * 0x1E3779B97F4A7C15


if __name__ == "__main__":
    print(json.dumps(PARTS[sys.argv[1]](**json.loads(sys.argv[2]))), flush=True)
