"""The views of a sweep: `study.db`, `summary.json`, `report.html` and MLflow, made anew from what is the truth.

That is the history and the trials' folders. While a sweep runs, its own process keeps the views, but for the
report, which anybody may write: it then is one of the moment.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import report, summary
from .folders import read_sweep, record_of
from .history import Record, alone_with
from .mlflow_store import Store, run_ids
from .sweep import Sweep


@dataclass(frozen=True)
class Views:
    """What was written, and where."""

    running: bool
    """The sweep runs in another process: only the report was written."""
    files: dict[str, str]
    """Paths by name; MLflow's is its address."""
    behind: str | None
    """Why MLflow could not be brought up to date; None where it was."""


def rebuild(folder: Path) -> Views:
    """Every view of a sweep's folder, whatever of them has been lost. Raises `WrongInput`."""
    sweep = read_sweep(folder)
    with alone_with(folder) as alone:
        record = record_of(folder)
        if not alone:
            path = write_report(sweep, folder, record, told_of(sweep, folder, record, running=True))
            return Views(True, {"report": str(path)}, None)
        from .tracking import Tracker

        store = Store.of(folder.parent)
        tracker = Tracker(folder, store)
        tracker.catch_up()
        settle(record)
        write_files(sweep, folder, record)
    names = {"report": "report.html", "summary": "summary.json", "study": "study.db"}
    files = {name: str(folder / file) for name, file in names.items()} | {"mlflow": store.uri}
    return Views(False, files, tracker.behind)


def write_files(sweep: Sweep, folder: Path, record: Record) -> dict[str, Any]:
    """The views that need no server, of a sweep that no other process runs; returns the summary."""
    from .study_file import update_study

    update_study(sweep, folder)
    told = told_of(sweep, folder, record, running=False)
    summary.write(told, folder)
    write_report(sweep, folder, record, told)
    return told


def told_of(sweep: Sweep, folder: Path, record: Record, *, running: bool) -> dict[str, Any]:
    """The summary. A process that was killed could not say that it ended."""
    told = summary.summarise(sweep, record, run_ids(folder))
    if sweep.settings.from_ is not None:
        from .optimum import optimum

        told["sampling"] = optimum(sweep, record, folder)
    if sweep.grid:
        from .mixed import over_grid

        told["grid"] = over_grid(sweep, record, folder)
    if not running and told["state"] == "running":
        told["state"] = "interrupted"
    return told


def settle(record: Record) -> None:
    """Nothing runs any more, which a process that was killed could not say of its trials."""
    for trial in record.now_running():
        trial.state, trial.reason = "interrupted", "the sweep's process ended"


def write_report(sweep: Sweep, folder: Path, record: Record, told: dict[str, Any]) -> Path:
    """Write `report.html`."""
    return report.write(report.tell(sweep, record, folder, told), folder)
