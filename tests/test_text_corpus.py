"""Reading a text corpus: what is read, and what a person is told when it cannot be."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from rigsweep.datasets import corpus as corpus_module
from rigsweep.datasets.corpus import resolve
from rigsweep.datasets.errors import DataError
from rigsweep.datasets.readers import BLOCK_CHARACTERS, BLOCK_SLACK, CHUNK_BYTES, read

SHARED = Path(os.environ.get("RIGSWEEP_SHARED", Path(__file__).parents[2] / "shared"))
TEXTS = ["To be, or not to be.\n", "天地玄黄，宇宙洪荒。\n日月盈昃", "line one\r\nline two\u2028still two"]


def everything(corpus: str | Path | tuple[str, ...], column: str = "text") -> list[str]:
    names = corpus if isinstance(corpus, tuple) else str(corpus)
    return [piece for source in resolve(names) for piece in read(source, column)]


def refusal(corpus: str | Path, column: str = "text") -> str:
    with pytest.raises(DataError) as caught:
        everything(corpus, column)
    message = str(caught.value)
    assert "\n" not in message
    return message


def write_parquet(path: Path, columns: dict[str, list]) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def write_jsonl(path: Path, records: list) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(params=["", ".gz", ".zst"])
def packed(request: pytest.FixtureRequest):
    def pack(path: Path) -> Path:
        if not request.param:
            return path
        content = path.read_bytes()
        to = path.with_name(path.name + request.param)
        to.write_bytes(
            gzip.compress(content) if request.param == ".gz" else zstandard.ZstdCompressor().compress(content)
        )
        path.unlink()
        return to

    return pack


def test_jsonl_and_parquet_read_the_same_documents_however_packed(tmp_path: Path, packed):
    lines = packed(write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]))
    rows = packed(write_parquet(tmp_path / "b.parquet", {"n": [1, 2, 3], "text": TEXTS}))
    assert everything(lines) == everything(rows) == TEXTS


def test_text_and_markdown_and_python_read_the_whole_file_however_packed(tmp_path: Path, packed):
    for suffix in (".txt", ".md", ".py"):
        path = tmp_path / f"a{suffix}"
        path.write_text("".join(TEXTS), encoding="utf-8", newline="")
        assert everything(packed(path)) == ["".join(TEXTS)]


@pytest.mark.parametrize(
    "text",
    [
        "很长的一行没有空格" * 3_000,
        ("A paragraph of some words.\n" * 7 + "\n") * 300,
        "x\r\n" * 5_000,
        "𝄞é" * CHUNK_BYTES,  # characters that chunks of bytes cut in two
    ],
    ids=["one-line", "paragraphs", "crlf", "wide"],
)
def test_blocks_joined_are_the_file(tmp_path: Path, text: str):
    path = tmp_path / "long.txt"
    path.write_text(text, encoding="utf-8", newline="")
    blocks = everything(path)
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= BLOCK_CHARACTERS + BLOCK_SLACK
    assert all(block.endswith("\n") for block in blocks) or "\n" not in text


def test_a_byte_order_mark_is_not_text(tmp_path: Path):
    path = tmp_path / "windows.txt"
    path.write_bytes(b"\xef\xbb\xbfhello")
    assert everything(path) == ["hello"]


def test_a_folder_is_walked_in_sorted_order_without_hidden_files(tmp_path: Path):
    for name in ("b/2.txt", "a/1.md", ".git/3.txt", "b/.4.txt", "b/5.csv", "b/6.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "b/__init__.py").touch()  # a package's is empty, which is no fault
    assert everything(tmp_path) == ["a/1.md", "b/2.txt", "b/6.py"]


def test_globs_home_and_tuples_name_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.txt", "b.txt", "c[1].txt"):
        (tmp_path / name).write_text(name)
    assert everything(("~/b.txt", f"{tmp_path}/*.txt")) == ["b.txt", "a.txt", "c[1].txt"]
    assert everything("~/c[1].txt") == ["c[1].txt"]


def test_the_standard_library_is_a_corpus_in_sorted_order_without_its_tests():
    sources = resolve("python-stdlib")
    names = [source.name for source in sources]
    assert {"json/decoder.py", "os.py"} < set(names) and len(names) > 300
    assert not any("test" in name.split("/") or "site-packages" in name for name in names)
    assert [source.path for source in sources] == sorted(source.path for source in sources)
    assert "class JSONDecoder" in next(read(sources[names.index("json/decoder.py")], "text"))


def test_a_missing_corpus_is_answered_with_the_nearest_name(tmp_path: Path):
    (tmp_path / "shakespeare.txt").write_text("x")
    message = refusal(tmp_path / "shakespere.txt")
    assert "shakespere.txt" in message and f"did you mean {tmp_path / 'shakespeare.txt'}?" in message
    assert "did you mean python-stdlib?" in refusal("python-stlib")


def test_a_folder_or_glob_without_a_file_to_read_lists_the_suffixes(tmp_path: Path):
    (tmp_path / "a.csv").write_text("x")
    for corpus in (tmp_path, tmp_path / "*.csv", tmp_path / "*.txt"):
        message = refusal(corpus)
        assert str(corpus) in message and ".parquet" in message and ".zst" in message
    message = refusal(tmp_path / "a.csv")
    assert "a.csv" in message and "unknown suffix" in message and ".jsonl" in message


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.txt.gz", "a.txt.zst"])
def test_an_empty_file_is_named(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    message = refusal(tmp_path / name)
    assert name in message and "is empty" in message


def test_a_binary_file_is_named_with_the_byte(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"x" * CHUNK_BYTES + b"ab\0c")
    assert f"NUL at byte {CHUNK_BYTES + 2}" in refusal(tmp_path / "a.txt")
    assert str(tmp_path / "a.txt") in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize("before", [3, CHUNK_BYTES - 1, CHUNK_BYTES + 5])
def test_a_file_that_is_not_utf8_is_named_with_the_byte(tmp_path: Path, before: int):
    (tmp_path / "a.txt").write_bytes(b"x" * before + "é".encode("latin-1") + b"yz")
    message = refusal(tmp_path / "a.txt")
    assert "a.txt" in message and f"not UTF-8 at byte {before};" in message
    (tmp_path / "a.txt").write_bytes(b"x" * before + "天".encode()[:2])
    assert f"not UTF-8 at byte {before};" in refusal(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{not json", "line 3 is not JSON"),
        ('{"body": "x"}', "line 3 has no `text`; set data.column to one of: body"),
        ("[1]", "line 3 has no `text`"),
        ('{"text": 3}', "line 3: `text` is not a text"),
        ('{"text": "\\ud800"}', "line 3: `text` is not a text"),
    ],
)
def test_a_wrong_json_line_is_named_by_number(tmp_path: Path, line: str, what: str):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n\n' + line + "\n")
    message = refusal(tmp_path / "a.jsonl")
    assert "a.jsonl" in message and what in message


def test_a_parquet_without_the_column_lists_its_columns(tmp_path: Path):
    path = write_parquet(tmp_path / "a.parquet", {"body": ["x"], "n": [1]})
    message = refusal(path)
    assert "a.parquet" in message and "no column `text`" in message and "body, n" in message
    assert "holds int64" in refusal(path, column="n")
    assert everything(path, column="body") == ["x"]


def test_a_damaged_file_is_named(tmp_path: Path, packed):
    path = packed(write_parquet(tmp_path / "a.parquet", {"text": [str(n) * 9 for n in range(5_000)]}))
    whole = path.read_bytes()
    for content in (whole[:-500], b"hello, this is no such file", whole[:-10] + b"0123456789"):
        path.write_bytes(content)
        message = refusal(path)
        assert path.name in message and "is damaged or cut short" in message


def test_a_cut_compressed_text_is_named(tmp_path: Path, packed):
    plain = tmp_path / "a.txt"
    plain.write_bytes(os.urandom(200_000).hex().encode())
    path = packed(plain)
    if path != plain:
        path.write_bytes(path.read_bytes()[:-5_000])
        message = refusal(path)
        assert path.name in message and "is damaged or cut short" in message


def test_a_file_that_may_not_be_read_is_named(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("x")
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    assert "a.txt: cannot be read" in refusal(path)


def test_a_hub_corpus_offline_says_what_to_do(tmp_path: Path):
    code = (
        "from rigsweep.datasets.corpus import resolve\n"
        "from rigsweep.datasets.errors import DataError\n"
        "try: resolve('hf://datasets/someone/something/data/*.parquet')\n"
        "except DataError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert answer.stdout.count("\n") == 1, answer.stderr
    assert "hf://datasets/someone/something/data/*.parquet: offline mode is on" in answer.stdout
    assert "give the local folder as corpus" in answer.stdout


def test_a_hub_corpus_is_read_from_the_hubs_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = {}

    def snapshot_download(repository: str, **options: object) -> str:
        asked.update(options, repository=repository)
        return str(tmp_path)

    monkeypatch.setattr(corpus_module.hub, "snapshot_download", snapshot_download)
    (tmp_path / "data").mkdir()
    write_parquet(tmp_path / "data" / "a.parquet", {"text": ["from the Hub"]})
    (tmp_path / "data" / "b.parquet.txt").write_text("not asked for")
    assert everything("hf://datasets/o/n@main/data/*.parquet") == ["from the Hub"]
    assert asked["repository"] == "o/n" and asked["revision"] == "main"
    assert "no file to read matches" in refusal("hf://datasets/o/n/data/*.jsonl")


@pytest.mark.parametrize("name", ["hf://datasets/o/n", "hf://models/o/n/*.txt", "hf://datasets/o/n/../../*.txt"])
def test_a_wrong_hub_name_says_how_to_write_it(name: str):
    assert "write hf://datasets/<owner>/<name>/<glob>" in refusal(name)


@pytest.mark.skipif(not (SHARED / "data/text").is_dir(), reason="the shared texts are not on this machine")
def test_real_texts_are_read_whole():
    for source in resolve(str(SHARED / "data/text")):
        assert "".join(read(source, "text")) == source.path.read_bytes().decode()
