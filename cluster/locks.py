"""One lock file a card, so that two sweeps on one machine take turns."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .cards import Card


def lock_folder() -> Path:
    """Where the lock files are: one place for the machine and user, whatever folder a sweep runs in."""
    folder = Path(os.environ.get("RIGSWEEP_LOCKS") or Path(tempfile.gettempdir()) / f"rigsweep-locks-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


@contextmanager
def hold_cards(cards: list[Card], waiting: Callable[[Card, str], None]):
    """Hold the cards' locks; the kernel releases them with the process, however it ends.

    Cards are locked in the order of their identity, so that two sweeps cannot wait for each other. Where one
    is taken, `waiting(card, holder)` is called once and the call blocks until it is free.
    """
    with ExitStack() as held:
        for card in sorted(cards, key=lambda card: card.identity):
            file = held.enter_context((lock_folder() / f"{card.identity}.lock").open("a+"))
            told = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not told:
                        file.seek(0)
                        waiting(card, file.read().strip() or "another sweep")
                        told = True
                    time.sleep(0.5)
            file.seek(0)
            file.truncate()
            file.write(f"process {os.getpid()}")
            file.flush()
        yield
