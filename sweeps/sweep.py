"""A sweep: a file read, checked and ready to run."""

import dataclasses
import difflib
import functools
import math
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel

from ..trainables import registry
from ..trainables.settings import Training
from . import files
from .files import Document, WrongInput
from .scoring import apart, scoring
from .searchers import settled
from .settings import SweepSettings
from .space import Dimension, Parameters, Space, flatten
from .space_file import read_space
from .validation import nearest, validate

READY = Path(__file__).parent
"""The ready sweeps lie beside this file."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A question, the trainings that answer it, and how they are chosen."""

    name: str
    settings: SweepSettings
    space: Space
    document: Document
    grid: tuple[Dimension, ...] = ()
    """Searched keys under `sampling` of a sweep that trains: each model is scored over every combination of them."""

    @property
    def goal(self) -> Literal["minimize", "maximize"]:
        """What is asked of the objective."""
        return self.settings.objective.goal or "minimize"  # `check` has filled it in

    @property
    def sign(self) -> int:
        """1 where less of the objective is better, else -1."""
        return 1 if self.goal == "minimize" else -1

    def group_of(self, parameters: Parameters) -> Any:
        """The value that a trial shares with those it is compared with; None where all are compared."""
        within = self.settings.early_stopping.within
        return self.space.plain({within: parameters[within]})[within] if within in parameters else None

    def training(self, parameters: Parameters, repeat: int = 0) -> Training:
        """The training of a configuration; its repeats differ in the seed alone."""
        training = self.space.assemble(parameters)
        return self.space.assemble(parameters, seed=training.seed + repeat) if repeat else training

    @functools.cached_property
    def samplings(self) -> list[Parameters]:
        """The combinations of the grid; none where there is none."""
        if not self.grid:
            return []
        return list(dataclasses.replace(self.space, dimensions=self.grid).configurations())

    @functools.cached_property
    def grace(self) -> float:
        """Share of the budget before the first comparison: never inside a warm-up that can be proposed."""
        warmups = [max(d.ends()) for d in self.space.dimensions if d.key == "schedule.warmup"]
        if "schedule.warmup" in self.space.derived:
            warmups += [self.training(corner).schedule.warmup for corner in self.space.corners()]
        return max(self.settings.early_stopping.grace, self.training({}).schedule.warmup, *warmups)

    def rungs(self, budgets: list[float]) -> tuple[float, ...]:
        """Where trials are compared, in examples or FLOPs: the same numbers for all of them.

        From `grace` of the smallest budget on: for ASHA a geometric ladder (Li et al. 2018, arXiv 1810.05934), for
        the other rules every evaluation.
        """
        if self.settings.early_stopping.rule == "none" or not self.settings.search:
            return ()
        budget = min(budgets)
        first, factor = self.grace * budget, self.settings.early_stopping.reduction
        if self.settings.early_stopping.rule != "asha":
            every = self.training({}).evaluation.every
            later = (every * k for k in range(1, math.ceil(1 / every)))
            return tuple(
                share * budget for share in (self.grace, *(s for s in later if self.grace * 1.0001 < s < 0.9999))
            )
        # By the integer power, so that 10% x 3 x 3 is the same number whatever was done before.
        rungs = (first * factor**k for k in range(math.ceil(math.log(budget / first, factor)) + 1))
        return tuple(rung for rung in rungs if rung < budget * 0.9999)

    def resolved(self) -> str:
        """The sweep as a file, with every default filled in."""
        values: dict[str, Any] = self.settings.model_dump(mode="json", by_alias=True)
        training = self.training({})
        base = _stated(training, training.model_dump(mode="json"))
        for key, expression in self.space.derived.items():
            if key not in self.settings.search:
                *section, name = key.split(".")
                target = base
                for part in section:
                    target = target[part]
                target[name] = expression
        values["base"] = base
        return _written(values)

    def training_file(self, parameters: Parameters) -> str:
        """One configuration as a training file: the base with these parameters put in, and nothing searched."""
        training = self.training(parameters)
        return _written(
            {
                "question": self.settings.question,
                "trainable": self.settings.trainable,
                "base": _stated(training, training.model_dump(mode="json")),
                "objective": self.settings.objective.model_dump(mode="json"),
            }
        )


def load(name_or_path: str, overrides: tuple[str, ...] = (), runs: Path = Path("runs")) -> Sweep:
    """Read a sweep or training file by path, or a ready sweep by name. Raises `WrongInput`.

    `runs` is where the run that a file is `from` is looked for.
    """
    path = find(name_or_path)
    document = files.read(path, overrides)
    if document.values.get("from") is not None and "trainable" not in document.values:
        from . import source  # which loads the training file that a sweep may be from

        source.fill(document, runs)
    return check(document, path.stem)


def find(name_or_path: str) -> Path:
    """The file that a person means."""
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    ready = {file.stem: file for file in READY.glob("*.yaml")}
    if name_or_path in ready:
        return ready[name_or_path]
    near = difflib.get_close_matches(name_or_path, [*ready, *(str(p) for p in Path().glob("*.yaml"))], n=1)
    hint = f"did you mean {near[0]}?" if near else f"ready sweeps: {', '.join(sorted(ready))}"
    raise WrongInput(f"{name_or_path}: no such file or ready sweep; {hint}")


def check(document: Document, name: str) -> Sweep:
    """Check everything that can be checked without running. Raises `WrongInput`."""
    settings: SweepSettings = validate(SweepSettings, document.values, document)
    known = registry.names()
    if settings.trainable not in known:
        near = nearest(settings.trainable, known)
        raise document.wrong(("trainable",), f"allowed: {', '.join(known)}, found {settings.trainable}{near}")
    space = read_space(document, registry.settings_class(settings.trainable))
    grid: tuple[Dimension, ...] = ()
    if settings.from_ is not None:
        settings = scoring(document, settings, space)
    else:
        space, grid = apart(document, space)
    settings = _with_goal(document, settings, space)
    settings = settled(document, settings, space)
    _check_within(document, settings, space)
    sweep = Sweep(name, settings, space, document, grid)
    if settings.search and sweep.grace >= 1 and settings.early_stopping.rule != "none":
        raise document.wrong(
            ("early_stopping", "grace"),
            f"allowed: less than 100%, found {sweep.grace:.0%} (the grace, or the largest warm-up that is searched)",
        )
    return sweep


def _with_goal(document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
    """The settings with the objective's whole name and its goal. Raises `WrongInput`."""
    goals, objective = space.assemble({}).metrics(), settings.objective
    # The names of some say by how many samples: validation/kid is enough to say.
    whole = [name for name in goals if name == objective.metric or name.startswith(f"{objective.metric}_")]
    if objective.metric not in goals and len(whole) == 1:
        objective = objective.model_copy(update={"metric": whole[0]})
    if objective.metric not in goals:
        near = nearest(objective.metric, list(goals))
        raise document.wrong(("objective", "metric"), f"allowed: {', '.join(goals)}, found {objective.metric}{near}")
    goal = goals[objective.metric]
    if objective.goal not in (None, goal):
        raise document.wrong(
            ("objective", "goal"),
            f"{objective.metric} is to {goal}, found {objective.goal}; write goal: {goal}",
        )
    return settings.model_copy(update={"objective": objective.model_copy(update={"goal": goal})})


def _check_within(document: Document, settings: SweepSettings, space: Space) -> None:
    place, within = ("early_stopping", "within"), settings.early_stopping.within
    # A range of numbers makes a group of every trial, and nothing to compare.
    kinds = {d.key: d.kind for d in space.dimensions}
    allowed = [key for key, kind in kinds.items() if kind != "float"]
    if within is None or within in allowed:
        return
    if within in kinds:
        raise document.wrong(place, f"{within} is a range, of which no two trials share a value; give its choices")
    near = nearest(within, allowed)
    there = f"; allowed: {', '.join(allowed)}" if allowed else "; none with choices is searched"
    raise document.wrong(place, f"{within} is not a searched key{near or there}")


def changed(before: Sweep, after: Sweep) -> dict[str, list[Any]]:
    """The settings in which two sweeps differ, as [before, after], of those that a resumed sweep may not change."""
    # These change when the sweep ends, or what it is said to cost, not what its trials are.
    free = {"trials", "limits", "prices", "question", "hang"}
    one, two = (
        flatten({k: v for k, v in yaml.safe_load(sweep.resolved()).items() if k not in free})
        for sweep in (before, after)
    )
    keys = sorted(one.keys() | two.keys())
    differing = {key: [one.get(key), two.get(key)] for key in keys if one.get(key) != two.get(key)}
    orders = [list(sweep.settings.search) for sweep in (before, after)]
    if not differing and orders[0] != orders[1]:
        # Searchers list, or draw, in the order of the keys.
        return {"search": [", ".join(order) for order in orders]}
    return differing


def _stated(model: BaseModel, values: dict[str, Any]) -> dict[str, Any]:
    """Values to write down: nulls only where they say something, as where a default is another."""
    fields = type(model).model_fields
    kept = {}
    for key, value in values.items():
        inner = getattr(model, key)
        if isinstance(inner, BaseModel):
            kept[key] = _stated(inner, value)
        elif value is not None or fields[key].default is not None:
            kept[key] = value
    return kept


def _written(values: dict[str, Any]) -> str:
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes text so that our own reader takes it for text: `400k` and `nan` are more than that to it."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        plain = files.scalar(text) == text
    except ValueError:
        plain = False
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else "'")


_Dumper.add_representer(str, _text)
