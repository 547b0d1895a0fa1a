"""Optuna's Gaussian process, with every trial that is over told in a way that it can learn from."""

import statistics
from typing import Any

import numpy as np
import optuna
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler, GPSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from .sobol import SobolSampler


class GaussianProcessSampler(BaseSampler):
    """Optuna's `GPSampler` on a study of its own, which is made anew for every proposal.

    `GPSampler` looks at complete and running trials only. So each trial that is over is told as complete: a
    stopped one with what it would have come to (`expected_value`), one that broke a constraint with the worst
    value there is and the constraint; one that failed with the median, which says little, but where nothing is
    said the same point would be the best guess again and again. The first `startup` proposals are `first`'s.
    """

    def __init__(self, first: SobolSampler, startup: int, seed: int):
        self._first, self._startup, self._seed = first, startup, seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All dimensions."""
        return self._first.infer_relative_search_space(study, trial)

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Where the expected improvement is highest, over what running trials may bring."""
        others = [other for other in study.get_trials(deepcopy=False) if other.number != trial.number]
        told = told_as_complete(others, 1 if study.direction == StudyDirection.MINIMIZE else -1)
        if sum(other.state == TrialState.COMPLETE for other in told) < self._startup:
            return self._first.sample_relative(study, trial, search_space)
        sampler = GPSampler(seed=self._seed, n_startup_trials=0)
        own = optuna.create_study(direction=study.direction, sampler=sampler)
        own.add_trials(told)
        return own.ask(search_space).params

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never asked."""
        return self._first.sample_independent(study, trial, param_name, param_distribution)


def told_as_complete(trials: list[FrozenTrial], sign: int) -> list[FrozenTrial]:
    """What the model is told; `sign` is 1 where less is better. Nothing, until there is a complete trial."""
    complete = [trial for trial in trials if trial.state == TrialState.COMPLETE]
    if not complete:
        return []
    values = {trial.number: trial.value for trial in complete}
    for trial in trials:
        if trial.state == TrialState.PRUNED and not _broken(trial):
            values[trial.number] = expected_value(trial, complete, sign)
    known = [value for value in values.values() if value is not None]
    worst, middle = max(known, key=lambda value: sign * value), statistics.median(known)
    # A constraint that holds everywhere would cost a fit and say nothing.
    keys = {key for trial in trials for key in _broken(trial)}
    told = []
    for trial in trials:
        value = worst if _broken(trial) else values.get(trial.number)
        if value is None and trial.state != TrialState.RUNNING:
            value = middle  # it failed, or was stopped before it said anything
        constraints = {f"constraints:{key}": trial.constraints[key] for key in keys if trial.constraints}
        told.append(
            create_trial(
                state=TrialState.RUNNING if value is None else TrialState.COMPLETE,
                value=value,
                params=trial.params,
                distributions=trial.distributions,
                system_attrs=constraints,
            )
        )
    return told


def _broken(trial: FrozenTrial) -> list[str]:
    return [key for key, violation in trial.constraints.items() if violation > 0]


def expected_value(trial: FrozenTrial, complete: list[FrozenTrial], sign: int) -> float | None:
    """What a stopped trial would have come to: its last value and the median change of the complete ones from there.

    Never better than the best complete one, which is why it was stopped. None if it has no value.
    """
    if not trial.intermediate_values:
        return None
    examples, value = max(trial.intermediate_values.items())
    changes = []
    for other in complete:
        curve = sorted(other.intermediate_values.items())
        if curve and other.value is not None:
            at, values = zip(*curve, strict=True)
            changes.append(other.value - float(np.interp(examples, at, values)))
    best = min(sign * other.value for other in complete if other.value is not None)
    return sign * max(sign * (value + statistics.median(changes or [0.0])), best)
