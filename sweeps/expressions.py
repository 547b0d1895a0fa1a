"""Derived values: `= 32 * model.layers`, by a small grammar that cannot run code.

Numbers, dotted keys, + - * / // % **, parentheses, min and max. Python's parser reads it; only these nodes
are walked.
"""

import ast
import contextlib
import operator
from collections.abc import Callable, Mapping
from typing import Any

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}
_FUNCTIONS = {"min": min, "max": max}
_LONGEST = 200


class ExpressionError(ValueError):
    """An expression cannot be read or computed; the message is one line."""


def is_expression(value: object) -> bool:
    """Whether a value is to be derived."""
    return isinstance(value, str) and value.startswith("=")


def keys_in(text: str) -> set[str]:
    """The dotted keys that an expression reads."""
    keys: set[str] = set()

    def look(key: str) -> int:
        keys.add(key)
        return 1

    with contextlib.suppress(ZeroDivisionError):  # of the stand-in values only
        _walk(_parse(text), look)
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

    try:
        return _walk(_parse(text), look)
    except (ZeroDivisionError, OverflowError) as error:
        raise ExpressionError(f"cannot be computed: {error}") from error


def _parse(text: str) -> ast.expr:
    source = text.removeprefix("=").strip()
    if not source or len(source) > _LONGEST:
        raise ExpressionError(f"an expression of 1 to {_LONGEST} characters is expected after =")
    try:
        return ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError) as error:
        raise ExpressionError("cannot be read; write for example `= 32 * model.layers`") from error


def _walk(node: ast.AST, look: Callable[[str], float | int]) -> float | int:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name() | ast.Attribute():
            return look(_dotted(node))
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            base, power = _walk(left, look), _walk(right, look)
            if abs(power) > 64:
                raise ExpressionError(f"a power of {power} is more than is allowed (64)")
            return base**power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_walk(left, look), _walk(right, look))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_walk(operand, look))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS and args:
            return _FUNCTIONS[name](*(_walk(arg, look) for arg in args))
    raise ExpressionError("may hold numbers, dotted keys, + - * / // % **, parentheses, min and max")


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_dotted(value)}.{name}"
    raise ExpressionError("may hold numbers, dotted keys, + - * / // % **, parentheses, min and max")
