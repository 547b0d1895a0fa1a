"""Derived values: `= 32 * model.layers`, by a small grammar that cannot run code.

Numbers, dotted keys, + - * / // % **, parentheses, min and max. Python's parser reads it; only these nodes
are walked.
"""

import ast
import operator
import warnings
from collections.abc import Callable, Mapping
from typing import Any

_UNARY: dict[type[ast.AST], Callable[..., Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max}
_LONGEST = 200
_HIGHEST_POWER = 64
_LARGEST = 1e30
_GRAMMAR = "may hold numbers, dotted keys, + - * / // % **, parentheses, min and max"


class ExpressionError(ValueError):
    """An expression cannot be read or computed; the message is one line."""


def is_expression(value: object) -> bool:
    """Whether a value is to be derived."""
    return isinstance(value, str) and value.startswith("=")


def keys_in(text: str) -> set[str]:
    """The dotted keys that an expression reads; also checks its grammar."""
    keys: set[str] = set()
    _read(_parse(text), keys)
    return keys


def evaluate(text: str, values: Mapping[str, Any]) -> float | int:
    """The value of `= ...`, with the keys' values from `values`."""

    def look(key: str) -> float | int:
        if key not in values:
            raise ExpressionError(f"{key} is not a key with a value")
        found = values[key]
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise ExpressionError(f"{key} is not a number, found {found}")
        return found

    tree = _parse(text)
    _read(tree, set())
    try:
        return _compute(tree, look)
    except (ZeroDivisionError, OverflowError) as error:
        raise ExpressionError(f"cannot be computed: {error}") from error


def _parse(text: str) -> ast.expr:
    source = text.removeprefix("=").strip()
    if not source or len(source) > _LONGEST:
        raise ExpressionError(f"an expression of 1 to {_LONGEST} characters is expected after =")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python about odd code, which this is not
            return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ExpressionError("cannot be read; write for example `= 32 * model.layers`") from error


def _read(node: ast.AST, keys: set[str]) -> None:
    """Collect the keys; raises for whatever is not in the grammar, so that computing meets nothing else."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            _small(number)
        case ast.Name() | ast.Attribute():
            keys.add(_dotted(node))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            _read(left, keys)
            _read(right, keys)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            _read(operand, keys)
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if name in _FUNCTIONS:
            for arg in args:
                _read(arg, keys)
        case ast.Call(func=ast.Name(id=name)) if name in _FUNCTIONS:
            raise ExpressionError(f"{name} takes two or more values")
        case _:
            raise ExpressionError(_GRAMMAR)


def _compute(node: ast.AST, look: Callable[[str], float | int]) -> float | int:
    """The value of a tree that `_read` has passed."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.BinOp(left=left, op=op, right=right):
            return _small(_BINARY[type(op)](_compute(left, look), _compute(right, look)))
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_compute(operand, look))
        case ast.Call(func=ast.Name(id=name), args=args):
            return _FUNCTIONS[name](*(_compute(arg, look) for arg in args))
    return _small(look(_dotted(node)))


def _power(base: float, power: float) -> float | int:
    if abs(power) > _HIGHEST_POWER:
        raise ExpressionError(f"a power of {power} is more than is allowed ({_HIGHEST_POWER})")
    if base < 0 and not float(power).is_integer():
        raise ExpressionError(f"cannot be computed: {base} to the power of {power} is not a real number")
    return base**power


_BINARY: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


def _small(number: float) -> float | int:
    """The number, if it is one that a setting could have: so no step of a computation is a large one."""
    if not abs(number) <= _LARGEST:  # nan too
        raise ExpressionError(f"cannot be computed: a value is over {_LARGEST:g}")
    return number


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
    raise ExpressionError(_GRAMMAR)
