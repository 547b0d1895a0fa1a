"""Lanes: long-lived worker groups that take trial after trial, and the pool that owns them.

Starting a process that trains takes 10 to 60 s (imports, a CUDA context, Ray Train's worker group), ending a
bad trial should take none of it. So a lane starts once and keeps its card; trials pass through it:

    trial's client --acquire--> LanePool --host--> client --submit--> LaneHost <--take-- worker
                                                   client <--next---- LaneHost <--send-- worker

`LanePool` and `LaneHost` are Ray actors without a card; the worker is the process of a Ray Train run
(`TorchTrainer`) that the host keeps alive. Nothing here knows what a trial is: `work(job, channel)` does it.
"""

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, get_current_placement_group, remove_placement_group

from .cards import Card
from .energy import BUSY, EnergyMeter, Neighbours
from .local_ray import NAMESPACE
from .locks import lock_folder

Message = dict[str, Any]
_log = logging.getLogger(__name__)
POOL = "lane-pool"
_BEAT_SECONDS = 0.5
_ORDER_SECONDS = 60.0


class Channel:
    """A trial's line to its host, on the worker's side.

    `send` delivers a message and waits until the host has it. `progress` is what the trial last said of
    itself; a thread passes it on twice a second, which is also how the host knows that the trial moves.
    `order` turns from None to `stop` or `interrupt` when the trial is to leave. `phases` says what the trial has
    spent its time on; it is passed on beside the energy of `cards` (GPUs, by their UUIDs) as the trial's usage.
    """

    def __init__(self, host: Any, number: int, cards: Sequence[str] = ()):
        self.order: str | None = None
        self.progress: Message = {}
        self.phases: Callable[[], dict[str, float]] = dict
        self._energy = EnergyMeter(cards)
        # Only a lane of one card may have it together with others.
        self._neighbours = Neighbours(cards[0], lock_folder()) if len(cards) == 1 else None
        self._host, self._number = host, number
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def send(self, message: Message) -> None:
        """Deliver a message to whoever follows the trial."""
        ray.get(self._host.send.remote(self._number, message))

    def __enter__(self) -> "Channel":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join(timeout=10)
        ray.get(self._beat())  # what it has used in all arrives before its last message
        if self._neighbours is not None:
            self._neighbours.close()

    def _listen(self) -> None:
        order = self._host.orders.remote(self._number)
        while not self._closed.is_set() and self.order is None:
            ready, _ = ray.wait([order], timeout=_BEAT_SECONDS)
            if ready:
                self.order = ray.get(order)
            self._beat()

    def _beat(self) -> Any:
        phases = self.phases()
        if self._neighbours is not None:
            self._energy.share = self._neighbours.share(sum(phases.get(phase, 0.0) for phase in BUSY))
        joules = self._energy.read()
        usage = ({"phases": phases} if phases else {}) | ({} if joules is None else {"energy_joules": joules})
        return self._host.beat.remote(self._number, dict(self.progress), usage)


def _serve(config: dict[str, Any]) -> None:
    """What a lane's worker does: take a trial, work, take the next."""
    host = config["host"]
    module, _, name = config["work"].partition(":")
    work = getattr(importlib.import_module(module), name)
    place = {"node": socket.gethostname(), "process": os.getpid(), "cards": config["cards"]}
    group = get_current_placement_group()
    measured = [card["identity"] for card in config["cards"] if card["kind"] == "cuda"]
    while (taken := ray.get(host.take.remote(place, group))) is not None:
        number, job = taken
        with Channel(host, number, measured) as channel:
            final = work(job, channel)
        ray.get(host.send.remote(number, final))
        # An out-of-memory or CUDA error leaves the process in a state that no later trial should inherit.
        if final.get("retire"):
            return


@dataclass
class _Running:
    """The trial that a lane is on."""

    number: int
    messages: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)
    order: "asyncio.Future[str]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    progress: Message = field(default_factory=dict)
    usage: Message = field(default_factory=dict)
    """Its energy and seconds by phase, as last heard."""
    moved: float = field(default_factory=time.monotonic)
    done: bool = False

    def with_usage(self, message: Message) -> Message:
        """A message of the trial with its usage, where that is known."""
        return message | {"usage": self.usage} if self.usage else message


class LaneHost:
    """Keeps one lane's Ray Train run alive and passes messages between its worker and a trial's client."""

    def __init__(self, name: str, work: str, cards: list[Card], log: str, hang_seconds: float):
        self._name, self._work, self._cards, self._log = name, work, cards, log
        self._hang_seconds = hang_seconds
        self._pool: Any = ray.get_actor(POOL, namespace=NAMESPACE)
        self._jobs: asyncio.Queue[tuple[int, Message] | None] = asyncio.Queue(maxsize=1)
        self._running: _Running | None = None
        # The last messages of a trial may be fetched when the lane is on the next already.
        self._left: dict[int, _Running] = {}
        self._place: Message = {}

    async def run(self) -> str:
        """Run the lane until it retires or dies; returns the reason."""
        me = ray.get_runtime_context().current_actor
        lane = asyncio.get_running_loop().run_in_executor(None, self._fit, me)
        watch = asyncio.create_task(self._watch())
        try:
            await lane
            reason = "the lane retired"
        except Exception as error:  # noqa: BLE001 - whatever ended the worker, the trial's client must hear of it
            reason = _why("its worker process", error)
        watch.cancel()
        self._lose(reason)
        await self._told()  # the pool ends this process at once
        return reason

    def _fit(self, me: Any) -> None:
        import ray.train
        from ray.train.torch import TorchConfig, TorchTrainer

        card = self._cards[0]
        resources = {"GPU": 1.0} if card.kind == "cuda" else {"CPU": float(card.threads)}
        TorchTrainer(
            _serve,
            train_loop_config={"host": me, "work": self._work, "cards": [asdict(card) for card in self._cards]},
            scaling_config=ray.train.ScalingConfig(
                num_workers=len(self._cards), use_gpu=card.kind == "cuda", resources_per_worker=resources
            ),
            torch_config=TorchConfig(backend="nccl" if card.kind == "cuda" else "gloo"),
            run_config=ray.train.RunConfig(
                name=self._name,
                storage_path=self._log,
                # A lane that dies is replaced by the pool, which knows what its trial was.
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        ).fit()

    async def _watch(self) -> None:
        """Give up a trial that has not moved for `hang_seconds`, also one that ignores an order."""
        while True:
            await asyncio.sleep(min(1.0, self._hang_seconds / 4))
            trial = self._running
            if trial is None or trial.done:
                continue
            still = time.monotonic() - trial.moved
            if still > (min(self._hang_seconds, _ORDER_SECONDS) if trial.order.done() else self._hang_seconds):
                self._lose(f"it made no progress for {still:.0f} s")
                await self._told()
                self._pool.kill.remote(self._name)

    def _lose(self, reason: str) -> None:
        if self._running is not None and not self._running.done:
            self._running.done = True
            self._running.messages.put_nowait(self._running.with_usage({"event": "lost", "reason": reason}))

    async def _told(self, seconds: float = 5.0) -> None:
        """Wait until the client has the trial's last message, and a little, for it to leave this process."""
        for _ in range(int(seconds / 0.05)):
            if self._running is None or self._running.messages.empty():
                break
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)

    # The client's side.

    async def submit(self, number: int, job: Message) -> Message:
        """Hand a trial to the lane; returns where it runs."""
        if self._running is not None:
            self._left = {self._running.number: self._running}
        self._running = _Running(number)
        await self._jobs.put((number, job))
        return self._place

    async def next(self, number: int) -> Message:
        """The trial's next message, as soon as there is one."""
        if self._running is not None and self._running.number == number:
            return await self._running.messages.get()
        if number in self._left and not self._left[number].messages.empty():
            return self._left[number].messages.get_nowait()
        return {"event": "lost", "reason": "its lane has gone on to another trial"}

    async def order(self, number: int, order: str) -> None:
        """Tell the trial to leave: `stop`, or `interrupt` (saving first)."""
        if self._running is not None and self._running.number == number and not self._running.order.done():
            self._running.moved = time.monotonic()
            self._running.order.set_result(order)

    async def progress(self) -> tuple[int, Message] | None:
        """What the trial that is on the lane last said of itself."""
        trial = self._running
        return None if trial is None or trial.done else (trial.number, trial.with_usage(trial.progress))

    async def retire(self) -> None:
        """End the lane once its worker asks for the next trial."""
        await self._jobs.put(None)

    # The worker's side.

    async def take(self, place: Message, group: PlacementGroup | None) -> tuple[int, Message] | None:
        """The next trial, as soon as there is one; None ends the worker."""
        self._place = place
        if self._running is not None:
            self._running.done = True
        self._pool.idle.remote(self._name, group)
        return await self._jobs.get()

    async def send(self, number: int, message: Message) -> None:
        """A message from the trial to its client."""
        if self._running is not None and self._running.number == number and not self._running.done:
            self._running.moved = time.monotonic()
            self._running.messages.put_nowait(self._running.with_usage(message))

    async def orders(self, number: int) -> str:
        """The order to leave, once there is one."""
        assert self._running is not None and self._running.number == number
        return await asyncio.shield(self._running.order)

    async def beat(self, number: int, progress: Message, usage: Message) -> None:
        """A sign of life; the trial has moved if what it says of itself has changed. A hung one still uses energy."""
        if self._running is not None and self._running.number == number:
            if progress != self._running.progress:
                self._running.moved = time.monotonic()
            self._running.progress, self._running.usage = progress, usage


@dataclass
class _Lane:
    host: Any
    cards: list[Card]
    group: PlacementGroup | None = None
    """What holds its cards for it in Ray; known once its worker is up."""
    idle: bool = False
    trial: int | None = None


class LanePool:
    """Owns the lanes: hands out idle ones, replaces dead ones, kills the ones that hang.

    As many lanes as `cards` allows; they start together and once.
    """

    def __init__(self, work: str, cards: list[Card], cards_per_lane: int, log: str, hang_seconds: float):
        self._work, self._log, self._hang_seconds = work, log, hang_seconds
        self._lanes: dict[str, _Lane] = {}
        self._free_cards = [cards[i : i + cards_per_lane] for i in range(0, len(cards), cards_per_lane)]
        self._waiting: list[tuple[int, asyncio.Future[Any]]] = []
        self._started = 0
        self._failed_starts = 0
        self._closing = False
        self._draining = False
        self._dead = ""
        """Why there will be no lanes any more."""

    async def start(self, lanes: int) -> None:
        """Start so many lanes, each in the background."""
        for _ in range(min(lanes, len(self._free_cards))):
            self._start_lane()

    def _start_lane(self) -> None:
        cards = self._free_cards.pop(0)
        name = f"lane-{self._started}"
        self._started += 1
        host_class: Any = ray.remote(LaneHost)
        host = host_class.options(num_cpus=0, max_concurrency=64).remote(
            name, self._work, cards, self._log, self._hang_seconds
        )
        self._lanes[name] = _Lane(host, cards)
        asyncio.get_running_loop().create_task(self._mind(name, host))

    async def _mind(self, name: str, host: Any) -> None:
        """Follow a lane to its end and replace it."""
        try:
            reason = await host.run.remote()
        except Exception as error:  # noqa: BLE001 - the host may die in any way; its card must not be lost
            reason = _why("its host process", error)
        with contextlib.suppress(Exception):
            ray.kill(host)
        lane = self._lanes.pop(name)
        if lane.group is not None:
            # Ray Train's cleaner would do it too, if the dashboard answered it in time: on a busy machine never.
            remove_placement_group(lane.group)
        self._free_cards.append(lane.cards)
        if self._closing:
            return
        # A lane that never got as far as asking for a trial will not do better the fourth time.
        self._failed_starts = 0 if lane.idle or lane.trial is not None else self._failed_starts + 1
        if self._failed_starts < 3:
            self._start_lane()
        elif not self._lanes:
            self._dead = f"no lane could be started: {reason}"
            for _, waiter in self._waiting:
                if not waiter.done():
                    waiter.set_exception(RuntimeError(self._dead))
            self._waiting.clear()

    async def acquire(self, number: int) -> Any:
        """The host of an idle lane, as soon as there is one; first come, first served. None after `drain`."""
        if self._draining:
            return None
        if self._dead:
            raise RuntimeError(self._dead)
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((number, waiter))
        self._match()
        return await waiter

    async def idle(self, name: str, group: PlacementGroup | None) -> None:
        """A lane's worker waits for its next trial."""
        if name in self._lanes:
            lane = self._lanes[name]
            lane.idle, lane.trial, lane.group = True, None, group
            self._match()

    def _match(self) -> None:
        for lane in self._lanes.values():
            while lane.idle and self._waiting:
                number, waiter = self._waiting.pop(0)
                if waiter.done():  # whoever waited has gone
                    continue
                lane.idle, lane.trial = False, number
                waiter.set_result(lane.host)

    def _of(self, number: int) -> tuple[str, _Lane] | None:
        return next(((name, lane) for name, lane in self._lanes.items() if lane.trial == number), None)

    async def order(self, number: int, order: str) -> None:
        """Tell a trial to leave: `stop`, or `interrupt` (saving first)."""
        if found := self._of(number):
            await found[1].host.order.remote(number, order)

    async def drain(self) -> None:
        """Begin nothing more, and tell every trial to save and leave."""
        self._draining = True
        for _, waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()
        for lane in list(self._lanes.values()):
            if lane.trial is not None:
                await lane.host.order.remote(lane.trial, "interrupt")

    async def abandon(self, number: int) -> None:
        """Nobody follows this trial any more: end its lane, which is replaced."""
        for waiting in [entry for entry in self._waiting if entry[0] == number]:
            self._waiting.remove(waiting)
        if found := self._of(number):
            await self.kill(found[0])

    async def kill(self, name: str) -> None:
        """End a lane at once, with its worker; it is replaced."""
        if name in self._lanes:
            ray.kill(self._lanes[name].host)

    async def progress(self) -> dict[int, Message]:
        """What each running trial last said of itself, by trial."""
        answers = await asyncio.gather(
            *(lane.host.progress.remote() for lane in list(self._lanes.values()) if lane.trial is not None),
            return_exceptions=True,
        )
        return dict(answer for answer in answers if isinstance(answer, tuple))

    async def close(self) -> None:
        """End every lane and wait until their processes are gone; a Ray that goes on needs its cards back.

        A lane that is still starting is let come up first: killed before, Ray Train would leave its placement
        group behind, and the card with it.
        """
        self._closing = True
        for lane in list(self._lanes.values()):
            if lane.trial is not None:
                ray.kill(lane.host)
            else:
                await lane.host.retire.remote()
        for _ in range(900):
            if not self._lanes:
                return
            await asyncio.sleep(0.1)


def start_pool(work: str, cards: list[Card], *, cards_per_lane: int, log: str, hang_seconds: float) -> Any:
    """Start the pool and as many lanes as the cards allow; they come up in the background.

    `work` is `module:function`, called in a lane's worker as `work(job, channel)`; it returns the trial's last
    message and raises nothing.
    """
    pool_class: Any = ray.remote(LanePool)
    pool = pool_class.options(name=POOL, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000).remote(
        work, cards, cards_per_lane, log, hang_seconds
    )
    ray.get(pool.start.remote(len(cards) // cards_per_lane))
    return pool


def _why(who: str, error: BaseException) -> str:
    """What happened to a process, in one line; the whole story is in Ray's logs and this one's."""
    _log.warning("%s: %s", who, error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    died = any(sign in str(error) for sign in ("process has died", "unexpectedly", "ActorDied", "actor died"))
    return f"{who} died" if died else f"{who} failed: {lines[-1][:200]}"
