"""Every recipe, at every tiny configuration, held to one contract by the product's own means."""

from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from mlxconv.convert.catalog.figures import measure, write_figures
from mlxconv.convert.catalog.supported import kind_of
from mlxconv.convert.lower.program_cache import versions
from mlxconv.convert.quantize.policy import matches
from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.reading import all_recipes, load_recipe
from mlxconv.convert.recipe.recipe import Recipe
from mlxconv.convert.source.arrays import torch_to_mlx
from mlxconv.convert.source.model_class import find_class
from mlxconv.convert.trace.fake_module import merged_config
from mlxconv.runtime.bundle import LoadedComponent, load_component, open_bundle
from mlxconv.runtime.generate.staging import Staged
from mlxconv.runtime.program.stored import from_json, to_json, validate

from ..bundles import PROGRAM
from ..conftest import Bundles

pytestmark = pytest.mark.usefixtures("shared_programs")
RECIPES = files("mlxconv") / "recipes"
# The bar of every class, and what hides behind it: no class may become three times worse than
# `recipes/parity.json` says it was.
LIMIT, NOISE, WORSE = 1e-4, 1e-5, 3.0
CASES = [(name, v) for name, recipe in all_recipes().items() for v in (None, *recipe.tiny_variants)]
IDS = [f"{name}-{variant}" if variant else name for name, variant in CASES]
# These run in `make test`; the others are marked `coverage` and run in CI.
CORE = set(
    """AuraFlowTransformer2DModel AutoencoderKL CLIPTextModel ChromaTransformer2DModel
    DiTTransformer2DModel Flux2Transformer2DModel FluxTransformer2DModel PixArtTransformer2DModel
    Qwen3Model QwenImageTransformer2DModel SD3Transformer2DModel SanaTransformer2DModel
    T5EncoderModel UNet2DConditionModel WanTransformer3DModel ZImageTransformer2DModel""".split()
)


def _marks(class_name: str, name: str) -> list[pytest.MarkDecorator]:
    coverage = [] if class_name in CORE else [pytest.mark.coverage]
    return [pytest.mark.xdist_group(name), *coverage]


PARAMETERS = [
    pytest.param(*case, id=name, marks=_marks(case[0], name))
    for case, name in zip(CASES, IDS, strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(("class_name", "variant"), PARAMETERS)
def test_a_recipe_keeps_the_contract(class_name: str, variant: str | None, tmp_path: Path) -> None:
    recipe = load_recipe(class_name)
    measured = {m.q: m for m in measure(recipe, variant, folder=tmp_path)}
    assert {q: m.problem for q, m in measured.items() if not m.passed} == {}
    before = recorded().get((class_name, variant or ""), LIMIT)
    assert measured["fp32"].rel_l2 <= min(LIMIT, max(NOISE, WORSE * before))
    for q in ("8bit", "4bit"):
        quantized = measured[q]
        if recipe.precision.keep == ("**",):
            assert quantized.quantized == 0
        else:
            assert quantized.quantized > 0
            assert quantized.runtime is not None
            assert quantized.runtime <= LIMIT
    for q in measured:
        check_program(tmp_path / q, recipe)
    check_stream(tmp_path / "bf16", recipe, variant)
    if kind_of(recipe) == "denoiser":
        check_stages(tmp_path / "fp32", recipe, variant)
    if variant is None and kind_of(recipe) == "denoiser":
        check_sizes(tmp_path, recipe)
    if "MLXCONV_FIGURES" in os.environ:  # `make figures`: what `mlxconv models` shows
        write_figures(Path(os.environ["MLXCONV_FIGURES"]), list(measured.values()), versions())


@functools.cache
def recorded() -> dict[tuple[str, str], float]:
    """The fp32 figures that `mlxconv models` shows."""
    rows = json.loads((RECIPES / "parity.json").read_text(encoding="utf-8"))["rows"]
    return {(r["class_name"], r["variant"]): r["rel_l2"] for r in rows if r["q"] == "fp32"}


def check_program(bundle: Path, recipe: Recipe) -> None:
    """Valid, the same after a round trip, no tensor left over, fixed only where it is declared."""
    (name,) = open_bundle(bundle).manifest["components"]
    text = (bundle / name / PROGRAM).read_text(encoding="utf-8")
    program = from_json(text)
    validate(program)
    assert to_json(program) == text
    unused = open_bundle(bundle).manifest["components"][name]["unused"]
    assert [t for t in unused if not any(matches(p, t) for p in recipe.unused)] == []
    fixed = {dim.name for dim in recipe.dims.values() if dim.fixed}
    assert {size for entry in program.entries for size in entry.sizes} <= fixed


def check_stream(bundle: Path, recipe: Recipe, variant: str | None) -> None:
    """The outputs of every block of a bf16 run are bf16, but for what the class keeps in fp32."""
    cls = find_class(recipe.library, recipe.class_name, bundle)
    allowed = {mx.bfloat16, *([mx.float32] if getattr(cls, "_keep_in_fp32_modules", None) else [])}
    model = load_component(bundle)
    for entry in model.program.entries:
        inputs = inputs_of(recipe, entry.name, variant, torch.bfloat16, entry.sizes)
        blocks = [p for p in model.executor.block_paths(entry.name) if p in entry.taps]
        _, values = model.executor.run(entry.name, inputs, blocks)
        others = {path for path, found in values.items() if not {v.dtype for v in found} <= allowed}
        assert others == set()


def check_stages(bundle: Path, recipe: Recipe, variant: str | None) -> None:
    """A loop by stages gives what the whole entry does at every step, from one trace."""
    model = load_component(bundle)
    for entry in model.program.entries:
        inputs = inputs_of(recipe, entry.name, variant, torch.float32, entry.sizes)
        names = [i.path for i in entry.inputs if i.stage == "schedule"]
        rows = {
            name: mx.stack([(inputs[name] * s).astype(inputs[name].dtype) for s in (1, 0.5, 0.25)])
            for name in names
        }
        staged = Staged(model, entry.name)
        run = staged.prepare(inputs, rows)
        for step in range(run.steps):
            whole = model.executor(entry.name, **inputs | {k: v[step] for k, v in rows.items()})
            assert _apart(run(step, **inputs), whole) <= 1e-5
        assert staged.traces == 1


def _apart(a: Any, b: Any) -> float:
    """The largest `rel_l2` of two results, each an array or several."""
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (a, b)), strict=True)
    arrays = ((np.array(x, np.float64), np.array(y, np.float64)) for x, y in pairs)
    return max(float(np.linalg.norm(x - y) / max(np.linalg.norm(y), 1e-30)) for x, y in arrays)


def inputs_of(
    recipe: Recipe, entry: str, variant: str | None, dtype: Any, dims: dict[str, int] | None = None
) -> Any:
    cls = find_class(recipe.library, recipe.class_name, RECIPES)
    config = merged_config(cls, recipe.tiny_config(variant))
    return torch_to_mlx(example_inputs(recipe, entry, config, dims, seed=3, dtype=dtype))


def check_sizes(folder: Path, recipe: Recipe) -> None:
    """The fp32 bundle gives what diffusers gives at every size that is free."""
    model = load_component(folder / "fp32")
    cls: Any = find_class(recipe.library, recipe.class_name, folder)
    module = cls.from_pretrained(str(folder / "source")).eval()
    entry, config = model.program.entries[0], merged_config(cls, recipe.tiny_config())
    forward = recipe.program(entry.name).callable(module)
    if recipe.class_name in CORE:  # every list of blocks can be read
        lists = (m for m in module.named_children() if isinstance(m[1], torch.nn.ModuleList))
        assert {f"{p}.{i}" for p, found in lists for i in range(len(found))} <= {*entry.taps}
    errors = {}
    for dims in all_sizes(recipe, entry.sizes):
        inputs = example_inputs(recipe, entry.name, config, dims, seed=3, dtype=torch.float32)
        with torch.no_grad():
            expected = pytree.tree_leaves(forward(**inputs))[0].numpy()
        found, _ = model.executor.run(entry.name, torch_to_mlx(inputs))
        error = np.linalg.norm(np.array(found[0]) - expected) / np.linalg.norm(expected)
        errors[tuple(dims.items())] = float(error)
    assert {dims: error for dims, error in errors.items() if not error <= LIMIT} == {}


def test_functions_that_a_recipe_calls_alike_exist() -> None:
    """`check_sizes` compares what they do: sizes to check take them both ways where they can."""
    for recipe in all_recipes().values():
        named = {name for program in recipe.programs.values() for name in program.alike}
        if named:
            find_class(recipe.library, recipe.class_name, RECIPES)
        for name in named:
            owner, method = name.split(".")
            loaded = [m for key, m in list(sys.modules.items()) if key.startswith("diffusers.")]
            assert any(hasattr(getattr(m, owner, None), method) for m in loaded), name


def all_sizes(recipe: Recipe, fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Batches of 1, 2 and 4, three aspect ratios, short and long prompts: what of it is free."""
    dims = {n: d for n, d in recipe.dims.items() if not d.fixed and n not in fixed and d.check}
    unit = {n: math.gcd(d.trace, *d.check) for n, d in dims.items()}
    least = {n: min(d.trace, *d.check) for n, d in dims.items()}
    side = math.lcm(unit.get("height", 1), unit.get("width", 1))
    k = -(-max(least.get("height", 1), least.get("width", 1)) // side)
    batches = [{"batch": n} for n in (1, 2, 4)]
    shapes = [
        {"height": high * side, "width": wide * side, "image_tokens": high * wide + 1}
        for high, wide in ((2 * k, k), (k, 2 * k), (k + 1, k + 1))
    ]
    texts = [
        {"text_tokens": n} for n in (least.get("text_tokens", 1), 40 * unit.get("text_tokens", 1))
    ]
    every = (batch | shape | text for batch, shape, text in product(batches, shapes, texts))
    kept = [{n: size for n, size in sizes.items() if n in dims} for sizes in every]
    return iter({tuple(sizes.items()): sizes for sizes in kept}.values())


@pytest.fixture(scope="module")
def flux(flux_bundle: Bundles) -> LoadedComponent:
    return load_component(flux_bundle("fp32"))


@pytest.mark.parametrize(
    "path", ["transformer_blocks.1", "transformer_blocks.0.attn", "time_text_embed", "proj_out"]
)
def test_a_tap_gives_what_a_forward_hook_gives(
    path: str, flux: LoadedComponent, flux_checkpoint: Path
) -> None:
    from diffusers import FluxTransformer2DModel

    recipe = load_recipe("FluxTransformer2DModel")
    config = merged_config(FluxTransformer2DModel, recipe.tiny_config())
    inputs = example_inputs(recipe, "forward", config, seed=3, dtype=torch.float32)
    module = FluxTransformer2DModel.from_pretrained(str(flux_checkpoint)).eval()
    seen: list[Any] = []
    module.get_submodule(path).register_forward_hook(lambda m, a, output: seen.append(output))
    with torch.no_grad():
        module(**inputs)
    expected = seen[0] if isinstance(seen[0], tuple) else (seen[0],)
    _, values = flux.executor.run("forward", torch_to_mlx(inputs), taps=[path])
    assert len(values[path]) == len(expected)
    for value, wanted in zip(values[path], expected, strict=True):
        np.testing.assert_allclose(np.array(value), wanted.numpy(), atol=2e-4, rtol=2e-4)


def test_an_unknown_tap_is_an_error_that_names_it(flux: LoadedComponent) -> None:
    recipe = load_recipe("FluxTransformer2DModel")
    inputs = inputs_of(recipe, "forward", None, torch.float32)
    with pytest.raises(Exception, match=r"no value is known at transformer_blocks\.7"):
        flux.executor.run("forward", inputs, taps=["transformer_blocks.7"])
