"""Recipes: the TOML that ships, what a wrong one is told, and the expressions they may hold."""

import inspect
import math
import tomllib
from pathlib import Path

import pytest
import torch

from mlxconv.convert.catalog.figures import tiny_module
from mlxconv.convert.quantize.policy import matches
from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.reading import all_recipes, bundle_recipe, load_recipe, load_recipe_file
from mlxconv.convert.recipe.recipe import evaluate, names_in
from mlxconv.runtime.errors import MlxconvError

MINIMAL = """
class = "Thing"
[dims]
tokens = { trace = 6, check = [7] }
[programs.forward.inputs]
x = { shape = [2, "tokens", "width"] }
[tiny]
width = 4
"""


def recipe_of(tmp_path: Path, text: str):
    path = tmp_path / "thing.toml"
    path.write_text(text)
    return load_recipe_file(path)


# --- expressions ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 * (h // 4) % 3 - 1", 0),
        ("len(widths) + max(widths) + sum(widths)", 2 + 32 + 48),
        ("widths[-1]", 32),
        ("guided and h > 4", True),
        ("guided is None or mode == 'fast'", True),
        (7, 7),
    ],
)
def test_an_expression_is_arithmetic_over_names(expression, value):
    names = {"h": 9, "widths": [16, 32], "guided": True, "mode": "fast"}
    assert evaluate(expression, names) == value


@pytest.mark.parametrize(
    "expression",
    ["h.bit_length()", "__import__('os')", "9 ** 9 ** 9", "[h for h in x]", "x[0:1]", "lambda: h"],
)
def test_an_expression_can_do_nothing_else(expression):
    with pytest.raises(MlxconvError, match="not allowed"):
        evaluate(expression, {"h": 1, "x": [1, 2]})


def test_an_expression_does_not_multiply_text():
    with pytest.raises(MlxconvError, match="arithmetic on 'a'"):
        evaluate("'a' * 1000000000", {})


def test_an_unknown_name_is_answered_with_close_ones():
    with pytest.raises(MlxconvError, match="did you mean height"):
        evaluate("heigth * 2", {"height": 1, "width": 2})


def test_names_in_an_expression_leave_out_its_functions():
    assert names_in("max(a, b[0]) + len(c)") == {"a", "b", "c"}


# --- what ships -------------------------------------------------------------------------------


def test_every_recipe_that_ships_reads():
    assert {
        "FluxTransformer2DModel",
        "QwenImageTransformer2DModel",
        "SD3Transformer2DModel",
        "AutoencoderKL",
    } <= set(all_recipes())


def test_every_recipe_is_named_as_its_class():
    assert all(name == recipe.class_name for name, recipe in all_recipes().items())


@pytest.mark.parametrize("name", sorted(all_recipes()))
def test_precision_patterns_match_modules_of_a_tiny_model(name):
    """Or name what the class has in other configurations."""
    recipe = load_recipe(name)
    variants = [tiny_module(recipe, variant) for variant in (None, *recipe.tiny_variants)]
    modules = [n for module in variants for n, _ in module.named_modules()]
    source = Path(inspect.getsourcefile(type(variants[0]))).read_text(encoding="utf-8")
    unmatched = [
        pattern
        for pattern in (*recipe.precision.keep, *recipe.precision.modulation)
        if not any(matches(pattern, module) for module in modules)
        and f"self.{pattern.split('.')[0]} =" not in source
    ]
    assert unmatched == []


def test_an_unknown_class_is_told_of_close_ones():
    with pytest.raises(MlxconvError, match=r"close: FluxTransformer2DModel.*--recipe FILE"):
        load_recipe("FluxTransformerModel")


def test_a_configuration_selects_its_programs():
    recipe = load_recipe("WanTransformer3DModel")
    text_to_video = {"image_dim": None, "in_channels": 16}
    assert recipe.programs_for(text_to_video) == ("forward",)
    assert recipe.programs_for({**text_to_video, "image_dim": 64}) == ("image_to_video",)


# --- what a wrong recipe is told --------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('class = "Thing"', 'clas = "Thing"', "clas: unknown key"),
        ("check = [7]", "chek = [7]", "dims.tokens.chek: unknown key"),
        ("trace = 6", 'trace = "six"', "dims.tokens.trace: unknown name 'six'"),
        ("check = [7]", "check = 7", "dims.tokens.check: expected a list"),
        ('"tokens", "width"', '"tokns", "width"', "inputs.x.shape: unknown name 'tokns'.*tokens"),
        ('"width"] }', '"width"], stage = "later" }', "x.stage: expected one of constant, prompt"),
        ('"width"] }', '"width"], dtype = "half" }', "x.dtype: expected one of compute"),
        ('"width"] }', '"width"], integers = [4, 1] }', "x.integers: expected .low, high."),
        ('"width"] }', '"width"], value = 1, mask = "ragged" }', "more than one of value"),
        ('x = { shape = [2, "tokens", "width"] }', "x = { }", "inputs.x.shape: missing"),
        ('[2, "tokens", "width"]', '[2, "tokens +"]', "inputs.x.shape: .*does not parse"),
        ("[tiny]", "[tiny", "not valid TOML"),
    ],
)
def test_a_wrong_recipe_is_told_the_file_and_the_key(tmp_path, old, new, message):
    assert old in MINIMAL
    with pytest.raises(MlxconvError, match=rf"thing\.toml: .*{message}"):
        recipe_of(tmp_path, MINIMAL.replace(old, new))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(MlxconvError, match=r"cannot read recipe .*none\.toml"):
        load_recipe_file(tmp_path / "none.toml")


# --- example inputs ---------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_values_at_every_dtype(tmp_path):
    recipe = recipe_of(tmp_path, MINIMAL)
    config = recipe.tiny_config()
    single = example_inputs(recipe, "forward", config, seed=3)["x"]
    half = example_inputs(recipe, "forward", config, seed=3, dtype=torch.bfloat16)["x"]
    assert torch.equal(single.to(torch.bfloat16), half)


def test_another_seed_gives_other_values(tmp_path):
    recipe = recipe_of(tmp_path, MINIMAL)
    first, second = (example_inputs(recipe, "forward", {"width": 4}, seed=s)["x"] for s in (0, 1))
    assert not torch.equal(first, second)


def test_dims_change_the_shapes(tmp_path):
    recipe = recipe_of(tmp_path, MINIMAL)
    assert example_inputs(recipe, "forward", {"width": 4}, {"tokens": 9})["x"].shape == (2, 9, 4)


def test_an_unknown_dim_is_refused(tmp_path):
    recipe = recipe_of(tmp_path, MINIMAL)
    with pytest.raises(MlxconvError, match="no dim heads, only tokens"):
        example_inputs(recipe, "forward", {"width": 4}, {"heads": 9})


def test_a_dotted_name_and_a_ragged_mask(tmp_path):
    text = MINIMAL.replace(
        "[tiny]", '"a.mask" = { shape = [3, "tokens"], mask = "ragged", dtype = "int64" }\n[tiny]'
    )
    mask = example_inputs(recipe_of(tmp_path, text), "forward", {"width": 4})["a"]["mask"]
    assert mask.sum(-1).tolist() == [6, 4, 2]


@pytest.mark.parametrize("name", sorted(all_recipes()))
def test_constant_values_are_exact_in_bf16(name):
    """But for what stays fp32 and is no time: classes round times themselves."""
    text = Path(__file__).parents[3].joinpath("recipes", f"{name}.toml").read_text()
    programs = tomllib.loads(text)["programs"].values()
    specs = [spec for program in programs for spec in program["inputs"].values()]
    free = [s for s in specs if s.get("dtype") == "float32" and s.get("stage") != "schedule"]
    values = [v for s in specs if s not in free for v in _list(s.get("value", []))]
    assert all(torch.tensor(v).bfloat16().item() == v and math.isfinite(v) for v in values)


def _list(value):
    return value if isinstance(value, list) else [value]


def test_the_recipe_of_a_bundle_is_read_each_time(tmp_path):
    shipped = load_recipe("DiTTransformer2DModel")
    assert bundle_recipe(tmp_path, "DiTTransformer2DModel") is shipped
    (tmp_path / "recipe.toml").write_text(MINIMAL)
    assert bundle_recipe(tmp_path, "DiTTransformer2DModel").class_name == "Thing"


SIZED = [name for name, recipe in all_recipes().items() if recipe.sizes]


@pytest.mark.parametrize("name", SIZED)
def test_an_image_of_512_pixels_decides_sizes(name: str) -> None:
    recipe = load_recipe(name)
    names = {**recipe.tiny_config(), "W": 512, "H": 512}
    assert all(evaluate(text, names) > 0 for text in recipe.sizes.values())


def test_convert_takes_from_pixels_only_what_is_built_in() -> None:
    assert load_recipe("DiTTransformer2DModel").fixed_sizes() == {"size": "H // 8"}
    assert load_recipe("FluxTransformer2DModel").fixed_sizes() == {}


def test_a_bundle_keeps_what_decides_its_sizes() -> None:
    recipe = load_recipe("QwenImageTransformer2DModel")
    table = recipe.sizes_table(recipe.tiny_config())
    assert table["dims"] == {
        "batch": 2, "height": 6, "width": 4, "text_tokens": 11, "edited_height": 5,
        "edited_width": 3,
    }  # fmt: skip
    assert table["pixels"]["height"] == "H // 16"
    assert table["arguments"]["forward"] == {
        "img_shapes.0.0.1": "height", "img_shapes.0.0.2": "width",
    }  # fmt: skip
