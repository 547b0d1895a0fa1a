"""Which part of a text corpus trains and which part validates."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from hashlib import blake2b
from typing import Final, Literal

from .corpus import Source
from .errors import DataError
from .readers import read

Part = Literal["training", "validation"]
PARTS: Final[tuple[Part, Part]] = ("training", "validation")
HASH_RANGE = 1 << 64


@dataclass(frozen=True)
class Piece:
    """A document, or a block of a long text."""

    text: str
    part: Part
    continues: bool
    """Whether it goes on where the piece before it ended, in the same text and the same part."""


@dataclass(frozen=True)
class Split:
    """A corpus with its division, which `survey` found in one pass over it."""

    sources: list[Source]
    column: str
    total_bytes: int
    """UTF-8 bytes of the whole text."""
    threshold: int | None
    """Pieces whose hash is below it validate; None where the end of each file does."""
    cuts: list[int]
    """The character, or for .jsonl and Parquet the document, of each source at which validation begins."""

    def pieces(self) -> Iterator[Piece]:
        """Every piece of the corpus in order, each in one part."""
        for source, cut in zip(self.sources, self.cuts, strict=True):
            last: Part | None = None
            for text, part in self._divided(source, cut):
                yield Piece(text, part, continues=part == last and not source.is_documents)
                last = part

    def _divided(self, source: Source, cut: int) -> Iterator[tuple[str, Part]]:
        seen = 0  # characters, or documents, of this source so far
        for text in read(source, self.column):
            if self.threshold is not None:
                yield text, "validation" if content_hash(text) < self.threshold else "training"
            elif source.is_documents:
                yield text, "training" if seen < cut else "validation"
                seen += 1
            else:
                here = max(cut - seen, 0)
                if text[:here]:
                    yield text[:here], "training"
                if text[here:]:
                    yield text[here:], "validation"
                seen += len(text)


def content_hash(content: str | bytes) -> int:
    """A number below 2^64 that depends on the content alone, so that equal ones never end in both parts."""
    content = content.encode() if isinstance(content, str) else content
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")


def survey(sources: list[Source], column: str, validation: float | str, progress: Callable[[int, int], None]) -> Split:
    """Read a corpus once and fix its division; `progress` gets (done, total) bytes of its files."""
    file_bytes = [source.path.stat().st_size for source in sources]
    lengths: list[int] = []
    total_bytes, lowest, highest = 0, HASH_RANGE, -1
    for index, source in enumerate(sources):
        # Equal hashes are equal texts: the lowest and highest are all that a tiny corpus needs to know.
        before, length, read_bytes = sum(file_bytes[:index]), 0, 0
        for text in read(source, column):
            length += 1 if source.is_documents else len(text)
            read_bytes += len(text.encode())
            lowest = min(lowest, hashed := content_hash(text))
            highest = max(highest, hashed)
            # Text that was compressed is longer than its file, so the file's size is as far as it counts.
            progress(before + min(read_bytes, file_bytes[index]), sum(file_bytes))
        lengths.append(length)
        total_bytes += read_bytes
    if not total_bytes:
        raise DataError(f"{sources[0].name}: holds no text; give a corpus with more in it")
    if isinstance(validation, str):
        # A fraction, for the cut of 10% of 1,115,394 characters is one character off in floating point.
        kept = 1 - Fraction(validation.removeprefix("last ").removesuffix("%")) / 100
        cuts = [int(length * kept) for length in lengths]
        if not any(cuts) or cuts == lengths:
            raise DataError(f"{sources[0].name}: too short to keep the {validation} for validation; give more text")
        return Split(sources, column, total_bytes, None, cuts)
    if lowest >= highest:
        raise DataError(
            f"{sources[0].name}: one document cannot be divided by hash; set data.validation to `last 10%`, "
            "or give more text"
        )
    # In a tiny corpus chance may leave a part empty: the piece nearest to the threshold then changes sides.
    threshold = min(max(int(validation * HASH_RANGE), lowest + 1), highest)
    return Split(sources, column, total_bytes, threshold, [0] * len(sources))
