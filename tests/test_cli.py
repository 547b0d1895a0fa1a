"""The command line as a person and as a program use it: real processes, real signals."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from rigsweep.sweeps import folders
from rigsweep.sweeps.sweep import READY

COMMAND = [sys.executable, "-P", "-m", "rigsweep.sweeps.cli"]
SWEEP = """
question: What survives?
trainable: surface
base:
  optimizer: {learning_rate: 1e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
  model: {noise: 0.02, seconds_per_step: 0.02}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
  schedule.warmup: {low: 0%, high: 10%}
trials: 6
"""


def rigsweep(*words: str, cwd: Path, timeout: float = 240, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], cwd=cwd, capture_output=True, text=True, timeout=timeout, env=os.environ | environment
    )


def begin(*words: str, cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *words], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    pytest.fail(f"it ended without saying {text!r}: {process.stderr.read() if process.stderr else ''}")


def wait_until_gone(processes: list[psutil.Process], seconds: float = 40) -> None:
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    assert not alive, f"left behind: {alive}"


def decided(folder: Path) -> list[tuple[Any, ...]]:
    """What a sweep decided, without times."""
    record = folders.record_of(folder)
    return [
        (t.number, t.seed, t.parameters, t.state, t.reason, t.value, sorted(t.reports)) for t in record.trials.values()
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, ...]]:
    """The sweep as it goes when nothing happens, one trial at a time."""
    place = tmp_path_factory.mktemp("undisturbed")
    (place / "probe.yaml").write_text(SWEEP.replace(", seconds_per_step: 0.02", ""))
    answer = rigsweep("sweep", "probe.yaml", "--cards", "1", "--json", cwd=place)
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout)["state"] == "complete", "nothing but JSON goes to standard output"
    return decided(place / "runs" / "probe")


def same_decisions(one: list[tuple[Any, ...]], other: list[tuple[Any, ...]]) -> None:
    assert one == other


@pytest.mark.timeout(500)
def test_ctrl_c_saves_says_how_to_go_on_and_the_rest_decides_as_if_undisturbed(
    tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    (tmp_path / "probe.yaml").write_text(SWEEP)
    process = begin("sweep", "probe.yaml", "--cards", "1", cwd=tmp_path)
    wait_for(process, "trial 1: 20%")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=120)
    assert process.returncode == 130, error
    assert "go on with: rigsweep sweep probe.yaml --resume" in error
    assert "Traceback" not in error
    wait_until_gone(children)
    states = [trial[3] for trial in decided(tmp_path / "runs" / "probe")]
    assert states == ["complete", "interrupted"]

    answer = rigsweep("sweep", "probe.yaml", "--cards", "1", "--resume", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    same_decisions(decided(tmp_path / "runs" / "probe"), undisturbed)
    told = json.loads((tmp_path / "runs" / "probe" / "summary.json").read_text())
    assert all(trial["run_id"] for trial in told["trials"]), "MLflow has every trial when the sweep ends"


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_killed_driver_leaves_nothing_running_and_its_sweep_is_resumed(
    tmp_path: Path, undisturbed: list[tuple[Any, ...]]
) -> None:
    (tmp_path / "probe.yaml").write_text(SWEEP)
    process = begin("sweep", "probe.yaml", "--cards", "1", cwd=tmp_path)
    wait_for(process, "trial 1: 30%")
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()

    # At once, while the last process's own may still be dying.
    answer = rigsweep("sweep", "probe.yaml", "--cards", "1", "--resume", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    same_decisions(decided(tmp_path / "runs" / "probe"), undisturbed)
    wait_until_gone(children, seconds=90)  # Ray's agents, which hold no card, notice after a minute


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_two_sweeps_on_one_machine_take_turns_on_its_cards(tmp_path: Path) -> None:
    text = SWEEP.replace("trials: 6", "trials: 2").replace("seconds_per_step: 0.02", "seconds_per_step: 0.1")
    (tmp_path / "one.yaml").write_text(text)
    (tmp_path / "two.yaml").write_text(text)
    first = begin("sweep", "one.yaml", "--cards", "1", cwd=tmp_path)
    wait_for(first, "trial 0: started")
    refused = rigsweep("sweep", "one.yaml", "--cards", "1", "--resume", cwd=tmp_path)
    assert refused.returncode == 2
    assert "this sweep is running in another process; wait for it, or stop it" in refused.stderr
    assert len(refused.stderr.strip().splitlines()) == 1
    second = begin("sweep", "two.yaml", "--cards", "1", cwd=tmp_path)
    said, error = second.communicate(timeout=240)
    first.communicate(timeout=60)
    assert (first.returncode, second.returncode) == (0, 0), error
    assert "waiting for" in said
    ended = max(trial.ended or 0 for trial in folders.record_of(tmp_path / "runs" / "one").trials.values())
    began = min(trial.started or 0 for trial in folders.record_of(tmp_path / "runs" / "two").trials.values())
    assert ended <= began
    with sqlite3.connect(tmp_path / "runs" / "mlflow.db") as database:
        named = "select e.name, count(*) from runs r join experiments e using (experiment_id) group by e.name"
        assert dict(database.execute(named)) == {"one": 3, "two": 3}, "one store has both"


def test_plan_prints_every_derived_number(tmp_path: Path) -> None:
    (tmp_path / "probe.yaml").write_text(SWEEP)
    answer = rigsweep("plan", "probe.yaml", cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    for words in ("cards", "measured", "100 steps", "1k to 9k examples, 9 times", "wall time"):
        assert words in answer.stdout
    told = json.loads(rigsweep("plan", "probe.yaml", "--json", cwd=tmp_path).stdout)
    assert told["base"]["steps"] == 100
    assert told["trials"] == 6
    assert not (tmp_path / "runs").exists(), "planning leaves nothing"
    dry = rigsweep("sweep", "probe.yaml", "--dry-run", "--json", cwd=tmp_path)
    assert json.loads(dry.stdout)["base"] == told["base"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["sweep", "nothing.yaml"], "no such file or ready sweep"),
        (["sweep", "quickstrat"], "did you mean quickstart?"),
        (["plan", "probe.yaml", "--set", "base.sed=1"], "did you mean seed?"),
        (["plan", "probe.yaml", "--set", "trials"], "dotted.key=value"),
        (["results"], "no sweeps yet"),
        (["results", "probe"], "no such sweep"),
        (["sample", "probe/3"], "no such trial"),
        (["sample", "what"], "SWEEP/NUMBER"),
        (["ui", "probe"], "no such sweep"),
        (["sweep", "probe.yaml", "--cards", "0"], "--cards"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, words: list[str], said: str) -> None:
    (tmp_path / "probe.yaml").write_text(SWEEP)
    answer = rigsweep(*words, cwd=tmp_path)
    assert answer.returncode == 2
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.strip().splitlines()) == 1


def test_the_schema_and_the_ready_sweeps_are_there(tmp_path: Path) -> None:
    schema = json.loads(rigsweep("schema", cwd=tmp_path).stdout)
    assert "trainable" in schema["properties"]
    assert (READY / "quickstart.yaml").is_file()


def test_a_sweep_waits_for_nothing_it_can_know_to_be_wrong(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text(SWEEP.replace("trainable: surface", "trainable: surfcae"))
    start = time.monotonic()
    answer = rigsweep("sweep", "wrong.yaml", cwd=tmp_path)
    assert answer.returncode == 2
    assert "did you mean surface?" in answer.stderr
    assert not (tmp_path / "runs").exists()
    assert time.monotonic() - start < 60, "nothing heavy was started"
