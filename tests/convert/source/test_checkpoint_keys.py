"""Wanted names against stored names: exact, legacy, wrapped, tied; and never a guess."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mlxconv.convert.source.checkpoint import (
    StoredTensor,
    component_class,
    match_keys,
    open_checkpoint,
    tied_weights,
)
from mlxconv.runtime.errors import MlxconvError


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def stored(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    return {n: StoredTensor(n, s, "F32", Path("weights"), 0) for n, s in shapes.items()}


def pairs(wanted: list[str], names: list[str]) -> dict[str, str]:
    return match_keys(dict.fromkeys(wanted, (2,)), stored(dict.fromkeys(names, (2,)))).found


def renamed_file(folder: Path, rename: Any) -> None:
    """Give the weights of a saved model other names, as older or published files have them."""
    file = next(folder.glob("*.safetensors"))
    save_file({rename(k): v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def test_equal_names_match_and_the_rest_is_listed_on_both_sides() -> None:
    match = match_keys(
        {"a.weight": (2, 3), "b.weight": (2,), "c.bias": (4,)},
        stored({"a.weight": (2, 3), "b.weight": (5,), "zz.position_ids": (1, 77)}),
    )

    assert match.found == {"a.weight": "a.weight"}
    assert match.missing == ["c.bias"]
    assert match.unused == ["zz.position_ids"]
    assert match.wrong_shape == [("b.weight", (2,), (5,))]
    assert match.renamed == {}


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("encoder.layers.0.fc.weight", "text_model.encoder.layers.0.fc.weight"),
        ("final_layer_norm.bias", "text_model.final_layer_norm.bias"),
        ("model.language_model.layers.11.mlp.weight", "model.layers.11.mlp.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.visual.blocks.0.norm1.weight", "visual.blocks.0.norm1.weight"),
        ("model.language_model.layers.0.q.weight", "language_model.model.layers.0.q.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("layers.0.q.weight", "model.layers.0.q.weight"),
        ("embeddings.class_embedding", "vision_model.embeddings.class_embedding"),
    ],
)
def test_wrapper_words_match_in_both_directions(wanted: str, name: str) -> None:
    assert pairs([wanted], [name]) == {wanted: name}
    assert pairs([name], [wanted]) == {name: wanted}


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        ("encoder.norm.weight", "decoder.norm.weight"),
        ("blocks.0.norm.weight", "blocks.1.norm.weight"),
        ("blocks.0.norm1.weight", "blocks.0.norm2.weight"),
        ("norm.weight", "blocks.0.norm.weight"),
        ("bias", "proj.bias"),
        ("shared.weight", "encoder.embed_tokens.weight"),
        ("a.norm.weight", "a.b.c.d.norm.weight"),
    ],
)
def test_other_names_are_not_guessed(wanted: str, name: str) -> None:
    assert pairs([wanted], [name]) == {}
    assert pairs([name], [wanted]) == {}


def test_a_word_of_the_structure_is_no_wrapper() -> None:
    found = pairs(
        ["encoder.layers.0.fc.weight", "norm.weight"],
        ["encoder.layers.0.fc.weight", "encoder.norm.weight"],
    )

    assert "norm.weight" not in found


def test_ambiguous_names_are_missing_and_say_their_candidates() -> None:
    names = ["text_model.encoder.layers.0.fc.weight", "vision_model.encoder.layers.0.fc.weight"]
    match = match_keys({"encoder.layers.0.fc.weight": (2,)}, stored(dict.fromkeys(names, (2,))))

    assert match.missing == ["encoder.layers.0.fc.weight"]
    assert match.ambiguous == {"encoder.layers.0.fc.weight": names}
    with pytest.raises(MlxconvError, match=r"could be any of text_model\S+, vision_model"):
        match.check("image_encoder")


def test_shape_decides_between_candidates() -> None:
    match = match_keys(
        {"layers.0.fc.weight": (8, 4)},
        stored({"text_model.layers.0.fc.weight": (8, 4), "vision.layers.0.fc.weight": (6, 4)}),
    )

    assert match.found == {"layers.0.fc.weight": "text_model.layers.0.fc.weight"}
    assert match.unused == ["vision.layers.0.fc.weight"]


def test_two_wanted_names_never_share_a_wrapped_tensor() -> None:
    assert pairs(["a.fc.weight", "b.fc.weight"], ["fc.weight"]) == {}


@pytest.mark.parametrize("kept", ["shared.weight", "encoder.embed_tokens.weight"])
def test_tied_weights_are_found_through_either_name(kept: str) -> None:
    wanted = {"shared.weight": (9, 4), "encoder.embed_tokens.weight": (9, 4)}
    tied = {"encoder.embed_tokens.weight": "shared.weight"}

    assert match_keys(wanted, stored({kept: (9, 4)}), tied).found == dict.fromkeys(wanted, kept)
    assert len(match_keys(wanted, stored({kept: (9, 4)})).missing) == 1


def test_check_names_keys_shapes_and_the_nearest_stored_key() -> None:
    match = match_keys(
        {"blocks.0.attn.to_q.weight": (8, 4), "norm.weight": (4,), "qqq": (1,)},
        stored({"blocks.0.attn.to_k.weight": (8, 4), "norm.weight": (6,)}),
    )

    with pytest.raises(MlxconvError) as caught:
        match.check("transformer")

    text = str(caught.value)
    assert text.startswith("transformer: tensors do not fit the model: ")
    assert "1 of wrong shape: norm.weight expected (4,) found (6,)" in text
    assert "2 missing: blocks.0.attn.to_q.weight (8, 4) (nearest stored: blocks.0.attn.to_k" in text
    assert "qqq (1,) (nothing like it is stored)" in text
    assert "\n" not in text


def test_check_shows_five_of_many_and_passes_a_full_match() -> None:
    with pytest.raises(MlxconvError, match=r"12 missing: .*, and 7 more"):
        match_keys({f"w{i}": (1,) for i in range(12)}, {}).check("vae")

    match_keys({"a": (1,)}, stored({"a": (1,)})).check("vae")


def test_thousands_of_wrapped_names_match_quickly() -> None:
    names = [f"layers.{i}.part{j}.weight" for i in range(60) for j in range(40)]

    found = pairs([f"model.language_model.{n}" for n in names], [f"model.{n}" for n in names])

    assert len(found) == 2400


def test_legacy_attention_of_a_vae_matches_as_diffusers_loads_it(tmp_path: Path) -> None:
    from diffusers import AutoencoderKL

    vae = AutoencoderKL(
        block_out_channels=(8,),
        down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",),
        norm_num_groups=4,
        layers_per_block=1,
    )
    vae.save_pretrained(tmp_path)

    def rename(key: str) -> str:
        for now, then in (("to_q", "query"), ("to_k", "key"), ("to_v", "value")):
            key = key.replace(f".{now}.", f".{then}.")
        return key.replace(".to_out.0.", ".proj_attn.")

    renamed_file(tmp_path, rename)
    tensors = open_checkpoint(tmp_path).components["vae"].tensors

    match = match_keys(shapes_of(vae), tensors)

    match.check("vae")
    assert match.unused == [] and len(match.renamed) == 16
    assert match.found["decoder.mid_block.attentions.0.to_out.0.bias"] == (
        "decoder.mid_block.attentions.0.proj_attn.bias"
    )
    reloaded = AutoencoderKL.from_pretrained(tmp_path, low_cpu_mem_usage=False).state_dict()
    for name, source in match.found.items():
        got = b"".join(map(bytes, tensors[source].chunks()))
        assert got == reloaded[name].contiguous().numpy().tobytes(), name


def test_attention_stored_as_convolutions_is_refused_as_diffusers_does() -> None:
    wanted = {"mid.attentions.0.to_q.weight": (8, 8)}

    match = match_keys(wanted, stored({"mid.attentions.0.query.weight": (8, 8, 1, 1)}))

    assert match.wrong_shape == [("mid.attentions.0.to_q.weight", (8, 8), (8, 8, 1, 1))]
    assert match.unused == []


def clip() -> tuple[Any, Any]:
    from transformers import CLIPTextConfig, CLIPTextModel

    config = CLIPTextConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        vocab_size=20, max_position_embeddings=7, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return CLIPTextModel(config), lambda key: f"text_model.{key}"


def t5() -> tuple[Any, Any]:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, vocab_size=20)
    return T5EncoderModel(config), lambda key: key


def qwen3() -> tuple[Any, Any]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, vocab_size=20, tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), lambda key: key


def qwen_vl() -> tuple[Any, Any]:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    sizes = {"hidden_size": 8, "intermediate_size": 16}
    text = sizes | {
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 20,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 0]},
    }
    vision = sizes | {"depth": 2, "num_heads": 2, "out_hidden_size": 8}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    return Qwen2_5_VLForConditionalGeneration(config), lambda key: key


def mistral3() -> tuple[Any, Any]:
    """FLUX.2's text encoder: `language_model.model.x` in files, `model.language_model.x` here."""
    from transformers import Mistral3Config, Mistral3ForConditionalGeneration

    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    text = sizes | {"model_type": "mistral", "num_key_value_heads": 1, "vocab_size": 20}
    vision = sizes | {"model_type": "pixtral", "image_size": 28, "patch_size": 14}
    config = Mistral3Config(text_config=text, vision_config=vision)
    return Mistral3ForConditionalGeneration(config), lambda key: key


@pytest.mark.parametrize("build", [clip, t5, qwen3, qwen_vl, mistral3])
def test_published_text_encoder_files_match_what_transformers_loads(
    tmp_path: Path, build: Any
) -> None:
    torch.manual_seed(0)
    module, published = build()
    folder = tmp_path / "text_encoder"
    module.save_pretrained(folder)
    renamed_file(folder, published)
    component = open_checkpoint(folder).components["text_encoder"]

    match = match_keys(shapes_of(module), component.tensors, tied_weights(module))

    match.check("text_encoder")
    assert match.unused == []
    state = component_class(component).from_pretrained(folder).state_dict()  # type: ignore[attr-defined]
    for name, source in match.found.items():
        got = b"".join(map(bytes, component.tensors[source].chunks()))
        assert got == state[name].contiguous().numpy().tobytes(), name


def test_tied_weights_are_seen_on_the_meta_device() -> None:
    with torch.device("meta"):
        module, _ = qwen3()

    assert tied_weights(module) == {"lm_head.weight": "model.embed_tokens.weight"}


def test_modules_without_transformers_declare_ties_by_identity() -> None:
    module = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    module["b"].weight = module["a"].weight

    assert tied_weights(module) == {"b.weight": "a.weight"}
