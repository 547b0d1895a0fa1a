"""What a sweep does next: history, searcher and stopper put together. Knows no Ray.

Everything that happens comes in through one of the methods, is written to the history first, and then acts.
What runs the trials (`running.py`, or `simulation.py`) asks `next_trial` and passes on what it hears.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .files import WrongInput
from .history import ENDS, History, Trial, replay
from .money import Rates, card_seconds_of
from .stoppers import STOPPERS
from .study import Study
from .sweep import Sweep


@dataclass
class Controller:
    """Decides; see the module."""

    sweep: Sweep
    history: History
    rungs: tuple[float, ...]
    tell: Callable[[str, Trial], None] = lambda _kind, _trial: None
    """Called after each event of a trial, for whoever shows the sweep."""
    closing: str | None = None
    """Why no more trials begin; None while they do."""
    clock: Callable[[], float] = lambda: time.monotonic()
    """Seconds; a simulation has a clock of its own."""
    _waiting: list[int] = field(default_factory=list)
    _since: dict[int, float] = field(default_factory=dict)
    _wrote: float = 0.0
    """When the last event of a trial was written, up to which the history knows the card-seconds."""
    _usage: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Energy and seconds by phase of the attempts that run, as last heard."""

    def __post_init__(self) -> None:
        self.record = self.history.record
        self.study = Study(self.sweep)
        self.stopper = STOPPERS[self.sweep.settings.early_stopping.rule](self.sweep, self.rungs)
        self._replay()

    def _replay(self) -> None:
        """Rebuild the study and the stopper, and settle what the last process left open."""
        verdicts: dict[int, str | None] = {}
        for event, record in replay(self.history.path):
            self.study.apply(event, record)
            if event["event"] == "report":
                trial = record.trials[event["trial"]]
                verdicts[trial.number] = self.stopper.decide(trial, trial.reports[event["examples"]])
        self.history.listeners.append(lambda event: self.study.apply(event, self.record))
        for trial in [trial for trial in self.record.trials.values() if not trial.over]:
            if reason := verdicts.get(trial.number):
                # The process died between an evaluation and what followed from it.
                self._end(trial.number, "stopped", reason)
            elif trial.state == "running":
                self._leave(trial.number, "interrupted", "the sweep's process ended")
            if not trial.over:
                self._waiting.append(trial.number)

    # What to run.

    def next_trial(self) -> int | None:
        """The number of the trial to run next; None when there is none to begin now."""
        while not self.closing:
            number = self._waiting.pop(0) if self._waiting else self._propose()
            if number is None or self._can_be_trained(number):
                return number
        return None

    def _propose(self) -> int | None:
        number, repeats = len(self.record.trials), self.sweep.settings.repeats
        if number >= self.sweep.settings.trials * repeats:
            return None
        group, repeat = divmod(number, repeats)
        parameters = self.record.trials[group * repeats].parameters if repeat else self.study.propose(group)
        seed = int(parameters.get("seed", self.sweep.space.values["seed"])) + repeat
        self._write("proposed", number, group=group, seed=seed, parameters=parameters)
        return number

    def _can_be_trained(self, number: int) -> bool:
        """Whether a trial's parameters are a training.

        The sweep file was checked by the ends of its space; a value inside that cannot be is one failed trial,
        not the end of the sweep.
        """
        trial = self.record.trials[number]
        try:
            self.sweep.training(trial.parameters, number - trial.group * self.sweep.settings.repeats)
        except WrongInput as error:
            self._end(number, "failed", f"cannot be trained: {error.problem or error}")
            return False
        return True

    # What happened.

    def started(
        self,
        number: int,
        node: str,
        cards: list[str],
        process: int,
        identities: Sequence[str] = (),
        share: float = 1.0,
    ) -> None:
        """A trial runs, on `cards` by their names and their `identities`, or on a share of the one."""
        self._since[number] = self.clock()
        self._usage.pop(number, None)
        place = {"node": node, "cards": cards, "identities": list(identities), "share": share, "process": process}
        self._write("started", number, **place)

    def heard(self, number: int, usage: dict[str, Any] | None) -> None:
        """What the present attempt of a trial has used so far: `energy_joules` and `phases`."""
        if usage and number in self._since:
            self._usage[number] = {name: told for name, told in usage.items() if told not in (None, {})}

    def reported(self, number: int, report: dict[str, Any]) -> bool:
        """An evaluation; returns whether the trial is to stop."""
        trial = self.record.trials[number]
        if trial.over:
            return True
        fields = {name: report[name] for name in ("examples", "total", "flops", "seconds", "checkpoint")}
        # A value that is not finite cannot be compared, averaged or written as JSON; of the objective, it is the end.
        metrics: dict[str, float] = report["metrics"]
        fields["metrics"] = {name: value for name, value in metrics.items() if math.isfinite(value)}
        metric = self.sweep.settings.objective.metric
        if metric in metrics and metric not in fields["metrics"]:
            reason = f"{metric} is not finite ({metrics[metric]}) after {report['examples']:,} examples"
            self._end(number, "diverged", reason, "non-finite-loss")
            return True
        event = self.history.append("report", trial=number, **fields, **self._usage.get(number, {}))
        self._wrote = self.clock()
        verdict = self.stopper.decide(trial, trial.reports[event["examples"]])
        self.tell("report", trial)
        if verdict:
            self._end(number, "stopped", verdict)
        return verdict is not None

    def warned(self, number: int, rule: str, reason: str, examples: int) -> None:
        """A health rule has something to say of a trial; it is heard once."""
        trial = self.record.trials[number]
        if not trial.over and rule not in trial.warnings:
            self._write("warned", number, rule=rule, reason=reason, examples=examples)

    def ended(self, number: int, state: str, reason: str, rule: str = "", memory_share: float | None = None) -> None:
        """A trial's last word: one of the ends, or `interrupted`.

        `rule` is the health rule that ended it, `memory_share` what it would take of its card's memory.
        """
        if state in ENDS:
            self._end(number, state, reason, rule, memory_share)
        elif not self.record.trials[number].over:
            self._leave(number, "interrupted", reason)
            # Nobody asked it to leave: what stopped it, such as a full disk, would stop the next one too.
            self.closing = self.closing or reason

    def lost(self, number: int, reason: str) -> None:
        """A trial's machine failed it: it goes on once, and has failed the second time."""
        trial = self.record.trials[number]
        if trial.over:
            return
        if self.closing:  # it was asked to leave and did not in time, which is no fault of its machine
            self._leave(number, "interrupted", reason)
        elif trial.lost:
            self._end(number, "failed", f"{reason}, for the second time")
        else:
            self._leave(number, "lost", reason)
            self._waiting.insert(0, number)

    def crowded(self, number: int, reason: str) -> None:
        """A trial ran out of memory while another shared its card: it goes on once, with a card to itself."""
        trial = self.record.trials[number]
        if trial.over:
            return
        if trial.alone or self.closing:
            self._end(number, "out_of_memory", reason)
            return
        self._leave(number, "interrupted", f"{reason}; it shared its card, and goes on alone", alone=True)
        self._waiting.insert(0, number)

    def close(self, state: str, reason: str) -> None:
        """The sweep's process ends."""
        for trial in self.record.now_running():
            self._leave(trial.number, "interrupted", reason)
        self.history.append("closed", state=state, reason=reason)

    def over_limit(self, started: float) -> str | None:
        """Which limit of the sweep is reached, if one is; `started` is when the process began, by the clock."""
        limits = self.sweep.settings.limits
        if limits.wall_time is not None and self.clock() - started >= limits.wall_time:
            return f"the limit of {limits.wall_time:,.0f} s wall time"
        if limits.device_time is not None and self.device_seconds() >= limits.device_time:
            return f"the limit of {limits.device_time:,.0f} s device time"
        if limits.cost is not None and self.cost() >= limits.cost:
            return f"the cost limit of {Rates.of(self.record).money(limits.cost)}"
        return None

    def cost(self) -> float:
        """What the sweep has cost so far, running trials included; 0 of what is not known."""
        rates, now = Rates.of(self.record), self.clock()
        total = 0.0
        for trial in list(self.record.trials.values()):
            card_seconds, joules = card_seconds_of(trial) + self._untold_card_seconds(trial, now), trial.energy_joules
            if trial.state == "running" and trial.number in self._since:
                heard = self._usage.get(trial.number, {}).get("energy_joules")
                if heard is not None:
                    joules = (joules or 0.0) + heard - (trial.attempt.get("energy_joules") or 0.0)
            total += rates.cost(joules, card_seconds) or 0.0
        return total

    def device_seconds(self) -> float:
        """Card-seconds spent so far, running trials included."""
        now = self.clock()
        trials = list(self.record.trials.values())  # as another thread may propose one meanwhile
        return sum(card_seconds_of(trial) + self._untold_card_seconds(trial, now) for trial in trials)

    def _untold_card_seconds(self, trial: Trial, now: float) -> float:
        """Of a trial that runs: since the last event of any trial, up to which the history knows them."""
        if trial.state != "running" or trial.number not in self._since:
            return 0.0
        begun = self._since[trial.number]
        since = max(begun, self._wrote) if trial.identities else begun
        return (now - since) * max(1, len(trial.cards)) * trial.share

    def _end(self, number: int, state: str, reason: str, rule: str = "", memory_share: float | None = None) -> None:
        trial = self.record.trials[number]
        if trial.over:
            return
        metric = self.sweep.settings.objective.metric
        value = trial.last.metrics.get(metric) if trial.last and state in ("complete", "stopped") else None
        if state == "complete" and value is None:
            state, reason = "failed", f"no evaluation of {metric} at its end"
        spent, told = self._spent(trial), self._usage.pop(number, {})
        if memory_share is not None:
            told = told | {"memory_share": memory_share}
        self._write("ended", number, state=state, reason=reason, seconds=spent, value=value, rule=rule, **told)

    def _leave(self, number: int, kind: str, reason: str, **fields: Any) -> None:
        spent, used = self._spent(self.record.trials[number]), self._usage.pop(number, {})
        self._write(kind, number, reason=reason, seconds=spent, **fields, **used)

    def _spent(self, trial: Trial) -> float:
        """Seconds of the attempt that ends now; of a process that died, up to its last evaluation."""
        if trial.number in self._since:
            return self.clock() - self._since.pop(trial.number)
        # By the trial's own clock, which cannot be set, and counts over all its attempts.
        return max(0.0, trial.last.seconds - trial.seconds) if trial.state == "running" and trial.last else 0.0

    def _write(self, kind: str, number: int, **fields: Any) -> None:
        self.history.append(kind, trial=number, **fields)
        self._wrote = self.clock()
        self.tell(kind, self.record.trials[number])
