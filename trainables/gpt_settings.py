"""What a file may say about a GPT. Imports nothing heavy."""

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, model_validator

from ..datasets.settings import Share, TextData
from .settings import Training


class GPTModel(BaseModel, frozen=True, extra="forbid"):
    """A pre-norm decoder with rotary positions.

    Squared ReLU and normalised queries and keys are the defaults because together they ended 0.01 nats lower
    than GELU without (4 layers of 128 wide, 1.5 million characters of Shakespeare, learning rate 4e-3).
    """

    layers: PositiveInt = 12
    width: PositiveInt = 768
    head_width: PositiveInt = 64
    feedforward: PositiveFloat = 4.0
    """Hidden width of the feed-forward layers, in widths."""
    activation: Literal["gelu", "squared_relu"] = "squared_relu"
    """Squared ReLU is of Primer (So et al. 2021)."""
    qk_norm: bool = True
    """Normalise the queries and keys of every head, so that scores cannot grow without bound."""
    tied: bool = True
    """The output head shares the embedding's weights."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    rotary_base: PositiveFloat = 10_000.0

    @model_validator(mode="after")
    def _heads(self) -> "GPTModel":
        if self.width % self.head_width:
            raise ValueError(f"width {self.width} is not divisible by head_width {self.head_width}")
        if self.head_width % 2:
            raise ValueError(f"head_width {self.head_width} is odd; rotary positions need an even one")
        return self


class TextSampling(BaseModel, frozen=True, extra="forbid"):
    """The text sample drawn at every evaluation."""

    tokens: PositiveInt = 200
    prompt: str = ""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """0 takes the likeliest token."""
    top_k: PositiveInt | None = None
    top_p: Annotated[Share, Field(gt=0)] | None = 0.95


class GPTTraining(Training, frozen=True, extra="forbid"):
    """A GPT on text."""

    METRICS: ClassVar[dict[str, Literal["minimize", "maximize"]]] = {
        "validation/loss": "minimize",
        "validation/bits_per_byte": "minimize",
    }
    UNITS: ClassVar[dict[str, str]] = {
        "examples": "tokens",
        "validation/loss": "nats per token",
        "validation/bits_per_byte": "bits per byte",
    }

    data: TextData = TextData()
    model: GPTModel = GPTModel()
    sampling: TextSampling = TextSampling()

    @model_validator(mode="after")
    def _whole_rows(self) -> "GPTTraining":
        if self.batch.examples % self.data.sequence_length:
            raise ValueError(
                f"batch.examples {self.batch.examples} is not a multiple of "
                f"data.sequence_length {self.data.sequence_length}"
            )
        return self


SETTINGS = GPTTraining
