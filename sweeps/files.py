"""Reading a file: safe YAML with line numbers, and one clear line for whatever is wrong in it.

Numbers may be written `2e15`, `400k` (k = 1,000; M and B = 10^6 and 10^9), `10%` (0.1) and `10m` (600; s, m,
h, d are seconds, minutes, hours, days). Tags, aliases, merge keys, doubled keys, NaN and infinity are refused.
"""

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

Keys = tuple[str | int, ...]

_NUMBER = re.compile(r"([-+]?(?:\d+(?:_\d+)*(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)([kMB%smhd]?)")
_COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}
_TIMES = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_TIME_WORDS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_TIME = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?([smhd])")
_TIME_KEY = re.compile(r"(^|_)(time|seconds|hang)(_|$)")
_OTHER_UNIT = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?\s*[A-Za-z%]+")
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
            return scalar(node.value) if node.style is None else node.value
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
        raise ValueError(f"a finite number is expected, found {_shorten(text)}")
    if re.fullmatch(r"[-+]?\d+", digits) and unit in _COUNTS:
        return int(digits) * _COUNTS[unit]
    # In decimals, so that 7% is 0.07 and 1.005k is 1005, exactly.
    exact = Decimal(digits) / 100 if unit == "%" else Decimal(digits) * (_COUNTS | _TIMES)[unit]
    number = float(exact)
    if not math.isfinite(number):
        raise ValueError(f"a finite number is expected, found {text}")
    return int(exact) if unit in ("k", "M", "B") and number.is_integer() else number


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
    document.places[path] = (0, _shorten(text))
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


def validate(model: type[BaseModel], values: dict[str, Any], document: Document, prefix: Keys = ()) -> Any:
    """Values as a model; the first thing wrong, in the order of the file, is the error."""
    found: list[Any] = list(_lookalikes(model, values, document, prefix, ()))
    try:
        valid = model.model_validate(values)
    except ValidationError as error:
        found += error.errors()
    else:
        if not found:
            return valid
    # A missing key comes last: where one is misspelt, it is the misspelling that a person wants to hear of.
    found.sort(key=lambda e: (e["type"] == "missing", document.line(_in_document(document, prefix, e["loc"]))))
    raise _explain(model, document, prefix, found[0]) from None


def _lookalikes(
    model: type[BaseModel], values: Any, document: Document, prefix: Keys, loc: tuple[str, ...]
) -> Iterator[dict[str, Any]]:
    """What pydantic takes for a number and a person did not mean as one: true for 1, or ten minutes for a count."""
    if not isinstance(values, dict):
        return
    kinds_of = _kinds(model)
    for name, value in values.items():
        if name not in kinds_of:
            continue
        (inner, kinds), here = kinds_of[name], (*loc, name)
        if inner is not None:
            yield from _lookalikes(inner, value, document, prefix, here)
            continue
        # `low` and `high` are of the searched key.
        problem = is_time(value, document.written((*prefix, *here)), str(prefix[1]) if len(prefix) == 2 else name)
        if isinstance(value, bool) and kinds & {int, float} and not kinds & {bool, Any}:
            yield {"type": "int_type" if int in kinds else "float_type", "loc": here, "input": value}
        elif problem and kinds & {int, float}:
            yield {"type": "value_error", "loc": here, "input": value, "ctx": {"error": problem}}


@functools.cache
def _kinds(model: type[BaseModel]) -> dict[str, tuple[type[BaseModel] | None, set[Any]]]:
    """Of each field: the section that it is, and the types that it takes."""
    return {name: (model_at(model, (name,)), members(told.annotation)) for name, told in model.model_fields.items()}


def is_time(value: Any, written: str, name: str) -> str | None:
    """What is wrong with a time such as `10m` where the key called `name` is none; else None."""
    found = _TIME.fullmatch(written) if isinstance(value, float) else None
    if found is None or _TIME_KEY.search(name.rpartition(".")[2]):
        return None
    million = "; a million is M" if found[1] == "m" else ""
    return f"is not a time, found {written} ({found[1]} is {_TIME_WORDS[found[1]]}{million})"


def members(annotation: Any) -> set[Any]:
    """The types that an annotation allows, without what is said of them."""
    if typing.get_origin(annotation) is typing.Annotated:
        return members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return set().union(*(members(member) for member in typing.get_args(annotation)))
    return {annotation}


def _in_document(document: Document, prefix: Keys, loc: tuple[int | str, ...]) -> Keys:
    """The part of pydantic's location that stands in the file (it adds the names of union members)."""
    keys = prefix
    for key in loc:
        if (*keys, key) in document.places:
            keys = (*keys, key)
    return keys


def _explain(model: type[BaseModel], document: Document, prefix: Keys, error: Any) -> WrongInput:
    loc: tuple[int | str, ...] = error["loc"]
    if error["type"] == "extra_forbidden":
        return document.wrong((*prefix, *loc), unknown_key(str(loc[-1]), _fields(model, loc[:-1])))
    if error["type"] == "missing" and isinstance(loc[-1], str):
        return document.wrong((*prefix, *loc), f"is missing{_hint(model, loc)}")
    keys = _in_document(document, prefix, loc)
    shown = document.written(keys) or _shorten(str(error["input"]))
    if error["type"] == "value_error":
        # Our own validators say what is wrong in full; of one value they say what is allowed.
        message = str(error["ctx"]["error"])
        found = f", found {shown}" if message.startswith("allowed") and shown else ""
        return document.wrong(keys or prefix, f"{message}{found}")
    return document.wrong(keys, refusal(error, shown, _fields(model, loc)))


def refusal(error: Any, shown: str, keys: list[str] | None = None) -> str:
    """One of pydantic's errors in plain words: what is allowed, what was found (as it was written), what is near."""
    kind, told = error["type"], error.get("ctx", {})
    hint = ""
    if kind.startswith(("int_", "float_")):
        allowed = "a whole number" if kind.startswith("int_") else "a number"
        if isinstance(error["input"], str) and _OTHER_UNIT.fullmatch(shown):
            number = not isinstance(scalar(shown), str)
            hint = "; write it without quotes" if number else "; units are k M B, %, and s m h d for times"
    elif kind in _WORDS:
        allowed = _WORDS[kind]
        if allowed == "a section" and keys:
            allowed += f" with {', '.join(keys)}"
    elif kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        allowed = f"{words} {_bound(told[name], shown)}"
    elif kind == "missing" and isinstance(error["loc"][-1], int):
        allowed, shown = f"a list of at least {error['loc'][-1] + 1} values", str(error["loc"][-1])
    elif kind == "too_long":
        allowed, shown = f"a list of at most {told['max_length']} values", str(told["actual_length"])
    elif kind == "literal_error":
        choices = _choices(error)
        allowed, hint = ", ".join(choices), nearest(shown, choices)
    else:
        message: str = error["msg"]
        allowed = message.removeprefix("Input should be ")
    return f"allowed: {allowed}, found {shown}{hint}"


_WORDS = {
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text (in quotes)",
    "model_type": "a section",
    "model_attributes_type": "a section",
    "dict_type": "a section",
    "list_type": "a list",
    "tuple_type": "a list",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _bound(bound: float, shown: str) -> str:
    return f"{bound * 100:g}%" if shown.endswith("%") else f"{bound:,.10g}"


def _choices(error: Any) -> list[str]:
    return re.findall(r"'([^']*)'", str(error.get("ctx", {}).get("expected", "")))


def unknown_key(key: str, allowed: list[str]) -> str:
    """The message for a key that does not exist."""
    near = nearest(key, allowed)
    return f"no such key{near}" if near else f"no such key; allowed: {', '.join(allowed)}"


def nearest(word: str, allowed: list[str]) -> str:
    """`; did you mean X?`, or nothing where no allowed word is near."""
    close = difflib.get_close_matches(word, allowed, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _hint(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    names = _fields(model, loc)
    return f": a section with {', '.join(names)}" if names else ""


def _fields(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    inner = model_at(model, loc)
    return list(inner.model_fields) if inner else []


def model_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> type[BaseModel] | None:
    """The model that stands at a location inside a model; None where there is none."""
    current: Any = model
    for key in loc:
        if not (isinstance(current, type) and issubclass(current, BaseModel)) or key not in current.model_fields:
            return None
        current = _model_in(current.model_fields[str(key)].annotation)
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _model_in(annotation: Any) -> Any:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        inner = [_model_in(member) for member in typing.get_args(annotation)]
        return next((m for m in inner if isinstance(m, type) and issubclass(m, BaseModel)), None)
    return annotation


def all_keys(model: type[BaseModel], prefix: str = "") -> list[str]:
    """Every dotted key of a model that holds a value."""
    keys: list[str] = []
    for name in model.model_fields:
        inner = model_at(model, (name,))
        keys += all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys


def _text(node: yaml.Node) -> str:
    if isinstance(node, yaml.ScalarNode):
        return _shorten(node.value) or "nothing"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def _shorten(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."
