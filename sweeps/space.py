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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ..trainables.settings import Training
from .expressions import ExpressionError, evaluate
from .files import Document, Keys, WrongInput
from .validation import validate

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution

Parameters = dict[str, Any]
_CORNERS = 1024
_SHAPES = 64
_ALL_VALUES = 32


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
            return CategoricalDistribution([plain_choice(choice) for choice in self.choices])
        if self.kind == "int":
            step = int(self.step or 1)
            return IntDistribution(int(self.low), int(self.high), log=self.log, step=step)
        return FloatDistribution(self.low, self.high, log=self.log, step=self.step)

    def suggest(self, trial: "optuna.Trial") -> Any:
        """The value that an Optuna trial takes here."""
        if self.kind == "choice":
            plain = trial.suggest_categorical(self.key, [plain_choice(choice) for choice in self.choices])
            return next(choice for choice in self.choices if plain_choice(choice) == plain)
        if self.kind == "int":
            step = int(self.step or 1)
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log, step=step)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log, step=self.step)

    @property
    def amount(self) -> int | None:
        """How many values there are to list; None for a range without steps, and for a logarithmic one."""
        if self.kind == "choice":
            return len(self.choices)
        step = self.step or (1.0 if self.kind == "int" else None)
        return None if self.log or step is None else round((self.high - self.low) / step) + 1

    def value(self, i: int) -> Any:
        """The i-th of the values."""
        if self.kind == "choice":
            return self.choices[i]
        if self.kind == "int":
            return int(self.low) + i * int(self.step or 1)
        assert self.step is not None
        return min(float(f"{self.low + i * self.step:.12g}"), self.high)  # 0.3, not 0.30000000000000004

    def index(self, value: Any) -> int:
        """Which of the values it is."""
        if self.kind == "choice":
            return [plain_choice(choice) for choice in self.choices].index(plain_choice(value))
        return round((value - self.low) / (self.step or 1))

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
            return any(plain_choice(value) == plain_choice(choice) for choice in self.choices)
        if isinstance(value, bool) or not isinstance(value, int | float) or not self.low <= value <= self.high:
            return False
        steps = (value - self.low) / self.step if self.step else 0.0
        return math.isclose(steps, round(steps), abs_tol=1e-9)

    def allowed(self) -> str:
        """The dimension in words."""
        if self.kind == "choice":
            return f"one of {', '.join(word(choice) for choice in self.choices)}"
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

    @property
    def seed(self) -> int:
        """The base's, from which every draw of the search follows."""
        return self.values["seed"]

    def base_parameters(self) -> Parameters:
        """The base's own values of the searched keys: trial 0."""
        return {d.key: self.values.get(d.key) for d in self.dimensions if d.active(self.values)}

    def conditional(self) -> list[Dimension]:
        """The dimensions that only some configurations have."""
        searched = {dimension.key for dimension in self.dimensions}
        return [dimension for dimension in self.dimensions if any(key in searched for key, _ in dimension.when)]

    def configurations(self) -> Iterator[Parameters]:
        """Every configuration of a space whose dimensions all list their values."""
        yield from self._completions({}, dict(self.values), 0)

    def _completions(self, chosen: Parameters, values: dict[str, Any], i: int) -> Iterator[Parameters]:
        if i == len(self.dimensions):
            yield chosen
            return
        dimension = self.dimensions[i]
        if not dimension.active(values):
            yield from self._completions(chosen, values, i + 1)
            return
        for at in range(dimension.amount or 0):
            value = {dimension.key: dimension.value(at)}
            yield from self._completions(chosen | value, values | value, i + 1)

    def suggest(self, trial: "optuna.Trial") -> Parameters:
        """Parameters of a new trial."""
        values = dict(self.values)
        chosen: Parameters = {}
        for dimension in self.dimensions:
            if dimension.active(values):
                chosen[dimension.key] = values[dimension.key] = dimension.suggest(trial)
        return chosen

    def active(self, parameters: Parameters) -> Parameters:
        """Those of the parameters whose dimensions exist with them."""
        values, chosen = dict(self.values), {}
        for dimension in self.dimensions:
            if dimension.key in parameters and dimension.active(values):
                chosen[dimension.key] = values[dimension.key] = parameters[dimension.key]
        return chosen

    def assemble(self, parameters: Parameters, seed: int | None = None) -> Training:
        """The training with these parameters; derived values are computed. Raises `WrongInput`."""
        values = _nested_copy(self.base)
        for key, value in parameters.items():
            _put(values, key, value)
        if seed is not None:
            values["seed"] = seed
        shown = {key: word(value) for key, value in parameters.items()}
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
            for key in [] if error.problem.startswith("allowed") else named_in(error.problem, self.derived):
                told = f"{error.problem} ({key} {self.derived[key]})"
                raise self.document.wrong(self.place(key), told) from None
            raise

    def place(self, key: str) -> Keys:
        """Where a key stands in the file: in `search`, else in `base`."""
        return ("search", key) if ("search", key) in self.document.places else ("base", *key.split("."))

    def corners(self) -> Iterator[Parameters]:
        """Combinations by which the space is checked, at most a thousand or so."""
        for values in _combinations([dimension.checked() for dimension in self.dimensions], _CORNERS):
            yield self.active(dict(zip((dimension.key for dimension in self.dimensions), values, strict=True)))

    def corners_that_change(self, *sections: str) -> list[Parameters]:
        """Combinations of the ends of the dimensions in these sections, at most 64."""
        kept = [d for d in self.dimensions if d.key.split(".")[0] in sections]
        found: list[Parameters] = []
        for values in _combinations([dimension.ends() for dimension in kept], _SHAPES):
            corner = self.active(dict(zip((dimension.key for dimension in kept), values, strict=True)))
            if corner not in found:
                found.append(corner)
        return found

    def distributions(self, parameters: Parameters) -> "dict[str, BaseDistribution]":
        """Optuna's distributions of the given parameters."""
        return {d.key: d.distribution() for d in self.dimensions if d.key in parameters}

    def plain(self, parameters: Parameters) -> Parameters:
        """Parameters as Optuna stores them."""
        kinds = {dimension.key: dimension.kind for dimension in self.dimensions}
        return {key: plain_choice(value) if kinds[key] == "choice" else value for key, value in parameters.items()}


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


def named_in(problem: str, keys: Mapping[str, Any]) -> list[str]:
    """Those of the dotted keys whose last part a message names."""
    words = set(re.findall(r"\w+", problem))
    return [key for key in keys if key.rpartition(".")[2] in words]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat


def word(value: Any) -> str:
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


def plain_choice(value: Any) -> Any:
    # Optuna stores only numbers, text and None as choices.
    return value if value is None or isinstance(value, bool | int | float | str) else json.dumps(value)
