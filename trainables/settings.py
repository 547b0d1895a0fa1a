"""What a file may say about a training, whatever is trained.

Frozen pydantic models that import nothing heavy. Each trainable extends `Training` with its own data and
model in a `<name>_settings.py` beside this file. Shares are of the trial's own budget; examples are tokens
or images; rows are sequences or images (what one forward pass takes a whole number of).
"""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, field_validator, model_validator

Length = float | str
"""Of an average of the weights: its decay, `power 10%`, or `raw` for none."""
Share = Annotated[float, Field(ge=0, le=1)]


class Optimizer(BaseModel, frozen=True, extra="forbid"):
    """AdamW (Loshchilov and Hutter 2019); weight decay only on parameters of two dimensions or more."""

    name: Literal["adamw"] = "adamw"
    learning_rate: PositiveFloat = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    clip_norm: PositiveFloat | None = 1.0
    """The global gradient norm is clipped to this; null leaves it."""
    fused: bool = True
    """One kernel for all parameters of a group, on a GPU and on a CPU; false is for comparing."""


class Schedule(BaseModel, frozen=True, extra="forbid"):
    """The learning rate over the budget: a linear warm-up, then a decay to a share of the peak."""

    warmup: Share = 0.02
    decay: Literal["cosine", "constant", "linear"] = "cosine"
    """`linear` holds the peak and decays over the last `cooldown` of the budget."""
    cooldown: Share = 0.4
    final: Share = 0.1
    """Share of the peak learning rate that is left at the end."""

    @model_validator(mode="after")
    def _fits(self) -> "Schedule":
        if self.decay == "linear" and self.warmup + self.cooldown > 1:
            raise ValueError(f"warmup {self.warmup:.0%} and cooldown {self.cooldown:.0%} are together over 100%")
        return self


class Batch(BaseModel, frozen=True, extra="forbid"):
    """One optimizer step."""

    examples: PositiveInt = 4096
    """Tokens or images in one optimizer step, over all workers."""
    micro: PositiveInt | None = None
    """Rows in one forward pass; derived from the card's memory when not given."""


class Budget(BaseModel, frozen=True, extra="forbid"):
    """What one trial trains on: exactly one of the three."""

    examples: PositiveInt | None = None
    flops: PositiveFloat | None = None
    tokens_per_parameter: PositiveFloat | None = None

    @model_validator(mode="after")
    def _one(self) -> "Budget":
        given = [name for name in Budget.model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"give exactly one of examples, flops, tokens_per_parameter; found {' and '.join(given) or 'none'}"
            )
        return self


class Evaluation(BaseModel, frozen=True, extra="forbid"):
    """When and on how much the model is evaluated."""

    every: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Share of the budget between two evaluations."""
    examples: PositiveInt = 16_384
    """Validation examples; the same ones at every evaluation of every trial."""


class Checkpoints(BaseModel, frozen=True, extra="forbid"):
    """Which checkpoints are kept beside the latest and the best."""

    every: Annotated[float, Field(gt=0, le=1)] | None = None
    """A milestone at every such share of the budget."""


class Training(BaseModel, frozen=True, extra="forbid"):
    """One training, whatever is trained: a trial is one of these."""

    PICTURES: ClassVar[tuple[str, ...]] = ()
    """Names of the pictures that every evaluation draws."""
    METRICS: ClassVar[dict[str, Literal["minimize", "maximize"]]] = {"validation/loss": "minimize"}
    """What every evaluation reports and a sweep may optimise, with its goal."""
    UNITS: ClassVar[dict[str, str]] = {"examples": "examples"}
    """Units of the metrics, for people, and what an example is; a metric that is not here has none."""

    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    batch: Batch = Batch()
    budget: Budget
    evaluation: Evaluation = Evaluation()
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """`auto`: bf16 autocast on a GPU that has it natively, else fp32 (on a CPU it does not pay)."""
    compile: bool = False
    recompute: bool = False
    """Whole-layer activation recomputation: less memory, about a third more time."""
    ema: Length | tuple[Length, ...] | None = None
    """Averages of the weights, each evaluated; the first is the one whose metrics and samples count.

    The decay of an exponential moving average; `power 10%`, as wide as a tenth of all steps so far; or `raw`, the
    weights themselves.
    """
    checkpoints: Checkpoints = Checkpoints()
    initial: str | None = None
    """Start from another run's weights: `sweep/number`, an MLflow run id, or a checkpoint folder."""

    @field_validator("ema")
    @classmethod
    def _lengths(cls, value: Length | tuple[Length, ...] | None) -> Length | tuple[Length, ...] | None:
        lengths = value if isinstance(value, tuple) else () if value is None else (value,)
        for length in lengths:
            power = re.fullmatch(r"power (\d+(?:\.\d+)?)%", length) if isinstance(length, str) else None
            wide = power is not None and 0 < float(power[1]) <= 25
            if length != "raw" and not wide and not (isinstance(length, float) and 0 < length < 1):
                raise ValueError(f"allowed: a decay between 0 and 1, `power 10%` up to 25%, or raw; found {length}")
        if isinstance(value, tuple) and (not value or len({label(length) for length in value}) < len(value)):
            raise ValueError("allowed: different lengths, at least one")
        return value

    def metrics(self) -> dict[str, Literal["minimize", "maximize"]]:
        """What an evaluation tells, and what is asked of each."""
        return dict(self.METRICS)

    def scored_by(self) -> str | None:
        """The metric by which samples are judged where nothing is trained; None where nothing scores them."""
        return None

    @property
    def lengths(self) -> tuple[Length, ...]:
        """Of the averages that are evaluated, the one that counts first."""
        return self.ema if isinstance(self.ema, tuple) else () if self.ema is None else (self.ema,)

    @property
    def averages(self) -> int:
        """How many averages are kept beside the weights."""
        return sum(length != "raw" for length in self.lengths)


def label(length: Length) -> str:
    """A length as metrics, samples and files name it: `ema-0.999`, `ema-power-10`, `raw`."""
    return "raw" if length == "raw" else f"ema-{str(length).replace(' ', '-').rstrip('%')}"
