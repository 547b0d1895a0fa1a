"""MLflow's pages on a sweep: the server, and what a browser shows at the address that is printed."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from rigsweep.sweeps import mlflow_pages, ui
from rigsweep.sweeps.files import WrongInput, parse
from rigsweep.sweeps.history import Trial
from rigsweep.sweeps.sweep import check

CHROMIUM = shutil.which("chromium")
BEGAN = 1_700_000_000.0
SWEEP = """
question: 哪个学习率 suits each width?
trainable: surface
base: {optimizer: {learning_rate: 1.0e-3}, budget: {examples: 3000}, model: {width: 64}}
search:
  optimizer.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
  model.width: {choices: [64, 96]}
trials: 3
early_stopping: {rule: none}
"""


def trial(**parameters: object) -> Trial:
    return Trial(3, 3, 7, parameters, BEGAN)


def test_names_say_what_was_searched_in_few_letters() -> None:
    found = trial(**{"optimizer.learning_rate": 0.00123456, "schedule.warmup": 0.02, "model.width": 64})
    assert mlflow_pages.title(found) == "trial 3: lr 0.00123, warmup 0.02, width 64"
    assert mlflow_pages.title(found, repeats=3).endswith(", seed 7")
    assert mlflow_pages.title(trial()) == "trial 3: base"
    # Where the short ones would be the same, the whole keys stand.
    assert mlflow_pages.title(trial(**{"a.rate": 1, "b.rate": 2})) == "trial 3: a.rate 1, b.rate 2"
    assert len(mlflow_pages.title(trial(**{"data.corpus": "x" * 5000}))) <= 200


def test_a_sample_cannot_break_out_of_its_fence(tmp_path: Path) -> None:
    sample = tmp_path / "000000012000-text.txt"
    sample.write_text("```\n# not a heading\n````")
    told = mlflow_pages.describe_trial(trial(), sample)
    assert "after 12,000 examples" in told and told.count("`````") == 2


def test_colors_of_neighbours_differ() -> None:
    assert len({mlflow_pages.color(number) for number in range(40)}) == 40
    assert all(len(mlflow_pages.color(number)) == 7 for number in range(40))


def test_the_view_has_the_objective_over_examples_first() -> None:
    view = json.loads(mlflow_pages.comparison_view(check(parse(SWEEP, "sweep.yaml"), "made"), "123"))
    state = json.loads(view["state"])
    first = state["compareRunCharts"][0]
    assert (first["type"], first["metricKey"], first["xAxisKey"]) == ("LINE", "validation/loss", "step")
    assert state["orderByAsc"] and state["runsHiddenMode"] == "SHOW_ALL"
    assert "params.`optimizer.learning_rate`" in state["selectedColumns"]


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        with pytest.raises(WrongInput, match=f"--port {taken}"):
            ui._port(taken)
    assert ui._port(None) > 0


@dataclass
class Served:
    process: subprocess.Popen[str]
    address: str

    @property
    def base(self) -> str:
        return self.address.partition("#")[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A sweep of three trials, shown as `rigsweep ui` does it, in a process of its own."""
    runs = tmp_path_factory.mktemp("runs")
    write_sweep(runs / "made")
    code = "import pathlib, sys; from rigsweep.sweeps import ui; ui.serve(pathlib.Path(sys.argv[1]), None, None)"
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-c", code, str(runs)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    assert process.stdout is not None
    yield Served(process, process.stdout.readline().split()[-1])
    if process.poll() is None:
        process.terminate()
        process.communicate(timeout=30)


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def write_sweep(folder: Path) -> None:
    folder.mkdir()
    (folder / "sweep.yaml").write_text(SWEEP, encoding="utf-8")
    objective = {"metric": "validation/loss", "goal": "minimize"}
    events: list[dict[str, object]] = [
        {
            "event": "opened",
            "version": 1,
            "sweep": "made",
            "trainable": "surface",
            "question": "which?",
            "objective": objective,
            "versions": {},
            "git": None,
        }
    ]
    for number in range(3):
        parameters = {"optimizer.learning_rate": 0.001 * (number + 1), "model.width": 64}
        events += [
            {"event": "proposed", "trial": number, "group": number, "seed": 0, "parameters": parameters},
            {"event": "started", "trial": number, "node": "box", "cards": ["CPU"], "process": 1},
            {
                "event": "ended",
                "trial": number,
                "state": "complete",
                "reason": "done",
                "seconds": 1,
                "value": 2.0 + number,
            },
        ]
        trial_folder = folder / "trials" / str(number)
        trial_folder.mkdir(parents=True)
        rows = [
            {
                "examples": 1000 * k,
                "flops": 1e9 * k,
                "seconds": k,
                "time": BEGAN + k,
                "validation/loss": 5.0 - k + number,
            }
            for k in range(1, 4)
        ]
        (trial_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (folder / "history.jsonl").open("w") as file:
        for i, event in enumerate(events):
            file.write(json.dumps({"time": BEGAN + i} | event) + "\n")


def ask(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=20) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_the_server_answers_on_this_machine_only(served: Served) -> None:
    assert served.base.startswith("http://127.0.0.1:")
    port = served.base.rstrip("/").rpartition(":")[2]
    assert ask(served.base) == 200
    assert ask(f"http://localhost:{port}/") == 200
    # Another site's page cannot reach it by a name that leads here.
    assert ask(served.base, Host="elsewhere.example") == 403
    listening = [c for p in family(served.process) for c in p.net_connections("inet") if c.status == "LISTEN"]
    assert {c.laddr.ip for c in listening if c.laddr.port == int(port)} == {"127.0.0.1"}


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
def test_a_browser_shows_the_trials_compared(served: Served, tmp_path: Path) -> None:
    legend = "trial 1: lr 0.002, width 64 (validation/loss)"
    page = browse(served.address, tmp_path, legend)
    for name in ("trial 0: lr 0.001", "trial 1: lr 0.002", "trial 2: lr 0.003"):
        assert name in page
    assert "Comparison of made" in page
    assert ">Comparison</div>" in page, "our section of charts"
    assert legend in page and 'data-unformatted="Step"' in page, "curves over examples"
    assert "Parallel Coordinates" in page


def browse(address: str, folder: Path, last: str) -> str:
    """The page's content; a slow machine gets more time, until `last` is there."""
    assert CHROMIUM is not None
    quiet = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    options = [*quiet.split(), "--disable-component-update", "--disable-sync", "--window-size=1600,1000", "--dump-dom"]
    page = ""
    for budget_ms in (20_000, 60_000, 180_000):
        own = [f"--user-data-dir={folder / str(budget_ms)}", f"--virtual-time-budget={budget_ms}"]
        command = [CHROMIUM, *options, *own, address]
        page = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        if last in page:
            break
    return page


def test_ctrl_c_ends_the_server_too(served: Served) -> None:
    whole = [psutil.Process(served.process.pid), *family(served.process)]
    assert len(whole) >= 2
    served.process.send_signal(signal.SIGINT)
    served.process.communicate(timeout=120)
    assert served.process.returncode == 0
    _, alive = psutil.wait_procs(whole, timeout=30)
    assert not alive
