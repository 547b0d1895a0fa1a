"""What a sweep found, as numbers: its configurations, the gain over the base, what matters, what to search next."""

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from .files import WrongInput
from .history import Trial, read
from .space import Dimension, Parameters, word
from .summary import Configuration
from .sweep import Sweep
from .tables import number

FEWEST = 5
"""Complete configurations below which importances would be guesses."""
_MOST = 500  # configurations that importances are computed from: more of them say the same, later
_NEAR = 0.05  # share of a searched range that is its edge


def importances(sweep: Sweep, found: list[Configuration]) -> dict[str, float] | str:
    """Each parameter's share of the variation among complete configurations (fANOVA, Hutter et al. 2014).

    Largest first; in words, why there are none. Parameters that only some trials have are left out.
    """
    common = [d.key for d in sweep.space.dimensions if found and all(d.key in c.parameters for c in found)]
    if len(found) < FEWEST:
        return f"Too few configurations are complete to say: {len(found)}, and {FEWEST} are needed."
    if len({configuration.mean for configuration in found}) == 1:
        return "Every configuration came to the same value, so nothing matters so far."
    tried = [key for key in common if len({word(c.parameters[key]) for c in found}) > 1]
    if not tried:
        return "No parameter has more than one value among the complete configurations."
    if len(tried) == 1:
        return f"Only {tried[0]} varies among the complete configurations, so all of the variation is its."
    import optuna
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances
    from optuna.trial import create_trial

    study = optuna.create_study(direction=sweep.settings.objective.goal)
    for configuration in found[:: math.ceil(len(found) / _MOST)]:
        study.add_trial(
            create_trial(
                value=configuration.mean,
                params=sweep.space.plain(configuration.parameters),
                distributions=sweep.space.distributions(configuration.parameters),
            )
        )
    return get_param_importances(study, evaluator=FanovaImportanceEvaluator(seed=0), params=tried)


def edges(sweep: Sweep, parameters: Parameters) -> list[str]:
    """Where the best lies at the edge of what was searched, so that better may lie beyond; in words.

    Not where the setting itself allows no more: a warm-up of 0% is no edge.
    """
    hints = []
    for dimension in sweep.space.dimensions:
        if dimension.key in parameters and (end := _edge(sweep, dimension, parameters)):
            told = number(parameters[dimension.key])
            hints.append(f"{dimension.key} {told} is at the {end} end of what was searched ({dimension.allowed()})")
    return hints


def _edge(sweep: Sweep, dimension: Dimension, parameters: Parameters) -> str | None:
    value = parameters[dimension.key]
    if dimension.kind == "choice":
        choices = [c for c in dimension.choices if isinstance(c, int | float) and not isinstance(c, bool)]
        if len(choices) < 3 or len(choices) < len(dimension.choices) or min(choices) < value < max(choices):
            return None
        return "lower" if value == min(choices) else "upper"
    low, high, value = (math.log(v) if dimension.log else v for v in (dimension.low, dimension.high, float(value)))
    share = (value - low) / (high - low) if high > low else 0.5
    if _NEAR < share < 1 - _NEAR:
        return None
    beyond = low - (high - low) / 3 if share < 0.5 else high + (high - low) / 3
    beyond = math.exp(beyond) if dimension.log else beyond
    try:
        sweep.training(parameters | {dimension.key: round(beyond) if dimension.kind == "int" else beyond})
    except WrongInput:
        return None
    return "lower" if share < 0.5 else "upper"


@dataclass(frozen=True)
class Spell:
    """A time in which a process ran the sweep, from its opening to its last event; Unix seconds."""

    begin: float
    end: float


def spells(history: Path) -> list[Spell]:
    """When the sweep ran: one spell, and one more for every time that it was resumed."""
    found: list[Spell] = []
    for event in read(history):
        if event["event"] == "opened" or not found:
            found.append(Spell(event["time"], event["time"]))
        found[-1] = dataclasses.replace(found[-1], end=max(found[-1].end, event["time"]))
    return found


def troubles(trials: Iterable[Trial]) -> dict[tuple[str, str], list[Trial]]:
    """What health rules and ends have to say, by (rule or state, its first words), each with its trials."""
    found: dict[tuple[str, str], tuple[str, list[Trial]]] = {}
    for trial in trials:
        for rule, text in trial.warnings.items():
            if rule != trial.rule:  # else its end says more
                found.setdefault((rule, ""), (text, []))[1].append(trial)
        if trial.over and trial.state not in ("complete", "stopped"):
            # Of a rule one example does; errors of code have each their own words.
            key = (trial.rule, "end") if trial.rule else (trial.state, trial.reason)
            found.setdefault(key, (trial.reason, []))[1].append(trial)
    return {(rule, text): told for (rule, _), (text, told) in found.items()}
