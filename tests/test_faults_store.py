"""Stores that are locked, away, or of a newer version; clocks that are set back; values that are hard to keep."""

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import optuna
import pytest

from rigsweep.sweeps import folders
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.folders import sqlite_uri
from rigsweep.sweeps.history import VERSION, History, fold
from rigsweep.sweeps.study_file import update_study
from rigsweep.sweeps.tracking import Store, Tracker, TrackerActor

from .simulator import no_fault, outcome, run_trials, sweep_of
from .test_cli import SWEEP, rigsweep
from .test_running import SURFACE, Quiet, run_text
from .test_tracking import Made, catch_up, copied, runs, shown, template  # noqa: F401 - fixtures

# --- locked, or away ---

HOLDS = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("BEGIN EXCLUSIVE")
print("held", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_store_that_another_process_locks_for_longer_than_mlflow_waits(tmp_path: Path, template: Path) -> None:  # noqa: F811
    whole, made = (Made(copied(template, tmp_path / name), trials=2) for name in ("whole", "locked"))
    catch_up(whole)
    tracker = Tracker(made.folder, Store.of(tmp_path / "locked"))
    words = [sys.executable, "-c", HOLDS, str(tmp_path / "locked" / "mlflow.db")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        tracker.catch_up()
        assert tracker.behind is not None
        assert "locked" in tracker.behind
        assert not tracker.hopeless
        holder.communicate()
    tracker.catch_up()
    assert tracker.behind is None
    assert shown(tmp_path / "locked") == shown(tmp_path / "whole")


class Server:
    """MLflow's own server, in a group of its own."""

    def __init__(self, place: Path):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
        self._command += ["--backend-store-uri", f"sqlite:///{place / 'server.db'}", "--workers", "1"]
        self._command += ["--artifacts-destination", str(place / "server-artifacts")]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self._process = subprocess.Popen(
            self._command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )

    def wait(self) -> None:
        for _ in range(900):
            try:
                with urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                    return
            except OSError:
                time.sleep(0.2)
        pytest.fail("MLflow's server does not answer")

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class Outage(Quiet):
    """Kills the server at the first evaluation of trial 1, and starts it again when trial 3 has ended."""

    def __init__(self, server: Server):
        super().__init__()
        self._server = server

    def event(self, kind: str, trial: Any) -> None:
        first_report = kind == "report" and len(trial.reports) == 1
        if (trial.number, first_report) == (1, True):
            self._server.kill()
        elif (trial.number, kind) == (3, "ended"):
            self._server.start()
        super().event(kind, trial)


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
@pytest.mark.timeout(600)
def test_a_server_that_goes_away_in_the_middle_of_a_sweep_and_comes_back(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path)
    server.start()
    try:
        server.wait()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", server.uri)
        show = Outage(server)
        ran = run_text(SURFACE.replace("trials: 12", "trials: 5"), tmp_path, cache, cards=1, show=show)
        assert ran.state == "complete", "no trial waited: three of them ran while there was no server"
        assert show.notes == ["writing the last results to MLflow"]
        found = shown(tmp_path / "runs", "probe")
    finally:
        server.kill()
    record = folders.record_of(tmp_path / "runs" / "probe")
    assert sorted(found) == [-1, *range(5)]
    for number, trial in record.trials.items():
        losses = [(examples, report.metrics["validation/loss"]) for examples, report in sorted(trial.reports.items())]
        assert [point[:2] for point in found[number]["points"]["validation/loss"]] == losses
        assert found[number]["status"] == {"complete": "FINISHED", "stopped": "KILLED"}[trial.state]


# --- written by a newer version ---


def test_a_history_by_a_newer_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "probe.yaml").write_text(SWEEP)
    folder = tmp_path / "runs" / "probe"
    folder.mkdir(parents=True)
    shutil.copyfile(tmp_path / "probe.yaml", folder / "sweep.yaml")
    written = json.dumps({"event": "opened", "version": VERSION + 1, "time": 0, "sweep": "probe"}) + "\n"
    (folder / "history.jsonl").write_text(written)
    for words in (["sweep", "probe.yaml", "--resume"], ["results"]):
        answer = rigsweep(*words, cwd=tmp_path)
        assert answer.returncode == 2
        assert answer.stderr.endswith("history.jsonl: was written by a newer version of rigsweep; update this one\n")
        assert len(answer.stderr.splitlines()) == 1
    assert (folder / "history.jsonl").read_text() == written


def test_an_mlflow_store_of_another_version_is_one_line_and_never_waited_for(runs: Path) -> None:  # noqa: F811
    made = Made(runs, trials=1)
    catch_up(made)
    before = shown(runs)
    with sqlite3.connect(runs / "mlflow.db") as database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    database.close()
    # Where an engine to the file has been opened already, MLflow does not look at its version again.
    (runs / "mlflow.db").rename(runs / "newer.db")
    shutil.copyfile(runs / "newer.db", runs / "mlflow.db")
    actor = TrackerActor(made.folder, Store.of(runs), every=0.05)
    with pytest.raises(TimeoutError, match=r"mlflow\.db: was made by another version of MLflow; use that one, or move"):
        actor.finish(120)
    with pytest.raises(WrongInput, match="another version of MLflow"):
        Store.of(runs).open()
    (runs / "mlflow.db").unlink()
    catch_up(made)
    assert shown(runs) == before


def test_views_by_a_newer_version_are_made_anew(runs: Path) -> None:  # noqa: F811
    made = Made(runs, trials=2)
    catch_up(made)
    before = shown(runs)
    state = made.folder / "mlflow.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"invented": "later"}))
    catch_up(made)
    assert shown(runs) == before

    study = made.folder / "study.db"
    sweep = folders.read_sweep(made.folder)
    update_study(sweep, made.folder)
    with sqlite3.connect(study) as database:
        database.execute("UPDATE version_info SET schema_version = 99, library_version = '99.0.0'")
        database.execute("UPDATE alembic_version SET version_num = 'v99.0.0.a'")
    database.close()
    update_study(sweep, made.folder)
    assert len(optuna.load_study(study_name="made", storage=f"sqlite:///{study}").trials) == 2


# --- the clock ---


def test_a_clock_that_is_set_back_an_hour_in_the_middle(tmp_path: Path, template: Path) -> None:  # noqa: F811
    sweep, place = sweep_of(), copied(template, tmp_path)
    folder = place / sweep.name
    folder.mkdir()
    folders.write_settings(sweep, folder)
    expected = outcome(run_trials(sweep, History(tmp_path / "whole.jsonl"), 1, no_fault, None))
    ticks = iter(range(10**6))

    def clock() -> float:
        tick = next(ticks)
        return 1_700_000_000.0 + tick - (3600 if tick > 30 else 0)

    history = History(folder / "history.jsonl", clock=clock)
    assert outcome(run_trials(sweep, history, 1, no_fault, None)) == expected
    record = fold(folder / "history.jsonl")
    for trial in record.trials.values():
        assert trial.started is not None
        assert trial.ended is not None
        assert trial.proposed <= trial.started <= trial.ended
    tracker = Tracker(folder, Store.of(place))
    tracker.catch_up()
    assert tracker.behind is None
    found = shown(place, sweep.name)
    assert sorted(found) == [-1, *expected]
    for run in found.values():
        start, end = run["times"]
        assert start <= end
    (place / "mlflow.db").unlink()
    tracker.catch_up()
    assert shown(place, sweep.name) == found


def test_rows_of_a_trial_written_after_the_clock_was_set_back_are_all_shown(runs: Path) -> None:  # noqa: F811
    made = Made(runs)
    made.start(0, {"optimizer.learning_rate": 1e-3, "schedule.warmup": 0.02, "model.width": 64})
    tracker = Tracker(made.folder, Store.of(runs))
    for examples in (1000, 2000, 3000):
        made.row(0, examples, loss=1000 / examples)
        tracker.catch_up()
        made.now -= 3600
    catch_up(made)
    points = sorted(point[:2] for point in shown(runs)[0]["points"]["loss"])
    assert points == [(1000, 1.0), (2000, 0.5), (3000, 1000 / 3000)]


# --- values ---

LABELS = [
    "",
    "a/b/../../c",
    "\"double\", 'single' and `back`",
    "two\nlines\r\n\tand a tab\u2028",
    "🦜 鹦鹉",
    " spaces ",
    "null",
    "400k",
    "%41?=&#;:{}[]",
]
ODD = f"""
trainable: surface
base:
  batch: {{examples: 100}}
  budget: {{examples: 1k}}
search:
  model.label: {{choices: {json.dumps(LABELS)}}}
searcher: random
trials: 24
early_stopping: {{rule: none}}
"""


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
@pytest.mark.timeout(400)
def test_values_and_names_that_are_hard_to_keep_are_kept_exactly(tmp_path: Path, cache: Path) -> None:
    tmp_path = tmp_path / "100%41 a?b"  # the place too
    tmp_path.mkdir()
    name = '鹦鹉\'s "1 %41" #1'
    ran = run_text(ODD, tmp_path, cache, name)
    folder = tmp_path / "runs" / name
    assert ran.state == "complete"
    given = {n: trial.parameters["model.label"] for n, trial in folders.record_of(folder).trials.items()}
    assert set(given.values()) == set(LABELS), "the seed draws every one"
    told = json.loads((folder / "summary.json").read_text())
    assert {trial["number"]: trial["parameters"]["model.label"] for trial in told["trials"]} == given
    assert sorted(int(path.name) for path in (folder / "trials").iterdir()) == sorted(given)
    assert sorted(path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()) == sorted([name, "artifacts"])
    study = optuna.load_study(study_name=name, storage=sqlite_uri(folder / "study.db"))
    assert dict(enumerate(trial.params["model.label"] for trial in study.trials)) == given
    found = shown(tmp_path / "runs", name)
    assert {n: run["parameters"]["model.label"] for n, run in found.items() if n >= 0} == given
    assert len(run_ids := {trial["run_id"] for trial in told["trials"]}) == 24
    assert None not in run_ids
