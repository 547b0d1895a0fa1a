"""Cross-entropy over a large vocabulary, without ever holding all logits.

Shape suffixes: n tokens, c width, v vocabulary.
"""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK_LOGITS = 2**25
"""Logits that the loss holds at once: 128 MiB in fp32, and still 1,000 tokens of a 32,000 vocabulary."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which a matrix product of `x` is done here: autocast's, or its own."""
    kind = x.device.type
    # autocast knows no `meta` and would raise there
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross-entropy whose gradients are made in the forward pass, chunk by chunk.

    The gradient of a mean over tokens is known as soon as a chunk's logits are, so they are dropped at once
    and nothing is computed twice (as Liger Kernel does, Hsu et al. 2024, section 3.2).
    """

    @staticmethod
    def forward(ctx, hidden_nc: Tensor, weight_vc: Tensor, targets_n: Tensor, rows: int) -> Tensor:
        grad_hidden_nc = torch.empty_like(hidden_nc)
        grad_weight_vc = torch.zeros_like(weight_vc, dtype=torch.float32)
        total = torch.zeros((), dtype=torch.float32, device=hidden_nc.device)
        for start in range(0, len(hidden_nc), rows):
            part = slice(start, start + rows)
            logits = (hidden_nc[part] @ weight_vc.T).float()
            target = targets_n[part, None]
            normaliser = logits.logsumexp(-1, keepdim=True)
            total += (normaliser - logits.gather(1, target)).sum()
            # d loss / d logits = (softmax − one-hot) / N, in place to hold one fp32 chunk only
            slope = logits.sub_(normaliser).exp_()
            slope.scatter_add_(1, target, -torch.ones_like(normaliser))
            slope = slope.div_(len(hidden_nc)).to(hidden_nc.dtype)
            grad_hidden_nc[part] = slope @ weight_vc
            grad_weight_vc += slope.T @ hidden_nc[part]
        ctx.save_for_backward(grad_hidden_nc, grad_weight_vc.to(weight_vc.dtype))
        return total / len(hidden_nc)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grad_outputs
        grad_hidden_nc, grad_weight_vc = ctx.saved_tensors
        return grad * grad_hidden_nc, grad * grad_weight_vc, None, None


def cross_entropy(hidden_nc: Tensor, weight_vc: Tensor, targets_n: Tensor, chunk_logits: int = CHUNK_LOGITS) -> Tensor:
    """Mean cross-entropy in nats of the logits `hidden @ weight.T`, at most `chunk_logits` of them at a time.

    The logits are made in autocast's type and reduced in fp32. For 16 rows of 1,024 tokens and a vocabulary
    of 32,000, all of them with their gradient would take 4 GB.
    """
    tokens, vocabulary = len(hidden_nc), len(weight_vc)
    if tokens * vocabulary <= chunk_logits:
        return functional.cross_entropy(functional.linear(hidden_nc, weight_vc).float(), targets_n)
    rows = max(1, chunk_logits // vocabulary)
    dtype = compute_dtype(hidden_nc)
    hidden_nc, weight_vc = hidden_nc.to(dtype), weight_vc.to(dtype)
    if torch.is_grad_enabled():
        return _ChunkedCrossEntropy.apply(hidden_nc, weight_vc, targets_n, rows)
    total = torch.zeros((), device=hidden_nc.device)
    for hidden, target in zip(hidden_nc.split(rows), targets_n.split(rows), strict=True):
        total += functional.cross_entropy((hidden @ weight_vc.T).float(), target, reduction="sum")
    return total / tokens
