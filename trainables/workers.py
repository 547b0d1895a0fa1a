"""The workers that train one model together, each on its card: data-parallel, as if they were one.

Of a single worker everything here does nothing. Of several, each takes its share of the rows of every step, and the
gradients are added up over all (`DistributedDataParallel`) once a step; so how many there are changes a training's
numbers by rounding only. The first decides whatever is not the same arithmetic for all: whether to leave, health,
checkpoints.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

T = TypeVar("T")


class Workers:
    """Those of one training, seen from one of them."""

    def __init__(self, rank: int = 0, size: int = 1):
        """With several, PyTorch's process group must be there already, with the same ranks."""
        self.rank, self.size = rank, size
        self.first = rank == 0
        """Whether this is the one that decides, reports and saves."""

    def share(self, count: int) -> range:
        """Of `count` rows, those that are this worker's: a contiguous part; the parts differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model, whose gradients after `backward` are the sum over all workers, divided by how many they are.

        Li et al. 2020 (PyTorch Distributed), section 4.
        """
        if self.size == 1:
            return model
        # Buffers are functions of the settings: nothing to be sent before every step.
        return DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)

    def alone(self, model: nn.Module, when: bool) -> AbstractContextManager[None]:
        """Meanwhile `backward` adds to this worker's own gradients only, `when` it is not the step's last."""
        return model.no_sync() if when and isinstance(model, DistributedDataParallel) else nullcontext()

    def sum(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Scalars added up over the workers, on their device, in one call."""
        if self.size == 1:
            return dict(tensors)
        added = torch.stack([value.float() for value in tensors.values()])
        dist.all_reduce(added)
        return dict(zip(tensors, added.unbind(), strict=True))

    def largest(self, value: float) -> float:
        """The largest of the workers' values."""
        if self.size == 1:
            return value
        found = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=_control())
        return found.item()

    def decide(self, ask: Callable[..., T], *words: Any, **named: Any) -> T:
        """What `ask(...)` answers at the first worker, for all: only there is it asked.

        Mostly that is None, which costs a byte by way of the CPU and makes no GPU wait.
        """
        if self.size == 1:
            return ask(*words, **named)
        answer: Any = ask(*words, **named) if self.first else None
        told = torch.tensor([answer is not None], dtype=torch.uint8)
        dist.broadcast(told, src=0, group=_control())
        if not told.item():
            return answer
        answers = [answer]
        dist.broadcast_object_list(answers, src=0, group=_control())
        return answers[0]


ALONE = Workers()
"""A worker without others."""


@functools.cache
def _control() -> "dist.ProcessGroup | None":
    """A group that talks through the CPU, one a process: what is decided must not queue up behind kernels."""
    if dist.get_backend() == "gloo":
        return dist.group.WORLD
    return dist.new_group(backend="gloo")  # pyright: ignore[reportReturnType] - every rank is a member
