"""What a sweep file may say. Imports nothing heavy."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from ..cluster.node_settings import Prices
from ..trainables.settings import Share

Names = Annotated[
    list[str],
    BeforeValidator(lambda told: [told] if isinstance(told, str) else told, json_schema_input_type=str | list[str]),
]


class Objective(BaseModel, frozen=True, extra="forbid"):
    """What the sweep optimises."""

    metric: str = "validation/loss"
    goal: Literal["minimize", "maximize"] | None = None
    """Follows from the metric where it is not given."""


class EarlyStopping(BaseModel, frozen=True, extra="forbid"):
    """When a trial is stopped by comparison with the others."""

    rule: Literal["forecast", "asha", "median", "none"] = "forecast"
    by: Literal["examples", "flops"] = "examples"
    """Trials are compared at equal examples or at equal FLOPs."""
    grace: Annotated[Share, Field(gt=0)] = 0.1
    """Share of the budget before the first comparison; raised to the largest warm-up that can be proposed."""
    reduction: Annotated[int, Field(ge=2)] = 3
    """`asha`: the best 1 in `reduction` at a rung go on; rungs lie this factor apart."""
    chance: Annotated[Share, Field(gt=0, lt=1)] = 0.1
    """`forecast`: a trial with a smaller chance to become the best is stopped."""
    within: str | None = None
    """Only trials that share this parameter's value are compared."""


class Limits(BaseModel, frozen=True, extra="forbid"):
    """The sweep ends when one of these is reached; trials that run then are interrupted."""

    wall_time: PositiveFloat | None = None
    device_time: PositiveFloat | None = None
    """Card-seconds over all trials."""
    cost: PositiveFloat | None = None
    """Over all trials, in the currency of the prices."""
    disk_bytes: PositiveFloat = 20e9
    """Checkpoints of one sweep; beyond it those of the losers are deleted first."""


class CardRange(BaseModel, frozen=True, extra="forbid"):
    """From so many cards to so many: a trial goes on with what is there."""

    min: PositiveInt = 1
    max: PositiveInt

    @model_validator(mode="after")
    def _ordered(self) -> "CardRange":
        if self.min > self.max:
            raise ValueError(f"min {self.min} is over max {self.max}")
        return self


def _cards(told: Any) -> Any:
    if told is None or told == "auto" or isinstance(told, dict | CardRange):
        return told
    allowed = "allowed: a number of cards, a share of one such as 0.5, auto, or {min: 1, max: 2}"
    if isinstance(told, bool) or not isinstance(told, int | float):
        raise ValueError(f"{allowed}, found {told}")
    if told > 1 and told != int(told):
        raise ValueError(f"several workers take a whole card each: {allowed}, found {told:g}")
    if not told >= 0.05:
        raise ValueError(f"{allowed} (at least 0.05), found {told:g}")
    return int(told) if told >= 1 else float(told)


CardsPerTrial = Annotated[
    Literal["auto"] | int | float | CardRange | None,
    BeforeValidator(_cards, json_schema_input_type=Literal["auto"] | PositiveFloat | CardRange | None),
]


class Confirm(BaseModel, frozen=True, extra="forbid"):
    """A second look at the best configurations, by more samples, from other noise."""

    best: Annotated[int, Field(ge=2)] = 3
    samples: PositiveInt
    """Of each of them."""


class SweepSettings(BaseModel, frozen=True, extra="forbid"):
    """A sweep file; without `search` it is a training file."""

    question: str = ""
    from_: Annotated[str | None, Field(alias="from")] = None
    """A run, or a training file that is trained once: its samples are scored, and only `sampling` is searched."""
    confirm: Confirm | None = None
    trainable: str
    """That of `from`, where that is given."""
    base: dict[str, Any]
    search: dict[str, Any] = {}
    objective: Objective = Objective()
    searcher: str = "tpe"
    """One of `SEARCHERS`."""
    configurations: list[dict[str, Any]] = []
    """For the searcher `list`: the searched keys of each trial."""
    start_from: Names = []
    """Earlier sweeps, by name or folder, whose finished trials the searcher is told first."""
    trials: PositiveInt = 16
    """Configurations, the base included; a searcher that lists them (`grid`, `ablation`) knows how many."""
    repeats: PositiveInt = 1
    """Seeds per configuration; the searcher sees their mean."""
    limits: Limits = Limits()
    prices: Prices | None = None
    """What computing costs; the node file's where it is not given."""
    early_stopping: EarlyStopping = EarlyStopping()
    cards_per_trial: CardsPerTrial = None
    """Several, a share of one, or `auto`: as small a share as the trial's memory needs, once that was measured. Not
    given: `auto` on GPUs, 1 on a CPU, where a trial has work for every thread."""
    hang: PositiveFloat = 600.0
    """A trial that makes no progress for so many seconds is given up and tried once more."""

    @field_validator("objective", mode="before")
    @classmethod
    def _single(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("several objectives are not supported yet; give one metric and goal")
        return value
