"""Reading the search space from a sweep file's `search`, and checking that all of it can be trained."""

import math
import typing
from typing import Any, Literal

from pydantic import BaseModel

from ..trainables.settings import Training
from .expressions import ExpressionError, is_expression, keys_in
from .files import Document, Keys, WrongInput
from .space import Dimension, Parameters, Space, flatten, named_in, word
from .validation import all_keys, members, misread_unit, model_at, refusal, unknown_key, validate


class _Range(BaseModel, frozen=True, extra="forbid"):
    low: float
    high: float
    log: bool = False
    step: float | None = None
    when: dict[str, Any] = {}


class _Choices(BaseModel, frozen=True, extra="forbid"):
    choices: list[Any]
    when: dict[str, Any] = {}


def read_space(document: Document, model: type[Training]) -> Space:
    """Read and check `base` and `search` of a sweep file. Raises `WrongInput`."""
    base: dict[str, Any] = document.values["base"]
    search: dict[str, Any] = document.values.get("search") or {}
    keys = all_keys(model)
    derived = {
        key: value
        for key, value in flatten(base).items()
        # A text that begins with = is a text where no number is expected.
        if is_expression(value) and key in keys and _kind(model, key)
    }
    dimensions: list[Dimension] = []
    for key, told in search.items():
        if key not in keys:
            inner = model_at(model, tuple(key.split(".")))
            message = (
                f"is a section; search one of its keys: {', '.join(all_keys(inner, f'{key}.'))}" if inner else None
            )
            raise document.wrong(("search", key), message or _no_such(key, keys))
        if is_expression(told):
            derived[key] = told
        elif key in derived:
            raise document.wrong(("search", key), f"is derived in base ({derived[key]}) and searched; keep one of them")
        else:
            dimensions.append(_dimension(document, model, key, told, keys))
    derived = _in_order(document, derived, keys)
    space = Space(model, base, tuple(_conditions_last(document, dimensions)), derived, document)
    _check(space)
    return space


def _no_such(key: str, keys: list[str]) -> str:
    by_name = [k for k in keys if k.rpartition(".")[2] == key.rpartition(".")[2]]
    return f"no such key; did you mean {by_name[0]}?" if by_name else unknown_key(key, keys)


def _dimension(document: Document, model: type[Training], key: str, told: Any, keys: list[str]) -> Dimension:
    place: Keys = ("search", key)
    if not isinstance(told, dict):
        found = document.written(place)
        raise document.wrong(
            place, f"give {{low: …, high: …}}, {{choices: […]}} or = an expression, found {found or 'nothing'}"
        )
    words = [*_Range.model_fields, "choices"]
    for given in told:
        if given not in words:
            raise document.wrong((*place, given), unknown_key(given, words))
    if "choices" in told and (extra := sorted(told.keys() & {"low", "high", "log", "step"})):
        raise document.wrong((*place, extra[0]), "stands beside choices; give a range or choices, not both")
    found = validate(_Choices if "choices" in told else _Range, told, document, place)
    when = tuple((other, tuple(value) if isinstance(value, list) else (value,)) for other, value in found.when.items())
    for other, _ in when:
        if other not in keys:
            raise document.wrong((*place, "when", other), _no_such(other, keys))
    if isinstance(found, _Choices):
        choices = found.choices
        if not choices:
            raise document.wrong((*place, "choices"), "is empty; give at least one value")
        for i, choice in enumerate(choices):
            at = (*place, "choices", i)
            if problem := misread_unit(choice, document.written(at), key):
                raise document.wrong(at, problem)
            if choice in choices[:i]:
                raise document.wrong(at, f"is there twice: {document.written(at)}")
        return Dimension(key, "choice", choices=tuple(choices), when=when)
    kind = _kind(model, key)
    if kind is None:
        raise document.wrong(place, "is not a number; give {choices: […]}")
    if found.low >= found.high:
        raise document.wrong((*place, "low"), f"low must be below high, found {_shown(document, place)}")
    if found.log and found.low <= 0:
        raise document.wrong((*place, "low"), f"a logarithmic range starts above 0, found {_shown(document, place)}")
    if found.log and found.step is not None:
        raise document.wrong((*place, "step"), "a logarithmic range has no step")
    if found.step is not None and not 0 < found.step <= found.high - found.low:
        raise document.wrong(
            (*place, "step"), f"allowed: more than 0, at most high − low, found {document.written((*place, 'step'))}"
        )
    if kind == "int":
        for name in ("low", "high", "step"):
            number = getattr(found, name)
            if number is not None and not float(number).is_integer():
                written = document.written((*place, name))
                raise document.wrong((*place, name), f"allowed: a whole number, as {key} is one, found {written}")
    step = found.step or (1.0 if kind == "int" else None)
    if step is not None and not math.isclose(steps := (found.high - found.low) / step, round(steps), abs_tol=1e-9):
        reached = found.low + math.floor(steps) * step
        raise document.wrong(
            (*place, "high"),
            f"is not a whole number of steps of {step:g} above low; the last one is at {reached:g}, "
            f"found {document.written((*place, 'high'))}",
        )
    return Dimension(key, kind, found.low, found.high, found.log, found.step, when=when)


def _shown(document: Document, place: Keys) -> str:
    return f"low {document.written((*place, 'low'))}, high {document.written((*place, 'high'))}"


def _kind(model: type[Training], key: str) -> Literal["int", "float"] | None:
    """Whether a key holds whole numbers or numbers; None for anything else."""
    *section, name = key.split(".")
    inner = model_at(model, tuple(section))
    assert inner is not None
    kinds = members(inner.model_fields[name].annotation)
    return "int" if int in kinds else "float" if float in kinds else None


def _conditions_last(document: Document, dimensions: list[Dimension]) -> list[Dimension]:
    """Dimensions in an order in which every condition is decided before it is asked."""
    waiting, done = list(dimensions), []
    searched = {dimension.key for dimension in dimensions}
    while waiting:
        ready = [d for d in waiting if all(k not in searched or k in {x.key for x in done} for k, _ in d.when)]
        if not ready:
            raise document.wrong(("search", waiting[0].key, "when"), "conditions depend on each other in a circle")
        done += ready
        waiting = [d for d in waiting if d not in ready]
    return done


def _in_order(document: Document, derived: dict[str, str], keys: list[str]) -> dict[str, str]:
    """Derived values in an order in which each is computed before it is read."""
    reads: dict[str, set[str]] = {}
    for key, expression in derived.items():
        place: Keys = ("search", key) if ("search", key) in document.places else ("base", *key.split("."))
        try:
            reads[key] = keys_in(expression)
        except ExpressionError as error:
            raise document.wrong(place, f"{expression}: {error}") from error
        for other in reads[key]:
            if other not in keys:
                raise document.wrong(place, f"{expression}: {other}: {_no_such(other, keys)}")
    ordered: dict[str, str] = {}
    while len(ordered) < len(derived):
        ready = [k for k in derived if k not in ordered and not (reads[k] & set(derived)) - set(ordered)]
        if not ready:
            stuck = [k for k in derived if k not in ordered]
            place = ("search", stuck[0]) if ("search", stuck[0]) in document.places else ("base", *stuck[0].split("."))
            raise document.wrong(place, f"derived values depend on each other in a circle: {', '.join(stuck)}")
        ordered |= {k: derived[k] for k in ready}
    return ordered


def _check(space: Space) -> None:
    """The base, each end alone, and combinations of ends must be trainings; the base must lie in its search."""
    document, base = space.document, space.values
    for dimension in space.dimensions:
        _check_conditions(space, dimension)
        for i, value in enumerate(dimension.ends()):
            _check_alone(space, dimension, i, value)
    for dimension in space.dimensions:
        value = base.get(dimension.key)
        if dimension.active(base) and not dimension.holds(value):
            written = document.written(("base", *dimension.key.split("."))) or f"{word(value)}, the default,"
            place: Keys = ("search", dimension.key)
            low, high = (document.written((*place, end)) for end in ("low", "high"))
            allowed = f"{low} to {high}" if low and high and not dimension.step else dimension.allowed()
            raise document.wrong(place, f"the base's value {written} is outside the search ({allowed})")
    for corner in space.corners():
        try:
            space.assemble(corner)
        except WrongInput as error:
            told = ", ".join(f"{key} = {word(value)}" for key, value in corner.items())
            raise document.wrong(_blamed(space, corner, error), f"{error.problem} (with {told})") from None


def _blamed(space: Space, corner: Parameters, error: WrongInput) -> Keys:
    """The searched key that a combination fails for, as far as the message names one."""
    named = ".".join(str(key) for key in error.keys[1:])
    if named in corner or named in space.derived:
        return space.place(named)
    return ("search", *named_in(error.problem, corner)[-1:])


def _check_conditions(space: Space, dimension: Dimension) -> None:
    """Raise where a dimension can never exist."""
    searched = {other.key: other for other in space.dimensions}
    for key, allowed in dimension.when:
        place: Keys = ("search", dimension.key, "when", key)
        if key in space.derived:
            raise space.document.wrong(place, f"{key} is derived; a condition reads searched keys or the base's own")
        if key in searched and not (allowed and all(searched[key].holds(value) for value in allowed)):
            found = space.document.written(place)
            raise space.document.wrong(place, f"allowed: {searched[key].allowed()}, found {found}")
        if key not in searched and space.values.get(key) not in allowed:
            fixed = space.values.get(key)
            raise space.document.wrong(place, f"is never so: {key} is not searched, and is {word(fixed)} in base")


def _check_alone(space: Space, dimension: Dimension, i: int, value: Any) -> None:
    """Raise for a value that its key cannot hold, whatever the other keys are."""
    from pydantic import TypeAdapter, ValidationError

    document = space.document
    *section, name = dimension.key.split(".")
    inner = model_at(space.model, tuple(section))
    assert inner is not None
    info = inner.model_fields[name]
    adapter: TypeAdapter[Any] = TypeAdapter(typing.Annotated[info.annotation, info])  # pyright: ignore
    place: Keys = ("search", dimension.key)
    if dimension.kind == "choice":
        place = (*place, "choices", i)
    elif value in (dimension.low, dimension.high):
        place = (*place, "low" if value == dimension.low else "high")
    try:
        adapter.validate_python(value, strict=isinstance(value, bool) or None)
    except ValidationError as error:
        shown = document.written(place) if place[-1] != dimension.key else str(value)
        raise document.wrong(place, refusal(error.errors()[0], shown)) from None
