"""The search space: from a sweep file's `search` to trainings, by way of an Optuna trial.

A dimension is a range (`low`, `high`, `log`, `step`), a list of `choices`, or a derived value (`= ...`); with
`when` it exists only where other keys have given values.
"""

import dataclasses
import functools
import itertools
import json
import math
import random
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from ..trainables.settings import Training
from .expressions import ExpressionError, evaluate, is_expression, keys_in
from .files import Document, Keys, WrongInput, all_keys, is_time, members, model_at, refusal, unknown_key, validate

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

Parameters = dict[str, Any]
_CORNERS = 1024
_SHAPES = 64
_ALL_VALUES = 32


class _Range(BaseModel, frozen=True, extra="forbid"):
    low: float
    high: float
    log: bool = False
    step: float | None = None
    when: dict[str, Any] = {}


class _Choices(BaseModel, frozen=True, extra="forbid"):
    choices: list[Any]
    when: dict[str, Any] = {}


@dataclass(frozen=True)
class Dimension:
    """One searched key."""

    key: str
    kind: Literal["float", "int", "choice"]
    low: float = 0.0
    high: float = 0.0
    log: bool = False
    step: float | None = None
    choices: tuple[Any, ...] = ()
    when: tuple[tuple[str, tuple[Any, ...]], ...] = ()

    def active(self, values: Mapping[str, Any]) -> bool:
        """Whether the dimension exists with these values of the other keys."""
        return all(values.get(key) in allowed for key, allowed in self.when)

    def distribution(self) -> "BaseDistribution":
        """The dimension as Optuna sees it."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.kind == "choice":
            return CategoricalDistribution([_plain(choice) for choice in self.choices])
        if self.kind == "int":
            step = int(self.step or 1)
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def suggest(self, trial: "optuna.Trial") -> Any:
        """The value that an Optuna trial takes here."""
        if self.kind == "choice":
            plain = trial.suggest_categorical(self.key, [_plain(choice) for choice in self.choices])
            return next(choice for choice in self.choices if _plain(choice) == plain)
        if self.kind == "int":
            step = int(self.step or 1)
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log, step=step)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)

    def ends(self) -> list[Any]:
        """The values by which the space is checked: every choice, or the ends of a range and a step inside."""
        if self.kind == "choice":
            return list(self.choices)
        if self.kind == "int":
            low, high = int(self.low), int(self.high)
            return sorted({low, min(high, low + int(self.step or 1)), high})
        return sorted({self.low, self.high})

    def checked(self) -> list[Any]:
        """The values by which combinations are checked: all, where they are few whole numbers."""
        step = int(self.step or 1)
        if self.kind == "int" and (self.high - self.low) / step < _ALL_VALUES:
            return list(range(int(self.low), int(self.high) + 1, step))
        return self.ends()

    def holds(self, value: Any) -> bool:
        """Whether a value lies in the dimension."""
        if self.kind == "choice":
            return any(_plain(value) == _plain(choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return math.isclose(steps, round(steps), abs_tol=1e-9)

    def allowed(self) -> str:
        """The dimension in words."""
        if self.kind == "choice":
            return f"one of {', '.join(_word(choice) for choice in self.choices)}"
        return f"{self.low:g} to {self.high:g}" + (f" in steps of {self.step:g}" if self.step else "")


@dataclass(frozen=True)
class Space:
    """All that a sweep searches, around a base."""

    model: type[Training]
    base: dict[str, Any]
    dimensions: tuple[Dimension, ...]
    derived: dict[str, str]
    document: Document

    @functools.cached_property
    def values(self) -> dict[str, Any]:
        """The base's values by dotted key, defaults and derived values included."""
        return flatten(self.assemble({}).model_dump(mode="json"))

    def base_parameters(self) -> Parameters:
        """The base's own values of the searched keys: trial 0."""
        return {d.key: self.values.get(d.key) for d in self.dimensions if d.active(self.values)}

    def suggest(self, trial: "optuna.Trial") -> Parameters:
        """Parameters of a new trial."""
        values = dict(self.values)
        chosen: Parameters = {}
        for dimension in self.dimensions:
            if dimension.active(values):
                chosen[dimension.key] = values[dimension.key] = dimension.suggest(trial)
        return chosen

    def assemble(self, parameters: Parameters, seed: int | None = None) -> Training:
        """The training with these parameters; derived values are computed. Raises `WrongInput`."""
        values = _nested_copy(self.base)
        for key, value in parameters.items():
            _put(values, key, value)
        if seed is not None:
            values["seed"] = seed
        shown = {key: _word(value) for key, value in parameters.items()}
        if self.derived:
            known = flatten(self.model.model_construct().model_dump(mode="json", warnings=False)) | flatten(values)
            for key, expression in self.derived.items():
                try:
                    value = evaluate(expression, known)
                except ExpressionError as error:
                    raise self.document.wrong(self.place(key), f"{expression}: {error}") from error
                value = int(value) if float(value).is_integer() else value
                _put(values, key, value)
                known[key] = value
                shown[key] = f"{value} ({expression})"
        try:
            return validate(self.model, values, self.document, ("base",))
        except WrongInput:
            self._explain(values, shown)
            raise

    def _explain(self, values: dict[str, Any], shown: dict[str, str]) -> None:
        """Validate once more, for a message with the values and lines that were used in the base's stead."""
        used = {("base", *key.split(".")): (self.document.line(self.place(key)), text) for key, text in shown.items()}
        document = dataclasses.replace(self.document, places=self.document.places | used)
        try:
            validate(self.model, values, document, ("base",))
        except WrongInput as error:
            named = ".".join(str(key) for key in error.keys[1:])
            if named in shown:
                raise self.document.wrong(self.place(named), error.problem) from None
            # What is allowed of one value names keys that it does not mean.
            for key in [] if error.problem.startswith("allowed") else _named_in(error.problem, self.derived):
                told = f"{error.problem} ({key} {self.derived[key]})"
                raise self.document.wrong(self.place(key), told) from None
            raise

    def place(self, key: str) -> Keys:
        """Where a key stands in the file: in `search`, else in `base`."""
        return ("search", key) if ("search", key) in self.document.places else ("base", *key.split("."))

    def corners(self) -> Iterator[Parameters]:
        """Combinations by which the space is checked, at most a thousand or so."""
        for values in _combinations([dimension.checked() for dimension in self.dimensions], _CORNERS):
            yield _active(self, dict(zip((dimension.key for dimension in self.dimensions), values, strict=True)))

    def corners_that_change(self, *sections: str) -> list[Parameters]:
        """Combinations of the ends of the dimensions in these sections, at most 64."""
        kept = [d for d in self.dimensions if d.key.split(".")[0] in sections]
        found: list[Parameters] = []
        for values in _combinations([dimension.ends() for dimension in kept], _SHAPES):
            corner = _active(self, dict(zip((dimension.key for dimension in kept), values, strict=True)))
            if corner not in found:
                found.append(corner)
        return found

    def distributions(self, parameters: Parameters) -> "dict[str, BaseDistribution]":
        """Optuna's distributions of the given parameters."""
        return {d.key: d.distribution() for d in self.dimensions if d.key in parameters}

    def plain(self, parameters: Parameters) -> Parameters:
        """Parameters as Optuna stores them."""
        kinds = {dimension.key: dimension.kind for dimension in self.dimensions}
        return {key: _plain(value) if kinds[key] == "choice" else value for key, value in parameters.items()}


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
    for word in told:
        if word not in words:
            raise document.wrong((*place, word), unknown_key(word, words))
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
            if problem := is_time(choice, document.written(at), key):
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
            written = document.written(("base", *dimension.key.split("."))) or f"{_word(value)}, the default,"
            place: Keys = ("search", dimension.key)
            low, high = (document.written((*place, end)) for end in ("low", "high"))
            allowed = f"{low} to {high}" if low and high and not dimension.step else dimension.allowed()
            raise document.wrong(place, f"the base's value {written} is outside the search ({allowed})")
    for corner in space.corners():
        try:
            space.assemble(corner)
        except WrongInput as error:
            told = ", ".join(f"{key} = {_word(value)}" for key, value in corner.items())
            raise document.wrong(_blamed(space, corner, error), f"{error.problem} (with {told})") from None


def _blamed(space: Space, corner: Parameters, error: WrongInput) -> Keys:
    """The searched key that a combination fails for, as far as the message names one."""
    named = ".".join(str(key) for key in error.keys[1:])
    if named in corner or named in space.derived:
        return space.place(named)
    return ("search", *_named_in(error.problem, corner)[-1:])


def _named_in(problem: str, keys: Mapping[str, Any]) -> list[str]:
    """Those of the dotted keys whose last part a message names."""
    words = set(re.findall(r"\w+", problem))
    return [key for key in keys if key.rpartition(".")[2] in words]


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
            raise space.document.wrong(place, f"is never so: {key} is not searched, and is {_word(fixed)} in base")


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


def _combinations(values: list[list[Any]], most: int) -> Iterator[tuple[Any, ...]]:
    """Every combination; where there are more than `most`, a spread of them with the first and the last."""
    if math.prod(len(each) for each in values) <= most:
        yield from itertools.product(*values)
        return
    yield tuple(each[0] for each in values)
    yield tuple(each[-1] for each in values)
    draw = random.Random(0)  # noqa: S311 - a spread, the same one every time
    for _ in range(most - 2):
        yield tuple(draw.choice(each) for each in values)


def _active(space: Space, corner: Parameters) -> Parameters:
    values, chosen = dict(space.values), {}
    for dimension in space.dimensions:
        if dimension.key in corner and dimension.active(values):
            chosen[dimension.key] = values[dimension.key] = corner[dimension.key]
    return chosen


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _word(value: Any) -> str:
    """A value as a file has it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *section, name = key.split(".")
    for part in section:
        values = values.setdefault(part, {})
        if not isinstance(values, dict):
            return  # no section stands there, which validation will say
    values[name] = value


def _nested_copy(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _nested_copy(value) if isinstance(value, dict) else value for key, value in values.items()}


def _plain(value: Any) -> Any:
    # Optuna stores only numbers, text and None as choices.
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
