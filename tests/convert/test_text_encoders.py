"""Text encoders: the programs of transformers' models, as pipelines call them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.examples import _values
from mlxconv.convert.recipe.reading import load_recipe, parse_recipe
from mlxconv.convert.recipe.recipe import Recipe, RecipeInput
from mlxconv.convert.source.arrays import torch_to_mlx
from mlxconv.convert.source.keys import tied_weights
from mlxconv.convert.trace.export import trace
from mlxconv.convert.trace.fake_module import build_module
from mlxconv.convert.verify.verify import verify
from mlxconv.runtime.bundle import load_component

from ..bundles import tensors
from ..conftest import Bundles

pytestmark = pytest.mark.usefixtures("shared_programs")
Encoder = tuple[Any, Any]  # the PyTorch module, and the runtime's component


def encoder(name: str, folder: Path, variant: str | None = None) -> Encoder:
    """The recipe's tiny model in both, in fp32."""
    source = tiny_checkpoint(load_recipe(name), variant, folder / "source")
    convert(source, folder / "out", "fp32")
    module = getattr(transformers, name).from_pretrained(str(source)).eval()
    return module, load_component(folder / "out")


def run(loaded: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> list[Any]:
    inputs = {"input_ids": ids} | ({} if mask is None else {"attention_mask": mask})
    return [np.array(x) for x in loaded.executor.run("forward", torch_to_mlx(inputs), ())[0]]


def close(found: Any, wanted: torch.Tensor) -> None:
    wanted = wanted.detach().numpy()
    assert np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted)


def masked(lengths: list[int], tokens: int, left: bool = False) -> torch.Tensor:
    ones = (torch.arange(tokens) < torch.tensor(lengths)[:, None]).long()
    return ones.flip(-1) if left else ones


def ids_of(rows: int, tokens: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, 64, (rows, tokens), generator=torch.Generator().manual_seed(seed))


# ---- in a pipeline ------------------------------------------------------------------------------


@pytest.mark.parametrize("q", ["bf16", "8bit"])
def test_a_pipelines_text_encoders_have_programs_that_verify(
    pipeline_checkpoint: Path, tmp_path: Path, q: str
) -> None:
    names = ["text_encoder", "text_encoder_2"]
    report = convert(pipeline_checkpoint, tmp_path / "out", components=names, text_encoder_q=q)
    assert all(report.components[name].program for name in names)
    assert all(report.components[name].unused == [] for name in names)
    checked = verify(tmp_path / "out", pipeline_checkpoint, components=names)
    assert checked.passed, checked.as_text()
    assert {row.tier for row in checked.tiers} >= {"weights", "forward"}


def test_the_pooled_token_is_what_clip_gives(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles
) -> None:
    folder = pipeline_checkpoint / "text_encoder"
    module = transformers.CLIPTextModel.from_pretrained(str(folder)).eval()
    ids = ids_of(3, 77)
    loaded = load_component(pipeline_bundle("fp32"), "text_encoder")
    last, pooled, *hidden = run(loaded, ids)
    want = module(ids, output_hidden_states=True)
    close(last, want.last_hidden_state)
    close(pooled, want.pooler_output)
    close(hidden[-2], want.hidden_states[-2])


# ---- sizes and padding --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return encoder("T5EncoderModel", tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    return encoder("Qwen3ForCausalLM", tmp_path_factory.mktemp("qwen3"))


@pytest.mark.parametrize("tokens", [1, 2, 5, 64, 300])
def test_t5_has_one_program_for_every_length(t5: Encoder, tokens: int) -> None:
    module, loaded = t5
    ids = ids_of(2, tokens)
    mask = masked([tokens, max(1, tokens // 2)], tokens)
    close(run(loaded, ids, mask)[0], module(ids, attention_mask=mask)[0])


def test_t5_puts_distances_into_the_buckets_that_pytorch_has(t5: Encoder) -> None:
    """Those of 16, 32 and 64 tokens lie on the edge of a bucket: log and product are exact there.

    The first layer's bias shows them, one by one.
    """
    module, loaded = t5
    ids, mask = ids_of(1, 300), torch.ones(1, 300).long()
    path = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias"
    _, found = loaded.executor.run(
        "forward", torch_to_mlx({"input_ids": ids, "attention_mask": mask}), [path]
    )
    seen: list[torch.Tensor] = []
    module.get_submodule(path).register_forward_hook(lambda m, a, output: seen.append(output))
    module(ids, attention_mask=mask)
    assert np.array_equal(np.array(found[path][0]), seen[0].detach().numpy())


def test_a_mask_of_ones_is_the_same_as_none(t5: Encoder) -> None:
    module, loaded = t5
    ids = ids_of(2, 9)
    close(run(loaded, ids, torch.ones(2, 9).long())[0], module(ids)[0])


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_every_hidden_state_is_right_at_the_padding_too(
    qwen3: Encoder, tokens: int, left: bool
) -> None:
    """FLUX.2 feeds all of them to its transformer, at every token."""
    module, loaded = qwen3
    ids, mask = ids_of(3, tokens), masked([tokens, (tokens + 1) // 2, 1], tokens, left)
    want = module(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    last, *hidden = run(loaded, ids, mask)
    assert len(hidden) == len(want)
    for found, wanted in zip(hidden, want, strict=True):
        close(found, wanted)
    close(last, want[-1])


def test_gemma2_attends_evenly_where_all_is_masked(tmp_path: Path) -> None:
    """It adds the lowest number of the dtype: a padded row sees every token, as in PyTorch."""
    module, loaded = encoder("Gemma2Model", tmp_path)
    ids, mask = ids_of(2, 12), masked([12, 5], 12, left=True)
    want = module(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    for found, wanted in zip(run(loaded, ids, mask)[1:], want, strict=True):
        close(found, wanted)


# ---- what is stored and traced ------------------------------------------------------------------


def test_a_head_that_nothing_reads_is_no_part_of_the_program(qwen3: Encoder) -> None:
    _, loaded = qwen3
    assert not [name for name in loaded.program.parameters if "lm_head" in name]


@pytest.mark.parametrize("stored", ["shared.weight", "encoder.embed_tokens.weight"])
def test_tied_embeddings_are_found_under_either_name(tmp_path: Path, stored: str) -> None:
    source = tiny_checkpoint(load_recipe("T5EncoderModel"), None, tmp_path / "source")
    file = source / "model.safetensors"
    weights = load_file(str(file))
    weights[stored] = weights.pop("shared.weight")
    save_file(weights, str(file), metadata={"format": "pt"})
    convert(source, tmp_path / "out", "8bit")
    made = tensors(tmp_path / "out" / "source")
    assert len([name for name in made if "shared" in name or "embed_tokens" in name]) == 1
    checked = verify(tmp_path / "out", source)
    assert checked.passed, checked.as_text()


def vision_language(key: str) -> str:
    return key.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def mistral(key: str) -> str:
    key = key.replace("model.language_model.", "language_model.model.")
    return key.replace("model.vision", "vision").replace("lm_head", "language_model.lm_head")


@pytest.mark.parametrize(
    ("name", "rename"),
    [
        ("CLIPTextModel", lambda key: f"text_model.{key}"),
        ("Qwen2_5_VLForConditionalGeneration", vision_language),
        ("Mistral3ForConditionalGeneration", mistral),
    ],
)
def test_published_files_have_other_names_than_modules(
    tmp_path: Path, name: str, rename: Callable[[str], str]
) -> None:
    source = tiny_checkpoint(load_recipe(name), None, tmp_path / "source")
    file = source / "model.safetensors"
    weights = {rename(key): value for key, value in load_file(str(file)).items()}
    save_file(weights, str(file), metadata={"format": "pt"})
    convert(source, tmp_path / "out", "fp32")
    checked = verify(tmp_path / "out", source)
    assert checked.passed, checked.as_text()


@pytest.mark.parametrize("name", ["CLIPTextModel", "T5EncoderModel", "Qwen3Model"])
def test_layers_are_traced_once(name: str) -> None:
    cls, recipe = getattr(transformers, name), load_recipe(name)
    tiny = recipe.tiny_config()
    depth = "num_layers" if "num_layers" in tiny else "num_hidden_layers"
    config = json.loads(cls.config_class(**{**tiny, depth: 8}).to_json_string(use_diff=False))
    nodes = trace(cls, config, recipe).exported.graph.nodes
    assert len([n for n in nodes if n.target is torch.ops.mlxconv.again.default]) >= 6


def test_tied_parameters_stay_one_while_they_are_fake() -> None:
    config = transformers.T5Config(**load_recipe("T5EncoderModel").tiny_config()).to_dict()
    module, _ = build_module(transformers.T5EncoderModel, config)
    assert tied_weights(module) == {"encoder.embed_tokens.weight": "shared.weight"}


def test_a_number_made_in_the_compute_dtype_keeps_its_digits() -> None:
    """Gemma scales by the root of its width: rounded to bf16 it would be wrong in fp32."""

    class Scaled(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.tensor(96**0.5, dtype=x.dtype)

    recipe = parse_recipe(
        'class = "Scaled"\n[dims]\n[programs.forward.inputs]\nx = { shape = [2] }\n', "here"
    )
    graph = trace(Scaled, {}, recipe).exported.graph
    made = [n.args[1] for n in graph.nodes if n.target is torch.ops.aten.full.default]
    assert made == [96**0.5]


# ---- recipes ------------------------------------------------------------------------------------


def test_a_mask_may_be_padded_on_the_left() -> None:
    generator = torch.Generator()
    right, left = (
        _values(RecipeInput("m", (), mask=mask), (3, 6), generator)
        for mask in ("ragged", "ragged_left")
    )
    assert right.sum(-1).tolist() == left.sum(-1).tolist() == [6, 4, 2]
    assert left[2].tolist() == [False] * 4 + [True] * 2


def test_a_method_may_be_a_submodule() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
            return x * scale

    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.ModuleDict({"inner": Inner()})

    recipe: Recipe = parse_recipe(
        'class = "Outer"\n[dims]\n[programs.forward]\nmethod = "body.inner"\n', "here"
    )
    outer = Outer()
    seen: list[Any] = []
    outer.body["inner"].register_forward_hook(lambda m, a, output: seen.append(output))
    out = recipe.program("forward").callable(outer)(torch.ones(2), scale=3.0)
    assert out.tolist() == [3.0, 3.0]
    assert len(seen) == 1
