"""How near drawn points are to the data: by modes, and by two distances between samples. Points are (n, 2)."""

import math

import torch
from torch import Tensor


def counts_per_mode(samples: Tensor, modes: Tensor, radius: float = 0.3) -> Tensor:
    """Int64 (modes,): samples within `radius` of each mode (the modes are further apart than that)."""
    return (torch.cdist(samples, modes) <= radius).sum(0)


def evenness(counts: Tensor) -> float:
    """The entropy of the counts over that of equal ones: 1 where every mode has as many, 0 where one has all."""
    share = counts.double() / counts.sum().clamp(min=1)
    return float(torch.special.entr(share).sum() / math.log(len(counts)))


def sliced_wasserstein(a: Tensor, b: Tensor, directions: int = 64) -> float:
    """The sliced 2-Wasserstein distance (Bonneel et al. 2015) of equally many points, over even directions."""
    angles = torch.arange(directions, dtype=a.dtype, device=a.device) * math.pi / directions
    rays = torch.stack((angles.cos(), angles.sin()))
    return float(((a @ rays).sort(0).values - (b @ rays).sort(0).values).square().mean().sqrt())


def energy_distance(a: Tensor, b: Tensor) -> float:
    """2·E|a − b| − E|a − a'| − E|b − b'| (Székely and Rizzo 2013), unbiased: a point is not its own pair."""
    between = _distances(a, b) / (len(a) * len(b))
    within = [_distances(x, x) / (len(x) * (len(x) - 1)) for x in (a, b)]
    return 2 * between - sum(within)


def _distances(a: Tensor, b: Tensor) -> float:
    # In parts, so that ten thousand points do not take a gigabyte.
    return sum(float(torch.cdist(part.double(), b.double()).sum()) for part in a.split(1024))
