"""Sweeps that train nothing: `from` a run, samples are drawn in other ways and scored.

A trial of such a sweep loads the run's weights (`initial`), draws and scores. The training settings are the run's own;
only what is under `sampling` can be searched.
"""

from typing import Any

from .files import Document, WrongInput
from .settings import SweepSettings
from .space import Space

FREE = ("sampling", "quality")
"""Sections of a training that change nothing that is learned."""


def scoring(document: Document, settings: SweepSettings, space: Space) -> SweepSettings:
    """The settings of a sweep `from` a run: nothing is stopped early, and quality is what is asked for."""
    for dimension in space.dimensions:
        if not dimension.key.startswith("sampling."):
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
