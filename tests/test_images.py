"""Prepared images: made once, whole or not at all, divided by content, and taken in an order that needs no state."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from rigsweep.datasets import images, splits
from rigsweep.datasets.errors import DataError
from rigsweep.datasets.images import PreparedImages, open_prepared, prepare
from rigsweep.datasets.settings import ImageData

from .test_image_readers import RED, encoded, gradient, plain, write_parquet, write_tar


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Forty images of 8 × 8 that all differ, in a Parquet file; their numbers stand in their pixels."""
    contents = [plain((number, 255 - number, 0)) for number in range(40)]
    captions = [f"number {number}" for number in range(40)]
    labels = [number % 4 for number in range(40)]
    path = tmp_path / "source.parquet"
    return write_parquet(path, {"img": contents, "label": labels, "text": captions}, ["a", "b", "c", "d"])


def settings(source: str | Path, /, **changes: Any) -> ImageData:
    return ImageData.model_validate({"source": str(source)} | changes)


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


def refusal(action: Callable[[], object]) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def held_out(prepared: PreparedImages) -> tuple[np.ndarray, np.ndarray]:
    return prepared.validation(np.arange(prepared.validation_rows))


def test_digits_are_prepared_from_nothing(cache: Path) -> None:
    prepared = prepare(ImageData(), cache)
    assert (prepared.size, prepared.channels, prepared.classes, prepared.damaged) == (8, 1, 10, 0)
    assert prepared.class_names == list("0123456789") and prepared.captions is None
    assert prepared.train_rows + prepared.validation_rows == 1797
    assert prepared.validation_rows == pytest.approx(180, abs=45)
    pixels, labels = prepared.rows(0, 64, seed=1)
    assert pixels.shape == (64, 1, 8, 8) and pixels.dtype == np.uint8 and labels.dtype == np.int64
    assert prepare(ImageData(channels=3, size=16, enlarge=True), cache).rows(0, 2, 0)[0].shape == (2, 3, 16, 16)


def test_rows_carry_their_labels_and_captions(source: Path, cache: Path) -> None:
    prepared = prepare(settings(source), cache)
    assert prepared.class_names == ["a", "b", "c", "d"] and prepared.captions is not None
    pixels, labels = prepared.rows(5, 70, seed=3)
    assert np.array_equal(pixels[:, 0, 0, 0] % 4, labels)
    numbers = prepared.training_images(5, 70, seed=3)
    assert np.array_equal(pixels[:, 0, 4, 4], numbers) and np.array_equal(pixels[:, 1, 4, 4], 255 - numbers)
    assert prepared.captions[numbers[0]] == f"number {numbers[0]}"
    kept = held_out(prepared)[0][:, 0, 0, 0]
    assert np.array_equal(kept, prepared.validation_images(np.arange(prepared.validation_rows)))


def test_batches_lie_as_channels_last(source: Path, cache: Path) -> None:
    for pixels, _ in (prepare(settings(source), cache).rows(0, 8, 0), held_out(prepare(settings(source), cache))):
        assert torch.from_numpy(pixels).is_contiguous(memory_format=torch.channels_last)


def test_an_epoch_takes_each_training_image_once_in_its_own_order(source: Path, cache: Path) -> None:
    prepared = prepare(settings(source, validation=0.3), cache)
    n = prepared.train_rows
    kept = set(held_out(prepared)[0][:, 0, 0, 0].tolist())
    orders = [prepared.rows(epoch * n, n, seed)[0][:, 0, 0, 0].tolist() for epoch, seed in ((0, 0), (1, 0), (0, 1))]
    for order in orders:
        assert sorted(order) == sorted(set(range(40)) - kept)
    assert len({tuple(order) for order in orders}) == 3
    whole = prepared.rows(0, 3 * n, 0)
    parts = [prepared.rows(first, 7, 0) for first in range(0, 3 * n - 6, 7)]
    for index in range(2):
        joined = np.concatenate([part[index] for part in parts])
        assert np.array_equal(joined, whole[index][: len(joined)])


def test_flips_follow_from_seed_epoch_and_image(tmp_path: Path, cache: Path) -> None:
    stripes = np.zeros((200, 4, 4), np.uint8)
    stripes[:, 1, 1] = np.arange(200)
    stripes[:, :, 0] = 255  # the left edge
    contents = [encoded(Image.fromarray(stripe)) for stripe in stripes]
    write_parquet(tmp_path / "a.parquet", {"img": contents})
    plain_set, flipping = (prepare(settings(tmp_path, channels=1, flip=flip), cache) for flip in (False, True))
    assert plain_set.folder == flipping.folder and plain_set.fingerprint == flipping.fingerprint
    n = flipping.train_rows

    def mirrored(epoch: int, seed: int) -> dict[int, bool]:
        as_they_are, found = plain_set.rows(epoch * n, n, seed)[0], flipping.rows(epoch * n, n, seed)[0]
        turned = found[:, 0, 0, 3] == 255
        assert np.array_equal(np.where(turned[:, None, None, None], found[..., ::-1], found), as_they_are)
        return dict(zip(as_they_are[:, 0, 1, 1].tolist(), turned.tolist(), strict=True))

    drawn = [mirrored(0, 0), mirrored(1, 0), mirrored(0, 1)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert np.mean([drawn[one][image] == drawn[other][image] for image in drawn[0]]) == pytest.approx(0.5, abs=0.15)
    assert np.mean(list(drawn[0].values())) == pytest.approx(0.5, abs=0.15)
    assert mirrored(0, 0) == drawn[0]
    assert np.array_equal(held_out(flipping)[0], held_out(plain_set)[0])


def test_an_image_keeps_its_part_when_others_come_and_go(tmp_path: Path) -> None:
    contents = [plain((number, number // 2, 7)) for number in range(120)]
    kept = []
    for number, some in enumerate((contents, contents[40:], contents[::-1], contents + contents)):
        path = write_parquet(tmp_path / "a.parquet", {"img": some})
        prepared = prepare(settings(path, validation=0.3), tmp_path / str(number))
        training = prepared.rows(0, prepared.train_rows, 0)[0][:, 0, 0, 0]
        kept.append(set(held_out(prepared)[0][:, 0, 0, 0].tolist()))
        assert kept[-1].isdisjoint(training.tolist())
    assert kept[0] == kept[2] == kept[3]  # also equal images are in one part
    assert kept[1] == {image for image in kept[0] if image >= 40}


@pytest.mark.parametrize("validation", [0.000001, 0.999999])
def test_both_parts_of_a_tiny_set_have_something(source: Path, cache: Path, validation: float) -> None:
    prepared = prepare(settings(source, validation=validation), cache)
    assert {prepared.train_rows, prepared.validation_rows} == {1, 39}


def test_preparing_again_decodes_nothing(source: Path, cache: Path) -> None:
    stages: list[tuple[str, int, int]] = []
    first = prepare(settings(source), cache, lambda *stage: stages.append(stage))
    assert {stage for stage, _, _ in stages} == {"images"} and all(0 < done <= total for _, done, total in stages)
    assert stages[-1][1] == stages[-1][2] == source.stat().st_size
    stages.clear()
    again = prepare(settings(source), cache, lambda *stage: stages.append(stage))
    assert not stages and again.folder == first.folder and again.fingerprint == first.fingerprint


def test_the_fingerprint_follows_what_decides_the_rows(source: Path, cache: Path) -> None:
    changes: tuple[dict[str, Any], ...] = (
        {},
        {"size": 4},
        {"channels": 1},
        {"validation": 0.2},
        {"label_column": "text"},
    )
    folders = [prepare(settings(source, **change), cache).folder for change in changes]
    write_parquet(source, {"img": [plain(RED), plain(0)]})
    folders.append(prepare(settings(source), cache).folder)
    assert len(set(folders)) == 6 and visible(cache) == sorted(folder.name for folder in folders)


def test_many_batches_are_as_one(source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = prepare(settings(source), cache)
    monkeypatch.setattr(images, "BATCH_IMAGES", 3)
    parts = prepare(settings(source), cache.with_name("other"))
    monkeypatch.setattr(images, "BATCH_BYTES", 1)
    single = prepare(settings(source), cache.with_name("another"))
    assert whole.manifest == parts.manifest == single.manifest


def folder_of(tmp_path: Path, contents: dict[str, bytes]) -> Path:
    for name, content in contents.items():
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(content)
    return tmp_path / "set"


def test_class_folders_are_numbered_in_sorted_order(tmp_path: Path, cache: Path) -> None:
    place = folder_of(
        tmp_path, {f"{name}/{n}.png": plain((ord(name[0]), n, 0)) for name in ("dog", "cat") for n in range(5)}
    )
    prepared = prepare(settings(place), cache)
    assert prepared.class_names == ["cat", "dog"]
    pixels, labels = prepared.rows(0, prepared.train_rows, 0)
    assert np.array_equal(pixels[:, 0, 0, 0] == ord("d"), labels == 1)
    assert prepare(settings(place / "dog"), cache).classes is None
    assert prepare(settings(place / "dog"), cache).rows(0, 3, 0)[1].tolist() == [0, 0, 0]
    assert prepare(settings(f"{place}/d*/*"), cache).class_names == ["dog"]


def test_damaged_images_are_left_out_and_listed(tmp_path: Path, cache: Path) -> None:
    photograph = encoded(gradient(32, 32), "JPEG")
    good = {f"{number}.png": plain((number, 0, 0), 32) for number in range(18)}
    place = folder_of(tmp_path, good | {"cut.jpg": photograph[:400], "page.jpg": b"<html>"})
    prepared = prepare(settings(place, damaged=0.1), cache)
    assert prepared.damaged == 2 and prepared.train_rows + prepared.validation_rows == 18
    listed = [json.loads(line) for line in (prepared.folder / "damaged.jsonl").read_text().splitlines()]
    assert [entry["name"] for entry in listed] == ["cut.jpg", "page.jpg"]
    assert "truncated" in listed[0]["reason"].lower() and listed[1]["reason"] == "no image of a known format"
    message = refusal(lambda: prepare(settings(place), cache))
    assert "2 of 20 images are damaged, more than data.damaged = 0.01 allows: cut.jpg (" in message
    assert visible(cache) == [prepared.folder.name]


def test_a_cut_shard_is_damage(tmp_path: Path, cache: Path) -> None:
    path = write_tar(tmp_path / "a.tar", {f"{n:03}.png": encoded(gradient(32, 32 + n)) for n in range(10)})
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.index(b"006.png") + 700])
    assert "a.tar: 006 (the shard is damaged or cut short here)" in refusal(
        lambda: prepare(settings(path, size=32), cache)
    )
    prepared = prepare(settings(path, size=32, damaged=0.5), cache)
    assert prepared.damaged == 1 and prepared.train_rows + prepared.validation_rows == 6


def test_a_set_without_one_good_image_is_refused(tmp_path: Path, cache: Path) -> None:
    empty = write_parquet(tmp_path / "a.parquet", {"img": pa.array([], pa.binary())})
    assert "a.parquet: holds no images" in refusal(lambda: prepare(settings(empty), cache))
    broken = write_parquet(tmp_path / "b.parquet", {"img": [b"x", b"y"]})
    assert "2 of 2 images are damaged" in refusal(lambda: prepare(settings(broken, damaged=1), cache))
    one = write_parquet(tmp_path / "c.parquet", {"img": [plain(RED)] * 3})
    assert "one image cannot be divided; give at least two that differ" in refusal(
        lambda: prepare(settings(one), cache)
    )
    assert visible(cache) == []


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ([0, -1], "a.parquet row 1: label -1 is not within 0 to 999,999"),
        ([0, 10**7], "a.parquet row 1: label 10000000 is not within 0 to 999,999"),
        ([0, None], "a.parquet row 1: has none as label, and a.parquet row 0 a number; label all images"),
        ([None, "a"], "a.parquet row 1: has a name as label, and a.parquet row 0 none"),
    ],
)
def test_a_wrong_label_is_named_with_its_image(tmp_path: Path, cache: Path, labels: list[Any], what: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"img": [plain(RED), plain(0)], "label": labels})
    assert what in refusal(lambda: prepare(settings(path), cache))


def test_labels_go_with_the_names_and_kinds_that_the_set_has(tmp_path: Path, cache: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"img": [plain(RED), plain(0)], "label": [0, 2]}, ["cat", "dog"])
    assert "row 1: label 2 is not within 0 to 1" in refusal(lambda: prepare(settings(path), cache))
    lines = [{"file_name": f"{number}.png", "label": label} for number, label in enumerate((True, False))]
    place = folder_of(tmp_path, {f"{number}.png": plain((number, 0, 0)) for number in range(2)})
    (place / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "0.png: label True is neither a whole number nor a name" in refusal(lambda: prepare(settings(place), cache))


def test_sizes_that_do_not_go_together_are_named(tmp_path: Path, cache: Path) -> None:
    place = folder_of(tmp_path, {"a.png": plain(RED, 16), "b.png": encoded(gradient(24, 24)), "c.png": plain(0, 16)})
    message = refusal(lambda: prepare(settings(place), cache))
    assert "b.png: 24 × 24 pixels, where the images before it have 16 × 16; set data.size" in message
    assert prepare(settings(place, size=16), cache).size == 16
    message = refusal(lambda: prepare(settings(place, size=20), cache))
    assert "a.png: 16 × 16 pixels are smaller than data.size = 20" in message
    assert prepare(settings(place, size=20, enlarge=True), cache).rows(0, 2, 0)[0].shape == (2, 3, 20, 20)


PREPARE = """
import sys, time
from pathlib import Path
from rigsweep.datasets import images
from rigsweep.datasets.settings import ImageData
source, cache, marker, seconds = sys.argv[1:]
images.BATCH_IMAGES = 10
def progress(stage, done, total):
    Path(marker).touch()
    time.sleep(float(seconds))
print(images.prepare(ImageData(source=source), Path(cache), progress).folder)
"""


def start(source: Path, cache: Path, marker: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PREPARE, *map(str, (source, cache, marker, seconds))]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def test_processes_that_start_together_make_one_folder(source: Path, cache: Path, tmp_path: Path) -> None:
    markers = [tmp_path / f"marker{number}" for number in range(2)]
    processes = [start(source, cache, marker, 0.3) for marker in markers]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(answers) == 1 and visible(cache) == [Path(answers.pop().strip()).name]
    assert sum(marker.exists() for marker in markers) == 1


def test_a_process_killed_midway_leaves_nothing_that_is_used(source: Path, cache: Path, tmp_path: Path) -> None:
    process = start(source, cache, tmp_path / "marker", 60)
    deadline = time.monotonic() + 60
    while not (tmp_path / "marker").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = visible(cache)
    assert left.endswith(".partial") and (cache / left / "pixels.bin").exists()
    prepared = prepare(settings(source), cache)
    assert visible(cache) == [prepared.folder.name] and prepared.train_rows + prepared.validation_rows == 40


def test_images_that_change_while_they_are_read_are_refused(source: Path, cache: Path) -> None:
    message = refusal(lambda: prepare(settings(source), cache, lambda *_: os.utime(source)))
    assert "changed while it was read" in message and visible(cache) == []


def test_a_full_disk_is_one_line(source: Path, mount_disk: Callable[[str], Path]) -> None:
    place = mount_disk("64k")
    message = refusal(lambda: prepare(settings(source, size=64, enlarge=True), place / "cache"))
    assert f"{place / 'cache'}: the disk is full; free some space" in message
    assert visible(place / "cache") == []


def test_a_flipped_byte_is_found(source: Path, cache: Path) -> None:
    folder = prepare(settings(source), cache).folder
    names = [path.name for path in folder.iterdir() if path.stat().st_size and path.name != "manifest.json"]
    assert sorted(names) == ["captions.jsonl", "labels.bin", "pixels.bin", "training.bin", "validation.bin"]
    for name in names:
        content = (folder / name).read_bytes()
        at = len(content) // 2
        (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        message = refusal(lambda: prepare(settings(source), cache))
        assert message == f"{folder / name}: is damaged; delete {folder} and it is made again"
        (folder / name).write_bytes(content)
    assert prepare(settings(source), cache).folder == folder


def test_a_cut_or_missing_file_is_found_without_reading_the_pixels(source: Path, cache: Path) -> None:
    folder = prepare(settings(source), cache).folder
    for name in ("pixels.bin", "labels.bin", "training.bin", "captions.jsonl", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-4])
        assert f"{folder / name}: is damaged" in refusal(lambda: open_prepared(folder))
        (folder / name).unlink()
        assert str(folder / name) in refusal(lambda: open_prepared(folder))
        (folder / name).write_bytes(content)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(manifest | {"size": 9}))
    assert "manifest.json: is damaged" in refusal(lambda: open_prepared(folder))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"format": 2}))
    assert "was made by a newer version (format 2, this one reads 1)" in refusal(lambda: open_prepared(folder))


def test_validation_rows_outside_are_refused(source: Path, cache: Path) -> None:
    prepared = prepare(settings(source), cache)
    for index in (-1, prepared.validation_rows):
        with pytest.raises(IndexError, match="validation rows are 0 to"):
            prepared.validation(np.array([index]))


def test_cifar_10_is_read_as_the_hub_has_it(shared: Path, cache: Path, tmp_path: Path) -> None:
    table = pq.ParquetFile(shared / "data/cifar10/test.parquet").read_row_group(0).slice(0, 300)
    pq.write_table(table, tmp_path / "cifar.parquet", row_group_size=100)
    prepared = prepare(settings(tmp_path / "cifar.parquet"), cache)
    assert (prepared.size, prepared.channels, prepared.damaged) == (32, 3, 0)
    assert prepared.class_names is not None and prepared.class_names[3] == "cat"
    assert prepared.train_rows + prepared.validation_rows == 300
    numbers = prepared.training_images(0, prepared.train_rows, 0)
    told = np.array(table["label"].to_pylist())
    assert np.array_equal(prepared.rows(0, prepared.train_rows, 0)[1], told[numbers])


def test_emoji_with_transparency_stand_on_white(shared: Path, cache: Path, tmp_path: Path) -> None:
    table = pq.ParquetFile(shared / "data/emoji/test.parquet").read_row_group(0).slice(0, 60)
    pq.write_table(table, tmp_path / "emoji.parquet")
    prepared = prepare(settings(tmp_path / "emoji.parquet", size=32, caption_column="text_zh"), cache)
    assert prepared.captions == table["text_zh"].to_pylist() and prepared.class_names is not None
    corners = prepared.rows(0, prepared.train_rows, 0)[0][:, :, 0, 0]
    assert np.mean(corners == 255) > 0.9


def test_the_division_is_by_the_bytes_and_not_by_the_size(source: Path, cache: Path) -> None:
    small, large = (prepare(settings(source, size=size), cache) for size in (4, 8))
    indices = np.arange(small.validation_rows)
    assert np.array_equal(small.validation_images(indices), large.validation_images(indices))
    threshold = int(0.1 * splits.HASH_RANGE)
    expected = [n for n in range(40) if splits.content_hash(plain((n, 255 - n, 0))) < threshold]
    assert small.validation_images(indices).tolist() == expected
