"""Vocabularies: text to tokens and back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rigsweep.datasets.errors import DataError
from rigsweep.datasets.vocabulary import (
    END_OF_DOCUMENT,
    UNKNOWN,
    Vocabulary,
    byte_pairs,
    characters,
    pretrained,
    sample,
)

SHARED = Path(os.environ.get("RIGSWEEP_SHARED", Path(__file__).parents[2] / "shared"))
CHINESE = [
    "话说天下大势，分久必合，合久必分。",
    "周末七国分争，并入于秦；及秦灭之后，楚、汉分争，又并入于汉。\n",
] * 5
ENGLISH = [
    "Now is the winter of our discontent\n",
    "Made glorious summer by this sun of York;\r\n\tx = 12345",
]
HARD = ["\0\x01", "𝄞 👩‍👩‍👧", "a\u0301 ﷽", "   \n\n \t ", "", "<|endoftext|>"]


@pytest.fixture(scope="module")
def bpe() -> Vocabulary:
    return byte_pairs(CHINESE + ENGLISH, 320)


def test_a_byte_level_bpe_takes_every_text_and_gives_it_back(bpe: Vocabulary):
    assert bpe.size == 320
    for text in CHINESE + ENGLISH + HARD:
        (ids,) = bpe.encode([text])
        assert bpe.decode(ids) == text and ids.dtype == np.uint32
        assert not (ids == bpe.end_of_document).any()  # text cannot name the special token
    assert len(bpe.encode([CHINESE[0]])[0]) < len(CHINESE[0].encode()) / 2


def test_training_twice_gives_the_same_vocabulary(bpe: Vocabulary):
    again = byte_pairs(CHINESE + ENGLISH, 320)
    assert again.hash == bpe.hash != byte_pairs(CHINESE + ENGLISH, 300).hash


def test_a_corpus_too_small_for_the_size_says_what_came_out():
    small = byte_pairs(["aaaa bbbb"], 4_096)
    assert 257 < small.size < 270
    assert small.decode(small.encode(["aaaa bbbb"])[0]) == "aaaa bbbb"


def test_decoding_half_a_character_does_not_fail(bpe: Vocabulary):
    (ids,) = bpe.encode(["龘"])
    assert len(ids) == 3
    assert "�" in bpe.decode(ids[:2])
    assert bpe.decode([bpe.end_of_document]) == END_OF_DOCUMENT
    assert bpe.decode([]) == ""


def test_han_runs_are_words_apart_from_punctuation_and_latin():
    words = byte_pairs(CHINESE, 257)._tokenizer.pre_tokenizer.pre_tokenize_str("他说：“你好world”I'll go2024年")
    spans = ["他说：“你好world”I'll go2024年"[start:end] for _, (start, end) in words]
    assert spans == ["他说", "：“", "你好", "world", "”I", "'ll", " go", "202", "4", "年"]


def test_characters_are_sorted_then_unknown_then_the_end():
    vocabulary = characters(["ba", "天a\n"])
    assert vocabulary.size == 4 + 2 and vocabulary.end_of_document == 5
    assert vocabulary.encode(["\nab天", "zz"])[0].tolist() == [0, 1, 2, 3]
    assert vocabulary.encode(["azz"])[0].tolist() == [1, 4, 4]
    assert vocabulary.decode([3, 1]) == "天a" and vocabulary.decode([4]) == UNKNOWN
    for text in CHINESE:
        chinese = characters(CHINESE)
        assert chinese.decode(chinese.encode([text])[0]) == text
        assert len(chinese.encode([text])[0]) == len(text)


@pytest.mark.parametrize("make", [characters, lambda texts: byte_pairs(texts, 300)])
def test_a_saved_vocabulary_is_the_same(tmp_path: Path, make):
    vocabulary = make(CHINESE + ENGLISH)
    vocabulary.save(tmp_path / "tokenizer.json")
    loaded = Vocabulary.load(tmp_path / "tokenizer.json", vocabulary.end_of_document)
    assert loaded.hash == vocabulary.hash and loaded.size == vocabulary.size
    for text in CHINESE + ENGLISH + HARD:
        assert np.array_equal(loaded.encode([text])[0], vocabulary.encode([text])[0])


def test_the_sample_is_spread_over_the_corpus_and_bounded():
    texts = [f"{number:05d}" * 20 for number in range(10_000)]  # 1 MB
    taken = list(sample(texts, 1_000_000, limit=100_000))
    assert sum(map(len, taken)) == pytest.approx(100_000, abs=200)
    assert int(taken[0][:5]) < 20 and int(taken[-1][:5]) > 9_980
    assert list(sample(texts, 1_000_000, limit=2_000_000)) == texts
    chinese = ["天" * 100] * 1_000
    assert len(list(sample(chinese, 300_000, limit=300_000))) < 120  # it fills memory sooner


def test_a_pretrained_tokenizer_comes_from_a_folder_or_a_file(tmp_path: Path, bpe: Vocabulary):
    bpe.save(tmp_path / "tokenizer.json")
    for name in (tmp_path, tmp_path / "tokenizer.json"):
        vocabulary = pretrained(str(name))
        assert vocabulary.end_of_document == bpe.end_of_document
        assert np.array_equal(vocabulary.encode(CHINESE)[0], bpe.encode(CHINESE)[0])
    config = tmp_path / "tokenizer_config.json"
    for content, token in (({"eos_token": "a"}, "a"), ({"sep_token": {"content": "b"}}, "b")):
        config.write_text(json.dumps(content))
        vocabulary = pretrained(str(tmp_path))
        assert vocabulary.decode([vocabulary.end_of_document]) == token


def test_truncation_and_templates_of_a_pretrained_tokenizer_are_off(tmp_path: Path, bpe: Vocabulary):
    bpe.save(tmp_path / "tokenizer.json")
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert pretrained(str(tmp_path)).decode(pretrained(str(tmp_path)).encode(ENGLISH)[1]) == ENGLISH[1]


def test_a_folder_in_an_older_format_is_converted(tmp_path: Path):
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world"]
    (tmp_path / "vocab.txt").write_text("\n".join(tokens))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    vocabulary = pretrained(str(tmp_path))
    assert vocabulary.end_of_document == 3 and vocabulary.size == 7
    assert vocabulary.encode(["hello world"])[0].tolist() == [5, 6]


def test_code_in_a_tokenizers_folder_is_not_run(tmp_path: Path):
    trap = tmp_path / "trap.py"
    trap.write_text(f"open({str(tmp_path / 'sprung')!r}, 'w')\nclass Trap: pass\n")
    mapping = {"AutoTokenizer": ["trap.Trap", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": mapping, "tokenizer_class": "Trap"}))
    (tmp_path / "config.json").write_text(json.dumps({"auto_map": mapping, "model_type": "trap"}))
    with pytest.raises(DataError, match=r"give a folder with a tokenizer\.json"):
        pretrained(str(tmp_path))
    assert not (tmp_path / "sprung").exists()


def test_a_tokenizer_that_cannot_be_used_is_named_with_the_remedy(tmp_path: Path):
    def refusal(name: Path) -> str:
        with pytest.raises(DataError) as caught:
            pretrained(str(name))
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "missing.json: no such file" in refusal(tmp_path / "missing.json")
    (tmp_path / "tokenizer.json").write_text('{"no": "tokenizer"}')
    assert "tokenizer.json: is not a tokenizer" in refusal(tmp_path)
    characters(["abc"]).save(tmp_path / "tokenizer.json")
    content = (tmp_path / "tokenizer.json").read_text().replace(END_OF_DOCUMENT, "<|other|>")
    (tmp_path / "tokenizer.json").write_text(content)
    assert "has no end-of-document token" in refusal(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    assert "tokenizer_config.json: is not a tokenizer's configuration" in refusal(tmp_path)


def test_a_hub_tokenizer_offline_says_what_to_do(tmp_path: Path):
    code = (
        "from rigsweep.datasets.vocabulary import pretrained\n"
        "from rigsweep.datasets.errors import DataError\n"
        "try: pretrained('someone/something')\n"
        "except DataError as error: print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    answer = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert answer.stdout.count("\n") == 1, answer.stderr
    assert "someone/something: no such folder, offline mode is on" in answer.stdout


@pytest.mark.skipif(not (SHARED / "data/text").is_dir(), reason="the shared texts are not on this machine")
def test_chinese_round_trips_through_a_thousand_entries_and_through_characters():
    text = (SHARED / "data/text/zh-luxun/野草.txt").read_text(encoding="utf-8")
    for vocabulary in (byte_pairs([text], 1_000), characters([text])):
        (ids,) = vocabulary.encode([text])
        assert vocabulary.decode(ids) == text
    assert byte_pairs([text], 1_000).size == 1_000
