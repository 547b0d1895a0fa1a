"""Run a sweep on this machine, from its folder to its summary."""

import logging
import os
import platform
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from ..cluster import disk
from ..cluster.cards import Card, find_cards
from ..cluster.errors import MachineError
from ..cluster.local_ray import LocalRay, local_ray
from ..cluster.locks import hold_cards
from ..cluster.node_settings import Node
from ..cluster.placement import Need
from ..cluster.speed import Speed, card_speed
from ..datasets.errors import DataError
from ..trainables import registry
from ..trainables.trial import Job
from . import folders, summary
from .controller import Controller
from .files import WrongInput
from .history import VERSION, History, Record, Trial, fold
from .mlflow_store import run_ids
from .money import Rates, rates_of, refuse_unmeasured, refuse_unpriced
from .needs import needs_of
from .start_from import earlier_trials
from .sweep import Sweep
from .weights import ROOM_BYTES, delete_losers, resolve_initial

_log = logging.getLogger(__name__)
_PATIENCE_SECONDS = 120.0
_ANSWER_SECONDS = 10.0
_TRACKING_SECONDS = {"complete": 600.0, "interrupted": 60.0}
"""How long MLflow is waited for at the end; what is resumed catches up then."""


class Show(Protocol):
    """Whoever shows a sweep to a person."""

    def note(self, text: str) -> None:
        """Something to know, once."""
        ...

    def preparing(self, stage: str, done: int, total: int) -> None:
        """Data is being prepared."""
        ...

    def event(self, kind: str, trial: Trial) -> None:
        """Something happened to a trial."""
        ...

    def refresh(self, controller: Controller, progress: dict[int, dict[str, Any]]) -> None:
        """Now and then, with what running trials say of themselves."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How running a sweep ended."""

    state: str  # "complete" or "interrupted"
    reason: str
    summary: dict[str, Any]


def run(
    sweep: Sweep,
    runs: Path,
    cache: Path,
    show: Show,
    *,
    cards: int | None,
    threads: int | None,
    node: Node | None = None,
    edited: dict[str, Any] | None = None,
) -> Outcome:
    """Run a sweep in its folder (made or resumed) to its end, a limit, Ctrl-C or a full disk. Raises `WrongInput`.

    The history says what there is to do: a new folder has none, a resumed one what is left. `edited` are the
    settings that a resumed training changes, each as [before, after]. `node` describes this machine.
    """
    node = node or Node()
    refuse_unpriced(sweep, node)
    folder = (runs / sweep.name).resolve()  # Ray's processes have another working directory
    try:
        return _run_in(folder, sweep, cache, show, cards, threads, node, edited)
    except (WrongInput, DataError, MachineError):
        raise
    except Exception as error:
        line = disk.full(error, folder)
        if line is None:
            raise
        history = folder / "history.jsonl"
        if not history.exists():
            raise MachineError(line) from error
        # What is on the disk is whole; what could not be written has not been counted.
        told = summary.summarise(sweep, fold(history), run_ids(folder))
        return Outcome("interrupted", line, told | {"state": "interrupted"})


def _run_in(
    folder: Path,
    sweep: Sweep,
    cache: Path,
    show: Show,
    cards: int | None,
    threads: int | None,
    node: Node,
    edited: dict[str, Any] | None,
) -> Outcome:
    told = _start_from(sweep, folder, show)
    (folder / "log").mkdir(parents=True, exist_ok=True)
    history = History(folder / "history.jsonl")
    try:
        if edited:
            history.append("edited", changed=edited)
        if nothing_left(sweep, history.record):
            return _finish(sweep, folder, history.record, "complete", "every trial is over")
        _check_disk(folder)
        found = find_cards(use=cards, threads=threads, node=node)
        rates = rates_of(sweep, node, found)
        refuse_unmeasured(sweep, rates, found)
        needs_of(sweep, found)  # refuses what has too few
        with (
            _chatter_to_log(folder),
            hold_cards(found, lambda card, who: show.note(f"waiting for {card.name}, held by {who}")),
        ):
            return _run_on(sweep, folder, cache, show, history, found, node, rates, told)
    finally:
        history.close()


def _start_from(sweep: Sweep, folder: Path, show: Show) -> list[dict[str, Any]]:
    """What the searcher is to know of earlier sweeps, unless the history has it already."""
    path = folder / "history.jsonl"
    if path.exists() and fold(path).opened:
        return []
    told, notes = earlier_trials(sweep, folder.parent)
    for note in notes:
        show.note(note)
    return told


def _run_on(
    sweep: Sweep,
    folder: Path,
    cache: Path,
    show: Show,
    history: History,
    cards: list[Card],
    node: Node,
    rates: Rates,
    told: list[dict[str, Any]],
) -> Outcome:
    started = time.monotonic()
    speed = card_speed(cards[0], cache)
    for parameters in sweep.space.corners_that_change("data"):
        registry.prepare(sweep.settings.trainable, sweep.training(parameters), cache, show.preparing)
    initial = resolve_initial(sweep.training({}).initial, folder.parent)
    folders.write_settings(sweep, folder)
    history.append("opened", **_opened(sweep, cards), rates=rates.as_dict(), **({"told": told} if told else {}))
    rungs = sweep.rungs(budgets(sweep, cache))
    controller = Controller(sweep, history, rungs, show.event)

    needs = needs_of(sweep, cards, controller.record)

    def job(number: int) -> Job:
        trial = controller.record.trials[number]
        return make_job(sweep, trial, folder, cache, cards[0], speed, rungs, initial, needs.largest)

    def need(number: int) -> Need:
        return needs.of(controller.record.trials[number])

    with local_ray(cards, folder / "log", environment=node.nccl) as local:
        import ray
        from ray.exceptions import RayActorError, RayError, RayTaskError

        from ..cluster.lanes import start_pool
        from .tracking import Store, TrackerActor
        from .tuning import run_tune

        pool = start_pool(
            "rigsweep.trainables.trial:run_trial",
            cards,
            cards_per_lane=needs.first,
            log=str(folder / "log"),
            hang_seconds=sweep.settings.hang,
        )
        tracker_class: Any = ray.remote(TrackerActor)
        # Whatever ends it, the next one finds out how far MLflow is.
        tracker = tracker_class.options(num_cpus=0, max_restarts=-1).remote(folder, Store.of(folder.parent))
        tune = _Thread(lambda: run_tune(controller, pool, len(cards), need, job, local.broken, folder / "log"))
        with _orderly_signals() as asked:
            tune.start()
            _follow(sweep, folder, controller, show, local, pool, tune, asked, started)
        state = "complete" if nothing_left(sweep, controller.record) else "interrupted"
        reason = controller.closing or "every trial is over"
        controller.close(state, reason)
        if not local.broken():
            show.note("writing the last results to MLflow")
            patience = _TRACKING_SECONDS[state]
            try:
                ray.get(tracker.finish.remote(patience), timeout=patience + 60)
            except RayError as error:
                _log.error("tracking: %s", error)
                cause = str(error.cause if isinstance(error, RayTaskError) else error).splitlines()[0]
                show.note(f"{cause}; `rigsweep ui {sweep.name}` tries again")
        if not local.ours:  # else all of it ends with its Ray
            with suppress(RayActorError):  # a pool that died has taken its lanes along
                ray.get(pool.close.remote())
            for actor in (pool, tracker):
                ray.kill(actor)
    return _finish(sweep, folder, controller.record, state, reason)


def nothing_left(sweep: Sweep, record: Record) -> bool:
    """Whether every trial of the sweep is over."""
    every = len(record.trials) >= sweep.settings.trials * sweep.settings.repeats
    return every and all(trial.over for trial in record.trials.values())


def _follow(
    sweep: Sweep,
    folder: Path,
    controller: Controller,
    show: Show,
    local: LocalRay,
    pool: Any,
    tune: "_Thread",
    asked: list[str],
    started: float,
) -> None:
    """While the trials run: show them, keep the summary, mind limits, signals, a full disk and a broken Ray."""
    import ray
    from ray.exceptions import GetTimeoutError, RayError

    drained: float | None = None
    written = 0.0
    while tune.is_alive():
        tune.join(0.2)
        limit, broken = controller.over_limit(started), local.broken()
        asked_to = next(iter(asked), f"reached {limit}" if limit else broken)
        controller.closing = controller.closing or asked_to
        try:
            if controller.closing and drained is None:
                drained = time.monotonic()
                show.note(f"{controller.closing}: running trials save and leave")
                ray.get(pool.drain.remote(), timeout=_ANSWER_SECONDS)
            progress: Any = ray.get(pool.progress.remote(), timeout=_ANSWER_SECONDS)
            for number, said in progress.items():
                controller.heard(number, said.get("usage"))
            show.refresh(controller, progress)
            for note in ray.get(pool.notes.remote(), timeout=_ANSWER_SECONDS):
                show.note(note)
        except RayError as error:
            if broken or not isinstance(error, GetTimeoutError):
                _log.error("the lanes do not answer: %s", error)
                controller.closing = broken or controller.closing or "the lane pool died"
                break  # nobody is there to save: the last checkpoints have to do
            # A busy machine: it is asked again.
        if drained is not None:
            patience = _ANSWER_SECONDS if broken else _PATIENCE_SECONDS
            if len(asked) > 1 or time.monotonic() - drained > patience:
                break  # the second Ctrl-C, or a trial that does not leave: its last checkpoint has to do
        if time.monotonic() - written > 1:
            _keep_views(sweep, controller, folder)
            written = time.monotonic()
    show.refresh(controller, {})
    if tune.error is not None and not local.broken():
        raise tune.error


def _keep_views(sweep: Sweep, controller: Controller, folder: Path) -> None:
    """Keep the summary, and the checkpoints under their quota; without space the sweep is to end."""
    try:
        summary.write(summary.summarise(sweep, controller.record), folder)
        delete_losers(sweep, controller.record, folder)
    except OSError as error:
        line = disk.full(error, folder)
        if line is None:
            raise
        controller.closing = controller.closing or line


def _finish(sweep: Sweep, folder: Path, record: Record, state: str, reason: str) -> Outcome:
    """Bring the projections that need no server up to date."""
    from . import views

    delete_losers(sweep, record, folder)
    return Outcome(state, reason, views.write_files(sweep, folder, record))


def make_job(
    sweep: Sweep,
    trial: Trial,
    folder: Path,
    cache: Path,
    card: Card,
    speed: Speed,
    rungs: tuple[float, ...],
    initial: str | None,
    workers: int = 1,
) -> Job:
    """What a lane needs to run a trial, or to go on with it."""
    training = sweep.training(trial.parameters, trial.number - trial.group * sweep.settings.repeats)
    precision = speed.precision(training.precision)
    return Job(
        number=trial.number,
        trainable=sweep.settings.trainable,
        training=training.model_dump(mode="json"),
        folder=str((folder / "trials" / str(trial.number)).resolve()),
        cache=str(cache.resolve()),
        metric=sweep.settings.objective.metric,
        goal=sweep.goal,
        precision="bf16" if precision == "bf16" else "fp32",
        kind="cuda" if card.kind == "cuda" else "cpu",
        threads=card.threads,
        memory_bytes=card.memory_bytes,
        memory_limited=card.limited,
        card_name=card.name,
        measured_flops_per_second=speed.flops_per_second(precision),
        peak_flops_per_second=card.peak_bf16_flops_per_second if precision == "bf16" else None,
        rungs=rungs,
        rungs_by=sweep.settings.early_stopping.by,
        recorded=tuple(trial.reports),
        initial=initial,
        scoring=sweep.settings.from_ is not None,
        grid=tuple(sweep.samplings),
        workers=workers,
        directory=str(Path.cwd()),
    )


def budgets(sweep: Sweep, cache: Path) -> list[float]:
    """Budgets of the sweep's trials, in the unit in which they are compared: of the ends of the space."""
    by, found = sweep.settings.early_stopping.by, set()
    if sweep.settings.early_stopping.rule == "none":
        return []
    for corner in sweep.space.corners_that_change("budget", "model", "data", "batch"):
        examples, flops = registry.budget(sweep.settings.trainable, sweep.training(corner), cache)
        found.add(examples if by == "examples" else flops)
    return sorted(found)


def _opened(sweep: Sweep, cards: list[Card]) -> dict[str, Any]:
    """The first event of a run of the sweep: what it is, and what it runs on."""
    packages = ("rigsweep", "torch", "ray", "optuna", "mlflow", "transformers", "numpy")
    return {
        "version": VERSION,
        "sweep": sweep.name,
        "trainable": sweep.settings.trainable,
        "question": sweep.settings.question,
        "objective": sweep.settings.objective.model_dump(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "git": _git(),
        "cards": [asdict(card) for card in cards],
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git() -> dict[str, Any] | None:
    """The commit of the folder that the sweep was started in, which is the user's own work."""
    git = shutil.which("git")
    if git is None:
        return None

    def ask(*words: str) -> str | None:
        answer = subprocess.run([git, *words], capture_output=True, text=True, timeout=10, check=False)  # noqa: S603
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = ask("rev-parse", "HEAD")
    return {"commit": commit, "dirty": bool(ask("status", "--porcelain"))} if commit else None


def _check_disk(folder: Path) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < ROOM_BYTES:
        raise WrongInput(f"{folder}: only {free_bytes / 2**20:.0f} MiB of disk are free; make room, then --resume")


class _Thread(threading.Thread):
    """A thread that keeps what it raised."""

    def __init__(self, work: Callable[[], None]):
        super().__init__(daemon=True)
        self._work = work
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by whoever follows the thread
            self.error = error


@contextmanager
def _orderly_signals() -> Iterator[list[str]]:
    """Ctrl-C, a closed terminal and a polite kill, as words in a list rather than exceptions anywhere."""
    asked: list[str] = []
    names = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the terminal closed"}
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    before = {number: signal.signal(number, lambda n, _: asked.append(names[signal.Signals(n)])) for number in names}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _chatter_to_log(folder: Path) -> Iterator[None]:
    """What libraries log or print goes to `log/sweep.log`; the terminal belongs to the table."""
    root = logging.getLogger()
    before = root.handlers[:]
    with (folder / "log" / "sweep.log").open("a", encoding="utf-8", buffering=1) as file:
        handler = logging.StreamHandler(file)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        root.handlers[:] = [handler]
        root.setLevel(logging.INFO)
        try:
            with redirect_stdout(file), redirect_stderr(file):
                yield
        finally:
            root.handlers[:] = before


def cache_folder(node: Node | None = None) -> Path:
    """Where prepared data, measured speeds and compiled code are kept.

    `RIGSWEEP_CACHE`, else as the node file says, else the user's cache.
    """
    told = os.environ.get("RIGSWEEP_CACHE") or (node.folders.cache if node else None)
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(told).expanduser() if told else base / "rigsweep"
