"""Tracing: each shipped recipe against the real module, at the traced sizes and at others."""

import functools
from dataclasses import replace

import diffusers
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mlxconv.convert.recipe.examples import example_inputs
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.convert.recipe.recipe import ProgramRecipe
from mlxconv.convert.trace import repeats
from mlxconv.convert.trace.export import trace
from mlxconv.convert.trace.fake_module import build_module, merged_config
from mlxconv.convert.trace.multiples import multiple
from mlxconv.convert.trace.patches.symbolic_builtins import symbolic_builtins
from mlxconv.convert.trace.traced import Traced
from mlxconv.runtime.errors import MlxconvError

torch.set_num_threads(1)

# One of each kind of graph; test_recipes.py holds every class to what comes of its graph.
TRACED = [
    ("QwenImageTransformer2DModel", None, "forward"),  # sizes as inputs
    ("ZImageTransformer2DModel", None, "forward"),  # lists, and a fixed batch
    ("ChromaTransformer2DModel", None, "forward"),  # builtins replaced
    ("DiTTransformer2DModel", None, "forward"),  # a fixed size
    ("WanTransformer3DModel", "image_to_video", "image_to_video"),  # modules kept in fp32
    ("AutoencoderKL", None, "decode"),  # convolutions
]
VARIANTS = [
    (name, variant)
    for name in dict.fromkeys(name for name, *_ in TRACED)
    for variant in (None, *load_recipe(name).tiny_variants)
]
each_traced = pytest.mark.parametrize(
    ("name", "variant", "program"),
    [pytest.param(*t, marks=pytest.mark.xdist_group(f"traced-{t[0]}")) for t in TRACED],
)


def shallow(name: str, variant: str | None) -> dict[str, object]:
    """The tiny configuration with half of its blocks: tracing takes five milliseconds a node."""
    config = load_recipe(name).tiny_config(variant)
    depths = [k for k in config if k.endswith("_layers") and isinstance(config[k], int)]
    return {**config, **{key: -(-config[key] // 2) for key in depths}}


@functools.cache
def real(name: str, variant: str | None) -> nn.Module:
    """The tiny model with every parameter random: norms and biases too."""
    torch.manual_seed(0)
    module = getattr(diffusers, name)(**shallow(name, variant)).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.3 if parameter.ndim == 1 else 0.06)
    return module


@functools.cache
def traced(name: str, variant: str | None, program: str) -> Traced:
    """Every block traced, for torch to run: it cannot write a block again (test_repeats.py)."""
    cls, config = getattr(diffusers, name), shallow(name, variant)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeats, "equal_members", lambda module: [])
        return trace(cls, config, load_recipe(name), program, dtype=torch.float32)


def run(module: nn.Module, program: ProgramRecipe, kwargs):
    with torch.no_grad():
        return pytree.tree_leaves(getattr(module, program.method)(**kwargs))


def replay(this: Traced, module: nn.Module, kwargs):
    """The traced graph, run with a real module's weights."""
    weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    given = {item.placeholder: item for item in this.inputs}

    def value(name):
        if name in given:
            return functools.reduce(lambda tree, part: tree[part], given[name].path, kwargs)
        target = this.placeholders[name]
        return this.constants.get(target, weights.get(target))

    names = [node.name for node in this.exported.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        outputs = torch.fx.Interpreter(this.exported.graph_module).run(*map(value, names))
    return pytree.tree_leaves(outputs)


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_tiny_model_runs_on_example_inputs(name, variant):
    recipe = load_recipe(name)
    config = merged_config(getattr(diffusers, name), recipe.tiny_config(variant))
    torch.manual_seed(0)
    module = getattr(diffusers, name)(**recipe.tiny_config(variant)).eval()
    for program in recipe.programs_for(config):
        for output in run(
            module, recipe.programs[program], example_inputs(recipe, program, config)
        ):
            assert output.isfinite().all() and output.std() > 1e-6


@pytest.mark.slow
@each_traced
def test_the_graph_computes_what_the_module_does_at_every_size(name, variant, program):
    recipe, this = load_recipe(name), traced(name, variant, program)
    module, entry = real(name, variant), recipe.programs[program]
    checks = {d.name: d.check for d in recipe.dims.values() if not d.fixed}
    rounds = range(max(map(len, checks.values())))
    others = [{n: sizes[min(i, len(sizes) - 1)] for n, sizes in checks.items()} for i in rounds]
    for dims in ({}, *others):
        kwargs = example_inputs(recipe, program, this.config, dims, seed=1)
        expected = run(module, entry, kwargs)
        for ours, theirs in zip(replay(this, module, kwargs), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5, msg=str(dims))


@each_traced
def test_only_dims_declared_fixed_are_built_in(name, variant, program):
    declared = {dim.name for dim in load_recipe(name).dims.values() if dim.fixed}
    assert set(traced(name, variant, program).fixed) <= declared


@each_traced
def test_parameters_are_those_of_the_checkpoint(name, variant, program):
    state = real(name, variant).state_dict()
    found = {n: p.shape for n, p in traced(name, variant, program).parameters.items()}
    assert found == {n: tuple(t.shape) for n, t in state.items()}


@each_traced
def test_constants_are_real_and_those_of_the_module(name, variant, program):
    buffers = dict(real(name, variant).named_buffers())
    for key, value in traced(name, variant, program).constants.items():
        assert not isinstance(value, FakeTensor)
        if key in buffers:
            assert torch.equal(value, buffers[key])


@each_traced
def test_every_list_of_blocks_can_be_read(name, variant, program):
    this = traced(name, variant, program)
    blocks = {
        f"{path}.{index}"
        for path, child in real(name, variant).named_modules()
        if isinstance(child, nn.ModuleList) and "." not in path
        for index in range(len(child))
    }
    assert blocks <= {tap.path for tap in this.taps}
    assert all(tap.node in {n.name for n in this.exported.graph.nodes} for tap in this.taps)


@each_traced
def test_nodes_keep_the_path_of_their_module(name, variant, program):
    this = traced(name, variant, program)
    calls = [node for node in this.exported.graph.nodes if node.op == "call_function"]
    products = [n for n in calls if "aten.linear" in str(n.target) or "aten.conv" in str(n.target)]
    assert products
    for node in products:
        path = list(node.meta["nn_module_stack"].values())[-1][0]
        target = this.placeholders[node.args[1].name]
        assert target.startswith(f"{path}.")


def test_inputs_name_their_dims_and_stages():
    inputs = {i.name: i for i in traced("QwenImageTransformer2DModel", None, "forward").inputs}
    assert inputs["hidden_states"].shape == ("batch", "height * width", 16)
    assert inputs["timestep"].stage == "schedule"
    assert (inputs["img_shapes.0.0.1"].kind, inputs["img_shapes.0.0.1"].shape) == (
        "int",
        ("height",),
    )
    assert inputs["img_shapes.0.0.0"].value == 1


def test_builtins_are_put_back_after_tracing():
    traced("ChromaTransformer2DModel", None, "forward")
    import diffusers.models.transformers.transformer_chroma as source

    assert not {"int", "len", "max", "min"} & set(vars(source))
    assert torch.tensor([0] * 3).shape == (3,)


# --- dtypes -----------------------------------------------------------------------------------


def test_a_module_is_built_without_its_weights():
    module, _ = build_module(diffusers.FluxTransformer2DModel, {"guidance_embeds": True})
    assert sum(p.numel() for p in module.parameters()) == 11_901_408_320
    assert all(isinstance(p, FakeTensor) for p in module.parameters())


def test_a_module_of_more_layers_than_any_model_is_not_built(monkeypatch):
    """In time: a parameter takes 0.3 ms, and 20,000 are allowed."""
    monkeypatch.setattr("mlxconv.convert.trace.fake_module.MAX_PARAMETERS", 500)
    config = {**load_recipe("FluxTransformer2DModel").tiny_config(None), "num_layers": 10**7}
    with pytest.raises(MlxconvError, match="configuration asks for more than"):
        build_module(diffusers.FluxTransformer2DModel, config)


def test_modules_kept_in_fp32_are_matched_by_whole_components():
    recipe = load_recipe("WanTransformer3DModel")
    module, _ = build_module(diffusers.WanTransformer3DModel, recipe.tiny_config())
    dtypes = {name: p.dtype for name, p in module.named_parameters()}
    assert dtypes["blocks.0.norm2.weight"] == torch.float32
    assert dtypes["scale_shift_table"] == torch.float32
    assert dtypes["blocks.0.attn1.norm_q.weight"] == torch.bfloat16


@pytest.mark.parametrize(
    "name", ["PixArtTransformer2DModel", "ChromaTransformer2DModel", "DiTTransformer2DModel"]
)
def test_dtypes_are_those_of_from_pretrained(name, tmp_path):
    real(name, None).save_pretrained(tmp_path)
    loaded = getattr(diffusers, name).from_pretrained(tmp_path, torch_dtype=torch.bfloat16)
    built, _ = build_module(getattr(diffusers, name), shallow(name, None))
    for part in ("named_parameters", "named_buffers"):
        theirs = {n: t.dtype for n, t in getattr(loaded, part)()}
        assert {n: t.dtype for n, t in getattr(built, part)()} == theirs


# --- multiples --------------------------------------------------------------------------------


class Halving(nn.Module):
    """Rows by 8 or nothing: each halving rounds up, and no row may be left over."""

    def __init__(self, width: int = 4, patch: int = 8) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv1d(width, width, 3, 2, 1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        halved = x.T
        for conv in self.convs:
            halved = conv(halved)
        return halved.T + x.reshape(x.shape[0] // 8, 8, -1).mean(1)


def _halving(shape):
    base = _recipe_of(Halving)
    entry = base.programs["forward"]
    x = replace(entry.inputs["x"], shape=(shape, "width"))
    dims = {"rows": replace(base.dims["tokens"], name="rows", trace=6)}
    return replace(
        base, dims=dims, programs={"forward": replace(entry, inputs={"x": x}, arguments={})}
    )


@pytest.mark.parametrize("shape", ["8 * rows", "rows * patch", "2 * rows * (patch - 4)"])
def test_torch_knows_what_divides_a_size_that_is_declared_as_a_multiple(shape):
    this = trace(Halving, {"width": 4}, _halving(shape), dtype=torch.float32)
    (output,) = (node for node in this.exported.graph.nodes if node.name == this.outputs[0])
    assert this.symbols[str(output.meta["val"].shape[0])] == "rows"
    assert this.inputs[0].shape == ("8 * rows", 4)
    assert (this.fixed, this.exported._guards_code) == ({}, [])
    module = Halving().eval()
    for rows in (2, 5):
        x = torch.randn(8 * rows, 4)
        (got,) = pytree.tree_leaves(replay(this, module, {"x": x}))
        assert torch.allclose(got, module(x), atol=1e-6)


@pytest.mark.parametrize("expression", ["rows", "rows * 1", "8 * rows - 7", "rows * columns", 8])
def test_other_sizes_are_no_multiples(expression):
    assert multiple(expression, ["rows", "columns"], {}) is None


def test_torch_makes_its_own_inputs_after_tracing():
    before = torch.export._trace.make_fake_inputs
    trace(Halving, {"width": 4}, _halving("8 * rows"))
    assert torch.export._trace.make_fake_inputs is before


# --- refusals ---------------------------------------------------------------------------------


class Counting(nn.Module):
    """Does as many rounds as its input says."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(int(x.sum().item())):
            x = self.proj(x)
        return x


class Reshaping(nn.Module):
    """Builds the size it is traced with into its weights."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(6, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table


def _recipe_of(cls):
    base = load_recipe("DiTTransformer2DModel")
    sizes = load_recipe("FluxTransformer2DModel").dims["image_tokens"]
    entry = base.programs["forward"]
    x = replace(entry.inputs["hidden_states"], name="x", shape=("tokens", "width"))
    return replace(
        base,
        class_name=cls.__name__,
        dims={"tokens": replace(sizes, name="tokens", trace=6, check=(7,))},
        programs={"forward": replace(entry, inputs={"x": x}, arguments={})},
    )


def test_a_data_dependent_forward_is_refused_with_its_line():
    with pytest.raises(
        MlxconvError, match=r"Counting\.forward cannot be traced: .*test_export\.py:\d+.*fixed"
    ):
        trace(Counting, {"width": 4}, _recipe_of(Counting))


def test_a_size_that_the_class_builds_in_is_reported():
    assert trace(Reshaping, {"width": 4}, _recipe_of(Reshaping)).fixed == {"tokens": 6}


def test_a_configuration_that_does_not_fit_is_named():
    with pytest.raises(MlxconvError, match=r"Counting cannot be built from it"):
        trace(Counting, {"wide": 4}, _recipe_of(Counting))


def test_functions_that_torch_remembers_are_its_own():
    from torch.utils._device import _device_constructors

    _device_constructors.cache_clear()
    with symbolic_builtins(nn.Linear(1, 1)), torch.device("meta"):
        torch.ones(1)
    with torch.device("meta"):
        assert torch.tensor([1.0]).device.type == torch.linspace(0, 1, 2).device.type == "meta"
