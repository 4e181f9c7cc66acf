"""A torch module's forward pass as one functional ATen graph, without its weights.

``trace`` exports one program of a recipe, with every free dim symbolic, every module's output
readable through an ``mlxconv.tap`` node, and autocast regions and in-place operations gone.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import logging
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.sizes import dims_of
from mlxconv.runtime.program.expressions import axes_in

from ..recipe.examples import example_inputs, place
from ..recipe.recipe import Expression, ProgramRecipe, Recipe, RecipeInput, evaluate, names_in
from ..source.fake_module import build_module, merged_config
from ..source.keys import tied_weights
from . import repeats
from .decisions import Decisions, assumptions, find, holds
from .functionalize import functional
from .kinds import KindsRead
from .multiples import Axis, known_multiples, multiple
from .patches.conditions import answered
from .patches.posteriors import register_posteriors
from .patches.selections import selections
from .patches.symbolic_builtins import symbolic_builtins
from .repeats import repeated_blocks
from .symbols import remembered_sizes
from .traced import Tap, Traced, TracedInput, TracedParameter

_LIBRARY = torch.library.Library("mlxconv", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "tap(Tensor x, str path, int index) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
_LIBRARY.impl(  # type: ignore[no-untyped-call]
    "tap", lambda x, path, index: x.clone(), "CompositeExplicitAutograd"
)


@torch.library.register_fake("mlxconv::tap", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _tap_fake(x: torch.Tensor, path: str, index: int) -> torch.Tensor:
    return torch.empty_like(x)


# --- the trace --------------------------------------------------------------------------------


def trace(
    cls: type[nn.Module],
    config: Mapping[str, Any],
    recipe: Recipe,
    program: str = "forward",
    *,
    dims: Mapping[str, int] | None = None,
    dtype: torch.dtype | None = None,
    keep: Callable[[str], bool] = lambda name: True,
) -> Traced:
    """Export one program of ``cls`` at the recipe's trace sizes (or ``dims``), free dims symbolic.

    ``dtype`` stands for the compute dtype: bf16, or fp16 where the class itself rounds to bf16.
    ``keep`` says which ATen ops stay; a graph with others is decomposed by torch.

    Raises MlxconvError where torch cannot export: it names the class, torch's reason and the
    source line.
    """
    apart: set[str] | None = set()  # blocks that have to be traced each, None for all
    while True:
        job = _job(cls, config, recipe, program, dims, dtype)
        decided = Decisions(job.entry.alike)
        with (
            _tracing(job.module, apart) as stood_in,
            job.kinds,
            decided,
            answered(job.entry.truths),
            torch.no_grad(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                return _traced(job, functional(_export(job), keep), decided)
            except MlxconvError:
                raise
            except repeats.Unrepeatable as found:
                apart = {*(apart or ()), str(found)}
            except Exception as error:
                if not stood_in:
                    raise _refused(cls, program, error) from error
                apart = None  # blocks may need each other: once more, as they are


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch logs tracebacks of operations that do not fit; the error raised says it in a line."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled


@contextlib.contextmanager
def _tracing(module: nn.Module, apart: set[str] | None) -> Iterator[set[str]]:
    """Taps in, blocks traced once (but for ``apart``), sizes symbolic, and no garbage collection.

    Collecting costs a tenth of the time.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        with (
            repeats.traced_once(module, apart) as stood_in,
            _taps(module),
            symbolic_builtins(module),
            remembered_sizes(),
            selections(),
            quiet(),
            _lean_nodes(),
        ):
            yield stood_in
    finally:
        if collecting:
            gc.enable()


@contextlib.contextmanager
def _lean_nodes() -> Iterator[None]:
    """Inside, torch notes of a node what is read here, remembers no operation, and writes no Python
    for a graph that nobody calls.

    A fifth of the time goes into Python's stack and the memory layout of each value, and into
    looking up operations that differ in their symbolic sizes.
    """
    settings: list[tuple[Any, str, Any]] = [
        (torch.fx.config, "do_not_emit_stack_traces", True),
        (torch._dynamo.config, "fake_tensor_cache_enabled", False),
        (proxy_tensor, "_extract_tensor_metadata", lambda value: None),
    ]
    before = [getattr(holder, name) for holder, name, _ in settings]
    for holder, name, value in settings:
        setattr(holder, name, value)
    try:
        with _use_lazy_graph_module(True):
            yield
    finally:
        for (holder, name, _), value in zip(settings, before):
            setattr(holder, name, value)


@dataclass(frozen=True)
class _Job:
    """What one trace needs."""

    module: nn.Module
    recipe: Recipe
    entry: ProgramRecipe
    config: dict[str, Any]
    dims: dict[str, int]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    arguments: tuple[str, ...]
    kinds: KindsRead
    asked: frozenset[str] = frozenset()  # dims whose size is not the recipe's

    def inputs(self, dims: Mapping[str, int]) -> dict[str, Any]:
        """The program's example inputs where some dims differ from those traced."""
        sizes = {**self.dims, **dims}
        return example_inputs(self.recipe, self.entry.name, self.config, sizes, dtype=self.dtype)

    def free(self, expression: Any) -> bool:
        """Whether a size may vary: its expression reads a dim that is not declared fixed."""
        return any(not self.recipe.dims[n].fixed for n in names_in(expression) if n in self.dims)

    def multiple(self, expression: Expression) -> tuple[int, str] | None:
        """``(32, "rows")`` where a size is declared as ``32 * rows`` and the dim is free."""
        free = [name for name, dim in self.recipe.dims.items() if not dim.fixed]
        return multiple(expression, free, {**self.config, **self.dims})

    def assumed(self, spec: RecipeInput) -> int | dict[str, int] | None:
        """What the trace takes for granted of an input's elements."""
        if spec.known:
            return int(spec.value[0])
        bounds = {"below": spec.below, "reaches": spec.reaches}
        names = {**self.config, **self.dims}
        return {k: int(evaluate(v, names)) for k, v in bounds.items() if v is not None} or None

    def size(self, expression: Expression) -> int | str:
        """The expression if it reads a dim, else its value; ``32 * rows`` with its number."""
        if known := self.multiple(expression):
            return f"{known[0]} * {known[1]}"
        if names_in(expression) & set(self.dims):
            return expression
        return int(evaluate(expression, self.config))


def _job(
    cls: type[nn.Module],
    config: Mapping[str, Any],
    recipe: Recipe,
    program: str,
    dims: Mapping[str, int] | None,
    dtype: torch.dtype | None,
) -> _Job:
    entry = recipe.program(program)
    module, _ = build_module(cls, config, dtype=dtype or torch.bfloat16)
    if dtype is None:
        dtype = torch.float16 if _rounds_to_bfloat16(module) else torch.bfloat16
        if dtype == torch.float16:
            module, _ = build_module(cls, config, dtype=dtype)
    register_posteriors(module)
    merged = merged_config(cls, config)
    kwargs = example_inputs(recipe, program, merged, dims, dtype=dtype)
    method = entry.callable(module)
    arguments, kinds = _positional(method), KindsRead()
    module.forward = _given(_of_named(method, kwargs), entry, kinds)
    return _Job(
        module,
        recipe,
        entry,
        merged,
        recipe.trace_dims(merged, dims),
        kwargs,
        dtype,
        arguments,
        kinds,
        frozenset(dims or ()),
    )


def _positional(method: Callable[..., Any]) -> tuple[str, ...]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    found = inspect.signature(method).parameters
    return tuple(name for name, parameter in found.items() if parameter.kind in kinds)


def _rounds_to_bfloat16(module: nn.Module) -> bool:
    """Whether a forward of it, or an attention processor, names bfloat16 and not float16.

    Such a rounding is part of the class at every precision; in a graph of bf16 it would not show.
    """

    def names(code: types.CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from names(constant)

    functions = {type(part).forward for part in module.modules()}
    functions |= {
        type(part.processor).__call__ for part in module.modules() if hasattr(part, "processor")
    }
    found = [set(names(f.__code__)) for f in functions if hasattr(f, "__code__")]
    return any("bfloat16" in each and "float16" not in each for each in found)


def _of_named(forward: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """A function of these arguments, as torch.export wants it, where there are ``**kwargs``."""
    kinds = [p.kind for p in inspect.signature(forward).parameters.values()]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        return forward

    @functools.wraps(forward)
    def named(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    listed = [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in names]
    named.__signature__ = inspect.Signature(listed)  # type: ignore[attr-defined]
    return named


def _given(
    forward: Callable[..., Any], entry: ProgramRecipe, kinds: KindsRead
) -> Callable[..., Any]:
    """A function that makes the inputs whose value is known, and has `kinds` watch all of them."""
    values = {spec.name: int(spec.value[0]) for spec in entry.inputs.values() if spec.known}

    @functools.wraps(forward)
    def given(*args: Any, **kwargs: Any) -> Any:
        made = {n: torch.full(kwargs[n].shape, v, dtype=kwargs[n].dtype) for n, v in values.items()}
        inputs = {**kwargs, **made}
        kinds.given(inputs)
        return forward(*args, **inputs)

    return given


def _export(job: _Job) -> ExportedProgram:
    shapes = _dynamic_shapes(job)
    with known_multiples(_multiples(job)):
        return torch.export.export(job.module, (), job.kwargs, dynamic_shapes=shapes, strict=False)


def _dynamic_shapes(job: _Job) -> dict[str, Any]:
    """AUTO for each axis whose expression reads a free dim, and for each such Python int."""

    def auto(expression: Any) -> Any:
        return Dim.AUTO if job.free(expression) else None

    def of_tensor(name: str) -> dict[int, Any]:
        sizes = job.entry.inputs[name].shape
        return {i: Dim.AUTO if job.free(size) else Dim.STATIC for i, size in enumerate(sizes)}

    shapes: dict[str, Any] = {}
    for name in job.kwargs:
        if name in job.entry.arguments:
            shapes[name] = pytree.tree_map(auto, job.entry.arguments[name])
    for name, spec in job.entry.inputs.items():
        value = find(job.kwargs, spec.path)
        if value is not None:
            axes = of_tensor(name)
            place(shapes, spec.path, [axes] * len(value) if isinstance(value, list) else axes)
    return shapes


def _multiples(job: _Job) -> dict[Axis, int]:
    """The axes whose expression is a number times a free dim, with that number."""
    found: dict[Axis, int] = {}
    for spec in job.entry.inputs.values():
        value = find(job.kwargs, spec.path)
        if value is None:
            continue
        listed = isinstance(value, list)
        paths = [(*spec.path, i) for i in range(len(value))] if listed else [spec.path]
        for axis, size in enumerate(spec.shape):
            if known := job.multiple(size):
                found.update(((path, axis), known[0]) for path in paths)
    return found


# --- taps -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _taps(module: nn.Module) -> Iterator[None]:
    """Inside, each submodule's output tensors pass through the identity ``mlxconv::tap``."""
    handles = [
        child.register_forward_hook(_tap_hook(path))
        for path, child in module.named_modules(remove_duplicate=False)
        if path
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _tap_hook(path: str) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        seen = {id(arg) for arg in args}
        leaves, spec = pytree.tree_flatten(output)
        # A module that returns its input (dropout, identity) has nothing of its own to read.
        # One that it returns twice stays one: a write into it shows in both places.
        tapped: dict[int, torch.Tensor] = {}
        for index, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                before = tapped.get(id(leaf), leaf)
                tapped[id(leaf)] = torch.ops.mlxconv.tap(before, path, index)
        return pytree.tree_unflatten([tapped.get(id(leaf), leaf) for leaf in leaves], spec)

    return hook


def _refused(cls: type[nn.Module], program: str, error: Exception) -> MlxconvError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = lines[0] if lines else type(error).__name__
    return MlxconvError(
        f"{cls.__name__}.{program} cannot be traced: {reason} (at {_where(error)}). If a size or a "
        "value of an input decides what the class does, declare that dim fixed in its recipe, or "
        "pass another input (no mask, trimmed embeddings)"
    )


def _where(error: BaseException) -> str:
    """The innermost line that is neither torch's nor ours: the traced class's own source."""
    frames = traceback.extract_tb(error.__traceback__)
    here = str(Path(__file__).parents[2])
    own = [f for f in frames if "/torch/" not in f.filename and not f.filename.startswith(here)]
    if not own:
        return "an unknown line"
    return f"{own[-1].filename.split('site-packages/')[-1]}:{own[-1].lineno}"


# --- what came out ----------------------------------------------------------------------------


def _traced(job: _Job, exported: ExportedProgram, decided: Decisions) -> Traced:
    signature = exported.graph_signature
    tied = tied_weights(job.module)
    parameters = _parameters(job, tied)
    placeholders = {
        **{node: tied.get(n, n) for node, n in signature.inputs_to_parameters.items()},
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    repeated = repeated_blocks(exported.graph, placeholders)
    used = {n.name for n in exported.graph.nodes if n.op == "placeholder" and n.users}
    later = tuple(
        f"{node.args[1]}."
        for node in exported.graph.nodes
        if node.target is torch.ops.mlxconv.again.default
    )
    constants = {
        name: _constant(job, exported, name)
        for node, name in placeholders.items()
        if name not in parameters and (node in used or name.startswith(later))
    }
    inputs = _inputs(job, exported, set(placeholders))
    assumed = assumptions(decided, exported.graph, inputs)
    return Traced(
        class_name=type(job.module).__name__,
        program=job.entry.name,
        exported=exported,
        config=job.config,
        parameters=parameters,
        constants=constants,
        placeholders=placeholders,
        inputs=inputs,
        outputs=_outputs(exported),
        symbols=_symbols(job, exported, inputs),
        fixed=_fixed(job, exported, inputs, assumed),
        taps=tuple(
            Tap(str(node.args[1]), int(node.args[2]), node.name)
            for node in exported.graph.nodes
            if node.target is torch.ops.mlxconv.tap.default
        ),
        repeated=repeated,
        tied=tied,
        dtype=job.dtype,
        arguments=job.arguments,
        assumptions=assumed,
    )


def _parameters(job: _Job, tied: Mapping[str, str]) -> dict[str, TracedParameter]:
    def name_of(dtype: torch.dtype) -> str:
        return "compute" if dtype == job.dtype else str(dtype).removeprefix("torch.")

    return {
        name: TracedParameter(name, tuple(tensor.shape), name_of(tensor.dtype))
        for name, tensor in job.module.state_dict(keep_vars=True).items()
        if name not in tied
    }


def _constant(job: _Job, exported: ExportedProgram, name: str) -> torch.Tensor:
    value = exported.constants.get(name, exported.state_dict.get(name))
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        raise MlxconvError(
            f"constant {name!r} of {type(job.module).__name__} has no value: {value!r}"
        )
    return value.detach()


def _inputs(job: _Job, exported: ExportedProgram, known: set[str]) -> tuple[TracedInput, ...]:
    """The graph's own placeholders, matched in order with the leaves of the keyword arguments."""
    nodes = [n for n in exported.graph.nodes if n.op == "placeholder" and n.name not in known]
    order = exported.call_spec.in_spec.child(1).context
    leaves = pytree.tree_flatten_with_path({name: job.kwargs[name] for name in order})[0]
    return tuple(
        _input(job, node, tuple(_key(part) for part in path), value)
        for node, (path, value) in zip(nodes, leaves, strict=True)
    )


def _key(part: Any) -> str | int:
    return part.key if isinstance(part, pytree.MappingKey) else part.idx  # type: ignore[no-any-return]


def _input(job: _Job, node: Node, path: tuple[str | int, ...], value: Any) -> TracedInput:
    specs = {spec.path: spec for spec in job.entry.inputs.values()}
    spec = next((spec for start, spec in specs.items() if path[: len(start)] == start), None)
    if spec is not None:
        return TracedInput(
            node.name,
            path,
            "tensor",
            shape=tuple(job.size(size) for size in spec.shape),
            dtype=spec.dtype,
            stage=spec.stage,
            value=job.assumed(spec),
            kinds=job.kinds.kinds_of(path),
        )
    if _symbolic(node.meta["val"]):
        expression = pytree.tree_leaves(_at(job.entry.arguments[str(path[0])], path[1:]))[0]
        return TracedInput(node.name, path, "int", shape=(expression,))
    return TracedInput(node.name, path, "constant", stage="constant", value=value)


def _at(tree: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        tree = tree[part]
    return tree


def _outputs(exported: ExportedProgram) -> tuple[str, ...]:
    return tuple(str(name) for name in exported.graph_signature.user_outputs)


def _sizes(
    exported: ExportedProgram, inputs: tuple[TracedInput, ...]
) -> Iterator[tuple[str, int | torch.SymInt]]:
    """Each recipe expression among the inputs, with the size that the graph has for it."""
    nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
    for item in inputs:
        value = nodes[item.placeholder].meta["val"]
        sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
        for expression, size in zip(item.shape or (), sizes):
            if isinstance(expression, str):
                yield expression, size


def _symbolic(size: int | torch.SymInt) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def _symbols(
    job: _Job, exported: ExportedProgram, inputs: tuple[TracedInput, ...]
) -> dict[str, str]:
    symbols = {}
    for text, size in _sizes(exported, inputs):
        if not _symbolic(size):
            continue
        symbols[str(size)] = text
        if known := job.multiple(text):
            by, dim = known
            symbols.setdefault(str(size // by), dim)
    return symbols


def _fixed(
    job: _Job,
    exported: ExportedProgram,
    inputs: tuple[TracedInput, ...],
    assumed: tuple[str, ...],
) -> dict[str, int]:
    """The dims that the program reads and whose value, or range, is built into the graph."""
    used = {n for text, _ in _sizes(exported, inputs) for n in names_in(text)}
    built_in = {
        name
        for expression, size in _sizes(exported, inputs)
        if not _symbolic(size)
        for name in names_in(expression)
    }
    for name, value in job.entry.arguments.items():
        if not any(item.kind == "int" and item.path[0] == name for item in inputs):
            built_in.update(*(names_in(leaf) for leaf in pytree.tree_leaves(value)))
    for name in (used & set(job.dims)) - built_in:
        checks = job.recipe.dims[name].check
        if not all(holds(assumed, inputs, job.inputs({name: size})) for size in checks):
            built_in.add(name)
    paths = {item.placeholder: item.name for item in inputs}
    read = {(paths[name], axis) for text in assumed for name, axis in axes_in(text)}
    built_in |= job.asked & dims_of(job.recipe.sizes_table(job.config), job.entry.name, read)
    return {name: size for name, size in job.dims.items() if name in built_in}
