"""What a sweep file may say. Imports nothing heavy."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator

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


class SweepSettings(BaseModel, frozen=True, extra="forbid"):
    """A sweep file; without `search` it is a training file."""

    question: str = ""
    trainable: str
    base: dict[str, Any]
    search: dict[str, Any] = {}
    objective: Objective = Objective()
    searcher: str = "tpe"
    """One of `SEARCHERS`."""
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
    cards_per_trial: PositiveInt = 1
    hang: PositiveFloat = 600.0
    """A trial that makes no progress for so many seconds is given up and tried once more."""

    @field_validator("objective", mode="before")
    @classmethod
    def _single(cls, value: Any) -> Any:
        if isinstance(value, list):
            raise ValueError("several objectives are not supported yet; give one metric and goal")
        return value

    @field_validator("cards_per_trial")
    @classmethod
    def _one_card(cls, value: int) -> int:
        if value != 1:
            raise ValueError("allowed: 1, as trials over several cards are not supported yet")
        return value
