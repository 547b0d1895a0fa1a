"""A prepared corpus: made once, whole or not at all, and checked when it is opened."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rigsweep.datasets import shards
from rigsweep.datasets.errors import DataError
from rigsweep.datasets.settings import TextData
from rigsweep.datasets.tokens import PreparedText, open_prepared, prepare

SHARED = Path(os.environ.get("RIGSWEEP_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for name in ("a", "b"):
        lines = "".join(f"File {name}, line {number}: 天地玄黄 and more\n" for number in range(1_000))
        (folder / f"{name}.txt").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def settings(corpus: Path, /, **changes: object) -> TextData:
    return TextData.model_validate({"corpus": str(corpus), "vocabulary": 400, "validation": "last 10%"} | changes)


def text_of(prepared: PreparedText, part: str) -> str:
    stream = getattr(prepared, part)
    return prepared.vocabulary.decode(stream.windows(np.array([0]), len(stream))[0])


def visible(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("vocabulary", [400, "characters"])
def test_the_parts_decode_to_the_texts_with_one_token_between_files(corpus: Path, cache: Path, vocabulary):
    prepared = prepare(settings(corpus, vocabulary=vocabulary), cache)
    texts = [(corpus / f"{name}.txt").read_text(encoding="utf-8") for name in "ab"]
    cuts = [len(text) * 9 // 10 for text in texts]
    between = prepared.vocabulary.decode([prepared.vocabulary.end_of_document])
    assert text_of(prepared, "training") == between.join(text[:cut] for text, cut in zip(texts, cuts, strict=True))
    whole = between.join(text[cut:] for text, cut in zip(texts, cuts, strict=True))
    if vocabulary == 400:
        assert text_of(prepared, "validation") == whole
    written = prepared.manifest.validation
    assert written.text_bytes == sum(len(text[cut:].encode()) for text, cut in zip(texts, cuts, strict=True))
    assert prepared.bytes_per_token("validation") == written.text_bytes / len(prepared.validation)
    assert written.documents == 2


def test_shards_are_bounded_and_read_as_one(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    whole = prepare(settings(corpus), cache)
    monkeypatch.setattr(shards, "SHARD_TOKENS", 1_000)
    parts = prepare(settings(corpus), cache.with_name("other"))
    sizes = [shard.tokens for shard in parts.manifest.training.shards]
    assert len(sizes) > 3 and set(sizes[:-1]) == {1_000}
    starts = np.arange(0, len(whole.training) - 1_500, 333)
    assert np.array_equal(whole.training.windows(starts, 1_500), parts.training.windows(starts, 1_500))


def test_preparing_again_reuses_the_folder(corpus: Path, cache: Path):
    stages: list[tuple[str, int, int]] = []
    first = prepare(settings(corpus), cache, lambda *stage: stages.append(stage))
    assert list(dict.fromkeys(stage for stage, _, _ in stages)) == ["read", "vocabulary", "tokens"]
    assert all(0 < done <= total for _, done, total in stages)
    assert [done for stage, done, total in stages if stage == "tokens"][-1] == stages[-1][2]
    stages.clear()
    again = prepare(settings(corpus, sequence_length=7), cache, lambda *stage: stages.append(stage))
    assert not stages and again.folder == first.folder and again.vocabulary.hash == first.vocabulary.hash


def test_the_fingerprint_follows_what_decides_the_tokens(corpus: Path, cache: Path):
    changes = ({}, {"vocabulary": 300}, {"validation": 0.2}, {"corpus": f"{corpus}/a.txt"})
    folders = [prepare(settings(corpus, **change), cache).folder for change in changes]
    (corpus / "a.txt").write_text("Another text. " * 500)
    folders.append(prepare(settings(corpus), cache).folder)
    assert len(set(folders)) == 5
    assert visible(cache) == sorted(folder.name for folder in folders)


def test_a_vocabulary_of_more_than_65536_is_stored_wide(corpus: Path, cache: Path, tmp_path: Path):
    made = prepare(settings(corpus), cache)
    tokenizer = json.loads((made.folder / "tokenizer.json").read_text())
    far = len(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] |= {f"filler{number}": number for number in range(far, 70_000)}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    wide = prepare(settings(corpus, vocabulary=str(tmp_path / "tokenizer.json")), cache)
    assert wide.manifest.dtype == "uint32" and wide.vocabulary.size == 70_000 and made.manifest.dtype == "uint16"
    assert text_of(wide, "training") == text_of(made, "training")


PREPARE = """
import sys, time
from pathlib import Path
from rigsweep.datasets.settings import TextData
from rigsweep.datasets.tokens import prepare
corpus, cache, marker, seconds = sys.argv[1:]
def progress(stage, done, total):
    if stage == "tokens":
        Path(marker).touch()
        time.sleep(float(seconds))
data = TextData(corpus=corpus, vocabulary=400, validation="last 10%")
print(prepare(data, Path(cache), progress).folder)
"""


def start(corpus: Path, cache: Path, marker: Path, seconds: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PREPARE, *map(str, (corpus, cache, marker, seconds))]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)


def wait_for(marker: Path) -> None:
    deadline = time.monotonic() + 60
    while not marker.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_processes_that_start_together_make_one_folder(corpus: Path, cache: Path, tmp_path: Path):
    markers = [tmp_path / f"marker{number}" for number in range(2)]
    processes = [start(corpus, cache, marker, 1.5) for marker in markers]
    answers = {process.communicate(timeout=60)[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(answers) == 1 and visible(cache) == [Path(answers.pop().strip()).name]
    assert sum(marker.exists() for marker in markers) == 1


def test_a_process_killed_midway_leaves_nothing_that_is_used(corpus: Path, cache: Path, tmp_path: Path):
    process = start(corpus, cache, tmp_path / "marker", 60)
    wait_for(tmp_path / "marker")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    (left,) = visible(cache)
    assert left.endswith(".partial")
    elsewhere = prepare(settings(corpus / "a.txt"), cache)  # the next to make anything tidies up
    assert visible(cache) == [elsewhere.folder.name]
    assert len(prepare(settings(corpus), cache).training) > 1_000


def test_the_work_of_a_living_process_is_not_tidied_away(corpus: Path, cache: Path, tmp_path: Path):
    process = start(corpus, cache, tmp_path / "marker", 60)
    wait_for(tmp_path / "marker")
    prepare(settings(corpus / "a.txt"), cache)
    assert any(name.endswith(".partial") for name in visible(cache))
    process.kill()
    process.communicate()


def test_a_failure_or_a_full_disk_leaves_nothing(corpus: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shards.ShardWriter, "_append", full)
    with pytest.raises(DataError, match=r"cache: the disk is full; free some space") as caught:
        prepare(settings(corpus), cache)
    assert "\n" not in str(caught.value) and visible(cache) == []
    monkeypatch.undo()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(settings(corpus), cache, interrupt)
    assert visible(cache) == []


def test_a_cache_that_cannot_be_a_folder_is_named(corpus: Path, cache: Path):
    cache.write_text("a file")
    with pytest.raises(DataError, match="cache: cannot be written"):
        prepare(settings(corpus), cache)


def test_a_corpus_that_changes_while_it_is_read_is_refused(corpus: Path, cache: Path):
    def write(stage: str, done: int, total: int) -> None:
        if stage == "tokens":
            (corpus / "a.txt").write_text("changed")

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(settings(corpus), cache, write)
    assert visible(cache) == []


def refusal(action) -> str:
    with pytest.raises(DataError) as caught:
        action()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_flipped_byte_is_found(corpus: Path, cache: Path):
    folder = prepare(settings(corpus), cache).folder
    for name in ("training-00000.bin", "validation-00000.bin", "tokenizer.json"):
        content = (folder / name).read_bytes()
        at = len(content) // 2
        (folder / name).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        message = refusal(lambda: prepare(settings(corpus), cache))
        assert str(folder / name) in message and f"delete {folder} and it is made again" in message
        (folder / name).write_bytes(content)
    assert prepare(settings(corpus), cache).folder == folder


def test_a_cut_or_missing_file_is_found_without_reading_the_shards(corpus: Path, cache: Path):
    folder = prepare(settings(corpus), cache).folder
    for name in ("training-00000.bin", "tokenizer.json", "manifest.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[:-4])
        assert f"{folder / name}: is damaged" in refusal(lambda: open_prepared(folder))
        (folder / name).unlink()
        assert str(folder / name) in refusal(lambda: open_prepared(folder))
        (folder / name).write_bytes(content)
    assert len(open_prepared(folder, verify=True).training) > 0


def test_a_manifest_of_a_newer_version_says_so(corpus: Path, cache: Path):
    folder = prepare(settings(corpus), cache).folder
    (folder / "manifest.json").write_text('{"format": 2, "unheard": "of"}')
    message = refusal(lambda: open_prepared(folder))
    assert "manifest.json: was made by a newer version (format 2, this one reads 1)" in message


def test_names_in_a_manifest_are_not_paths(corpus: Path, cache: Path):
    folder = prepare(settings(corpus), cache).folder
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["training"]["shards"][0]["name"] = "../../elsewhere"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    assert "is damaged" in refusal(lambda: open_prepared(folder))


@pytest.mark.skipif(not (SHARED / "data/text").is_dir(), reason="the shared texts are not on this machine")
def test_tiny_shakespeare_by_characters_is_nanogpts(cache: Path):
    corpus = SHARED / "data/text/tinyshakespeare.txt"
    prepared = prepare(settings(corpus, vocabulary="characters"), cache)
    assert prepared.vocabulary.size == 65 + 2
    assert (len(prepared.training), len(prepared.validation)) == (1_003_854, 111_540)
    assert prepared.bytes_per_token("training") == 1.0


@pytest.mark.skipif(not (SHARED / "data/text").is_dir(), reason="the shared texts are not on this machine")
def test_chinese_prose_is_prepared_by_hash(cache: Path):
    prepared = prepare(settings(SHARED / "data/text/zh-luxun", vocabulary=1_000, validation=0.1), cache)
    parts = [text_of(prepared, part) for part in ("training", "validation")]
    files = sorted((SHARED / "data/text/zh-luxun").iterdir())
    length = sum(len(path.read_text(encoding="utf-8")) for path in files)
    between = prepared.vocabulary.decode([prepared.vocabulary.end_of_document])
    assert sum(len(part.replace(between, "")) for part in parts) == length
    assert "�" not in parts[0] + parts[1]
    assert prepared.bytes_per_token("training") > 2
