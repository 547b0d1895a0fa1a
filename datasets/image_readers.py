"""The images of a set as they lie in its files: bytes that are not decoded yet, with labels and captions."""

import glob
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from .corpus import download, first_line, nearest, walk
from .decoding import SUFFIXES
from .errors import DataError, NoCorpus
from .settings import ImageData

Kind = Literal["digits", "image", "metadata", "parquet", "tar"]

DIGITS = "digits"
METADATA = "metadata.jsonl"
READABLE = f"images ({' '.join(SUFFIXES)}), .parquet or .tar"
USUAL = {"image": ("image", "img"), "label": ("label", "labels"), "caption": ("text", "caption")}
"""What columns and keys are called where the settings do not say."""
BATCH_ROWS = 100


@dataclass(frozen=True)
class Example:
    """An image of a set, with what is told about it; nothing of this is checked yet but the caption's type."""

    name: str
    """Its file, and its place in a file of many: what messages call it."""
    content: bytes | np.ndarray
    """The bytes of an image file, or uint8 pixels of shape (height, width)."""
    label: Any = None
    caption: str | None = None
    fault: str = ""
    """Why there is no whole content."""


@dataclass(frozen=True)
class ImageFiles:
    """The files of a set of images, all of one kind."""

    source: str
    """As the settings name it."""
    kind: Kind
    root: Path
    """The folder that was named; names and classes begin below it."""
    files: tuple[Path, ...]

    def identity(self) -> list[list[str | int]]:
        """What changes when a file does, or where names and classes begin."""
        identities: list[list[str | int]] = [[self.kind, str(self.root.absolute())]]
        for path in self.files:
            stat = path.stat()
            identities.append([str(path.absolute()), stat.st_size, stat.st_mtime_ns])
        return identities

    def total_bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.files)


def resolve(source: str) -> ImageFiles:
    """The files that a source names, in an order that depends on their names only; DataError where there are none."""
    if source == DIGITS:
        return ImageFiles(source, "digits", Path(), ())
    root, found = _found(source)
    kinds: dict[Path, Kind] = {path: kind for path in found if path.is_file() and (kind := _kind(path))}
    if root / METADATA in found:
        images = [path for path, kind in kinds.items() if kind == "image"]
        return ImageFiles(source, "metadata", root, (root / METADATA, *images))
    if not kinds:
        raise DataError(f"source {source}: no images there; give a folder, file or glob with {READABLE}")
    if len(set(kinds.values())) > 1:
        (first, kind), *others = kinds.items()
        other = next(path for path, of in others if of != kind)
        raise DataError(
            f"source {source}: holds {first.name} and {other.name}, of different kinds; name one kind by a glob, "
            f"such as {root}/**/*{first.suffix}"
        )
    return ImageFiles(source, next(iter(kinds.values())), root, tuple(kinds))


def _found(source: str) -> tuple[Path, list[Path]]:
    """The folder that was named and its files, sorted; without hidden ones."""
    folder, pattern = Path(), source
    if source.startswith("hf://"):
        try:
            folder, pattern = download(source, "source")
        except NoCorpus as error:  # its remedy, another corpus, is for text
            raise DataError(str(error)) from error
    path = folder / Path(pattern).expanduser()
    if path.is_file():
        return (path.parent, walk(path.parent)) if path.name == METADATA else (path.parent, [path])
    if path.is_dir():
        return path, walk(path)
    if not glob.has_magic(pattern):
        raise DataError(f"source {source}: no such file or folder{nearest(path, DIGITS)}")
    parts = Path(pattern).expanduser().parts
    plain = list(itertools.takewhile(lambda part: not glob.has_magic(part), parts))
    root = folder.joinpath(*plain)
    matches = sorted(root.glob(str(Path(*parts[len(plain) :]))))
    return root, [path for path in matches if not any(part[0] == "." for part in path.relative_to(root).parts)]


def _kind(path: Path) -> Kind | None:
    suffix = path.suffix.lower()
    if suffix in SUFFIXES:
        return "image"
    kinds: dict[str, Kind] = {".parquet": "parquet", ".tar": "tar"}
    return kinds.get(suffix)


def read(files: ImageFiles, data: ImageData) -> Iterator[Example]:
    """The images of a set, in order. One that cannot be read has a `fault`; a file of many that cannot, or whose
    columns or lines are not as they should be, is a DataError."""
    if files.kind == "digits":
        yield from _digits()
        return
    for path in files.files[:1] if files.kind == "metadata" else files.files:
        try:
            yield from _READERS[files.kind](path, path.relative_to(files.root).as_posix(), data)
        except (OSError, pa.ArrowException, tarfile.TarError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: is damaged or cut short ({first_line(error)}); replace or remove it") from error


def class_names(files: ImageFiles, data: ImageData) -> list[str] | None:
    """What the Hub's schema in a Parquet file calls the labels; None where none does."""
    if files.kind != "parquet":
        return None
    try:
        schema = pq.read_schema(files.files[0])
        column = _column(files.files[0], schema, "label", data.label_column)
        told = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return told["info"]["features"][column]["names"]
    except (OSError, pa.ArrowException, ValueError, LookupError, TypeError):  # what is damaged, `read` will say
        return None


def _digits() -> Iterator[Example]:
    from sklearn.datasets import load_digits  # takes a second, which only this source should

    digits = cast(Any, load_digits())
    pixels = np.rint(digits.images * (255 / 16)).astype(np.uint8)
    for index, (image, label) in enumerate(zip(pixels, digits.target.tolist(), strict=True)):
        yield Example(f"digits row {index}", image, label)


def _image(path: Path, name: str, _: ImageData) -> Iterator[Example]:
    """A file, whose class is the first folder on the way to it."""
    first, *below = Path(name).parts
    yield _file(path, name, first if below else None, None)


def _file(path: Path, name: str, label: Any, caption: str | None) -> Example:
    try:
        return Example(name, path.read_bytes(), label, caption)
    except OSError as error:
        return Example(name, b"", label, caption, fault=f"cannot be read ({error.strerror})")


def _metadata(path: Path, _: str, data: ImageData) -> Iterator[Example]:
    """A folder of the Hub's kind: a line of JSON for each of its images."""
    with path.open(encoding="utf-8-sig", newline="\n") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}: line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON; correct or remove it") from error
            name = record.get("file_name") if isinstance(record, dict) else None
            if not isinstance(name, str) or not name:
                raise DataError(f"{where} has no `file_name`; name its image there")
            if "\0" in name or Path(name).is_absolute() or ".." in Path(name).parts:
                raise DataError(f"{where}: {name!r} leads out of the folder; put the image into it")
            label, caption = _told(where, record, data)
            yield _file(path.parent / name, name, label, caption)


def _told(where: str, record: dict[str, Any], data: ImageData) -> tuple[Any, str | None]:
    """The label and the caption in a record of JSON."""
    found: list[Any] = []
    for what, given in (("label", data.label_column), ("caption", data.caption_column)):
        if given is not None and given not in record:
            raise DataError(f"{where} has no `{given}`; set data.{what}_column to one of: {', '.join(record)}")
        key = given or next((usual for usual in USUAL[what] if usual in record), None)
        found.append(record[key] if key else None)
    return found[0], _text(where, found[1])


def _text(where: str, caption: Any) -> str | None:
    # JSON can hold half a surrogate pair, for which UTF-8 has no bytes.
    if not isinstance(caption, str | None) or (caption and re.search("[\ud800-\udfff]", caption)):
        raise DataError(f"{where}: its caption is not a text; correct it, or set data.caption_column to another one")
    return caption


def _parquet(path: Path, name: str, data: ImageData) -> Iterator[Example]:
    with pq.ParquetFile(path) as parquet:
        schema = parquet.schema_arrow
        given = {"image": data.image_column, "label": data.label_column, "caption": data.caption_column}
        columns = {what: _column(path, schema, what, column) for what, column in given.items()}
        image, label, caption = columns.values()
        assert image is not None
        nested = pa.types.is_struct(schema.field(image).type)
        wanted = [f"{image}.bytes" if nested else image, *filter(None, (label, caption))]
        number = itertools.count()
        for batch in parquet.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
            for row in batch.to_pylist():
                content = (row[image] or {}).get("bytes") if nested else row[image]
                yield Example(
                    f"{name} row {next(number)}",
                    content or b"",
                    row[label] if label else None,
                    row[caption] if caption else None,
                    fault="" if content else "no bytes",
                )


def _column(path: Path, schema: pa.Schema, what: str, given: str | None) -> str | None:
    """The column of the images, labels or captions; None where the settings name none and no usual one is there."""
    names = [given] if given is not None else USUAL[what]
    there = [name for name in names if name in schema.names]
    fitting = [name for name in there if _fits(what, schema.field(name).type)]
    if not fitting and (given is not None or what == "image"):
        fault = f"column `{there[0]}` holds {schema.field(there[0]).type}, not {what}s" if there else ""
        fault = fault or f"no column `{'` or `'.join(names)}`"
        usable = [field.name for field in schema if _fits(what, field.type)]
        remedy = f"set data.{what}_column to one of: {', '.join(usable)}" if usable else "give another file"
        raise DataError(f"{path}: {fault}; {remedy}")
    return fitting[0] if fitting else None


def _fits(what: str, kind: pa.DataType) -> bool:
    """Whether a column of this type can hold images, labels or captions."""
    types = pa.types
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    if what != "image":
        return text or (what == "label" and types.is_integer(kind))
    if types.is_struct(kind):
        kind = cast(pa.StructType, kind)
        return kind.get_field_index("bytes") >= 0 and _fits(what, kind.field("bytes").type)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind)


def _tar(path: Path, shard: str, data: ImageData) -> Iterator[Example]:
    """A shard in WebDataset's format: a sample is a run of members with one name up to its first dot."""
    with tarfile.open(path, "r:") as tar:
        for key, members in itertools.groupby(_members(tar), lambda member: member[0]):
            parts = {suffix: content for _, suffix, content in members}
            where = f"{shard}: {key}"
            if None in parts.values():
                yield Example(where, b"", fault="the shard is damaged or cut short here")
                continue
            image = next((content for suffix, content in parts.items() if suffix in SUFFIXES), None)
            if image is None:
                continue
            try:
                record = json.loads(parts.get(".json") or b"{}")
                told: dict[str, Any] = {
                    name: cast(bytes, parts[suffix]).decode("utf-8").strip()
                    for name, suffix in (("text", ".txt"), ("label", ".cls"))
                    if suffix in parts
                }
            except ValueError as error:
                yield Example(where, image, fault=f"what goes with it cannot be read ({first_line(error)})")
                continue
            if told.get("label", "").lstrip("-").isdecimal():
                told["label"] = int(told["label"])
            label, caption = _told(where, (record if isinstance(record, dict) else {}) | told, data)
            yield Example(where, image, label, caption)


def _members(tar: tarfile.TarFile) -> Iterator[tuple[str, str, bytes | None]]:
    """(key, suffix, content) of the files in a shard; the content is None where the shard is damaged, and ends."""
    key, suffix = "its begin", ""
    try:
        while member := tar.next():
            cast(Any, tar).members.clear()  # which would hold every header of the shard
            folder, _, file = member.name.rpartition("/")
            stem, _, suffix = file.partition(".")
            key, suffix = f"{folder}/{stem}" if folder else stem, f".{suffix.lower()}"
            if member.isreg() and suffix in (*SUFFIXES, ".txt", ".cls", ".json"):
                yield key, suffix, cast(Any, tar.extractfile(member)).read()
    except tarfile.ReadError:
        yield key, suffix, None
        return
    # At a header that is damaged, or not there, `tarfile` stops as it does at the end, which is a block of zeros.
    file = cast(Any, tar.fileobj)
    file.seek(tar.offset)
    if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        yield f"byte {tar.offset}", "", None


_READERS = {"image": _image, "metadata": _metadata, "parquet": _parquet, "tar": _tar}
