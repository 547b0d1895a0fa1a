"""`rigsweep doctor`: the checks of the machine and of what earlier sweeps left, and how a person is told."""

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster import doctor as machine_doctor
from ..cluster.doctor import Check, Finding, Machine, Verdict, not_applicable, ok, warning
from .files import WrongInput
from .folders import read_sweep, record_of
from .history import Trial, alone_with
from .mlflow_store import Store

if TYPE_CHECKING:
    from rich.console import RenderableType

# A piece of memory that PyTorch holds but could not use, from which fragmentation is worth a remedy.
_FRAGMENTED_GIB = 1.0
_STYLES: dict[Verdict, str] = {"stops a run": "bold red", "warning": "yellow", "ok": "green", "not applicable": "dim"}


def findings(runs: Path, cache: Path) -> list[Finding]:
    """What every check found."""
    return machine_doctor.examine(Machine(runs, cache), CHECKS)


def stops_a_run(found: list[Finding]) -> bool:
    """Whether a run would not start, or fail."""
    return any(finding.verdict == "stops a run" for finding in found)


def findings_table(found: list[Finding], *, everything: bool) -> "RenderableType":
    """Problems first, each with its remedy, then one line that names what is fine; or `everything`."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    order = list(_STYLES)
    shown = [one for one in found if everything or one.verdict in ("stops a run", "warning")]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for one in sorted(shown, key=lambda finding: order.index(finding.verdict)):
        style = _STYLES[one.verdict]
        # `Text`, as what was found may have square brackets.
        told = Text(one.found) + Text(f"\n→ {one.remedy}" if one.remedy else "", style="cyan")
        table.add_row(Text(one.verdict, style=style), Text(one.name), told)
    parts = [table] if shown else []
    return Group(*parts, *(Text(line, style="dim") for line in _the_rest(found, shown)))


def _the_rest(found: list[Finding], shown: list[Finding]) -> Iterator[str]:
    rest = [one for one in found if one not in shown]
    fine = [one.name for one in rest if one.verdict == "ok"]
    absent = [one.name for one in rest if one.verdict == "not applicable"]
    line = f"{len(fine)} fine: {', '.join(fine)}" if fine else ""
    if absent:
        line += f"{'; ' if line else ''}{len(absent)} not applicable (--all says why)"
    if line:
        yield line


def sweeps_left_open(machine: Machine) -> Finding:
    """Sweeps that say that they run, which no process does."""
    commands = {}
    for folder in _folders(machine.runs):
        record = record_of(folder)
        if record.opened and record.closed is None and _nobody_runs(folder):
            commands[folder.name] = _go_on(folder)
    if commands:
        found = f"{', '.join(commands)}: begun, never ended, and run by no process"
        return warning(found, f"go on with: {'; '.join(commands.values())}")
    return ok("none")


def mlflow_runs_left_open(machine: Machine) -> Finding:
    """MLflow's runs that still say RUNNING, of sweeps that no process runs."""
    store = Store.of(machine.runs)
    if store.file and not store.file.exists():
        return not_applicable("nothing has been tracked yet")
    left: dict[str, int] = {}
    for name in _running_in(store):
        folder = machine.runs / name
        if not (folder / "history.jsonl").exists() or _nobody_runs(folder):
            left[name] = left.get(name, 0) + 1
    if not left:
        return ok("none")
    there = [name for name in left if (machine.runs / name / "history.jsonl").exists()]
    remedies = [_go_on(machine.runs / name) for name in there]
    if gone := [name for name in left if name not in there]:
        remedies.append(f"end or delete them in MLflow, as the folder is gone: {', '.join(gone)}")
    found = ", ".join(f"{count} of {name}" for name, count in left.items())
    return warning(f"runs that still say RUNNING: {found}", "; ".join(remedies))


def _running_in(store: Store) -> Iterator[str]:
    """The sweep of each run that MLflow has as RUNNING."""
    client = store.open()
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    token = None
    while experiments:
        found = client.search_runs(experiments, "attributes.status = 'RUNNING'", page_token=token)
        yield from (run.data.tags["rigsweep.sweep"] for run in found if "rigsweep.sweep" in run.data.tags)
        if not (token := found.token):
            return


def placement_groups(_: Machine) -> Finding:
    """Places in Ray that nobody uses."""
    return not_applicable("a sweep's Ray has a token of its own and ends with it, and its placement groups too")


def fragmented_memory(machine: Machine) -> Finding:
    """Whether trials ran out of memory that PyTorch held in pieces, and segments may not grow."""
    told = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:True" in told.replace(" ", ""):
        return ok("expandable_segments is set")
    most, where = 0.0, ""
    for folder in _folders(machine.runs):
        for trial in record_of(folder).trials.values():
            if (gib := _unusable_gib(folder, trial)) > most:
                most, where = gib, f"{folder.name}/{trial.number}"
    if most >= _FRAGMENTED_GIB:
        found = f"{where} ran out of memory with {most:.1f} GiB in pieces that it could not use"
        return warning(found, "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    return ok("no trial ran out of memory by it")


def _unusable_gib(folder: Path, trial: Trial) -> float:
    """What PyTorch's error says: `1.24 GiB is reserved by PyTorch but unallocated`."""
    if trial.state != "out_of_memory":
        return 0.0
    log = folder / "trials" / str(trial.number) / "log.txt"
    # A reason is cut off after some hundred letters; the log has all of it.
    text = trial.reason + (log.read_text(encoding="utf-8", errors="replace") if log.exists() else "")
    said = re.findall(r"([\d.]+) (MiB|GiB) is reserved by PyTorch but unallocated", text)
    return max((float(number) / (1 if unit == "GiB" else 1024) for number, unit in said), default=0.0)


def _folders(runs: Path) -> list[Path]:
    return sorted(file.parent for file in runs.glob("*/history.jsonl"))


def _nobody_runs(folder: Path) -> bool:
    with alone_with(folder) as alone:
        return alone


def _go_on(folder: Path) -> str:
    """The command that goes on with a sweep, or why there is none."""
    try:
        command = "sweep" if read_sweep(folder).settings.search else "train"
    except WrongInput as error:
        return str(error)
    return shlex.join(["rigsweep", command, folder.name, "--resume", "--runs", str(folder.parent)])


CHECKS: list[Check] = [
    *machine_doctor.CHECKS,
    sweeps_left_open,
    mlflow_runs_left_open,
    placement_groups,
    fragmented_memory,
]
