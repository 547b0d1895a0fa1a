"""How much of a sweep's time each card was computing, and what the rest went into. From the history alone."""

from typing import Any

from .history import Record

CAUSES = {
    "computing": "computing",
    "start_up": "start-up",
    "compiling": "compiling",
    "evaluation": "evaluation",
    "waiting": "waiting for data",
    "unknown": "not known",
    "no_trial": "no trial to run",
}
"""What a card's time goes into, by the name in `summary.json`; `evaluation` is with sampling and saving."""


def utilisation(record: Record) -> list[dict[str, Any]]:
    """Of each card: its seconds in the sweep, and the share of each cause, which sum to 1."""
    names = {card["identity"]: card for card in record.opened.get("cards", ())}
    found = []
    for identity, seconds in record.card_seconds.items():
        spent = record.card_phases.get(identity, {})
        if not seconds or not spent:
            continue
        # Trials that share a card are at work at the same time.
        scale = max(seconds, sum(spent.values()))
        shares = {cause: spent.get(cause, 0.0) / scale for cause in CAUSES}
        shares["no_trial"] = max(0.0, 1 - sum(shares.values()))
        card = names.get(identity, {})
        found.append({"card": card.get("index"), "name": card.get("name", identity), "seconds": seconds, **shares})
    return found


def mean_shares(cards: list[dict[str, Any]]) -> dict[str, float]:
    """Each cause's share of the time of all cards together."""
    seconds = sum(card["seconds"] for card in cards)
    return {cause: sum(card[cause] * card["seconds"] for card in cards) / seconds for cause in CAUSES}
