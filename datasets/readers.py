"""The text of a corpus's files, in bounded memory.

A source is read as *pieces*: a .jsonl line, a Parquet row and a .py file are a document each; a long text is
cut into blocks of about 2,000 characters, which joined are the file again.
"""

import codecs
import json
import re
import tempfile
from collections.abc import Iterator
from typing import IO, Any, cast

import pyarrow as pa
import pyarrow.parquet as pq

from .corpus import Source, first_line
from .errors import DataError

BLOCK_CHARACTERS = 2_000
"""About how long a block of a text file is."""
BLOCK_SLACK = 500
"""How much longer or shorter, for a paragraph or line to end with it."""
CHUNK_BYTES = 1 << 20


def read(source: Source, column: str) -> Iterator[str]:
    """The pieces of a source, in order, none of them empty.

    Blank lines, null texts and empty .py files hold nothing to read and are passed over; any other empty
    file, and whatever cannot be read, is a DataError.
    """
    empty = True
    try:
        for piece in _READERS[source.kind](source, column):
            empty = False
            yield piece
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        damaged = "is damaged or cut short" if source.compression or source.kind == "parquet" else "cannot be read"
        raise DataError(f"{source.name}: {damaged} ({first_line(error)}); replace or remove it") from error
    if empty and source.kind not in ("code", "stdlib"):
        raise DataError(f"{source.name}: is empty; remove it or name another file")


def _characters(source: Source) -> Iterator[str]:
    """The text of a file in chunks, checked to be UTF-8; a byte-order mark is not part of it."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, first = 0, True
    with pa.input_stream(str(source.path), compression=source.compression) as stream:
        while True:
            chunk = cast(bytes, stream.read(CHUNK_BYTES))
            if b"\0" in chunk:
                raise DataError(
                    f"{source.name}: is a binary file (NUL at byte {position + chunk.index(0)}); "
                    "remove it, or convert it to UTF-8 text"
                )
            held = len(decoder.getstate()[0])  # bytes of a character that the last chunk cut in two
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{source.name}: is not UTF-8 at byte {position - held + error.start}; convert it, "
                    "for example with `iconv -t UTF-8`"
                ) from error
            position += len(chunk)
            if text:
                yield text.removeprefix("\ufeff") if first else text
                first = False
            if not chunk:
                return


def _blocks(source: Source, _: str) -> Iterator[str]:
    """Blocks that depend on the text alone, not on how it comes in chunks: each is cut once all is there
    that its cut may look at."""
    text = ""
    for chunk in _characters(source):
        text, start = text + chunk, 0
        while len(text) - start > BLOCK_CHARACTERS + BLOCK_SLACK:
            end = _cut(text, start)
            yield text[start:end]
            start = end
        text = text[start:]
    if text:
        yield text


def _cut(text: str, start: int) -> int:
    """Where the block from `start` ends: at a paragraph or line end near, else right there (Chinese has no
    spaces to look for)."""
    middle = start + BLOCK_CHARACTERS
    for mark in ("\n\n", "\n"):
        end = text.rfind(mark, middle - BLOCK_SLACK, middle + BLOCK_SLACK)
        if end >= 0:
            return end + len(mark)
    return middle


def _whole(source: Source, _: str) -> Iterator[str]:
    """A file that is one document."""
    if text := "".join(_characters(source)):
        yield text


def _module(source: Source, _: str) -> Iterator[str]:
    """A module of the standard library."""
    try:
        text = source.path.read_bytes().decode()
    except UnicodeDecodeError:  # a module in an older encoding, which the user cannot be asked to convert
        return
    if text:
        yield text


def _json_lines(source: Source, column: str) -> Iterator[str]:
    for number, line in enumerate(_lines(source), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{source.name}: line {number} is not JSON; correct or remove it") from error
        if not isinstance(record, dict) or column not in record:
            keys = ", ".join(cast(dict[str, Any], record)) if isinstance(record, dict) else "no keys"
            raise DataError(f"{source.name}: line {number} has no `{column}`; set data.column to one of: {keys}")
        text = cast(Any, record[column])
        # JSON can hold half a surrogate pair, for which UTF-8 has no bytes.
        if not isinstance(text, str | None) or (text and re.search("[\ud800-\udfff]", text)):
            raise DataError(f"{source.name}: line {number}: `{column}` is not a text; correct or remove it")
        if text:
            yield text


def _lines(source: Source) -> Iterator[str]:
    """Lines as JSON has them: they end at a newline and at no other of Unicode's line ends."""
    held: list[str] = []  # a list, so that a line of many chunks is joined once
    for chunk in _characters(source):
        first, *rest = chunk.split("\n")
        held.append(first)
        for part in rest:
            yield "".join(held)
            held = [part]
    yield "".join(held)


def _parquet_rows(source: Source, column: str) -> Iterator[str]:
    if source.path.stat().st_size == 0:
        return
    with _seekable(source) as handle:
        parquet = pq.ParquetFile(handle)
        if column not in parquet.schema_arrow.names:
            names = ", ".join(parquet.schema_arrow.names)
            raise DataError(f"{source.name}: has no column `{column}`; set data.column to one of: {names}")
        kind = parquet.schema_arrow.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{source.name}: column `{column}` holds {kind}; set data.column to a text column")
        # A thousand rows at a time: a row group may hold millions.
        for batch in parquet.iter_batches(batch_size=1_000, columns=[column]):
            yield from (text for text in batch.column(0).to_pylist() if text)


def _seekable(source: Source) -> IO[bytes]:
    """The file opened; a compressed one is unpacked to a nameless file, for Parquet is read from its end."""
    if not source.compression:
        return source.path.open("rb")
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    with pa.input_stream(str(source.path), compression=source.compression) as stream:
        while chunk := cast(bytes, stream.read(CHUNK_BYTES)):
            unpacked.write(chunk)
    unpacked.seek(0)
    return unpacked


_READERS = {
    "text": _blocks,
    "code": _whole,
    "stdlib": _module,
    "jsonl": _json_lines,
    "parquet": _parquet_rows,
}
