"""CMA-ES as an Optuna sampler whose state is a function of the trials that are over."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import cmaes
import numpy as np
from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from .space import Space
from .unit_cube import from_unit, to_unit

_STEP = 0.3
"""Of the unit cube: the standard deviation of the first generation, around its middle."""


class CmaSampler(BaseSampler):
    """Covariance matrix adaptation (Hansen 2016, arXiv 1604.00772) in the unit cube, from its middle.

    Optuna's own keeps its state in the study; here the generations are told again for every proposal, which
    takes a millisecond and needs no state: a generation is so many trials in the order of their numbers, told
    once all of them (and all before) are over. It sees ranks alone, so no value has to be made up: `merit`.
    With trials of earlier sweeps (the first `told` of the study) it starts where the best of them lie, as wide
    as they lie (Nomura et al. 2021, arXiv 2012.06932).
    """

    def __init__(self, space: Space, told: int, seed: int):
        self._space, self._told, self._seed = space, told, seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All dimensions."""
        return {dimension.key: dimension.distribution() for dimension in self._space.dimensions}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A draw from the distribution that the generations so far have led to."""
        trials = study.get_trials(deepcopy=False)
        sign = 1 if study.direction == StudyDirection.MINIMIZE else -1
        optimizer = self._begin([t for t in trials[: self._told] if t.state != TrialState.FAIL], sign)
        for generation in _generations(trials[self._told :], optimizer.population_size):
            optimizer.tell(self._ranked(generation, sign))
        optimizer.reseed_rng(self._seed)
        pairs = zip(self._space.dimensions, optimizer.ask().tolist(), strict=True)
        return {dimension.key: from_unit(dimension, at) for dimension, at in pairs}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never asked."""
        raise AssertionError(f"{param_name} is not a dimension of the space")

    def _begin(self, told: list[FrozenTrial], sign: int) -> cmaes.CMA:
        if told:
            share = max(0.1, min(3, len(told)) / len(told))
            mean, step, shape = cmaes.get_warm_start_mgd(self._ranked(told, sign), gamma=share)
        else:
            mean, step, shape = np.full(len(self._space.dimensions), 0.5), _STEP, None
        bounds = np.array([[0.0, 1.0]] * len(mean))
        mean = np.clip(mean, 0.0, 1.0)
        return cmaes.CMA(mean=mean, sigma=step, bounds=bounds, cov=shape, seed=0)

    def _ranked(self, trials: list[FrozenTrial], sign: int) -> list[tuple[np.ndarray, float]]:
        best_first = sorted(trials, key=lambda trial: merit(trial, sign))
        return [(self._place(trial.params), float(rank)) for rank, trial in enumerate(best_first)]

    def _place(self, parameters: dict[str, Any]) -> np.ndarray:
        return np.array([to_unit(dimension, parameters[dimension.key]) for dimension in self._space.dimensions])


def _generations(trials: list[FrozenTrial], size: int) -> Iterator[list[FrozenTrial]]:
    """Trials by generations; those that failed say nothing."""
    over = itertools.takewhile(lambda trial: trial.state.is_finished(), trials)
    known = [trial for trial in over if trial.state != TrialState.FAIL]
    for end in range(size, len(known) + 1, size):
        yield known[end - size : end]


def merit(trial: FrozenTrial, sign: int) -> tuple[int, float, float]:
    """Less is better: complete by value, then stopped by how far and how well, then what broke a constraint."""
    if any(violation > 0 for violation in trial.constraints.values()):
        return 2, 0.0, 0.0
    if trial.value is not None:
        return 0, 0.0, sign * trial.value
    if trial.intermediate_values:
        examples, value = max(trial.intermediate_values.items())
        return 1, -examples, sign * value
    return 1, math.inf, 0.0
