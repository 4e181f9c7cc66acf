"""Small arithmetic over named sizes, as recipes and the sizes of a bundle's programs hold it.

Names, integers, ``+ - * / // %``, comparisons, constant subscripts, and ``len``, ``max``, ``min``,
``sum``. Data, never Python: nothing else is evaluated.
"""

import ast
import difflib
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import MlxconvError

Expression = str | int

_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.Not: operator.not_,
}
_CALLS: dict[str, Callable[..., Any]] = {"len": len, "max": max, "min": min, "sum": sum}


def evaluate(expression: Expression | bool, names: Mapping[str, Any]) -> Any:
    """Value of a recipe expression, with ``names`` for its dims and configuration keys.

    >>> evaluate("2 * height // patch_size", {"height": 6, "patch_size": 2})
    6

    Raises MlxconvError for anything but the arithmetic that the module docstring lists.
    """
    if not isinstance(expression, str):
        return expression
    tree = _parse(expression)
    try:
        return _value(tree, names, expression)
    except (TypeError, ValueError, ArithmeticError, LookupError, RecursionError) as error:
        raise MlxconvError(f"recipe expression {expression!r}: {error}") from error


def pixel_multiple(
    expressions: Iterable[Expression], names: Mapping[str, Any] | None = None, per: float = 1
) -> int:
    """What width W and height H have to be multiples of for every `//` to leave no remainder.

    names: other values that they read. per: pixels of an expression to one of the answer.

    >>> pixel_multiple(["(H // 16) * (W // 16)"])
    16
    """
    exact = [text.replace("//", "/") for text in expressions if isinstance(text, str)]
    for size in range(1, 1025):
        given = {**(names or {}), "W": size * per, "H": size * per}
        values = [evaluate(text, given) for text in exact]
        if all(value >= 1 and float(value).is_integer() for value in values):
            return size
    raise MlxconvError(f"recipe expressions {', '.join(exact)}: no size divides by them")


def names_in(expression: Expression | bool) -> set[str]:
    """The names that an expression reads."""
    if not isinstance(expression, str):
        return set()
    found = {node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name)}
    return found - set(_CALLS)


def axes_in(expression: str) -> set[tuple[str, int]]:
    """What it reads of inputs: `("z", 2)` of ``z[2] > 4``, and `("n", 0)` of the number ``n``."""
    axes = {
        (name, axis) for node in ast.walk(_parse(expression)) for name, axis in _subscript(node)
    }
    return axes | {(name, 0) for name in names_in(expression) - {name for name, _ in axes}}


def _subscript(node: ast.AST) -> list[tuple[str, int]]:
    match node:
        case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=int(axis))):
            return [(name, axis)]
    return []


def _parse(expression: str) -> ast.expr:
    try:
        return ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise MlxconvError(f"recipe expression {expression!r} does not parse: {error}") from error


def _value(node: ast.expr, names: Mapping[str, Any], text: str) -> Any:
    def go(child: ast.expr) -> Any:
        return _value(child, names, text)

    match node:
        case ast.Constant(value=value) if value is None or isinstance(
            value, (bool, int, float, str)
        ):
            return value
        case ast.Name(id=name) if name in names:
            return names[name]
        case ast.Name(id=name):
            near = difflib.get_close_matches(name, list(names), 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise MlxconvError(
                f"recipe expression {text!r}: no dim or configuration key {name!r}{hint}"
            )
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_number(go(left), text), _number(go(right), text))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](go(operand))
        case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _COMPARE:
            return _COMPARE[type(op)](go(left), go(right))
        case ast.BoolOp(op=ast.And(), values=values):
            return all(go(value) for value in values)
        case ast.BoolOp(op=ast.Or(), values=values):
            return any(go(value) for value in values)
        case ast.Subscript(value=value, slice=index):
            return go(value)[go(index)]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _CALLS:
            return _CALLS[name](*(go(arg) for arg in args))
        case _:
            raise MlxconvError(
                f"recipe expression {text!r}: {ast.unparse(node)!r} is not allowed; use "
                "integers, names, + - * / // %, comparisons, constant subscripts, len, max, min, "
                "sum"
            )


def _number(value: Any, text: str) -> int | float:
    if not isinstance(value, (int, float)):
        raise MlxconvError(f"recipe expression {text!r}: arithmetic on {value!r}")
    return value
