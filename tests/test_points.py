"""Points in the plane: their data, how near samples are to it, and a training by the one loop."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rigsweep.datasets.points import RADIUS, modes, points
from rigsweep.trainables import point_quality
from rigsweep.trainables.flops import training_flops_per_example
from rigsweep.trainables.points import PointsTask
from rigsweep.trainables.points_settings import PointsTraining

KINDS = ["eight-gaussians", "swiss-roll", "checkerboard"]


def task(**told: Any) -> PointsTask:
    return PointsTask(PointsTraining.model_validate({"budget": {"examples": 256}, **told}), Path())


@pytest.mark.parametrize("kind", KINDS)
def test_a_point_is_a_function_of_seed_and_index(kind: str) -> None:
    whole = points(kind, 7, np.arange(100, 200))
    assert whole.dtype == np.float32 and whole.shape == (100, 2)
    assert np.array_equal(whole[40:45], points(kind, 7, np.arange(140, 145)))
    assert not np.array_equal(whole, points(kind, 8, np.arange(100, 200)))


def test_the_gaussians_are_even_and_as_wide_as_told() -> None:
    found = points("eight-gaussians", 0, np.arange(80_000))
    centres = modes("eight-gaussians")
    assert centres is not None and np.allclose(np.hypot(*centres.T), RADIUS)
    distance = np.linalg.norm(found[:, None] - centres, axis=2)
    counts = np.bincount(distance.argmin(1), minlength=8)
    assert counts.min() > 9_600 and counts.max() < 10_400
    offsets = found - centres[distance.argmin(1)]
    assert offsets.std() == pytest.approx(0.1, rel=0.02)
    assert abs(offsets.mean()) < 0.002


def test_the_checkerboard_has_eight_dark_squares() -> None:
    x, y = (points("checkerboard", 0, np.arange(40_000)) * 0.9).T
    assert (np.abs(x) <= 2).all() and (np.abs(y) <= 2).all()
    assert ((np.floor(x) + np.floor(y)) % 2 == 0).all()
    counts = np.unique(np.stack((np.floor(x), np.floor(y))), axis=1, return_counts=True)[1]
    assert len(counts) == 8 and counts.min() > 4_600


def test_the_roll_winds_around() -> None:
    found = points("swiss-roll", 0, np.arange(20_000))
    radius = np.hypot(*found.T) * 7.5
    assert 1.4 * math.pi < np.quantile(radius, 0.01) < np.quantile(radius, 0.99) < 4.6 * math.pi
    assert modes("swiss-roll") is None


def test_the_data_is_near_itself_and_far_from_noise() -> None:
    real, again = (torch.from_numpy(points("eight-gaussians", seed, np.arange(2000))) for seed in (0, 1))
    noise = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    assert abs(point_quality.energy_distance(real, again)) < 0.01 < 0.1 < point_quality.energy_distance(real, noise)
    assert point_quality.sliced_wasserstein(real, again) < 0.2 < 0.4 < point_quality.sliced_wasserstein(real, noise)
    centres = torch.from_numpy(modes("eight-gaussians"))
    counts = point_quality.counts_per_mode(real, centres)
    assert counts.sum() > 1970 and point_quality.evenness(counts) > 0.999
    assert point_quality.evenness(torch.tensor([10, 0, 0, 0])) == 0


def test_two_distances_in_closed_form() -> None:
    a = torch.tensor([[0.0, 0.0], [0.0, 0.0]])
    b = a + torch.tensor([3.0, 4.0])
    assert point_quality.energy_distance(a, b) == pytest.approx(10.0)
    # The mean over directions of (5·cos)² is 25/2.
    assert point_quality.sliced_wasserstein(a, b) == pytest.approx(math.sqrt(12.5), rel=1e-6)


def test_micro_batches_change_nothing() -> None:
    points_task = task()
    model = points_task.build()
    whole = points_task.loss(model, points_task.batch(0, 64))["loss"]
    parts = [points_task.loss(model, points_task.batch(start, 16))["loss"] for start in range(0, 64, 16)]
    assert torch.stack(parts).mean().item() == pytest.approx(whole.item(), rel=1e-6)


def test_flops_are_those_of_the_formula() -> None:
    points_task = task(model={"width": 64, "layers": 3})
    assert training_flops_per_example(points_task) == pytest.approx(points_task.flops_formula_per_example(), rel=0.02)


def test_the_ancestral_sampler_is_of_chains_alone() -> None:
    with pytest.raises(ValueError, match=r"is of path\.kind ddpm and nonequilibrium, found straight"):
        task(sampling={"sampler": "ancestral"})


@pytest.mark.parametrize("kind", ["straight", "variance-preserving", "ddpm", "nonequilibrium"])
def test_it_learns(kind: str) -> None:
    """Two seconds of training bring samples nearer to the data than noise is."""
    points_task = task(path={"kind": kind}, sampling={"steps": 50})
    model = points_task.build()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    before = points_task.evaluate(model, torch.device("cpu"))
    for step in range(600):
        sum(points_task.loss(model, points_task.batch(step * 256, 256)).values()).backward()
        optimizer.step()
        optimizer.zero_grad()
    after = points_task.evaluate(model, torch.device("cpu"))
    assert set(after) == set(PointsTraining.METRICS)
    assert after["validation/loss"] < 0.9 * before["validation/loss"]
    assert after["validation/energy_distance"] < 0.3 * before["validation/energy_distance"]
    assert after["validation/near_a_mode"] > 0.2
