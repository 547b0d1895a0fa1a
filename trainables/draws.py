"""Random numbers that are a function of (seed, stream, row), on any device and in any order.

Rows are indices in the global order, so a row's noise does not depend on the micro-batch, the worker or what was
drawn before. A hash of the counter, as in Salmon et al. 2011 ("Parallel random numbers: as easy as 1, 2, 3"), with
the mixer of SplitMix64 (Steele et al. 2014): all in torch, so that noise is drawn where it is used.
"""

import math

import torch
from torch import Tensor

_GOLDEN = -0x61C8864680B583EB  # 2^64 over the golden ratio, as a signed integer
_FIRST, _SECOND = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15
_BITS = 24  # what a float32 holds


def uniforms(seed: int, stream: int, rows: Tensor, width: int) -> Tensor:
    """Float32 (rows, width), uniform in (0, 1) without the ends, for int64 `rows` of shape (rows,)."""
    return _unit(_hashed(seed, stream, rows, width) >> (64 - _BITS))


def normals(seed: int, stream: int, rows: Tensor, width: int) -> Tensor:
    """Float32 (rows, width), standard normal, for int64 `rows` of shape (rows,); no further out than 5.9.

    Two from each hash (Box and Muller 1958).
    """
    hashed = _hashed(seed, stream, rows, math.ceil(width / 2))
    radius = (-2 * _unit(hashed >> (64 - _BITS)).log()).sqrt()
    angle = 2 * math.pi * _unit(hashed >> 8)
    return torch.cat((radius * angle.cos(), radius * angle.sin()), dim=1)[:, :width]


def _hashed(seed: int, stream: int, rows: Tensor, width: int) -> Tensor:
    key = _mixed(_mixed(torch.tensor(seed, dtype=torch.int64)) + stream).to(rows.device)
    columns = torch.arange(1, width + 1, device=rows.device)
    return _mixed(_mixed(rows + key)[:, None] + columns * _GOLDEN)


def _mixed(x: Tensor) -> Tensor:
    """Every bit of the result depends on every bit of `x` (int64, wrapping)."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    # torch shifts signed integers arithmetically: what comes in from the left is masked away.
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _unit(x: Tensor) -> Tensor:
    return ((x & (2**_BITS - 1)).float() + 0.5) / 2**_BITS
