"""Lanes of several cards, lanes that share one, and a pool that reshapes them: real Ray Train runs over gloo."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util import placement_group_table

from rigsweep.cluster.cards import Card
from rigsweep.cluster.lanes import start_pool
from rigsweep.cluster.placement import Need

pytestmark = [pytest.mark.usefixtures("one_ray"), pytest.mark.timeout(400)]
PAIR, WHOLE, HALF, ELASTIC = Need(2, 2), Need(), Need(0.5, 0.5, "half"), Need(1, 2)
HANG_SECONDS = 10.0


@pytest.fixture(scope="module")
def pool(cards: list[Card], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("lanes")
    pool = start_pool("lane_work:together", cards, cards_per_lane=2, log=str(log), hang_seconds=HANG_SECONDS)
    yield pool
    with contextlib.suppress(ray.exceptions.RayActorError):  # it was closed before
        _close(pool)


def _close(pool: Any) -> None:
    ray.get(pool.close.remote())
    ray.kill(pool)
    groups = [group["state"] for group in placement_group_table().values()]
    assert set(groups) <= {"REMOVED"}, "no placement group is left"


numbers = iter(range(1000))


def begin(pool: Any, need: Need, **job: Any) -> tuple[int, Any, dict[str, Any]]:
    number = next(numbers)
    host = ray.get(pool.acquire.remote(number, need), timeout=180)
    return number, host, ray.get(host.submit.remote(number, job))


def to_the_end(host: Any, number: int) -> list[dict[str, Any]]:
    messages = [ray.get(host.next.remote(number), timeout=90)]
    while messages[-1]["event"] == "report":
        messages.append(ray.get(host.next.remote(number), timeout=90))
    return messages


def test_two_workers_take_trial_after_trial_together(pool: Any) -> None:
    processes = set()
    for _ in range(70):  # more than a host answers at once
        number, host, place = begin(pool, PAIR, steps=2)
        messages = to_the_end(host, number)
        assert [message.get("sum") for message in messages[:-1]] == [1.0] * 2, "0 + 1, of both"
        assert messages[-1]["state"] == "complete"
        assert [card["index"] for card in place["cards"]] == [0, 1]
        processes.add(place["process"])
    assert len(processes) == 1


def test_a_killed_rank_is_the_reason_not_what_the_others_say_of_it(pool: Any) -> None:
    number, host, _ = begin(pool, PAIR, who=1, die_at=3)
    assert to_the_end(host, number)[-1] == {"event": "lost", "reason": "its worker process died"}
    number, host, _ = begin(pool, PAIR)
    assert to_the_end(host, number)[-1]["state"] == "complete", "the lane was replaced"


@pytest.mark.slow
def test_what_fails_on_one_rank_alone_fails_the_trial_with_its_words(pool: Any) -> None:
    number, host, place = begin(pool, PAIR, who=1, raise_at=3)
    final = to_the_end(host, number)[-1]
    assert (final["state"], final["reason"]) == ("failed", "worker 1: ValueError: a rehearsed error")
    number, host, later = begin(pool, PAIR)
    assert later["process"] != place["process"], "the others waited for it in vain"
    assert to_the_end(host, number)[-1]["state"] == "complete"


@pytest.mark.slow
def test_an_all_reduce_that_hangs_is_given_up(pool: Any) -> None:
    number, host, place = begin(pool, PAIR, who=1, hang_at=3)
    final = to_the_end(host, number)[-1]
    assert final["event"] == "lost"
    assert "no progress" in final["reason"]
    deadline = time.monotonic() + 20
    while psutil.pid_exists(place["process"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(place["process"])


@pytest.mark.slow
def test_lanes_are_reshaped_where_a_trial_could_not_run_otherwise(pool: Any) -> None:
    wholes = [begin(pool, WHOLE, steps=600, pause=0.05) for _ in range(2)]
    assert [card["index"] for _, _, place in wholes for card in place["cards"]] in ([0, 1], [1, 0])
    assert [to_the_end(host, number)[-1]["state"] for number, host, _ in wholes] == ["complete"] * 2

    halves = [begin(pool, HALF, steps=10**6) for _ in range(2)]
    assert [place["share"] for _, _, place in halves] == [0.5, 0.5]
    assert len({place["cards"][0]["index"] for _, _, place in halves}) == 1, "they fill one card, the other stays whole"
    number, host, place = begin(pool, WHOLE, steps=3)
    assert place["process"] in [whole["process"] for _, _, whole in wholes], "the lane that was there"
    assert to_the_end(host, number)[-1]["state"] == "complete"
    for number, _, _ in halves:
        ray.get(pool.abandon.remote(number))


@pytest.mark.slow
def test_out_of_memory_beside_another_says_so(pool: Any) -> None:
    beside = begin(pool, HALF, steps=10**6)
    number, host, place = begin(pool, HALF, steps=2, state="out_of_memory")
    assert place["cards"] == beside[2]["cards"]
    final = to_the_end(host, number)[-1]
    assert (final["state"], final["crowded"]) == ("out_of_memory", True)
    ray.get(pool.abandon.remote(beside[0]))


@pytest.mark.slow
def test_a_trial_that_can_do_with_less_takes_what_is_there(pool: Any) -> None:
    alone, _, _ = begin(pool, WHOLE, steps=10**6)
    number, host, place = begin(pool, ELASTIC, steps=3)
    assert len(place["cards"]) == 1
    assert to_the_end(host, number)[-1]["state"] == "complete"
    ray.get(pool.abandon.remote(alone))


@pytest.mark.slow
def test_a_card_on_which_no_lane_comes_up_is_given_up_and_the_others_go_on(
    pool: Any, cards: list[Card], tmp_path: Path
) -> None:
    _close(pool)  # the cards are one pool's
    gone = Card(1, "cuda", "a card that is not there", "GPU-gone", 2**30, 1)
    other = start_pool("lane_work:together", [cards[0], gone], cards_per_lane=1, log=str(tmp_path), hang_seconds=60)
    notes: list[str] = []
    deadline = time.monotonic() + 300
    while not notes and time.monotonic() < deadline:
        number, host, place = begin(other, WHOLE, steps=2)
        assert place["cards"][0]["index"] == 0
        final = to_the_end(host, number)[-1]
        assert final.get("state") == "complete", final
        notes += ray.get(other.notes.remote())
        time.sleep(0.2)
    assert notes[0].startswith("card 1 (a card that is not there) is given up: no lane could be started on it")
    with pytest.raises(RuntimeError, match="2 cards a trial, and 1 are left: no lane could be started"):
        ray.get(other.acquire.remote(next(numbers), PAIR))
    _close(other)
