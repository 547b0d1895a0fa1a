"""`rigsweep ui`: MLflow's own server on the runs, on 127.0.0.1, with a sweep's comparison selected."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from .files import WrongInput
from .history import alone_with
from .mlflow_pages import comparison_address

_START_SECONDS = 90.0  # on a machine whose cards and cores are busy
_PORT = 5000


def serve(runs: Path, port: int | None, sweep: str | None) -> None:
    """Run MLflow's server on the runs until Ctrl-C, and print where a sweep's trials are compared.

    Without `port`, 5000 or any free one; without `sweep`, the newest. Raises `WrongInput`.
    """
    from .folders import find_sweep
    from .mlflow_store import State, Store
    from .tracking import Tracker

    folder, store = find_sweep(runs, sweep), Store.of(runs)
    with alone_with(folder) as alone:
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
    # Also where a script began it in the background, and it was told to ignore the first.
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        _wait(server, f"http://127.0.0.1:{port}/health")
        yield server
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
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
