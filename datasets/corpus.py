"""Which files a text corpus is. Each is a *source*, which `readers.py` reads."""

import difflib
import glob
import os
import platform
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub as hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from .errors import DataError, NoCorpus

Kind = Literal["text", "code", "stdlib", "jsonl", "parquet"]

KINDS: dict[str, Kind] = {
    ".txt": "text",
    ".md": "text",
    ".py": "code",
    ".jsonl": "jsonl",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
READABLE = f"{' '.join(KINDS)}, also with {' or '.join(COMPRESSIONS)}"

STDLIB = "python-stdlib"
# Tests, and what is not the standard library or not there with every Python.
NOT_STDLIB = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Source:
    """One file of a corpus."""

    path: Path
    name: str
    """What the fingerprint and messages call it: the path, or for the standard library the relative one."""
    kind: Kind
    """How it is read."""
    compression: str | None = None
    """What pyarrow calls how it is packed."""

    @property
    def is_documents(self) -> bool:
        """Whether its pieces are documents of their own, rather than parts of one text."""
        return self.kind in ("jsonl", "parquet")

    def identity(self) -> list[str | int]:
        """What changes when the file does; the same on every machine for the standard library."""
        stat = self.path.stat()  # a hash of the content would read a large corpus at every start
        if self.kind == "stdlib":
            return [f"python {platform.python_version()}", self.name, stat.st_size]
        return [str(self.path.absolute()), stat.st_size, stat.st_mtime_ns]


def resolve(corpus: str | tuple[str, ...]) -> list[Source]:
    """The files of a corpus, each once, in an order that depends on their names only."""
    names = (corpus,) if isinstance(corpus, str) else corpus
    sources = {source.path.absolute(): source for name in names for source in _resolve_one(name)}
    return list(sources.values())


def _resolve_one(name: str) -> list[Source]:
    """The files of one name: a file that exists is that file, even where its name looks like a glob."""
    if name == STDLIB:
        return _standard_library()
    if name.startswith("hf://"):
        return _from_hub(name)
    path = Path(name).expanduser()
    if path.is_file():
        source = _source(path)
        if source is None:
            raise DataError(f"{path}: unknown suffix; give a file with one of {READABLE}")
        return [source]
    if path.is_dir():
        found = walk(path)
    elif glob.has_magic(name):
        matches = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob takes no absolute pattern
        found = [Path(match) for match in sorted(matches)]
    else:
        raise NoCorpus(f"corpus {name}: no such file or folder{nearest(path, STDLIB)}")
    # In a folder or glob other files may lie beside the text; only one that was named must be readable.
    sources = [source for path in found if path.is_file() and (source := _source(path))]
    if not sources:
        raise NoCorpus(f"corpus {name}: no file to read; give a folder or glob with {READABLE}")
    return sources


def _source(path: Path, name: str | None = None) -> Source | None:
    """The source at a path by its suffix, or None where that is not one we read."""
    compression = COMPRESSIONS.get(path.suffix.lower())
    plain = path.with_suffix("") if compression else path
    kind = KINDS.get(plain.suffix.lower())
    return Source(path, name or str(path), kind, compression) if kind else None


def walk(folder: Path) -> list[Path]:
    """The files below a folder, sorted; hidden ones (.git, .venv) are not anyone's corpus."""

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}); change its permissions") from error

    found: list[Path] = []
    for parent, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in files if not name.startswith(".")]
    return sorted(found)


def nearest(path: Path, bundled: str) -> str:
    """` (did you mean ...?)` with the name beside `path`, or of what is bundled, that is spelt most like it."""
    parent = path.parent
    beside = [bundled] if parent == Path() else []
    if parent.is_dir():
        beside += [entry.name for entry in parent.iterdir()]
    close = difflib.get_close_matches(path.name, beside, n=1)
    return f" (did you mean {parent / close[0]}?)" if close else "; check the path"


def _standard_library() -> list[Source]:
    """The running interpreter's own modules: a corpus that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    sources: list[Source] = []
    for path in walk(root):
        relative = path.relative_to(root)
        if path.suffix == ".py" and NOT_STDLIB.isdisjoint(relative.parts):
            sources.append(Source(path, relative.as_posix(), "stdlib"))
    return sources


def _from_hub(name: str) -> list[Source]:
    """Files of a Hub dataset."""
    folder, pattern = download(name, "corpus")
    matches = sorted(folder.glob(pattern))
    sources = [source for match in matches if (source := _source(match, f"{name}: {match.name}"))]
    if not sources:
        raise NoCorpus(f"corpus {name}: no file to read matches; give a glob with {READABLE}")
    return sources


def download(name: str, what: str) -> tuple[Path, str]:
    """Where the files of a Hub dataset are, and the glob that finds them there.

    They are downloaded to the Hub's own cache, or found there when offline; messages call the name `what`.
    """
    # Both names are checked, for they become part of a path; a glob must not leave its dataset.
    found = re.fullmatch(r"hf://datasets/([\w.-]+/[\w.-]+)(?:@([\w.~-]+))?/(.+)", name)
    if not found or ".." in found[3].split("/"):
        raise DataError(f"{what} {name}: write hf://datasets/<owner>/<name>/<glob>, such as .../data/*.parquet")
    repository, revision, pattern = found.groups()
    instead = f"download it elsewhere and give the local folder as {what}"
    try:
        folder = hub.snapshot_download(
            repository,
            repo_type="dataset",
            revision=revision,
            # To the Hub, unlike to glob, `**/` is never empty.
            allow_patterns=[pattern, pattern.replace("**/", "")],
        )
    except LocalEntryNotFoundError as error:
        why = "offline mode is on" if hub.constants.HF_HUB_OFFLINE else "the Hub cannot be reached"
        raise NoCorpus(f"{what} {name}: {why} and it is not in the Hub's cache; {instead}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise NoCorpus(f"{what} {name}: {first_line(error)}; {instead}") from error
    return Path(folder), pattern


def first_line(error: Exception) -> str:
    """What an error of a library says, short enough to quote."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].strip().rstrip(".;:")
