"""Parameters whose data is in a bundle: read like any other, never written."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from mlxconv.convert.into_diffusers.parameters import BundleParameter, StoredWeights, give_to_bundle
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.errors import MlxconvError

from ...conftest import Bundles

Given = tuple[Any, dict[str, torch.Tensor]]


@pytest.fixture
def given(pipeline_checkpoint: Path, pipeline_bundle: Bundles) -> Given:
    """A T5 (whose embedding has two names) without its weights, and what they were."""
    folder = pipeline_checkpoint / "text_encoder_2"
    module = transformers.T5EncoderModel.from_pretrained(str(folder))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    loaded = load_component(pipeline_bundle("fp32"), "text_encoder_2")
    give_to_bundle(module, StoredWeights(loaded, "text_encoder_2"))
    return module, before


def test_the_weights_are_freed(pipeline_checkpoint: Path, pipeline_bundle: Bundles) -> None:
    folder = pipeline_checkpoint / "text_encoder"
    module = transformers.CLIPTextModel.from_pretrained(str(folder))
    held = [weakref.ref(parameter) for parameter in module.parameters()]
    loaded = load_component(pipeline_bundle("fp32"), "text_encoder")
    give_to_bundle(module, StoredWeights(loaded, "text_encoder"))
    gc.collect()
    assert held and not [ref for ref in held if ref() is not None]


def test_what_is_read_is_the_bundle_s_weight(given: Given) -> None:
    module, before = given
    weight = module.shared.weight
    assert isinstance(weight, BundleParameter) and isinstance(weight, torch.nn.Parameter)
    assert weight is module.encoder.embed_tokens.weight
    assert (weight.shape, weight.dtype) == (before["shared.weight"].shape, torch.float32)
    assert module.num_parameters() == sum(
        {id(v): v.numel() for k, v in before.items() if k != "encoder.embed_tokens.weight"}.values()
    )
    ids = torch.tensor([[3, 1, 4]])
    assert torch.equal(module.get_input_embeddings()(ids), before["shared.weight"][ids])
    assert torch.equal(weight[2, :4], before["shared.weight"][2, :4])
    assert weight.numpy().sum() == before["shared.weight"].numpy().sum()


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_of_dtype_reads_nothing(given: Given, inference: bool) -> None:
    module, before = given
    with torch.inference_mode(inference):
        module.to(torch.bfloat16)
    assert module.dtype == torch.bfloat16
    assert type(module.shared.weight) is BundleParameter
    found = module.shared.weight.float()
    assert isinstance(found, BundleParameter)
    rounded = before["shared.weight"].bfloat16()
    assert torch.equal(module.shared.weight + 0, rounded)


def test_saving_writes_the_weights(given: Given, tmp_path: Path) -> None:
    module, before = given
    state = module.state_dict()
    assert {name: type(value) for name, value in state.items()} == dict.fromkeys(
        before, torch.Tensor
    )
    module.save_pretrained(tmp_path)
    again = transformers.T5EncoderModel.from_pretrained(str(tmp_path)).state_dict()
    assert again.keys() == before.keys()
    assert all(torch.equal(again[name], value) for name, value in before.items())


def test_writing_is_refused(given: Given) -> None:
    module, before = given
    weight = module.shared.weight
    with torch.no_grad():
        for write in (
            lambda: weight.mul_(2),
            lambda: weight.data.copy_(torch.zeros(1)),
            lambda: weight.__setitem__(0, 0),
            lambda: weight.data.__setitem__(0, 0),
            lambda: weight.data.view(-1).__setitem__(0, 1),
            lambda: weight.data.view(-1)[0].fill_(1),
            lambda: weight[0].copy_(weight[1]),
            lambda: weight.t().add_(1),
            lambda: weight.flatten().mul_(2),
            lambda: torch.add(weight, 1, out=weight.data),
            lambda: torch.nn.init.zeros_(weight),
            lambda: weight.view(-1).numpy().__setitem__(0, 1),
            lambda: weight.numpy().__setitem__(0, 1),
            lambda: np.asarray(weight.detach().cpu()).__setitem__(0, 1),
            lambda: setattr(weight, "data", torch.zeros(3)),
            lambda: module.load_state_dict(before),
        ):
            refused = "its data is in the bundle|destination is read-only"
            with pytest.raises((MlxconvError, RuntimeError, ValueError), match=refused):
                write()
    assert torch.equal(weight + 0, before["shared.weight"])


def test_a_buffer_is_not_written_to_either() -> None:
    module = torch.nn.BatchNorm1d(4)
    stored: Any = SimpleNamespace(
        names={"running_mean"}, label="vae", read=lambda name: torch.ones(4)
    )
    give_to_bundle(module, stored)
    assert torch.equal(module.running_mean.view(1, -1) + 0, torch.ones(1, 4))
    assert type(module.state_dict()["running_mean"]) is torch.Tensor
    with pytest.raises(MlxconvError, match="vae: running_mean cannot be changed"):
        module.running_mean.add_(1)


def test_a_copy_reads_the_same(given: Given) -> None:
    module, before = given
    copied = copy.deepcopy(module)
    assert copied.shared.weight is copied.encoder.embed_tokens.weight
    assert torch.equal(copied.shared.weight + 0, before["shared.weight"])
