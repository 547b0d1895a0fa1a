"""What a file may say about the UNet that draws images. Imports nothing heavy."""

from typing import ClassVar, Literal

from pydantic import model_validator

from ..datasets.settings import ImageData
from .generative import GenerativeTraining, GuidedSampling
from .quality_options import Quality, metric_names
from .settings import Share
from .unet_model import UNetModel


class UNetTraining(GenerativeTraining, frozen=True, extra="forbid"):
    """Flow matching, or diffusion, of images by a UNet; by class, where the images have them."""

    PICTURES: ClassVar[tuple[str, ...]] = ("samples", "guidance", "calls")
    METRICS: ClassVar[dict[str, Literal["minimize", "maximize"]]] = {"validation/loss": "minimize"}
    UNITS: ClassVar[dict[str, str]] = {"examples": "images"}

    data: ImageData = ImageData()
    model: UNetModel = UNetModel()
    class_dropout: Share = 0.1
    """Of the training examples, those whose class is left out, so that guidance has something to be guided from."""
    sampling: GuidedSampling = GuidedSampling()
    quality: Quality | None = Quality()
    """How drawn images are scored at every evaluation; null: not at all."""

    def metrics(self) -> dict[str, Literal["minimize", "maximize"]]:
        """The loss, and what the images are scored by, whose names say the features and the number of images."""
        return self.METRICS | (metric_names(self.quality) if self.quality else {})

    def scored_by(self) -> str | None:
        """The kernel distance: unbiased, so that few samples are enough to compare."""
        return next((name for name in self.metrics() if name.startswith("validation/kid")), None)

    @model_validator(mode="after")
    def _guidable(self) -> "UNetTraining":
        if self.sampling.guidance != 1 and self.class_dropout == 0:
            raise ValueError(
                f"sampling.guidance {self.sampling.guidance:g} needs a model that was also trained without classes: "
                "class_dropout is 0; train with 10%, or draw with guidance 1"
            )
        return self


SETTINGS = UNetTraining
