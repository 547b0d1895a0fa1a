"""A scrambled Sobol sequence over the search space, as an Optuna sampler."""

from typing import Any

from optuna import Study
from optuna.distributions import BaseDistribution
from optuna.samplers import BaseSampler
from optuna.trial import FrozenTrial
from scipy.stats import qmc

from .space import Space, plain_choice
from .unit_cube import from_unit


class SobolSampler(BaseSampler):
    """The point at `index` (from 0) of the sequence that `seed` scrambles (Owen 1998).

    Every dimension has a coordinate of its own, also one that only some configurations have: there it is used.
    """

    def __init__(self, space: Space, index: int, seed: int):
        self._space, self._index, self._seed = space, index, seed

    def infer_relative_search_space(self, study: Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        """All dimensions."""
        return {dimension.key: dimension.distribution() for dimension in self._space.dimensions}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """A value of every dimension, as Optuna stores it."""
        sequence = qmc.Sobol(len(self._space.dimensions), scramble=True, rng=self._seed)
        if self._index:  # SciPy fails at 0
            sequence.fast_forward(self._index)
        point = sequence.random(1)[0]
        pairs = zip(self._space.dimensions, point.tolist(), strict=True)
        return {dimension.key: plain_choice(from_unit(dimension, at)) for dimension, at in pairs}

    def sample_independent(
        self, study: Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        """Never asked."""
        raise AssertionError(f"{param_name} is not a dimension of the space")
