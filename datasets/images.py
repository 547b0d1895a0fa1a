"""A set of images as pixels on disk: decoded once, then memory-mapped by every trial."""

import hashlib
import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import numpy as np

from .batches import epoch_keys, mix, permute
from .cache import damaged, make_once, read_manifest, sha256
from .decoding import Damaged, decode
from .errors import DataError
from .image_readers import Example, ImageFiles, class_names, read, resolve
from .image_rows import FORMAT, Manifest, RowWriter
from .settings import ImageData

BATCH_IMAGES, BATCH_BYTES = 512, 32_000_000
"""What is decoded at once."""
# Keys from the one on are for the orders of the epochs, from the other on for flips; no seed is so large that
# epoch a of seed b could be epoch b of seed a.
ORDER_STREAM, FLIP_STREAM = 1 << 60, 1 << 61

Progress = Callable[[str, int, int], None]
"""Gets the stage, and the bytes done and in total."""


@dataclass(frozen=True, eq=False)
class PreparedImages:
    """A set of images, ready to train on. Its arrays are memory-mapped: processes share one copy.

    Training row i is row i mod n of epoch i div n, for n training images: each epoch takes every one of them
    once, in an order of its own, and with `flip` mirrors those that (seed, epoch, image) says, about half.
    """

    folder: Path
    manifest: Manifest
    flip: bool
    _pixels: np.ndarray  # uint8 (images, size, size, channels)
    _labels: np.ndarray  # int64 (images,)
    _training: np.ndarray  # int64 (train_rows,): which images they are
    _validation: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Of the files and of every setting that the pixels and their division depend on."""
        return self.manifest.fingerprint

    @property
    def size(self) -> int:
        """Pixels of a side."""
        return self.manifest.size

    @property
    def channels(self) -> int:
        """1 (grey) or 3 (RGB)."""
        return self.manifest.channels

    @property
    def class_names(self) -> list[str] | None:
        """The name of each label; None for images without labels."""
        return self.manifest.class_names

    @property
    def classes(self) -> int | None:
        """Labels are 0 to `classes` - 1; None where there are none."""
        return None if self.class_names is None else len(self.class_names)

    @property
    def train_rows(self) -> int:
        """Training images, the rows of an epoch."""
        return len(self._training)

    @property
    def validation_rows(self) -> int:
        """Validation images."""
        return len(self._validation)

    @property
    def damaged(self) -> int:
        """Images that were left out; `damaged.jsonl` in the folder lists them with the reasons."""
        return self.manifest.damaged

    @cached_property
    def captions(self) -> list[str | None] | None:
        """The caption of each image, by the numbers that `training_images` and `validation_images` answer."""
        if "captions.jsonl" not in self.manifest.files:
            return None
        with (self.folder / "captions.jsonl").open(encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]

    def rows(self, first_row: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Training rows `first_row` to `first_row + rows` of the global order of `seed`.

        Pixels, uint8 (rows, channels, size, size), which lie in memory as torch's `channels_last` does, and labels,
        int64 (rows,), zeros where there are none.
        """
        epoch, image = self._ordered(first_row, rows, seed)
        pixels = self._pixels.take(image, axis=0)
        if self.flip:
            key = epoch_keys(seed, epoch, FLIP_STREAM)
            mirrored = (mix(key ^ mix(image.astype(np.uint64))) & np.uint64(1)).astype(bool)
            pixels[mirrored] = pixels[mirrored, :, ::-1]
        return pixels.transpose(0, 3, 1, 2), self._labels[image]

    def training_images(self, first_row: int, rows: int, seed: int) -> np.ndarray:
        """Which images these training rows are, int64 (rows,)."""
        return self._ordered(first_row, rows, seed)[1]

    def validation(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Validation rows by index in [0, validation_rows), never mirrored; pixels and labels as `rows` has them."""
        image = self.validation_images(indices)
        return self._pixels.take(image, axis=0).transpose(0, 3, 1, 2), self._labels[image]

    def validation_images(self, indices: np.ndarray) -> np.ndarray:
        """Which images these validation rows are, int64 of the shape of `indices`."""
        indices = np.asarray(indices, dtype=np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < self.validation_rows:
            raise IndexError(f"validation rows are 0 to {self.validation_rows - 1}, found {indices.tolist()}")
        return self._validation[indices]

    def _ordered(self, first_row: int, rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch and the image of each row."""
        epoch, position = np.divmod(np.arange(first_row, first_row + rows, dtype=np.int64), self.train_rows)
        place = permute(position.astype(np.uint64), self.train_rows, epoch_keys(seed, epoch, ORDER_STREAM))
        return epoch, self._training[place.astype(np.int64)]


def prepare(data: ImageData, cache: Path, progress: Progress | None = None) -> PreparedImages:
    """The pixels of a set of images, from `<cache>/images-<fingerprint>/` or made there now, in bounded memory.

    Any number of processes may call this at once: one works, the others wait. A folder that is there is verified by
    its hashes. DataError where the images, their labels or the cache cannot be used.
    """
    files = resolve(data.source)
    fingerprint = _fingerprint(data, files)
    folder = cache / f"images-{fingerprint}"

    def fill(partial_folder: Path) -> None:
        """Write the folder; images that changed meanwhile would be kept under a fingerprint not their own."""
        _write(partial_folder, data, files, fingerprint, progress or (lambda *_: None))
        if _fingerprint(data, resolve(data.source)) != fingerprint:
            raise DataError(f"source {data.source}: changed while it was read; prepare it again")

    made = not folder.exists() and make_once(folder, fill)
    return open_prepared(folder, data.flip, verify=not made)


def open_prepared(folder: Path, flip: bool = False, verify: bool = False) -> PreparedImages:
    """A folder that `prepare` made; its sizes are checked, with `verify` also every byte, else DataError."""
    manifest = read_manifest(folder, Manifest, FORMAT)
    shape = (manifest.images, manifest.size, manifest.size, manifest.channels)
    arrays = {name: _opened(folder, manifest, name, verify) for name in ("pixels", "training", "validation")}
    if arrays["pixels"].size != np.prod(shape):
        raise damaged(folder / "manifest.json")
    labels = np.zeros(manifest.images, np.int64)
    if manifest.class_names is not None:
        labels = _opened(folder, manifest, "labels", verify)
    for name in ("captions.jsonl", "damaged.jsonl"):
        if name in manifest.files:
            _check(folder, manifest, name, verify)
    pixels = arrays["pixels"].reshape(shape)
    return PreparedImages(folder, manifest, flip, pixels, labels, arrays["training"], arrays["validation"])


def _fingerprint(data: ImageData, files: ImageFiles) -> str:
    """Of all that decides the pixels, their labels and their division; flips do not."""
    # The source counts as the files it is now, not as the words that named them.
    settings = data.model_dump(mode="json", exclude={"source", "flip"})
    settings |= {"format": FORMAT, "files": files.identity()}
    return hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=8).hexdigest()


def _write(folder: Path, data: ImageData, files: ImageFiles, fingerprint: str, progress: Progress) -> None:
    """One pass over the images; what is kept in memory is 16 bytes for each."""
    channels = data.channels or (1 if files.kind == "digits" else 3)
    with RowWriter(folder, data, class_names(files, data)) as rows, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of large images and of damage in what nobody reads
        done, total = 0, files.total_bytes()
        for batch in _decoded(read(files, data), partial(_decode, data, channels)):
            for example, pixels in batch:
                rows.add(example, pixels)
                done += len(example.content)
            progress("images", min(done, total), total)
        progress("images", total, total)
    settings = data.model_dump(mode="json", exclude={"flip"})
    manifest = rows.described(fingerprint, settings, channels)
    (folder / "manifest.json").write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _decode(data: ImageData, channels: int, example: Example) -> np.ndarray | Damaged:
    if example.fault:
        return Damaged(example.fault)
    try:
        return decode(example.name, example.content, data.size, channels, data.enlarge)
    except Damaged as error:
        return error


Decoded = tuple[Example, np.ndarray | Damaged]


def _decoded(
    examples: Iterator[Example], decode_one: Callable[[Example], np.ndarray | Damaged]
) -> Iterator[list[Decoded]]:
    """The examples and what they decode to, batch by batch, in order."""
    threads = len(os.sched_getaffinity(0))  # Pillow's decoders run beside each other
    with ThreadPoolExecutor(threads) as pool:
        for batch in _batches(examples):
            # A share for each thread: small images are decoded faster than they are handed out.
            share = -(-len(batch) // threads)
            shares = [batch[start : start + share] for start in range(0, len(batch), share)]
            found = pool.map(lambda share: [decode_one(example) for example in share], shares)
            yield list(zip(batch, itertools.chain.from_iterable(found), strict=True))


def _batches(examples: Iterable[Example]) -> Iterator[list[Example]]:
    batch: list[Example] = []
    held = 0
    for example in examples:
        batch.append(example)
        held += len(example.content)
        if len(batch) == BATCH_IMAGES or held >= BATCH_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _opened(folder: Path, manifest: Manifest, name: str, verify: bool) -> np.ndarray:
    """A file as a flat memory-mapped array of bytes (pixels) or int64."""
    path = _check(folder, manifest, f"{name}.bin", verify)
    # A plain array over the map: a memmap's own slicing is slow.
    return np.asarray(np.memmap(path, dtype=np.uint8 if name == "pixels" else "<i8", mode="r"))


def _check(folder: Path, manifest: Manifest, name: str, verify: bool) -> Path:
    path = folder / name
    stored = manifest.files.get(name)
    if stored is None or not path.is_file() or path.stat().st_size != stored.bytes:
        raise damaged(path)
    if verify and sha256(path) != stored.sha256:
        raise damaged(path)
    return path
