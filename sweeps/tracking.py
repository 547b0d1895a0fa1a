"""MLflow as a projection of a sweep: its history and its trials' folders, written by one process.

What MLflow holds may be lost, or out of reach, at any time, and is then rebuilt. Nothing doubles, as points carry
their recorded times and runs are found again by their tags. `mlflow.json` (`mlflow_store.State`) beside the
history keeps how far it is. The steps of MLflow's charts are examples.
"""

import json
import logging
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import disk
from .ablation import compare, is_ablation
from .files import WrongInput
from .folders import read_sweep
from .history import Event, Record, Trial, read_with_offsets
from .mlflow_pages import (
    ABLATION,
    ablation_table,
    ablation_tags,
    color,
    comparison_address,
    comparison_view,
    describe_sweep,
    describe_trial,
    text,
    title,
)
from .mlflow_store import (
    STATUS,
    State,
    Status,
    Store,
    find_run,
    log,
    log_picture,
    origin_tags,
    run_ids,
    runs_of,
    set_status,
)
from .money import Rates
from .space import flatten
from .sweep import Sweep
from .trial_folders import Look, TrialFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["Store", "Tracker", "TrackerActor", "find_run", "run_ids"]

_log = logging.getLogger(__name__)
_VALUE, _TAG = 6000, 8000  # longest text that MLflow keeps
_LINGER = 30.0  # seconds in which a trial that is over may still flush its last rows


@dataclass
class _Shown:
    """A trial as MLflow is to show it, beside what the record keeps; then what MLflow has of it."""

    begun: float
    changed: float
    """When it took its present state."""
    opened: Event
    """The opening under which it was started last: its versions and commit."""
    status: Status = ("", None)
    parameters: bool = False
    deleted: bool = False
    """By a person in MLflow, who does not want to see it again."""
    tags: dict[str, str] = field(default_factory=dict)
    change: dict[str, str] = field(default_factory=dict)
    """Tags that say what an ablation has found of it: they change when other trials end."""


class Tracker:
    """Writes one sweep to MLflow; see the module. One at a time for a sweep, in one thread."""

    def __init__(self, folder: Path, store: Store):
        self.folder, self.store = folder, store
        self.behind: str | None = None
        """Why MLflow is not up to date; None when it is."""
        self.hopeless = False
        """Whether that will not pass by waiting."""
        self._file = folder / "mlflow.json"
        self._state = State.load(self._file)
        if self._state.store != store.uri:
            self._state = State(store.uri)
        self._record, self._shown = Record(), dict[int, _Shown]()
        self._folders = dict[int, TrialFolder]()  # of trials that are still looked at
        self._read, self._began = 0, 0.0
        self._dirty = set[int]()  # trials with events that MLflow has not got
        self._parent_dirty, self._parent_status = False, ("", None)
        self._newly_opened = True
        self._ablation = ""  # the table that MLflow has
        self._sweep: Sweep | None = None
        self._client: MlflowClient | None = None
        self._identity = 0

    def catch_up(self) -> None:
        """Write what is new. An error of MLflow's is logged when an outage begins, and the next call goes on."""
        try:
            self._follow()
            # Also with nothing new: the store may have been deleted, before this process or under its eyes.
            anew = self._client is None or self._identity != self.store.identity()
            if self._record.opened and (anew or self._dirty or self._parent_dirty or self._news()):
                self._project()
            self._look_away()
        except Exception as error:
            from mlflow.exceptions import MlflowException
            from sqlalchemy.exc import SQLAlchemyError

            if not isinstance(error, MlflowException | SQLAlchemyError | OSError | WrongInput):
                raise
            if self.behind is None:
                _log.warning("MLflow is behind (%s); the sweep goes on, and the record will catch up", error)
            self.behind, self._client = str(error), None
            self.hopeless = isinstance(error, WrongInput) or disk.full(error, self.folder) is not None
        else:
            if self.behind is not None:
                _log.warning("MLflow is up to date again")
            self.behind = None

    # What happened.

    def _follow(self) -> None:
        """Take in new events of the history."""
        path, first = self.folder / "history.jsonl", self._read == 0
        for event, offset in read_with_offsets(path, self._read):
            if not self._read:
                self._began = event["time"]
                if self._state.sweep != self._key:  # another sweep's cursors, or none
                    self._state = State(self.store.uri, self._key)
            self._apply(event)
            self._read = offset
            if offset > self._state.history:
                self._parent_dirty |= event["event"] != "report"
                if (number := event.get("trial")) in self._shown:
                    self._dirty.add(number)
                    self._look_at(number)
        for number in self._shown if first else ():
            # Also those that were being looked at when the last process ended.
            if number in self._state.metrics or not self._record.trials[number].over:
                self._look_at(number)

    def _apply(self, event: Event) -> None:
        """Fold an event into what MLflow is to show; like the record, trials that are over stay as they are."""
        number, kind = event.get("trial"), event["event"]
        was_over = number in self._record.trials and self._record.trials[number].over
        self._record.apply(event)
        if kind == "opened":
            self._sweep, self._newly_opened = None, True
        # What was only proposed is no run: it has nothing to show, and may never have.
        if number is None or kind == "proposed" or was_over:
            return
        shown = self._shown.setdefault(number, _Shown(event["time"], event["time"], self._record.opened))
        if kind not in ("report", "warned"):
            shown.changed = event["time"]
        if kind == "started":
            shown.opened = self._record.opened

    def _look_at(self, number: int) -> None:
        # A trial that is stopped by comparison hears of it after its end has been written down.
        over = self._record.trials[number].over
        self._folder(number).until = time.monotonic() + _LINGER if over else float("inf")

    def _folder(self, number: int) -> TrialFolder:
        if number not in self._folders:
            path, state = self.folder / "trials" / str(number), self._state
            samples = list(state.samples.get(number, ()))
            self._folders[number] = TrialFolder(path, state.metrics.get(number, 0), samples, time.monotonic())
        return self._folders[number]

    def _news(self) -> set[int]:
        return {number for number, folder in self._folders.items() if folder.has_news()}

    def _look_away(self) -> None:
        """From trials that have been over for a while: a look costs what is new, not what there is."""
        past = [number for number, folder in self._folders.items() if folder.until < time.monotonic()]
        for number in past:
            self._start_over(number)
        if past:
            self._state.save(self._file)

    def _start_over(self, number: int) -> None:
        """Forget what MLflow has of a trial: it has nothing, or all."""
        self._shown[number].tags = {}
        for kept in (self._folders, self._state.metrics, self._state.samples):
            kept.pop(number, None)

    @property
    def _key(self) -> str:
        return str(_ms(self._began))  # which sweep it is, in whatever store and folder it is met

    # What MLflow gets.

    def _project(self) -> None:
        """Write every trial with news, then the parent; what has been written is not dirty any more."""
        client = self._connect()
        for number in sorted(self._dirty | self._news()):
            if not self._shown[number].deleted:
                self._project_trial(client, number)
            self._dirty.discard(number)
        if self._parent_dirty:
            self._project_parent(client)
            self._parent_dirty = False
        self._state.history = self._read
        self._state.save(self._file)

    def _connect(self) -> "MlflowClient":
        """The client; after it was lost, what the store holds is compared with what it should hold."""
        if self._client and self._identity == self.store.identity():
            return self._client
        client = self.store.open()
        state, name = self._state, self._record.opened["sweep"]
        experiment = client.get_experiment_by_name(name)
        if experiment and experiment.lifecycle_stage == "deleted":
            client.restore_experiment(experiment.experiment_id)
        # A server knows itself where artifacts go; without one it must be said, or they land where one stands.
        place = (self.store.artifacts / name).as_uri() if self.store.artifacts else None
        state.experiment = experiment.experiment_id if experiment else client.create_experiment(name, place)
        state.parent, state.runs, self._newly_opened, self._ablation = "", {}, True, ""
        for run in runs_of(client, state.experiment, self._key):
            number, status = run.data.tags.get("rigsweep.trial"), (run.info.status, run.info.end_time)
            deleted = run.info.lifecycle_stage == "deleted"
            if number is None:
                state.parent, self._parent_status = run.info.run_id, status
                if deleted:  # with the sweep going on, it is needed again
                    client.restore_run(state.parent)
            elif shown := self._shown.get(int(number)):
                state.runs[int(number)], shown.status = run.info.run_id, status
                shown.parameters, shown.deleted = bool(run.data.params), deleted
        for number, shown in self._shown.items():
            shown.change = {}
            if number not in state.runs:
                until = self._folder(number).until
                self._start_over(number)
                self._folder(number).until = until
            if number not in state.runs or shown.status != self._due(number):
                self._dirty.add(number)
            elif self._record.trials[number].over and number not in state.metrics:
                # With its last status a trial is there as a whole.
                self._dirty.discard(number)
                self._start_over(number)
        if not state.parent:
            tags = {"rigsweep.sweep": name, "rigsweep.opened": self._key}
            state.parent = client.create_run(state.experiment, _ms(self._began), tags, name).info.run_id
            self._parent_status = ("RUNNING", None)
        self._parent_dirty = True
        self._client, self._identity = client, self.store.identity()
        return client

    def _project_trial(self, client: "MlflowClient", number: int) -> None:
        """Bring one run up to date, in as few calls as MLflow allows. Doing it twice changes nothing."""
        from mlflow.entities import Metric, Param, RunTag

        trial, shown = self._record.trials[number], self._shown[number]
        folder, due = self._folder(number), self._due(number)
        if number not in self._state.runs:
            self._create_run(client, trial, shown)
        run_id = self._state.runs[number]
        look = folder.look(trial.reports.values())
        metrics = [Metric(p.name, p.value, _ms(p.time), p.examples) for p in look.points]
        if trial.state == "complete" and trial.value is not None and shown.status != due:
            metrics.append(Metric("objective", trial.value, _ms(shown.changed), trial.examples))
        if trial.over and shown.status != due:
            spent = Rates.of(self._record).of_trial(trial)
            for name, amount in (("energy_kwh", spent.kwh), ("cost", spent.cost)):
                if amount is not None:
                    metrics.append(Metric(name, amount, _ms(shown.changed), trial.examples))
        for sample in look.samples:
            path = folder.path / "samples" / sample
            if path.suffix == ".png":
                log_picture(client, run_id, path)
            else:
                client.log_artifact(run_id, str(path), "samples")
        # Once: MLflow refuses to change them, and a later version might write a value differently.
        values = {} if shown.parameters else self._parameters(trial)
        params = [Param(key, text(value)[:_VALUE]) for key, value in values.items()]
        tags = self._tags(trial, shown, folder, look)
        changed = [RunTag(key, value) for key, value in tags.items() if shown.tags.get(key) != value]
        log(client, run_id, metrics, params, changed)
        # The status comes last, as the sign that all of the trial is there; cursors move once it has arrived.
        set_status(client, run_id, shown.status, due)
        folder.keep(look)
        shown.status, shown.parameters, shown.tags = due, True, tags
        self._state.metrics[number], self._state.samples[number] = folder.offset, folder.samples

    def _create_run(self, client: "MlflowClient", trial: Trial, shown: _Shown) -> None:
        state, name = self._state, title(trial, self._definition().settings.repeats)
        tags = {"rigsweep.opened": self._key, "rigsweep.trial": str(trial.number)}
        tags |= {"mlflow.parentRunId": state.parent, "mlflow.runColor": color(trial.number)}
        run = client.create_run(state.experiment, _ms(shown.begun), tags, name)
        state.runs[trial.number] = run.info.run_id
        shown.status, shown.parameters = ("RUNNING", None), False

    def _project_parent(self, client: "MlflowClient") -> None:
        """Bring the sweep's own run up to date, and the view in which its trials are compared."""
        from mlflow.entities import RunTag

        state, opened, closed = self._state, self._record.opened, self._record.closed
        view = f"rigsweep-{self._key}"
        if self._newly_opened:
            for key, value in {
                f"mlflow.sharedViewState.{view}": comparison_view(self._definition(), self._key),
                "mlflow.experimentKind": "custom_model_development",  # else MLflow asks what it is
                "mlflow.note.content": opened.get("question") or "",
            }.items():
                client.set_experiment_tag(state.experiment, key, value)
            client.log_artifact(state.parent, str(self.folder / "sweep.yaml"))
        address = comparison_address("", state.experiment, view)
        tags = origin_tags(opened) | {
            "rigsweep.state": closed["state"] if closed else "running",
            "rigsweep.reason": closed["reason"] if closed else "",
            "mlflow.note.content": describe_sweep(
                self._definition(), self._record, state.experiment, state.runs, address
            ),
        }
        client.log_batch(state.parent, tags=[RunTag(key, value[:_TAG]) for key, value in tags.items()])
        if is_ablation(self._definition()):
            self._project_ablation(client)
        done = "FINISHED" if closed and closed["state"] == "complete" else "KILLED"
        due = (done, _ms(closed["time"])) if closed else ("RUNNING", None)
        set_status(client, state.parent, self._parent_status, due)
        self._parent_status, self._newly_opened = due, False

    def _project_ablation(self, client: "MlflowClient") -> None:
        """What an ablation says so far: a table of the sweep's run, and tags of the trials' runs."""
        from mlflow.entities import RunTag

        sweep, state = self._definition(), self._state
        changes = compare(sweep, self._record)
        table = ablation_table(changes, sweep.settings.objective.metric)
        if table != self._ablation:
            client.log_text(state.parent, table, ABLATION)
            shown_as_table = [{"path": ABLATION, "type": "table"}]
            client.set_tag(state.parent, "mlflow.loggedArtifacts", json.dumps(shown_as_table))
            self._ablation = table
        of_group = {change.group: change for change in changes}
        for number, run_id in state.runs.items():
            shown = self._shown[number]
            tags = ablation_tags(of_group.get(self._record.trials[number].group))
            if tags != shown.change and not shown.deleted:
                client.log_batch(run_id, tags=[RunTag(key, value[:_TAG]) for key, value in tags.items()])
                shown.change = tags

    def _due(self, number: int) -> Status:
        """The status and end that MLflow should show of a trial."""
        status = STATUS.get(self._record.trials[number].state, "KILLED")
        return status, None if status == "RUNNING" else _ms(self._shown[number].changed)

    def _tags(self, trial: Trial, shown: _Shown, folder: TrialFolder, look: Look) -> dict[str, str]:
        tags = origin_tags(shown.opened) | {
            "rigsweep.group": str(trial.group),
            "rigsweep.state": trial.state,
            "rigsweep.reason": trial.reason if trial.state != "running" else "",
            "rigsweep.health": ", ".join(dict.fromkeys(filter(None, [trial.rule, *trial.warnings]))),
            "rigsweep.warnings": "\n".join(f"{rule}: {reason}" for rule, reason in trial.warnings.items()),
            "rigsweep.node": trial.node,
            "rigsweep.card": ", ".join(trial.cards),
            "mlflow.note.content": describe_trial(trial, folder.newest_sample(look)),
        }
        if any(name.endswith(".png") for name in (*folder.samples, *look.samples)):
            tags["mlflow.loggedImages"] = "True"
        return {key: value[:_TAG] for key, value in tags.items()}

    def _definition(self) -> Sweep:
        self._sweep = self._sweep or read_sweep(self.folder)
        return self._sweep

    def _parameters(self, trial: Trial) -> dict[str, Any]:
        """The whole training of a trial, flat; what is not set is left out."""
        try:
            training = self._definition().training(trial.parameters).model_dump(mode="json", exclude_none=True)
        except WrongInput:  # it failed for this, before it began
            training = {}
        return flatten(training) | trial.parameters | {"seed": trial.seed}


class TrackerActor:
    """Tracks a sweep in a thread of its own: wrap it with `ray.remote`, and nobody waits for MLflow."""

    def __init__(self, folder: Path, store: Store, every: float = 1.0):
        self._folder, self._store, self._every = folder, store, every
        self._leaving, self._patience = threading.Event(), float("inf")
        self._behind: str | None = "MLflow has not answered yet"
        self._thread = threading.Thread(target=self._run, daemon=True, name="tracker")
        self._thread.start()

    def ping(self) -> bool:
        """Whether the thread is alive."""
        return self._thread.is_alive()

    def finish(self, timeout: float) -> None:
        """Catch up to the end of the history and stop. Raises `TimeoutError` that says why it could not."""
        self._patience = time.monotonic() + timeout
        self._leaving.set()
        self._thread.join(timeout)
        if self._thread.is_alive() or self._behind:
            raise TimeoutError(f"MLflow is behind: {self._behind}")

    def _run(self) -> None:
        try:
            tracker = Tracker(self._folder, self._store)
            while time.monotonic() < self._patience:
                last = self._leaving.is_set()  # asked before the look, which then sees all that was written
                tracker.catch_up()
                self._behind = tracker.behind or (None if last else "the end of the history is not reached")
                if not self._behind or (last and tracker.hopeless):
                    return
                # Rarely while MLflow is away, which is no help to it; `finish` is waited for.
                (time.sleep if last else self._leaving.wait)(self._every * (10 if tracker.behind and not last else 1))
        except Exception as error:  # noqa: BLE001 - the thread's end: nobody else would hear of it
            _log.exception("tracking has ended; the record can be rebuilt from the history")
            self._behind = f"{type(error).__name__}: {error}"


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
