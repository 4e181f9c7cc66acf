"""The PyTorch side of a comparison: a diffusers module, whole or streamed, and what it gives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from mlxconv.runtime.errors import MlxconvError

from ..source.arrays import Array, mlx_to_torch, torch_to_numpy
from ..source.checkpoint import Component, component_class, match_keys, tied_weights
from ..source.model_class import constructing, in_one_line, named_config
from ..trace.class_config import full_config
from ..trace.patches.posteriors import posteriors
from ..trace.patches.threads import threads_for


class Reference:
    """One diffusers (or transformers) module in evaluation mode, on the CPU, in `dtype`."""

    def __init__(self, module: nn.Module, label: str, streamed: _Tensors | None = None) -> None:
        self.module, self.label, self.streamed = module.eval(), label, streamed
        self.parameters = sum(p.numel() for p in module.parameters())

    def run(
        self, method: str, inputs: Mapping[str, Any], taps: Sequence[str] = ()
    ) -> tuple[list[Array], dict[str, list[Array]]]:
        """The method's tensors, and those that the modules at `taps` returned (last call)."""
        found: dict[str, list[Array]] = {}
        with self.running(), _recording(self.module, taps, found):
            output = attrgetter(method)(self.module)(**inputs)
            return _tensors(output), found

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around calls of the module: on the threads that its size is worth, without gradients."""
        with threads_for(self.parameters), posteriors(self.module), torch.no_grad():
            yield


def load_reference(component: Component, dtype: torch.dtype, *, stream: bool = False) -> Reference:
    """Load as diffusers loads it: only `from_pretrained(torch_dtype=...)` honours fp32 modules.

    With `stream` each module's tensors are read when it runs and dropped behind it.
    """
    import diffusers

    name = str(dtype).removeprefix("torch.")
    label = f"diffusers {diffusers.__version__} {name.replace('float32', 'fp32')} cpu"
    if stream:
        return Reference(*_streamed(component, dtype, label))
    cls: Any = component_class(component)
    if not hasattr(cls, "from_pretrained"):
        return Reference(_plain_module(cls, component).to(dtype), label)
    options: dict[str, Any] = {
        "local_files_only": True,
        "trust_remote_code": False,
        "variant": component.variant,
    }
    if hasattr(cls, "from_config"):
        options |= {"torch_dtype": dtype}
        options["use_safetensors"] = component.files[0].suffix == ".safetensors"
    else:
        options["dtype"] = dtype
    try:
        module = cls.from_pretrained(str(component.path), **options)
    except Exception as error:  # of its files or of its class, which fail each in its own way
        reason = in_one_line(error)
        raise MlxconvError(f"{component.path}: diffusers cannot load it ({reason})") from error
    return Reference(module, label)


def _plain_module(cls: type, component: Component) -> nn.Module:
    """A module that is neither diffusers' nor transformers', with the checkpoint's tensors."""
    config = {k: v for k, v in full_config(component).items() if not k.startswith("_")}
    with named_config(component.path), constructing(cls):
        module: nn.Module = cls(**config)
    tensors = _Tensors(component, module)
    module.load_state_dict({name: tensors[name] for name in tensors.wanted})
    return module


@contextmanager
def replaced_weights(reference: Reference, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """The reference with other values under the same names, put back afterwards."""
    if reference.streamed is not None:
        with reference.streamed.replaced(tensors):
            yield
        return
    state = reference.module.state_dict(keep_vars=True)
    if absent := sorted(set(tensors) - state.keys()):
        raise MlxconvError(
            f"{type(reference.module).__name__} of the checkpoint has no {absent[0]}, which the "
            "bundle has; verify against the checkpoint that the bundle was made from"
        )
    before = {name: state[name].data for name in tensors}
    try:
        for name, value in tensors.items():
            state[name].data = value.to(state[name].dtype)
        yield
    finally:
        for name, value in before.items():
            state[name].data = value


def _tensors(output: Any) -> list[Array]:
    return [torch_to_numpy(t) for t in pytree.tree_leaves(_plain(output)) if torch.is_tensor(t)]


def _plain(output: Any) -> Any:
    """diffusers' outputs as tuples, whatever dataclass they come in."""
    return output.to_tuple() if hasattr(output, "to_tuple") else output


@contextmanager
def _recording(
    module: nn.Module, taps: Sequence[str], found: dict[str, list[Array]]
) -> Iterator[None]:
    def hook(path: str) -> Callable[..., None]:
        def record(child: nn.Module, args: Any, output: Any) -> None:
            found[path] = _tensors(output)

        return record

    modules = dict(module.named_modules())
    handles = [modules[p].register_forward_hook(hook(p)) for p in taps if p in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# ---- streamed -----------------------------------------------------------------------------------


class _Tensors:
    """A checkpoint's tensors by the module's names, read at each look-up."""

    def __init__(self, component: Component, module: nn.Module) -> None:
        self.component = component
        self.wanted = module.state_dict(keep_vars=True)
        shapes = {name: tuple(t.shape) for name, t in self.wanted.items()}
        self.match = match_keys(shapes, component.tensors, tied_weights(module))
        self.match.check(str(component.path))
        self.others: Mapping[str, torch.Tensor] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        wanted = self.wanted[name]
        if name in self.others:
            return self.others[name].to(wanted.dtype)
        value = mlx_to_torch(self.component.tensors[self.match.found[name]].read())
        return value.to(wanted.dtype).reshape(wanted.shape)

    @contextmanager
    def replaced(self, others: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Give other values under the same names, until the block ends."""
        self.others = others
        try:
            yield
        finally:
            self.others = {}


def _streamed(
    component: Component, dtype: torch.dtype, label: str
) -> tuple[nn.Module, str, _Tensors]:
    """A module on the meta device that reads each child's own tensors around its forward."""
    from ..trace.fake_module import build_module

    cls = component_class(component)
    module, _ = build_module(cls, full_config(component), dtype=dtype)
    tensors = _Tensors(component, module)
    for path, child in module.named_modules():
        _stream_child(child, path, tensors.__getitem__)
    return module, label, tensors


def _stream_child(child: nn.Module, path: str, read: Callable[[str], torch.Tensor]) -> None:
    own = [n for n, p in child._parameters.items() if p is not None]
    buffers = [
        n
        for n, b in child._buffers.items()
        if b is not None and n not in child._non_persistent_buffers_set
    ]
    if not own and not buffers:
        return
    empty = {n: child._parameters[n] for n in own} | {n: child._buffers[n] for n in buffers}

    def fill(module: nn.Module, args: Any, kwargs: Any = None) -> None:
        for name in own:
            value = read(f"{path}.{name}".lstrip("."))
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
        for name in buffers:
            module._buffers[name] = read(f"{path}.{name}".lstrip("."))

    def drop(module: nn.Module, args: Any, output: Any) -> None:
        for name in own:
            module._parameters[name] = empty[name]  # type: ignore[assignment]
        for name in buffers:
            module._buffers[name] = empty[name]

    child.register_forward_pre_hook(fill)
    child.register_forward_hook(drop)
