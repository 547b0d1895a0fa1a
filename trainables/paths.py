"""Paths between noise and data: what is mixed at time t, what the network predicts, and what follows from that.

Time runs from noise (t = 0) to data (t = 1). Every path here is x_t = alpha_t·x_1 + sigma_t·x_0 with x_0 standard
normal noise and x_1 data, and its velocity is v = alpha'_t·x_1 + sigma'_t·x_0; the straight one has alpha_t = t and
sigma_t = 1 − t, so v = x_1 − x_0. A network predicts either v or the noise x_0; given x_t, either gives the other, and
the data, by solving these two equations.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from .generative import PathSettings, TimeDensity


@dataclass(frozen=True)
class PathSample:
    """A point of a path: x_t and the target, of the same shape (n, …), and t of shape (n,)."""

    x_t: Tensor
    t: Tensor
    target: Tensor


@dataclass(frozen=True)
class Prediction:
    """What a network's output says at x_t, three ways; each of x_t's shape."""

    velocity: Tensor
    noise: Tensor
    data: Tensor


@dataclass(frozen=True)
class Coefficients:
    """alpha_t, sigma_t and their derivatives by t."""

    alpha: Tensor
    sigma: Tensor
    alpha_slope: Tensor
    sigma_slope: Tensor


class Path(ABC):
    """How noise becomes data; `predicts` says what the network is trained on."""

    predicts = "velocity"
    last = 1.0
    """The latest time that training draws: some velocities are infinite at t = 1."""

    @abstractmethod
    def coefficients(self, t: Tensor) -> Coefficients:
        """At times t, of any shape."""

    def times(self, uniform: Tensor, density: TimeDensity) -> Tensor:
        """Times of the density, from uniform draws in (0, 1), of the same shape."""
        return _from_uniform(uniform, density) * self.last

    def mix(self, x_0: Tensor, x_1: Tensor, t: Tensor) -> PathSample:
        """The point at t (n,) between noise x_0 and data x_1 (n, …). Raises ValueError for a t outside [0, 1]."""
        at = self._at(t, x_1)
        velocity = at.alpha_slope * x_1 + at.sigma_slope * x_0
        return PathSample(at.alpha * x_1 + at.sigma * x_0, t, x_0 if self.predicts == "noise" else velocity)

    def loss(self, output: Tensor, at: PathSample) -> Tensor:
        """The mean square of what the network's output is off the target by."""
        return functional.mse_loss(output, at.target)

    def read(self, output: Tensor, x_t: Tensor, t: Tensor) -> Prediction:
        """Velocity, noise and data, from the network's output at x_t (n, …) and t (n,)."""
        at = self._at(t, x_t)
        if self.predicts == "noise":
            noise, data = output, (x_t - at.sigma * output) / at.alpha
            return Prediction(at.alpha_slope * data + at.sigma_slope * noise, noise, data)
        determinant = at.alpha * at.sigma_slope - at.sigma * at.alpha_slope
        data = (at.sigma_slope * x_t - at.sigma * output) / determinant
        noise = (at.alpha * output - at.alpha_slope * x_t) / determinant
        return Prediction(output, noise, data)

    def output_of(self, prediction: Prediction) -> Tensor:
        """The network's output that says `prediction`: the way back from `read`."""
        return prediction.noise if self.predicts == "noise" else prediction.velocity

    def _at(self, t: Tensor, like: Tensor) -> Coefficients:
        if not t.is_meta and bool(((t < 0) | (t > 1)).any()):
            raise ValueError(f"t must be within [0, 1], found {t.min():g} to {t.max():g}")
        return self.coefficients(t.clamp(max=self.last).reshape(-1, *[1] * (like.ndim - 1)))


class Straight(Path):
    """Rectified flow (Liu et al. 2022, equation 1): the straight line from noise to data."""

    def coefficients(self, t: Tensor) -> Coefficients:
        """alpha = t, sigma = 1 − t."""
        one = torch.ones_like(t)
        return Coefficients(t, 1 - t, one, -one)


class OptimalTransport(Path):
    """Conditional optimal transport (Lipman et al. 2022, equations 20 to 23): straight, but sigma_min is left."""

    def __init__(self, sigma_min: float):
        self._sigma_min = sigma_min

    def coefficients(self, t: Tensor) -> Coefficients:
        """alpha = t, sigma = 1 − (1 − sigma_min)·t."""
        one, fall = torch.ones_like(t), 1 - self._sigma_min
        return Coefficients(t, 1 - fall * t, one, -fall * one)


class VariancePreserving(Path):
    """The diffusion path with velocity as its target (Lipman et al. 2022, equations 18 and 19).

    alpha_t = exp(−T(1 − t)/2) with T(s) = s·b_min + s²·(b_max − b_min)/2, and alpha² + sigma² = 1.
    """

    last = 1 - 1e-5
    _least, _most = 0.1, 20.0

    def coefficients(self, t: Tensor) -> Coefficients:
        """Infinite slopes at t = 1, so only up to `last`."""
        s = 1 - t
        total = s * self._least + s**2 * (self._most - self._least) / 2
        alpha, sigma = (-total / 2).exp(), (-torch.expm1(-total)).sqrt()
        alpha_slope = alpha * (self._least + s * (self._most - self._least)) / 2
        return Coefficients(alpha, sigma, alpha_slope, -alpha * alpha_slope / sigma)


class DDPM(Path):
    """Denoising diffusion (Ho et al. 2020): noise is predicted, 1,000 steps, betas rising from 1e-4 to 0.02.

    Step k is the time t = 1 − k/1000. Between steps log(alpha²) is interpolated, so every t has a velocity too.
    """

    predicts = "noise"
    steps = 1000

    def __init__(self) -> None:
        betas = torch.linspace(1e-4, 0.02, self.steps, dtype=torch.float64)
        self._log_alpha_bar = torch.cat((torch.zeros(1, dtype=torch.float64), (-betas).log1p().cumsum(0)))
        self.last = 1 - 1 / self.steps

    def times(self, uniform: Tensor, density: TimeDensity) -> Tensor:
        """A step from 1 to 1,000, all as likely."""
        return 1 - ((uniform * self.steps).floor() + 1).clamp(max=self.steps) / self.steps

    def coefficients(self, t: Tensor) -> Coefficients:
        """alpha = √alpha_bar, sigma = √(1 − alpha_bar)."""
        table = self._log_alpha_bar.to(t.device)
        step = (1 - t.double()) * self.steps
        below = (step + 1e-4).floor().clamp(0, self.steps - 1).long()  # float32 times may lie a hair below a step
        slope = table[below + 1] - table[below]
        log_alpha_bar = table[below] + slope * (step - below)
        alpha, sigma = (log_alpha_bar / 2).exp(), (-torch.expm1(log_alpha_bar)).sqrt()
        alpha_slope = -alpha * slope * self.steps / 2
        found = (alpha, sigma, alpha_slope, -alpha * alpha_slope / sigma)
        return Coefficients(*(value.to(t.dtype) for value in found))


def path_of(settings: PathSettings) -> Path:
    """The path that the settings name."""
    paths: dict[str, Path] = {
        "straight": Straight(),
        "optimal-transport": OptimalTransport(settings.sigma_min),
        "variance-preserving": VariancePreserving(),
        "ddpm": DDPM(),
    }
    return paths[settings.kind]


def _from_uniform(u: Tensor, density: TimeDensity) -> Tensor:
    """The inverse of the density's distribution function."""
    if density.kind == "logit-normal":
        normal = math.sqrt(2) * torch.erfinv((2 * u - 1).clamp(-1 + 1e-6, 1 - 1e-6))
        return torch.sigmoid(density.mean + density.deviation * normal)
    if density.kind == "u-shaped":
        # p(t) ∝ exp(a·t) + exp(a·(1 − t)): the integral is (1 + sinh(a·(t − 1/2)) / sinh(a/2)) / 2.
        a = density.steepness
        return 0.5 + torch.asinh((2 * u - 1) * math.sinh(a / 2)) / a
    return u
