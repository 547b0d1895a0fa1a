"""What tests share: one Ray, one cache, their own card locks, and the data beside the checkout."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rigsweep.cluster.cards import Card
from rigsweep.cluster.local_ray import set_environment

set_environment()  # before any test imports Ray

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session", autouse=True)
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache and card locks of the tests' own, and no tracking server of the user's."""
    place = tmp_path_factory.mktemp("apart")
    told = {"RIGSWEEP_CACHE": str(place / "cache"), "RIGSWEEP_LOCKS": str(place / "locks")}
    before = {name: os.environ.get(name) for name in [*told, "MLFLOW_TRACKING_URI", "RIGSWEEP_RUNS"]}
    os.environ.update(told)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    os.environ.pop("RIGSWEEP_RUNS", None)
    yield place / "cache"
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="session")
def cache(apart: Path) -> Path:
    """Where prepared data and measured speeds go."""
    return apart


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real data for tests that can do without: they skip where it is absent."""
    place = Path(os.environ.get("RIGSWEEP_SHARED") or ROOT.parent / "shared")
    if not (place / "data").is_dir():
        pytest.skip("no folder `shared` beside the checkout (RIGSWEEP_SHARED)")
    return place


@pytest.fixture(scope="session")
def cards() -> list[Card]:
    """Two CPU cards of one thread each, whatever the machine has."""
    return [Card(i, "cpu", "CPU, 1 thread", f"cpu-{i}", 4 * 2**30, 1) for i in range(2)]


@pytest.fixture(scope="session")
def one_ray(cards: list[Card], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One Ray for every test that can share it; sweeps inside it start their own lanes."""
    from rigsweep.cluster.local_ray import local_ray

    # Workers find `lane_work` there.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    with local_ray(cards, tmp_path_factory.mktemp("ray-log")):
        yield
    left = [process for process in psutil.Process().children(recursive=True) if "ray" in " ".join(_words(process))]
    _, alive = psutil.wait_procs(left, timeout=10)
    assert not alive, f"Ray processes are left: {alive}"


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a small disk: `mount_disk("2m")` answers where."""
    place = tmp_path / "disk"

    def mount(size: str) -> Path:
        place.mkdir()
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        if os.geteuid() or not shutil.which("mount") or subprocess.run(mounting, check=False).returncode:
            pytest.skip("a small disk can only be mounted by root")
        return place

    yield mount
    if place.is_mount():
        subprocess.run(["umount", "-l", str(place)], check=True)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []
