"""A folder that is made once, whole or not at all, although many processes ask for it."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from .errors import DataError

AnyManifest = TypeVar("AnyManifest", bound=BaseModel)


def make_once(folder: Path, fill: Callable[[Path], None]) -> bool:
    """Make `folder` by `fill(temporary folder)`, unless it is there; True where this call made it.

    Other processes that want it wait meanwhile. It appears by a rename, after its files are on the disk, so
    a process killed midway leaves nothing that could be mistaken for it; what such a process does leave is
    removed by the next call for any folder beside it. A full disk is a DataError.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder.parent)
        with _locked(folder):
            if folder.exists():
                return False
            _make(folder, fill)
            return True
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"{folder.parent}: the disk is full; free some space or put the cache on another disk"
            ) from error
        if error.errno in (errno.EACCES, errno.EROFS, errno.EPERM, errno.EEXIST, errno.ENOTDIR):
            raise DataError(f"{folder.parent}: cannot be written ({error.strerror}); choose another cache") from error
        raise


def _make(folder: Path, fill: Callable[[Path], None]) -> None:
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        fill(partial)
        for path in (*partial.iterdir(), partial):
            flush(path)
        partial.rename(folder)
        flush(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # nothing is there after the rename


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


@contextmanager
def _locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Hold the lock of `folder`, which the system releases with the process; BlockingIOError without `wait`.

    The lock file stays: removing it would let a process that waits on it and one that comes later both in.
    """
    with folder.with_name(f".{folder.name}.lock").open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield


def _remove_leftovers(cache: Path) -> None:
    for partial in cache.glob(".*.partial"):
        try:
            with _locked(partial.with_name(partial.name[1:].removesuffix(".partial")), wait=False):
                shutil.rmtree(partial, ignore_errors=True)
        except BlockingIOError:  # its maker is alive
            continue


def flush(path: Path) -> None:
    """Wait until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal, read in bounded memory."""
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def read_manifest(folder: Path, model: type[AnyManifest], newest: int) -> AnyManifest:
    """The manifest of a prepared folder; DataError where it is missing, damaged or of a format after `newest`."""
    path = folder / "manifest.json"
    try:
        content = cast(Any, json.loads(path.read_text(encoding="utf-8")))
        written = content.get("format") if isinstance(content, dict) else None
        if isinstance(written, int) and written > newest:
            raise DataError(
                f"{path}: was made by a newer version (format {written}, this one reads {newest}); upgrade, "
                f"or delete {folder} and it is made again"
            )
        return model.model_validate(content)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); prepare the data again") from error
    except ValueError as error:
        raise damaged(path) from error


def damaged(path: Path) -> DataError:
    """The error that names a damaged file of a prepared folder and what to do."""
    return DataError(f"{path}: is damaged; delete {path.parent} and it is made again")
