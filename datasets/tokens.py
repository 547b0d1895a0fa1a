"""A corpus as tokens on disk: prepared once, then memory-mapped by every trial."""

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from .cache import damaged, make_once, read_manifest, sha256
from .corpus import Source, resolve
from .errors import DataError
from .settings import TextData
from .shards import FORMAT, Manifest, PartManifest, ShardWriter, TokenStream, open_shards
from .splits import PARTS, Part, Piece, Split, survey
from .vocabulary import Vocabulary, is_trained, make_vocabulary

BATCH_CHARACTERS = 1_000_000
"""Text that is encoded at once."""

Progress = Callable[[str, int, int], None]
"""Gets the stage, and the bytes done and in total."""


@dataclass(frozen=True)
class PreparedText:
    """A corpus in tokens, ready to train on. Its arrays are memory-mapped: processes share one copy."""

    folder: Path
    fingerprint: str
    """Of the corpus and of every setting that the tokens depend on."""
    vocabulary: Vocabulary
    training: TokenStream
    validation: TokenStream
    manifest: Manifest

    def bytes_per_token(self, part: Part) -> float:
        """UTF-8 bytes of text for each token: loss / ln 2 / this is in bits per byte."""
        described: PartManifest = getattr(self.manifest, part)
        return described.text_bytes / described.tokens


def prepare(data: TextData, cache: Path, progress: Progress | None = None) -> PreparedText:
    """The tokens of a corpus, from `<cache>/text-<fingerprint>/` or made there now, in bounded memory.

    Any number of processes may call this at once: one works, the others wait. A folder that is there is
    verified by its hashes. DataError where the corpus, the vocabulary or the cache cannot be used.
    """
    sources = resolve(data.corpus)
    fingerprint = _fingerprint(data, sources)
    folder = cache / f"text-{fingerprint}"

    def fill(partial: Path) -> None:
        """Write the folder; a corpus that changed meanwhile would be kept under a fingerprint not its own."""
        _write(partial, data, sources, fingerprint, progress or (lambda *_: None))
        if _fingerprint(data, sources) != fingerprint:
            raise DataError(f"corpus {_name(data.corpus)}: changed while it was read; prepare it again")

    made = not folder.exists() and make_once(folder, fill)
    return open_prepared(folder, verify=not made)


def _fingerprint(data: TextData, sources: list[Source]) -> str:
    """Of all that decides the tokens; the sequence length does not."""
    # The corpus counts as the files it is now, not as the words that named them.
    settings = data.model_dump(mode="json", exclude={"corpus", "sequence_length"})
    settings |= {"format": FORMAT, "corpus": [source.identity() for source in sources]}
    if isinstance(data.vocabulary, str) and (path := Path(data.vocabulary).expanduser()).exists():
        files = sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]
        # A pretrained tokenizer on disk counts by content: it may be edited, and lie elsewhere next time.
        settings["tokenizer"] = [(file.name, sha256(file)) for file in files if _is_tokenizer(file)]
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def _is_tokenizer(file: Path) -> bool:
    return file.suffix in (".json", ".txt", ".model", ".tiktoken")  # not the weights that may lie beside it


def _name(corpus: str | tuple[str, ...]) -> str:
    return corpus if isinstance(corpus, str) else " and ".join(corpus)


def _write(folder: Path, data: TextData, sources: list[Source], fingerprint: str, progress: Progress) -> None:
    """Three passes over the corpus, since none fits in memory: its division, its vocabulary, its tokens."""
    split = survey(sources, data.column, data.validation, lambda done, total: progress("read", done, total))
    vocabulary = _vocabulary(data.vocabulary, split, progress)
    vocabulary.save(folder / "tokenizer.json")
    dtype = "uint16" if vocabulary.size <= 1 << 16 else "uint32"
    stored = np.dtype(dtype).newbyteorder("<")
    writers: dict[Part, ShardWriter] = {part: ShardWriter(folder, part, stored) for part in PARTS}
    _encode(split, vocabulary, writers, progress)
    manifest = Manifest(
        format=FORMAT,
        fingerprint=fingerprint,
        settings=data.model_dump(mode="json", exclude={"sequence_length"}),
        dtype=dtype,
        vocabulary_size=vocabulary.size,
        end_of_document=vocabulary.end_of_document,
        vocabulary_sha256=sha256(folder / "tokenizer.json"),
        training=writers["training"].described(),
        validation=writers["validation"].described(),
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _vocabulary(setting: int | str, split: Split, progress: Progress) -> Vocabulary:
    """The vocabulary of a setting; validation text has no say in it."""

    def training_texts() -> Iterator[str]:
        done = 0
        for piece in split.pieces():
            done += len(piece.text.encode())
            progress("vocabulary", done, split.total_bytes)
            if piece.part == "training":
                yield piece.text

    return make_vocabulary(setting, training_texts() if is_trained(setting) else (), split.total_bytes)


def _encode(split: Split, vocabulary: Vocabulary, writers: dict[Part, ShardWriter], progress: Progress) -> None:
    """Encode the corpus batch by batch: large enough for all cores, small beside the memory of a machine."""
    batch: list[Piece] = []
    characters = done = 0

    def flush() -> None:
        nonlocal characters, done
        encoded = vocabulary.encode([piece.text for piece in batch])
        for part, writer in writers.items():
            mine = [(piece, ids) for piece, ids in zip(batch, encoded, strict=True) if piece.part == part]
            writer.add(mine, vocabulary.end_of_document)
        done += sum(len(piece.text.encode()) for piece in batch)
        progress("tokens", done, split.total_bytes)
        batch.clear()
        characters = 0

    for piece in split.pieces():
        batch.append(piece)
        characters += len(piece.text)
        if characters >= BATCH_CHARACTERS:
            flush()
    flush()


def open_prepared(folder: Path, verify: bool = False) -> PreparedText:
    """A folder that `prepare` made; its sizes are checked, with `verify` also every byte, else DataError."""
    manifest = read_manifest(folder, Manifest, FORMAT)
    # Sizes are always checked, for they cost nothing; so is the tokenizer, which is small.
    tokenizer = folder / "tokenizer.json"
    if not tokenizer.is_file() or sha256(tokenizer) != manifest.vocabulary_sha256:
        raise damaged(tokenizer)
    name = _name(cast(Any, manifest.settings.get("corpus", folder.name)))
    streams = {
        part: TokenStream(f"the {part} part of {name}", open_shards(folder, manifest, part, verify)) for part in PARTS
    }
    return PreparedText(
        folder=folder,
        fingerprint=manifest.fingerprint,
        vocabulary=Vocabulary.load(tokenizer, manifest.end_of_document),
        training=streams["training"],
        validation=streams["validation"],
        manifest=manifest,
    )
