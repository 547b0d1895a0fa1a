"""Every view of a sweep is rebuilt from its history and its trials' folders, and says the same."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from rigsweep.sweeps import folders, views
from rigsweep.sweeps.history import History
from rigsweep.sweeps.mlflow_store import Store

from .simulator import SWEEP, simulate, sweep_of
from .test_tracking import Made, shown

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty store: to make its tables takes longer than most tests."""
    runs = tmp_path_factory.mktemp("template")
    Store.of(runs).open()
    return runs / "mlflow.db"


def everything(folder: Path) -> dict[str, Any]:
    """The content of all views, but for MLflow's own ids."""
    summary = json.loads((folder / "summary.json").read_text())
    ids = {trial.pop("run_id"): f"run {trial['number']}" for trial in summary["trials"]}
    assert None not in ids, "every trial's run is named"
    study = optuna.load_study(study_name=folder.name, storage=f"sqlite:///{folder / 'study.db'}")
    artifacts = folder.parent / "artifacts" / folder.name
    samples = {
        (ids[file.parts[-4]], file.name): file.read_text()
        for file in artifacts.rglob("samples/*")
        if file.parts[-4] in ids
    }
    return {
        "summary": summary,
        "report": (folder / "report.html").read_text(),
        "study": [(t.number, t.state, t.values, t.params, t.intermediate_values, t.user_attrs) for t in study.trials],
        "runs": shown(folder.parent, folder.name),
        "samples": samples,
    }


def test_views_that_were_deleted_come_back_as_they_were(tmp_path: Path, template: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    shutil.copyfile(template, runs / "mlflow.db")
    sweep = Made(runs, trials=3)
    sweep.event("closed", state="complete", reason="every trial is over")
    first = views.rebuild(sweep.folder)
    assert (first.running, first.behind) == (False, None)
    before = everything(sweep.folder)
    assert len(before["samples"]) == 3
    assert before["samples"]["run 0", "000000400000-text.txt"] == "def main():\n    return '你好'\n"
    cursors = sweep.folder / "mlflow.json"
    # Also with cursors that say that MLflow has it all, with none, and with what are not this store's.
    for spoil in (
        lambda told: told,
        lambda told: None,
        lambda told: '{"store": ',
        lambda told: told.replace("mlflow.db", "other.db"),
    ):
        told = spoil(cursors.read_text())
        cursors.unlink() if told is None else cursors.write_text(told)
        for view in ("study.db", "summary.json", "report.html"):
            (sweep.folder / view).unlink()
        (runs / "mlflow.db").unlink()
        shutil.rmtree(runs / "artifacts")
        assert views.rebuild(sweep.folder) == first
        assert everything(sweep.folder) == before


def test_the_command_rebuilds_and_says_where_everything_is(tmp_path: Path) -> None:
    Made(tmp_path, "probe", trials=2).event("closed", state="complete", reason="every trial is over")
    answer = command("report", "probe", "--json", "--runs", str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    assert told["behind"] is None
    for name in ("report", "summary", "study"):
        assert Path(told["files"][name]).is_file()
    assert Path(told["files"]["mlflow"].removeprefix("sqlite:///")).is_file()
    page = (tmp_path / "probe" / "report.html").read_text()
    (tmp_path / "probe" / "report.html").unlink()
    history = tmp_path / "probe" / "history.jsonl"
    running = History(history)
    try:
        answer = command("report", "probe", "--runs", str(tmp_path))
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.split() == ["report:", str(tmp_path / "probe" / "report.html")], (
            "its process keeps the rest"
        )
        assert "it is running" in answer.stderr
        assert (tmp_path / "probe" / "report.html").read_text() == page
    finally:
        running.close()
    lines = history.read_bytes().splitlines(keepends=True)
    history.write_bytes(b"".join([*lines[:3], b"{no event}\n", *lines[3:]]))
    answer = command("report", "probe", "--runs", str(tmp_path))
    assert (answer.returncode, answer.stdout) == (2, "")
    assert answer.stderr.startswith(f"{history}:4: is damaged")
    assert answer.stderr.count("\n") == 1
    assert (tmp_path / "probe" / "report.html").read_text() == page


def test_a_sweep_whose_process_was_killed_is_interrupted_and_so_are_its_trials(tmp_path: Path) -> None:
    sweep = sweep_of(SWEEP, name="killed")
    folder = tmp_path / "killed"
    folder.mkdir()
    folders.write_settings(sweep, folder)
    simulate(sweep, folder / "history.jsonl", slots=2, most_events=6)
    record = folders.record_of(folder)
    views.settle(record)
    told = views.write_files(sweep, folder, record)
    assert told["state"] == "interrupted"
    assert {trial["state"] for trial in told["trials"]} <= {"interrupted", "complete", "stopped"}
    assert "interrupted" in (folder / "report.html").read_text()


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "rigsweep.sweeps.cli", *words], capture_output=True, text=True, timeout=240
    )
