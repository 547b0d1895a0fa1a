"""Reading a file: safe YAML with line numbers, and one clear line for whatever is wrong in it.

Numbers may be written `2e15`, `400k` (k = 1,000; M and B = 10^6 and 10^9), `10%` (0.1) and `10m` (600; s, m,
h, d are seconds, minutes, hours, days). Tags, doubled keys, NaN and infinity are refused.
"""

import difflib
import math
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

Keys = tuple[str | int, ...]

_NUMBER = re.compile(r"([-+]?(?:\d[\d_]*)?(?:\.\d*)?(?:[eE][-+]?\d+)?)([kMB%smhd]?)")
_SCALE = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "%": 0.01, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_PLAIN_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "map", "seq", "timestamp", "value", "merge")
}


class WrongInput(Exception):
    """What a person gave cannot be used; the message is one line. Exit code 2."""


@dataclass
class Document:
    """A file as plain values, and where each of them stands.

    `places` has the line and the written text of every value by its keys.
    """

    file: str
    values: dict[str, Any]
    places: dict[Keys, tuple[int, str]] = field(default_factory=dict)

    def wrong(self, keys: Keys, message: str) -> WrongInput:
        """The error for the value at `keys`, with file, line and dotted key."""
        known = keys
        while known not in self.places and known:
            known = known[:-1]
        line, _ = self.places.get(known, (1, ""))
        where = f"{self.file}:{line}" if line else self.file
        return WrongInput(f"{where}: {dotted(keys)}: {message}" if keys else f"{where}: {message}")

    def written(self, keys: Keys) -> str:
        """The value at `keys` as it was written."""
        return self.places.get(keys, (0, ""))[1]


def dotted(keys: Keys) -> str:
    """`("search", "optimizer.learning_rate", "low")` as a person writes it."""
    return ".".join(str(key) for key in keys)


def read(path: Path, overrides: tuple[str, ...] = ()) -> Document:
    """Read a YAML file, then apply `dotted.key=value` overrides. Raises `WrongInput`."""
    try:
        text = path.read_text(encoding="utf-8")
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
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark else 1
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise WrongInput(f"{file}:{line}: not valid YAML: {problem}") from error
    if node is None:
        raise WrongInput(f"{file}: is empty")
    if not isinstance(node, yaml.MappingNode):
        raise WrongInput(f"{file}:1: a mapping of keys to values is expected, found {_shorten(_text(node))}")
    document.values = _value(document, node, ())
    return document


def _value(document: Document, node: yaml.Node, keys: Keys) -> Any:
    document.places[keys] = (node.start_mark.line + 1, _text(node))
    if node.tag not in _PLAIN_TAGS:
        raise document.wrong(keys, f"YAML tags are not read, found {node.tag.replace('tag:yaml.org,2002:', '!!')}")
    if isinstance(node, yaml.ScalarNode):
        try:
            return scalar(node.value) if node.style is None else node.value
        except ValueError as error:
            raise document.wrong(keys, str(error)) from error
    if isinstance(node, yaml.SequenceNode):
        return [_value(document, item, (*keys, i)) for i, item in enumerate(node.value)]
    assert isinstance(node, yaml.MappingNode)
    found: dict[str, Any] = {}
    for key_node, value_node in node.value:
        if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
            raise WrongInput(f"{document.file}:{key_node.start_mark.line + 1}: a key must be plain text")
        key = key_node.value
        line = key_node.start_mark.line + 1
        if key in found:
            first = document.places[(*keys, key)][0]
            raise WrongInput(f"{document.file}:{line}: {dotted((*keys, key))}: is given twice (first in line {first})")
        found[key] = _value(document, value_node, (*keys, key))
        document.places[(*keys, key)] = (line, _text(value_node))
    return found


def scalar(text: str) -> Any:
    """What an unquoted value means: null, true, false, a number with its unit, else text."""
    plain = {"": None, "null": None, "~": None, "true": True, "false": False}
    if text in plain:
        return plain[text]
    if text.lower().lstrip("+-") in (".nan", ".inf", "nan", "inf", "infinity"):
        raise ValueError(f"a finite number is expected, found {text}")
    found = _NUMBER.fullmatch(text)
    if not found or not any(c.isdigit() for c in found[1]) or found[1][-1] in "_eE":
        return text
    digits, unit = found[1].replace("_", ""), found[2]
    scale = _SCALE[unit]
    # Written with % means divided by 100, exactly: 7% is 0.07, not 0.07000000000000001.
    number = float(digits) / 100 if unit == "%" else float(digits) * scale
    if not math.isfinite(number):
        raise ValueError(f"a finite number is expected, found {text}")
    if re.fullmatch(r"[-+]?\d+", digits) and isinstance(scale, int):
        return int(digits) * scale
    return int(number) if isinstance(scale, int) and scale > 1 and number.is_integer() else number


def _override(document: Document, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise WrongInput(f"--set {override}: write --set dotted.key=value")
    value = parse(f"value: {text}", f"--set {override}").values["value"]
    path = split_key(document.values, key.strip())
    target: Any = document.values
    for part in path[:-1]:
        if not isinstance(target.get(part), dict):
            target[part] = {}
        target = target[part]
    if value is None and text.strip() == "" and path[-1] in target:
        del target[path[-1]]
        return
    target[path[-1]] = value
    for known in [known for known in document.places if known[: len(path)] == path]:
        del document.places[known]
    document.places[path] = (0, text)


def split_key(values: dict[str, Any], key: str) -> tuple[str, ...]:
    """A dotted key as the keys on the way to it; `search` has dotted keys of its own."""
    if key.startswith("search."):
        rest = key.removeprefix("search.")
        name = max((k for k in values.get("search") or {} if rest.startswith(f"{k}.")), key=len, default=None)
        return ("search", name, *rest.removeprefix(f"{name}.").split(".")) if name else ("search", rest)
    return tuple(key.split("."))


def validate(model: type[BaseModel], values: dict[str, Any], document: Document, prefix: Keys = ()) -> Any:
    """Values as a model; the first thing wrong, in the order of the file, is the error."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        found = error.errors()
        # A missing key comes last: where one is misspelt, it is the misspelling that a person wants to hear of.
        found.sort(key=lambda e: (e["type"] == "missing", document.places[_in_document(document, prefix, e["loc"])][0]))
        raise _explain(model, document, prefix, found[0]) from None


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
    if error["type"] == "missing":
        return document.wrong((*prefix, *loc), f"is missing{_hint(model, loc)}")
    keys = _in_document(document, prefix, loc)
    shown = document.written(keys) or _shorten(str(error["input"]))
    message = _tidy(error)
    if error["type"] == "value_error":
        # Our own validators say what is wrong in full; of one value they say what is allowed.
        found = f", found {shown}" if message.startswith("allowed") and shown else ""
        return document.wrong(keys or prefix, f"{message}{found}")
    return document.wrong(keys, f"{message}, found {shown}{nearest(shown, _choices(error))}")


def _tidy(error: Any) -> str:
    message: str = error["msg"]
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    for start in ("Input should be a valid ", "Input should be "):
        if message.startswith(start):
            rest = message.removeprefix(start)
            return f"allowed: {rest.split(', unable')[0].split(', got')[0]}"
    return message[0].lower() + message[1:]


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
        members = [_model_in(member) for member in typing.get_args(annotation)]
        return next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)
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
    return text if len(text) <= 60 else f"{text[:57]}..."
