"""Lanes and their pool, with real Ray Train runs."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from rigsweep.cluster.cards import Card
from rigsweep.cluster.lanes import start_pool

pytestmark = [pytest.mark.usefixtures("one_ray"), pytest.mark.timeout(300)]
HANG_SECONDS = 4.0


@pytest.fixture(scope="module")
def pool(cards: list[Card], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    log = tmp_path_factory.mktemp("lanes")
    pool = start_pool("lane_work:walk", cards, cards_per_lane=1, log=str(log), hang_seconds=HANG_SECONDS)
    yield pool
    ray.get(pool.close.remote())
    ray.kill(pool)


numbers = iter(range(1000))


def begin(pool: Any, **job: Any) -> tuple[int, Any, dict[str, Any]]:
    number = next(numbers)
    host = ray.get(pool.acquire.remote(number), timeout=120)
    return number, host, ray.get(host.submit.remote(number, job))


def last_message(host: Any, number: int) -> dict[str, Any]:
    while (message := ray.get(host.next.remote(number), timeout=60))["event"] == "report":
        pass
    return message


def test_a_lane_takes_trial_after_trial_in_one_process(pool: Any) -> None:
    places = []
    for _ in range(5):
        number, host, place = begin(pool)
        assert ray.get(host.next.remote(number)) == {"event": "report", "step": 0}
        assert ray.get(host.next.remote(number)) == {"event": "report", "step": 5}
        assert last_message(host, number)["state"] == "complete"
        places.append(place["process"])
    assert len(set(places)) <= 2, "five trials passed through at most two lanes"


def test_a_trial_that_is_told_to_stop_leaves_at_its_next_step_and_its_lane_is_free(pool: Any) -> None:
    number, host, place = begin(pool, steps=10**6)
    ray.get(host.next.remote(number))
    ray.get(pool.order.remote(number, "stop"))
    assert last_message(host, number)["state"] == "stop"
    assert psutil.pid_exists(place["process"]), "the lane lives on"


def test_interrupting_everything_reaches_running_trials(pool: Any) -> None:
    number, host, _ = begin(pool, steps=10**6)
    ray.get(host.next.remote(number))
    ray.get(host.order.remote(number, "interrupt"))
    assert last_message(host, number)["state"] == "interrupt"


def test_a_killed_worker_is_noticed_and_its_lane_replaced(pool: Any) -> None:
    number, host, place = begin(pool, die_at=7)
    message = last_message(host, number)
    assert message == {"event": "lost", "reason": "its worker process died"}
    ends = [begin(pool) for _ in range(2)]  # both lanes take trials again
    assert place["process"] not in [other["process"] for _, _, other in ends]
    assert all(last_message(host, number)["state"] == "complete" for number, host, _ in ends)


def test_a_trial_that_hangs_is_given_up_and_its_process_is_gone(pool: Any) -> None:
    number, host, place = begin(pool, hang_at=3)
    message = last_message(host, number)
    assert message["event"] == "lost"
    assert "no progress" in message["reason"]
    deadline = time.monotonic() + 15
    while psutil.pid_exists(place["process"]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not psutil.pid_exists(place["process"])
    number, host, _ = begin(pool)
    assert last_message(host, number)["state"] == "complete"


def test_a_lane_retires_when_its_trial_says_so(pool: Any) -> None:
    number, host, place = begin(pool, retire=True)
    assert last_message(host, number)["state"] == "complete"
    later = [begin(pool) for _ in range(2)]
    assert place["process"] not in [other["process"] for _, _, other in later]
    assert all(last_message(host, number)["state"] == "complete" for number, host, _ in later)


def test_abandoning_a_trial_frees_its_card(pool: Any) -> None:
    number, _, place = begin(pool, steps=10**6)
    ray.get(pool.abandon.remote(number))
    later = [begin(pool) for _ in range(2)]
    assert place["process"] not in [other["process"] for _, _, other in later]
    assert all(last_message(host, number)["state"] == "complete" for number, host, _ in later)


def test_what_a_running_trial_says_of_itself_is_seen(pool: Any) -> None:
    number, host, _ = begin(pool, steps=10**6)
    deadline = time.monotonic() + 10
    while not (seen := ray.get(pool.progress.remote())).get(number) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert seen[number]["examples"] > 0
    ray.get(pool.order.remote(number, "stop"))
    assert last_message(host, number)["state"] == "stop"


def test_workers_do_not_see_the_working_directory_as_a_place_to_import_from(pool: Any) -> None:
    @ray.remote(num_cpus=0)
    def path() -> list[str]:
        import sys

        return sys.path

    assert str(Path.cwd()) not in ray.get(path.remote())
