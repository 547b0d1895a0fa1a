"""Energy and cost of trials, from what was measured, what the machine is taken to draw, and prices."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ..cluster.cards import Card, count_in_machine
from ..cluster.energy import assumed_watts, can_measure
from ..cluster.node_settings import Node, Prices, price_per_card_hour
from .history import Record, Trial
from .sweep import Sweep

JOULES_PER_KWH = 3.6e6


@dataclass(frozen=True)
class Rates:
    """What energy and time cost on the machine of a sweep; kept in its history's `opened` events.

    A changed price holds for all of the sweep, also for what was trained before.
    """

    kwh: float | None = None
    card_hour: float | None = None
    currency: str = "$"
    cpu_watts: float = 0.0
    """Added to the measured power of each card."""
    card_watts: float | None = None
    """What a card is taken to draw where it is not measured; None where that is not known either."""

    @classmethod
    def of(cls, record: Record) -> "Rates":
        """Those under which a sweep was opened last."""
        return cls(**record.opened.get("rates", {}))

    def as_dict(self) -> dict[str, Any]:
        """For the history."""
        return asdict(self)

    @property
    def per_card_hour(self) -> float | None:
        """What a card costs for an hour at the power that it is taken to draw; None where that is not known."""
        return price_per_card_hour(Prices(kwh=self.kwh, card_hour=self.card_hour), self.card_watts)

    def energy_joules(self, measured_joules: float | None, card_seconds: float) -> float | None:
        """Energy of so many card-seconds; None where it was not measured and nothing is known to take for it."""
        if measured_joules is not None:
            return measured_joules + self.cpu_watts * card_seconds
        if self.card_watts is None or not card_seconds:
            return None
        return self.card_watts * card_seconds

    def cost(self, measured_joules: float | None, card_seconds: float) -> float | None:
        """Price of so many card-seconds: by the card-hour, else by their energy; None where neither is known."""
        if not card_seconds:
            return None
        if self.card_hour is not None:
            return self.card_hour * card_seconds / 3600
        joules = self.energy_joules(measured_joules, card_seconds)
        return None if self.kwh is None or joules is None else self.kwh * joules / JOULES_PER_KWH

    def of_trial(self, trial: Trial) -> "Spent":
        """What a trial has used, as far as the history knows."""
        card_seconds = card_seconds_of(trial)
        joules = self.energy_joules(trial.energy_joules, card_seconds)
        kwh = None if joules is None else joules / JOULES_PER_KWH
        return Spent(kwh, self.cost(trial.energy_joules, card_seconds), measured=trial.energy_joules is not None)

    def of_trials(self, trials: Sequence[Trial]) -> "Spent":
        """What trials have used together: of those of which it is known."""
        spent = [self.of_trial(trial) for trial in trials]
        kwh = [one.kwh for one in spent if one.kwh is not None]
        cost = [one.cost for one in spent if one.cost is not None]
        measured = all(one.measured for one in spent if one.kwh is not None)
        return Spent(sum(kwh) if kwh else None, sum(cost) if cost else None, measured)

    def money(self, amount: float) -> str:
        """An amount as one writes it: `£0.125`, `£1.30`, `£0.00042`."""
        return f"{self.currency}{amount:.2f}" if amount >= 1 or not amount else f"{self.currency}{amount:.3g}"


@dataclass(frozen=True)
class Spent:
    """Energy, and what it cost; None where it is not known."""

    kwh: float | None
    cost: float | None
    measured: bool
    """Whether cards measured it; else it is what they are taken to draw."""


def card_seconds_of(trial: Trial) -> float:
    """Card-seconds of a trial, as far as the history knows."""
    return trial.card_seconds if trial.identities else trial.seconds * max(1, len(trial.cards))


def prices_of(sweep: Sweep, node: Node) -> Prices:
    """The sweep file's prices, else the node file's."""
    return node.prices if sweep.settings.prices is None else sweep.settings.prices


def rates_of(sweep: Sweep, node: Node, cards: Sequence[Card]) -> Rates:
    """The rates of a sweep on these cards of a machine."""
    prices, card = prices_of(sweep, node), cards[0]
    in_machine = node.hardware.count if node.hardware else count_in_machine(card)
    watts = assumed_watts(card, node.power, max(in_machine, len(cards)))
    return Rates(prices.kwh, prices.card_hour, prices.currency, node.power.cpu_watts, watts)


def refuse_unpriced(sweep: Sweep, node: Node) -> None:
    """Raise `WrongInput` where a sweep is to end at a cost and no price is known."""
    if sweep.settings.limits.cost is not None and not prices_of(sweep, node).known:
        raise sweep.document.wrong(
            ("limits", "cost"),
            "no price is known; give `prices: {card_hour: …}` or `prices: {kwh: …}` here or in a node file (--on)",
        )


def refuse_unmeasured(sweep: Sweep, rates: Rates, cards: Sequence[Card]) -> None:
    """Raise `WrongInput` where a sweep is to end at a cost and the energy that is to be paid for is not known."""
    if sweep.settings.limits.cost is None or rates.card_hour is not None or rates.card_watts is not None:
        return
    if not can_measure(cards):
        raise sweep.document.wrong(
            ("limits", "cost"),
            f"the energy of {cards[0].name} cannot be measured; give prices.card_hour, or power.box_watts in a node "
            "file (--on)",
        )
