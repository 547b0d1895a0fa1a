"""What a file may say about a generative training: its path, its times, its sampling. Imports nothing heavy."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt


class PathSettings(BaseModel, frozen=True, extra="forbid"):
    """How noise and data are mixed at time t, and what the network predicts; see `paths.py`."""

    kind: Literal["straight", "optimal-transport", "variance-preserving", "ddpm"] = "straight"
    sigma_min: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    """Noise that is left at t = 1 on the path of conditional optimal transport."""


class TimeDensity(BaseModel, frozen=True, extra="forbid"):
    """The density from which training draws t; DDPM's steps are always uniform."""

    kind: Literal["uniform", "logit-normal", "u-shaped"] = "uniform"
    mean: float = 0.0
    """Of logit(t), for `logit-normal` (Esser et al. 2024, equation 19)."""
    deviation: PositiveFloat = 1.0
    steepness: PositiveFloat = 4.0
    """a of p(t) ∝ exp(a·t) + exp(−a·t), for `u-shaped` (Lee et al. 2024, section 4.1)."""


class Sampling(BaseModel, frozen=True, extra="forbid"):
    """How samples are drawn from a trained model."""

    sampler: Literal["auto", "euler", "heun", "midpoint", "adaptive", "ddim", "ancestral"] = "auto"
    """`auto` is the path's own: Euler along a velocity, DDPM's ancestral sampler where noise is predicted."""
    steps: PositiveInt = 100
    """Steps from noise to data; Heun and midpoint call the network twice a step. `adaptive` chooses its own."""
    tolerance: PositiveFloat = 1e-3
    """Relative and absolute error that `adaptive` allows in a step."""
