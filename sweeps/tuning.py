"""The sweep as Ray Tune sees it: a searcher, a scheduler and a trial, each thin.

Tune runs the trials' clients and calls back; the `Controller` decides. A trial's client has no card: it takes
a lane, passes the job in and its messages on, one message a Tune result. Nothing that must happen depends on
a client ending well.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.exceptions import RayActorError, RayTaskError
from ray.tune.schedulers import FIFOScheduler, TrialScheduler
from ray.tune.search import Searcher

from ..cluster.lanes import POOL
from ..cluster.local_ray import NAMESPACE
from ..cluster.placement import Need
from ..trainables.trial import Job
from .controller import Controller

_MESSAGE = "message"


class TrialClient(tune.Trainable):
    """A trial, for Tune: each `step` is the trial's next message."""

    def setup(self, config: dict[str, Any]) -> None:
        """Take the job; Tune calls this once, and `reset_config` for every later trial of this process."""
        self._job: dict[str, Any] = json.loads(config["job"])
        self._number: int = self._job["number"]
        self._need: dict[str, Any] = json.loads(config["need"])
        self._host: Any = None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Become another trial's client: a warm process saves seconds."""
        self.setup(new_config)
        return True

    def step(self) -> dict[str, Any]:
        """The next message; the trial's last has `done`."""
        message = self._begin() if self._host is None else self._listen()
        return {_MESSAGE: json.dumps(message), "done": message["event"] in ("ended", "lost", "no_lane")}

    def _begin(self) -> dict[str, Any]:
        try:
            pool = ray.get_actor(POOL, namespace=NAMESPACE)
            self._host = ray.get(pool.acquire.remote(self._number, Need(**self._need)))
        except RayTaskError as error:
            return {"event": "no_lane", "reason": str(error.cause).splitlines()[0]}
        except (RayActorError, ValueError):  # it is dead, or not known any more
            return {"event": "no_lane", "reason": "the lane pool died"}
        if self._host is None:
            return {"event": "ended", "state": "interrupted", "reason": "the sweep is ending"}
        try:
            place: Any = ray.get(self._host.submit.remote(self._number, self._job))
        except RayActorError:
            return {"event": "lost", "reason": "its lane died before it began"}
        cards = [card["name"] for card in place["cards"]]
        identities = [card["identity"] for card in place["cards"]]
        return {
            "event": "started",
            "node": place["node"],
            "process": place["process"],
            "cards": cards,
            "identities": identities,
            "share": place["share"],
        }

    def _listen(self) -> dict[str, Any]:
        try:
            return ray.get(self._host.next.remote(self._number))
        except RayActorError:
            return {"event": "lost", "reason": "its lane died"}


class _NeverRestored:
    """Tune pickles its parts so that it could restore them; a sweep is resumed from its history instead."""

    def __getstate__(self) -> dict[str, Any]:
        return {}


class TuneSearcher(_NeverRestored, Searcher):
    """Hands Tune the controller's next trial, as long as a card, or a part of one, has none.

    A trial that is proposed late knows more; so at most one waits for its cards.
    """

    def __init__(self, controller: Controller, cards: int, need: Callable[[int], Need], job: Callable[[int], Job]):
        super().__init__()
        self._controller, self._cards, self._need, self._job = controller, cards, need, job
        self.numbers: dict[str, int] = {}
        """Our trials by Tune's ids; a trial that goes on has several."""
        self.live: dict[str, float] = {}
        """Cards of each trial that was handed out."""

    def suggest(self, trial_id: str) -> Any:
        """The next trial's job; None while every card has enough; FINISHED at the end."""
        if sum(self.live.values()) > self._cards - 1e-6:
            return None
        number = self._controller.next_trial()
        if number is None:
            return None if self.live else Searcher.FINISHED
        self.numbers[trial_id] = number
        need = self._need(number)
        self.live[trial_id] = need.most
        return {"job": json.dumps(asdict(self._job(number))), "need": json.dumps(asdict(need))}

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: the scheduler hears of results."""

    def on_trial_complete(self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False) -> None:
        """Its cards are about to be free."""
        self.live.pop(trial_id, None)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the history is the truth."""

    def restore(self, checkpoint_path: str) -> None:
        """Never called."""


class TuneScheduler(_NeverRestored, FIFOScheduler):
    """Passes what trials say to the controller, and its verdicts to Tune."""

    def __init__(self, controller: Controller, searcher: TuneSearcher, pool: Any, broken: Callable[[], str | None]):
        super().__init__()
        self._controller, self._searcher, self._pool, self._broken = controller, searcher, pool, broken

    def on_trial_result(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> str:
        """A message that is not the trial's last."""
        number = self._searcher.numbers[trial.trial_id]
        message = json.loads(result[_MESSAGE])
        self._controller.heard(number, message.get("usage"))
        if message["event"] == "started":
            told = (message[key] for key in ("node", "cards", "process", "identities", "share"))
            self._controller.started(number, *told)
        elif message["event"] == "warning":
            self._controller.warned(number, message["rule"], message["reason"], message["examples"])
        elif self._controller.reported(number, message):
            self._pool.order.remote(number, "stop")
            return TrialScheduler.STOP
        return TrialScheduler.CONTINUE

    def on_trial_complete(self, tune_controller: Any, trial: Any, result: dict[str, Any]) -> None:
        """A trial's last message, or a report after which it was stopped (which is settled by then)."""
        number = self._searcher.numbers[trial.trial_id]
        message = json.loads(result[_MESSAGE])
        self._controller.heard(number, message.get("usage"))
        if message["event"] == "ended" and message.get("crowded"):
            self._controller.crowded(number, message["reason"])
        elif message["event"] == "ended":
            told = (message.get("rule", ""), message.get("memory_share"))
            self._controller.ended(number, message["state"], message["reason"], *told)
        elif message["event"] == "lost":
            self._lost(number, message["reason"])
        elif message["event"] == "no_lane":
            self._controller.ended(number, "interrupted", message["reason"])

    def on_trial_error(self, tune_controller: Any, trial: Any) -> None:
        """The client's own process died; its lane may still be at work."""
        number = self._searcher.numbers[trial.trial_id]
        self._pool.abandon.remote(number)
        self._lost(number, "its client process died")

    def _lost(self, number: int, reason: str) -> None:
        # Where all of Ray goes down, that is nothing against this trial, which may be lost only once.
        if broken := self._broken():
            self._controller.ended(number, "interrupted", broken)
        else:
            self._controller.lost(number, reason)

    def on_trial_remove(self, tune_controller: Any, trial: Any) -> None:
        """A trial that Tune dropped before it ran."""
        self._controller.ended(self._searcher.numbers[trial.trial_id], "interrupted", "the sweep is ending")


def run_tune(
    controller: Controller,
    pool: Any,
    cards: int,
    need: Callable[[int], Need],
    job: Callable[[int], Job],
    broken: Callable[[], str | None],
    log: Path,
) -> None:
    """Run every trial of the controller's sweep; returns when it has no more. `broken` says whether Ray is."""
    searcher = TuneSearcher(controller, cards, need, job)
    tune.Tuner(
        tune.with_resources(TrialClient, {"client": 1}),
        tune_config=tune.TuneConfig(
            search_alg=searcher,
            scheduler=TuneScheduler(controller, searcher, pool, broken),
            num_samples=-1,  # until the searcher says that it is finished
            reuse_actors=True,
            # Ours are in the history; the default would be made of the whole job.
            trial_name_creator=lambda trial: trial.trial_id,
            trial_dirname_creator=lambda trial: trial.trial_id,
        ),
        run_config=tune.RunConfig(
            name="tune",
            storage_path=str(log.resolve()),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=0),
            # A client has nothing to save: checkpoints are the lanes' work.
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=0, checkpoint_at_end=False),
        ),
    ).fit()
