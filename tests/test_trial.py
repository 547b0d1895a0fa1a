"""A trial as a lane runs it: how it ends, what it logs, what it leaves for the next."""

import json
import logging

import pytest
import torch

from rigsweep.trainables import trial
from rigsweep.trainables.door import Ending
from rigsweep.trainables.trial import Job, run_trial

TEXT = "".join(f"{n} bottles, {n * n} ships and a sea of {n % 7}.\n" for n in range(100))


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Line:
    rank, workers = 0, 1

    def __init__(self, order=None):
        self.order, self.progress, self.sent = order, {}, []

    def send(self, message):
        self.sent.append(message)


def job_of(folder, **changes):
    return {
        "number": 3,
        "trainable": "surface",
        "training": {"budget": {"examples": 1000}, "batch": {"examples": 100}, "evaluation": {"every": 0.5}},
        "folder": str(folder),
        "cache": str(folder),
        "metric": "validation/loss",
        "goal": "minimize",
        "precision": "fp32",
        "kind": "cpu",
        "threads": 1,
        "memory_bytes": 2**30,
        "measured_flops_per_second": 1e9,
    } | changes


def run_with(monkeypatch, folder, train, line=None):
    """Run a trial whose training is the given function."""
    monkeypatch.setattr(trial, "load", lambda name: train)
    return run_trial(job_of(folder), line or Line())


def raising(error):
    def train(job, door):
        raise error

    return train


def test_a_trial_runs_to_its_end_and_says_so(tmp_path):
    line = Line()
    ending = run_trial(job_of(tmp_path / "trials" / "3"), line)
    assert ending == {
        "event": "ended",
        "state": "complete",
        "reason": "reached its budget",
        "rule": "",
        "memory_share": None,
        "retire": False,
    }
    assert [message["examples"] for message in line.sent] == [500, 1000]


def test_the_last_message_is_plain_data(tmp_path):
    json.dumps(run_trial(job_of(tmp_path), Line()))


def test_a_job_says_its_settings(tmp_path):
    job = Job(**job_of(tmp_path))
    assert job.settings().budget.examples == 1000


@pytest.mark.parametrize(("order", "state"), [("stop", "stopped"), ("interrupt", "interrupted")])
def test_an_order_ends_the_trial(tmp_path, order, state):
    assert run_trial(job_of(tmp_path), Line(order))["state"] == state


def test_an_exception_ends_the_trial_in_one_line_with_its_traceback_in_the_log(tmp_path, monkeypatch):
    ending = run_with(monkeypatch, tmp_path, raising(ValueError("the first line\nand a second")))
    assert ending == {
        "event": "ended",
        "state": "failed",
        "reason": "ValueError: the first line",
        "rule": "",
        "memory_share": None,
        "retire": False,
    }
    log = (tmp_path / "log.txt").read_text()
    assert "Traceback (most recent call last)" in log
    assert "and a second" in log


def test_an_exception_without_words_is_named(tmp_path, monkeypatch):
    assert run_with(monkeypatch, tmp_path, raising(KeyError()))["reason"] == "KeyError"


def test_settings_that_are_wrong_fail_the_trial_and_not_the_process(tmp_path):
    ending = run_trial(job_of(tmp_path, training={"budget": {}}), Line())
    assert ending["state"] == "failed"
    assert "\n" not in ending["reason"]


def test_a_folder_that_cannot_be_made_fails_the_trial_and_not_the_process(tmp_path):
    (tmp_path / "file").write_text("")
    ending = run_trial(job_of(tmp_path / "file" / "3"), Line())
    assert ending["state"] == "failed"
    assert ending["reason"].startswith("NotADirectoryError")


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has ..."),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory: you ..."),
    ],
)
def test_a_shortage_of_memory_is_told_from_other_errors_and_retires_the_process(tmp_path, monkeypatch, error):
    ending = run_with(monkeypatch, tmp_path, raising(error))
    assert (ending["state"], ending["retire"]) == ("out_of_memory", True)
    assert "Traceback" in (tmp_path / "log.txt").read_text()


def test_a_real_shortage_on_a_cpu_is_recognised(tmp_path, monkeypatch):
    def train(job, door):
        torch.empty(2**60, dtype=torch.uint8)

    assert run_with(monkeypatch, tmp_path, train)["state"] == "out_of_memory"


def test_another_error_of_cuda_fails_the_trial_and_retires_the_process(tmp_path, monkeypatch):
    ending = run_with(monkeypatch, tmp_path, raising(RuntimeError("CUDA error: device-side assert triggered\nmore")))
    assert (ending["state"], ending["retire"]) == ("failed", True)


def test_a_trial_may_say_that_it_ran_out_of_memory(tmp_path, monkeypatch):
    ending = run_with(monkeypatch, tmp_path, lambda job, door: Ending("out_of_memory", "too wide"))
    assert (ending["state"], ending["reason"], ending["retire"]) == ("out_of_memory", "too wide", True)


@pytest.mark.parametrize("error", [None, ValueError("x"), KeyboardInterrupt()])
def test_the_log_is_the_trials_own_and_taken_down_after_it(tmp_path, monkeypatch, error):
    handlers = list(logging.getLogger().handlers)
    doors = []

    def train(job, door):
        doors.append(door)
        logging.getLogger("somewhere").warning("heard")
        if error:
            raise error
        return Ending("complete", "")

    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run_with(monkeypatch, tmp_path, train)
    else:
        run_with(monkeypatch, tmp_path, train)
    assert logging.getLogger().handlers == handlers
    logging.getLogger("somewhere").warning("not for this trial")
    log = (tmp_path / "log.txt").read_text()
    assert "WARNING somewhere: heard" in log
    assert "not for this trial" not in log
    assert doors[0]._metrics.closed


def test_compiled_code_is_dropped_after_a_trial(tmp_path, monkeypatch):
    torch._dynamo.reset()  # imports it
    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(None))
    run_trial(job_of(tmp_path), Line())
    assert len(resets) == 1


def gpt_trial(folder, cache, width, dropout):
    data = {
        "corpus": str(cache / "text.txt"),
        "vocabulary": "characters",
        "sequence_length": 16,
        "validation": "last 10%",
    }
    training = {
        "data": data,
        "model": {"layers": 1, "width": width, "head_width": 8, "dropout": dropout},
        "batch": {"examples": 64},
        "budget": {"examples": 640},
        "evaluation": {"every": 0.5, "examples": 160},
        "sampling": {"tokens": 4},
    }
    line = Line()
    ending = run_trial(job_of(folder, trainable="gpt", training=training, cache=str(cache)), line)
    assert ending["state"] == "complete", ending
    return [message["metrics"]["validation/loss"] for message in line.sent]


def test_trials_of_one_process_do_not_influence_each_other(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    kinds = [(16, 0.0), (24, 0.2)]
    forth = [gpt_trial(tmp_path / f"forth-{kind[0]}", tmp_path, *kind) for kind in kinds]
    run_trial(job_of(tmp_path / "broken", trainable="gpt", training={}), Line())
    back = [gpt_trial(tmp_path / f"back-{kind[0]}", tmp_path, *kind) for kind in reversed(kinds)]
    assert forth == back[::-1]
    assert forth[0] != forth[1]
