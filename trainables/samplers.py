"""Samplers: from noise to data along a velocity, or step by step as DDPM and DDIM do.

A solver is a plain function of a velocity v(x, t), where it starts, and a grid of times; the equal measure of two is
network calls, `calls`. x has the shape (n, …) and t the shape (n,).
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .generative import Sampling
from .paths import Chain, Path, Prediction

Velocity = Callable[[Tensor, Tensor], Tensor]
Predict = Callable[[Tensor, Tensor], Prediction]
CALLS_PER_STEP = {"euler": 1, "heun": 2, "midpoint": 2, "ddim": 1, "ancestral": 1}


def euler(v: Velocity, x: Tensor, times: Sequence[float]) -> Tensor:
    """First order, one call a step."""
    for t, after in _steps(times):
        x = x + (after - t) * v(x, _like(t, x))
    return x


def heun(v: Velocity, x: Tensor, times: Sequence[float]) -> Tensor:
    """Second order, two calls a step: the mean of the velocities at both ends."""
    for t, after in _steps(times):
        first = v(x, _like(t, x))
        second = v(x + (after - t) * first, _like(after, x))
        x = x + (after - t) * (first + second) / 2
    return x


def midpoint(v: Velocity, x: Tensor, times: Sequence[float]) -> Tensor:
    """Second order, two calls a step: the velocity half way."""
    for t, after in _steps(times):
        half = (after - t) / 2
        x = x + (after - t) * v(x + half * v(x, _like(t, x)), _like(t + half, x))
    return x


def adaptive(v: Velocity, x: Tensor, times: Sequence[float], tolerance: float = 1e-3) -> Tensor:
    """Third order with a second-order check (Bogacki and Shampine 1989); from the first to the last of `times`.

    One step size for all rows, so that the worst of them is as good as asked. Three calls a step.
    """
    t, end = float(times[0]), float(times[-1])
    step = (end - t) / 20
    first = v(x, _like(t, x))
    while end - t > 1e-9:
        step = min(step, end - t)
        second = v(x + step / 2 * first, _like(t + step / 2, x))
        third = v(x + step * 3 / 4 * second, _like(t + step * 3 / 4, x))
        found = x + step * (2 * first + 3 * second + 4 * third) / 9
        last = v(found, _like(min(t + step, end), x))
        difference = step * (-5 * first + 6 * second + 8 * third - 9 * last) / 72
        scale = tolerance * (1 + torch.maximum(x.abs(), found.abs()))
        error = float((difference / scale).flatten(1).square().mean(1).sqrt().max())
        if error <= 1 or step < 1e-5:
            t, x, first = t + step, found, last
        step *= min(5.0, max(0.2, 0.9 * max(error, 1e-9) ** (-1 / 3)))
    return x


def ddim(predict: Predict, path: Path, x: Tensor, times: Sequence[float]) -> Tensor:
    """Deterministic (Song et al. 2020, equation 12 without noise): today's data and noise, mixed for the next time."""
    for t, after in _steps(times):
        found = predict(x, _like(t, x))
        if after >= 1:  # nothing but data is left
            return found.data
        at = path.coefficients(torch.tensor(after))
        x = at.alpha.to(x) * found.data + at.sigma.to(x) * found.noise
    return x


def ancestral(
    network: Velocity, path: Chain, x: Tensor, times: Sequence[float], noise: Callable[[int], Tensor]
) -> Tensor:
    """The chain back as it was learned (Ho et al. 2020, algorithm 2), over any grid of times.

    `noise(step)` is standard normal of x's shape; the last step takes none.
    """
    for step, (t, after) in enumerate(_steps(times)):
        output = network(x, _like(t, x))
        if after >= 1:  # nothing but data is left
            return path.read(output, x, _like(t, x)).data
        mean, deviation = path.reverse(output, x, t, after)
        x = mean + deviation * noise(step)
    return x


def draw(
    network: Velocity, path: Path, sampling: Sampling, x: Tensor, noise: Callable[[int], Tensor] | None = None
) -> Tensor:
    """Samples from noise x (n, …), as the settings say; the network's output is what its path predicts.

    `noise` is needed by the ancestral sampler alone.
    """

    def predict(x_t: Tensor, t: Tensor) -> Prediction:
        return path.read(network(x_t, t), x_t, t)

    def velocity(x_t: Tensor, t: Tensor) -> Tensor:
        return predict(x_t, t).velocity

    kind, times = kind_of(sampling, path), time_grid(sampling, path)
    if kind == "ddim":
        return ddim(predict, path, x, times)
    if kind == "ancestral":
        assert isinstance(path, Chain) and noise is not None, "it draws noise at every step of a chain"
        return ancestral(network, path, x, times, noise)
    if kind == "adaptive":
        return adaptive(velocity, x, times, sampling.tolerance)
    return {"euler": euler, "heun": heun, "midpoint": midpoint}[kind](velocity, x, times)


def time_grid(sampling: Sampling, path: Path) -> list[float]:
    """From 0 to 1, all ends of steps; t = u / (u + shift·(1 − u)) of even u."""
    even = torch.linspace(0, 1, _number_of_steps(sampling, path) + 1, dtype=torch.float64)
    return (even / (even + sampling.shift * (1 - even))).tolist()


def kind_of(sampling: Sampling, path: Path) -> str:
    """The sampler that the settings name, or the path's own: back along the chain where it is one, else Euler's."""
    own = "ancestral" if isinstance(path, Chain) else "euler"
    return own if sampling.sampler == "auto" else sampling.sampler


def calls_of(sampling: Sampling, path: Path) -> int | None:
    """Network calls from noise to data; None of `adaptive`, which chooses its own steps."""
    kind = kind_of(sampling, path)
    return None if kind == "adaptive" else _number_of_steps(sampling, path) * CALLS_PER_STEP[kind]


def _number_of_steps(sampling: Sampling, path: Path) -> int:
    """Those asked for; of a chain that goes back as it was learned, no more than it has."""
    if isinstance(path, Chain) and kind_of(sampling, path) == "ancestral":
        return min(sampling.steps, path.steps)
    return sampling.steps


def guided(
    network: Callable[[Tensor, Tensor, Tensor], Tensor],
    label: Tensor,
    null: int,
    scale: float,
    interval: tuple[float, float] = (0.0, 1.0),
) -> Velocity:
    """Classifier-free guidance (Ho and Salimans 2022): v = v_null + scale·(v_label − v_null), in one call of 2n rows.

    At scale 1 (the plain conditional) and 0 (without label) half of the call would be thrown away, and is left out.
    Outside the interval of times the scale is 1; all rows of a call are at one time.
    """

    def velocity(x: Tensor, t: Tensor) -> Tensor:
        now = scale if interval == (0, 1) or interval[0] <= float(t[0]) <= interval[1] else 1
        without = torch.full_like(label, null)
        if now in (0, 1):
            return network(x, t, label if now == 1 else without)
        both = network(torch.cat((x, x)), torch.cat((t, t)), torch.cat((label, without)))
        conditional, unconditional = both.chunk(2)
        return unconditional + now * (conditional - unconditional)

    return velocity


def _steps(times: Sequence[float]) -> list[tuple[float, float]]:
    return list(itertools.pairwise(times))


def _like(t: float, x: Tensor) -> Tensor:
    return torch.full((len(x),), t, dtype=x.dtype, device=x.device)
