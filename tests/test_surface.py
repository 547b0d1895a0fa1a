"""The closed form that stands in for a training."""

import json
import math
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rigsweep.trainables.surface import loss_at
from rigsweep.trainables.surface_settings import SurfaceTraining
from rigsweep.trainables.trial import run_trial


class Killed(BaseException):
    """Stands for a process that is gone."""


class Line:
    rank, workers = 0, 1

    def __init__(self, order=None, at=0, lost_at=None):
        self._order, self._at, self._lost_at = order, at, lost_at
        self.heard, self.sent = [], []

    @property
    def progress(self):
        return self.heard[-1]

    @progress.setter
    def progress(self, told):
        self.heard.append(told)

    @property
    def order(self):
        return self._order if self.heard[-1]["examples"] >= self._at else None

    def send(self, message):
        if message["examples"] == self._lost_at:
            raise Killed
        self.sent.append(message)

    def losses(self):
        reports = [message for message in self.sent if message["event"] == "report"]
        return {message["examples"]: message["metrics"]["validation/loss"] for message in reports}


def settings(**changes):
    plain = {"budget": {"examples": 1000}, "batch": {"examples": 10}, "model": {"noise": 0.1}}
    return plain | changes


def job_of(folder, **changes):
    return {
        "number": 3,
        "trainable": "surface",
        "folder": str(folder),
        "cache": str(folder),
        "metric": "validation/loss",
        "goal": "minimize",
        "precision": "fp32",
        "kind": "cpu",
        "threads": 1,
        "memory_bytes": 2**30,
        "measured_flops_per_second": 1e9,
        "training": settings(),
    } | changes


def run(folder, line=None, recorded=(), **changes):
    line = line or Line()
    return run_trial(job_of(folder, training=settings(**changes), recorded=recorded), line), line


def test_the_curve_falls_and_has_its_best_learning_rate(tmp_path):
    def at(share=1.0, width=64, **optimizer):
        training = SurfaceTraining(**settings(model={"width": width}, optimizer=optimizer, schedule={"warmup": 0.03}))
        return loss_at(training, share)

    falling = [at(share / 10) for share in range(11)]
    assert falling == sorted(falling, reverse=True)
    assert at(learning_rate=3e-3) == pytest.approx(2.0 + 2.0 * 61**-0.6)
    assert at(learning_rate=3e-3) < min(at(learning_rate=1e-3), at(learning_rate=9e-3))
    assert at(learning_rate=1.5e-3, width=256) < min(at(learning_rate=3e-3, width=256), at(learning_rate=3e-3))


def test_a_trial_ends_on_its_curve(tmp_path):
    ending, line = run(tmp_path, model={})
    assert ending == {
        "event": "ended",
        "state": "complete",
        "reason": "reached its budget",
        "rule": "",
        "memory_share": None,
        "retire": False,
    }
    assert sorted(line.losses()) == list(range(100, 1001, 100))
    training = SurfaceTraining(**settings(model={}))
    for examples, loss in line.losses().items():
        assert loss == pytest.approx(loss_at(training, examples / 1000))
    assert line.sent[-1]["metrics"]["validation/accuracy"] == pytest.approx(math.exp(-line.losses()[1000]))
    assert (tmp_path / "samples" / "000000001000-sample.txt").exists()


def test_the_noise_is_a_function_of_seed_and_examples(tmp_path):
    first, again, other = (run(tmp_path / str(n), seed=seed)[1].losses() for n, seed in enumerate((0, 0, 1)))
    assert first == again
    assert set(first.values()).isdisjoint(other.values())
    plain = run(tmp_path / "plain", model={})[1].losses()
    assert len({first[examples] - plain[examples] for examples in plain}) == 10


@pytest.mark.parametrize("examples", [0, 90, 100, 550, 990])
def test_an_interrupted_trial_goes_on_where_it_was(tmp_path, examples):
    _, whole = run(tmp_path / "whole")
    ending, before = run(tmp_path / "parts", Line("interrupt", examples))
    assert ending["state"] == "interrupted"
    ending, after = run(tmp_path / "parts", recorded=tuple(before.losses()))
    assert ending["state"] == "complete"
    assert before.losses().keys() & after.losses().keys() == set()
    assert before.losses() | after.losses() == whole.losses()
    heard = [told["examples"] for told in before.heard + after.heard]
    assert heard == sorted(heard)
    seconds = [message["seconds"] for message in before.sent + after.sent]
    assert seconds == sorted(seconds)


def test_an_evaluation_that_was_not_delivered_is_reported_after_the_resume(tmp_path):
    _, whole = run(tmp_path / "whole")
    with pytest.raises(Killed):
        run(tmp_path / "parts", Line(lost_at=300))
    _, after = run(tmp_path / "parts", recorded=(100, 200))
    assert after.losses() == {examples: loss for examples, loss in whole.losses().items() if examples >= 300}


def test_an_order_to_stop_stops(tmp_path):
    ending, line = run(tmp_path, Line("stop", 250))
    assert ending["state"] == "stopped"
    assert line.heard[-1]["examples"] == 250


@pytest.mark.parametrize(
    ("fault", "state", "words"),
    [
        ("raise", "failed", "ValueError: a rehearsed error"),
        ("out_of_memory", "out_of_memory", "MemoryError: a rehearsed shortage"),
        ("diverge", "diverged", "the loss is not finite (nan) after 50% of the budget"),
    ],
)
def test_a_fault_ends_the_trial_at_its_share(tmp_path, fault, state, words):
    ending, line = run(tmp_path, model={"fault": fault, "fault_at": 0.5})
    assert (ending["state"], ending["reason"]) == (state, words)
    assert ending["rule"] == ("non-finite-loss" if fault == "diverge" else "")
    assert ending["retire"] == (state == "out_of_memory")
    assert max(line.losses()) == 400


def test_a_rehearsed_warning_is_said_once_and_the_trial_goes_on(tmp_path):
    ending, line = run(tmp_path, model={"fault": "warn", "fault_at": 0.5})
    assert ending["state"] == "complete"
    assert [(m["rule"], m["examples"]) for m in line.sent if m["event"] == "warning"] == [("gradient-norm", 500)]


def test_a_fault_happens_only_above_its_learning_rate(tmp_path):
    model = {"fault": "raise", "fault_at": 0.5, "fault_above": 1e-3}
    assert run(tmp_path / "at", model=model, optimizer={"learning_rate": 1e-3})[0]["state"] == "complete"
    assert run(tmp_path / "above", model=model, optimizer={"learning_rate": 1.1e-3})[0]["state"] == "failed"


DYING = """
    import json, sys
    from rigsweep.trainables.trial import run_trial

    class Line:
        rank, workers = 0, 1
        order, progress = None, {}

        def send(self, message):
            print(message["examples"], flush=True)

    print(run_trial(json.loads(sys.argv[1]), Line())["state"], flush=True)
"""


def in_a_process(folder, fault, **keywords) -> subprocess.CompletedProcess:
    model = {"fault": fault, "fault_at": 0.5}
    job = json.dumps(job_of(folder, training=settings(model=model), **keywords))
    command = [sys.executable, "-c", textwrap.dedent(DYING), job]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_dying_kills_the_process_once(tmp_path):
    died = in_a_process(tmp_path, "die")
    assert (died.returncode, died.stdout.split()) == (-signal.SIGKILL, ["100", "200", "300", "400"])
    again = in_a_process(tmp_path, "die", recorded=[100, 200, 300, 400])
    assert again.stdout.split() == ["500", "600", "700", "800", "900", "1000", "complete"], again.stderr


def test_dying_always_kills_the_process_every_time(tmp_path):
    for _ in range(2):
        died = in_a_process(tmp_path, "die_always", recorded=[100, 200, 300, 400])
        assert died.returncode == -signal.SIGKILL


def test_hanging_says_nothing_more(tmp_path, monkeypatch):
    slept = []

    def sleep(seconds):
        slept.append(seconds)
        raise Killed

    monkeypatch.setattr("rigsweep.trainables.surface.time.sleep", sleep)
    line = Line()
    with pytest.raises(Killed):
        run(tmp_path, line, model={"fault": "hang"})
    assert slept[0] > 24 * 3600
    assert max(line.losses()) == 400


def test_a_row_of_the_trials_folder_is_an_evaluation(tmp_path):
    _, line = run(tmp_path)
    rows = [json.loads(row) for row in (Path(tmp_path) / "metrics.jsonl").read_text().splitlines()]
    assert {row["examples"]: row["validation/loss"] for row in rows} == line.losses()
