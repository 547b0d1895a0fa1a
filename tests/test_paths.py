"""Paths, against finite differences and closed forms."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from rigsweep.trainables.generative import PathSettings, TimeDensity
from rigsweep.trainables.paths import DDPM, Nonequilibrium, Path, Prediction, path_of

KINDS = ["straight", "optimal-transport", "variance-preserving", "ddpm", "nonequilibrium"]


def of(kind: str) -> Path:
    return path_of(PathSettings(kind=kind))  # pyright: ignore


def pair(rows: int = 200, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, rows, 3, dtype=torch.float64, generator=generator))  # pyright: ignore


def times(rows: int = 200) -> torch.Tensor:
    # The middles of DDPM's thousand steps: between them its slope jumps. Forty steps have no end among them.
    return (torch.linspace(20, 970, rows, dtype=torch.float64).floor() + 0.5) / 1000


def output(path: Path, x_0: torch.Tensor, x_1: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """What a network that knows everything says."""
    at = path.coefficients(t[:, None])
    return path.output_of(Prediction(at.alpha_slope * x_1 + at.sigma_slope * x_0, x_0, x_1), t)


@pytest.mark.parametrize("kind", KINDS)
def test_the_velocity_is_what_x_moves_by(kind: str) -> None:
    path, (x_0, x_1), t, h = of(kind), pair(), times(), 1e-5
    at = path.mix(x_0, x_1, t)
    moved = (path.mix(x_0, x_1, t + h).x_t - path.mix(x_0, x_1, t - h).x_t) / (2 * h)
    found = path.read(output(path, x_0, x_1, t), at.x_t, t)
    assert torch.allclose(found.velocity, moved, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_the_target_says_noise_and_data_and_the_way_back(kind: str) -> None:
    path, (x_0, x_1), t = of(kind), pair(), times()
    sample = path.mix(x_0, x_1, t)
    told = output(path, x_0, x_1, t)
    if path.outputs == 1:
        assert torch.allclose(told, sample.target)
    found = path.read(told, sample.x_t, t)
    assert torch.allclose(found.noise, x_0, atol=1e-5)
    assert torch.allclose(found.data, x_1, atol=1e-5)
    assert torch.allclose(path.output_of(found, t), told, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_time_runs_from_noise_to_data(kind: str) -> None:
    path, (x_0, x_1) = of(kind), pair()
    off = 0.2 if kind == "nonequilibrium" else 0.05  # its first step has a deviation of 0.03, its last leaves 0.02
    assert torch.allclose(path.mix(x_0, x_1, torch.zeros(200).double()).x_t, x_0, atol=off)
    assert torch.allclose(path.mix(x_0, x_1, torch.ones(200).double()).x_t, x_1, atol=off)


def test_the_straight_velocity_is_data_minus_noise() -> None:
    x_0, x_1 = pair()
    assert torch.equal(of("straight").mix(x_0, x_1, times()).target, x_1 - x_0)


def test_sigma_min_is_left_at_the_end() -> None:
    path = path_of(PathSettings(kind="optimal-transport", sigma_min=0.1))
    x_0, x_1 = pair()
    end = path.mix(x_0, x_1, torch.ones(200).double())
    assert torch.allclose(end.x_t, x_1 + 0.1 * x_0)
    assert torch.allclose(end.target, x_1 - 0.9 * x_0)


@pytest.mark.parametrize("kind", ["variance-preserving", "ddpm", "nonequilibrium"])
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


def chain_bits(path: Nonequilibrium, x_1: torch.Tensor, model: Callable[[torch.Tensor, int], torch.Tensor]) -> float:
    """K of a one-dimensional chain by its definition, step by step: divergences of torch's own normals, exact moments.

    The forward chain is made again from its betas. Expectation over the noise is by Gauss-Hermite quadrature.
    """
    at, weight = np.polynomial.hermite_e.hermegauss(41)
    weight = weight / weight.sum()
    betas = [0.001, *(min(0.99, 1 / (path.steps - k + 1)) for k in range(2, path.steps + 1))]
    kept = np.cumprod(1 - np.array(betas))
    total = 0.0
    for k in range(2, path.steps + 1):
        beta, signal, before = betas[k - 1], kept[k - 1], kept[k - 2]
        x_k = math.sqrt(signal) * x_1 + math.sqrt(1 - signal) * torch.from_numpy(at)[:, None]
        mean = math.sqrt(before) * beta * x_1 + math.sqrt(1 - beta) * (1 - before) * x_k
        forward = Normal(mean / (1 - signal), math.sqrt(beta * (1 - before) / (1 - signal)))
        f_mu, f_sigma = model(x_k, k)
        own = torch.sigmoid(f_sigma / math.sqrt(path.steps) + math.log(beta / (1 - beta)))
        reverse = Normal(math.sqrt(1 - beta) * x_k + math.sqrt(beta) * f_mu, own.sqrt())
        total += float((torch.from_numpy(weight) @ kl_divergence(forward, reverse)).mean())
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    start, end = (0.5 * math.log(1 - kept[k]) for k in (0, -1))
    # Minus K: the divergences, the entropy of the first step given data less the last's, and that of the prior.
    return (total + (entropy + start) * -1 + (entropy + end) + entropy + 2 * start - 2 * end) / math.log(2)


def test_the_chain_of_2015_has_the_bound_of_its_definition() -> None:
    path, rows = Nonequilibrium(25), 400
    x_1 = torch.randn(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def network(x: torch.Tensor, k: int) -> torch.Tensor:
        return torch.stack((0.3 * x - 0.01 * k, 2.0 * torch.sin(x)))

    noise = torch.randn(500, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    losses = []
    for k in range(2, path.steps + 1):
        t = torch.full((rows * len(noise),), 1 - k / path.steps, dtype=torch.float64)
        at = path.mix(noise.reshape(-1, 1), x_1.repeat(len(noise))[:, None], t)
        told = network(at.x_t[:, 0], k).T
        losses.append(float(path.loss(told, at)))
    assert np.mean(losses) == pytest.approx(chain_bits(path, x_1, network), rel=0.01)


def test_the_chain_of_2015_has_nothing_to_learn_of_a_standard_normal() -> None:
    """Untouched, it gives the entropy of N(0, 1), ½·log2(2πe) bits, when the data is of it."""
    path = Nonequilibrium()
    generator = torch.Generator().manual_seed(0)
    x_0, x_1 = torch.randn(2, 400_000, 1, dtype=torch.float64, generator=generator)
    t = path.times((torch.arange(400_000, dtype=torch.float64) + 0.5) / 400_000, TimeDensity())
    assert sorted(set((40 - 40 * t).round().long().tolist())) == list(range(2, 41))
    found = path.loss(torch.zeros(400_000, 2, dtype=torch.float64), path.mix(x_0, x_1, t))
    assert float(found) == pytest.approx(0.5 * math.log2(2 * math.pi * math.e), abs=0.02)


@pytest.mark.parametrize("kind", ["ddpm", "nonequilibrium"])
def test_a_chain_may_have_fewer_steps_and_others_have_none(kind: str) -> None:
    shorter = path_of(PathSettings(kind=kind, steps=100))  # pyright: ignore
    assert shorter.last == pytest.approx(0.99)
    with pytest.raises(ValueError, match="straight has none: leave it out"):
        PathSettings(steps=100)


def test_half_of_a_hundred_steps_of_ddpm_leaves_as_much_as_of_a_thousand() -> None:
    whole, short, t = DDPM(), DDPM(100), torch.linspace(0, 0.95, 20, dtype=torch.float64)
    assert torch.allclose(whole.coefficients(t).alpha, short.coefficients(t).alpha, atol=0.02)


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
