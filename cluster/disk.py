"""A disk without space: how it is known, and what is said of it. It is the machine's fault, not that of any code."""

import errno
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT)
# safetensors, SQLite and `shutil.copytree` raise errors of their own, which have only words.
_WORDS = ("No space left on device", "Disk quota exceeded", "database or disk is full")


def full(error: BaseException, place: Path) -> str | None:
    """One line that names the disk, where an error (or one that it came of) is that a disk is full; else None.

    `place` is what was written to, if the error does not say.
    """
    seen: BaseException | None = error
    while seen is not None:
        if getattr(seen, "errno", None) in _FULL or any(words in str(seen) for words in _WORDS):
            name = getattr(seen, "filename", None)
            return f"no space left on {_mount(Path(name) if isinstance(name, str) else place)}: make room first"
        seen = seen.__cause__ or seen.__context__
    return None


def _mount(path: Path) -> Path:
    """Where the disk is mounted on which a path lies, or would lie."""
    place = path.absolute()
    while not os.path.ismount(place) and place != place.parent:
        place = place.parent
    return place
