"""The unit cube: every value has its place there, and comes back from it."""

import numpy as np
import pytest

from rigsweep.sweeps.space import Dimension
from rigsweep.sweeps.unit_cube import from_unit, to_unit

DIMENSIONS = [
    Dimension("a", "float", 0.0, 0.1),
    Dimension("a", "float", 1e-5, 1e-1, log=True),
    Dimension("a", "float", 0.1, 0.9, step=0.2),
    Dimension("a", "int", -3, 12, step=3),
    Dimension("a", "int", 0, 10**9),
    Dimension("a", "int", 1, 64, log=True),
    Dimension("a", "choice", choices=([0.9, 0.95], None, True, "x")),
]


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=str)
def test_every_point_is_a_value_and_every_value_comes_back(dimension: Dimension) -> None:
    for coordinate in [0.0, 1.0, *np.random.default_rng(0).random(200).tolist()]:
        value = from_unit(dimension, coordinate)
        assert dimension.holds(value)
        assert dimension.distribution()._contains(dimension.distribution().to_internal_repr(str_or(value)))
        assert from_unit(dimension, to_unit(dimension, value)) == (
            pytest.approx(value) if dimension.kind == "float" else value
        )


def str_or(value: object) -> object:
    return "[0.9, 0.95]" if isinstance(value, list) else value


def test_bins_are_equal_and_logarithms_even() -> None:
    points = (np.arange(1200) + 0.5) / 1200
    steps = [from_unit(DIMENSIONS[2], point) for point in points.tolist()]
    assert {value: steps.count(value) for value in steps} == {0.1: 240, 0.3: 240, 0.5: 240, 0.7: 240, 0.9: 240}
    rates = np.array([from_unit(DIMENSIONS[1], point) for point in points.tolist()])
    assert ((rates > 1e-4) & (rates < 1e-3)).sum() == 300
