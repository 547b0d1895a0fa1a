"""Counting the bytes of live tensors, for real or in a trace in which nothing is allocated.

The same code measures and estimates: on real CPU tensors, or under a `FakeTensorMode`. On CUDA the measured peak is
`torch.cuda.max_memory_allocated`.
"""

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memory import GIB, Budget


class LiveBytes(TorchDispatchMode):
    """Counts the storages of all tensors that operations make while it is entered, and their peak.

    With `limit_bytes`, an operation that exceeds it raises `torch.OutOfMemoryError`, so that a limit plays a small
    card on a CPU. Workspaces inside a kernel are not seen. Tensors made before are counted after `see`.
    """

    def __init__(self, limit_bytes: int | None = None):
        super().__init__()
        self.limit_bytes = limit_bytes
        self.bytes = 0
        self.peak_bytes = 0
        self._held: dict[int, int] = {}
        """Bytes by storage."""

    def see(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors, as far as their storages are not counted yet."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            grown = size - self._held.get(key, 0)
            if not grown:
                continue
            if key not in self._held:
                # PyTorch keeps one Python object for a storage as long as the storage lives.
                weakref.finalize(storage, self._forget, key).atexit = False
            self._held[key] = size
            self.bytes += grown
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if self.limit_bytes is not None and self.bytes > self.limit_bytes:
            raise torch.OutOfMemoryError(
                f"{self.bytes / GIB:.3g} GiB of tensors are more than the limit of {self.limit_bytes / GIB:.3g} GiB"
            )

    def _forget(self, key: int) -> None:
        self.bytes -= self._held.pop(key, 0)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.see(leaf for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
        return made


@dataclass(frozen=True)
class Parts:
    """What of a training takes memory."""

    model: nn.Module
    average: nn.Module | None
    optimizer: torch.optim.Optimizer
    micro_step: Callable[[], object]
    """A forward and a backward pass."""
    step: Callable[[], object]
    """The optimizer's, the average's, and gradients to nothing."""


def measure(build: Callable[[], Parts], *, accumulates: bool, limit_bytes: int | None = None) -> Budget:
    """The peak of live tensor bytes over two optimizer steps, the first of which makes the optimizer's states.

    `build` makes everything anew, and is called here, so that all is counted. With `accumulates`, a step has a second
    micro-batch, whose activations meet the gradients of the first. Raises `torch.OutOfMemoryError` at the limit.
    """
    with LiveBytes(limit_bytes) as live:
        parts, gradients_bytes = build(), 0
        for _ in range(2):
            for _ in range(2 if accumulates else 1):
                parts.micro_step()
            gradients_bytes = _bytes_of(p.grad for p in parts.model.parameters())
            parts.step()
        parameters_bytes = _bytes_of(_tensors_of(parts.model))
        optimizer_bytes = _bytes_of(
            value for state in parts.optimizer.state.values() for value in state.values() if isinstance(value, Tensor)
        )
        average_bytes = _bytes_of(_tensors_of(parts.average)) if parts.average is not None else 0
    states_bytes = parameters_bytes + gradients_bytes + optimizer_bytes + average_bytes
    return Budget(
        parameters_bytes=parameters_bytes,
        gradients_bytes=gradients_bytes,
        optimizer_bytes=optimizer_bytes,
        average_bytes=average_bytes,
        # Without accumulation the gradients take the place of activations that are done: never below 0.
        activations_bytes=max(0, live.peak_bytes - states_bytes),
    )


def estimate(build: Callable[[], Parts], *, accumulates: bool) -> Budget:
    """The same by tracing: operations say the shapes of what they would make, and nothing is allocated.

    Attention is traced as the fused kernels do it, without a matrix of tokens by tokens. An operation whose result's
    shape depends on data, such as `item`, raises what `FakeTensorMode` raises.
    """
    with _fake():
        return measure(build, accumulates=accumulates)


@contextlib.contextmanager
def _fake() -> Iterator[None]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with (
        warnings.catch_warnings(),
        FakeTensorMode(),
        sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]),
    ):
        # Of copying a model, as averages of the weights do; PyTorch's own copy asks for what a trace has not.
        warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
        yield


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _bytes_of(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages, each once."""
    storages = (tensor.untyped_storage() for tensor in tensors if tensor is not None)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
