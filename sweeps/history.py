"""The history of a sweep: an append-only file that is the truth, and the state that follows from it.

`history.jsonl` has one event a line, flushed to disk before anything acts on it. The Optuna study, MLflow,
`summary.json` and the report are projections of it and can be rebuilt. Events, each with `time` (Unix seconds):

    opened    version, sweep, trainable, objective, cards, rates, told  the first line; again at every resume.
                                                         `rates`: what energy and time cost (`money.py`). `told`, of
                                                         the first alone: trials of earlier sweeps (`start_from.py`)
    proposed  trial, group, seed, parameters             a trial exists
    started   trial, node, cards, identities, share, process    it runs (again after an interruption)
    report    trial, examples, total, flops, seconds, metrics, checkpoint   an evaluation
    warned    trial, rule, reason, examples              a health rule has something to say; once a rule and trial
    lost      trial, reason, seconds                     its machine failed it; it can go on once
    interrupted  trial, reason, seconds, alone           it was asked to leave; it can go on (`alone`: on a card that it
                                                         does not share)
    ended     trial, state, reason, seconds, value, rule   for good; `rule` is the health rule that ended it, if one
    edited    changed                                    a training goes on with other settings
    closed    state, reason                              the sweep's process ended in an orderly way

`report`, `lost`, `interrupted` and `ended` also have, where they are known, `energy_joules` (measured) and `phases`
(seconds by what the trial did), both of the trial's present attempt so far.
"""

import fcntl
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from .files import WrongInput

VERSION = 1
Event = dict[str, Any]
End = Literal["complete", "stopped", "diverged", "out_of_memory", "failed"]
State = Literal["proposed", "running", "paused", "interrupted"] | End
ENDS = ("complete", "stopped", "diverged", "out_of_memory", "failed")


@dataclass
class Report:
    """One evaluation of a trial."""

    examples: int
    total: int
    """Examples of the trial's whole budget."""
    flops: float
    seconds: float
    metrics: dict[str, float]
    time: float


@dataclass
class Trial:
    """What is known of one trial."""

    number: int
    group: int
    seed: int
    parameters: dict[str, Any]
    proposed: float
    state: State = "proposed"
    reason: str = ""
    value: float | None = None
    reports: dict[int, Report] = field(default_factory=dict)
    """By examples: a report that is repeated after a resume counts once, the last."""
    started: float | None = None
    ended: float | None = None
    warnings: dict[str, str] = field(default_factory=dict)
    """What health rules had to say, by rule."""
    rule: str = ""
    """The health rule that ended it, if one did."""
    memory_share: float | None = None
    """What it would take of its card's memory by the estimate, where it ran out of it."""
    lost: int = 0
    """How often its machine failed it."""
    alone: bool = False
    """Whether it is to share its card with no other: it ran out of memory beside one."""
    seconds: float = 0.0
    """Of all its attempts that are over."""
    card_seconds: float = 0.0
    """Of all its attempts, the present one too; of a card that trials share, its part of the time."""
    node: str = ""
    cards: list[str] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    """Of the same cards."""
    share: float = 1.0
    """Of each of them: less than 1 where it is on one together with others."""
    energy_joules: float | None = None
    """Measured, over all its attempts, the present one as far as it was told; None where nothing was measured."""
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by what it did, likewise."""
    attempt: Event = field(default_factory=dict)
    """`energy_joules` and `phases` of its present attempt so far."""

    @property
    def over(self) -> bool:
        """Whether the trial has come to an end."""
        return self.state in ENDS

    @property
    def last(self) -> Report | None:
        """The newest evaluation."""
        return self.reports[max(self.reports)] if self.reports else None

    @property
    def examples(self) -> int:
        """Examples at the newest evaluation."""
        return self.last.examples if self.last else 0

    @property
    def flops(self) -> float:
        """FLOPs at the newest evaluation."""
        return self.last.flops if self.last else 0.0


@dataclass
class Record:
    """The state of a sweep: the fold of its events."""

    opened: Event = field(default_factory=dict)
    trials: dict[int, Trial] = field(default_factory=dict)
    closed: Event | None = None
    time: float = 0.0
    """Of the newest event."""
    told: list[dict[str, Any]] = field(default_factory=list)
    """Trials of earlier sweeps, which the searcher knows from the beginning."""
    card_seconds: dict[str, float] = field(default_factory=dict)
    """How long the sweep had each card, by its identity."""
    card_phases: dict[str, dict[str, float]] = field(default_factory=dict)
    """What trials did on each card, in seconds; `start_up` is also until the first trial of a spell."""
    _on_cards: set[int] = field(default_factory=set)
    _fresh: dict[str, float] = field(default_factory=dict)
    """Cards that have had no trial since the sweep was opened, and when that was."""

    def apply(self, event: Event) -> None:
        """Take one more event into account. Events of trials that are over change nothing."""
        kind, number = event["event"], event.get("trial", -1)
        elapsed, self.time = max(0.0, event["time"] - self.time), max(self.time, event["time"])
        if kind != "opened" and self.opened and not self.closed:
            self._pass(elapsed)
        if kind == "opened":
            self.opened, self.closed = event, None
            self._on_cards.clear()  # what ran when the last process was killed has ended with it
            self._fresh = {card["identity"]: event["time"] for card in event.get("cards", ())}
            self.told += event.get("told", [])
        elif kind == "closed":
            self.closed = event
        elif kind == "edited":
            # A training that had come to an end goes on too.
            for trial in self.trials.values():
                trial.state, trial.value, trial.ended = "interrupted", None, None
        elif kind == "proposed":
            self.trials[number] = Trial(
                number, event["group"], event["seed"], event["parameters"], proposed=event["time"]
            )
        elif (trial := self.trials[number]) and not trial.over:
            self._of_trial(trial, kind, event)

    def _pass(self, seconds: float) -> None:
        """Time passes, on every card of the sweep and for the trials that are on them."""
        for card in self.opened.get("cards", ()):
            identity = card["identity"]
            self.card_seconds[identity] = self.card_seconds.get(identity, 0.0) + seconds
        on = Counter(identity for number in self._on_cards for identity in self.trials[number].identities)
        for number in self._on_cards:
            trial = self.trials[number]
            trial.card_seconds += sum(seconds / on[identity] for identity in trial.identities)

    def _of_trial(self, trial: Trial, kind: str, event: Event) -> None:
        if kind == "started":
            trial.state, trial.started = "running", event["time"]
            self._on_cards.add(trial.number)
            trial.node, trial.cards = event["node"], event["cards"]
            trial.identities, trial.attempt = event.get("identities", []), {}
            trial.share = event.get("share", 1.0)
            for identity in trial.identities:
                self._spent(identity, "start_up", event["time"] - self._fresh.pop(identity, event["time"]))
        elif kind == "report":
            trial.reports[event["examples"]] = Report(
                event["examples"],
                event.get("total", event["examples"]),
                event["flops"],
                event["seconds"],
                event["metrics"],
                event["time"],
            )
            self._used(trial, event)
        elif kind == "warned":
            trial.warnings[event["rule"]] = event["reason"]
        elif kind in ("lost", "interrupted"):
            trial.state, trial.reason = "interrupted", event["reason"]
            trial.lost += kind == "lost"
            trial.alone = trial.alone or event.get("alone", False)
            trial.seconds += event["seconds"]
            self._used(trial, event)
            self._off(trial, event)
        elif kind == "ended":
            trial.state, trial.reason, trial.value = event["state"], event["reason"], event["value"]
            trial.ended, trial.rule = event["time"], event.get("rule", "")
            trial.memory_share = event.get("memory_share")
            trial.seconds += event["seconds"]
            self._used(trial, event)
            self._off(trial, event)
        else:
            raise ValueError(f"unknown event {kind}")

    def _used(self, trial: Trial, event: Event) -> None:
        """What a trial has used since its attempt was last told of."""
        before, phases = trial.attempt.get("phases", {}), event.get("phases", {})
        for phase, seconds in phases.items():
            more = seconds - before.get(phase, 0.0)
            trial.phases[phase] = trial.phases.get(phase, 0.0) + more
            for identity in trial.identities:
                self._spent(identity, phase, more)
        joules = event.get("energy_joules")
        if joules is not None:
            trial.energy_joules = (trial.energy_joules or 0.0) + joules - (trial.attempt.get("energy_joules") or 0.0)
        trial.attempt = {"phases": before | phases, "energy_joules": joules or trial.attempt.get("energy_joules")}

    def _off(self, trial: Trial, event: Event) -> None:
        """An attempt ends; where it never said what it did, that is not known."""
        self._on_cards.discard(trial.number)
        if not trial.attempt["phases"]:
            for identity in trial.identities:
                self._spent(identity, "unknown", event["seconds"])

    def _spent(self, identity: str, phase: str, seconds: float) -> None:
        phases = self.card_phases.setdefault(identity, {})
        phases[phase] = phases.get(phase, 0.0) + seconds

    def groups(self) -> dict[int, list[Trial]]:
        """Trials by configuration; repeats differ in the seed alone."""
        groups: dict[int, list[Trial]] = {}
        for trial in list(self.trials.values()):
            groups.setdefault(trial.group, []).append(trial)
        return groups

    def now_running(self) -> list[Trial]:
        """The trials that run."""
        return [trial for trial in list(self.trials.values()) if trial.state == "running"]


class History:
    """The file, open for appending by one process at a time."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time, *, durable: bool = True):
        """Open or create the file and lock it. Raises `WrongInput` where another process has it.

        Only a simulation's need not be durable: it does not wait for the disk.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self._clock, self._durable = path, clock, durable
        # Unbuffered: what a full disk refuses must not be kept and written later.
        self._file = path.open("a+b", buffering=0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise WrongInput(
                f"{path.parent}: this sweep is running in another process; wait for it, or stop it"
            ) from None
        self._cut_torn_line()
        self._lock = threading.Lock()
        self.listeners: list[Callable[[Event], None]] = []
        try:
            self.record = fold(path)
        except WrongInput:
            self._file.close()
            raise

    def append(self, kind: str, **fields: Any) -> Event:
        """Write an event to disk; then apply it and tell the listeners.

        Raises `OSError` where it could not be written; then the file is as it was, and nothing is applied. Its
        time is never before that of the event before it.
        """
        with self._lock:
            if self.record.closed and kind not in ("opened", "edited"):
                raise ValueError(f"{self.path}: {kind} after the sweep's process had closed it")
            # A clock that is set back must not make anything end before it began.
            now = max(self._clock(), self.record.time)
            event: Event = {"event": kind, "time": now, **fields}
            self._write(json.dumps(event, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            self.record.apply(event)
            for listener in self.listeners:
                listener(event)
            return event

    def close(self) -> None:
        """Release the file."""
        self._file.close()

    def _write(self, line: bytes) -> None:
        """Append a line: whole, or (by an error) not at all. A kill may leave it torn at the end of the file."""
        end, written = self._file.seek(0, os.SEEK_END), 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError:
            self._file.truncate(end)
            raise

    def _cut_torn_line(self) -> None:
        size = self._file.seek(0, os.SEEK_END)
        tail = b""
        while size and not tail.count(b"\n"):
            step = min(size, 65536)
            size -= step
            self._file.seek(size)
            tail = self._file.read(step) + tail
        whole = size + tail.rfind(b"\n") + 1
        if whole < size + len(tail):
            self._file.truncate(whole)


def read(path: Path, start: int = 0) -> Iterator[Event]:
    """The events of a history from a byte offset on; a torn last line is left out.

    Raises `WrongInput` for a line that is no event, or a file by a newer version.
    """
    for event, _ in read_with_offsets(path, start):
        yield event


def read_with_offsets(path: Path, start: int = 0) -> Iterator[tuple[Event, int]]:
    """Events, each with the byte offset behind it, from which reading can go on."""
    with path.open("rb") as file:
        file.seek(start)
        offset = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            event = _event(line)
            if event is None:
                raise WrongInput(f"{path}:{_line_at(path, offset)}: is damaged; restore the file from a copy")
            if event["event"] == "opened" and event.get("version", 0) > VERSION:
                raise WrongInput(f"{path}: was written by a newer version of rigsweep; update this one")
            yield event, offset


def _event(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def _line_at(path: Path, offset: int) -> int:
    """The number of the line that ends at a byte offset."""
    with path.open("rb") as file:
        return file.read(offset).count(b"\n")


def replay(path: Path) -> Iterator[tuple[Event, Record]]:
    """Every event, with the state of the sweep after it (one record, which grows). Raises `WrongInput`."""
    record = Record()
    for event, offset in read_with_offsets(path):
        try:
            record.apply(event)
        except (KeyError, TypeError, ValueError) as error:
            raise WrongInput(
                f"{path}:{_line_at(path, offset)}: does not follow from the lines before; restore the file from a copy"
            ) from error
        yield event, record


def fold(path: Path) -> Record:
    """The state of a sweep from its history, without opening it for writing. Raises `WrongInput`."""
    record = Record()
    for _, record in replay(path):  # noqa: B007 - the last one
        pass
    return record


@contextmanager
def alone_with(folder: Path) -> Iterator[bool]:
    """Whether no process runs the sweep of a folder, and keep it so meanwhile."""
    with (folder / "history.jsonl").open("rb") as history:
        try:
            fcntl.flock(history, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
