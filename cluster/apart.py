"""Runs a measurement in processes of its own under a time limit: a hang or a crash is an answer, not the end."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from .measurements import Measurement

_DYING_SECONDS = 10.0
"""How long a killed process may take to go: one that hangs inside a driver may never."""


def measure_apart(
    part: str, workers: Sequence[Mapping[str, Any]], environment: Mapping[str, str], limit_seconds: float
) -> Measurement:
    """Run `part` of `measuring.py`, in one process for each of `workers` (its arguments), for `limit_seconds` at most.

    The values are those of the first worker. Where one ends with an error, or the time is over, all are killed.
    """
    # -P keeps the working directory off the path, where a folder `datasets` could hide the library.
    command = [sys.executable, "-P", "-m", "rigsweep.cluster.measuring", part]
    return run_apart([[*command, json.dumps(dict(worker))] for worker in workers], environment, limit_seconds)


def run_apart(commands: Sequence[Sequence[str]], environment: Mapping[str, str], limit_seconds: float) -> Measurement:
    """Run processes together; the values are the JSON in the last line that the first of them prints."""
    with tempfile.TemporaryDirectory(prefix="rigsweep-") as name:
        folder = Path(name)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for i, command in enumerate(commands):
                processes.append(_start(command, environment, folder, i))
            over = _wait(processes, time.monotonic() + limit_seconds)
        finally:
            left = _kill(processes)
        if not over:
            reason = f"it did not end within {limit_seconds:g} s and was killed"
            reason += f"; process {', '.join(map(str, left))} cannot be killed" if left else ""
            return Measurement("hung", {}, reason, time.time())
        for i, process in enumerate(processes):
            # Those that were killed because another failed say nothing of their own.
            if process.returncode not in (0, -signal.SIGKILL):
                return Measurement("failed", {}, _why(process.returncode, folder / f"{i}.err"), time.time())
        if any(process.returncode for process in processes):
            return Measurement("failed", {}, "its process was killed from outside (out of memory?)", time.time())
        return _answer(folder / "0.out")


def _start(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, number: int
) -> "subprocess.Popen[bytes]":
    # Files, not pipes: what a process leaves behind must not keep us waiting for the end of a pipe.
    with (folder / f"{number}.out").open("wb") as output, (folder / f"{number}.err").open("wb") as error:
        return subprocess.Popen(  # noqa: S603 - our own module, or a test's command
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=error,
            env={**os.environ, **environment},
            start_new_session=True,
        )


def _wait(processes: "Sequence[subprocess.Popen[bytes]]", deadline: float) -> bool:
    """Whether they ended, or one of them failed, before the deadline."""
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return True
        time.sleep(0.02)
    return False


def _kill(processes: "Sequence[subprocess.Popen[bytes]]") -> list[int]:
    """Kill them with all that they started; the ids of those that do not go."""
    left = []
    for process in processes:
        with suppress(ProcessLookupError):  # it and all that it started are gone
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        try:
            process.wait(_DYING_SECONDS)
        except subprocess.TimeoutExpired:
            left.append(process.pid)
    return left


def _why(code: int, errors: Path) -> str:
    lines = [line.strip() for line in errors.read_text(errors="replace").splitlines() if line.strip()]
    said = f": {lines[-1][:300]}" if lines else ""
    return f"its process ended by signal {-code}{said}" if code < 0 else f"its process ended with code {code}{said}"


def _answer(output: Path) -> Measurement:
    lines = output.read_text(errors="replace").splitlines()
    try:
        values = json.loads(lines[-1])
    except (IndexError, ValueError):
        return Measurement("failed", {}, "its process ended without an answer", time.time())
    return Measurement("measured", values, "", time.time())
