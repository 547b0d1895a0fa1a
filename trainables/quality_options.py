"""What a file may say about the quality of drawn images, and the names of its metrics. Imports nothing heavy."""

import re
from typing import Annotated, Literal

from pydantic import BaseModel, Field, PositiveInt, field_validator, model_validator

Goal = Literal["minimize", "maximize"]
Kind = Literal["pixels", "pca", "inception", "transformers"]

GOALS: dict[str, Goal] = {
    "kid": "minimize",
    "fd": "minimize",
    "precision": "maximize",
    "recall": "maximize",
    "density": "maximize",
    "coverage": "maximize",
}
_ALLOWED = "`pixels`, `pca-64`, a TorchScript Inception (.pt, .pth), or a vision model by folder or Hub name"


class Quality(BaseModel, frozen=True, extra="forbid"):
    """How near drawn images are to real ones, as a feature extractor sees both."""

    features: str = "pca-64"
    """`pixels`; `pca-<n>`, n principal components of the real images; a path to a TorchScript Inception (.pt or .pth),
    for FID; else a vision model of transformers by folder or Hub name: `facebook/dinov2-small` gives FD-DINOv2."""
    samples: Annotated[int, Field(ge=3)] = 1000
    """Images drawn to be scored. The Fréchet distance falls with their number, so it stands in every name."""
    nearest: PositiveInt = 5
    """k of the k-th nearest neighbour, for precision, recall, density and coverage."""

    @field_validator("features")
    @classmethod
    def _known(cls, value: str) -> str:
        extractor_name(value)
        return value

    @model_validator(mode="after")
    def _neighbours(self) -> "Quality":
        if self.samples <= self.nearest:
            raise ValueError(
                f"samples {self.samples} are too few for nearest {self.nearest}: more than that are needed"
            )
        return self


def kind_of(features: str) -> Kind:
    """Which extractor `features` names; ValueError where it names none."""
    if not features.strip():
        raise ValueError(f"is empty: give {_ALLOWED}")
    if features != features.strip() or "://" in features:
        raise ValueError(f"{features!r} is neither a path nor a name: give {_ALLOWED}")
    if features.lower() == "pixels":
        if features != "pixels":
            raise ValueError(f"{features} is written `pixels`")
        return "pixels"
    if re.match(r"pca(-|$)", features, re.IGNORECASE):
        if not re.fullmatch(r"pca-[1-9]\d{0,5}", features):
            raise ValueError(f"{features}: the components must be a number from 1 on, such as `pca-64`")
        return "pca"
    if features.lower().endswith((".pkl", ".pickle")):
        raise ValueError(f"{features}: a pickle may run any code and is not read; give the model as TorchScript (.pt)")
    return "inception" if features.lower().endswith((".pt", ".pth")) else "transformers"


def extractor_name(features: str) -> str:
    """What metrics call an extractor: `pca-64`; of a path the last part, as `dinov2-small`, without .pt or .pth."""
    kind = kind_of(features)
    last = features.rstrip("/").rsplit("/", 1)[-1].lower()
    if kind == "inception":
        last = last.rsplit(".", 1)[0]
    name = re.sub(r"[^a-z0-9.-]", "-", last)
    if not re.search(r"[a-z0-9]", name):
        raise ValueError(f"{features}: its last part names nothing; give {_ALLOWED}")
    return name


def metric_name(metric: str, quality: Quality) -> str:
    """`validation/<metric>_<extractor>_<samples>`; `fd` is called `fid` with Inception, where the world knows it so."""
    if metric == "fd" and kind_of(quality.features) == "inception":
        metric = "fid"
    return f"validation/{metric}_{extractor_name(quality.features)}_{quality.samples}"


def standard_error_name(quality: Quality) -> str:
    """Where the standard error of KID is reported; nothing to optimise."""
    return f"{metric_name('kid', quality)}_se"


def metric_names(quality: Quality) -> dict[str, Goal]:
    """What a sweep can optimise, and which way."""
    return {metric_name(metric, quality): goal for metric, goal in GOALS.items()}
