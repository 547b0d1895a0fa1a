"""What a file may say about the closed-form surface. Imports nothing heavy."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from .settings import Share, Training


class SurfaceModel(BaseModel, frozen=True, extra="forbid"):
    """The surface's own dials."""

    width: PositiveInt = 64
    noise: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of the noise on every evaluation; a function of the seed and the examples."""
    label: str = ""
    """Changes nothing: for rehearsing values that are hard to keep, such as text in any script."""
    seconds_per_step: Annotated[float, Field(ge=0)] = 0.0
    fault: Literal["raise", "hang", "die", "die_always", "diverge", "warn", "out_of_memory"] | None = None
    """What goes wrong, for rehearsing: `die` kills the worker's process the first time, `die_always` always."""
    fault_at: Share = 0.5
    fault_above: Annotated[float, Field(ge=0)] = 0.0
    """The fault happens only with a learning rate above this."""
    fault_worker: NonNegativeInt = 0
    """Of several workers, the one to which it happens."""


class SurfaceTraining(Training, frozen=True, extra="forbid"):
    """A closed form that looks like training: for trying a sweep file in seconds."""

    METRICS: ClassVar[dict[str, Literal["minimize", "maximize"]]] = {
        "validation/loss": "minimize",
        "validation/accuracy": "maximize",
    }

    model: SurfaceModel = SurfaceModel()


SETTINGS = SurfaceTraining
