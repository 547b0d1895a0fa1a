"""`rigsweep simulate`: other rules of early stopping on a sweep's own curves, as a table or JSON."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from . import folders, saving
from .files import WrongInput
from .stoppers import STOPPERS
from .sweep import Sweep


def simulate_sweep(
    folder: Path,
    rules: Sequence[str],
    dials: Mapping[str, Sequence[str] | None],
    *,
    orders: int,
    slots: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Replay a sweep's complete trials under each rule and print what comes of it. Raises `WrongInput`."""
    sweep, record = folders.read_sweep(folder), folders.record_of(folder)
    curves = saving.complete_curves(sweep, record)
    asked = _asked(sweep, rules, dials)
    lanes = slots or max(1, len(record.opened.get("cards", [])))
    ordered = saving.orders(curves, orders, seed)
    with _progress(len(asked) * orders) as tick:
        savings = [saving.save(one, curves, ordered, slots=lanes, tick=tick) for one in asked]
    if as_json:
        told = {
            "sweep": sweep.name,
            "trials": len(record.trials),
            "complete": len(curves),
            "orders": orders,
            "slots": lanes,
            "seed": seed,
            "device_seconds_without_stopping": savings[0].full_seconds,
            "rules": [saving.as_dict(one) for one in savings],
        }
        print(json.dumps(told, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(
        f"{sweep.name}: {len(curves)} of {len(record.trials)} trials are complete; they are run again in {orders:,} "
        f"random order{'s' if orders > 1 else ''}, {lanes} at a time, the base first.\n"
    )
    console.print(saving.saving_table(savings, sweep, curves))
    if any(trial.state == "stopped" for trial in record.trials.values()):
        console.print(
            "\nThe trials that this sweep stopped are left out, as their ends are not known: with them, all rules save "
            "more.",
            style="dim",
        )


def _asked(sweep: Sweep, rules: Sequence[str], dials: Mapping[str, Sequence[str] | None]) -> list[Sweep]:
    """The sweep's own rule first, then those that were asked for, or the usual ones."""
    given = {name: [None if v == "none" else v for v in values] for name, values in dials.items() if values}
    if not rules and not given:
        return saving.usual_variants(sweep)
    try:
        found = [sweep, *saving.variants(sweep, rules or [r for r in STOPPERS if r != "none"], **given)]
    except WrongInput as error:
        name = str(error.keys[-1]) if error.keys else ""
        raise WrongInput(
            f"--{'stopper' if name == 'rule' else name}: {error.problem}" if name else str(error)
        ) from None
    return list({saving.describe(one): one for one in found}.values())


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, for what takes longer than a second."""
    progress = Progress(console=Console(stderr=True), transient=True)
    shown = progress.add_task("replaying", total=total)
    begun, is_terminal, done = time.monotonic(), progress.console.is_terminal, 0

    def tick() -> None:
        nonlocal done
        done += 1
        if is_terminal and time.monotonic() - begun > 1:
            progress.start()
            progress.update(shown, completed=done)

    try:
        yield tick
    finally:
        progress.stop()
