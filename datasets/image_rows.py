"""Images being written as rows of pixels: their labels, their division, and the manifest that describes them."""

import json
from array import array
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, JsonValue

from .cache import sha256
from .decoding import Damaged
from .errors import DataError
from .image_readers import Example
from .settings import ImageData
from .splits import HASH_RANGE, content_hash

FORMAT = 1
MOST_CLASSES = 1_000_000


class StoredFile(BaseModel, frozen=True, extra="forbid"):
    """A file of a prepared folder."""

    bytes: int
    sha256: str


class Manifest(BaseModel, frozen=True, extra="forbid"):
    """What is in a prepared folder; written last."""

    format: int
    fingerprint: str
    settings: dict[str, JsonValue]
    images: int
    size: int
    channels: int
    class_names: list[str] | None
    damaged: int
    files: dict[str, StoredFile]


class RowWriter(ExitStack):
    """Appends images to the files of a folder that is being made."""

    def __init__(self, folder: Path, data: ImageData, names: list[str] | None):
        super().__init__()
        self._folder, self._data = folder, data
        self._labels = Labels(names)
        self._hashes = array("Q")
        self._size = data.size
        self._faults: list[str] = []  # the first few
        self._damaged = 0
        self._captioned = False
        self._pixels = self.enter_context((folder / "pixels.bin").open("wb"))
        self._captions = self.enter_context((folder / "captions.jsonl").open("w", encoding="utf-8"))
        self._left_out = self.enter_context((folder / "damaged.jsonl").open("w", encoding="utf-8"))

    def add(self, example: Example, pixels: np.ndarray | Damaged) -> None:
        """Append an image, or the reason why there is none; DataError where it does not go with the others."""
        if isinstance(pixels, Damaged):
            self._damaged += 1
            self._left_out.write(json.dumps({"name": example.name, "reason": str(pixels)}) + "\n")
            self._faults += [f"{example.name} ({pixels})"] if len(self._faults) < 3 else []
            return
        size = len(pixels)
        self._size = self._size or size
        if size != self._size:
            raise DataError(
                f"{example.name}: {size} × {size} pixels, where the images before it have {self._size} × {self._size}; "
                "set data.size, and all are scaled to it"
            )
        self._labels.add(example.name, example.label)
        content = example.content
        self._hashes.append(content_hash(content if isinstance(content, bytes) else content.tobytes()))
        self._pixels.write(pixels.tobytes())
        self._captions.write(json.dumps(example.caption) + "\n")
        self._captioned = self._captioned or example.caption is not None

    def described(self, fingerprint: str, settings: dict[str, Any], channels: int) -> Manifest:
        """Write what is known at the end only, and say what there is; DataError where that cannot be trained on."""
        self._refuse_damage()
        training, validation = _divided(self._data, np.frombuffer(self._hashes, np.uint64))
        labels, names = self._labels.finished()
        for name, values in (("training", training), ("validation", validation), ("labels", labels)):
            if values is not None:
                (self._folder / f"{name}.bin").write_bytes(values.astype("<i8").tobytes())
        if not self._captioned:
            (self._folder / "captions.jsonl").unlink()
        files = {
            path.name: StoredFile(bytes=path.stat().st_size, sha256=sha256(path))
            for path in sorted(self._folder.iterdir())
        }
        return Manifest(
            format=FORMAT,
            fingerprint=fingerprint,
            settings=settings,
            images=len(self._hashes),
            size=self._size or 0,
            channels=channels,
            class_names=names,
            damaged=self._damaged,
            files=files,
        )

    def _refuse_damage(self) -> None:
        source, kept = self._data.source, len(self._hashes)
        if not self._damaged + kept:
            raise DataError(f"source {source}: holds no images; give a file or folder with some")
        if not kept or self._damaged > self._data.damaged * (self._damaged + kept):
            raise DataError(
                f"source {source}: {self._damaged:,} of {self._damaged + kept:,} images are damaged, more than "
                f"data.damaged = {self._data.damaged:g} allows: {', '.join(self._faults)}"
                f"{', …' if self._damaged > len(self._faults) else ''}; replace or remove them"
            )


@dataclass
class Labels:
    """The labels of a set as they come: numbers, or names, which are numbered once all are known."""

    names: list[str] | None
    """What the set itself calls its numbers."""
    _values: array = field(default_factory=lambda: array("q"))
    _codes: dict[str, int] = field(default_factory=dict)  # names in the order in which they were first seen
    _first: tuple[str, Any] | None = None

    def add(self, name: str, label: Any) -> None:
        """Take the label of the image `name`; DataError where it is none, or not of the kind of those before."""
        if type(label) not in (int, str, type(None)):
            raise DataError(f"{name}: label {label!r} is neither a whole number nor a name; correct it")
        first_name, first = self._first = self._first or (name, label)
        if type(label) is not type(first):
            there = {int: "a number", str: "a name", type(None): "none"}
            raise DataError(
                f"{name}: has {there[type(label)]} as label, and {first_name} {there[type(first)]}; "
                "label all images in one way, or none"
            )
        if isinstance(label, str):
            self._values.append(self._codes.setdefault(label, len(self._codes)))
        elif label is not None:
            self._values.append(self._checked(name, label))

    def _checked(self, name: str, label: int) -> int:
        most = len(self.names) if self.names else MOST_CLASSES
        if not 0 <= label < most:
            raise DataError(
                f"{name}: label {label} is not within 0 to {most - 1:,}; correct it, or name another data.label_column"
            )
        return label

    def finished(self) -> tuple[np.ndarray | None, list[str] | None]:
        """Int64 (images,) and the names of the classes; None and None for images without labels."""
        values = np.array(self._values, np.int64)
        if self._codes:
            names = sorted(self._codes)
            place = {name: index for index, name in enumerate(names)}
            return np.array([place[name] for name in self._codes], np.int64)[values], names
        if not len(values):
            return None, None
        return values, self.names or [str(label) for label in range(values.max() + 1)]


def _divided(data: ImageData, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The images that train and those that validate."""
    lowest, highest = int(hashes.min()), int(hashes.max())
    if lowest == highest:
        raise DataError(f"source {data.source}: one image cannot be divided; give at least two that differ")
    # In a tiny set chance may leave a part empty: the image nearest to the threshold then changes sides.
    threshold = min(max(int(data.validation * HASH_RANGE), lowest + 1), highest)
    validates = hashes < np.uint64(threshold)
    return np.flatnonzero(~validates), np.flatnonzero(validates)
