"""Training and validation part of a text corpus."""

import itertools
from pathlib import Path

import pytest

from rigsweep.datasets.corpus import resolve
from rigsweep.datasets.errors import DataError
from rigsweep.datasets.splits import Piece, survey


def divide(corpus: Path, validation: float | str) -> list[Piece]:
    return list(survey(resolve(str(corpus)), "text", validation, lambda done, total: None).pieces())


def of(pieces: list[Piece], part: str) -> list[str]:
    return [piece.text for piece in pieces if piece.part == part]


def long_text(paragraphs: int) -> str:
    return "".join(f"第{number}段。" + f"word{number} " * 90 + "\n\n" for number in range(paragraphs))


def test_the_parts_are_disjoint_and_together_the_whole(tmp_path: Path):
    (tmp_path / "a.txt").write_text(long_text(400))
    for validation in (0.05, 0.5, "last 10%"):
        pieces = divide(tmp_path, validation)
        assert "".join(piece.text for piece in pieces) == long_text(400)
        assert set(of(pieces, "training")).isdisjoint(of(pieces, "validation"))
        assert of(pieces, "training") and of(pieces, "validation")


def test_the_share_is_about_what_was_asked(tmp_path: Path):
    lines = "".join(f'{{"text": "document {number}"}}\n' for number in range(5_000))
    (tmp_path / "a.jsonl").write_text(lines)
    assert len(of(divide(tmp_path, 0.05), "validation")) == pytest.approx(250, abs=60)
    assert len(of(divide(tmp_path, "last 10%"), "validation")) == 500


def test_a_document_keeps_its_part_when_others_come_and_go(tmp_path: Path):
    texts = [f"document {number}" for number in range(300)]
    path = tmp_path / "a.jsonl"
    parts = []
    for kept in (texts, texts[50:], texts[::-1]):
        path.write_text("".join(f'{{"text": "{text}"}}\n' for text in kept))
        parts.append({piece.text: piece.part for piece in divide(path, 0.2)})
    assert parts[0] == parts[2] and parts[1].items() <= parts[0].items()


def test_the_last_share_is_of_characters_and_exact(tmp_path: Path):
    text = "天" * 6_000 + "a" * 4_003
    (tmp_path / "a.txt").write_text(text)
    pieces = divide(tmp_path, "last 10%")
    assert "".join(of(pieces, "training")) == text[:9_002]  # floor of 90%, as nanoGPT divides
    assert "".join(of(pieces, "validation")) == text[9_002:]


def test_one_text_goes_on_within_its_part_and_documents_do_not(tmp_path: Path):
    (tmp_path / "a.txt").write_text(long_text(100))
    (tmp_path / "b.txt").write_text(long_text(99))
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    starts = [piece for piece in divide(tmp_path, "last 50%") if not piece.continues]
    assert [piece.part for piece in starts] == ["training", "validation"] * 3
    pieces = divide(tmp_path / "a.txt", 0.5)
    for before, piece in itertools.pairwise(pieces):
        assert piece.continues == (before.part == piece.part)


@pytest.mark.parametrize("validation", [0.000001, 0.999999])
def test_both_parts_of_a_tiny_corpus_have_something(tmp_path: Path, validation: float):
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{word}"}}\n' for word in ("one", "two", "three")))
    pieces = divide(tmp_path, validation)
    small = "validation" if validation < 0.5 else "training"
    assert len(of(pieces, small)) == 1 and len(pieces) == 3
    assert pieces == divide(tmp_path, validation)


def test_a_corpus_that_cannot_be_divided_says_what_to_do(tmp_path: Path):
    (tmp_path / "a.txt").write_text("One block only.")
    with pytest.raises(DataError, match=r"a\.txt: one document cannot be divided.*`last 10%`"):
        divide(tmp_path, 0.05)
    assert "".join(of(divide(tmp_path, "last 10%"), "validation")) == "y."
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(DataError, match=r"a\.txt: too short to keep the last 10%"):
        divide(tmp_path, "last 10%")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "__init__.py").touch()
    with pytest.raises(DataError, match="holds no text"):
        divide(tmp_path, 0.05)
