"""What a file may say about a generative training: its path, its times, its sampling. Imports nothing heavy."""

from typing import Annotated, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from .settings import Share, Training

CHAINS = ("ddpm", "nonequilibrium")
"""Paths on which noise comes in steps."""


class PathSettings(BaseModel, frozen=True, extra="forbid"):
    """How noise and data are mixed at time t, and what the network predicts; see `paths.py`."""

    kind: Literal["straight", "optimal-transport", "variance-preserving", "ddpm", "nonequilibrium"] = "straight"
    sigma_min: Annotated[float, Field(ge=0, lt=1)] = 1e-4
    """Noise that is left at t = 1 on the path of conditional optimal transport."""
    steps: Annotated[int, Field(ge=25)] | None = None
    """In which noise comes: of ddpm 1,000, and of nonequilibrium 40, where it is not given; other paths have none."""

    @model_validator(mode="after")
    def _of_a_chain(self) -> "PathSettings":
        if self.steps is not None and self.kind not in CHAINS:
            raise ValueError(f"steps are of {' and '.join(CHAINS)}; {self.kind} has none: leave it out")
        return self


class TimeDensity(BaseModel, frozen=True, extra="forbid"):
    """The density from which training draws t; the steps of a chain are always uniform."""

    kind: Literal["uniform", "logit-normal", "u-shaped"] = "uniform"
    mean: float = 0.0
    """Of logit(t), for `logit-normal` (Esser et al. 2024, equation 19)."""
    deviation: PositiveFloat = 1.0
    steepness: PositiveFloat = 4.0
    """a of p(t) ∝ exp(a·t) + exp(−a·t), for `u-shaped` (Lee et al. 2024, section 4.1)."""


class Sampling(BaseModel, frozen=True, extra="forbid"):
    """How samples are drawn from a trained model."""

    sampler: Literal["auto", "euler", "heun", "midpoint", "adaptive", "ddim", "ancestral"] = "auto"
    """`auto` is the path's own: Euler along a velocity, the ancestral sampler of ddpm and nonequilibrium."""
    steps: PositiveInt = 100
    """Steps from noise to data; Heun and midpoint call the network twice a step. `adaptive` chooses its own.

    Of the ancestral sampler, no more than the path has.
    """
    tolerance: PositiveFloat = 1e-3
    """Relative and absolute error that `adaptive` allows in a step."""
    shift: PositiveFloat = 1.0
    """Above 1 the steps are shorter where there is more noise (Esser et al. 2024, equation 23)."""
    seed: NonNegativeInt = 0
    """Of the noise; the same in all trials, so that their samples compare."""


class GuidedSampling(Sampling, frozen=True, extra="forbid"):
    """How samples of a class are drawn."""

    guidance: Annotated[float, Field(ge=0)] = 1.0
    """The scale w of classifier-free guidance: 0 ignores the class, 1 takes the model as it is, more exaggerates."""
    interval: tuple[Share, Share] = (0.0, 1.0)
    """The times between which there is guidance (Kynkäänniemi et al. 2024); elsewhere the scale is 1."""

    @model_validator(mode="after")
    def _ordered(self) -> "GuidedSampling":
        if self.interval[0] >= self.interval[1]:
            raise ValueError(f"interval: the first time is to be before the second, found {list(self.interval)}")
        return self


class GenerativeTraining(Training, frozen=True, extra="forbid"):
    """Training a network to turn noise into data."""

    path: PathSettings = PathSettings()
    time: TimeDensity = TimeDensity()
    sampling: Sampling = Sampling()

    @model_validator(mode="after")
    def _drawable(self) -> "GenerativeTraining":
        if self.sampling.sampler == "ancestral" and self.path.kind not in CHAINS:
            told = f"{' and '.join(CHAINS)}, found {self.path.kind}"
            raise ValueError(f"sampling.sampler ancestral is of path.kind {told}")
        return self
