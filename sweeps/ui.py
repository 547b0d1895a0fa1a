"""MLflow's own pages as the place where a person compares trials: names, descriptions, a view, and the server.

The view is one of MLflow's saved views (a tag of the experiment), to which an address can point. It was found by
reading MLflow 3.17's pages and trying; where a version does not know it, its plain list of runs is shown.
"""

import colorsys
import contextlib
import fcntl
import heapq
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .files import WrongInput
from .history import Record, Trial
from .sweep import Sweep

_START_SECONDS = 90.0  # on a machine whose cards and cores are busy
_PORT = 5000


def text(value: Any) -> str:
    """A parameter's value in full."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def short(value: Any) -> str:
    """A parameter's value as a person says it."""
    return f"{value:.3g}" if isinstance(value, float) else text(value)


def title(trial: Trial, repeats: int = 1) -> str:
    """A run's name: the number, then what was searched, for lists that show nothing else."""
    told = [f"{name} {short(trial.parameters[key])}" for key, name in _short_names(trial.parameters).items()]
    seed = [f"seed {trial.seed}"] if repeats > 1 else []
    return f"trial {trial.number}: {', '.join(told + seed) or 'base'}"[:200]


def color(number: int) -> str:
    """A trial's colour, as #rrggbb: hues a golden angle apart, so that neighbours never look alike."""
    red, green, blue = colorsys.hls_to_rgb(number * 0.618034 % 1, 0.36 + 0.12 * (number % 3), 0.7)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"


def _short_names(keys: Iterable[str]) -> dict[str, str]:
    # Lists and legends have room for some twenty letters: learning_rate is lr there, as everybody says.
    names = {key: key.rpartition(".")[2] for key in keys}
    names = {key: "".join(word[0] for word in n.split("_") if word) if "_" in n else n for key, n in names.items()}
    return {key: name if list(names.values()).count(name) == 1 else key for key, name in names.items()}


def describe_trial(trial: Trial, sample: Path | None) -> str:
    """A run's description in Markdown: how it went, the newest text sample, and what was searched."""
    lines = [f"**{trial.state.replace('_', ' ')}**" + (f": {trial.reason}" if trial.reason else "")]
    if sample is not None and sample.suffix == ".txt":
        # Of a long description MLflow shows the first lines until one asks for more: the sample is among them.
        words = sample.read_text(encoding="utf-8", errors="replace")[:3000]
        fence = "```"
        while fence in words:
            fence += "`"
        examples = sample.name.partition("-")[0].lstrip("0") or "0"
        lines[0] += f" · sample after {int(examples):,} examples:"
        lines += [fence, words, fence]
    searched = [f"{key} {short(value)}" for key, value in trial.parameters.items()]
    return "\n".join([*lines, "", " · ".join(searched)])


def describe_sweep(record: Record, experiment: str, runs: Mapping[int, str], comparison: str) -> str:
    """The parent run's description in Markdown: question, state, and the best trials with their parameters."""
    objective = record.opened["objective"]
    sign = 1 if objective["goal"] == "minimize" else -1
    closed = record.closed
    state = f"{closed['state']}: {closed['reason']}" if closed else "running"
    counts = Counter(trial.state.replace("_", " ") for trial in record.trials.values())
    complete = [trial for trial in record.trials.values() if trial.state == "complete" and trial.value is not None]
    best = heapq.nsmallest(5, complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number))
    page = f"#/experiments/{experiment}/runs"
    lines = [f"**{record.opened.get('question') or record.opened['sweep']}**", ""]
    for trial in best[:1]:
        name = f"[{_cell(title(trial))}]({page}/{runs.get(trial.number, '')})"
        lines += [f"Best: {name} with {objective['metric']} {trial.value:.4g}. [Compare the trials]({comparison})", ""]
    lines += [
        f"The sweep is {state}. Of {len(record.trials)} trials: {', '.join(f'{n} {s}' for s, n in counts.items())}."
    ]
    if len(best) > 1:
        lines += ["", f"| best | {objective['metric']} |", "|---|---|"]
        for trial in best:
            lines.append(f"| [{_cell(title(trial))}]({page}/{runs.get(trial.number, '')}) | {trial.value:.4g} |")
    return "\n".join(lines)


def _cell(told: str) -> str:
    """Text that stays inside a cell of a Markdown table."""
    return told.replace("|", "\\|").replace("\n", " ")


def comparison_address(base: str, experiment_id: str, view: str) -> str:
    """Where a sweep's trials are compared; `base` is the server's address, `view` the saved view's name."""
    # Any filter or order in the address itself would make MLflow pass over the view.
    page = f"{base}#/experiments/{experiment_id}/runs"
    return f"{page}?viewStateShareKey={view}&compareRunsMode=CHART&workflowType=machine_learning"


def comparison_view(sweep: Sweep, key: str) -> str:
    """The saved view: this sweep's trials, best first, and the charts that answer its question."""
    objective = sweep.settings.objective
    searched = [dimension.key for dimension in sweep.space.dimensions]
    numeric = [d.key for d in sweep.space.dimensions if d.kind != "choice" or _numbers(d.choices)]
    # MLflow's own charts of every metric follow in sections of theirs, which can be folded away.
    section = {"uuid": "rigsweep", "name": "Comparison", "display": True, "isReordered": True, "deleted": False}
    charts = [
        _line(objective.metric, f"{objective.metric} over examples"),
        _line("loss", "training loss over examples"),
        _line(objective.metric, f"{objective.metric} over FLOPs", over="flops"),
        _chart("BAR", "objective", metricKey="objective", displayName=f"final {objective.metric}"),
        # MLflow would add charts of what is there only to be an axis.
        *(_line(name, name) | {"deleted": True} for name in ("flops", "seconds")),
    ]
    if numeric:
        parallel = {"selectedParams": numeric, "selectedMetrics": ["objective"], "showAllRuns": False}
        # Choices that are words have no axis there.
        charts.insert(1, _chart("PARALLEL", "searched", **parallel))
    # Every curve is asked for by itself, and more than some dozen cannot be told apart.
    few = sweep.settings.trials * sweep.settings.repeats <= 30
    state = {
        "searchFilter": f"tags.`rigsweep.opened` = '{key}' AND tags.`rigsweep.trial` != ''",
        "orderByKey": "metrics.`objective`",
        "orderByAsc": objective.goal == "minimize",
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "selectedColumns": [
            "metrics.`objective`",
            f"metrics.`{objective.metric}`",
            *(f"params.`{name}`" for name in searched),
            "tags.`rigsweep.state`",
            "tags.`rigsweep.reason`",
        ],
        "runsHiddenMode": "SHOW_ALL" if few else "FIRST_20_RUNS",
        "compareRunCharts": charts,
        "compareRunSections": [section],
        "isAccordionReordered": True,
        "hideEmptyCharts": True,
        "viewMaximized": True,
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    view = {"name": f"Comparison of {sweep.name}", "createdAt": int(key), "updatedAt": int(key)}
    return json.dumps(view | {"state": json.dumps(state)})


def _chart(kind: str, name: str, **more: Any) -> dict[str, Any]:
    """A chart of MLflow's, in the words of its pages' own state."""
    own = {"type": kind, "uuid": f"rigsweep-{kind}-{name}", "metricSectionId": "rigsweep", "runsCountToCompare": 100}
    return own | {"deleted": False, "isGenerated": False} | more


def _line(metric: str, name: str, over: str | None = None) -> dict[str, Any]:
    """Curves of a metric over examples, which are MLflow's steps, or over another metric."""
    return _chart(
        "LINE",
        f"{metric}-{over or 'examples'}",
        metricKey=metric,
        selectedMetricKeys=[metric],
        displayName=name,
        xAxisKey="metric" if over else "step",
        selectedXAxisMetricKey=over or "",
        useGlobalXaxisKey=False,
        useGlobalLineSmoothing=True,
        lineSmoothness=0,
        xAxisScaleType="linear",
        scaleType="linear",
        range={},
        yAxisKey="metric",
        yAxisExpressions=[],
        ignoreOutliers=False,
    )


def _numbers(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def serve(runs: Path, port: int | None, sweep: str | None) -> None:
    """Run MLflow's server on the runs until Ctrl-C, and print where a sweep's trials are compared.

    Without `port`, 5000 or any free one; without `sweep`, the newest. Raises `WrongInput`.
    """
    from .folders import find_sweep
    from .mlflow_store import State, Store
    from .tracking import Tracker

    folder, store = find_sweep(runs, sweep), Store.of(runs)
    with _alone(folder) as alone:
        if alone:  # else the sweep's own process keeps the record
            Tracker(folder, store).catch_up()
    state = State.load(folder / "mlflow.json")
    view = f"rigsweep-{state.sweep}"

    def tell(base: str) -> None:
        # A sweep that has just begun may not be in MLflow yet.
        place = comparison_address(f"{base}/", state.experiment, view) if state.experiment else base
        print(f"{folder.name}: {place}", flush=True)

    if store.uri.startswith("http"):
        tell(store.uri.rstrip("/"))
        return
    store.open()  # makes the tables, if there are none, where no other process does so at the same time
    port = _port(port)
    artifacts = str(store.artifacts or runs / "artifacts")
    with contextlib.suppress(KeyboardInterrupt), _server(store.uri, artifacts, port) as server:
        tell(f"http://127.0.0.1:{port}")
        print("Ctrl-C ends it", flush=True)
        if code := server.wait():
            raise WrongInput(f"MLflow's server has ended with exit code {code}")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Whether no sweep runs in the folder, and keep it so meanwhile: two writers would make runs twice."""
    with (folder / "history.jsonl").open("rb") as history:
        try:
            fcntl.flock(history, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _port(asked: int | None) -> int:
    """The port to take: the one asked for, which must be free, else 5000 or any."""
    for port in (asked,) if asked is not None else (_PORT, 0):
        with socket.socket() as probe:
            # As a server does: a port in TIME_WAIT is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                if asked is not None:
                    raise WrongInput(f"--port {asked}: {error.strerror}; leave it out to take a free one") from error
            else:
                return probe.getsockname()[1]
    raise WrongInput("no free port on 127.0.0.1")


@contextlib.contextmanager
def _server(uri: str, artifacts: str, port: int) -> "Iterator[subprocess.Popen[bytes]]":
    """MLflow's server, answering; it and its workers are gone afterwards, also after SIGTERM."""
    # Its defaults for a server on localhost stand: other sites' requests and other host names are refused.
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", uri, "--artifacts-destination", artifacts]
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",  # several more processes, for what no sweep uses
        "MLFLOW_LOGGING_LEVEL": "WARNING",
    }
    told = sys.stderr if "RIGSWEEP_DEBUG" in os.environ else subprocess.DEVNULL
    # A session of its own: Ctrl-C comes here alone, and its workers end with the group.
    server = subprocess.Popen(command, env=os.environ | quiet, stdout=told, stderr=told, start_new_session=True)  # noqa: S603
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        _wait(server, f"http://127.0.0.1:{port}/health")
        yield server
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(server)


def _wait(server: "subprocess.Popen[bytes]", address: str) -> None:
    """Until the server answers. Raises `WrongInput` where it ends before it does."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise WrongInput(f"MLflow's server has ended with exit code {server.returncode} instead of starting")
        try:
            with urllib.request.urlopen(address, timeout=2):  # noqa: S310
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.2)
    raise WrongInput(f"MLflow's server has not answered for {_START_SECONDS:.0f} s")


def _end(server: "subprocess.Popen[bytes]") -> None:
    """Ask the whole group to end, then make it: workers may outlive their leader."""
    for number, patience in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(patience)


_interrupt: Callable[..., None] = signal.default_int_handler
