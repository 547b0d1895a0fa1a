"""What a node file says of a machine: which cards to use, what they may hold, what they draw and cost.

Frozen pydantic models that import nothing heavy. `sweeps/node_file.py` reads the file.
"""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
"""Money, in the unit that `currency` names."""
Text = Annotated[
    str,
    BeforeValidator(lambda told: str(told) if type(told) in (int, float) else told, json_schema_input_type=str | float),
]


class Prices(BaseModel, frozen=True, extra="forbid"):
    """What computing costs: by the energy, as at home, or by the card-hour, as on a rented machine."""

    kwh: Amount | None = None
    """Price of a kilowatt-hour."""
    card_hour: Amount | None = None
    """Price of a card for an hour; where it is given, energy is not charged for beside it."""
    currency: str = "$"
    """Stands before the amount."""

    @property
    def known(self) -> bool:
        """Whether there is a price at all."""
        return self.kwh is not None or self.card_hour is not None


class Power(BaseModel, frozen=True, extra="forbid"):
    """What the machine draws, for what its cards do not measure themselves."""

    box_watts: PositiveFloat | None = None
    """Of the whole machine under load, by a meter at the plug; its cards have an even share each."""
    cpu_watts: Amount = 0.0
    """The CPU's share, added to the measured energy of each card while a trial runs on it."""
    estimate: bool = False
    """Take the board power of the card's specification where nothing can be measured."""


class Folders(BaseModel, frozen=True, extra="forbid"):
    """Where things are kept; the command line and the environment go first."""

    cache: Path | None = None
    """Prepared data, measured speeds, compiled code."""
    runs: Path | None = None
    """Sweeps."""


class Hardware(BaseModel, frozen=True, extra="forbid"):
    """Cards of a machine that is not here, to plan for it."""

    card: str
    """A name of the card table, such as `RTX 3090`."""
    count: PositiveInt = 1
    memory: PositiveInt | None = None
    """Bytes, where a card is sold with two memories under one name; the smaller one if not given."""


class Node(BaseModel, frozen=True, extra="forbid"):
    """A node file; everything in it may be left out."""

    cards: Annotated[list[NonNegativeInt], Field(min_length=1)] | None = None
    """Indexes of the cards to use; all of them where it is not given."""
    threads: PositiveInt | None = None
    """Threads of a card, on a machine without a GPU."""
    memory: PositiveInt | None = None
    """Bytes that each card may use, where that is less than it has."""
    prices: Prices = Prices()
    power: Power = Power()
    nccl: dict[Annotated[str, Field(pattern=r"^NCCL_[A-Z0-9_]+$")], Text] = {}
    """NCCL's variables, set for every lane where the environment does not set them already."""
    folders: Folders = Folders()
    hardware: Hardware | None = None

    @field_validator("cards")
    @classmethod
    def _once(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and len(set(value)) < len(value):
            raise ValueError(f"names a card twice: {', '.join(map(str, value))}")
        return value


def price_per_card_hour(prices: Prices, card_watts: float | None) -> float | None:
    """What a card costs for an hour under load; None where no price, or no power, is known.

    The price of a card-hour, or the energy that the card draws in it: 1 kW shared by two cards, at 0.25 a
    kilowatt-hour, is 0.125.
    """
    if prices.card_hour is not None:
        return prices.card_hour
    if prices.kwh is None or card_watts is None:
        return None
    return prices.kwh * card_watts / 1000
