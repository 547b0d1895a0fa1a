"""Values of a file as pydantic models, and pydantic's errors as one line that a person can act on."""

import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, ValidationError

from .files import Document, Keys, WrongInput, scalar, shorten

_TIME_WORDS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_TIME = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?([smhd])")
_TIME_KEY = re.compile(r"(^|_)(time|seconds|hang)(_|$)")
_SIZE = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?([kMGT]B|[KMGT]iB)")
_SIZE_KEY = re.compile(r"(^|_)(bytes|memory)(_|$)")
_UNITS = "k M B, %, and s m h d for times, GB and GiB for bytes"
_OTHER_UNIT = re.compile(r"[-+]?[\d_.]+(?:[eE][-+]?\d+)?\s*[A-Za-z%]+")


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
        problem = misread_unit(value, document.written((*prefix, *here)), str(prefix[1]) if len(prefix) == 2 else name)
        if isinstance(value, bool) and kinds & {int, float} and not kinds & {bool, Any}:
            yield {"type": "int_type" if int in kinds else "float_type", "loc": here, "input": value}
        elif problem and kinds & {int, float}:
            yield {"type": "value_error", "loc": here, "input": value, "ctx": {"error": problem}}


@functools.cache
def _kinds(model: type[BaseModel]) -> dict[str, tuple[type[BaseModel] | None, set[Any]]]:
    """Of each field: the section that it is, and the types that it takes."""
    return {name: (model_at(model, (name,)), members(told.annotation)) for name, told in model.model_fields.items()}


def misread_unit(value: Any, written: str, name: str) -> str | None:
    """What is wrong with a time such as `10m`, or a size such as `16GB`, where the key called `name` is none."""
    if isinstance(value, int | float) and _SIZE.fullmatch(written) and not _SIZE_KEY.search(name.rpartition(".")[2]):
        return f"is not a size in bytes, found {written}"
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
    shown = document.written(keys) or shorten(str(error["input"]))
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
            hint = "; write it without quotes" if number else f"; units are {_UNITS}"
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
