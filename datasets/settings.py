"""What a file may say about data. Imports nothing heavy, so that a wrong file is answered at once."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt, field_validator

Share = Annotated[float, Field(ge=0, le=1)]


class TextData(BaseModel, frozen=True, extra="forbid"):
    """A text corpus, how it becomes tokens, and which part is kept for validation."""

    corpus: str | tuple[str, ...] = "python-stdlib"
    """`python-stdlib`, files, folders and globs, or `hf://datasets/<owner>/<name>/<glob>`."""
    column: str = "text"
    """The column or key that holds the text, for .parquet and .jsonl."""
    vocabulary: Annotated[int, Field(ge=257, le=1_000_000)] | str = 4096
    """`characters`, the size of a byte-level BPE to train, or a pretrained tokenizer by folder or Hub name."""
    sequence_length: Annotated[int, Field(ge=2)] = 1024
    """Tokens in one row of a batch."""
    validation: Annotated[float, Field(gt=0, lt=1)] | str = 0.05
    """A share of the documents, chosen by hash; or `last 10%`, the end of each file."""

    @field_validator("vocabulary")
    @classmethod
    def _named(cls, value: int | str) -> int | str:
        if isinstance(value, str) and not value.strip():
            raise ValueError("is empty: give `characters`, a size such as 4096, or a tokenizer's folder or Hub name")
        return value

    @field_validator("corpus")
    @classmethod
    def _some(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or "" in ((value,) if isinstance(value, str) else value):
            raise ValueError("is empty: give `python-stdlib`, a path or glob, or hf://datasets/...")
        return value

    @field_validator("validation")
    @classmethod
    def _last(cls, value: float | str) -> float | str:
        if isinstance(value, str):
            found = re.fullmatch(r"last (\d+(?:\.\d+)?)%", value)
            if not found or not 0 < float(found[1]) < 100:
                raise ValueError("allowed: a share between 0% and 100%, or `last 10%`")
        return value


class PointsData(BaseModel, frozen=True, extra="forbid"):
    """Points in the plane, drawn without end from a known density."""

    kind: Literal["eight-gaussians", "swiss-roll", "checkerboard"] = "eight-gaussians"
    """Eight Gaussians on a circle of radius 2, each with deviation 0.1; a spiral; the dark squares of a board."""


class ImageData(BaseModel, frozen=True, extra="forbid"):
    """A set of images, how they become pixels, and which part is kept for validation."""

    source: Annotated[str, Field(min_length=1)] = "digits"
    """`digits`, a folder, a file or glob (images, .parquet, .tar), or `hf://datasets/<owner>/<name>/<glob>`."""
    image_column: str | None = None
    """The Parquet column of the images; None: `image` or `img`."""
    label_column: str | None = None
    """The column or key of the labels; None: `label` or `labels`, where there is one."""
    caption_column: str | None = None
    """The column or key of the captions; None: `text` or `caption`, where there is one."""
    size: PositiveInt | None = None
    """Pixels of a side: the middle square is scaled to it. None: the images' own, if all are squares of one size."""
    enlarge: bool = False
    """Whether images smaller than `size` are scaled up, rather than an error."""
    channels: Literal[1, 3] | None = None
    """1 is grey, 3 is RGB; None: 1 for digits, else 3."""
    flip: bool = False
    """Mirror half of the training images, others in each epoch."""
    validation: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """A share of the images, chosen by hash."""
    damaged: Share = 0.01
    """The share of damaged images up to which they are left out; above it they are an error."""
