"""Points in the plane, drawn from known densities: each point is a function of (seed, index)."""

import math

import numpy as np

RADIUS, DEVIATION = 2.0, 0.1
"""Of the circle of Gaussians, and of each of them."""


def points(kind: str, seed: int, indices: np.ndarray) -> np.ndarray:
    """Float32 (n, 2) of the data set `kind`, for int64 `indices` of shape (n,)."""
    u = _uniforms(seed, indices, 4)
    # Box and Muller 1958: two normal deviates from two uniform ones.
    length, angle = np.sqrt(-2 * np.log(u[2])), 2 * np.pi * u[3]
    normal = np.stack((length * np.cos(angle), length * np.sin(angle)), axis=1)
    return _KINDS[kind](u, normal).astype(np.float32)


def modes(kind: str) -> np.ndarray | None:
    """Float32 (8, 2): where the Gaussians stand; None for data without modes."""
    if kind != "eight-gaussians":
        return None
    angles = np.arange(8) * math.pi / 4
    return (RADIUS * np.stack((np.cos(angles), np.sin(angles)), axis=1)).astype(np.float32)


def _eight_gaussians(u: np.ndarray, normal: np.ndarray) -> np.ndarray:
    angle = np.floor(u[0] * 8) * np.pi / 4
    return RADIUS * np.stack((np.cos(angle), np.sin(angle)), axis=1) + DEVIATION * normal


def _swiss_roll(u: np.ndarray, normal: np.ndarray) -> np.ndarray:
    # The plane section of the roll of Sohl-Dickstein et al. 2015 (figure 1), with a little noise of our choice.
    theta = 1.5 * np.pi * (1 + 2 * u[0])
    return theta[:, None] * np.stack((np.cos(theta), np.sin(theta)), axis=1) / 7.5 + 0.05 * normal


def _checkerboard(u: np.ndarray, _normal: np.ndarray) -> np.ndarray:
    # Eight dark squares of a board of 4 by 4, brought to a deviation near that of the others.
    x = 4 * u[0] - 2
    half = (u[1] * 2 % 1) - 2 * (u[1] >= 0.5) + np.floor(x) % 2
    return np.stack((x, half), axis=1) / 0.45 / 2


_KINDS = {"eight-gaussians": _eight_gaussians, "swiss-roll": _swiss_roll, "checkerboard": _checkerboard}


def _uniforms(seed: int, indices: np.ndarray, width: int) -> np.ndarray:
    """(width, n) within (0, 1): a hash of the counter, with the mixer of SplitMix64 (Steele et al. 2014)."""
    with np.errstate(over="ignore"):
        golden = np.uint64(0x9E3779B97F4A7C15)
        key = _mixed(np.array([seed], np.uint64) + np.uint64(1))
        columns = np.arange(1, width + 1, dtype=np.uint64)[:, None] * golden
        hashed = _mixed(_mixed(indices.astype(np.uint64) + key) + columns)
    return ((hashed >> np.uint64(11)) + 0.5) / 2.0**53


def _mixed(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
