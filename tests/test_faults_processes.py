"""Processes that die or hang under a sweep: a lane, its host, a client, the tracker, the pool, Ray's own."""

import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from rigsweep.sweeps.history import read

from .test_cli import COMMAND, SWEEP, begin, decided, rigsweep, undisturbed, wait_for, wait_until_gone  # noqa: F401
from .test_running import Quiet, run_text, runs_in_mlflow

LIVES = """
trainable: surface
base:
  seed: 6
  optimizer: {learning_rate: 3e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
  model: {seconds_per_step: 0.01}
search:
  model.fault: {choices: [null, hang, die_always]}
searcher: random
trials: 5
early_stopping: {rule: none}
hang: 4s
"""


def children(*titles: str) -> list[psutil.Process]:
    """Ray's workers below this process by the beginning of their titles."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if process.name().startswith(titles)]


class Killing(Quiet):
    """At the second evaluation of a trial, kills what is to die in it."""

    def __init__(self, victims: dict[int, str]):
        super().__init__()
        self._victims = victims
        self.killed: list[str] = []

    def event(self, kind: str, trial: Any) -> None:
        super().event(kind, trial)
        if kind == "report" and len(trial.reports) == 2 and trial.number in self._victims:
            title = self._victims.pop(trial.number)
            for process in children(title):
                process.kill()
            self.killed.append(title)


@pytest.mark.slow
@pytest.mark.usefixtures("one_ray")
@pytest.mark.timeout(500)
def test_whatever_dies_or_hangs_a_trial_goes_on_once_and_the_sweep_to_its_end(tmp_path: Path, cache: Path) -> None:
    show = Killing({0: "ray::TrackerActor", 1: "ray::TrialClient", 2: "ray::LaneHost"})
    outcome = run_text(LIVES, tmp_path, cache, cards=1, show=show)
    assert outcome.state == "complete", outcome.reason
    assert show.killed == ["ray::TrackerActor", "ray::TrialClient", "ray::LaneHost"]
    lost = {"hang": "no progress", "die_always": "its worker process died"}
    faults = {trial["number"]: trial["parameters"]["model.fault"] for trial in outcome.summary["trials"]}
    assert set(faults.values()) == {None, *lost}, "the seed draws every fault"
    for trial in outcome.summary["trials"]:
        if reason := lost.get(faults[trial["number"]]):
            assert trial["state"] == "failed"
            assert reason in trial["reason"] and trial["reason"].endswith(", for the second time")
        else:
            assert (trial["state"], trial["reason"]) == ("complete", "reached its budget")
    events = list(read(tmp_path / "runs" / "probe" / "history.jsonl"))
    assert sorted(event["trial"] for event in events if event["event"] == "ended") == list(range(5))
    found = runs_in_mlflow(tmp_path / "runs")
    assert len(found) == 6, "the tracker that was killed has a successor, which doubles nothing"
    assert {status for _, status, _ in found} == {"FINISHED", "FAILED"}


def victim(process: subprocess.Popen[str], name: str) -> psutil.Process:
    """A part of the Ray of a sweep's process, or an actor by its title."""
    for child in psutil.Process(process.pid).children(recursive=True):
        words = child.cmdline()
        if child.name().startswith(name) or name in (Path(word).stem for word in words[:3]):
            return child
    raise AssertionError(f"no {name} below the sweep's process")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_may_lose_any_part_of_its_own_and_the_sweep_ends_in_one_line_and_goes_on(
    tmp_path: Path,
    undisturbed: list[tuple[Any, ...]],  # noqa: F811 - a fixture
) -> None:
    (tmp_path / "probe.yaml").write_text(SWEEP)
    words = ("sweep", "probe.yaml", "--cards", "1", "--resume")
    dying = {
        "gcs_server": "Ray's gcs_server process died",
        "raylet": "Ray's raylet process died",
        "dashboard": "Ray's dashboard process died",
        "ray::LanePool": "the lane pool died",
    }
    for name, reason in dying.items():
        process = begin(*words, cwd=tmp_path)
        wait_for(process, "%, validation/loss")
        every = psutil.Process(process.pid).children(recursive=True)
        victim(process, name).kill()
        _, error = process.communicate(timeout=120)
        assert process.returncode == 130, (name, error)
        assert error == f"interrupted ({reason}); go on with: rigsweep sweep probe.yaml --resume --cards 1\n"
        wait_until_gone(every)
    answer = rigsweep(*words, cwd=tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert decided(tmp_path / "runs" / "probe") == undisturbed
    assert not list(Path("/tmp").glob(f"rigsweep-*/session_*_{process.pid}")), "nothing of its Ray is left"
