"""Parameters under `sampling`, which need no training of their own.

A sweep `from` a run trains nothing: a trial of it loads the run's weights (`initial`), draws and scores. The training
settings are the run's own; only what is under `sampling` can be searched. A sweep that trains and searches `sampling`
too trains each configuration once, and scores the model over every combination of those (`mixed.py`).
"""

import dataclasses
import math
from typing import Any

from .files import Document, WrongInput
from .settings import SweepSettings
from .space import Dimension, Space

SAMPLING = "sampling."
FREE = ("sampling", "quality")
"""Sections of a training that change nothing that is learned."""


_MOST = 64
"""Combinations over which each model of a sweep may be scored."""


def apart(document: Document, space: Space) -> tuple[Space, tuple[Dimension, ...]]:
    """The space of a sweep that trains without what is under `sampling`, and that. Raises `WrongInput`."""
    grid = tuple(dimension for dimension in space.dimensions if dimension.key.startswith(SAMPLING))
    metric = space.assemble({}).scored_by() if grid else None
    if metric is None:  # nothing to set apart: a model whose samples are not scored is trained with each of them
        return space, ()
    trained = tuple(dimension for dimension in space.dimensions if dimension not in grid)
    if not trained:
        raise document.wrong(
            ("search", grid[0].key),
            "needs no training: put trainable and base into a file of their own, which this one is `from`",
        )
    for dimension in space.dimensions:
        for other, _ in dimension.when:
            if dimension in grid or other.startswith(SAMPLING):
                told = "every model is drawn from in every way; leave `when` out"
                raise document.wrong(("search", dimension.key, "when"), told)
    for dimension in grid:
        if dimension.amount is None:
            told = "every model is scored over all of its values; give choices, or low, high and step"
            raise document.wrong(("search", dimension.key), told)
    amount = math.prod(dimension.amount or 1 for dimension in grid)
    if amount > _MOST:
        told = f"every model would be scored in {amount} ways, at most {_MOST} are allowed; list fewer, or search them "
        raise document.wrong(("search", grid[0].key), told + "in a sweep `from` the best model")
    return dataclasses.replace(space, dimensions=trained), grid


def scoring(document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
    """The settings of a sweep `from` a run: nothing is stopped early, and quality is what is asked for."""
    for dimension in space.dimensions:
        if not dimension.key.startswith(SAMPLING):
            raise document.wrong(
                ("search", dimension.key),
                f"would need training again, and this sweep only samples `from: {settings.from_}`; "
                "search keys under sampling, or leave `from` out and give trainable and base",
            )
    metric = space.assemble({}).scored_by()
    if metric is None:
        raise document.wrong(("from",), f"{settings.from_} is a {settings.trainable}, whose samples nothing scores")
    if settings.confirm is not None and "quality" not in space.model.model_fields:
        told = f"{settings.trainable} is scored by as many samples always; leave it out"
        raise document.wrong(("confirm",), told)
    given = document.values.get("early_stopping") or {}
    if given.get("rule", "none") != "none":
        raise document.wrong(("early_stopping", "rule"), "there is no training to stop; leave early_stopping out")
    stopping = settings.early_stopping.model_copy(update={"rule": "none"})
    changes: dict[str, Any] = {"early_stopping": stopping}
    if "objective" not in document.values:
        changes["objective"] = settings.objective.model_copy(update={"metric": metric})
    return settings.model_copy(update=changes)


def refuse_training(document: Document, base: dict[str, Any], run: str) -> None:
    """Raise where the base of a sweep `from` a run would change what was trained."""
    for section in base:
        if section not in FREE:
            raise _learned(document, section, run)


def _learned(document: Document, section: str, run: str) -> WrongInput:
    allowed = " and ".join(FREE)
    return document.wrong(("base", section), f"is as {run} was trained; only {allowed} can differ")
