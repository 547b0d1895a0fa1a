"""What a file may say about points in the plane. Imports nothing heavy."""

from typing import ClassVar, Literal

from pydantic import BaseModel, PositiveInt

from ..datasets.settings import PointsData
from .generative import GenerativeTraining


class PointsModel(BaseModel, frozen=True, extra="forbid"):
    """A network of dense layers on (x, y, t)."""

    width: PositiveInt = 96
    layers: PositiveInt = 2
    """Hidden layers, each with a SiLU."""


class PointsTraining(GenerativeTraining, frozen=True, extra="forbid"):
    """Flow matching, or diffusion, of points in the plane."""

    PICTURES: ClassVar[tuple[str, ...]] = ("points",)
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

    def scored_by(self) -> str | None:
        """How far samples are from data, whatever the data is."""
        return "validation/energy_distance"


SETTINGS = PointsTraining
