"""The search space: from a sweep file's `search` to trainings, by way of an Optuna trial.

A dimension is a range (`low`, `high`, `log`, `step`), a list of `choices`, or a derived value (`= ...`); with
`when` it exists only where other keys have given values.
"""

import dataclasses
import itertools
import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from ..trainables.settings import Training
from .expressions import ExpressionError, evaluate, is_expression, keys_in
from .files import Document, Keys, WrongInput, all_keys, model_at, nearest, unknown_key, validate

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

Parameters = dict[str, Any]
_CORNERS = 4096


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
            return f"one of {', '.join(str(choice) for choice in self.choices)}"
        return f"{self.low:g} to {self.high:g}" + (f" in steps of {self.step:g}" if self.step else "")


@dataclass(frozen=True)
class Space:
    """All that a sweep searches, around a base."""

    model: type[Training]
    base: dict[str, Any]
    dimensions: tuple[Dimension, ...]
    derived: dict[str, str]
    document: Document

    def base_parameters(self) -> Parameters:
        """The base's own values of the searched keys: trial 0."""
        values = flatten(self.assemble({}).model_dump(mode="json"))
        return {d.key: values.get(d.key) for d in self.dimensions if d.active(values)}

    def suggest(self, trial: "optuna.Trial") -> Parameters:
        """Parameters of a new trial."""
        values = flatten(self.base)
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
        return validate(self.model, values, self.document, ("base",))

    def place(self, key: str) -> Keys:
        """Where a key stands in the file: in `search`, else in `base`."""
        return ("search", key) if ("search", key) in self.document.places else ("base", *key.split("."))

    def corners(self) -> Iterator[Parameters]:
        """Combinations of the ends of every dimension, at most a few thousand."""
        ends = [dimension.ends() for dimension in self.dimensions]
        for values in itertools.islice(itertools.product(*ends), _CORNERS):
            yield dict(zip((dimension.key for dimension in self.dimensions), values, strict=True))

    def corners_that_change(self, *sections: str) -> list[Parameters]:
        """The corners, told apart only by the dimensions in these sections."""
        kept = [d for d in self.dimensions if d.key.split(".")[0] in sections]
        found = dataclasses.replace(self, dimensions=tuple(kept)).corners()
        return [_active(self, corner) for corner in itertools.islice(found, 64)]

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
    derived = {key: value for key, value in flatten(base).items() if is_expression(value)}
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
    if not isinstance(told, dict) or not {"low", "high", "choices"} & set(told):
        found = document.written(place)
        raise document.wrong(
            place, f"give {{low: …, high: …}}, {{choices: […]}} or = an expression, found {found or 'nothing'}"
        )
    when = tuple(
        (other, tuple(value) if isinstance(value, list) else (value,))
        for other, value in (told.get("when") or {}).items()
    )
    for other, _ in when:
        if other not in keys:
            raise document.wrong((*place, "when", other), _no_such(other, keys))
    if "choices" in told:
        choices = validate(_Choices, told, document, place).choices
        if not choices:
            raise document.wrong((*place, "choices"), "is empty: give at least one value")
        if len({_plain(choice) for choice in choices}) < len(choices):
            raise document.wrong((*place, "choices"), "has a value twice")
        return Dimension(key, "choice", choices=tuple(choices), when=when)
    found = validate(_Range, told, document, place)
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
        raise document.wrong((*place, "step"), f"allowed: more than 0, at most high − low, found {found.step:g}")
    if kind == "int":
        for name in ("low", "high", "step"):
            number = getattr(found, name)
            if number is not None and not float(number).is_integer():
                raise document.wrong((*place, name), f"{key} is a whole number, found {number:g}")
    return Dimension(key, kind, found.low, found.high, found.log, found.step, when=when)


def _shown(document: Document, place: Keys) -> str:
    return f"low {document.written((*place, 'low'))}, high {document.written((*place, 'high'))}"


def _kind(model: type[Training], key: str) -> Literal["int", "float"] | None:
    """Whether a key holds whole numbers or numbers; None for anything else."""
    *section, name = key.split(".")
    inner = model_at(model, tuple(section))
    assert inner is not None
    annotation: Any = inner.model_fields[name].annotation
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    members = {_bare(member) for member in (typing.get_args(annotation) if union else (annotation,))}
    return "int" if int in members else "float" if float in members else None


def _bare(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


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
            stuck = next(k for k in derived if k not in ordered)
            raise document.wrong(("search", stuck), "derived values depend on each other in a circle")
        ordered |= {k: derived[k] for k in ready}
    return ordered


def _check(space: Space) -> None:
    """The base, each end alone, and combinations of ends must be trainings; the base must lie in its search."""
    document = space.document
    base = flatten(space.assemble({}).model_dump(mode="json"))
    for dimension in space.dimensions:
        for i, value in enumerate(dimension.ends()):
            _check_alone(space, dimension, i, value)
    for dimension in space.dimensions:
        value = base.get(dimension.key)
        if dimension.active(base) and not dimension.holds(value):
            raise document.wrong(
                ("search", dimension.key), f"the base's value {value} is outside the search ({dimension.allowed()})"
            )
    for corner in space.corners():
        active = _active(space, corner)
        try:
            space.assemble(active)
        except WrongInput as error:
            told = ", ".join(f"{key} = {value}" for key, value in active.items())
            message = str(error).split(": ", 2)[-1]
            blamed = [key for key in active if key.rpartition(".")[2] in message]
            raise document.wrong(("search", *blamed[-1:]), f"{message} (with {told})") from None


def _check_alone(space: Space, dimension: Dimension, i: int, value: Any) -> None:
    """Raise for a value that its key cannot hold, whatever the other keys are."""
    from pydantic import TypeAdapter, ValidationError

    document = space.document
    *section, name = dimension.key.split(".")
    inner = model_at(space.model, tuple(section))
    assert inner is not None
    info = inner.model_fields[name]
    adapter: TypeAdapter[Any] = TypeAdapter(typing.Annotated[info.annotation, info])  # pyright: ignore
    place: Keys = ("search", dimension.key, "choices", i) if dimension.kind == "choice" else ("search", dimension.key)
    try:
        adapter.validate_python(value, strict=isinstance(value, bool) or None)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].replace("Input should be a valid ", "allowed: ").replace("Input should be ", "allowed: ")
        near = nearest(str(value), [str(a) for a in typing.get_args(info.annotation)])
        raise document.wrong(place, f"{message.split(', unable')[0]}, found {value}{near}") from None


def _active(space: Space, corner: Parameters) -> Parameters:
    values = flatten(space.base) | corner
    return {d.key: corner[d.key] for d in space.dimensions if d.key in corner and d.active(values)}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *section, name = key.split(".")
    for part in section:
        values = values.setdefault(part, {})
    values[name] = value


def _nested_copy(values: dict[str, Any]) -> dict[str, Any]:
    return {key: _nested_copy(value) if isinstance(value, dict) else value for key, value in values.items()}


def _plain(value: Any) -> Any:
    # Optuna stores only numbers, text and None as choices.
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
