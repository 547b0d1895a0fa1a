"""Tokens on disk: shards of them, the manifest that describes them, and the stream they are read as."""

import hashlib
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from pydantic import BaseModel, JsonValue

from .cache import damaged, sha256
from .splits import Part, Piece

FORMAT = 1
SHARD_TOKENS = 100_000_000
"""Tokens in a full shard: 200 MB as uint16."""


class Shard(BaseModel, frozen=True, extra="forbid"):
    """One file of little-endian tokens, `<part>-<number>.bin`."""

    tokens: int
    bytes: int
    sha256: str


class PartManifest(BaseModel, frozen=True, extra="forbid"):
    """The training or the validation part."""

    tokens: int
    text_bytes: int
    """UTF-8 bytes of the text that the tokens stand for."""
    documents: int
    """Stretches of text between end-of-document tokens."""
    shards: list[Shard]


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """What is in a prepared folder; written last."""

    format: int
    fingerprint: str
    settings: dict[str, JsonValue]
    dtype: Literal["uint16", "uint32"]
    vocabulary_size: int
    end_of_document: int
    vocabulary_sha256: str
    training: PartManifest
    validation: PartManifest


class TokenStream:
    """A part of a corpus as one long row of tokens, which lies in memory-mapped shards."""

    def __init__(self, name: str, shards: list[np.ndarray]):
        self.name = name
        """What messages call it."""
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def windows(self, starts: np.ndarray, length: int) -> np.ndarray:
        """The `length` tokens from each start, as int64 of shape (len(starts), length).

        IndexError where a window does not lie within the stream.
        """
        starts = np.asarray(starts, dtype=np.int64)
        if starts.size and not 0 <= starts.min() <= starts.max() <= len(self) - length:
            raise IndexError(f"a window of {length} tokens reaches outside the {len(self)} of {self.name}")
        windows = np.empty((len(starts), length), dtype=np.int64)
        first = np.searchsorted(self._ends, starts, side="right")
        last = np.searchsorted(self._ends, starts + length - 1, side="right")
        # Nearly all windows lie within one shard, where a strided view gathers them row by row in C.
        for index in np.unique(first[first == last]):
            rows = np.flatnonzero((first == index) & (last == index))
            shard = self._shards[index]
            within = starts[rows] - (self._ends[index] - len(shard))
            windows[rows] = sliding_window_view(shard, length)[within]
        for row in np.flatnonzero(first != last):
            windows[row] = self._across(int(starts[row]), length)
        return windows

    def _across(self, start: int, length: int) -> np.ndarray:
        """The window from `start`, put together from its shards (an empty slice from each other one)."""
        parts: list[np.ndarray] = []
        for end, shard in zip(self._ends.tolist(), self._shards, strict=True):
            begin = end - len(shard)
            parts.append(shard[max(start - begin, 0) : max(start + length - begin, 0)])
        return np.concatenate(parts)


class ShardWriter:
    """Appends pieces to the shards of one part."""

    def __init__(self, folder: Path, part: Part, dtype: np.dtype):
        self._folder, self._dtype = folder, dtype
        self._part: Part = part
        self._tokens = self._text_bytes = self._documents = 0
        self._shards: list[Shard] = []
        self._digest = hashlib.sha256()
        self._shard_tokens = 0

    def add(self, pieces: list[tuple[Piece, np.ndarray]], end_of_document: int) -> None:
        """Append pieces and their tokens, with `end_of_document` between those that do not continue."""
        rows: list[np.ndarray] = []
        for piece, ids in pieces:
            if not piece.continues:
                if self._documents:
                    rows.append(np.array([end_of_document], dtype=ids.dtype))
                self._documents += 1
            rows.append(ids)
            self._text_bytes += len(piece.text.encode())
        tokens = np.concatenate(rows).astype(self._dtype) if rows else np.empty(0, self._dtype)
        while len(tokens):
            room = SHARD_TOKENS - self._shard_tokens
            self._append(tokens[:room])
            tokens = tokens[room:]

    def _append(self, tokens: np.ndarray) -> None:
        # Opened anew for each batch, so that nothing is left open when a later pass fails.
        with _shard_path(self._folder, self._part, len(self._shards)).open("ab") as handle:
            handle.write(tokens.tobytes())
        self._digest.update(tokens.tobytes())
        self._tokens += len(tokens)
        self._shard_tokens += len(tokens)
        if self._shard_tokens == SHARD_TOKENS:
            self._close_shard()

    def _close_shard(self) -> None:
        size = self._shard_tokens * self._dtype.itemsize
        self._shards.append(Shard(tokens=self._shard_tokens, bytes=size, sha256=self._digest.hexdigest()))
        self._digest = hashlib.sha256()
        self._shard_tokens = 0

    def described(self) -> PartManifest:
        """What the manifest says of this part, once all is added."""
        if self._shard_tokens:
            self._close_shard()
        return PartManifest(
            tokens=self._tokens, text_bytes=self._text_bytes, documents=self._documents, shards=self._shards
        )


def _shard_path(folder: Path, part: Part, index: int) -> Path:
    return folder / f"{part}-{index:05d}.bin"  # never a name from a manifest


def open_shards(folder: Path, manifest: Manifest, part: Part, verify: bool) -> list[np.ndarray]:
    """The memory-mapped shards of a part; DataError where a size or, with `verify`, a hash differs."""
    dtype = np.dtype(manifest.dtype).newbyteorder("<")
    described: PartManifest = getattr(manifest, part)
    shards: list[np.ndarray] = []
    for index, shard in enumerate(described.shards):
        path = _shard_path(folder, part, index)
        if not path.is_file() or not path.stat().st_size == shard.bytes == shard.tokens * dtype.itemsize:
            raise damaged(path)
        if verify and sha256(path) != shard.sha256:
            raise damaged(path)
        # A plain array over the map: a memmap's own slicing is slow.
        shards.append(np.asarray(np.memmap(path, dtype=dtype, mode="r")))
    if sum(shard.tokens for shard in described.shards) != described.tokens:
        raise damaged(folder / "manifest.json")
    return shards
