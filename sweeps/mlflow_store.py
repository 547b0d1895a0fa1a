"""The MLflow store of a runs folder, and what is known of it without opening it.

`mlflow.json` in a sweep's folder keeps how far MLflow has it:

    store, sweep                where it was written, and which sweep it was (its first event's milliseconds)
    experiment, parent, runs    ids; `runs` by trial
    history                     the byte up to which events are in MLflow
    metrics, samples            of trials that are still looked at: the byte, and the files, in MLflow
"""

import fcntl
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from .files import WrongInput
from .folders import sqlite_uri
from .history import Event

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, Run, RunTag

Status = tuple[str, int | None]
"""MLflow's status of a run, and its end in milliseconds."""
STATUS = {"complete": "FINISHED", "failed": "FAILED", "out_of_memory": "FAILED", "running": "RUNNING"}
"""MLflow's status of a trial's state; every other one is KILLED."""

_log = logging.getLogger(__name__)
_POINTS = 800  # with the parameters and tags of one call, below MLflow's 1,000
_PARAMETERS = 100


@dataclass(frozen=True)
class Store:
    """Where MLflow keeps things: `artifacts` is None where a server decides."""

    uri: str
    artifacts: Path | None = None

    @classmethod
    def of(cls, runs: Path) -> "Store":
        """`MLFLOW_TRACKING_URI` where it is set, else SQLite and a folder under `runs`."""
        if uri := os.environ.get("MLFLOW_TRACKING_URI"):
            return cls(uri)
        runs = runs.resolve()
        return cls(sqlite_uri(runs / "mlflow.db"), runs / "artifacts")

    @property
    def file(self) -> Path | None:
        """The SQLite file, if it is one."""
        path = self.uri.removeprefix("sqlite:///").partition("?")[0]
        return Path(unquote(path)) if self.uri.startswith("sqlite:///") else None

    def identity(self) -> int:
        """Another number once the SQLite file has been deleted and begun anew; 0 where there is none."""
        try:
            return self.file.stat().st_ino if self.file else 0
        except FileNotFoundError:
            return -1

    def open(self) -> "MlflowClient":
        """A client; the tables are made where there are none.

        Raises what MLflow raises, and `WrongInput` for a file of another MLflow version.
        """
        _quieten()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        if not self.file:
            return MlflowClient(self.uri)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        # Two processes that meet an empty store would both create its tables, and one would fail.
        with self.file.with_name(f"{self.file.name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.file.touch()
            try:
                client = MlflowClient(f"{self.uri}?timeout={_seconds(self.identity())}")
                client.search_experiments(max_results=1)
            except MlflowException as error:
                if "database schema" not in str(error):
                    raise
                raise WrongInput(
                    f"{self.file}: was made by another version of MLflow; use that one, or move the file away: "
                    "it is rebuilt, for each sweep by `rigsweep ui SWEEP`"
                ) from error
        return client


_seen_stores: list[int] = []


def _seconds(identity: int) -> int:
    # MLflow keeps one engine an address for the life of the process, with its connections to a file that may
    # have been deleted since; another time-out makes another address. (Waiting itself is MLflow's 20 s, and
    # the next `catch_up`.)
    if identity not in _seen_stores:
        _seen_stores.append(identity)
    return 60 + _seen_stores.index(identity)


def _quieten() -> None:
    """Switch off MLflow's usage reporting and chatter, and retries of its own: `catch_up` is the retry."""
    for name, value in {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
        "MLFLOW_LOGGING_LEVEL": "WARNING",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    }.items():
        os.environ.setdefault(name, value)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    # It logs the traceback of what it raises; here that is told once, by `catch_up`.
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)


@dataclass
class State:
    """`mlflow.json`; see the module. A cache: without it the same is found in the store."""

    store: str = ""
    sweep: str = ""
    experiment: str = ""
    parent: str = ""
    runs: dict[int, str] = field(default_factory=dict)
    history: int = 0
    metrics: dict[int, int] = field(default_factory=dict)
    samples: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> "State":
        """The file, or nothing yet."""
        if not path.exists():
            return cls()
        try:
            told = json.loads(path.read_text(encoding="utf-8"))
            for name in ("runs", "metrics", "samples"):
                told[name] = {int(number): value for number, value in told[name].items()}
            return cls(**told)
        except (ValueError, TypeError, KeyError) as error:
            _log.warning("%s is damaged (%s) and is made anew", path, error)
            return cls()

    def save(self, path: Path) -> None:
        """Replace the file in one step."""
        temporary = path.with_name(f".{path.name}")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(path)


def run_ids(folder: Path) -> dict[int, str]:
    """The MLflow run of each trial of a sweep, as far as they are known."""
    return State.load(folder / "mlflow.json").runs


def find_run(runs: Path, run_id: str) -> tuple[str, int]:
    """Sweep and trial of an MLflow run. Raises `WrongInput` for one that is no trial, or not there."""
    for file in runs.glob("*/mlflow.json"):  # without MLflow, which takes seconds to import
        for number, known in State.load(file).runs.items():
            if known == run_id:
                return file.parent.name, number
    store = Store.of(runs)
    if store.file and not store.file.exists():
        raise WrongInput(f"{run_id}: no such MLflow run, as nothing has been tracked in {runs} yet")
    client = store.open()
    from mlflow.exceptions import MlflowException

    try:
        tags = client.get_run(run_id).data.tags
    except MlflowException as error:
        raise WrongInput(f"{run_id}: no such MLflow run") from error
    if "rigsweep.trial" not in tags:
        raise WrongInput(f"{run_id}: this MLflow run is no trial of a sweep")
    return tags["rigsweep.sweep"], int(tags["rigsweep.trial"])


def runs_of(client: "MlflowClient", experiment: str, key: str) -> "Iterator[Run]":
    """All runs of a sweep, deleted ones too."""
    from mlflow.entities import ViewType

    query, token = f"tags.`rigsweep.opened` = '{key}'", None
    while True:
        found = client.search_runs([experiment], query, ViewType.ALL, 1000, page_token=token)
        yield from found
        if not (token := found.token):
            return


def log(
    client: "MlflowClient", run_id: str, metrics: "list[Metric]", params: "list[Param]", tags: "list[RunTag]"
) -> None:
    """`log_batch`, in pieces of what MLflow takes in one call. `tags` are few."""
    client.log_batch(run_id, metrics[:_POINTS], params[:_PARAMETERS], tags)
    for start in range(_PARAMETERS, len(params), _PARAMETERS):
        client.log_batch(run_id, params=params[start : start + _PARAMETERS])
    for start in range(_POINTS, len(metrics), _POINTS):
        client.log_batch(run_id, metrics=metrics[start : start + _POINTS])


def log_picture(client: "MlflowClient", run_id: str, path: Path) -> None:
    """Log a trial's picture (`<examples>-<name>.png`) as MLflow's `log_image` does, for its slider through the steps.

    Doing it twice is one picture: what `log_image` takes from the clock and by chance follows from the file here.
    """
    from mlflow.tracking.multimedia import compress_image_size
    from PIL import Image

    step, _, key = path.stem.partition("-")
    when = path.stat().st_mtime_ns // 1_000_000
    name = f"{key}+step+{int(step)}+timestamp+{when}+{uuid.uuid5(uuid.NAMESPACE_URL, f'{run_id}/{path.name}')}"
    with tempfile.TemporaryDirectory() as folder, Image.open(path) as image:
        whole, small = Path(folder) / f"{name}.png", Path(folder) / f"{name}+compressed.webp"
        shutil.copyfile(path, whole)
        compress_image_size(image).save(small)
        for file in (whole, small):
            client.log_artifact(run_id, str(file), "images")


def set_status(client: "MlflowClient", run_id: str, now: Status, due: Status) -> None:
    """Give a run the status that is due, if it has another."""
    if due[0] == "RUNNING" and now[0] != "RUNNING":
        client.update_run(run_id, status="RUNNING")  # the end time stays until there is a new one
    elif due[0] != "RUNNING" and now != due:
        client.set_terminated(run_id, due[0], due[1])


def origin_tags(opened: Event) -> dict[str, str]:
    """Tags that say of which sweep and code a run is."""
    versions = {name: told for name, told in (opened.get("versions") or {}).items() if told}
    git = opened.get("git")
    return {
        "rigsweep.sweep": opened["sweep"],
        "rigsweep.trainable": opened["trainable"],
        "rigsweep.versions": ", ".join(f"{name} {told}" for name, told in versions.items()),
        "mlflow.user": os.environ.get("LOGNAME") or os.environ.get("USER") or str(os.getuid()),
        "mlflow.source.name": "rigsweep",
        "mlflow.source.type": "LOCAL",
    } | ({"mlflow.source.git.commit": git["commit"], "rigsweep.git.dirty": json.dumps(git["dirty"])} if git else {})
