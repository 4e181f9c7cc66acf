"""Branches on sizes: what a trace takes for granted of the sizes that it leaves free.

`if frames > 4:` is decided while tracing, and the graph has one of the two ways. A condition that
the traced code decides itself is an assumption of the program. What PyTorch decides inside an
operation mostly tells how it laid out a tensor, not what it computed; of that, sizes that it turns
into numbers count, and slices that end beyond their tensor.
"""

from __future__ import annotations

import ast
import functools
import linecache
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import fx
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import IntTrueDiv, Max
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import MAX_TEXT

from ..recipe.recipe import evaluate
from .patches.guards import watched_guards
from .traced import TracedInput

# Functions whose ways compute the same for every class: transformers' attention asks whether there
# is more than one query, only to choose a kernel and to leave out the causal mask of a single one.
ALIKE = frozenset({"sdpa_attention_forward"})
_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parent)


class Decisions:
    """What is decided by a size, as conditions that held.

    ``alike``: functions, by qualified name, whose ways compute the same, beside `ALIKE`.
    """

    def __init__(self, alike: Collection[str] = ()) -> None:
        self.alike = ALIKE.union(alike)
        self.noted: dict[sympy.Basic, None] = {}

    def watched(self) -> AbstractContextManager[None]:
        """Inside, decisions are noted."""

        def asked(frame: FrameType, node: SymNode, answer: bool) -> None:
            if _is_condition(frame, self.alike):
                self._note(node, answer)

        return watched_guards(asked, self._note)

    def _note(self, node: SymNode, answer: bool | float) -> None:
        expression: Any = node._expr if isinstance(node, SymNode) else None
        if expression is None or not expression.free_symbols:
            return
        if not isinstance(answer, bool):
            if expression.replace(IntTrueDiv, lambda a, b: a / b).is_number:
                return  # a ratio that is the same for every size
            expression = sympy.Eq(expression, answer)
        self.noted[sympy.Not(expression) if answer is False else expression] = None


# --- which conditions count -------------------------------------------------------------------


def _is_condition(frame: FrameType | None, alike: Collection[str]) -> bool:
    """Whether the traced code itself asks, and what it does then is more than layout."""
    while frame is not None and _stands_in(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_qualname in alike:
        return False
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not file.startswith(_TORCH):
        return not _only(_lays_out, file, line)
    return file.startswith(f"{_TORCH}/nn/") and not _only(_refuses, file, line)


def _stands_in(file: str) -> bool:
    """Whether code of this file asks on behalf of its caller: our `int`, torch's `__bool__`."""
    return file.startswith(_OURS) or file == f"{_TORCH}/__init__.py"


@functools.cache
def _only(does: Callable[[ast.stmt], bool], file: str, line: int) -> bool:
    """Whether the line is the condition of an `if` under which all statements are of one kind."""
    found = [
        node
        for node in ast.walk(_source(file))
        if isinstance(node, ast.If) and node.test.lineno <= line <= (node.test.end_lineno or 0)
    ]
    return bool(found) and all(does(each) for node in found for each in node.body + node.orelse)


@functools.cache
def _source(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _refuses(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Raise)


def _lays_out(statement: ast.stmt) -> bool:
    """`x = x.contiguous()`, `logger.warning(...)`, `pass`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=name)],
            value=ast.Call(func=ast.Attribute(value=ast.Name(id=same), attr="contiguous")),
        ):
            return name == same
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name in ("logger", "warnings")
        case ast.Pass():
            return True
    return False


def _of_slices(graph: fx.Graph) -> Iterator[sympy.Basic]:
    """Whether slices end within their tensors: the size of what they give depends on it.

    No tensor is taken to be empty.
    """
    for node in graph.nodes:
        if node.target is torch.ops.aten.slice.Tensor:
            x, axis, *bounds = [*map(_value, node.args), None, None][:4]
            for bound in bounds:
                known = isinstance(bound, int) and bound in (0, 1, -1, sys.maxsize)
                if bound is not None and not known:
                    yield _reaches(x.shape[axis], bound)


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, fx.Node) else arg


def _reaches(size: int | torch.SymInt, bound: int | torch.SymInt) -> sympy.Basic:
    """Whether a tensor has as many items as a slice counts from its start, or its end."""
    (last, length), (number, hint) = _known(size), _known(bound)
    holds = sympy.Ge(last, number if hint >= 0 else -number)
    return holds if length >= abs(hint) else sympy.Not(holds)


def _known(size: int | torch.SymInt) -> tuple[sympy.Expr, int]:
    """A size as an expression, and what it was while tracing."""
    if isinstance(size, torch.SymInt):
        return size.node.expr, int(size.node.hint)
    return sympy.Integer(size), size


# --- as text ----------------------------------------------------------------------------------


def assumptions(
    decided: Decisions,
    graph: fx.Graph,
    inputs: Sequence[TracedInput],
) -> tuple[str, ...]:
    """What held, in the language of size expressions, of inputs and their axes: `z[2] > 4`.

    Conditions that every size meets are left out. Of one that the language cannot say, the sizes
    that it reads are taken as traced.
    """
    values = {node.name: node.meta["val"] for node in graph.nodes if node.op == "placeholder"}
    sizes = {i.placeholder: _size(values[i.placeholder]) for i in inputs if i.kind != "constant"}
    env = next((size.node.shape_env for size in _free(sizes.values())), None)
    if env is None:
        return ()
    sources = {f"L{''.join(f'[{key!r}]' for key in i.path)}": i.placeholder for i in inputs}
    own = {
        symbol: name
        for symbol, (source, *_) in env.var_to_sources.items()
        if (name := _named(source.name, sources))
    }
    first = {**own, **_first_axes(sizes)}
    traced = {name: _hints(size) for name, size in sizes.items()}
    alike = _of_siblings(own, inputs)
    noted = [c.xreplace(alike) for c in (*decided.noted, *_of_slices(graph))]
    texts: dict[str, None] = {}
    for condition in _tightest(c for c in noted if not _always(env, c)):
        if condition.free_symbols <= own.keys():
            names = own if isinstance(condition, sympy.Eq) else first
            texts.update(dict.fromkeys(_texts(condition, names, traced)))
    return tuple(texts)


def holds(assumed: Iterable[str], inputs: Sequence[TracedInput], kwargs: Mapping[str, Any]) -> bool:
    """Whether these keyword arguments have sizes as assumed."""
    sizes = {item.placeholder: _size(find(kwargs, item.path)) for item in inputs}
    return all(evaluate(text, sizes) for text in assumed)


def find(tree: Any, path: tuple[str | int, ...]) -> Any:
    """What is at a path of keyword arguments, or None."""
    for part in path:
        if isinstance(part, int):
            tree = tree[part] if isinstance(tree, list | tuple) and part < len(tree) else None
        else:
            tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _size(value: Any) -> Any:
    return value.shape if isinstance(value, torch.Tensor) else value


def _first_axes(sizes: Mapping[str, Any]) -> dict[sympy.Symbol, str]:
    """The first axis of each size: others that are equal to it may be 1, to be broadcast."""
    found: dict[sympy.Symbol, str] = {}
    for name, size in sizes.items():
        for axis, one in enumerate(size if isinstance(size, torch.Size) else ()):
            if isinstance(one, torch.SymInt):
                found.setdefault(one.node.expr, f"{name}[{axis}]")
    return found


def _of_siblings(
    names: Mapping[sympy.Symbol, str], inputs: Sequence[TracedInput]
) -> dict[sympy.Symbol, sympy.Symbol]:
    """The sizes of each item of a list -> those of its first: binding has them be the same."""
    firsts: dict[Any, str] = {}
    first = {
        item.placeholder: firsts.setdefault(
            (item.path[:-1], item.shape, item.dtype), item.placeholder
        )
        for item in inputs
        if item.kind == "tensor" and isinstance(item.path[-1], int)
    }
    symbols = {name: symbol for symbol, name in names.items()}
    same = {
        symbol: re.sub(r"\w+(?=\[)", lambda found: first.get(found[0], found[0]), name)
        for symbol, name in names.items()
    }
    return {symbol: symbols[name] for symbol, name in same.items() if name in symbols}


def _free(sizes: Iterable[Any]) -> Iterator[torch.SymInt]:
    for size in sizes:
        listed = size if isinstance(size, torch.Size) else (size,)
        yield from (n for n in listed if isinstance(n, torch.SymInt))


def _hints(size: Any) -> Any:
    if isinstance(size, torch.Size):
        return [_known(n)[1] for n in size]
    return _known(size)[1]


def _named(source: str, sources: Mapping[str, str]) -> str:
    """`z[2]` for ``L['z'].size()[2]``; "" for what is no input's."""
    found = [name for name in sources if name in source]
    if not found:
        return ""
    name = max(found, key=len)
    return source.replace(name, sources[name]).replace(".size()", "")


def _always(env: ShapeEnv, condition: sympy.Basic) -> bool:
    """Whether every size meets a condition, by its range alone and not by what was decided.

    That two sizes are equal was decided, where torch takes them for one since.
    """
    if condition is sympy.true or isinstance(condition, sympy.Eq):
        return condition is sympy.true
    if isinstance(condition, sympy.Ge) and isinstance(condition.lhs, Max):
        return condition.rhs in condition.lhs.args
    ranges = tuple((symbol, ValueRanges(1, int_oo)) for symbol in env.var_to_sources)
    known = env._maybe_evaluate_static(condition, axioms=(), var_to_range=ranges)
    return known is sympy.true


def _tightest(conditions: Iterable[sympy.Basic]) -> Iterator[sympy.Basic]:
    """The conditions, with one upper and one lower bound for whatever has several."""
    upper: dict[sympy.Expr, int] = {}
    lower: dict[sympy.Expr, int] = {}
    for condition in conditions:
        if isinstance(condition, sympy.core.relational.Relational) and condition.lhs.is_number:
            condition = condition.reversed
        if isinstance(condition, sympy.Ne) and condition.lhs.is_Symbol and condition.rhs == 1:
            condition = sympy.Ge(condition.lhs, 2)
        bound = _bound(condition)
        if bound is None:
            yield condition
        elif isinstance(condition, (sympy.Le, sympy.Lt)):
            upper[bound[0]] = min(bound[1], upper.get(*bound))
        else:
            lower[bound[0]] = max(bound[1], lower.get(*bound))
    yield from (sympy.Le(what, number) for what, number in upper.items())
    yield from (sympy.Ge(what, number) for what, number in lower.items())


def _bound(condition: sympy.Basic) -> tuple[sympy.Expr, int] | None:
    """`(b * h, 20)` for ``96 * b * h / 4 < 500``, which is ``b * h <= 20``."""
    if not isinstance(condition, (sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt)):
        return None
    what, number = condition.args
    if not number.is_number:
        return None
    number = sympy.Rational(number)
    if isinstance(what, IntTrueDiv) and what.args[1].is_positive and what.args[1].is_number:
        what, number = what.args[0], number * what.args[1]
    term, what = what.as_coeff_Add()
    factor, what = what.as_coeff_Mul()
    if not (factor.is_positive and term.is_number and what.is_integer):
        return None
    exact = (number - sympy.Rational(term)) / sympy.Rational(factor)
    match condition:
        case sympy.Le():
            return what, math.floor(exact)
        case sympy.Lt():
            return what, math.ceil(exact) - 1
        case sympy.Ge():
            return what, math.ceil(exact)
    return what, math.floor(exact) + 1


def _texts(
    condition: sympy.Basic, names: Mapping[sympy.Symbol, str], traced: Mapping[str, Any]
) -> list[str]:
    text = _Printer(names).doprint(condition)
    try:
        if len(text) <= MAX_TEXT and evaluate(text, traced) is True:
            return [text]
    except MlxconvError:
        pass
    read = sorted(names[s] for s in condition.free_symbols)
    return [f"{name} == {evaluate(name, traced)}" for name in read]


class _Printer(PythonPrinter):
    """Conditions in the words of `runtime/program/expressions.py`."""

    def __init__(self, names: Mapping[sympy.Symbol, str]) -> None:
        super().__init__()
        self.names = names

    def _print_Symbol(self, symbol: sympy.Symbol) -> str:
        return self.names[symbol]

    def _print_ToFloat(self, expr: sympy.Expr) -> str:
        return str(self._print(expr.args[0]))

    def _print_FloorToInt(self, expr: sympy.Expr) -> str:
        return f"(({self._print(expr.args[0])}) // 1)"

    def _print_CeilToInt(self, expr: sympy.Expr) -> str:
        return f"(-(-({self._print(expr.args[0])}) // 1))"

    _print_TruncToInt = _print_floor = _print_FloorToInt  # of sizes, which are not negative
    _print_ceiling = _print_CeilToInt
