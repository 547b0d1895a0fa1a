"""Paths, against finite differences and closed forms."""

import math

import pytest
import torch

from rigsweep.trainables.generative import PathSettings, TimeDensity
from rigsweep.trainables.paths import DDPM, Path, path_of

KINDS = ["straight", "optimal-transport", "variance-preserving", "ddpm"]


def of(kind: str) -> Path:
    return path_of(PathSettings(kind=kind))  # pyright: ignore


def pair(rows: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, rows, 3, dtype=torch.float64, generator=generator))  # pyright: ignore


def times(rows: int = 200) -> torch.Tensor:
    # The middles of DDPM's thousand steps: between them its slope jumps.
    return (torch.linspace(20, 970, rows, dtype=torch.float64).floor() + 0.5) / 1000


@pytest.mark.parametrize("kind", KINDS)
def test_the_velocity_is_what_x_moves_by(kind: str) -> None:
    path, (x_0, x_1), t, h = of(kind), pair(), times(), 1e-5
    at = path.mix(x_0, x_1, t)
    moved = (path.mix(x_0, x_1, t + h).x_t - path.mix(x_0, x_1, t - h).x_t) / (2 * h)
    output = x_0 if path.predicts == "noise" else at.target
    assert torch.allclose(path.read(output, at.x_t, t).velocity, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_says_noise_and_data_and_the_way_back(kind: str) -> None:
    path, (x_0, x_1), t = of(kind), pair(), times()
    sample = path.mix(x_0, x_1, t)
    found = path.read(sample.target, sample.x_t, t)
    assert torch.allclose(found.noise, x_0, atol=1e-5)
    assert torch.allclose(found.data, x_1, atol=1e-5)
    assert torch.allclose(path.output_of(found), sample.target, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_time_runs_from_noise_to_data(kind: str) -> None:
    path, (x_0, x_1) = of(kind), pair()
    assert torch.allclose(path.mix(x_0, x_1, torch.zeros(200).double()).x_t, x_0, atol=0.05)
    assert torch.allclose(path.mix(x_0, x_1, torch.ones(200).double()).x_t, x_1, atol=0.05)


def test_the_straight_velocity_is_data_minus_noise() -> None:
    x_0, x_1 = pair()
    assert torch.equal(of("straight").mix(x_0, x_1, times()).target, x_1 - x_0)


def test_sigma_min_is_left_at_the_end() -> None:
    path = path_of(PathSettings(kind="optimal-transport", sigma_min=0.1))
    x_0, x_1 = pair()
    end = path.mix(x_0, x_1, torch.ones(200).double())
    assert torch.allclose(end.x_t, x_1 + 0.1 * x_0)
    assert torch.allclose(end.target, x_1 - 0.9 * x_0)


@pytest.mark.parametrize("kind", ["variance-preserving", "ddpm"])
def test_variance_is_preserved(kind: str) -> None:
    at = of(kind).coefficients(torch.linspace(0, 0.999, 500, dtype=torch.float64))
    assert torch.allclose(at.alpha**2 + at.sigma**2, torch.ones(500).double())


def test_ddpm_has_the_papers_products() -> None:
    kept, path = 1.0, DDPM()
    for step in range(1, 1001):
        kept *= 1 - (1e-4 + (0.02 - 1e-4) * (step - 1) / 999)
        if step in (1, 500, 1000):
            at = path.coefficients(torch.tensor(1 - step / 1000, dtype=torch.float64))
            assert float(at.alpha) == pytest.approx(math.sqrt(kept))
    # Single precision meets the same steps.
    t = path.times(torch.rand(5000, generator=torch.Generator().manual_seed(0)), TimeDensity())
    assert torch.allclose(path.coefficients(t).alpha.double(), path.coefficients(t.double()).alpha, atol=1e-6)
    assert 0 <= float(t.min()) < 0.005
    assert 0.995 < float(t.max()) < 0.9991


@pytest.mark.parametrize("t", [-0.1, 1.1])
def test_a_time_outside_is_refused(t: float) -> None:
    with pytest.raises(ValueError, match=r"within \[0, 1\]"):
        of("straight").mix(*pair(), torch.full((200,), t))


def test_time_densities() -> None:
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    path = of("straight")
    normal = path.times(u, TimeDensity(kind="logit-normal", mean=0.5, deviation=0.7))
    assert float(torch.logit(normal).mean()) == pytest.approx(0.5, abs=1e-3)
    assert float(torch.logit(normal).std()) == pytest.approx(0.7, abs=1e-2)
    shaped = path.times(u, TimeDensity(kind="u-shaped", steepness=4))
    counts = torch.histc(shaped, 20, 0, 1) / 100_000
    middle = (torch.arange(20) + 0.5).double() / 20
    density = torch.exp(4 * middle) + torch.exp(4 * (1 - middle))
    assert torch.allclose(counts, density / density.sum(), rtol=0.02)
    assert torch.equal(path.times(u, TimeDensity()), u)
