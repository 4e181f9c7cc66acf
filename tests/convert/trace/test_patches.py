"""A trace leaves torch, diffusers and transformers, and the process, as they were."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import types
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.node import _side_effectful_functions
from torch.utils import _pytree as pytree

from mlxconv.convert.catalog.figures import tiny_module
from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.convert.recipe.recipe import Recipe
from mlxconv.convert.source.model_class import find_class
from mlxconv.convert.trace.derive import derive_recipe
from mlxconv.convert.trace.export import trace
from mlxconv.convert.verify.reference import Reference
from mlxconv.runtime.errors import MlxconvError

LIBRARIES = ("torch", "diffusers", "transformers")
TRACED = {
    "a denoiser": ("FluxTransformer2DModel", "forward"),
    "an encoder of a VAE": ("AutoencoderKL", "encode"),
    "a decoder of a VAE": ("AutoencoderKL", "decode"),
    "a text encoder": ("T5EncoderModel", "forward"),
}
WORK = [*TRACED, "a trace that fails", "a derived recipe", "a reference"]
# torch counts these for itself.
COUNTERS = (
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_hits",
    "torch._subclasses.fake_tensor.FakeTensorMode.cache_misses",
    "torch._subclasses.meta_utils.DESCRIBER_NEXT_ID",
    "torch.utils.hooks.RemovableHandle.next_id",
)


def state() -> dict[str, Any]:
    """Every attribute of every loaded module of the libraries and of the classes in them, and what
    else a process has that a trace could change."""
    found: dict[str, Any] = {}
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] in LIBRARIES and isinstance(module, types.ModuleType):
            found[name] = module
            for key, value in list(vars(module).items()):
                found[f"{name}.{key}"] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {f"{name}.{key}.{k}": v for k, v in list(vars(value).items())}
    loggers = logging.root.manager.loggerDict.items()
    registries: dict[str, Any] = {
        "pytree": pytree.SUPPORTED_NODES,
        "pytree, serialized": pytree.SUPPORTED_SERIALIZED_TYPES,
        "pytree, by name": pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE,
        "kept operators": dict.fromkeys(_side_effectful_functions),
        "forward hooks": nn.modules.module._global_forward_hooks,
        "loggers": {k: v.disabled for k, v in loggers if isinstance(v, logging.Logger)},
        "torch._dynamo.config": torch._dynamo.config.get_config_copy(),
        "environment": os.environ,
        "process": {
            "warnings": list(warnings.filters),
            "threads": torch.get_num_threads(),
            "default dtype": torch.get_default_dtype(),
            "gradients": torch.is_grad_enabled(),
            "random": torch.get_rng_state().tolist(),
        },
    }
    for name, registry in registries.items():
        found |= {f"{name}: {key}": value for key, value in registry.items()}
    return found


def changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What differs, but for what is imported since."""
    absent = object()
    loaded = {name for name, value in after.items() if name in sys.modules and name not in before}
    found = []
    for name in sorted((before.keys() | after.keys()) - {*COUNTERS}):
        old, new = before.get(name, absent), after.get(name, absent)
        lazy = type(sys.modules.get(name.rpartition(".")[0])).__name__ == "_LazyModule"
        imported = old is absent and (lazy or isinstance(new, types.ModuleType))
        if old is not new and not imported and not any(name.startswith(f"{m}.") for m in loaded):
            plain = (bool, int, float, str, tuple, list, set, frozenset, dict, torch.dtype)
            if not (isinstance(old, plain) and type(old) is type(new) and old == new):
                found.append(name)
    return found


@pytest.fixture(scope="module")
def changed() -> dict[str, list[str]]:
    """In a process of its own: what is left behind once is not seen the next time."""
    command = [sys.executable, "-W", "ignore", __file__, *WORK]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("what", WORK)
def test_everything_is_as_it_was(what: str, changed: dict[str, list[str]]) -> None:
    assert changed[what] == []


def test_what_is_left_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = state()
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("error", ResourceWarning)
        torch.rand(1)
        monkeypatch.setattr(nn.Module, "register_buffer", lambda *_: None)
        monkeypatch.setattr(torch.Tensor, "mlxconv", 1, raising=False)
        monkeypatch.setattr(torch, "linspace", torch.arange)
        monkeypatch.setitem(pytree.SUPPORTED_NODES, Counting, None)  # type: ignore[arg-type]
        monkeypatch.setenv("MLXCONV_LEFT", "1")
        assert changes(before, state()) == [
            "environment: MLXCONV_LEFT",
            "process: random",
            "process: warnings",
            f"pytree: {Counting}",
            "torch.Tensor.mlxconv",
            "torch.linspace",
            "torch.nn.modules.module.Module.register_buffer",
        ]


class Counting(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(int(x.sum()))


def counting_recipe() -> Recipe:
    base = load_recipe("DiTTransformer2DModel")
    tokens = load_recipe("FluxTransformer2DModel").dims["image_tokens"]
    entry = base.programs["forward"]
    x = replace(entry.inputs["hidden_states"], name="x", shape=("tokens", "width"))
    return replace(
        base,
        class_name="Counting",
        dims={"tokens": replace(tokens, name="tokens", trace=6, check=(7,))},
        programs={"forward": replace(entry, inputs={"x": x}, arguments={})},
    )


def do(what: str) -> None:
    if what in TRACED:
        name, program = TRACED[what]
        recipe = load_recipe(name)
        cls = find_class(recipe.library, name, Path(name))
        assert trace(cls, recipe.tiny_config(), recipe, program).parameters
    elif what == "a trace that fails":
        with pytest.raises(MlxconvError, match="cannot be traced"):
            trace(Counting, {"width": 4}, counting_recipe())
    elif what == "a derived recipe":
        recipe = load_recipe("FluxTransformer2DModel")
        cls = find_class("diffusers", recipe.class_name, Path())
        derive_recipe(cls, recipe.tiny_config(), "diffusers")
    else:
        recipe = load_recipe("AutoencoderKL")
        inputs = example_inputs(recipe, "encode", recipe.tiny_config())
        with torch.random.fork_rng():
            module = tiny_module(recipe)
        Reference(module, "").run("encode", inputs)


def warm_up() -> None:
    """What the libraries themselves import and remember the first time."""
    for name in {name for name, _ in TRACED.values()}:
        tiny_module(load_recipe(name))
    exported = torch.export.export(nn.Linear(2, 2), (torch.ones(1, 2),), strict=False)
    exported.run_decompositions({})


def main() -> None:
    torch.set_num_threads(3)
    warm_up()
    found = {}
    for what in sys.argv[1:]:
        before = state()
        do(what)
        found[what] = changes(before, state())
    print(json.dumps(found))


if __name__ == "__main__":
    main()
