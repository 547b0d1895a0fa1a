"""Images in files of every kind, what they decode to, and what a person is told when they cannot be read."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rigsweep.datasets import corpus as corpus_module
from rigsweep.datasets import decoding
from rigsweep.datasets.decoding import Damaged, decode
from rigsweep.datasets.errors import DataError
from rigsweep.datasets.image_readers import Example, class_names, read, resolve
from rigsweep.datasets.settings import ImageData

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def plain(colour: Any, size: int = 8, mode: str = "RGB") -> bytes:
    return encoded(Image.new(mode, (size, size), colour))


def gradient(width: int, height: int) -> Image.Image:
    y, x = np.mgrid[:height, :width]
    return Image.fromarray(np.stack((x * 255 // width, y * 255 // height, (x + y) % 256), axis=2).astype(np.uint8))


def pixels(
    content: bytes | np.ndarray, size: int | None = None, channels: int = 3, enlarge: bool = False
) -> np.ndarray:
    return decode("the image", content, size, channels, enlarge)


def everything(source: str | Path, /, **settings: Any) -> list[Example]:
    data = ImageData(source=str(source), **settings)
    return list(read(resolve(data.source), data))


def refusal(source: str | Path, /, **settings: Any) -> str:
    with pytest.raises(DataError) as caught:
        everything(source, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_parquet(path: Path, columns: dict[str, Any], names: list[str] | None = None) -> Path:
    table = pa.table(columns)
    if names:
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path)
    return path


def write_tar(path: Path, members: dict[str, bytes | str]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            content = content.encode() if isinstance(content, str) else content
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize("kind", ["PNG", "BMP", "WEBP", "GIF", "TIFF", "PPM"])
def test_lossless_formats_are_their_pixels(kind: str) -> None:
    image = Image.new("RGB", (8, 8), BLUE)
    image.putpixel((1, 2), RED)
    found = pixels(encoded(image, kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert found.shape == (8, 8, 3) and found.dtype == np.uint8
    assert tuple(found[2, 1]) == RED and tuple(found[0, 0]) == BLUE


def test_what_is_transparent_shows_white() -> None:
    half = Image.new("RGBA", (8, 8), (*RED, 128))
    half.putpixel((0, 0), (*BLUE, 0))
    found = pixels(encoded(half))
    assert tuple(found[0, 0]) == WHITE and tuple(found[1, 1]) == (255, 127, 127)
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([*BLUE, *GREEN])
    palette.putpixel((0, 0), 0)
    assert tuple(pixels(encoded(palette))[0, 0]) == BLUE
    found = pixels(encoded(palette, transparency=0))
    assert tuple(found[0, 0]) == WHITE and tuple(found[1, 1]) == GREEN
    grey = Image.new("LA", (8, 8), (0, 0))
    assert pixels(encoded(grey), channels=1).tolist() == np.full((8, 8, 1), 255).tolist()
    assert tuple(pixels(encoded(Image.new("RGB", (8, 8), RED), transparency=RED))[0, 0]) == WHITE


def test_grey_and_colour_become_the_channels_asked_for() -> None:
    assert np.array_equal(pixels(plain(100, mode="L")), np.full((8, 8, 3), 100))
    assert pixels(plain(GREEN), channels=1)[0, 0, 0] == 150  # 0.587 of 255: luma of ITU-R 601
    assert pixels(encoded(Image.new("1", (8, 8), 1)), channels=1).max() == 255


def test_cmyk_is_not_inverted() -> None:
    found = pixels(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG", quality=95))
    assert np.abs(found[4, 4].astype(int) - RED).max() < 8


def test_sixteen_bits_are_scaled_and_not_clipped() -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    for kind in ("PNG", "TIFF"):
        found = pixels(encoded(Image.fromarray(values), kind), channels=1)[..., 0]
        assert np.abs(found - values / 257).max() <= 0.5
    assert pixels(encoded(Image.fromarray(values.astype(np.int32)), "TIFF"))[7, 7].tolist() == [255] * 3
    for unclear in (values.astype(np.int32) * 9, values.astype(np.float32)):
        with pytest.raises(Damaged, match="nobody knows which is white"):
            pixels(encoded(Image.fromarray(unclear), "TIFF"))


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_photograph_stands_as_its_exif_says(orientation: int) -> None:
    upright = gradient(24, 24)
    turns = {1: 0, 3: 180, 6: 90, 8: 270}  # as the camera was held; PIL turns counter-clockwise
    exif = Image.Exif()
    exif[0x0112] = orientation
    for kind in ("PNG", "JPEG"):
        found = pixels(encoded(upright.rotate(turns[orientation]), kind, exif=exif))
        assert np.abs(found[..., :2].astype(int) - np.asarray(upright)[..., :2]).max() < 40


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_an_animation_the_first_frame_is_taken(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    found = pixels(encoded(frames[0], kind, save_all=True, append_images=frames[1:]))
    assert np.abs(found[4, 4].astype(int) - RED).max() < 8


def test_the_middle_square_is_scaled_without_aliasing() -> None:
    wide = gradient(96, 32)
    assert np.array_equal(pixels(encoded(wide), 32), np.asarray(wide)[:, 32:64])  # only cropped: no pixel changes
    assert np.array_equal(pixels(encoded(wide.rotate(90, expand=True)), 32), np.rot90(np.asarray(wide)[:, 32:64]))
    small = pixels(encoded(wide), 8)
    means = np.asarray(wide)[:, 32:64, :2].reshape(8, 4, 8, 4, 2).mean(axis=(1, 3))
    assert np.abs(small[1:-1, 1:-1, :2] - means[1:-1, 1:-1]).max() < 3
    stripes = np.zeros((64, 64), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(pixels(stripes, 20, 1)[:, 1:-1].astype(int) - 127).max() < 30  # picked pixels would be 0 or 255


def test_an_image_that_does_not_fit_the_size_is_named_with_the_setting() -> None:
    with pytest.raises(DataError, match=r"the image: 24 × 16 pixels are smaller than data.size = 32; .*data.enlarge"):
        pixels(encoded(gradient(24, 16)), 32)
    assert pixels(encoded(gradient(24, 16)), 32, enlarge=True).shape == (32, 32, 3)
    with pytest.raises(DataError, match=r"24 × 16 pixels are no square; set data\.size"):
        pixels(encoded(gradient(24, 16)))


def test_damaged_bytes_are_known() -> None:
    photograph = encoded(gradient(64, 64), "JPEG")
    with pytest.raises(Damaged, match=r"(?i)truncated"):
        pixels(photograph[: len(photograph) // 2])
    for content, reason in ((b"", "no bytes"), (b"<html>not found</html>", "no image of a known format")):
        with pytest.raises(Damaged, match=reason):
            pixels(content)
    flipped = bytearray(plain(RED))
    flipped[-20] ^= 1  # within the compressed pixels
    with pytest.raises(Damaged):
        pixels(bytes(flipped))


@pytest.mark.filterwarnings("ignore")
def test_any_damage_is_damage_and_nothing_else() -> None:
    generator = np.random.default_rng(0)
    kinds = {kind: encoded(gradient(16, 16), kind) for kind in ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "PPM")}
    refused = 0
    for content in kinds.values():
        for _ in range(150):
            broken = bytearray(content[: generator.integers(1, len(content) + 1)])
            broken[generator.integers(len(broken))] ^= 1 << generator.integers(8)
            try:
                pixels(bytes(broken), 16, enlarge=True)
            except Damaged:
                refused += 1
    assert refused > 500


def test_a_decompression_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Damaged, match="decompression bomb"):
        pixels(encoded(Image.new("1", (20_000, 20_000))))
    monkeypatch.setattr(decoding, "PIXELS", 100)
    with pytest.raises(Damaged, match="11 × 11 pixels are more than 100"):
        pixels(plain(RED, 11))


def test_a_format_that_runs_programs_is_not_opened() -> None:
    with pytest.raises(Damaged, match="no image of a known format"):
        pixels(encoded(Image.new("RGB", (8, 8)), "EPS"))


def test_digits_are_there_without_any_file() -> None:
    examples = everything("digits")
    assert len(examples) == 1797 and sorted({example.label for example in examples}) == list(range(10))
    content = np.stack([np.asarray(example.content) for example in examples])
    assert content.shape == (1797, 8, 8) and content.min() == 0 and content.max() == 255


def test_a_folders_subfolders_are_its_classes(tmp_path: Path) -> None:
    for name in ("dog/b.png", "cat/deep/a.PNG", "dog/.hidden.png", "cat/notes.txt", ".git/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_bytes(plain(RED))
    found = [(example.name, example.label) for example in everything(tmp_path)]
    assert found == [("cat/deep/a.PNG", "cat"), ("dog/b.png", "dog")]
    assert [(example.name, example.label) for example in everything(tmp_path / "*/*.png")] == [("dog/b.png", "dog")]
    assert [(example.name, example.label) for example in everything(tmp_path / "dog")] == [("b.png", None)]
    assert everything(tmp_path / "dog/b.png")[0].content == plain(RED)


def test_metadata_names_labels_and_captions(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.png").write_bytes(plain(RED))
    (tmp_path / "unnamed.png").write_bytes(plain(RED))
    lines = [
        {"file_name": "in/a.png", "text": "a 红 square", "label": 3},
        {"file_name": "gone.png", "text": "", "label": 1},
    ]
    metadata = tmp_path / "metadata.jsonl"
    metadata.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines), encoding="utf-8")
    for source in (tmp_path, metadata):
        first, gone = everything(source)
        assert (first.name, first.label, first.caption) == ("in/a.png", 3, "a 红 square")
        assert first.content == plain(RED) and gone.fault == "cannot be read (No such file or directory)"
    assert everything(tmp_path, label_column="file_name")[0].label == "in/a.png"
    assert "line 1 has no `title`; set data.caption_column to one of: file_name, text, label" in refusal(
        tmp_path, caption_column="title"
    )


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "line 2 is not JSON"),
        ('{"text": "x"}', "line 2 has no `file_name`"),
        ("[1]", "line 2 has no `file_name`"),
        ('{"file_name": "../a.png"}', "line 2: '../a.png' leads out of the folder"),
        ('{"file_name": "/etc/passwd"}', "line 2: '/etc/passwd' leads out of the folder"),
        ('{"file_name": "a.png", "text": ["x"]}', "line 2: its caption is not a text"),
        ('{"file_name": "a.png", "text": "\\ud800"}', "line 2: its caption is not a text"),
    ],
)
def test_a_wrong_line_of_metadata_is_named(tmp_path: Path, line: str, what: str) -> None:
    (tmp_path / "a.png").write_bytes(plain(RED))
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png"}\n' + line)
    assert f"{tmp_path / 'metadata.jsonl'}: {what}" in refusal(tmp_path)


@pytest.mark.parametrize("image", ["image", "img"])
@pytest.mark.parametrize("nested", [True, False])
def test_parquet_of_the_hubs_schema_and_plain_bytes(tmp_path: Path, image: str, nested: bool) -> None:
    contents = [plain(RED), plain(BLUE), None]
    column = [{"bytes": content, "path": "a.png"} for content in contents] if nested else contents
    columns = {image: column, "labels": [1, 0, 1], "caption": ["red", None, "none"], "text": [["a"], [], []]}
    path = write_parquet(tmp_path / "a.parquet", columns)
    for source in (path, tmp_path, tmp_path / "*.parquet"):
        found = everything(source)
        assert [(e.name, e.content, e.label, e.caption, e.fault) for e in found] == [
            ("a.parquet row 0", plain(RED), 1, "red", ""),
            ("a.parquet row 1", plain(BLUE), 0, None, ""),
            ("a.parquet row 2", b"", 1, "none", "no bytes"),
        ]


def test_the_hubs_schema_names_the_classes(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"img": [plain(RED)], "label": [0]}, ["cat", "dog"])
    data = ImageData(source=str(path))
    assert class_names(resolve(data.source), data) == ["cat", "dog"]
    data = ImageData(source=str(write_parquet(path, {"img": [plain(RED)], "label": [0]})))
    assert class_names(resolve(data.source), data) is None


def test_a_wrong_column_lists_the_right_ones(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"picture": [plain(RED)], "n": [1], "title": ["x"]})
    assert refusal(path) == f"{path}: no column `image` or `img`; set data.image_column to one of: picture"
    assert "column `n` holds int64, not images; set data.image_column to one of: picture" in refusal(
        path, image_column="n"
    )
    chosen = {"image_column": "picture", "label_column": "n", "caption_column": "title"}
    (found,) = everything(path, **chosen)
    assert (found.content, found.label, found.caption) == (plain(RED), 1, "x")
    assert "no column `x`; set data.label_column to one of: n, title" in refusal(path, **chosen | {"label_column": "x"})
    assert "column `n` holds int64, not captions" in refusal(path, **chosen | {"caption_column": "n"})
    path = write_parquet(tmp_path / "a.parquet", {"n": [1]})
    assert refusal(path) == f"{path}: no column `image` or `img`; give another file"


def test_a_cut_parquet_is_named(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", {"img": [plain(RED)] * 50})
    whole = path.read_bytes()
    for content in (whole[:-30], b"", b"PAR1" + bytes(100)):
        path.write_bytes(content)
        assert f"{path}: is damaged or cut short" in refusal(path)


SHARD = {
    "000.jpg": plain(RED), "000.json": '{"caption": "from json", "label": 5}',
    "001.json": '{"caption": "from json"}', "001.png": plain(BLUE), "001.txt": "from text\n", "001.cls": "7",
    "README": "no sample", "dir/002.seg.png": plain(RED), "dir/002.png": plain(GREEN), "dir/002.cls": "dog",
}  # fmt: skip


def test_tar_shards_are_webdatasets(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "00000.tar", SHARD)
    for source in (path, tmp_path, tmp_path / "0*.tar"):
        found = [(e.name, e.content, e.label, e.caption, e.fault) for e in everything(source)]
        assert found == [
            ("00000.tar: 000", plain(RED), 5, "from json", ""),
            ("00000.tar: 001", plain(BLUE), 7, "from text", ""),
            ("00000.tar: dir/002", plain(GREEN), "dog", None, ""),
        ]
    assert (
        everything(write_tar(path, dict(list(SHARD.items())[2:6])), caption_column="caption")[0].caption == "from json"
    )


def test_a_shard_that_is_cut_loses_what_is_cut_and_says_so(tmp_path: Path) -> None:
    members = {
        f"{n:03}.{suffix}": content for n in range(4) for suffix, content in (("png", plain(RED)), ("txt", "red"))
    }
    whole = write_tar(tmp_path / "a.tar", members).read_bytes()
    each = len(whole[: whole.index(b"001.png")])  # header and content of an image and its text
    for cut, good in (
        (2 * each + 600, 2),
        (2 * each + 1024 + 512 + 1, 2),
        (2 * each + 100, 2),
        (3 * each + 512, 3),
        (3 * each, 3),
    ):
        (tmp_path / "a.tar").write_bytes(whole[:cut])
        *kept, last = everything(tmp_path)
        assert [example.fault for example in kept] == [""] * good and last.fault.startswith("the shard is damaged")
    (tmp_path / "a.tar").write_bytes(whole[:each] + b"x" * 512 + whole[each + 512 :])  # a header in the middle
    first, rest = everything(tmp_path)
    assert first.name == "a.tar: 000" and rest.name == f"a.tar: byte {each}" and rest.fault
    assert len(everything(write_tar(tmp_path / "a.tar", members))) == 4


def test_a_sample_with_unreadable_words_is_damaged_and_no_shard_at_all_an_error(tmp_path: Path) -> None:
    bad, good = everything(
        write_tar(tmp_path / "a.tar", {"0.png": plain(RED), "0.json": "{", "1.png": plain(RED), "1.txt": "red"})
    )
    assert "what goes with it cannot be read" in bad.fault and good.caption == "red"
    for content in (b"", b"this is no shard" * 100):
        (tmp_path / "a.tar").write_bytes(content)
        assert "a.tar: is damaged or cut short" in refusal(tmp_path)


def test_a_source_without_images_says_what_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "notes.csv").write_text("x")
    for source in (tmp_path, tmp_path / "*.csv", tmp_path / "*.png", tmp_path / "notes.csv"):
        message = refusal(source)
        assert f"source {source}: no images there" in message and ".webp" in message and ".parquet or .tar" in message
    assert f"no such file or folder (did you mean {tmp_path / 'notes.csv'}?)" in refusal(tmp_path / "note.csv")
    assert "did you mean digits?" in refusal("digit")


def test_files_of_different_kinds_are_refused(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", {"img": [plain(RED)]})
    (tmp_path / "banner.png").write_bytes(plain(RED))
    message = refusal(tmp_path)
    assert "holds a.parquet and banner.png, of different kinds" in message and f"{tmp_path}/**/*.parquet" in message
    assert len(everything(f"{tmp_path}/**/*.parquet")) == 1


def test_a_hub_source_is_read_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module.hub, "snapshot_download", lambda *_, **__: str(tmp_path))
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data/train-0.parquet", {"image": [plain(RED)]})
    write_parquet(tmp_path / "data/test-0.parquet", {"image": [plain(BLUE)]})
    (found,) = everything("hf://datasets/o/n@main/data/train-*.parquet")
    assert found.name == "train-0.parquet row 0" and found.content == plain(RED)
    assert "no images there" in refusal("hf://datasets/o/n/other/*.parquet")
    assert "source hf://datasets/o/n: write hf://datasets/<owner>/<name>/<glob>" in refusal("hf://datasets/o/n")


def test_a_hub_source_offline_says_what_to_do(tmp_path: Path) -> None:
    code = (
        "from rigsweep.datasets.image_readers import resolve\n"
        "from rigsweep.datasets.errors import DataError, NoCorpus\n"
        "try: resolve('hf://datasets/someone/something/*.parquet')\n"
        "except DataError as error: print(type(error).__name__, error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert answer.stdout.startswith("DataError source hf://datasets/someone/something/*.parquet: offline mode is on")
    assert answer.stdout.count("\n") == 1 and "give the local folder as source" in answer.stdout
