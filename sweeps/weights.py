"""The weights that trials leave: which are kept, and where a run's are found."""

import shutil
from pathlib import Path

from .files import WrongInput
from .history import Record
from .summary import best_of
from .sweep import Sweep
from .validation import nearest

ROOM_BYTES = 200 * 2**20
"""What is to be free on the disk of a sweep when it begins."""


def checkpoints_of(folder: Path, number: int) -> Path:
    """Where a trial's checkpoints are."""
    return folder / "trials" / str(number) / "checkpoints"


def delete_losers(sweep: Sweep, record: Record, folder: Path) -> None:
    """Keep a sweep's checkpoints under its quota, and room on their disk for what a sweep needs to begin.

    Those of losers go first, then of the worse complete ones.

    Never those of a trial that can go on, of the best, or of the base.
    """
    trials = list(record.trials.values())
    best = best_of(sweep, trials)
    kept = {0, best.group if best else 0}
    over = [trial for trial in trials if trial.over and trial.group not in kept]

    def standing(number: int) -> tuple[bool, float]:
        trial = record.trials[number]
        return trial.state == "complete", -sweep.sign * trial.value if trial.value is not None else float("-inf")

    sizes = {trial.number: _bytes(checkpoints_of(folder, trial.number)) for trial in trials}
    total = sum(sizes.values())
    allowed = min(sweep.settings.limits.disk_bytes, total + shutil.disk_usage(folder).free - ROOM_BYTES)
    for number in sorted((trial.number for trial in over), key=standing):
        if total <= allowed:
            return
        shutil.rmtree(checkpoints_of(folder, number), ignore_errors=True)
        total -= sizes[number]


def _bytes(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # a lane has just replaced this checkpoint by the next
            continue
    return total


def find_trial(run: str, runs: Path) -> tuple[Path, int]:
    """A RUN, given as `sweep/number`, `sweep` (its best) or an MLflow run id: its sweep's folder and number."""
    name, slash, number = run.rpartition("/")
    if slash and number.isdigit():
        if not (runs / name / "trials" / number).is_dir():
            there = [f"{path.parent.parent.name}/{path.name}" for path in runs.glob("*/trials/*")]
            raise WrongInput(f"{run}: no such trial in {runs}{nearest(run, there)}")
        return runs / name, int(number)
    if (runs / run / "history.jsonl").is_file():
        from .folders import read_sweep
        from .history import fold

        best = best_of(read_sweep(runs / run), list(fold(runs / run / "history.jsonl").trials.values()))
        if best is None:
            raise WrongInput(f"{run}: no trial is complete yet; name one as {run}/NUMBER")
        return runs / run, best.number
    if len(run) == 32 and all(c in "0123456789abcdef" for c in run):
        from .tracking import find_run

        sweep, trial = find_run(runs, run)
        return runs / sweep, trial
    raise WrongInput(f"{run}: write SWEEP/NUMBER, SWEEP for its best trial, or an MLflow run id")


def resolve_initial(initial: str | None, runs: Path) -> str | None:
    """The checkpoint folder that `initial` means. Raises `WrongInput`."""
    if initial is None:
        return None
    if (Path(initial).expanduser() / "manifest.json").is_file():
        return str(Path(initial).expanduser().resolve())
    return str(newest_checkpoint(*find_trial(initial, runs)).resolve())


def newest_checkpoint(folder: Path, number: int) -> Path:
    """The newest whole checkpoint of a trial. Raises `WrongInput` where there is none."""
    from ..trainables.checkpoints import latest
    from ..trainables.errors import NewerVersion

    try:
        path = latest(checkpoints_of(folder, number))
    except NewerVersion as error:
        raise WrongInput(str(error)) from error
    if path is None:
        raise WrongInput(f"{folder.name}/{number}: no checkpoint is left; run it again by `rigsweep train`")
    return path
