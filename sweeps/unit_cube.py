"""Dimensions as coordinates in the unit interval, for searchers that think in a cube.

Logarithmic ranges go by their logarithm; choices, steps and whole numbers are bins of equal width.
"""

import math
from typing import Any

from .space import Dimension


def to_unit(dimension: Dimension, value: Any) -> float:
    """The coordinate of a value, in [0, 1]; the middle of its bin where there are bins."""
    if dimension.amount is not None:
        return (dimension.index(value) + 0.5) / dimension.amount
    low, high = _ends(dimension)
    return (_scale(dimension, value) - low) / (high - low)


def from_unit(dimension: Dimension, coordinate: float) -> Any:
    """The value at a coordinate in [0, 1]."""
    if dimension.amount is not None:
        return dimension.value(min(int(coordinate * dimension.amount), dimension.amount - 1))
    low, high = _ends(dimension)
    scaled = low + coordinate * (high - low)
    value = math.exp(scaled) if dimension.log else scaled
    if dimension.kind == "int":
        value = round(value)
    value = min(max(value, dimension.low), dimension.high)  # of rounding
    return int(value) if dimension.kind == "int" else value


def _scale(dimension: Dimension, value: float) -> float:
    return math.log(value) if dimension.log else value


def _ends(dimension: Dimension) -> tuple[float, float]:
    """The ends of the scale; a whole number has half of a step on either side."""
    margin = 0.5 if dimension.kind == "int" else 0.0
    return _scale(dimension, dimension.low - margin), _scale(dimension, dimension.high + margin)
