"""Paths between noise and data: what is mixed at time t, what the network predicts, and what follows from that.

Time runs from noise (t = 0) to data (t = 1). Every path here is x_t = alpha_t·x_1 + sigma_t·x_0 with x_0 standard
normal noise and x_1 data, and its velocity is v = alpha'_t·x_1 + sigma'_t·x_0; the straight one has alpha_t = t and
sigma_t = 1 − t, so v = x_1 − x_0. A network predicts v, or the noise x_0, or (as in 2015) the mean and the variance
of a step back; given x_t, each gives velocity, noise and data, by solving these two equations.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
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
    outputs = 1
    """Channels of the network's output for each of the data."""
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
        return PathSample(at.alpha * x_1 + at.sigma * x_0, t, self._target(x_0, x_1, at))

    def loss(self, output: Tensor, at: PathSample) -> Tensor:
        """The mean square of what the network's output is off the target by."""
        return functional.mse_loss(output, at.target)

    def read(self, output: Tensor, x_t: Tensor, t: Tensor) -> Prediction:
        """Velocity, noise and data, from the network's output at x_t (n, …) and t (n,)."""
        at = self._at(t, x_t)
        determinant = at.alpha * at.sigma_slope - at.sigma * at.alpha_slope
        data = (at.sigma_slope * x_t - at.sigma * output) / determinant
        noise = (at.alpha * output - at.alpha_slope * x_t) / determinant
        return Prediction(output, noise, data)

    def output_of(self, prediction: Prediction, t: Tensor) -> Tensor:
        """The network's output at t (n,) that says `prediction`: the way back from `read`."""
        return prediction.velocity

    def _target(self, x_0: Tensor, x_1: Tensor, at: Coefficients) -> Tensor:
        return at.alpha_slope * x_1 + at.sigma_slope * x_0

    def _at(self, t: Tensor, like: Tensor) -> Coefficients:
        # Where it costs nothing to look: a GPU would be waited for, and a trace has no values.
        if type(t) is Tensor and t.device.type == "cpu" and bool(((t < 0) | (t > 1)).any()):
            raise ValueError(f"t must be within [0, 1], found {t.min():g} to {t.max():g}")
        return self.coefficients(_over(t.clamp(max=self.last), like))


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


class Chain(Path):
    """Noise that comes in steps; step k of `steps` is the time t = 1 − k/steps.

    `betas` are the variances of the steps. Between steps log(alpha²) is interpolated, so every t has a velocity too.
    """

    first = 1
    """The first step that training draws."""

    def __init__(self, betas: Tensor) -> None:
        self.steps, self.last = len(betas), 1 - 1 / len(betas)
        self._log_alpha_bar = torch.cat((torch.zeros(1, dtype=torch.float64), (-betas.double()).log1p().cumsum(0)))

    @abstractmethod
    def reverse(self, output: Tensor, x_t: Tensor, t: float, after: float) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of x at `after`, given x_t (n, …) and the network's output there."""

    def times(self, uniform: Tensor, density: TimeDensity) -> Tensor:
        """A step from `first` to `steps`, all as likely."""
        drawn = self.first + (uniform * (self.steps + 1 - self.first)).floor()
        return 1 - drawn.clamp(max=self.steps) / self.steps

    def coefficients(self, t: Tensor) -> Coefficients:
        """alpha = √alpha_bar, sigma = √(1 − alpha_bar)."""
        log_alpha_bar, slope = self._interpolated(t)
        alpha, sigma = (log_alpha_bar / 2).exp(), (-torch.expm1(log_alpha_bar)).sqrt()
        alpha_slope = -alpha * slope * self.steps / 2
        found = (alpha, sigma, alpha_slope, -alpha * alpha_slope / sigma)
        return Coefficients(*(value.to(t.dtype) for value in found))

    def _interpolated(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """log(alpha_bar) at times t, and what it changes by in the step there; float64."""
        table = self._log_alpha_bar.to(t.device)
        step = (1 - t.double()) * self.steps
        below = (step + 1e-4).floor().clamp(0, self.steps - 1).long()  # float32 times may lie a hair below a step
        slope = table[below + 1] - table[below]
        return table[below] + slope * (step - below), slope

    def _back(self, t: Tensor, after: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x at `after` given x_t and data: beta, and the weights of data and x_t in its mean (Ho et al. 2020, 7)."""
        now, then = self._interpolated(t)[0], self._interpolated(after)[0]
        beta, sigma2, sigma2_then = -torch.expm1(now - then), -torch.expm1(now), -torch.expm1(then)
        found = (beta, (then / 2).exp() * beta / sigma2, ((now - then) / 2).exp() * sigma2_then / sigma2)
        return tuple(value.to(t.dtype) for value in found)  # pyright: ignore[reportReturnType]


class DDPM(Chain):
    """Denoising diffusion (Ho et al. 2020): noise is predicted; betas rise evenly, from 1e-4 to 0.02 in 1,000 steps.

    With fewer steps each takes as many times more, so that as much noise comes together.
    """

    predicts = "noise"

    def __init__(self, steps: int = 1000) -> None:
        super().__init__(torch.linspace(1e-4, 0.02, steps, dtype=torch.float64) * 1000 / steps)

    def read(self, output: Tensor, x_t: Tensor, t: Tensor) -> Prediction:
        """The data by what the noise leaves over (equation 15)."""
        at = self._at(t, x_t)
        data = (x_t - at.sigma * output) / at.alpha
        return Prediction(at.alpha_slope * data + at.sigma_slope * output, output, data)

    def output_of(self, prediction: Prediction, t: Tensor) -> Tensor:
        """The noise."""
        return prediction.noise

    def reverse(self, output: Tensor, x_t: Tensor, t: float, after: float) -> tuple[Tensor, Tensor]:
        """Algorithm 2, with the larger of the two variances."""
        now = torch.full((len(x_t),), t, dtype=torch.float64, device=x_t.device)
        beta, sigma = self._back(now[:1], now[:1] - t + after)[0], self.coefficients(now[:1]).sigma
        mean = (x_t - (beta / sigma).to(x_t) * output) / (1 - beta).sqrt().to(x_t)
        return mean, beta.sqrt().to(x_t)

    def _target(self, x_0: Tensor, x_1: Tensor, at: Coefficients) -> Tensor:
        return x_0


class Nonequilibrium(Chain):
    """Nonequilibrium thermodynamics (Sohl-Dickstein et al. 2015): mean and variance of each step back are learned.

    Every step takes the same share of the signal (section 2.4.1: beta_k = 1/(T − k + 1)), but the first, which is
    0.001, and the last, which leaves a little, as the variance of a step back from nothing could not be learned. The
    loss is the variational bound of a dimension, in bits.
    """

    predicts = "step"
    outputs = 2
    first = 2  # the first step back has no noise of its own to compare with

    def __init__(self, steps: int = 40) -> None:
        k = torch.arange(1, steps + 1, dtype=torch.float64)
        super().__init__(torch.where(k == 1, 0.001, 1 / (steps - k + 1)).clamp(max=0.99))

    def loss(self, output: Tensor, at: PathSample) -> Tensor:
        """K of equation 14, as bits of a dimension: the divergence at random steps, and the entropies at both ends."""
        t, x_1 = at.t, at.target
        now, then = self._interpolated(t)[0], self._interpolated(t + 1 / self.steps)[0]
        beta, of_data, of_x = self._back(t, t + 1 / self.steps)
        variance = _over(beta * (torch.expm1(then) / torch.expm1(now)).to(beta), x_1)
        mean = _over(of_data, x_1) * x_1 + _over(of_x, x_1) * at.x_t
        own_mean, own_variance = self._learned(output.to(x_1), at.x_t, t, beta)
        divergence = ((variance + (mean - own_mean).square()) / own_variance - 1 - (variance / own_variance).log()) / 2
        ends = (self._log_variance(1) - self._log_variance(self.steps) + math.log(2 * math.pi * math.e)) / 2
        return ((self.steps - 1) * divergence.mean() + ends) / math.log(2)

    def read(self, output: Tensor, x_t: Tensor, t: Tensor) -> Prediction:
        """The data for which the mean of the step back would be the one that was learned."""
        at, t = self._at(t, x_t), t.clamp(max=self.last)
        beta, of_data, of_x = (_over(v, x_t) for v in self._back(t, t + 1 / self.steps))
        mean = self._learned(output, x_t, t, beta)[0]
        data = (mean - of_x * x_t) / of_data
        noise = (x_t - at.alpha * data) / at.sigma
        return Prediction(at.alpha_slope * data + at.sigma_slope * noise, noise, data)

    def output_of(self, prediction: Prediction, t: Tensor) -> Tensor:
        """With the variance that noise came with."""
        at, t = self._at(t, prediction.data), t.clamp(max=self.last)
        x_t = at.alpha * prediction.data + at.sigma * prediction.noise
        beta, of_data, of_x = (_over(v, x_t) for v in self._back(t, t + 1 / self.steps))
        mean = of_data * prediction.data + of_x * x_t
        return torch.cat(((mean - (1 - beta).sqrt() * x_t) / beta.sqrt(), torch.zeros_like(x_t)), dim=1)

    def reverse(self, output: Tensor, x_t: Tensor, t: float, after: float) -> tuple[Tensor, Tensor]:
        """The learned mean and variance; over several steps at once, those of the data that they say."""
        now = torch.full((len(x_t),), t, dtype=x_t.dtype, device=x_t.device)
        beta, of_data, of_x = (_over(v, x_t) for v in self._back(now, now - t + after))
        mean = of_data * self.read(output, x_t, now).data + of_x * x_t
        return mean, self._learned(output, x_t, now, beta)[1].sqrt()

    def _learned(self, output: Tensor, x_t: Tensor, t: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the step back with a forward variance of beta (the authors' code, f_mu and f_sigma)."""
        f_mu, f_sigma = output.chunk(2, dim=1)
        beta = _over(beta, x_t)
        mean = (1 - beta).sqrt() * x_t + beta.sqrt() * f_mu
        return mean, torch.sigmoid(f_sigma / self.steps**0.5 + torch.logit(beta))

    def _log_variance(self, step: int) -> float:
        """Of x at a step, given the data."""
        return math.log(-math.expm1(float(self._log_alpha_bar[step])))

    def _target(self, x_0: Tensor, x_1: Tensor, at: Coefficients) -> Tensor:
        return x_1


def path_of(settings: PathSettings) -> Path:
    """The path that the settings name."""
    paths: dict[str, Callable[[], Path]] = {
        "straight": Straight,
        "optimal-transport": lambda: OptimalTransport(settings.sigma_min),
        "variance-preserving": VariancePreserving,
        "ddpm": lambda: DDPM(settings.steps or 1000),
        "nonequilibrium": lambda: Nonequilibrium(settings.steps or 40),
    }
    return paths[settings.kind]()


def _over(values: Tensor, like: Tensor) -> Tensor:
    """Values (n,), or one for all, to be multiplied with rows of any shape."""
    return values.reshape(-1, *[1] * (like.ndim - 1))


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
