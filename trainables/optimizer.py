"""The optimizer and its learning rate."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .settings import Optimizer, Schedule
from .task import Role


def build_optimizer(
    model: nn.Module, role: Callable[[str, nn.Parameter], Role], settings: Optimizer
) -> torch.optim.Optimizer:
    """AdamW over one parameter group per role; only parameters of two dimensions or more decay.

    Loshchilov and Hutter 2019. Fused: one kernel for all parameters of a group; else PyTorch's own choice, which
    is a kernel an operation on a GPU and one an operation and parameter on a CPU.
    """
    groups: dict[tuple[Role, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault((role(name, parameter), parameter.dim() >= 2), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "role": role_, "weight_decay": settings.weight_decay if decays else 0.0}
            for (role_, decays), parameters in groups.items()
        ],
        lr=settings.learning_rate,
        betas=settings.betas,
        fused=True if settings.fused else None,
    )


def learning_rate(settings: Schedule, peak: float, share: float) -> float:
    """The learning rate when `share` (0 to 1) of the budget is done, this step included.

    Linear warm-up; then cosine (Loshchilov and Hutter 2017), constant, or constant with a linear decay over
    the last `cooldown` (warm-up, stable, decay: Hu et al. 2024) down to `final` of the peak.
    """
    if share < settings.warmup:
        return peak * share / settings.warmup
    if settings.decay == "constant":
        return peak
    if settings.decay == "cosine":
        after = (share - settings.warmup) / max(1e-12, 1 - settings.warmup)
        left = (1 + math.cos(math.pi * min(1.0, after))) / 2
    else:
        left = min(1.0, (1 - share) / max(1e-12, settings.cooldown))
    return peak * (settings.final + (1 - settings.final) * left)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """The optimizer's state as `parameter name/state name` tensors, without any hyper-parameter."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_named_state(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, torch.Tensor]) -> None:
    """Put a copy of a state made by `named_state` back, on each parameter's device.

    Without fused kernels the count of steps stays on the CPU, where reading it makes no GPU wait.
    """
    parameters = dict(model.named_parameters())
    fused = bool(optimizer.defaults.get("fused"))
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state: dict[str, Any] = optimizer.state[parameters[name]]
        device = parameters[name].device if fused or key != "step" else "cpu"
        state[key] = tensor.to(device, copy=True)  # read, it is still the file
