"""What the cards did, from histories that are written by hand."""

from typing import Any

import pytest

from rigsweep.sweeps.history import Record
from rigsweep.sweeps.utilisation import CAUSES, mean_shares, utilisation

CARDS = [{"identity": f"GPU-{i}", "name": "RTX 3090", "index": i} for i in range(2)]


def record_of(*events: tuple[float, str, dict[str, Any]]) -> Record:
    record = Record()
    for time, kind, fields in events:
        record.apply({"event": kind, "time": time, **fields})
    return record


def opened(time: float) -> tuple[float, str, dict[str, Any]]:
    return time, "opened", {"cards": CARDS}


def started(time: float, trial: int, card: int) -> list[tuple[float, str, dict[str, Any]]]:
    told = {"trial": trial, "node": "here", "cards": ["RTX 3090"], "identities": [f"GPU-{card}"]}
    proposed = {"trial": trial, "group": trial, "seed": 0, "parameters": {}}
    return [(time, "proposed", proposed), (time, "started", told)]


def ended(time: float, trial: int, seconds: float, **phases: float) -> tuple[float, str, dict[str, Any]]:
    told = {"trial": trial, "state": "complete", "reason": "", "value": 1.0, "seconds": seconds}
    return time, "ended", told | ({"phases": phases} if phases else {})


def closed(time: float) -> tuple[float, str, dict[str, Any]]:
    return time, "closed", {"state": "complete", "reason": ""}


def test_each_card_has_the_share_of_its_time_that_it_computed_and_the_causes_of_the_rest() -> None:
    record = record_of(
        opened(0),
        *started(20, 0, card=0),
        *started(20, 1, card=1),
        ended(70, 0, 50, start_up=5, compiling=10, computing=30, evaluation=4, waiting=1),
        ended(100, 1, 80, start_up=5, computing=75),
        closed(100),
    )
    first, second = utilisation(record)
    assert (first["card"], first["name"], first["seconds"]) == (0, "RTX 3090", 100)
    shares = {cause: round(first[cause], 9) for cause in CAUSES}
    assert shares == {
        "computing": 0.3,
        "start_up": 0.25,
        "compiling": 0.1,
        "evaluation": 0.04,
        "waiting": 0.01,
        "unknown": 0.0,
        "no_trial": 0.3,
    }
    assert (second["computing"], second["no_trial"]) == (0.75, 0.0)
    assert mean_shares([first, second])["computing"] == pytest.approx(0.525)


def test_the_time_between_two_runs_of_a_sweep_is_nobodys() -> None:
    record = record_of(
        opened(0),
        *started(10, 0, card=0),
        ended(50, 0, 40, computing=40),
        closed(50),
        opened(1000),
        *started(1010, 1, card=0),
        ended(1050, 1, 40, computing=40),
        closed(1050),
    )
    (card,) = utilisation(record)
    assert (card["seconds"], card["computing"], card["start_up"]) == (100, 0.8, 0.2)


def test_a_process_that_was_killed_had_its_cards_until_its_last_word() -> None:
    record = record_of(opened(0), *started(0, 0, card=0), opened(1000), *started(1000, 1, card=0), closed(1010))
    assert record.card_seconds["GPU-0"] == 10


def test_an_attempt_that_never_said_what_it_did_is_not_counted_as_computing() -> None:
    record = record_of(opened(0), *started(0, 0, card=0), ended(10, 0, 8), closed(10))
    (card,) = utilisation(record)
    assert (card["unknown"], card["computing"], card["no_trial"]) == (0.8, 0.0, pytest.approx(0.2))


def test_trials_that_share_a_card_do_not_make_it_busier_than_always() -> None:
    record = record_of(
        opened(0),
        *started(0, 0, card=0),
        *started(0, 1, card=0),
        ended(10, 0, 10, computing=10),
        ended(10, 1, 10, computing=6, evaluation=4),
        closed(10),
    )
    (card,) = utilisation(record)
    assert (card["computing"], card["evaluation"], card["no_trial"]) == (0.8, 0.2, 0.0)


def test_a_history_without_cards_says_nothing() -> None:
    assert utilisation(record_of((0, "opened", {}), closed(10))) == []


def test_card_seconds_of_trials_that_share_a_card_are_those_of_the_card() -> None:
    record = record_of(
        opened(0),
        *started(0, 0, card=0),
        *started(4, 1, card=0),
        *started(4, 2, card=1),
        ended(10, 0, 10, computing=10),
        ended(12, 1, 8, computing=8),
        ended(12, 2, 8, computing=8),
        closed(12),
    )
    assert [trial.card_seconds for trial in record.trials.values()] == [7, 5, 8]
