"""What a file may say about the UNet itself. Imports nothing heavy."""

from typing import Annotated

from pydantic import BaseModel, Field, PositiveInt, model_validator

GROUP = 8
"""Channels that are normalised together."""


class UNetModel(BaseModel, frozen=True, extra="forbid"):
    """A UNet of three resolutions, each `base` channels wide."""

    base: PositiveInt = 128
    """Channels."""
    blocks: PositiveInt = 2
    """Residual blocks on the way down in each resolution, and as many on the way up."""
    attention: bool = False
    """Self-attention in the middle, at the lowest resolution."""
    head_width: PositiveInt = 32
    """Channels of an attention head."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0

    @model_validator(mode="after")
    def _whole_groups(self) -> "UNetModel":
        if self.base % GROUP:
            raise ValueError(f"base {self.base} is not a multiple of {GROUP}, the channels normalised together")
        if self.attention and self.base % self.head_width:
            raise ValueError(f"base {self.base} is not divisible by head_width {self.head_width}")
        return self
