"""into_diffusers takes the model that the bundle was made from, and refuses one that differs."""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch

from mlxconv.convert.conversion import convert
from mlxconv.convert.into_diffusers.parameters import BundleParameter
from mlxconv.convert.into_diffusers.replace import into_diffusers
from mlxconv.runtime.errors import MlxconvError

from ...conftest import Bundles
from .whole_pipelines import run

CALL = {"max_sequence_length": 16}


def load(folder: Path) -> Any:
    return diffusers.FluxPipeline.from_pretrained(folder)


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of the tiny FLUX's attention, as trainers save it."""
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for name in ("to_q", "to_out.0"):
        base = f"transformer.transformer_blocks.0.attn.{name}"
        tensors[f"{base}.lora_A.weight"] = torch.randn(2, 64, generator=generator)
        tensors[f"{base}.lora_B.weight"] = torch.randn(64, 2, generator=generator)
    from safetensors.torch import save_file

    file = tmp_path_factory.mktemp("lora") / "pytorch_lora_weights.safetensors"
    save_file(tensors, file)
    return file


@pytest.fixture(scope="module")
def replaced(pipeline_checkpoint: Path, pipeline_bundle: Bundles) -> Any:
    pipe = load(pipeline_checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        into_diffusers(pipe, pipeline_bundle("fp32"))
    return pipe


# ---- before -------------------------------------------------------------------------------------


def test_an_active_lora_is_refused_and_the_hint_carries_it(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, lora: Path, tmp_path: Path
) -> None:
    pipe = load(pipeline_checkpoint)
    pipe.load_lora_weights(lora.parent, adapter_name="style")
    wanted = run(pipe, CALL)
    with pytest.raises(MlxconvError, match=r"transformer: has the LoRA 'style'") as refused:
        into_diffusers(pipe, pipeline_bundle("fp32"))
    assert not any(isinstance(p, BundleParameter) for p in pipe.text_encoder.parameters())
    hint = re.search(r"convert it fused: (.*), then mlxconv convert FOLDER", str(refused.value))
    assert hint is not None
    exec(hint[1], {"pipe": pipe, "FOLDER": tmp_path / "fused"})
    convert(tmp_path / "fused", tmp_path / "bundle", "fp32", components=["transformer"])
    fused = load(tmp_path / "fused")
    assert not np.allclose(run(load(pipeline_checkpoint), CALL), wanted, atol=1e-2)
    into_diffusers(fused, tmp_path / "bundle")
    assert np.abs(run(fused, CALL) - wanted).max() <= 1e-3


def test_fused_weights_that_the_bundle_has_not_are_noted(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, lora: Path
) -> None:
    for q in ("fp32", "4bit"):
        pipe = load(pipeline_checkpoint)
        pipe.load_lora_weights(lora.parent)
        pipe.fuse_lora()
        pipe.unload_lora_weights()
        with pytest.warns(UserWarning, match="weights are not those that the bundle was made from"):
            into_diffusers(pipe, pipeline_bundle(q), components=["transformer"])


@pytest.mark.parametrize("q", ["4bit", "bf16"])
def test_what_rounding_changes_is_not_noted(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, q: str
) -> None:
    pipe = load(pipeline_checkpoint)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        into_diffusers(pipe, pipeline_bundle(q))


def test_another_configuration_is_refused(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, tmp_path: Path
) -> None:
    source = shutil.copytree(pipeline_checkpoint, tmp_path / "other")
    file = source / "transformer" / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["axes_dims_rope"] = config["axes_dims_rope"][::-1]
    file.write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(MlxconvError, match=r"transformer: .* configuration has axes_dims_rope ="):
        into_diffusers(load(source), pipeline_bundle("fp32"))


def test_changed_modules_are_refused(pipeline_checkpoint: Path, pipeline_bundle: Bundles) -> None:
    pipe = load(pipeline_checkpoint)
    pipe.text_encoder.resize_token_embeddings(200)  # as textual inversion does
    pipe.text_encoder.config.vocab_size = 92
    with pytest.raises(MlxconvError, match=r"text_encoder.*config.*vocab_size|embed.* is \("):
        into_diffusers(pipe, pipeline_bundle("fp32"), components=["text_encoder"])
    pipe.transformer.register_module("image_adapter", torch.nn.Linear(4, 4))
    with pytest.raises(MlxconvError, match=r"has the weight image_adapter.weight, the bundle"):
        into_diffusers(pipe, pipeline_bundle("fp32"), components=["transformer"])


def test_offloading_is_set_up_afterwards(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles
) -> None:
    from accelerate import cpu_offload_with_hook

    pipe = load(pipeline_checkpoint)
    wanted = run(pipe, CALL)
    cpu_offload_with_hook(pipe.transformer, "cpu")
    with pytest.raises(MlxconvError, match=r"call pipe.remove_all_hooks\(\) before"):
        into_diffusers(pipe, pipeline_bundle("fp32"), components=["transformer"])
    pipe.remove_all_hooks()
    into_diffusers(pipe, pipeline_bundle("fp32"), components=["transformer"])
    cpu_offload_with_hook(pipe.transformer, "cpu")
    assert np.abs(run(pipe, CALL) - wanted).max() <= 1e-3


# ---- afterwards ---------------------------------------------------------------------------------


def test_a_lora_afterwards_is_refused(replaced: Any, lora: Path) -> None:
    from peft import LoraConfig

    with pytest.raises(MlxconvError, match=r"transformer: takes no LoRA.* pipe.fuse_lora\(\);"):
        replaced.load_lora_weights(lora.parent)
    with pytest.raises(MlxconvError, match="text_encoder: takes no LoRA"):
        replaced.text_encoder.add_adapter(LoraConfig(target_modules=["q_proj"]))
    assert replaced.get_list_adapters() == {}
    replaced.unload_lora_weights()


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.fuse_qkv_projections(),
        lambda model: setattr(model, "proj_out", torch.nn.Linear(64, 64)),
        lambda model: setattr(model.proj_out, "weight", torch.nn.Parameter(torch.zeros(64, 64))),
    ],
)
def test_a_change_afterwards_is_refused(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, change: Callable[[Any], Any]
) -> None:
    pipe = load(pipeline_checkpoint)
    into_diffusers(pipe, pipeline_bundle("fp32"), components=["transformer"])
    change(pipe.transformer)
    with pytest.raises(MlxconvError, match="was changed after into_diffusers"):
        run(pipe, CALL)


def test_what_pipelines_are_asked_for_works(
    replaced: Any, pipeline_checkpoint: Path, pipeline_bundle: Bundles, tmp_path: Path
) -> None:
    plain = load(pipeline_checkpoint)
    wanted = run(plain, CALL)
    assert np.abs(run(replaced, CALL) - wanted).max() <= 1e-3
    assert replaced.components.keys() == plain.components.keys()
    assert replaced.transformer.num_parameters() == plain.transformer.num_parameters()
    other = diffusers.FluxImg2ImgPipeline.from_pipe(replaced)
    assert other.transformer is replaced.transformer
    replaced.save_pretrained(tmp_path / "saved")
    assert np.array_equal(run(load(tmp_path / "saved"), CALL), wanted)
    into_diffusers(replaced, pipeline_bundle("fp32"))  # once more
    replaced.to(torch.bfloat16).to(torch.float32).to("cpu")
    assert np.abs(run(replaced, CALL) - wanted).max() <= 1e-3
