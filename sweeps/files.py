"""Reading a file: safe YAML with line numbers, and one clear line for whatever is wrong in it.

Numbers may be written `2e15`, `400k` (k = 1,000; M and B = 10^6 and 10^9), `10%` (0.1), `10m` (600; s, m, h, d
are seconds, minutes, hours, days) and `16GB` (bytes; 16GiB = 16 x 2^30; k, M, G, T).
Tags, aliases, merge keys, doubled keys, NaN and infinity are refused.
"""

import math
import re
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

Keys = tuple[str | int, ...]

_NUMBER = re.compile(r"([-+]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)([kMGT]B|[KMGT]iB|[kMB%smhd]?)")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_SIZES = {f"{letter}B": 1000**i for i, letter in enumerate("kMGT", 1)}
_SIZES |= {f"{letter}iB": 1024**i for i, letter in enumerate("KMGT", 1)}
_WHOLE = _COUNTS | _SIZES
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_LINE_END = re.compile(r"\s*[\r\n\v\f\x1c-\x1e\x85\u2028\u2029]\s*")
_EXPLICIT, _ALIAS = "explicit:", "alias"
_LONGEST_BYTES = 2**20
_DEEPEST = 40


class WrongInput(Exception):
    """What a person gave cannot be used; the message is one line. Exit code 2."""

    keys: Keys = ()
    """Where in the file, if it is of one place."""
    problem: str = ""
    """The message without the place."""

    def __init__(self, message: str):
        # Values from a file may span lines.
        super().__init__(_LINE_END.sub(" ", message))


@dataclass
class Document:
    """A file as plain values, and where each of them stands.

    `places` has the line and the written text of every value by its keys; `overrides`, which `--set` gave it.
    """

    file: str
    values: dict[str, Any]
    places: dict[Keys, tuple[int, str]] = field(default_factory=dict)
    overrides: dict[Keys, str] = field(default_factory=dict)

    def wrong(self, keys: Keys, message: str) -> WrongInput:
        """The error for the value at `keys`, with file, line and dotted key."""
        known = keys
        while known not in self.places and known:
            known = known[:-1]
        given = next((self.overrides[known[:n]] for n in range(len(known), 0, -1) if known[:n] in self.overrides), None)
        where = self.at(self.line(known)) if given is None else f"--set {given}"
        error = WrongInput(f"{where}: {dotted(keys)}: {message}" if keys else f"{where}: {message}")
        error.keys, error.problem = keys, message
        return error

    def at(self, line: int) -> str:
        """The file and a line of it; an override has none."""
        return f"{self.file}:{line}" if line else self.file

    def line(self, keys: Keys) -> int:
        """Where the value at `keys` stands; 0 where it does not stand in the file."""
        return self.places.get(keys, (0, ""))[0]

    def written(self, keys: Keys) -> str:
        """The value at `keys` as it was written."""
        return self.places.get(keys, (0, ""))[1]


def dotted(keys: Keys) -> str:
    """`("search", "optimizer.learning_rate", "low")` as a person writes it."""
    return ".".join(str(key) for key in keys)


def read(path: Path, overrides: tuple[str, ...] = ()) -> Document:
    """Read a YAML file, then apply `dotted.key=value` overrides. Raises `WrongInput`."""
    try:
        with path.open("rb") as file:
            data = file.read(_LONGEST_BYTES + 1)
        if len(data) > _LONGEST_BYTES:
            raise WrongInput(f"{path}: is over 1 MiB, which no sweep file is")
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WrongInput(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except OSError as error:
        raise WrongInput(f"{path}: {error.strerror or error}") from error
    document = parse(text, str(path))
    override(document, *overrides)
    return document


def override(document: Document, *overrides: str) -> None:
    """Apply `dotted.key=value` to a document. Raises `WrongInput`."""
    for text in overrides:
        _override(document, text)


def parse(text: str, file: str) -> Document:
    """Read YAML from a string."""
    document = Document(file, {})
    node = _compose(text, document)
    if node is None:
        raise WrongInput(f"{file}: is empty")
    if node.tag.startswith(_EXPLICIT) or not isinstance(node, yaml.MappingNode):
        raise WrongInput(f"{file}:1: a mapping of keys to values is expected, found {_text(node)}")
    document.values = _value(document, node, (), 1)
    return document


class _Loader(yaml.SafeLoader):
    """Composes nodes; what is not plain YAML is marked, so that it can be refused by its dotted key."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            # Never followed: ten lines of aliases to aliases would be a billion values.
            event = self.get_event()
            return yaml.ScalarNode(_ALIAS, f"*{event.anchor}", event.start_mark, event.end_mark)
        event = self.peek_event()
        if self._depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels deep", problem_mark=event.start_mark)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        if node is not None and getattr(event, "tag", None) is not None:
            node.tag = f"{_EXPLICIT}{event.tag}"
        return node


def _compose(text: str, document: Document) -> yaml.Node | None:
    numbered = not document.file.startswith("--set ")
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        where = document.at(line if numbered else 0)
        raise WrongInput(f"{where}: the character U+{int(error.character):04X} cannot stand in a file") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        problem = getattr(error, "problem", None) or str(error)
        where = document.at(mark.line + 1 if mark and numbered else 0)
        raise WrongInput(f"{where}: not valid YAML: {problem}") from error


def _value(document: Document, node: yaml.Node, keys: Keys, line: int) -> Any:
    """A node's plain value; `line` is that of its key, 0 in an override."""
    document.places[keys] = (line, _text(node))
    if node.tag == _ALIAS:
        raise document.wrong(keys, f"YAML aliases are not read, found {node.value}; write the value out")
    if node.tag.startswith(_EXPLICIT):
        tag = node.tag.removeprefix(_EXPLICIT).replace("tag:yaml.org,2002:", "!!")
        raise document.wrong(keys, f"YAML tags are not read, found {tag}")
    if isinstance(node, yaml.ScalarNode):
        try:
            return scalar(node.value) if node.style is None else _joined(node.value)
        except ValueError as error:
            raise document.wrong(keys, str(error)) from error

    def line_of(inner: yaml.Node) -> int:
        return line and inner.start_mark.line + 1

    if isinstance(node, yaml.SequenceNode):
        return [_value(document, item, (*keys, i), line_of(item)) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key, at = str(key_node.value), line_of(key_node)
        if key == "<<" and key_node.style is None:
            raise WrongInput(f"{document.at(at)}: {dotted((*keys, key))}: merge keys are not read; write the keys out")
        if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.startswith((_EXPLICIT, _ALIAS)):
            raise WrongInput(f"{document.at(at)}: {f'{dotted(keys)}: ' if keys else ''}a key must be plain text")
        if key in found:
            first = document.line((*keys, key))
            again = f" (first in line {first})" if first else ""
            raise WrongInput(f"{document.at(at)}: {dotted((*keys, key))}: is given twice{again}")
        found[key] = _value(document, value_node, (*keys, key), at)
    return found


def _joined(text: str) -> str:
    """A quoted text; JSON escapes a character beyond U+FFFF in two halves, which YAML leaves apart."""
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError as error:
        raise ValueError("half a character is escaped, which is no text; give both halves or the character") from error


def scalar(text: str) -> Any:
    """What an unquoted value means: null, true, false, a number with its unit, else text."""
    plain = {"": None, "null": None, "~": None, "true": True, "false": False}
    if text in plain:
        return plain[text]
    if text.lower().lstrip("+-") in (".nan", ".inf", "nan", "inf", "infinity"):
        raise ValueError(f"a finite number is expected, found {text}")
    found = _NUMBER.fullmatch(text)
    if not found:
        return text
    digits, unit = found[1].replace("_", ""), found[2]
    if not math.isfinite(float(digits)):
        raise ValueError(f"a finite number is expected, found {shorten(text)}")
    if re.fullmatch(r"[-+]?\d+", digits) and unit in _WHOLE:
        return int(digits) * _WHOLE[unit]
    # In decimals, so that 7% is 0.07 and 1.005k is 1005, exactly.
    exact = Decimal(digits) / 100 if unit == "%" else Decimal(digits) * (_WHOLE | _TIMES)[unit]
    number = float(exact)
    if not math.isfinite(number):
        raise ValueError(f"a finite number is expected, found {text}")
    return int(exact) if unit and unit in _WHOLE and number.is_integer() else number


def _override(document: Document, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.strip().split(".")):
        raise WrongInput(f"--set {override}: write --set dotted.key=value")
    path = split_key(document.values, key.strip())
    given = Document(f"--set {override}", {})
    node = _compose(f"value: {text}", given)
    if not isinstance(node, yaml.MappingNode) or len(node.value) != 1:
        raise WrongInput(f"--set {override}: write --set dotted.key=value")
    value = _value(given, node.value[0][1], path, 0)
    target: Any = document.values
    for i, part in enumerate(path[:-1]):
        if not isinstance(target.get(part), dict):
            target[part] = {}
            _forget(document, path[: i + 1])
            document.places[path[: i + 1]] = (0, "a section")
            document.overrides[path[: i + 1]] = override
        target = target[part]
    _forget(document, path)
    if value is None and not text.strip():
        if path[-1] not in target:
            raise WrongInput(f"--set {override}: {dotted(path)} is not given, so there is nothing to take away")
        del target[path[-1]]
        return
    target[path[-1]] = value
    document.places |= given.places
    document.places[path] = (0, shorten(text))
    document.overrides[path] = override


def _forget(document: Document, path: Keys) -> None:
    for kept in (document.places, document.overrides):
        for known in [known for known in kept if known[: len(path)] == path]:
            del kept[known]


def split_key(values: dict[str, Any], key: str) -> tuple[str, ...]:
    """A dotted key as the keys on the way to it; `search` has dotted keys of its own."""
    if key.startswith("search."):
        rest = key.removeprefix("search.")
        search = values.get("search")
        searched = search if isinstance(search, dict) else {}
        name = max((k for k in searched if rest.startswith(f"{k}.")), key=len, default=None)
        return ("search", name, *rest.removeprefix(f"{name}.").split(".")) if name else ("search", rest)
    return tuple(key.split("."))


def _text(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return shorten(node.value) or "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def shorten(text: str) -> str:
    """A text in one line of at most sixty characters."""
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
