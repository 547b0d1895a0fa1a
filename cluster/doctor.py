"""What would stop a run, looked for before it starts: checks of the machine, each with its remedy.

A check is a function of a `Machine` that answers one `Finding`; `CHECKS` lists them, and `examine` runs them. No
check opens CUDA in this process: torch is asked in a process of its own, and the driver through nvidia-smi and NVML.
"""

import csv
import fcntl
import importlib.util
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import psutil

from .bench import CardBench, read_bench
from .cards import find_cards
from .errors import MachineError
from .local_ray import _LOCK, _PREFIX, _place

Verdict = Literal["ok", "warning", "stops a run", "not applicable"]

# Seconds after which a check is given up. Longer than the processes that it starts may take.
LIMIT_SECONDS = 180.0
_SMI_SECONDS, _TORCH_SECONDS, _PEERS_SECONDS = 30, 90, 120

_DISK_STOPS_BYTES, _DISK_WARNING_BYTES = 0.5e9, 5e9
_SHARED_MEMORY_BYTES = 2**30
_FREE_MEMORY_BYTES = 4e9
_OPEN_FILES = 4096
# A desktop without windows takes less of a card than this, and nothing shows in a run.
_DESKTOP_BYTES = 256 * 2**20
# Driver and firmware reserve some hundred MiB, which no process is named for.
_UNNAMED_BYTES = 2**30

# What `ray.dashboard.optional_deps` imports: without one of them Ray starts no dashboard process.
_RAY_DEFAULT = (
    "aiohttp",
    "aiohttp_cors",
    "grpc",
    "opencensus",
    "opentelemetry.exporter.prometheus",
    "opentelemetry.proto",
    "prometheus_client",
)

# NVML's `nvmlClocksEventReason…` bits that say that a card is held back by something other than its load.
_HELD_BACK = {
    0x2: "clocks that were set by hand",
    0x8: "the hardware's slowdown",
    0x20: "the driver's heat limit",
    0x40: "the hardware's heat limit",
    0x80: "the power supply's brake",
}


@dataclass(frozen=True)
class Finding:
    """What a check found, in words with numbers, and the remedy: a command to paste where there is one."""

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True)
class Torch:
    """What torch says of itself. `cuda` is the CUDA version that it was built for; None of a build for CPUs."""

    version: str = ""
    cuda: str | None = None
    architectures: list[str] = field(default_factory=list)
    """As `torch.cuda.get_arch_list()` names them: `sm_86`, and `compute_86` for PTX."""
    sees_gpu: bool = False
    error: str = ""
    """Why it could not be asked."""


@dataclass(frozen=True)
class Machine:
    """What the checks look at; what several of them ask for is asked once."""

    runs: Path
    cache: Path

    @cached_property
    def gpus(self) -> list[dict[str, str]]:
        """The GPUs that may be used: `index`, `uuid`, `name`. None where nvidia-smi is missing or fails."""
        return self._gpus[0]

    @cached_property
    def driver_error(self) -> str:
        """Why nvidia-smi, which is there, does not answer."""
        return self._gpus[1]

    @cached_property
    def _gpus(self) -> tuple[list[dict[str, str]], str]:
        allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
        if allowed == "" or not shutil.which("nvidia-smi"):
            return [], ""
        try:
            gpus = query_gpus("index", "uuid", "name")
        except MachineError as error:
            return [], str(error)
        names = set((allowed or "").split(","))
        return [gpu for gpu in gpus if allowed is None or {gpu["index"], gpu["uuid"]} & names], ""

    @cached_property
    def torch(self) -> Torch:
        """Asked in a process of its own, in which CUDA may be opened."""
        try:
            lines = _own_process("torch", _TORCH_SECONDS).splitlines()
            return Torch(**json.loads(lines[-1]))
        except (MachineError, ValueError, IndexError) as error:
            return Torch(error=str(error))

    def of_gpus(self, *fields: str) -> list[dict[str, str]]:
        """nvidia-smi's answer for the GPUs that may be used. Raises `MachineError`."""
        uuids = {gpu["uuid"] for gpu in self.gpus}
        return [gpu for gpu in query_gpus("index", "uuid", "name", *fields) if gpu["uuid"] in uuids]


Check = Callable[[Machine], Finding]


def ok(found: str) -> Finding:
    """Nothing to do."""
    return Finding("", "ok", found)


def warning(found: str, remedy: str = "") -> Finding:
    """A run would start, but go slower or end early."""
    return Finding("", "warning", found, remedy)


def stops(found: str, remedy: str) -> Finding:
    """A run would not start, or fail."""
    return Finding("", "stops a run", found, remedy)


def not_applicable(reason: str) -> Finding:
    """There is nothing to check here."""
    return Finding("", "not applicable", reason)


def examine(machine: Machine, checks: Iterable[Check], limit_seconds: float = LIMIT_SECONDS) -> list[Finding]:
    """Run the checks. One that raises, or does not answer in time, is a finding itself and never the end."""
    return [replace(_examine(machine, check, limit_seconds), name=name_of(check)) for check in checks]


def name_of(check: Check) -> str:
    """What the findings of a check are called."""
    return check.__name__.replace("_", " ").replace("gpus", "GPUs")


def _examine(machine: Machine, check: Check, limit_seconds: float) -> Finding:
    answers: list[Finding] = []

    def answer() -> None:
        try:
            answers.append(check(machine))
        except Exception as error:  # noqa: BLE001 - it becomes a finding
            words = str(error).strip().splitlines()
            answers.append(warning(f"could not be checked: {type(error).__name__}: {words[0] if words else ''}"))

    # A thread, since a call into a driver that hangs cannot be ended; it must not keep this process either.
    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    thread.join(limit_seconds)
    return answers[0] if answers else warning(f"could not be checked: no answer within {limit_seconds:g} s")


def query_gpus(*fields: str) -> list[dict[str, str]]:
    """`nvidia-smi --query-gpu` as one dict a GPU. Raises `MachineError` where it fails or hangs."""
    answer = _smi(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    rows = csv.reader(answer.splitlines(), skipinitialspace=True)
    return [dict(zip(fields, (word.strip() for word in row), strict=True)) for row in rows if row]


def _smi(*words: str) -> str:
    return _run(["nvidia-smi", *words], _SMI_SECONDS)


def _own_process(what: str, seconds: float) -> str:
    # -P keeps the working directory off the path, where a folder `datasets` could hide the library.
    return _run([sys.executable, "-P", "-m", "rigsweep.cluster.doctor", what], seconds)


class _Hangs(MachineError):
    """A process did not end in time; `said` is what it had printed."""

    def __init__(self, message: str, said: str):
        super().__init__(message)
        self.said = said


def _run(command: list[str], seconds: float) -> str:
    name = Path(command[0]).name
    # With a file rather than a pipe, what a process that hangs had said can be read.
    with tempfile.TemporaryFile("w+") as said:
        try:
            answer = subprocess.run(  # noqa: S603
                command, stdout=said, stderr=subprocess.PIPE, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired as error:
            said.seek(0)
            raise _Hangs(f"{name} did not answer within {seconds:g} s", said.read()) from error
        said.seek(0)
        output = said.read()
    if answer.returncode:
        lines = (answer.stderr.strip() or output.strip()).splitlines()
        raise MachineError(f"{name} failed: {lines[-1] if lines else f'exit code {answer.returncode}'}")
    return output


# torch and the driver


def driver(machine: Machine) -> Finding:
    """Whether nvidia-smi, where there is one, answers."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return not_applicable("CUDA_VISIBLE_DEVICES is empty: CPUs are used")
    if not shutil.which("nvidia-smi"):
        return not_applicable("no nvidia-smi: CPUs are used")
    if machine.driver_error:
        return stops(machine.driver_error, "reboot; if it stays, install the driver again: sudo ubuntu-drivers install")
    if not machine.gpus:
        return warning("nvidia-smi names no GPU that may be used: CPUs are used", "unset CUDA_VISIBLE_DEVICES")
    return ok(", ".join(gpu["name"] for gpu in machine.gpus))


def torch_imports(machine: Machine) -> Finding:
    """Whether torch can be imported."""
    if machine.torch.error:
        return stops(machine.torch.error, "pip install --force-reinstall torch")
    return ok(f"torch {machine.torch.version}")


def torch_for_gpus(machine: Machine) -> Finding:
    """Whether torch was built for GPUs, where there are some, and reaches them."""
    if missing := _without_gpu_or_torch(machine):
        return missing
    torch = machine.torch
    if not torch.cuda:
        found = f"{len(machine.gpus)} GPU(s), but torch {torch.version} is a build for CPUs only"
        return stops(found, _install_torch("cu128"))
    if not torch.sees_gpu:
        found = f"torch {torch.version} (CUDA {torch.cuda}) sees none of {len(machine.gpus)} GPU(s)"
        return stops(found, 'see why: python -c "import torch; torch.zeros(1).cuda()"')
    return ok(f"torch {torch.version}, CUDA {torch.cuda}")


def torch_for_this_architecture(machine: Machine) -> Finding:
    """Whether torch holds machine code for each GPU's compute capability, or only PTX, or neither."""
    if missing := _without_gpu_or_torch(machine):
        return missing
    torch = machine.torch
    if not torch.architectures:
        return not_applicable(f"torch {torch.version} names no architectures")
    by_capability = {gpu["compute_cap"]: gpu["name"] for gpu in machine.of_gpus("compute_cap")}
    runs = {told: runs_as(told, torch.architectures) for told in by_capability}
    built = f"torch {torch.version} (CUDA {torch.cuda}) is built for {' '.join(torch.architectures)}"
    for told, how in runs.items():
        if how == "not at all":
            newest = max(_number(name)[0] for name in torch.architectures)
            # Newer builds left older cards out, from the other end.
            remedy = _install_torch("cu128" if _number(f"sm_{_plain(told)}")[0] > newest else "cu126")
            needs = "; it needs torch 2.7 and CUDA 12.8, or later" if _plain(told) == "120" else ""
            return stops(f"{by_capability[told]} is sm_{_plain(told)}, and {built}{needs}", remedy)
    for told, how in runs.items():
        if how == "by PTX":
            found = (
                f"{by_capability[told]} is sm_{_plain(told)}, and {built}: it runs by compiling PTX, with a slow start"
            )
            return warning(found, _install_torch("cu128"))
    return ok(f"machine code for {', '.join(f'sm_{_plain(told)}' for told in runs)}")


def runs_as(capability: str, architectures: Iterable[str]) -> Literal["as it is", "by PTX", "not at all"]:
    """How code for these architectures runs on a card of compute capability `8.6`.

    Machine code runs within its major version from its minor version on (an `a` is for its own version alone), and
    PTX on everything later: CUDA C++ Programming Guide, "Binary Compatibility" and "PTX Compatibility".
    """
    major, minor = (int(word) for word in capability.split("."))
    by_ptx = False
    for name in architectures:
        (its_major, its_minor), own_alone = _number(name), name.endswith("a")
        if own_alone and (its_major, its_minor) != (major, minor):
            continue
        if name.startswith("sm_") and its_major == major and its_minor <= minor:
            return "as it is"
        by_ptx |= name.startswith("compute_") and (its_major, its_minor) <= (major, minor)
    return "by PTX" if by_ptx else "not at all"


def _number(architecture: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", architecture)
    return int(digits[:-1]), int(digits[-1])


def _plain(capability: str) -> str:
    return capability.replace(".", "")


def driver_new_enough(machine: Machine) -> Finding:
    """Whether the driver knows the CUDA that torch was built for."""
    if missing := _without_gpu_or_torch(machine):
        return missing
    if not machine.torch.cuda:
        return not_applicable("torch is a build for CPUs only")
    told = re.search(r"CUDA[A-Za-z ]*Version\s*:\s*(\d+)\.(\d+)", _smi())
    if not told:
        return not_applicable("nvidia-smi names no CUDA version")
    has = (int(told[1]), int(told[2]))
    needs = tuple(int(word) for word in machine.torch.cuda.split(".")[:2])
    found = (
        f"the driver knows CUDA {told[1]}.{told[2]}, torch {machine.torch.version} is built for {machine.torch.cuda}"
    )
    remedy = "a newer driver: sudo ubuntu-drivers install, then reboot; or a torch for an older CUDA"
    if has[0] < needs[0]:
        return stops(found, remedy)
    # Within a major version older drivers run newer code, but do not compile newer PTX.
    return warning(found, remedy) if has < needs else ok(found)


def _without_gpu_or_torch(machine: Machine) -> Finding | None:
    if not machine.gpus:
        return not_applicable("no GPU")
    return not_applicable("torch does not import") if machine.torch.error else None


def _install_torch(build: str) -> str:
    return f"pip install --upgrade --force-reinstall torch --index-url https://download.pytorch.org/whl/{build}"


def copies_between_gpus(machine: Machine) -> Finding:
    """Whether what one GPU sends to another arrives, and arrives whole."""
    if missing := _without_gpu_or_torch(machine):
        return missing
    if len(machine.gpus) < 2:
        return not_applicable("one GPU")
    if os.environ.get("NCCL_P2P_DISABLE") == "1":
        return ok("NCCL_P2P_DISABLE=1 is set: GPUs exchange through the machine's memory")
    if not machine.torch.sees_gpu:
        return not_applicable("torch sees no GPU")
    remedy = "export NCCL_P2P_DISABLE=1"
    try:
        pairs = _pairs(_own_process("peers", _PEERS_SECONDS))
    except _Hangs as error:
        hanging = [name for name, how in _pairs(error.said).items() if how == "begun"]
        if not hanging:
            raise
        return stops(f"a copy between GPUs {hanging[0]} hangs (given up after {_PEERS_SECONDS} s)", remedy)
    if damaged := [name for name, how in pairs.items() if how == "damaged"]:
        return stops(f"what is copied between GPUs {', '.join(damaged)} arrives damaged", remedy)
    direct = sum(how == "direct" for how in pairs.values())
    return ok(f"{len(pairs)} copies of 64 MiB arrived whole, {direct} of them directly")


def measured_paths(machine: Machine) -> Finding:
    """What `rigsweep bench` found of the cards and of the paths between them, where it was run."""
    known = read_bench(find_cards(), machine.cache)
    told = [
        (f"{name.replace('_', ' ')} of {' and '.join(f'card {card.index}' for card in group)}", measurement)
        for part in (*known.cards, *known.pairs)
        for group in ([part.cards[:1]] if isinstance(part, CardBench) else part.pairs)
        for name, measurement in part.measurements.items()
        if name != "all_reduce_without_p2p"
    ]
    if not told:
        return not_applicable("not measured yet: rigsweep bench")
    bad = [(name, measurement) for name, measurement in told if measurement.state != "measured"]
    if not bad:
        return ok(f"{len(told)} measurements of rigsweep bench went well")
    name, measurement = bad[0]
    found = f"{name}: {measurement.state} ({measurement.reason})"
    between = " and " in name and measurement.state in ("wrong", "hung")
    if between and os.environ.get("NCCL_P2P_DISABLE") != "1":
        return stops(found, "export NCCL_P2P_DISABLE=1, then: rigsweep bench")
    return warning(found, "rigsweep bench --again")


def _pairs(said: str) -> dict[str, str]:
    """What `try_copies` said last of each pair."""
    return {f"{one}→{other}": how for one, other, how in (line.split() for line in said.splitlines())}


# the machine


def shared_memory(_: Machine) -> Finding:
    """Whether `/dev/shm` has room for Ray's object store and NCCL."""
    place = Path("/dev/shm")  # noqa: S108 - where Linux has it
    if not place.is_dir():
        return not_applicable("no /dev/shm")
    return shared_memory_of(shutil.disk_usage(place).total)


def shared_memory_of(total_bytes: int) -> Finding:
    """The verdict on a `/dev/shm` of this size."""
    found = f"/dev/shm has {_size(total_bytes)}"  # noqa: S108 - where Linux has it
    if total_bytes < _SHARED_MEMORY_BYTES:
        remedy = "sudo mount -o remount,size=4G /dev/shm; in docker: docker run --shm-size=4g"
        return warning(f"{found}, less than 1.0 GiB", remedy)
    return ok(found)


def disk_for_runs(machine: Machine) -> Finding:
    """Free space where sweeps are kept."""
    return _disk(machine.runs, "another folder: --runs DIR")


def disk_for_cache(machine: Machine) -> Finding:
    """Free space where prepared data and compiled code are kept."""
    return _disk(machine.cache, "another folder: export RIGSWEEP_CACHE=DIR")


def _disk(folder: Path, remedy: str) -> Finding:
    return disk_of(shutil.disk_usage(_existing(folder)).free, folder, remedy)


def disk_of(free_bytes: int, folder: Path, remedy: str) -> Finding:
    """The verdict on so much free space."""
    found = f"{free_bytes / 1e9:.1f} GB free for {folder}"
    if free_bytes < _DISK_STOPS_BYTES:
        return stops(found, f"make room, or {remedy}")
    return warning(found, f"make room, or {remedy}") if free_bytes < _DISK_WARNING_BYTES else ok(found)


def compile_cache(machine: Machine) -> Finding:
    """Whether compiled code can be written."""
    folder = machine.cache / "inductor"
    place = _existing(folder)
    try:
        with tempfile.TemporaryFile(dir=place):
            return ok(f"{folder} can be written")
    except OSError as error:
        found = f"{folder} cannot be written: {place}: {error.strerror}"
        return stops(found, f"sudo chown -R $USER {place}, or another folder: export RIGSWEEP_CACHE=DIR")


def _existing(folder: Path) -> Path:
    """The folder, or the one in which it would be made."""
    place = folder.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    return place


def compiler(_: Machine) -> Finding:
    """Whether there is a C++ compiler, which `torch.compile` calls."""
    for name in filter(None, (os.environ.get("CXX"), "g++", "clang++", "c++")):
        if path := shutil.which(name):
            return ok(path)
    return warning("no C++ compiler: models cannot be compiled and train slower", "sudo apt install g++")


def ray_with_dashboard(_: Machine) -> Finding:
    """Whether Ray and what its dashboard process needs are installed."""
    return ray_extra(("ray", *_RAY_DEFAULT))


def ray_extra(modules: Iterable[str]) -> Finding:
    """The verdict where a Ray needs these modules."""
    if missing := [name for name in modules if not _installed(name)]:
        return stops(f"Ray's `default` extra is not whole: no {', '.join(missing)}", "pip install 'ray[default]'")
    return ok("Ray and its `default` extra")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of a package that it lies in
        return False


def package_versions(_: Machine) -> Finding:
    """Whether Python and the packages are those that rigsweep asks for."""
    try:
        demands = metadata.requires("rigsweep") or []
        python = metadata.metadata("rigsweep")["Requires-Python"] or ""
    except metadata.PackageNotFoundError:
        return not_applicable("rigsweep runs from a folder, and is not installed as a package")
    if wrong := unmet(demands, python, versions(demands)):
        return stops("; ".join(wrong), "pip install --upgrade rigsweep")
    return ok(f"Python {_python()} and {len(versions(demands)) - 1} packages")


def versions(demands: Iterable[str] | None = None) -> dict[str, str]:
    """The versions here of `python` and of each package that rigsweep asks for (where it is not installed, none)."""
    found = {"python": _python()}
    for demand in (metadata.requires("rigsweep") or []) if demands is None else demands:
        name = re.split(r"[^\w.-]", demand, maxsplit=1)[0]
        try:
            if "extra ==" not in demand:
                found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def unmet(demands: Iterable[str], python: str, here: Mapping[str, str]) -> list[str]:
    """Which requirements (`torch>=2.7`) these versions do not meet, in words; `python` is a range of versions."""
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    wrong = []
    if not SpecifierSet(python).contains(here["python"], prereleases=True):
        wrong.append(f"Python {here['python']}, but {python} is asked for")
    for demand in map(Requirement, demands):
        if demand.marker and not demand.marker.evaluate({"extra": ""}):
            continue
        version = here.get(demand.name)
        if version is None:
            wrong.append(f"no {demand.name}")
        elif not demand.specifier.contains(version, prereleases=True):
            wrong.append(f"{demand.name} {version}, but {demand.specifier} is asked for")
    return wrong


def version_differences(
    name: str, versions: Mapping[str, str], other_name: str, other_versions: Mapping[str, str]
) -> list[str]:
    """What two nodes have in different versions, in words that name both."""
    differing = sorted(key for key in {**versions, **other_versions} if versions.get(key) != other_versions.get(key))
    return [
        f"{key}: {versions.get(key, 'none')} on {name}, {other_versions.get(key, 'none')} on {other_name}"
        for key in differing
    ]


def _python() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def open_files(_: Machine) -> Finding:
    """Whether a process may open as many files as Ray needs."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < _OPEN_FILES:
        return warning(f"a process may open {limit} files, Ray wants {_OPEN_FILES}", "ulimit -n 65536")
    return ok("no limit" if limit == resource.RLIM_INFINITY else f"a process may open {limit} files")


def memory(_: Machine) -> Finding:
    """Whether enough memory is free: Ray ends workers where it runs short."""
    return memory_of(psutil.virtual_memory().available)


def memory_of(free_bytes: int) -> Finding:
    """The verdict on so much free memory."""
    found = f"{free_bytes / 1e9:.1f} GB of memory free"
    if free_bytes < _FREE_MEMORY_BYTES:
        return warning(f"{found}: Ray ends workers when it runs short", "end other programs, or use --cards 1")
    return ok(found)


# what uses the cards, and how they run


def cards_used_by_others(machine: Machine) -> Finding:
    """Processes on the GPUs: a desktop, or another program."""
    if not machine.gpus:
        return not_applicable("no GPU")
    told, weighs = [], False
    for use in _uses(machine):
        told += [process.words(use.index) for process in use.processes]
        weighs |= any(process.computes or process.bytes_ >= _DESKTOP_BYTES for process in use.processes)
    if weighs:
        remedy = "end them, or use other cards: export CUDA_VISIBLE_DEVICES=…; a sweep of ours may be one of them"
        return warning("; ".join(told), remedy)
    return ok("; ".join(told) or "nothing runs on them")


def memory_held_by_nobody(machine: Machine) -> Finding:
    """Memory of the GPUs that belongs to no process that can be seen."""
    if not machine.gpus:
        return not_applicable("no GPU")
    held = {}
    for use in _uses(machine):
        unnamed_bytes = use.used_bytes - sum(process.bytes_ for process in use.processes)
        if unnamed_bytes > _UNNAMED_BYTES and all(process.known for process in use.processes):
            held[use.index] = unnamed_bytes
    if held:
        found = "; ".join(f"GPU {index}: {_size(bytes_)} in use, of no process" for index, bytes_ in held.items())
        index = next(iter(held))
        return warning(found, f"another container's, or left behind: sudo fuser -v /dev/nvidia{index} names it")
    return ok("none")


@dataclass(frozen=True)
class _Process:
    pid: int
    name: str
    bytes_: int
    known: bool
    """Whether the driver tells how much memory it has."""
    computes: bool

    def words(self, index: int) -> str:
        return f"GPU {index}: {self.name} (process {self.pid}) {_size(self.bytes_) if self.known else ''}".rstrip()


@dataclass(frozen=True)
class _Use:
    index: int
    used_bytes: int
    processes: list[_Process]


def _uses(machine: Machine) -> list[_Use]:
    """What NVML tells of the GPUs."""
    import pynvml

    pynvml.nvmlInit()
    try:
        return [_use(pynvml, gpu) for gpu in machine.gpus]
    finally:
        pynvml.nvmlShutdown()


def _use(nvml: Any, gpu: dict[str, str]) -> _Use:
    card = nvml.nvmlDeviceGetHandleByUUID(gpu["uuid"])
    found: dict[int, _Process] = {}
    # A process that draws and computes is in both lists.
    for processes, computes in (
        (nvml.nvmlDeviceGetGraphicsRunningProcesses(card), False),
        (nvml.nvmlDeviceGetComputeRunningProcesses(card), True),
    ):
        for told in processes:
            bytes_ = told.usedGpuMemory
            found[told.pid] = _Process(told.pid, _process_name(told.pid), bytes_ or 0, bytes_ is not None, computes)
    return _Use(int(gpu["index"]), int(nvml.nvmlDeviceGetMemoryInfo(card).used), list(found.values()))


def _process_name(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:
        return "one that cannot be seen from here"


def power_and_clocks(machine: Machine) -> Finding:
    """Whether the GPUs are held back by a power limit, heat or clocks, or have counted memory errors."""
    if not machine.gpus:
        return not_applicable("no GPU")
    troubles, remedies, fine = [], [], []
    limits = machine.of_gpus("power.limit", "power.default_limit", "clocks.max.sm", "persistence_mode")
    reasons = {gpu["uuid"]: gpu["clocks_throttle_reasons.active"] for gpu in _throttling(machine)}
    errors = {
        gpu["uuid"]: gpu["ecc.errors.uncorrected.volatile.total"]
        for gpu in machine.of_gpus("ecc.errors.uncorrected.volatile.total")
    }
    for gpu in limits:
        index, name = gpu["index"], f"GPU {gpu['index']}"
        has, due = _watts(gpu["power.limit"]), _watts(gpu["power.default_limit"])
        if has and due and has < 0.9 * due:
            troubles.append(f"{name}: limited to {has:.0f} of {due:.0f} W")
            remedies.append(f"unless it is meant: sudo nvidia-smi -i {index} -pl {due:.0f}")
        if causes := held_back(reasons.get(gpu["uuid"], "")):
            troubles.append(f"{name}: slowed by {', '.join(causes)}")
            remedies.append(f"look at heat and cables: nvidia-smi -i {index} -q -d PERFORMANCE,TEMPERATURE,CLOCK")
        if (count := errors[gpu["uuid"]]).isdigit() and int(count):
            troubles.append(f"{name}: {count} memory errors that could not be corrected")
            remedies.append(f"sudo nvidia-smi -i {index} -r; if they come again, the card is broken")
        watts = f"{has:.0f} of {due:.0f} W" if has and due else "an unknown power limit"
        persists = gpu["persistence_mode"].lower()
        fine.append(f"{name}: {watts}, up to {gpu['clocks.max.sm']} MHz, persistence {persists}")
    return warning("; ".join(troubles), "; ".join(remedies)) if troubles else ok("; ".join(fine))


def _throttling(machine: Machine) -> list[dict[str, str]]:
    field_ = "clocks_throttle_reasons.active"
    try:
        return machine.of_gpus(field_)
    except MachineError:  # later drivers know it by another name only
        return [
            gpu | {field_: gpu["clocks_event_reasons.active"]} for gpu in machine.of_gpus("clocks_event_reasons.active")
        ]


def held_back(mask: str) -> list[str]:
    """The causes in nvidia-smi's mask of throttle reasons, `0x0000000000000008`, that load alone does not explain."""
    try:
        bits = int(mask, 16)
    except ValueError:  # "[N/A]" of cards that do not tell
        return []
    return [cause for bit, cause in _HELD_BACK.items() if bits & bit]


def _watts(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # "[N/A]"
        return None


# what earlier runs left


def processes_of_earlier_sweeps(_: Machine) -> Finding:
    """Rays of sweeps whose process was killed."""
    left = {folder: _writing_to(folder) for folder in _abandoned(_place())}
    if not left:
        return ok("none")
    processes = [process for found in left.values() for process in found]
    found = f"{len(left)} Ray folder(s) of killed sweeps, and {len(processes)} process(es)"
    kill = f"kill -9 {' '.join(str(process.pid) for process in processes)}; " if processes else ""
    return warning(found, f"the next sweep clears up; or now: {kill}rm -r {' '.join(map(str, left))}")


def _abandoned(place: Path) -> list[Path]:
    """Temporary folders of our Rays that no process holds."""
    found = []
    for lock in sorted(place.glob(f"{_PREFIX}*/{_LOCK}")):
        try:
            if lock.stat().st_uid != os.getuid():
                continue
            with lock.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.append(lock.parent)
        except (BlockingIOError, FileNotFoundError):  # its sweep runs, or has ended meanwhile
            continue
    return found


def _writing_to(folder: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if any(file.mode != "r" and folder in Path(file.path).parents for file in process.open_files()):
                found.append(process)
        except psutil.Error:  # it has gone, or is another user's
            continue
    return found


def _size(bytes_: float) -> str:
    return f"{bytes_ / 2**30:.1f} GiB" if bytes_ >= 2**30 else f"{bytes_ / 2**20:.0f} MiB"


CHECKS: list[Check] = [
    driver,
    torch_imports,
    torch_for_gpus,
    torch_for_this_architecture,
    driver_new_enough,
    copies_between_gpus,
    measured_paths,
    shared_memory,
    disk_for_runs,
    disk_for_cache,
    compile_cache,
    compiler,
    ray_with_dashboard,
    package_versions,
    open_files,
    memory,
    cards_used_by_others,
    memory_held_by_nobody,
    power_and_clocks,
    processes_of_earlier_sweeps,
]


# in processes of their own


def describe_torch() -> dict[str, Any]:
    """The fields of `Torch`."""
    import torch

    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        # Empty where torch sees no GPU.
        "architectures": torch.cuda.get_arch_list() if torch.version.cuda else [],
        "sees_gpu": torch.cuda.is_available(),
    }


def try_copies() -> None:
    """Copy 64 MiB between every two GPUs and compare; print `FROM TO begun`, then how it went."""
    import itertools

    import torch

    for one, other in itertools.permutations(range(torch.cuda.device_count()), 2):
        print(one, other, "begun", flush=True)
        sent = torch.randint(2**31 - 1, (16 * 2**20,), dtype=torch.int32, device=f"cuda:{one}")
        received = sent.to(f"cuda:{other}")
        torch.cuda.synchronize(other)
        whole = torch.equal(sent.cpu(), received.cpu())
        direct = torch.cuda.can_device_access_peer(one, other)
        print(one, other, ("direct" if direct else "staged") if whole else "damaged", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        print(json.dumps(describe_torch()))
    else:
        try_copies()
