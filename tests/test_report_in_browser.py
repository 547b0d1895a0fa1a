"""What a person sees of a report, measured in a real browser; and that the study opens in optuna-dashboard."""

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import folders, report, views

from .browser import DESKTOP, PHONE, Browser, browser
from .simulator import SWEEP, Fault, no_fault
from .test_report import WITHIN, made, named, some, told_of

pytestmark = [pytest.mark.browser, pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")]

MEASURE = Path(__file__).with_name("measure.js").read_text(encoding="utf-8")

CASES: dict[str, tuple[tuple[str, ...], str, Fault]] = {
    "stopping": ((WITHIN, "trials=30"), SWEEP, some),
    "names": (("early_stopping.within=initial",), named(), no_fault),
    "repeats": (("repeats=3", "trials=6"), SWEEP, no_fault),
    "maximise": (("objective={metric: validation/accuracy, goal: maximize}",), SWEEP, no_fault),
    "flops": (("early_stopping.by=flops", "base.budget={flops: 2e12}"), SWEEP, no_fault),
    "one": (("trials=1",), SWEEP, no_fault),
    "failed": (("trials=4",), SWEEP, lambda *_: "failed"),
    "training": (("trials=1",), SWEEP[: SWEEP.index("search:")], no_fault),
    "tiny": (
        ("search.optimizer.learning_rate={low: 3e-9, high: 8e-9, log: true}", "base.optimizer.learning_rate=5e-9"),
        SWEEP,
        no_fault,
    ),
    "choices": (("search.model.width={choices: [64, 65, 66, 67, 68, 69, 70, 71, 72, 73, 74, 75]}",), SWEEP, no_fault),
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.mark.parametrize("case", CASES)
def test_nothing_overlaps_nothing_is_cut_and_everything_can_be_read(
    tmp_path: Path, chromium: Browser, case: str
) -> None:
    overrides, text, fault = CASES[case]
    folder = made(tmp_path, case, *overrides, text=text, fault=fault)
    address = report.write(told_of(folder), folder).as_uri()
    for size, dark in ((PHONE, False), (PHONE, True), (DESKTOP, False), (DESKTOP, True)):
        seen = chromium.look(address, MEASURE, size=size, dark=dark)
        assert seen["wrong"] == [], f"at {size}, dark {dark}"
        assert seen["texts"] > 10
        if seen["charts"] >= 3:
            assert seen["columns"] == (1 if size == PHONE else 3)


def test_dark_is_dark_and_the_configuration_can_be_copied(tmp_path: Path, chromium: Browser) -> None:
    folder = made(tmp_path, "copy", WITHIN)
    told = told_of(folder)
    address = report.write(told, folder).as_uri()
    paper = "getComputedStyle(document.body).backgroundColor"
    assert chromium.look(address, paper) != chromium.look(address, paper, dark=True)
    button = "document.getElementById('copy')"
    pressed = f"{button}.click(), new Promise((r) => setTimeout(() => r({button}.textContent), 500))"
    assert chromium.look(address, pressed) == "Copied"
    assert chromium.look(address, "document.getElementById('file').textContent") == told["file"]


def test_the_study_opens_in_optuna_dashboard(tmp_path: Path, chromium: Browser) -> None:
    program = Path(sys.executable).with_name("optuna-dashboard")
    folder = made(tmp_path, "study", WITHIN, fault=some)
    sweep, record = folders.read_sweep(folder), folders.record_of(folder)
    views.write_files(sweep, folder, record)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    storage = f"sqlite:///{folder / 'study.db'}"
    server = subprocess.Popen(
        [program, storage, "--host", "127.0.0.1", "--port", str(port), "--server", "wsgiref"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        base = f"http://127.0.0.1:{port}"
        (study,) = asked(server, f"{base}/api/studies")["study_summaries"]
        assert study["study_name"] == "study"
        trials = asked(server, f"{base}/api/studies/{study['study_id']}")["trials"]
        assert [trial["number"] for trial in trials] == [trial.number for trial in record.trials.values()]
        told = {
            "complete": "Complete",
            "stopped": "Pruned",
            "diverged": "Pruned",
            "out_of_memory": "Pruned",
            "failed": "Fail",
        }
        assert [trial["state"] for trial in trials] == [told[trial.state] for trial in record.trials.values()]
        page = f"{base}/dashboard/studies/{study['study_id']}"
        words = "document.body.innerText"
        assert "study" in chromium.look(page, words, until=f"{words}.includes('optimizer.learning_rate')")
    finally:
        server.kill()  # it waits for connections that a browser keeps open
        server.wait(20)


def asked(server: "subprocess.Popen[bytes]", address: str) -> Any:
    """A server's answer, once it answers."""
    deadline = time.monotonic() + 100
    while True:
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                return json.load(answer)
        except (urllib.error.URLError, ConnectionError):
            assert server.poll() is None, "it has ended instead of starting"
            assert time.monotonic() < deadline, "it has not answered"
            time.sleep(0.2)
