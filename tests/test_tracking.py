"""The MLflow projection, against the real MLflow: what it shows, and that it is rebuilt whatever is lost."""

import json
import logging
import math
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import tracking
from rigsweep.sweeps.files import WrongInput
from rigsweep.sweeps.tracking import Store, Tracker, TrackerActor, find_run, run_ids

SWEEP = """
question: 哪个学习率 suits "each" width?
trainable: surface
base:
  optimizer: {learning_rate: 1.0e-3}
  budget: {examples: 400k}
  model: {width: 64}
search:
  optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
  schedule.warmup: {low: 0%, high: 10%}
  model.width: {choices: [64, 96, 128]}
trials: 16
early_stopping: {rule: none}
"""
BEGAN = 1_700_000_000.0


class Made:
    """A sweep's folder, written by hand: time goes on by a second an event."""

    def __init__(self, runs: Path, name: str = "made", trials: int = 0, sweep: str = SWEEP):
        self.folder = runs / name
        self.folder.mkdir(parents=True)
        (self.folder / "sweep.yaml").write_text(sweep, encoding="utf-8")
        self.name, self.now = name, BEGAN
        self.open()
        random_ = random.Random(0)
        for number in range(trials):
            rate, warmup = 10 ** random_.uniform(-4, -2), random_.uniform(0, 0.1)
            width = random_.choice([64, 96, 128])
            parameters = {"optimizer.learning_rate": rate, "schedule.warmup": warmup, "model.width": width}
            self.start(number, parameters)
            final = 1.8 + abs(math.log10(rate) + 2.7) + 0.2 * (128 - width) / 64
            stopped = number % 3 == 2
            for k in range(1, 5 if stopped else 11):
                loss = final + 2.5 * math.exp(-0.4 * k)
                for j in range(4):
                    self.row(number, 40_000 * (k - 1) + 8000 * (j + 1), loss=loss + 0.3 - 0.05 * j)
                self.row(number, 40_000 * k, **{"validation/loss": loss, "speed/mfu": 0.31})
                self.event(
                    "report",
                    trial=number,
                    examples=40_000 * k,
                    flops=1e9 * k,
                    seconds=k * 1.0,
                    metrics={"validation/loss": loss},
                    checkpoint=None,
                )
            self.sample(number, 400_000, "def main():\n    return '你好'\n")
            if stopped:
                self.end(number, "stopped", "worse than 2 of 3 at 160,000 examples")
            else:
                self.end(number, "complete", "its budget is spent", value=loss)

    def event(self, kind: str, **fields: Any) -> None:
        self.now += 1
        event = {"event": kind, "time": self.now, **fields}
        with (self.folder / "history.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(event, ensure_ascii=False) + "\n")

    def open(self, **more: Any) -> None:
        self.event(
            "opened",
            **more,
            version=1,
            sweep=self.name,
            trainable="surface",
            question='哪个学习率 suits "each" width?',
            objective={"metric": "validation/loss", "goal": "minimize"},
            versions={"python": "3.11.9", "torch": "2.9.0"},
            git={"commit": "0123abcd" * 5, "dirty": True},
        )

    def start(self, number: int, parameters: dict[str, Any] | None = None) -> None:
        if parameters is not None:
            self.event("proposed", trial=number, group=number, seed=0, parameters=parameters)
        self.event("started", trial=number, node="box", cards=["NVIDIA GeForce RTX 3090"], process=1)

    def end(self, number: int, state: str, reason: str, value: float | None = None) -> None:
        self.event("ended", trial=number, state=state, reason=reason, seconds=1.0, value=value)

    def row(self, number: int, examples: int, **metrics: Any) -> None:
        self.now += 0.125
        path = self.folder / "trials" / str(number) / "metrics.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        row = {"examples": examples, "flops": examples * 1e6, "seconds": examples / 1e4, "time": self.now, **metrics}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def sample(self, number: int, examples: int, words: str) -> None:
        path = self.folder / "trials" / str(number) / "samples" / f"{examples:012d}-text.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words, encoding="utf-8")


PARAMETERS = {"optimizer.learning_rate": 1e-3, "schedule.warmup": 0.02, "model.width": 64}


@pytest.fixture(autouse=True)
def _own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store: to make its tables takes longer than most tests."""
    runs = tmp_path_factory.mktemp("template")
    Store.of(runs).open()
    return runs / "mlflow.db"


@pytest.fixture
def runs(tmp_path: Path, template: Path) -> Path:
    return copied(template, tmp_path)


def copied(template: Path, runs: Path) -> Path:
    runs.mkdir(exist_ok=True)
    shutil.copyfile(template, runs / "mlflow.db")
    return runs


def catch_up(made: Made) -> Tracker:
    """As another process would: nothing in mind."""
    tracker = Tracker(made.folder, Store.of(made.folder.parent))
    tracker.catch_up()
    assert tracker.behind is None
    return tracker


def shown(runs: Path, name: str = "made") -> dict[Any, dict[str, Any]]:
    """All that MLflow has of a sweep, by trial (-1 the parent), without its own ids."""
    client = Store.of(runs).open()
    experiment = client.get_experiment_by_name(name)
    assert experiment is not None
    found: dict[Any, dict[str, Any]] = {}
    names = {run.info.run_id: run.info.run_name for run in client.search_runs([experiment.experiment_id])}
    for run in client.search_runs([experiment.experiment_id]):
        tags = dict(run.data.tags)
        for key, value in tags.items():
            for run_id, run_name in names.items():
                value = value.replace(run_id, run_name or "")
            tags[key] = value
        number = int(tags.get("rigsweep.trial", -1))
        assert number not in found, "a run stands there twice"
        where = "samples" if number >= 0 else None
        found[number] = {
            "name": run.info.run_name,
            "status": run.info.status,
            "times": (run.info.start_time, run.info.end_time),
            "parameters": run.data.params,
            "tags": tags,
            "points": {
                key: [
                    (m.step, None if math.isnan(m.value) else m.value, m.timestamp)
                    for m in client.get_metric_history(run.info.run_id, key)
                ]
                for key in run.data.metrics
            },
            "files": [file.path for file in client.list_artifacts(run.info.run_id, where)],
        }
    return found


def test_what_health_rules_said_is_in_tags_and_in_the_description(runs: Path) -> None:
    made = Made(runs)
    for number in range(3):
        made.start(number, PARAMETERS)
    catch_up(made)
    made.event("warned", trial=0, rule="low-mfu", reason="the MFU is 12%", examples=4096)
    made.event("warned", trial=1, rule="gradient-norm", reason="7 times its usual", examples=4096)
    catch_up(made)
    made.event(
        "ended",
        trial=1,
        state="diverged",
        reason="the loss followed",
        seconds=1.0,
        value=None,
        rule="loss-above-chance",
    )
    made.event("warned", trial=0, rule="no-progress", reason="the loss is flat", examples=8192)
    catch_up(made)
    tags = {number: run["tags"] for number, run in shown(runs).items()}
    assert [tags[number]["rigsweep.health"] for number in range(3)] == [
        "low-mfu, no-progress",
        "loss-above-chance, gradient-norm",
        "",
    ]
    assert tags[0]["rigsweep.warnings"] == "low-mfu: the MFU is 12%\nno-progress: the loss is flat"
    assert "⚠ **gradient-norm**: 7 times its usual" in tags[1]["mlflow.note.content"]
    assert "⚠" not in tags[2]["mlflow.note.content"]


def test_energy_and_cost_are_metrics_of_the_run(runs: Path) -> None:
    made = Made(runs)
    made.open(rates={"kwh": 0.25})
    used = {"energy_joules": 7.2e6, "phases": {"computing": 1.0}}
    for number, more in enumerate((used, {})):
        made.start(number, PARAMETERS)
        told = {"state": "failed", "reason": "ValueError: no", "seconds": 1.0, "value": None}
        made.event("ended", trial=number, **told, **more)
    catch_up(made)
    points = {number: run["points"] for number, run in shown(runs).items()}
    assert [point[1] for point in points[0]["energy_kwh"]] == [2.0]
    assert [point[1] for point in points[0]["cost"]] == [0.5]
    assert not {"energy_kwh", "cost"} & set(points[1])


def test_nothing_doubles_and_everything_is_rebuilt(runs: Path, template: Path) -> None:
    made = Made(runs, trials=3)
    made.event("closed", state="complete", reason="every trial is over")
    catch_up(made).catch_up()
    first = shown(runs)
    assert {number: run["status"] for number, run in first.items()} == {
        -1: "FINISHED",
        0: "FINISHED",
        1: "FINISHED",
        2: "KILLED",
    }
    trial = first[0]
    assert trial["points"]["objective"][0][:2] == (400_000, trial["points"]["validation/loss"][-1][1])
    assert len(trial["points"]["validation/loss"]) == 10 and len(trial["points"]["loss"]) == 40
    assert trial["points"]["flops"][-1][1] == 400_000 * 1e6
    assert "objective" not in first[2]["points"]
    assert trial["files"] == ["samples/000000400000-text.txt"] and first[-1]["files"] == ["sweep.yaml"]
    assert "你好" in trial["tags"]["mlflow.note.content"]
    assert trial["tags"]["mlflow.parentRunId"] == "made"
    assert trial["tags"]["rigsweep.card"] == "NVIDIA GeForce RTX 3090"
    assert trial["parameters"]["optimizer.betas"] == "[0.9, 0.95]" and trial["parameters"]["seed"] == "0"
    assert "哪个学习率" in first[-1]["tags"]["mlflow.note.content"]
    catch_up(made)
    (made.folder / "mlflow.json").unlink()
    catch_up(made)
    assert shown(runs) == first
    (runs / "mlflow.db").unlink()
    catch_up(made)
    assert shown(runs) == first
    copied(template, new := runs.with_name("new"))
    (new / "mlflow.db").replace(runs / "mlflow.db")
    (made.folder / "mlflow.json").write_text('{"store": "sqlite')  # as good as gone
    tracker = catch_up(made)
    assert shown(runs) == first
    copied(template, new)  # under the eyes of a process that has the old one open
    (new / "mlflow.db").replace(runs / "mlflow.db")
    tracker.catch_up()
    assert shown(runs) == first


def test_bit_by_bit_is_the_same_as_in_one_go(tmp_path: Path, template: Path) -> None:
    many, one = (Made(copied(template, tmp_path / name)) for name in ("bit by bit", "in one go"))
    tracker = Tracker(many.folder, Store.of(many.folder.parent))
    for _ in one_life(many):
        tracker.catch_up()
        assert tracker.behind is None
    for _ in one_life(one):
        pass
    catch_up(one)
    bits, whole = shown(many.folder.parent), shown(one.folder.parent)
    assert bits == whole
    points = bits[0]["points"]
    assert [step for step, _, _ in points["validation/loss"]] == [2000, 4000]
    assert [step for step, _, _ in points["loss"]] == [1000, 3000] and points["loss"][1][1] is None
    assert "speed/mfu" in points and "nothing" not in points and "told" not in points
    assert "```second" in bits[0]["tags"]["mlflow.note.content"]


def one_life(made: Made) -> Iterator[None]:
    """A trial with all that happens to one, piece by piece."""
    yield made.start(0, PARAMETERS)
    yield made.row(0, 1000, loss=3.0, nothing=None, told="so")
    yield made.row(0, 2000, **{"validation/loss": 2.5})
    yield made.sample(0, 2000, "first")
    yield made.row(0, 3000, loss=float("nan"))
    yield write(made, '{"examples": 4000, "loss": 1')  # a process was killed while it wrote
    yield made.event("interrupted", trial=0, reason="asked to leave", seconds=1.0)
    yield made.open()
    yield made.start(0)
    yield write(made, "\n\n")
    yield made.row(0, 2000, **{"validation/loss": 2.5})  # over again, from its last checkpoint
    yield made.row(0, 3000, loss=2.4)
    yield made.sample(0, 2000, "first")
    yield made.row(0, 4000, **{"validation/loss": 2.0})
    yield made.sample(0, 4000, "```second")
    yield made.end(0, "complete", "its budget is spent", value=2.0)
    yield made.row(0, 4001, **{"speed/mfu": 0.3})  # late


def write(made: Made, words: str) -> None:
    with (made.folder / "trials" / "0" / "metrics.jsonl").open("a") as file:
        file.write(words)


ENDS = {
    "complete": "FINISHED",
    "stopped": "KILLED",
    "diverged": "KILLED",
    "out_of_memory": "FAILED",
    "failed": "FAILED",
}


def test_statuses(runs: Path) -> None:
    made = Made(runs)
    states = [*ENDS, "interrupted", "running", "lost"]
    for number, state in enumerate(states):
        made.start(number, PARAMETERS)
        if state in ENDS:
            made.end(number, state, f"it is {state}", value=1.0 if state == "complete" else None)
        elif state != "running":
            made.event(state, trial=number, reason="the lane was lost", seconds=1.0)
    made.event("proposed", trial=8, group=8, seed=0, parameters=PARAMETERS)
    tracker = catch_up(made)
    first = shown(runs)
    due = [*ENDS.values(), "KILLED", "RUNNING", "KILLED"]
    assert [first[number]["status"] for number in range(8)] == due
    assert 8 not in first, "what never ran is no run"
    assert first[-1]["status"] == "RUNNING" and first[6]["times"][1] is None
    assert first[3]["tags"]["rigsweep.reason"] == "it is out_of_memory"
    made.event("closed", state="interrupted", reason="Ctrl-C")
    tracker.catch_up()
    assert shown(runs)[-1]["status"] == "KILLED"
    # The process was killed and another one goes on: what still says RUNNING is an orphan.
    made.open()
    made.event("interrupted", trial=6, reason="the sweep's process ended", seconds=0.0)
    made.start(5)
    tracker = catch_up(made)
    resumed = shown(runs)
    assert [resumed[number]["status"] for number in (5, 6, -1)] == ["RUNNING", "KILLED", "RUNNING"]
    made.end(5, "complete", "its budget is spent", value=2.0)
    ended = round(made.now * 1000)
    tracker.catch_up()
    assert (shown(runs)[5]["status"], shown(runs)[5]["times"][1]) == ("FINISHED", ended)


def test_an_orphan_is_closed_even_if_its_end_was_thought_written(runs: Path) -> None:
    made = Made(runs, trials=1)
    catch_up(made)
    Store.of(runs).open().update_run(run_ids(made.folder)[0], "RUNNING")
    catch_up(made)
    assert shown(runs)[0]["status"] == "FINISHED"


def test_a_failure_in_the_middle(tmp_path: Path, template: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole, made = (Made(copied(template, tmp_path / name), trials=3) for name in ("whole", "broken"))
    catch_up(whole)
    database = sqlite3.connect(tmp_path / "broken" / "mlflow.db")
    # SQLite itself refuses, in the second trial, after its run has been made.
    database.execute(
        "CREATE TRIGGER full BEFORE INSERT ON params WHEN (SELECT count(*) FROM runs) > 2 "
        "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
    )
    database.commit()
    tracker = Tracker(made.folder, Store.of(tmp_path / "broken"))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            tracker.catch_up()
    assert tracker.behind and "the disk is full" in tracker.behind
    assert sum("MLflow is behind" in record.message for record in caplog.records) == 1
    assert len(shown(tmp_path / "broken")) == 3
    database.execute("DROP TRIGGER full")
    database.commit()
    tracker.catch_up()
    assert tracker.behind is None
    assert shown(tmp_path / "broken") == shown(tmp_path / "whole")


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_server_that_is_not_there(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made(runs, trials=1)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{closed_port()}")
    store = Store.of(runs)
    assert store.artifacts is None
    tracker = Tracker(made.folder, store)
    tracker.catch_up()
    assert tracker.behind is not None and not (made.folder / "mlflow.json").exists()
    actor = TrackerActor(made.folder, store, every=0.1)
    assert actor.ping()
    with pytest.raises(TimeoutError, match="MLflow is behind"):
        actor.finish(1.0)
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    catch_up(made)
    assert shown(runs)[0]["status"] == "FINISHED"


def test_a_store_that_is_locked_for_a_while(runs: Path) -> None:
    made = Made(runs, trials=1)
    database = sqlite3.connect(runs / "mlflow.db", check_same_thread=False, isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    timer = threading.Timer(2.0, lambda: database.execute("COMMIT"))
    timer.start()
    began = time.monotonic()
    catch_up(made)
    assert time.monotonic() - began > 1.5
    assert shown(runs)[0]["status"] == "FINISHED"


def test_values_of_every_kind(runs: Path) -> None:
    values = ["运行/一 \"引号\" 'x' | `y`", "x" * 7000, None]
    sweep = SWEEP.replace(
        "  schedule.warmup: {low: 0%, high: 10%}", f"  initial: {{choices: {json.dumps(values, ensure_ascii=False)}}}"
    )
    made = Made(runs, sweep=sweep)
    for number, value in enumerate(values):
        made.start(number, {"optimizer.learning_rate": 1e-3, "initial": value, "model.width": 64})
    catch_up(made)
    found = shown(runs)
    assert found[0]["parameters"]["initial"] == values[0]
    assert found[1]["parameters"]["initial"] == "x" * 6000
    assert found[2]["parameters"]["initial"] == "null"
    assert len(found[1]["name"]) <= 200
    catch_up(made)
    assert shown(runs) == found


def test_a_trial_whose_folder_is_elsewhere_is_shown_from_the_history(runs: Path) -> None:
    made = Made(runs)
    made.start(0, PARAMETERS)
    made.event("report", trial=0, examples=1000, flops=1e9, seconds=2.0, metrics={"validation/loss": 2.5})
    tracker = catch_up(made)
    made.event("report", trial=0, examples=2000, flops=2e9, seconds=4.0, metrics={"validation/loss": 2.0})
    tracker.catch_up()
    catch_up(made)
    points = shown(runs)[0]["points"]
    assert [(step, value) for step, value, _ in points["validation/loss"]] == [(1000, 2.5), (2000, 2.0)]
    assert [value for _, value, _ in points["flops"]] == [1e9, 2e9]


def test_a_trial_that_a_person_deleted_stays_deleted(runs: Path) -> None:
    made = Made(runs, trials=2)
    catch_up(made)
    client = Store.of(runs).open()
    client.delete_run(run_ids(made.folder)[0])
    client.delete_run(json.loads((made.folder / "mlflow.json").read_text())["parent"])
    made.open()
    (made.folder / "mlflow.json").unlink()
    catch_up(made)
    assert sorted(shown(runs)) == [-1, 1]


ABLATION = """
trainable: surface
base:
  optimizer: {learning_rate: 1.0e-3, fused: true}
  budget: {examples: 400k}
search:
  optimizer.fused: {choices: [true, false]}
searcher: ablation
repeats: 2
"""


def test_an_ablation_is_a_table_and_tags_that_follow_the_seeds(runs: Path, template: Path) -> None:
    made = Made(runs, sweep=ABLATION)
    tracker = catch_up(made)

    def end(number: int, value: float | None) -> None:
        group, repeat = divmod(number, 2)
        parameters = {"optimizer.fused": not group}
        made.event("proposed", trial=number, group=group, seed=repeat, parameters=parameters)
        made.start(number)
        made.end(number, "complete" if value is not None else "running", "its budget is spent", value=value)
        tracker.catch_up()

    def tags() -> list[list[str]]:
        names = ("change", "difference", "verdict")
        return [[run["tags"][f"rigsweep.{name}"] for name in names] for n, run in sorted(shown(runs).items()) if n >= 0]

    what = "optimizer.fused: true → false"
    end(0, 3.0)
    assert tags() == [["base", "", ""]]
    end(1, 3.2)
    end(2, 3.5)
    assert tags()[2:] == [[what, "+0.5", "1 of 2 seeds"]]
    end(3, 3.701)
    # The verdict of a trial that is over changes with those after it.
    assert tags() == [["base", "", ""]] * 2 + [[what, "+0.5005 ± 0.0064", "worse"]] * 2
    made.event("closed", state="complete", reason="every trial is over")
    tracker.catch_up()
    first = shown(runs)

    def table() -> list[dict[str, Any]]:
        client, state = Store.of(runs).open(), json.loads((made.folder / "mlflow.json").read_text())
        found = json.loads(Path(client.download_artifacts(state["parent"], "ablation.json")).read_text("utf-8"))
        return [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]

    told = table()
    assert [list(row.values())[:4] for row in told] == [["fused", "true → false", "worse", 0.5005]]
    assert told[0]["seeds"] == 2 and told[0]["low"] == pytest.approx(0.4941, abs=1e-4)
    assert first[-1]["tags"]["mlflow.loggedArtifacts"] == '[{"path": "ablation.json", "type": "table"}]'
    assert sorted(first[-1]["files"]) == ["ablation.json", "sweep.yaml"]
    tracker.catch_up()
    catch_up(made)
    (made.folder / "mlflow.json").unlink()
    catch_up(made)
    assert shown(runs) == first and table() == told
    copied(template, new := runs.with_name("new"))
    (new / "mlflow.db").replace(runs / "mlflow.db")  # the store is gone, under the eyes of a tracker
    tracker.catch_up()
    assert shown(runs) == first and table() == told


def test_trials_that_are_over_are_not_looked_at_for_ever(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "_LINGER", 0.0)
    made = Made(runs, trials=2)
    made.start(2, PARAMETERS)
    tracker = catch_up(made)
    tracker.catch_up()
    assert list(tracker._folders) == [2]
    assert list(json.loads((made.folder / "mlflow.json").read_text())["metrics"]) == ["2"]


def test_the_actor_catches_up_to_the_end(runs: Path) -> None:
    made = Made(runs, trials=1)
    actor = TrackerActor(made.folder, Store.of(runs), every=0.05)
    made.event("closed", state="complete", reason="every trial is over")
    actor.finish(60.0)
    assert not actor.ping()
    assert shown(runs)[-1]["status"] == "FINISHED"
    run_id = run_ids(made.folder)[0]
    assert find_run(runs, run_id) == ("made", 0)
    (made.folder / "mlflow.json").unlink()
    assert find_run(runs, run_id) == ("made", 0)
    with pytest.raises(WrongInput, match="no such MLflow run"):
        find_run(runs, "0" * 32)


def test_two_sweeps_at_once_on_a_new_store(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from rigsweep.sweeps.tracking import *\n"
        "folder = Path(sys.argv[1]); tracker = Tracker(folder, Store.of(folder.parent))\n"
        "tracker.catch_up(); sys.exit(tracker.behind)"
    )
    names = ("one", "two")
    for name in names:
        Made(tmp_path, name, trials=3)
    processes = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path / name)], stderr=subprocess.PIPE, env=os.environ)
        for name in names
    ]
    for process in processes:
        assert process.communicate(timeout=120)[1] == b"", "MLflow's chatter, or an error"
        assert process.returncode == 0
    for name in names:
        assert sorted(shown(tmp_path, name)) == [-1, 0, 1, 2]
