"""The doctor: each check where all is well and where it is not, with a pretended driver where there is no GPU."""

import fcntl
import importlib.util
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rigsweep.cluster import doctor
from rigsweep.cluster.cards import Card
from rigsweep.cluster.doctor import Finding, Machine, Torch
from rigsweep.cluster.errors import MachineError
from rigsweep.cluster.measurements import Measurement, keep_measurement, measurements_file
from rigsweep.sweeps import doctor as sweeps_doctor

COMMAND = [sys.executable, "-P", "-m", "rigsweep.sweeps.cli", "doctor"]
SETTINGS = """
question: What is left?
trainable: surface
base:
  optimizer: {learning_rate: 1e-3}
  batch: {examples: 100}
  budget: {examples: 10k}
search:
  optimizer.learning_rate: {low: 1e-4, high: 1e-1, log: true}
trials: 2
"""
CARD = {
    "index": "0",
    "uuid": "GPU-a",
    "name": "NVIDIA GeForce RTX 3090",
    "compute_cap": "8.6",
    "power.limit": "350.00",
    "power.default_limit": "350.00",
    "clocks.max.sm": "2100",
    "persistence_mode": "Disabled",
    "clocks_throttle_reasons.active": "0x0000000000000001",
    "ecc.errors.uncorrected.volatile.total": "[N/A]",
}
SMI = """#!{python}
import sys
CARDS, CUDA = {cards!r}, {cuda!r}
query = [word for word in sys.argv[1:] if word.startswith("--query-gpu=")]
if not query:
    print("| NVIDIA-SMI 570.00    Driver Version: 570.00    CUDA Version: " + CUDA + " |")
for card in CARDS if query else []:
    names = query[0].partition("=")[2].split(",")
    for name in names:
        if name not in card:
            print('Field "' + name + '" is not a valid field to query.')
            sys.exit(2)
    print(", ".join(card[name] for name in names))
"""
GiB = 2**30


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "runs", tmp_path / "cache")


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts an nvidia-smi first on the path: `smi(card, card, cuda="12.8")`."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def put(*cards: dict[str, str], cuda: str = "12.8", script: str | None = None) -> None:
        place = tmp_path / "bin"
        place.mkdir(exist_ok=True)
        file = place / "nvidia-smi"
        file.write_text(script or SMI.format(python=sys.executable, cards=list(cards), cuda=cuda))
        file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")

    return put


def with_torch(machine: Machine, **told: Any) -> Machine:
    """A machine whose torch says this of itself."""
    default: dict[str, Any] = {"version": "2.7.0", "cuda": "12.8", "architectures": ["sm_86"], "sees_gpu": True}
    machine.__dict__["torch"] = Torch(**(default | told))
    return machine


def two(**changed: str) -> list[dict[str, str]]:
    return [CARD, CARD | {"index": "1", "uuid": "GPU-b"} | changed]


# how checks are run


def test_a_check_that_raises_is_a_finding_and_the_others_go_on(machine: Machine) -> None:
    def breaks(_: Machine) -> Finding:
        raise RuntimeError("no luck\nat all")

    def goes_well(_: Machine) -> Finding:
        return doctor.ok("fine")

    first, second = doctor.examine(machine, [breaks, goes_well])
    assert (first.name, first.verdict, first.found) == (
        "breaks",
        "warning",
        "could not be checked: RuntimeError: no luck",
    )
    assert second == Finding("goes well", "ok", "fine")


def test_a_check_that_hangs_is_a_finding(machine: Machine) -> None:
    released = threading.Event()

    def hangs(_: Machine) -> Finding:
        released.wait()
        return doctor.ok("late")

    (found,) = doctor.examine(machine, [hangs], limit_seconds=0.05)
    released.set()
    assert found.verdict == "warning"
    assert found.found == "could not be checked: no answer within 0.05 s"


def test_every_check_answers_on_a_machine_without_a_gpu(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, smi: Callable[..., None]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    found = sweeps_doctor.findings(machine.runs, machine.cache)
    assert len(found) == len(sweeps_doctor.CHECKS)
    assert not [one for one in found if "could not be checked" in one.found]
    assert all(one.found for one in found)


# torch and the driver


def test_the_driver_answers_or_does_not(machine: Machine, smi: Callable[..., None]) -> None:
    smi(*two())
    assert doctor.driver(Machine(machine.runs, machine.cache)).verdict == "ok"
    smi(script="#!/bin/sh\necho 'NVIDIA-SMI has failed because it could not talk to the driver'; exit 9\n")
    found = doctor.driver(machine)
    assert found.verdict == "stops a run"
    assert "could not talk to the driver" in found.found


def test_a_driver_that_hangs_stops_a_run(
    machine: Machine, smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(script="#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(doctor, "_SMI_SECONDS", 0.2)
    found = doctor.driver(machine)
    assert (found.verdict, found.found) == ("stops a run", "nvidia-smi did not answer within 0.2 s")


def test_only_cards_that_may_be_used_are_looked_at(
    machine: Machine, smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(*two())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b")
    assert [gpu["index"] for gpu in machine.gpus] == ["1"]
    assert [gpu["compute_cap"] for gpu in machine.of_gpus("compute_cap")] == ["8.6"]


def test_torch_is_asked_in_a_process_of_its_own(machine: Machine) -> None:
    import torch

    assert machine.torch.version == torch.__version__
    assert doctor.torch_imports(machine).verdict == "ok"


def test_a_torch_that_does_not_import_stops_a_run(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open')")
    path = os.pathsep.join(filter(None, [str(tmp_path / "broken"), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    found = doctor.torch_imports(machine)
    assert found.verdict == "stops a run"
    assert "libcudart.so.12" in found.found


@pytest.mark.parametrize(
    ("told", "verdict", "words"),
    [
        ({}, "ok", "CUDA 12.8"),
        ({"cuda": None, "version": "2.7.0+cpu"}, "stops a run", "a build for CPUs only"),
        ({"sees_gpu": False}, "stops a run", "sees none of 1 GPU"),
        ({"error": "no torch"}, "not applicable", "torch does not import"),
    ],
)
def test_torch_for_gpus(
    machine: Machine, smi: Callable[..., None], told: dict[str, Any], verdict: str, words: str
) -> None:
    smi(CARD)
    found = doctor.torch_for_gpus(with_torch(machine, **told))
    assert (found.verdict, words in found.found) == (verdict, True), found


@pytest.mark.parametrize(
    ("capability", "architectures", "how"),
    [
        ("8.6", ["sm_80", "sm_90"], "as it is"),
        ("8.6", ["sm_86"], "as it is"),
        ("8.0", ["sm_86"], "not at all"),
        ("12.0", ["sm_90", "compute_90"], "by PTX"),
        ("12.0", ["sm_90", "sm_100"], "not at all"),
        ("12.0", ["sm_120", "compute_120"], "as it is"),
        ("9.0", ["sm_90a"], "as it is"),
        ("12.0", ["sm_90a", "compute_90a"], "not at all"),
        ("6.1", ["sm_75", "compute_120"], "not at all"),
    ],
)
def test_code_runs_within_its_major_version_and_ptx_on_everything_later(
    capability: str, architectures: list[str], how: str
) -> None:
    assert doctor.runs_as(capability, architectures) == how


def test_torch_without_the_cards_architecture_stops_a_run_and_ptx_alone_warns(
    machine: Machine, smi: Callable[..., None]
) -> None:
    smi(CARD | {"compute_cap": "12.0", "name": "NVIDIA GeForce RTX 5070 Ti"})
    check = doctor.torch_for_this_architecture
    missing = check(with_torch(machine, architectures=["sm_80", "sm_90"], cuda="12.4"))
    assert missing.verdict == "stops a run"
    assert "sm_120" in missing.found
    assert "torch 2.7 and CUDA 12.8" in missing.found
    assert "cu128" in missing.remedy
    assert check(with_torch(machine, architectures=["sm_90", "compute_90"])).verdict == "warning"
    assert check(with_torch(machine, architectures=["sm_120"])).verdict == "ok"


def test_a_card_that_newer_builds_left_out_is_sent_to_an_older_one(machine: Machine, smi: Callable[..., None]) -> None:
    smi(CARD | {"compute_cap": "6.1"})
    found = doctor.torch_for_this_architecture(with_torch(machine, architectures=["sm_75", "sm_120"]))
    assert (found.verdict, "cu126" in found.remedy) == ("stops a run", True)


@pytest.mark.parametrize(("cuda", "verdict"), [("11.8", "stops a run"), ("12.4", "warning"), ("13.0", "ok")])
def test_a_driver_older_than_torchs_cuda(machine: Machine, smi: Callable[..., None], cuda: str, verdict: str) -> None:
    smi(CARD, cuda=cuda)
    found = doctor.driver_new_enough(with_torch(machine))
    assert found.verdict == verdict
    assert cuda in found.found


@pytest.mark.parametrize(
    ("said", "verdict", "words"),
    [
        ("0 1 begun\n0 1 direct\n1 0 begun\n1 0 staged\n", "ok", "1 of them directly"),
        ("0 1 begun\n0 1 damaged\n1 0 begun\n1 0 direct\n", "stops a run", "0→1 arrives damaged"),
    ],
)
def test_copies_between_gpus(
    machine: Machine,
    smi: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    verdict: str,
    words: str,
) -> None:
    smi(*two())
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    monkeypatch.setattr(doctor, "_own_process", lambda *_: said)
    found = doctor.copies_between_gpus(with_torch(machine))
    assert (found.verdict, words in found.found) == (verdict, True), found


def test_a_copy_that_hangs_is_named_with_its_pair_and_the_remedy_once_taken_is_enough(
    machine: Machine, smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    smi(*two())
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    hanging = "print('0 1 begun\\n0 1 direct\\n1 0 begun', flush=True); import time; time.sleep(60)"
    # Time enough for Python to start on a busy machine.
    monkeypatch.setattr(doctor, "_own_process", lambda *_: doctor._run([sys.executable, "-c", hanging], 3))
    found = doctor.copies_between_gpus(with_torch(machine))
    assert found.verdict == "stops a run"
    assert "1→0 hangs" in found.found
    assert found.remedy == "export NCCL_P2P_DISABLE=1"
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    assert doctor.copies_between_gpus(machine).verdict == "ok"


def test_one_gpu_copies_to_no_other(machine: Machine, smi: Callable[..., None]) -> None:
    smi(CARD)
    assert doctor.copies_between_gpus(with_torch(machine)).verdict == "not applicable"


@pytest.mark.parametrize(
    ("part", "state", "verdict"),
    [("matmul", "measured", "ok"), ("matmul", "hung", "warning"), ("peer_copy", "wrong", "stops a run")],
)
def test_what_bench_found_is_remembered(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, part: str, state: Any, verdict: str
) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    assert doctor.measured_paths(machine).verdict == "not applicable"
    cards = [Card(i, "cpu", "CPU, 1 thread", f"cpu-{i}", 2**30, 1) for i in range(2)]
    monkeypatch.setattr(doctor, "find_cards", lambda: cards)
    file = measurements_file(machine.cache, *(cards if part == "peer_copy" else cards[:1]))
    keep_measurement(file, part, Measurement(state, {}, "given up after 60 s" if state != "measured" else ""))
    found = doctor.measured_paths(machine)
    assert found.verdict == verdict, found
    assert state == "measured" or "given up after 60 s" in found.found


# the machine


def test_small_shared_memory_warns() -> None:
    assert doctor.shared_memory_of(64 * 2**20).verdict == "warning"
    assert "64 MiB" in doctor.shared_memory_of(64 * 2**20).found
    assert doctor.shared_memory_of(2 * GiB).verdict == "ok"


@pytest.mark.parametrize(("free_bytes", "verdict"), [(4e8, "stops a run"), (4e9, "warning"), (6e9, "ok")])
def test_little_disk(free_bytes: float, verdict: str) -> None:
    found = doctor.disk_of(int(free_bytes), Path("runs"), "another folder: --runs DIR")
    assert found.verdict == verdict
    assert ("--runs" in found.remedy) == (verdict != "ok")


def test_a_real_disk_without_space_stops_a_run(machine: Machine, mount_disk: Callable[[str], Path]) -> None:
    assert doctor.disk_for_runs(Machine(mount_disk("2m") / "runs", machine.cache)).verdict == "stops a run"


def test_a_compile_cache_that_cannot_be_written_stops_a_run(machine: Machine, tmp_path: Path) -> None:
    assert doctor.compile_cache(machine).verdict == "ok"
    assert not machine.cache.exists(), "looking makes no folder"
    (tmp_path / "file").touch()
    found = doctor.compile_cache(Machine(machine.runs, tmp_path / "file"))
    assert found.verdict == "stops a run"
    assert "RIGSWEEP_CACHE" in found.remedy


def test_a_missing_compiler_warns(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert doctor.compiler(machine).verdict == "warning"
    (tmp_path / "g++").touch(mode=0o755)
    assert doctor.compiler(machine).verdict == "ok"


def test_a_ray_without_its_default_extra_stops_a_run(machine: Machine) -> None:
    assert doctor.ray_with_dashboard(machine).verdict == "ok"
    found = doctor.ray_extra(["ray", "no_such_module", "no_such_package.within"])
    assert found.verdict == "stops a run"
    assert "no no_such_module, no_such_package.within" in found.found


def test_the_modules_of_the_default_extra_are_those_that_ray_imports() -> None:
    spec = importlib.util.find_spec("ray")
    assert spec and spec.origin
    text = (Path(spec.origin).parent / "dashboard" / "optional_deps.py").read_text()
    assert all(f"import {name}" in text for name in doctor._RAY_DEFAULT)


def test_packages_that_do_not_meet_what_is_asked_for_are_named() -> None:
    demands = ["torch>=2.7", "ray[default,train]>=2.55", "numpy>=2.0", 'pytest>=8.4; extra == "test"']
    here = {"python": "3.10.1", "torch": "2.6.0+cu124", "ray": "2.60.0"}
    wrong = doctor.unmet(demands, ">=3.11,<3.14", here)
    assert [line.split(",")[0] for line in wrong] == ["Python 3.10.1", "torch 2.6.0+cu124", "no numpy"]
    assert not doctor.unmet(demands, ">=3.11", here | {"python": "3.11.2", "torch": "2.7.0+cu128", "numpy": "2.1"})


def test_the_versions_here_are_found_without_the_extras() -> None:
    found = doctor.versions(["torch>=2.7", "no-such-package>=1", 'pytest>=8; extra == "test"'])
    assert list(found) == ["python", "torch"]


def test_differing_versions_name_both_nodes() -> None:
    one, other = {"python": "3.11.7", "torch": "2.7.0", "ray": "2.60"}, {"python": "3.12.1", "torch": "2.7.0"}
    assert doctor.version_differences("head", one, "box", other) == [
        "python: 3.11.7 on head, 3.12.1 on box",
        "ray: 2.60 on head, none on box",
    ]
    assert doctor.version_differences("head", one, "box", one) == []


def test_few_open_files_warn(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    found = doctor.open_files(machine)
    assert (found.verdict, found.remedy) == ("warning", "ulimit -n 65536")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert doctor.open_files(machine).verdict == "ok"


def test_little_memory_warns() -> None:
    assert doctor.memory_of(3_000_000_000).verdict == "warning"
    assert doctor.memory_of(8_000_000_000).verdict == "ok"


# the cards in use, and what holds them back


@pytest.fixture
def nvml(smi: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """One card, and an NVML that tells of these processes on it."""

    def put(*, graphics: list[Any] = [], compute: list[Any] = [], used: int = 0) -> None:  # noqa: B006
        smi(CARD)
        fake = SimpleNamespace(
            nvmlInit=lambda: None,
            nvmlShutdown=lambda: None,
            nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
            nvmlDeviceGetGraphicsRunningProcesses=lambda _: graphics,
            nvmlDeviceGetComputeRunningProcesses=lambda _: compute,
            nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=used, total=24 * GiB),
        )
        monkeypatch.setitem(sys.modules, "pynvml", fake)

    return put


def process(bytes_: int | None, pid: int = 2**22 + 1) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=bytes_)


def test_a_card_that_another_process_uses(machine: Machine, nvml: Callable[..., None]) -> None:
    nvml(compute=[process(3 * GiB, os.getpid())])
    found = doctor.cards_used_by_others(machine)
    assert found.verdict == "warning"
    assert f"process {os.getpid()}" in found.found
    assert "3.0 GiB" in found.found


def test_an_empty_desktop_does_not_matter_and_a_large_one_does(machine: Machine, nvml: Callable[..., None]) -> None:
    nvml(graphics=[process(20 * 2**20)])
    found = doctor.cards_used_by_others(machine)
    assert (found.verdict, "one that cannot be seen" in found.found) == ("ok", True)
    nvml(graphics=[process(GiB)])
    assert doctor.cards_used_by_others(machine).verdict == "warning"


def test_memory_of_no_visible_process(machine: Machine, nvml: Callable[..., None]) -> None:
    nvml(compute=[process(4 * GiB)], used=4 * GiB + 400 * 2**20)
    assert doctor.memory_held_by_nobody(machine).verdict == "ok", "what the driver reserves"
    nvml(used=5 * GiB)
    found = doctor.memory_held_by_nobody(machine)
    assert (found.verdict, "5.0 GiB" in found.found) == ("warning", True)
    nvml(compute=[process(None)], used=5 * GiB)
    assert doctor.memory_held_by_nobody(machine).verdict == "ok", "whose size the driver does not tell"


def test_an_nvml_that_fails_is_a_finding(machine: Machine, nvml: Callable[..., None]) -> None:
    def fails() -> None:
        raise MachineError("Driver/library version mismatch")

    nvml()
    sys.modules["pynvml"].nvmlInit = fails  # type: ignore[attr-defined]
    (found,) = doctor.examine(machine, [doctor.cards_used_by_others])
    assert found.found == "could not be checked: MachineError: Driver/library version mismatch"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"power.limit": "250.00"}, "GPU 1: limited to 250 of 350 W"),
        ({"clocks_throttle_reasons.active": "0x0000000000000048"}, "GPU 1: slowed by the hardware's slowdown"),
        ({"ecc.errors.uncorrected.volatile.total": "3"}, "GPU 1: 3 memory errors"),
    ],
)
def test_a_card_that_is_held_back_warns(
    machine: Machine, smi: Callable[..., None], changed: dict[str, str], words: str
) -> None:
    smi(*two(**changed))
    found = doctor.power_and_clocks(machine)
    assert found.verdict == "warning"
    assert words in found.found
    assert "-i 1" in found.remedy


def test_cards_at_their_limits_are_fine_also_where_the_driver_uses_the_later_name(
    machine: Machine, smi: Callable[..., None]
) -> None:
    later = {key: value for key, value in CARD.items() if "throttle" not in key}
    smi(later | {"clocks_event_reasons.active": "0x0000000000000004"})
    found = doctor.power_and_clocks(machine)
    assert (found.verdict, found.found) == ("ok", "GPU 0: 350 of 350 W, up to 2100 MHz, persistence disabled")
    assert doctor.held_back("[N/A]") == []


# what earlier runs left


def test_the_ray_of_a_killed_sweep_is_found_and_that_of_a_running_one_is_not(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_place", lambda: tmp_path)
    folder = tmp_path / "rigsweep-left"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert doctor.processes_of_earlier_sweeps(machine).verdict == "ok"
    writes = f"log = open({str(folder / 'log')!r}, 'w'); print('ready', flush=True); input()"
    left = subprocess.Popen([sys.executable, "-c", writes], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert left.stdout and left.stdout.readline()
        found = doctor.processes_of_earlier_sweeps(machine)
    finally:
        left.communicate("\n")
    assert found.verdict == "warning"
    assert f"kill -9 {left.pid}; rm -r {folder}" in found.remedy


def begin_sweep(machine: Machine, *events: dict[str, Any], name: str = "probe") -> Path:
    folder = machine.runs / name
    folder.mkdir(parents=True)
    (folder / "sweep.yaml").write_text(SETTINGS)
    opened = {"event": "opened", "time": 1.0, "version": 1, "sweep": name, "trainable": "surface", "objective": {}}
    lines = [json.dumps(event) + "\n" for event in ({**opened}, *events)]
    (folder / "history.jsonl").write_text("".join(lines))
    return folder


def test_a_sweep_that_nobody_runs_is_found_unless_it_was_closed_or_runs(machine: Machine) -> None:
    folder = begin_sweep(machine)
    begin_sweep(machine, {"event": "closed", "time": 2.0, "state": "complete", "reason": ""}, name="done")
    found = sweeps_doctor.sweeps_left_open(machine)
    assert found.verdict == "warning"
    assert found.found.startswith("probe:")
    assert f"rigsweep sweep probe --resume --runs {machine.runs}" in found.remedy
    with (folder / "history.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweeps_doctor.sweeps_left_open(machine).verdict == "ok"


def test_mlflow_runs_left_running_are_found(machine: Machine) -> None:
    from rigsweep.sweeps.mlflow_store import Store

    assert sweeps_doctor.mlflow_runs_left_open(machine).verdict == "not applicable"
    folder = begin_sweep(machine)
    client = Store.of(machine.runs).open()
    run = client.create_run("0", tags={"rigsweep.sweep": "probe"})
    client.create_run("0")  # somebody else's
    found = sweeps_doctor.mlflow_runs_left_open(machine)
    assert (found.verdict, found.found) == ("warning", "runs that still say RUNNING: 1 of probe")
    assert "--resume" in found.remedy
    with (folder / "history.jsonl").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert sweeps_doctor.mlflow_runs_left_open(machine).verdict == "ok"
    gone = client.create_run("0", tags={"rigsweep.sweep": "gone"})
    assert "the folder is gone: gone" in sweeps_doctor.mlflow_runs_left_open(machine).remedy
    for one in (run, gone):
        client.set_terminated(one.info.run_id)
    assert sweeps_doctor.mlflow_runs_left_open(machine).verdict == "ok"


def test_fragmentation_that_ended_a_trial_asks_for_segments_that_grow(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert sweeps_doctor.fragmented_memory(machine).verdict == "ok"
    proposed = {"event": "proposed", "time": 2.0, "trial": 0, "group": 0, "seed": 0, "parameters": {}}
    ended = {"event": "ended", "time": 3.0, "trial": 0, "state": "out_of_memory", "reason": "cut", "seconds": 1.0}
    folder = begin_sweep(machine, proposed, ended | {"value": None, "rule": ""})
    assert sweeps_doctor.fragmented_memory(machine).verdict == "ok"
    (folder / "trials" / "0").mkdir(parents=True)
    said = "14.32 GiB is allocated by PyTorch, and 6.30 GiB is reserved by PyTorch but unallocated."
    (folder / "trials" / "0" / "log.txt").write_text(said)
    found = sweeps_doctor.fragmented_memory(machine)
    assert (found.verdict, "probe/0 ran out of memory with 6.3 GiB" in found.found) == ("warning", True)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    assert sweeps_doctor.fragmented_memory(machine).verdict == "ok"


# the command


def test_problems_come_first_with_their_remedy_and_the_rest_is_one_line() -> None:
    found = [
        Finding("disk", "ok", "79 GB free"),
        Finding("memory", "warning", "3.0 GB [free]", "use --cards 1"),
        Finding("driver", "not applicable", "no GPU"),
        Finding("torch", "stops a run", "none", "pip install torch"),
    ]
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
    console.print(sweeps_doctor.findings_table(found, everything=False))
    lines = [line.strip() for line in console.export_text().splitlines()]
    assert lines[0].startswith("stops a run")
    assert "→ pip install torch" in lines[1]
    assert "3.0 GB [free]" in lines[2]
    assert lines[-1] == "1 fine: disk; 1 not applicable (--all says why)"
    console.print(sweeps_doctor.findings_table(found, everything=True))
    assert "79 GB free" in console.export_text()


def test_the_command_exits_0_where_nothing_stops_a_run_and_prints_json(tmp_path: Path) -> None:
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "RIGSWEEP_CACHE": str(tmp_path / "cache")}
    answer = subprocess.run(
        [*COMMAND, "--json"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    told = json.loads(answer.stdout)
    assert told["stops_a_run"] is False
    assert {"name", "verdict", "found", "remedy"} == set(told["findings"][0])
    assert not (tmp_path / "runs").exists(), "looking leaves nothing behind"


def test_the_command_exits_1_where_something_stops_a_run_and_says_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "RIGSWEEP_CACHE": str(tmp_path / "file"), "COLUMNS": "200"}
    answer = subprocess.run([*COMMAND], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert answer.returncode == 1
    assert answer.stdout.startswith("stops a run  compile cache")
    assert "RIGSWEEP_CACHE" in answer.stdout
    assert not answer.stderr
