"""What a file may say about points in the plane. Imports nothing heavy."""

from typing import ClassVar, Literal

from pydantic import BaseModel, PositiveInt, model_validator

from ..datasets.settings import PointsData
from .generative import PathSettings, Sampling, TimeDensity
from .settings import Training


class PointsModel(BaseModel, frozen=True, extra="forbid"):
    """A network of dense layers on (x, y, t)."""

    width: PositiveInt = 96
    layers: PositiveInt = 2
    """Hidden layers, each with a SiLU."""


class PointsTraining(Training, frozen=True, extra="forbid"):
    """Flow matching, or diffusion, of points in the plane."""

    METRICS: ClassVar[dict[str, Literal["minimize", "maximize"]]] = {
        "validation/loss": "minimize",
        "validation/energy_distance": "minimize",
        "validation/sliced_wasserstein": "minimize",
        "validation/near_a_mode": "maximize",
        "validation/evenness": "maximize",
    }
    UNITS: ClassVar[dict[str, str]] = {"examples": "points"}

    data: PointsData = PointsData()
    model: PointsModel = PointsModel()
    path: PathSettings = PathSettings()
    time: TimeDensity = TimeDensity()
    sampling: Sampling = Sampling()

    @model_validator(mode="after")
    def _drawable(self) -> "PointsTraining":
        if self.sampling.sampler == "ancestral" and self.path.kind != "ddpm":
            raise ValueError(f"sampling.sampler ancestral is of path.kind ddpm, found {self.path.kind}")
        return self


SETTINGS = PointsTraining
