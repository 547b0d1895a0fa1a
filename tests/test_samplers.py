"""Samplers, where the velocity is known: from a standard normal to another Gaussian."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rigsweep.trainables import samplers
from rigsweep.trainables.generative import PathSettings, Sampling
from rigsweep.trainables.paths import Chain, Nonequilibrium, Path, Prediction, path_of

MEAN, DEVIATION = 1.5, 0.4


def path(kind: str = "straight") -> Path:
    return path_of(PathSettings(kind=kind))  # pyright: ignore


def perfect(path: Path):
    """The best network for data of N(MEAN, DEVIATION²): what it says is the mean, given x_t."""

    def network(x: Tensor, t: Tensor) -> Tensor:
        at = path.coefficients(t.clamp(max=path.last).reshape(-1, 1))
        variance = (at.alpha * DEVIATION) ** 2 + at.sigma**2
        surprise = (x - at.alpha * MEAN) / variance
        data, noise = MEAN + at.alpha * DEVIATION**2 * surprise, at.sigma * surprise
        told = path.output_of(Prediction(at.alpha_slope * data + at.sigma_slope * noise, noise, data), t)
        if isinstance(path, Nonequilibrium):
            told[:, 1:] = _variance_of_a_step_back(path, t, (DEVIATION * at.sigma) ** 2 / variance)
        return told

    return network


def _variance_of_a_step_back(path: Nonequilibrium, t: Tensor, of_data: Tensor) -> Tensor:
    """As the network says it: the noise that the step came with, and what x_t leaves open about the data."""
    t = t.clamp(max=path.last).reshape(-1, 1)
    now, then = path.coefficients(t), path.coefficients((t + 1 / path.steps).clamp(max=path.last))
    beta = 1 - (now.alpha / then.alpha) ** 2
    variance = beta * (then.sigma / now.sigma) ** 2 + (then.alpha * beta / now.sigma**2) ** 2 * of_data
    return path.steps**0.5 * (torch.logit(variance) - torch.logit(beta))


def start(rows: int = 4096) -> Tensor:
    return torch.randn(rows, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("solver", "order"), [(samplers.euler, 1), (samplers.heun, 2), (samplers.midpoint, 2)], ids=["1", "2", "2m"]
)
def test_orders_of_convergence(solver: Callable[..., Tensor], order: int) -> None:
    def velocity(x: Tensor, t: Tensor) -> Tensor:
        return torch.sin(5 * t)[:, None] - 2 * x

    x = start(64)
    exact = samplers.adaptive(velocity, x, (0.0, 1.0), 1e-11)
    errors = []
    for steps in (40, 80, 160):
        times = torch.linspace(0, 1, steps + 1, dtype=torch.float64).tolist()
        errors.append(float((solver(velocity, x, times) - exact).abs().max()))
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert slopes == pytest.approx([order] * 2, abs=0.1)


def test_the_flow_between_gaussians_keeps_the_order_of_points() -> None:
    x = start(64)
    found = samplers.draw(perfect(path()), path(), Sampling(sampler="heun", steps=100), x)
    assert torch.allclose(found, MEAN + DEVIATION * x, atol=1e-3)


KINDS = ["straight", "optimal-transport", "variance-preserving", "ddpm", "nonequilibrium"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sampler", ["auto", "heun", "ddim", "ancestral"])
def test_every_path_reaches_the_data_by_every_sampler(kind: str, sampler: str) -> None:
    x, generator = start(), torch.Generator().manual_seed(1)
    if sampler == "ancestral" and not isinstance(path(kind), Chain):
        pytest.skip("it has no steps to go back by")
    sampling = Sampling(sampler=sampler, steps=500)  # pyright: ignore
    found = samplers.draw(
        perfect(path(kind)), path(kind), sampling, x, lambda _: torch.randn(x.shape, generator=generator).double()
    )
    assert float(found.mean()) == pytest.approx(MEAN, abs=0.03)
    assert float(found.std()) == pytest.approx(DEVIATION, abs=0.03)


def test_the_adaptive_one_meets_its_tolerance_in_few_calls() -> None:
    x, calls = start(256), []
    network = perfect(path())

    def counted(x: Tensor, t: Tensor) -> Tensor:
        calls.append(1)
        return network(x, t)

    found = samplers.draw(counted, path(), Sampling(sampler="adaptive", tolerance=1e-4), x)
    assert float((found - MEAN - DEVIATION * x).abs().max()) < 1e-3
    assert len(calls) < 100


def test_guidance_goes_from_without_through_with_and_beyond() -> None:
    rows: list[int] = []

    def network(x: Tensor, t: Tensor, label: Tensor) -> Tensor:
        rows.append(len(x))
        return label.to(x.dtype)[:, None].expand_as(x)

    x, t, label = start(8), torch.zeros(8), torch.full((8,), 3)
    for scale, expected in [(0.0, 10), (1.0, 3), (2.0, -4), (0.5, 6.5)]:
        found = samplers.guided(network, label, 10, scale)(x, t)
        assert torch.allclose(found, torch.tensor(float(expected), dtype=torch.float64))
    assert rows == [8, 8, 16, 16]


def test_back_along_a_chain_takes_no_more_steps_than_it_has() -> None:
    chain = path("nonequilibrium")
    assert samplers.calls_of(Sampling(steps=1000), chain) == 40
    assert samplers.calls_of(Sampling(steps=10), chain) == 10
    assert samplers.calls_of(Sampling(sampler="ddim", steps=1000), chain) == 1000
    assert len(samplers.time_grid(Sampling(steps=1000), chain)) == 41
