"""Start and stop the Ray of one sweep on this machine."""

import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from . import disk
from .cards import Card
from .errors import MachineError

NAMESPACE = "rigsweep"
CARD = "card"
"""The resource that a lane's worker takes one of, or a share. Not Ray's GPU, since the pool chooses the card."""
LANE = "lane"
"""A resource of which there is always enough; how much of it a placement group takes says which lane's it is."""
_PREFIX, _LOCK = "rigsweep-", "lock"
_PARTS = ("gcs_server", "raylet", "dashboard")

# A user's own value wins.
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    # Off, Ray takes the loopback address as this node's, on Linux too: nothing of it listens to the network.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_ROTATION_MAX_BYTES": str(64 * 2**20),
    "RAY_ROTATION_BACKUP_COUNT": "2",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
    "TUNE_GLOBAL_CHECKPOINT_S": str(10**9),
    "TUNE_WARN_THRESHOLD_S": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    # glibc gives large blocks back to the kernel at once, and every tensor then pays for its pages anew: a
    # small model trains 13% faster on a CPU without. Read when a process starts, so set for Ray's workers.
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "10000000000",
}


def set_environment(more: Mapping[str, str] | None = None) -> None:
    """What Ray and MLflow read from the environment when they are imported: call this first.

    `more` is for Ray's processes. What is set already stays.
    """
    for key, value in {**_ENVIRONMENT, **(more or {})}.items():
        os.environ.setdefault(key, value)
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))


@dataclass(frozen=True)
class LocalRay:
    """The Ray that a sweep runs on."""

    ours: bool
    parts: dict[str, psutil.Process]
    """Its own processes without which it cannot go on; of a Ray that is not ours, none are known."""

    def broken(self) -> str | None:
        """Which of them has died, in words. Ray says so only after a minute, by ending this process."""
        dead = next((name for name, process in self.parts.items() if not _alive(process)), None)
        return f"Ray's {dead} process died" if dead else None


@contextmanager
def local_ray(cards: list[Card], log: Path, *, environment: Mapping[str, str] | None = None) -> Iterator[LocalRay]:
    """A Ray for these cards alone, on 127.0.0.1, with a token of its own; nothing of it is left afterwards.

    Its processes get `environment`, where a variable is not set already.
    Where this process has a Ray already, that one is used and left alone. Raises `MachineError` where Ray does
    not come up.

    Ray's own logs go to a temporary folder that is removed, except after an error, when they are kept in
    `log`. The processes die with this one; what a killed one leaves nevertheless, the next clears up.
    """
    set_environment(environment)
    import ray

    if ray.is_initialized():  # somebody else's, who stops it too
        yield LocalRay(ours=False, parts={})
        return
    _clear_up(_place())
    temporary = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_place()))
    found = LocalRay(ours=True, parts={})
    with _held(temporary):
        try:
            _start(cards, temporary)
            found = LocalRay(ours=True, parts=_parts(temporary))
            yield found
        except BaseException as error:
            logs = temporary / "session_latest" / "logs"
            if logs.exists() and not disk.full(error, log):
                shutil.copytree(logs, log / "ray", dirs_exist_ok=True)
            raise
        finally:
            if found.broken() or not found.parts:
                # What is left of it would wait for what has died, and `shutdown` for both.
                end_processes(temporary)
            ray.shutdown()
            shutil.rmtree(temporary, ignore_errors=True)


def _place() -> Path:
    # Short, since Unix sockets live in it (107 characters at most).
    return Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())  # noqa: S108


@contextmanager
def _held(temporary: Path) -> Iterator[None]:
    """Hold a lock in the folder, which the kernel releases with this process, however it ends."""
    with (temporary / "new").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        (temporary / "new").rename(temporary / _LOCK)  # whoever finds it, finds it held
        yield


def _clear_up(place: Path) -> None:
    """End what is left of the Rays of processes that were killed, and remove their folders.

    A lane of such a one might otherwise still write where a resumed sweep does.
    """
    for lock in place.glob(f"{_PREFIX}*/{_LOCK}"):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                end_processes(lock.parent)
                shutil.rmtree(lock.parent, ignore_errors=True)
        except (BlockingIOError, FileNotFoundError):  # its process is alive, or another clears up
            continue


def _start(cards: list[Card], temporary: Path) -> None:
    import ray

    before = Path.cwd()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a lane's workers are given their cards; nothing else of Ray has any
    # Ray puts the working directory on its workers' import path, where a folder `datasets` would hide the
    # library of that name; so it is started from an empty one.
    (temporary / "empty").mkdir()
    os.chdir(temporary / "empty")
    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            num_cpus=max(1, sum(card.threads for card in cards)),
            num_gpus=0,
            # `client` is for what needs a place in Ray, but no card.
            resources={CARD: len(cards), LANE: 10**9, "client": 10**6},
            include_dashboard=True,  # the state API, which Ray Train's cleaner needs, is part of it
            dashboard_host="127.0.0.1",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,  # its loggers go where this process's go
            _temp_dir=str(temporary),
        )
    except Exception as error:
        # Ray has no class of its own for this.
        if "timed out during startup" not in str(error):
            raise
        raise MachineError("Ray did not come up within 30 s: is this machine busy? try again") from error
    finally:
        os.chdir(before)
        os.environ.pop("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = visible


def _parts(temporary: Path) -> dict[str, psutil.Process]:
    found = {}
    for child in psutil.Process().children():
        words = child.cmdline()
        name = next((part for part in _PARTS if part in (Path(word).stem for word in words[:3])), None)
        if name and str(temporary) in " ".join(words):
            found[name] = child
    return found


def _alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def end_processes(temporary: Path) -> None:
    """Kill every process of the Ray of this temporary folder, and wait until they are gone."""
    ours = []
    for process in psutil.process_iter():
        try:
            # By the logs that they write: children of a dead parent are elsewhere, and Ray clears their environment.
            logs = [file for file in process.open_files() if file.mode != "r" and temporary in Path(file.path).parents]
            if logs and process.pid != os.getpid():
                process.kill()
                ours.append(process)
        except psutil.Error:  # it has gone, or is another user's
            continue
    psutil.wait_procs(ours, timeout=10)
