"""Lanes: long-lived worker groups that take trial after trial, and the pool that owns them.

Starting a process that trains takes 10 to 60 s (imports, a CUDA context, Ray Train's worker group), ending a
bad trial should take none of it. So a lane starts once and keeps its card; trials pass through it:

    trial's client --acquire--> LanePool --host--> client --submit--> LaneHost <--take-- worker
                                                   client <--next---- LaneHost <--send-- worker

`LanePool` and `LaneHost` are Ray actors without a card; a worker is a process of a Ray Train run
(`TorchTrainer`) that the host keeps alive. A lane has one worker on a card or on a share of one, or a worker on each
of several cards; of these, the first speaks for all. Nothing here knows what a trial is: `work(job, channel)` does it.

The pool alone says which card a lane is on (Ray counts cards, but would choose them itself).
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

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group_table, remove_placement_group

from .cards import Card
from .energy import BUSY, EnergyMeter, Neighbours
from .local_ray import CARD, LANE, NAMESPACE
from .locks import lock_folder
from .placement import Begin, Clear, House, Need, Seat, Sharing, Take

Message = dict[str, Any]
_log = logging.getLogger(__name__)
POOL = "lane-pool"
_BEAT_SECONDS = 0.5
_ORDER_SECONDS = 60.0
_START_SECONDS = 300.0
"""A lane that has not come up by then will not."""
_DEATH_SECONDS = 8.0
"""When one of several workers dies, the others fail too, and say so before Ray Train says why."""
_STARTS = 3
"""Failed starts in a row after which a card is given up."""


class Channel:
    """A trial's line to its host, on the side of a worker.

    `send` delivers a message and waits until the host has it. `progress` is what the trial last said of
    itself; a thread passes it on twice a second, which is also how the host knows that the trial moves.
    `order` turns from None to `stop` or `interrupt` when the trial is to leave. `phases` says what the trial has
    spent its time on; it is passed on beside the energy of `cards` (GPUs, by their UUIDs) as the trial's usage. Only
    the first of several workers (`rank` 0) speaks and listens.
    """

    def __init__(self, host: Any, number: int, cards: Sequence[str] = (), *, rank: int = 0, workers: int = 1):
        self.order: str | None = None
        self.progress: Message = {}
        self.rank, self.workers = rank, workers
        self.phases: Callable[[], dict[str, float]] = dict
        self._energy = EnergyMeter(cards if rank == 0 else ())
        # Only a lane of one card may have it together with others.
        self._neighbours = Neighbours(cards[0], lock_folder()) if len(cards) == 1 else None
        self._host, self._number = host, number
        self._closed, self._beating = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._listen, daemon=True)

    def send(self, message: Message) -> None:
        """Deliver a message to whoever follows the trial."""
        ray.get(self._host.send.remote(self._number, message))

    def __enter__(self) -> "Channel":
        if self.rank == 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.rank:
            return
        with self._beating:
            self._closed.set()
            ray.get(self._beat())  # what it has used in all arrives before its last message
        if self._neighbours is not None:
            self._neighbours.close()

    def _listen(self) -> None:
        order = self._host.orders.remote(self._number)
        while not self._closed.is_set() and self.order is None:
            ready, _ = ray.wait([order], timeout=_BEAT_SECONDS)
            if ready:
                self.order = ray.get(order)
            with self._beating:
                if not self._closed.is_set():
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
    import ray.train

    context = ray.train.get_context()
    rank, workers = context.get_world_rank(), context.get_world_size()
    host = config["host"]
    if config["cards"][0]["kind"] == "cuda":
        import torch

        torch.cuda.set_device(context.get_local_rank())
    module, _, name = config["work"].partition(":")
    work = getattr(importlib.import_module(module), name)
    place = {"node": socket.gethostname(), "process": os.getpid(), "cards": config["cards"], "share": config["share"]}
    measured = [card["identity"] for card in config["cards"] if card["kind"] == "cuda"]
    while (taken := ray.get(host.take.remote(rank, place))) is not None:
        number, job = taken
        with Channel(host, number, measured, rank=rank, workers=workers) as channel:
            final = work(job, channel)
        ray.get(host.finished.remote(number, rank, final))
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

    def end(self) -> None:
        """Nothing more comes of it; who waits for an order is let go, as only so many calls may wait here."""
        self.done = True
        if not self.order.done():
            self.order.set_result("")

    def with_usage(self, message: Message) -> Message:
        """A message of the trial with its usage, where that is known."""
        return message | {"usage": self.usage} if self.usage else message


class LaneHost:
    """Keeps one lane's Ray Train run alive and passes messages between its workers and a trial's client."""

    def __init__(
        self,
        number: int,
        name: str,
        work: str,
        cards: list[Card],
        share: float,
        environment: dict[str, str],
        log: str,
        hang_seconds: float,
    ):
        self._number, self._name, self._log = number, name, log
        self._work, self._cards, self._share = work, cards, share
        self._environment, self._hang_seconds = environment, hang_seconds
        self._pool: Any = ray.get_actor(POOL, namespace=NAMESPACE)
        # Each worker fetches its own: one that waited for word from another might wait all night.
        self._jobs: list[asyncio.Queue[tuple[int, Message] | None]] = [asyncio.Queue(maxsize=1) for _ in cards]
        self._ready: set[int] = set()
        self._running: _Running | None = None
        # The last messages of a trial may be fetched when the lane is on the next already.
        self._left: dict[int, _Running] = {}
        self._places: dict[int, Message] = {}

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

        environment = dict(self._environment)
        if cuda := self._cards[0].kind == "cuda":
            # Before the process begins, since NCCL looks at the cards before any of our code runs.
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(card.identity for card in self._cards)
        TorchTrainer(
            _serve,
            train_loop_config={
                "host": me,
                "work": self._work,
                "cards": [asdict(card) for card in self._cards],
                "share": self._share,
            },
            scaling_config=ray.train.ScalingConfig(
                num_workers=len(self._cards),
                resources_per_worker={"CPU": 0, CARD: self._share, LANE: self._number},
            ),
            # The pool gives up a trial that hangs; this is for a collective that outlives even that.
            torch_config=TorchConfig(
                backend="nccl" if cuda else "gloo", timeout_s=int(self._hang_seconds + _START_SECONDS)
            ),
            run_config=ray.train.RunConfig(
                name=self._name,
                storage_path=self._log,
                worker_runtime_env={"env_vars": environment},
                # A lane that dies is replaced by the pool, which knows what its trial was.
                failure_config=ray.train.FailureConfig(
                    max_failures=0, controller_failure_limit=0, max_preemption_failures=0
                ),
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
        for queue in self._jobs:
            await queue.put((number, job))
        return self._places[0]

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
        """End the lane once its workers ask for the next trial."""
        for queue in self._jobs:
            await queue.put(None)

    # The workers' side.

    async def take(self, rank: int, place: Message) -> tuple[int, Message] | None:
        """The next trial, as soon as there is one; None ends the worker."""
        self._places[rank] = place
        self._ready.add(rank)
        if len(self._ready) == len(self._cards):
            self._ready.clear()
            if self._running is not None:
                self._running.end()
            processes = [place["process"] for place in self._places.values()]
            self._pool.idle.remote(self._name, processes)
        return await self._jobs[rank].get()

    async def send(self, number: int, message: Message) -> None:
        """A message from the trial to its client."""
        if self._running is not None and self._running.number == number and not self._running.done:
            self._running.moved = time.monotonic()
            self._running.messages.put_nowait(self._running.with_usage(message))

    async def finished(self, number: int, rank: int, final: Message) -> None:
        """What a worker's part of the trial came to; the first worker's is the trial's.

        Of several workers, any that fails speaks for all: the others wait for it in vain, and their processes are
        of no more use.
        """
        failed = final.get("state") in ("failed", "out_of_memory") or bool(final.get("retire"))
        if final.get("state") == "out_of_memory" and self._share < 1:
            final = {**final, "crowded": await self._pool.crowded.remote(self._name)}
        if len(self._cards) == 1:
            await self.send(number, final)
        elif failed:
            if self._running is not None:  # nothing moves from here on, and that is no hanging
                self._running.moved = time.monotonic() + _DEATH_SECONDS
            self._giving_up = asyncio.get_running_loop().create_task(self._give_up(number, rank, final))
        elif rank == 0:
            await self.send(number, final)

    async def _give_up(self, number: int, rank: int, final: Message) -> None:
        # Where a worker's process has died, what the others say of it is no reason: Ray Train's word comes later.
        await asyncio.sleep(_DEATH_SECONDS)
        who = f"worker {rank}: " if rank else ""
        await self.send(number, {**final, "reason": f"{who}{final.get('reason', '')}"})
        if self._running is not None and self._running.number == number:
            self._running.end()
        await self._told()
        self._pool.kill.remote(self._name)

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
    number: int
    host: Any
    cards: list[Card]
    seat: Seat
    processes: list[psutil.Process] = field(default_factory=list)
    trial: int | None = None
    need: Need = field(default_factory=Need)
    """Of its trial."""
    came_up: bool = False


class LanePool:
    """Owns the lanes: hands out idle ones, begins those that are missing, replaces dead ones, kills what hangs."""

    def __init__(self, work: str, cards: list[Card], environment: dict[str, str], log: str, hang_seconds: float):
        self._work, self._log, self._hang_seconds = work, log, hang_seconds
        self._environment = environment
        self._cards = {card.index: card for card in cards}
        self._lanes: dict[str, _Lane] = {}
        self._sharing = Sharing()
        self._house = House(list(self._cards), refused=self._sharing.refused)
        self._waiting: list[tuple[int, Need, asyncio.Future[Any]]] = []
        self._started = 0
        self._failed_starts = dict.fromkeys(self._cards, 0)
        self._why: dict[int, str] = {}
        """Why a card was given up."""
        self._notes: list[str] = []
        self._minding: set[asyncio.Task[None]] = set()
        self._closing = False
        self._draining = False

    async def start(self, cards_per_lane: float) -> None:
        """Start as many lanes of so many cards, or of a share of one, as there is room for, in the background."""
        await self._free_cards()  # of a pool that died
        cards = list(self._cards)
        if cards_per_lane < 1:
            for card in cards * int(1 / cards_per_lane + 1e-9):
                self._begin((card,), cards_per_lane)
            return
        cards_per_lane = int(cards_per_lane)
        for first in range(0, len(cards) - cards_per_lane + 1, cards_per_lane):
            self._begin(tuple(cards[first : first + cards_per_lane]), 1.0)

    def _begin(self, cards: tuple[int, ...], share: float, promised: int | None = None) -> None:
        self._started += 1
        number = self._started
        name = f"lane-{number}"
        taken = [self._cards[card] for card in cards]
        host_class: Any = ray.remote(LaneHost)
        host = host_class.options(num_cpus=0, max_concurrency=64).remote(
            number, name, self._work, taken, share, self._environment, self._log, self._hang_seconds
        )
        seat = Seat(name, cards, share, promised=promised)
        self._house.seats.append(seat)
        self._lanes[name] = _Lane(number, host, taken, seat)
        for minding in (self._mind(name, host), self._mind_start(name)):
            task = asyncio.get_running_loop().create_task(minding)
            self._minding.add(task)  # the loop itself keeps none of them alive
            task.add_done_callback(self._minding.discard)

    async def _mind_start(self, name: str) -> None:
        await asyncio.sleep(_START_SECONDS)
        if name in self._lanes and not self._lanes[name].came_up:
            _log.warning("%s has not come up within %.0f s", name, _START_SECONDS)
            await self.kill(name)

    async def _mind(self, name: str, host: Any) -> None:
        """Follow a lane to its end and replace it."""
        try:
            reason = await host.run.remote()
        except Exception as error:  # noqa: BLE001 - the host may die in any way; its cards must not be lost
            reason = _why("its host process", error)
        with contextlib.suppress(Exception):
            ray.kill(host)
        lane = self._lanes[name]
        await asyncio.to_thread(_wait_until_gone, lane.processes)  # the next lane needs their memory
        del self._lanes[name]
        await self._free_cards()
        self._house.seats.remove(lane.seat)
        if self._closing:
            return
        if lane.came_up:
            self._failed_starts |= dict.fromkeys(lane.seat.cards, 0)
        else:
            self._count_failed_start(lane, reason)
        if lane.seat.state != "leaving" and set(lane.seat.cards) <= self._cards.keys():
            self._begin(lane.seat.cards, lane.seat.share)
        self._match()

    async def _free_cards(self) -> None:
        """Give back what Ray still holds for lanes that are gone.

        Ray Train's cleaner would do it too, if the dashboard answered it in time (on a busy machine never) and if
        it knew of the group (it does not while the workers are starting).
        """
        await asyncio.to_thread(_remove_groups, {lane.number for lane in self._lanes.values()})

    def _count_failed_start(self, lane: _Lane, reason: str) -> None:
        """A lane that never got as far as asking for a trial will not do better the fourth time."""
        cards = lane.seat.cards
        for card in cards:
            self._failed_starts[card] += 1
        if self._failed_starts[cards[0]] < _STARTS:
            return
        for card in cards:
            name = self._cards.pop(card).name
            self._why[card] = reason
            self._notes.append(f"card {card} ({name}) is given up: no lane could be started on it: {reason}")
        self._house.cards = list(self._cards)

    def _cannot_be(self, need: Need) -> str | None:
        """Why a trial will never have its cards; None while it may."""
        if self._house.suits(need):
            return None
        reason = next(iter(self._why.values()), f"there are {len(self._cards)} cards")
        few = f"{need.least:g} cards a trial, and {len(self._cards)} are left: " if self._cards else ""
        return f"{few}no lane could be started: {reason}"

    async def acquire(self, number: int, need: Need | None = None) -> Any:
        """The host of a lane for a trial, as soon as there is one; first come, first served. None after `drain`."""
        need = need or Need()
        if self._draining:
            return None
        if reason := self._cannot_be(need):
            raise RuntimeError(reason)
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append((number, need, waiter))
        self._match()
        return await waiter

    async def idle(self, name: str, processes: list[int]) -> None:
        """A lane's workers wait for their next trial."""
        if name not in self._lanes:
            return
        lane = self._lanes[name]
        lane.trial, lane.came_up = None, True
        if not lane.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                lane.processes = [psutil.Process(process) for process in processes]
        if lane.seat.state != "leaving":
            lane.seat.state, lane.seat.promised = "idle", None
        self._match()

    def _match(self) -> None:
        """Give waiting trials their lanes, in their order: a wide one is not passed by narrow ones for ever."""
        while self._waiting:
            number, need, waiter = self._waiting[0]
            if waiter.done():  # whoever waited has gone
                self._waiting.pop(0)
                continue
            if reason := self._cannot_be(need):
                self._waiting.pop(0)
                waiter.set_exception(RuntimeError(reason))
                continue
            step = self._house.place(number, need)
            if isinstance(step, Take):
                lane = self._lanes[step.name]
                lane.trial, lane.need = number, need
                lane.seat.state, lane.seat.shape = "busy", need.shape
                self._waiting.pop(0)
                waiter.set_result(lane.host)
            elif isinstance(step, Begin):
                self._begin(step.cards, step.share, promised=number)
            elif isinstance(step, Clear):
                for name in step.names:
                    self._lanes[name].seat.state = "leaving"
                    self._lanes[name].host.retire.remote()
            else:
                # Lanes that later ones need may start meanwhile.
                for later, wish, _ in self._waiting[1:]:
                    if isinstance(begin := self._house.place(later, wish), Begin):
                        self._begin(begin.cards, begin.share, promised=later)
                return

    def _of(self, number: int) -> tuple[str, _Lane] | None:
        return next(((name, lane) for name, lane in self._lanes.items() if lane.trial == number), None)

    async def crowded(self, name: str) -> bool:
        """Whether another trial is on a lane's card."""
        lane = self._lanes.get(name)
        return lane is not None and any(
            other is not lane and other.trial is not None and set(other.seat.cards) & set(lane.seat.cards)
            for other in self._lanes.values()
        )

    async def order(self, number: int, order: str) -> None:
        """Tell a trial to leave: `stop`, or `interrupt` (saving first)."""
        if found := self._of(number):
            await found[1].host.order.remote(number, order)

    async def drain(self) -> None:
        """Begin nothing more, and tell every trial to save and leave."""
        self._draining = True
        for _, _, waiter in self._waiting:
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
        lanes = {lane.trial: lane for lane in list(self._lanes.values()) if lane.trial is not None}
        answers = await asyncio.gather(
            *(lane.host.progress.remote() for lane in lanes.values()), return_exceptions=True
        )
        found: dict[int, Message] = dict(answer for answer in answers if isinstance(answer, tuple))
        self._learn(found)
        return found

    async def notes(self) -> list[str]:
        """What a person should know, each once."""
        notes, self._notes = self._notes, []
        return notes

    def _learn(self, progress: dict[int, Message]) -> None:
        """Learn from what trials that share a card say of their speed."""
        for card in self._cards:
            lanes = [lane for lane in self._lanes.values() if card in lane.seat.cards and lane.trial is not None]
            company = {
                lane.trial: (lane.need, progress.get(lane.trial, {}).get("examples_per_second"))
                for lane in lanes
                if lane.trial is not None
            }
            if len(company) > 1 and (found := self._sharing.see(card, company)):
                pair, together = found
                names = " and ".join(sorted(pair)) if len(pair) > 1 else f"two of {next(iter(pair))}"
                self._notes.append(
                    f"not on one card any more: {names}; together they go at {together:.2f} of the speed that they "
                    "have one after the other"
                )

    async def close(self) -> None:
        """End every lane and wait until their processes are gone; a Ray that goes on needs its cards back.

        A lane that is still starting is let come up first: killed before, Ray Train would leave its placement
        group behind, and the card with it.
        """
        self._closing = True
        for lane in list(self._lanes.values()):
            if lane.trial is not None:
                ray.kill(lane.host)
            elif lane.seat.state != "leaving":
                await lane.host.retire.remote()
        for _ in range(900):
            if not self._lanes:
                break
            await asyncio.sleep(0.1)
        await self._free_cards()


def start_pool(
    work: str,
    cards: list[Card],
    *,
    cards_per_lane: float,
    log: str,
    hang_seconds: float,
    environment: dict[str, str] | None = None,
) -> Any:
    """Start the pool and the lanes that the first trials are expected to need; they come up in the background.

    `work` is `module:function`, called in each of a lane's workers as `work(job, channel)`; it returns the trial's
    last message and raises nothing. `environment` is set in them.
    """
    pool_class: Any = ray.remote(LanePool)
    pool = pool_class.options(name=POOL, namespace=NAMESPACE, num_cpus=0, max_concurrency=1000).remote(
        work, cards, environment or {}, log, hang_seconds
    )
    ray.get(pool.start.remote(cards_per_lane))
    return pool


def _remove_groups(living: set[int]) -> None:
    """Remove the placement groups of every lane but these."""
    for identity, group in placement_group_table().items():
        lanes = {int(bundle[LANE]) for bundle in group["bundles"].values() if LANE in bundle}
        if lanes - living and group["state"] != "REMOVED":
            remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(identity)))


def _wait_until_gone(processes: list[psutil.Process]) -> None:
    """Wait until a lane's processes are gone, and end those that stay: they would hold their card's memory."""
    _, alive = psutil.wait_procs(processes, timeout=10)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=5)


def _why(who: str, error: BaseException) -> str:
    """What happened to a process, in one line; the whole story is in Ray's logs and this one's."""
    _log.warning("%s: %s", who, error)
    lines = str(error).strip().splitlines() or [type(error).__name__]
    died = any(sign in str(error) for sign in ("process has died", "unexpectedly", "ActorDied", "actor died"))
    return f"{who} died" if died else f"{who} failed: {lines[-1][:200]}"
