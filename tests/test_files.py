"""Reading YAML: units, what is refused, overrides; and that every refusal is one line with its place."""

from pathlib import Path
from typing import Any

import pytest

from rigsweep.sweeps import files
from rigsweep.sweeps.files import WrongInput


def values_of(text: str) -> dict[str, Any]:
    return files.parse(text, "made.yaml").values


def refusal_of(text: str) -> str:
    with pytest.raises(WrongInput) as error:
        files.parse(text, "made.yaml")
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("16", 16),
        ("-3", -3),
        ("1_000", 1000),
        ("2e15", 2e15),
        ("1.0e-3", 0.001),
        (".5", 0.5),
        ("400k", 400_000),
        ("1.5M", 1_500_000),
        ("1.005k", 1005),
        ("2B", 2_000_000_000),
        ("0.5k", 500),
        ("1.2345k", 1234.5),
        ("10%", 0.1),
        ("7%", 0.07),
        ("33.3%", 0.333),
        ("100%", 1.0),
        ("30s", 30.0),
        ("10m", 600.0),
        ("2h", 7200.0),
        ("1d", 86400.0),
        ("1.5h", 5400.0),
        ("16GB", 16_000_000_000),
        ("16GiB", 16 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("500MB", 500_000_000),
        ("64KiB", 65_536),
        ("2TB", 2 * 10**12),
        ("16gb", "16gb"),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("[1k, 10%, text, [true]]", [1000, 0.1, "text", [True]]),
        ("python-stdlib", "python-stdlib"),
        ("12 apples", "12 apples"),
        ("e5", "e5"),
        ("1e", "1e"),
        ("k", "k"),
        ("2024-01-01", "2024-01-01"),
        ("哪个", "哪个"),
        ("= 32 * model.layers", "= 32 * model.layers"),
        ("=", "="),
    ],
)
def test_a_value_means_what_a_person_means(written: str, value: Any) -> None:
    found = values_of(f"key: {written}")["key"]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("quoted", ["'400k'", '"10%"', "'true'", '"null"', "'1'", '".nan"', "''"])
def test_quoted_stays_text(quoted: str) -> None:
    assert values_of(f"key: {quoted}")["key"] == quoted[1:-1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a:\n  b: !!python/object:os.system x",
            "made.yaml:2: a.b: YAML tags are not read, found !!python/object:os.sys",
        ),
        ("a: !x 1", "made.yaml:1: a: YAML tags are not read, found !x"),
        ("a: !!str 1", "made.yaml:1: a: YAML tags are not read, found !!str"),
        ("a: !!binary aGk=", "made.yaml:1: a: YAML tags are not read, found !!binary"),
        ("a: !!set {x}", "made.yaml:1: a: YAML tags are not read, found !!set"),
        ("!!map {a: 1}", "made.yaml:1: a mapping of keys to values is expected, found a mapping"),
        ("!!str a: 1", "made.yaml:1: a key must be plain text"),
        ("a: 1\nb: 2\na: 3", "made.yaml:3: a: is given twice (first in line 1)"),
        ("a: {b: 1, c: 2, b: 3}", "made.yaml:1: a.b: is given twice (first in line 1)"),
        ("a: 1\n'a': 2", "made.yaml:2: a: is given twice (first in line 1)"),
        ("a: .nan", "made.yaml:1: a: a finite number is expected, found .nan"),
        ("a: nan", "made.yaml:1: a: a finite number is expected, found nan"),
        ("a:\n- 1\n- -.inf", "made.yaml:3: a.1: a finite number is expected, found -.inf"),
        ("a: Infinity", "made.yaml:1: a: a finite number is expected, found Infinity"),
        ("a: 1e999", "made.yaml:1: a: a finite number is expected, found 1e999"),
        ("a: 1e308B", "made.yaml:1: a: a finite number is expected, found 1e308B"),
        (f"a: {'9' * 5000}", "made.yaml:1: a: a finite number is expected, found 999"),
        ("a: 1\nb: [1, 2", "made.yaml:2: not valid YAML: "),
        ("a: b: c", "made.yaml:1: not valid YAML: mapping values are not allowed here"),
        ("a: 1\n\tb: 2", "made.yaml:2: not valid YAML: "),
        ("a: 1\n---\nb: 2", "made.yaml:2: not valid YAML: "),
        ("", "made.yaml: is empty"),
        ("# only a comment\n", "made.yaml: is empty"),
        ("[1, 2]", "made.yaml:1: a mapping of keys to values is expected, found a list"),
        ("text", "made.yaml:1: a mapping of keys to values is expected, found text"),
        ("a: 1\nb: x\x00y", "made.yaml:2: the character U+0000 cannot stand in a file"),
        ("a: &x 1\nb: *x", "made.yaml:2: b: YAML aliases are not read, found *x; write the value out"),
        ("a: &x [*x]", "made.yaml:1: a.0: YAML aliases are not read, found *x"),
        ("a: &x {b: 1}\nc:\n  <<: *x", "made.yaml:3: c.<<: merge keys are not read; write the keys out"),
        ("a: {<<: {b: 1}}", "made.yaml:1: a.<<: merge keys are not read"),
        ("a: &x b\n*x : 1", "made.yaml:2: a key must be plain text"),
        ("a:\n  ? [1, 2]\n  : 3", "made.yaml:2: a: a key must be plain text"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_with_its_place(text: str, message: str) -> None:
    assert refusal_of(text).startswith(message)


def test_a_billion_laughs_are_refused_at_the_first_alias() -> None:
    lines = ["a0: &a0 [lol]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 200)]
    assert refusal_of("\n".join(lines)).startswith("made.yaml:2: a1.0: YAML aliases are not read")


@pytest.mark.parametrize("bomb", ["[" * 100_000, "a: " + "{a: " * 25_000, "- " * 50_000, "? " * 50_000])
def test_a_file_nested_without_end_is_refused(bomb: str) -> None:
    assert "not valid YAML: more than 40 levels deep" in refusal_of(bomb)


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    for name, data, message in [
        ("binary.yaml", b"\x80\x04\x95", "is not UTF-8 text (byte 0)"),
        ("utf16.yaml", "a: 1".encode("utf-16"), "is not UTF-8 text (byte 0)"),
        ("weights.yaml", b"0" * (2**20 + 1), "is over 1 MiB, which no sweep file is"),
    ]:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(WrongInput, match=message.replace("(", r"\(").replace(")", r"\)")):
            files.read(tmp_path / name)
    with pytest.raises(WrongInput, match="No such file"):
        files.read(tmp_path / "absent.yaml")
    with pytest.raises(WrongInput, match="Is a directory"):
        files.read(tmp_path)


def test_a_byte_order_mark_and_windows_line_ends_do_no_harm(tmp_path: Path) -> None:
    (tmp_path / "made.yaml").write_bytes(b"\xef\xbb\xbfa: 1k\r\nb: {c: 10%}\r\n")
    assert files.read(tmp_path / "made.yaml").values == {"a": 1000, "b": {"c": 0.1}}


def test_a_message_is_one_line_whatever_the_file_holds() -> None:
    document = files.parse('"a\\nb": |\n  one\n  two\n', "made.yaml")
    error = document.wrong(("a\nb",), f"found {document.written(('a' + chr(10) + 'b',))}")
    assert str(error) == "made.yaml:1: a b: found one two"


def overridden(text: str, *overrides: str) -> dict[str, Any]:
    document = files.parse(text, "made.yaml")
    files.override(document, *overrides)
    return document.values


def test_an_override_sets_a_nested_key_with_its_unit() -> None:
    assert overridden("base: {budget: {examples: 1}}", "base.budget.examples=400k") == {
        "base": {"budget": {"examples": 400_000}}
    }


def test_an_override_sets_a_searched_key_and_one_value_of_it() -> None:
    text = "search:\n  optimizer.learning_rate: {low: 1, high: 2}"
    assert overridden(text, "search.optimizer.learning_rate.high=3") == {
        "search": {"optimizer.learning_rate": {"low": 1, "high": 3}}
    }
    assert overridden(text, "search.model.width={choices: [64, 96]}")["search"]["model.width"] == {"choices": [64, 96]}
    assert overridden("a: 1", "search.model.width={choices: [1]}", "search.model.width.choices=[2]")["search"] == {
        "model.width": {"choices": [2]}
    }


def test_an_override_makes_the_sections_on_its_way() -> None:
    assert overridden("a: 1", "b.c.d=x") == {"a": 1, "b": {"c": {"d": "x"}}}
    assert overridden("a: 1", "a.b=2") == {"a": {"b": 2}}


def test_an_override_with_nothing_takes_the_key_away() -> None:
    assert overridden("a: {b: 1, c: 2}", "a.b=") == {"a": {"c": 2}}
    assert overridden("a: 1", "a=null") == {"a": None}
    with pytest.raises(WrongInput, match=r"--set a\.x=: a\.x is not given, so there is nothing to take away"):
        overridden("a: {b: 1}", "a.x=")


def test_an_override_may_hold_an_equals_sign_or_be_quoted() -> None:
    assert overridden("a: 1", "a==2*b", "b='400k'", "c='x: y'") == {"a": "=2*b", "b": "400k", "c": "x: y"}


@pytest.mark.parametrize(
    "override",
    ["a", "=1", "a..b=1", ".a=1", "a=[", "a=x: y", "a=!x 1", "a=.nan", "a={b: 1, b: 2}", "a=*x", "a=1\nb: 2"],
)
def test_a_wrong_override_is_named(override: str) -> None:
    with pytest.raises(WrongInput) as error:
        overridden("a: 1", override)
    assert str(error.value).startswith(f"--set {override}: ".replace("\n", " "))
    assert "\n" not in str(error.value)


def test_a_value_that_was_overridden_is_blamed_on_the_override_and_others_on_their_line() -> None:
    document = files.parse("a:\n  b: 1\n  c: 2", "made.yaml")
    files.override(document, "a.b=5", "d.e=6")
    assert str(document.wrong(("a", "b"), "is odd")) == "--set a.b=5: a.b: is odd"
    assert str(document.wrong(("a", "c"), "is odd")) == "made.yaml:3: a.c: is odd"
    assert str(document.wrong(("d", "f"), "is missing")) == "--set d.e=6: d.f: is missing"
    files.override(document, "a={b: 7}")
    assert str(document.wrong(("a", "b"), "is odd")) == "--set a={b: 7}: a.b: is odd"


def test_characters_that_json_escapes_in_two_halves_are_one() -> None:
    assert files.parse('a: "\\ud83e\\udd9c \\u9e66"', "f.yaml").values == {"a": "🦜 鹦"}
    with pytest.raises(WrongInput, match=r"f\.yaml:1: a: half a character is escaped"):
        files.parse('a: "\\ud83e"', "f.yaml")
