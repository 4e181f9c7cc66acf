"""Checkpoint folders: components, variants, shards, pickles, classes, configs, and bad input."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from mlxconv.convert.source.checkpoint import (
    Checkpoint,
    Component,
    component_class,
    open_checkpoint,
)
from mlxconv.convert.trace.class_config import full_config
from mlxconv.runtime.errors import MlxconvError

STEM = "diffusion_pytorch_model"


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def tiny_transformer() -> Any:
    from diffusers import DiTTransformer2DModel

    torch.manual_seed(0)
    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=4, in_channels=2, num_layers=2,
        norm_num_groups=1, sample_size=4, patch_size=2, num_embeds_ada_norm=6,
    )  # fmt: skip


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline folder: transformer in four shards, single-file vae and text encoder."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
    from transformers import T5Config, T5EncoderModel

    root = tmp_path_factory.mktemp("pipeline")
    torch.manual_seed(0)
    tiny_transformer().save_pretrained(root / "transformer", max_shard_size="8KB")
    vae = AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, latent_channels=2)
    vae.save_pretrained(root / "vae")
    t5 = T5Config(d_model=8, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=20)
    T5EncoderModel(t5).save_pretrained(root / "text_encoder")
    FlowMatchEulerDiscreteScheduler().save_pretrained(root / "scheduler")
    (root / "tokenizer").mkdir()
    (root / "tokenizer" / "tokenizer_config.json").write_text("{}")
    (root / "LICENSE.md").write_text("free")
    (root / "README.md").write_text("# tiny")
    (root / "preview.png").write_bytes(b"png")
    write_json(root / "model_index.json", {
        "_class_name": "TinyPipeline",
        "_diffusers_version": "0.42.1",
        "transformer": ["diffusers", "DiTTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "text_encoder": ["transformers", "T5EncoderModel"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "image_encoder": [None, None],
        "boundary_ratio": 0.9,
        "id2label": {"0": "cat"},
        "text_encoder_select_layers": [1, 2],
    })  # fmt: skip
    return root


@pytest.fixture
def pipeline(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "pipeline"))


@pytest.fixture
def sharded(pipeline: Path) -> Path:
    return pipeline / "transformer"


@pytest.fixture
def single(pipeline: Path) -> Path:
    return pipeline / "vae"


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def only(checkpoint: Checkpoint) -> Component:
    (component,) = checkpoint.components.values()
    return component


def fails(source: str | Path, message: str, variant: str | None = None) -> str:
    with pytest.raises(MlxconvError, match=message) as caught:
        open_checkpoint(source, variant)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Folders


def test_a_pipeline_opens_with_components_others_and_loose_files(saved: Path) -> None:
    checkpoint = open_checkpoint(saved)

    assert checkpoint.class_name == "TinyPipeline"
    assert {n: (c.library, c.class_name) for n, c in checkpoint.components.items()} == {
        "transformer": ("diffusers", "DiTTransformer2DModel"),
        "vae": ("diffusers", "AutoencoderKL"),
        "text_encoder": ("transformers", "T5EncoderModel"),
    }
    assert sorted(checkpoint.others) == ["scheduler", "tokenizer"]
    assert [p.name for p in checkpoint.loose_files] == ["LICENSE.md", "README.md"]
    assert checkpoint.skipped == {}
    assert checkpoint.components["vae"].config["block_out_channels"] == [4]


@pytest.mark.parametrize(
    ("folder", "name"), [("transformer", "transformer"), ("vae", "vae"), ("text_encoder", "te2")]
)
def test_a_single_component_gets_its_name_from_its_class(
    saved: Path, tmp_path: Path, folder: str, name: str
) -> None:
    shutil.copytree(saved / folder, tmp_path / "te2")

    checkpoint = open_checkpoint(tmp_path / "te2")

    assert (checkpoint.class_name, checkpoint.index) == (None, {})
    assert [(n, c.name) for n, c in checkpoint.components.items()] == [(name, name)]


def test_shards_hold_what_the_model_holds(saved: Path) -> None:
    component = open_checkpoint(saved).components["transformer"]
    expected = tiny_transformer().state_dict()

    assert len(component.files) > 2
    assert list(component.tensors) == sorted(expected)
    for name, tensor in component.tensors.items():
        assert tensor.name == name and tensor.dtype == "F32"
        np.testing.assert_array_equal(np.array(tensor.read()), expected[name].numpy())


def test_modular_index_and_absent_folders(pipeline: Path) -> None:
    index = json.loads((pipeline / "model_index.json").read_text())
    (pipeline / "model_index.json").unlink()
    index["vae"] += [{"pretrained_model_name_or_path": "org/name", "subfolder": "vae"}]
    index["image_encoder"] = ["transformers", "CLIPVisionModel", {}]
    write_json(pipeline / "modular_model_index.json", index)

    checkpoint = open_checkpoint(pipeline)

    assert "vae" in checkpoint.components
    assert "no such folder" in checkpoint.skipped["image_encoder"]


def test_weights_that_the_index_does_not_list_are_said_to_be_skipped(pipeline: Path) -> None:
    shutil.copytree(pipeline / "vae", pipeline / "extra")

    checkpoint = open_checkpoint(pipeline)

    assert checkpoint.skipped == {"extra": "has weights, but is not in model_index.json"}
    assert "extra" not in checkpoint.others


def test_base_classes_in_the_index_give_way_to_config_json(pipeline: Path) -> None:
    edit_json(pipeline / "model_index.json", text_encoder=["transformers", "PreTrainedModel"])

    assert open_checkpoint(pipeline).components["text_encoder"].class_name == "T5EncoderModel"


def test_custom_pipelines_give_their_class_as_a_list(pipeline: Path) -> None:
    edit_json(pipeline / "model_index.json", _class_name=["pipeline", "MyPipeline"])

    assert open_checkpoint(pipeline).class_name == "MyPipeline"


# Variants


def rename_shards(folder: Path, new_name: Callable[[str], str], index_name: str) -> None:
    """Rename the shards of a saved folder and its index consistently."""
    index_file = folder / f"{STEM}.safetensors.index.json"
    index = json.loads(index_file.read_text())
    index_file.unlink()
    for name in set(index["weight_map"].values()):
        (folder / name).rename(folder / new_name(name))
    index["weight_map"] = {k: new_name(v) for k, v in index["weight_map"].items()}
    write_json(folder / index_name, index)


def test_sharded_variants_open_as_diffusers_writes_them(tmp_path: Path) -> None:
    tiny_transformer().save_pretrained(tmp_path, variant="fp16", max_shard_size="8KB")

    component = only(open_checkpoint(tmp_path))

    assert component.variant == "fp16"
    assert component.files[0].name.startswith(f"{STEM}.fp16-00001-of-")
    assert len(component.tensors) == len(tiny_transformer().state_dict())


@pytest.mark.parametrize(
    "index_name",
    [f"{STEM}.safetensors.index.fp16.json", f"{STEM}.safetensors.fp16.index.json"],
)
def test_legacy_names_of_sharded_variants_open(sharded: Path, index_name: str) -> None:
    rename_shards(sharded, lambda n: n.replace(".safetensors", ".fp16.safetensors"), index_name)

    component = only(open_checkpoint(sharded, "fp16"))

    assert component.variant == "fp16"
    assert component.files[0].name.endswith(".fp16.safetensors")


def test_plain_files_win_unless_a_variant_is_asked_for(single: Path) -> None:
    shutil.copy(single / f"{STEM}.safetensors", single / f"{STEM}.fp16.safetensors")

    assert only(open_checkpoint(single)).variant is None
    assert only(open_checkpoint(single, "fp16")).files == [single / f"{STEM}.fp16.safetensors"]


def test_the_only_variant_is_taken_and_said(single: Path) -> None:
    (single / f"{STEM}.safetensors").rename(single / f"{STEM}.fp16.safetensors")

    assert only(open_checkpoint(single)).variant == "fp16"


def test_several_variants_must_be_chosen(single: Path) -> None:
    shutil.copy(single / f"{STEM}.safetensors", single / f"{STEM}.fp16.safetensors")
    (single / f"{STEM}.safetensors").rename(single / f"{STEM}.non_ema.safetensors")

    fails(single, "variants are fp16, non_ema, none was asked for; choose .* variant=")
    assert only(open_checkpoint(single, "non_ema")).variant == "non_ema"


def test_an_unknown_variant_is_refused(pipeline: Path, single: Path) -> None:
    fails(single, "variants are the plain files, 'fp16' was asked for", "fp16")
    fails(pipeline, "no component has weights of variant 'fp16'", "fp16")


def test_components_without_the_variant_fall_back_to_plain_files(
    pipeline: Path, single: Path
) -> None:
    shutil.copy(single / f"{STEM}.safetensors", single / f"{STEM}.fp16.safetensors")

    components = open_checkpoint(pipeline, "fp16").components

    assert (components["vae"].variant, components["transformer"].variant) == ("fp16", None)


# Formats


def test_pickles_open_without_loading_and_read_bit_for_bit(tmp_path: Path) -> None:
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    state = {
        "plain": base,
        "transposed": base.t(),
        "rows": base[1:3],
        "half": base.to(torch.bfloat16),
        "parameter": torch.nn.Parameter(base * 2),
        "count": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "repeated": base[:1].expand(3, 6),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    write_json(tmp_path / "config.json", {"architectures": ["T5EncoderModel"]})

    tensors = only(open_checkpoint(tmp_path)).tensors

    assert tensors["half"].dtype == "BF16"
    for name, tensor in state.items():
        stored = tensors[name]
        expected = tensor.detach().contiguous().view(torch.uint8 if tensor.ndim else tensor.dtype)
        assert stored.shape == tuple(tensor.shape)
        assert b"".join(map(bytes, stored.chunks(16))) == expected.numpy().tobytes(), name
        got = np.array(stored.read().astype(mx.float32))
        np.testing.assert_array_equal(got, tensor.detach().float().numpy())
    rows = np.array(tensors["transposed"].read_rows(1, 3))
    np.testing.assert_array_equal(rows, base.t()[1:3].numpy())


def test_sharded_pickles_open(tmp_path: Path) -> None:
    tiny_transformer().save_pretrained(tmp_path, safe_serialization=False, max_shard_size="8KB")

    component = only(open_checkpoint(tmp_path))

    assert {f.suffix for f in component.files} == {".bin"} and len(component.files) > 2
    expected = tiny_transformer().state_dict()
    assert list(component.tensors) == sorted(expected)
    for name, tensor in component.tensors.items():
        np.testing.assert_array_equal(np.array(tensor.read()), expected[name].numpy())


def test_safetensors_win_over_pickles_and_other_formats_are_ignored(single: Path) -> None:
    torch.save({"other": torch.zeros(1)}, single / f"{STEM}.bin")
    for name in ("flax_model.msgpack", "model.onnx", "openvino_model.bin", "model.flashpack"):
        (single / name).write_bytes(b"x")

    assert [f.name for f in only(open_checkpoint(single)).files] == [f"{STEM}.safetensors"]


def test_complete_shards_open_without_an_index(sharded: Path) -> None:
    expected = list(only(open_checkpoint(sharded)).tensors)
    (sharded / f"{STEM}.safetensors.index.json").unlink()

    assert list(only(open_checkpoint(sharded)).tensors) == expected
    sorted(sharded.glob("*.safetensors"))[1].unlink()
    fails(sharded, "shard 2 of .* is missing")


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.mark),))


def test_pickles_with_code_are_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"a": Evil(tmp_path / "mark")}, tmp_path / "pytorch_model.bin")
    write_json(tmp_path / "config.json", {"architectures": ["T5EncoderModel"]})

    text = fails(tmp_path, "pytorch_model.bin: refused: this pickle holds code.* safetensors")

    assert not (tmp_path / "mark").exists()
    assert len(text) < 500


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda f: f.write_bytes(b"not a pickle"), "pytorch_model.bin: "),
        (lambda f: f.write_bytes(b""), "pytorch_model.bin: "),
        (lambda f: f.write_bytes(pickle.dumps({"a": 1})), "pytorch_model.bin: "),
        (lambda f: torch.save([1, 2], f), "holds a list, expected a dict"),
        (lambda f: torch.save({"a": 3}, f), "'a' is int, expected a plain tensor"),
        (lambda f: torch.save({"a": torch.eye(2).to_sparse()}, f), "'a' is|refused"),
        (
            lambda f: torch.save({"a": torch.eye(2)}, f, _use_new_zipfile_serialization=False),
            "not a PyTorch weight file of torch 1.6 or later",
        ),
    ],
)
def test_other_pickles_are_refused_by_name(
    tmp_path: Path, content: Callable[[Path], Any], message: str
) -> None:
    content(tmp_path / "pytorch_model.bin")
    write_json(tmp_path / "config.json", {"architectures": ["T5EncoderModel"]})

    fails(tmp_path, message)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damaged_pickles_never_raise_anything_else(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.randn(3, 4), "b": torch.randn(4)}, file)
    write_json(tmp_path / "config.json", {"architectures": ["T5EncoderModel"]})
    whole = file.read_bytes()
    draw = random.Random(0)
    outcomes = set()
    for _ in range(200):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            outcomes.add(len([t.read() for t in only(open_checkpoint(tmp_path)).tensors.values()]))
        except MlxconvError as error:
            assert "\n" not in str(error)
            outcomes.add(-1)

    assert -1 in outcomes


def test_a_truncated_pickle_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.zeros(1000)}, file)
    file.write_bytes(file.read_bytes()[:2000])
    write_json(tmp_path / "config.json", {"architectures": ["T5EncoderModel"]})

    fails(tmp_path, "pytorch_model.bin: not a PyTorch weight file")


# Classes and configs


def test_component_classes_are_those_of_the_libraries(saved: Path) -> None:
    classes = {n: component_class(c).__name__ for n, c in open_checkpoint(saved).components.items()}

    assert classes == {
        "transformer": "DiTTransformer2DModel",
        "vae": "AutoencoderKL",
        "text_encoder": "T5EncoderModel",
    }


@pytest.mark.parametrize("given", ["NoSuchModel", "__version__", "FlowMatchEulerDiscreteScheduler"])
def test_an_unknown_class_says_how_to_name_ones_own(single: Path, given: str) -> None:
    edit_json(single / "config.json", _class_name=given)
    component = only(open_checkpoint(single))

    says = rf"{given}.*of your own is converted by: mlxconv convert .* --class MODULE:{given}$"
    with pytest.raises(MlxconvError, match=says):
        component_class(component)


def test_an_unknown_library_is_named(pipeline: Path) -> None:
    edit_json(pipeline / "model_index.json", vae=["my_code", "MyVae"])
    component = open_checkpoint(pipeline).components["vae"]

    with pytest.raises(MlxconvError, match=r"library 'my_code' is neither.*--class my_code:MyVae"):
        component_class(component)


def test_pipeline_modules_are_libraries_too(pipeline: Path) -> None:
    edit_json(
        pipeline / "model_index.json", vae=["stable_diffusion", "StableDiffusionSafetyChecker"]
    )
    component = open_checkpoint(pipeline).components["vae"]

    assert component_class(component).__name__ == "StableDiffusionSafetyChecker"


@pytest.mark.parametrize(
    ("norm_type", "expected"),
    [
        ("ada_norm_zero", "DiTTransformer2DModel"),
        ("ada_norm_single", "PixArtTransformer2DModel"),
        ("layer_norm", "Transformer2DModel"),
    ],
)
def test_legacy_class_names_are_replaced_as_diffusers_does(
    sharded: Path, norm_type: str, expected: str
) -> None:
    edit_json(sharded / "config.json", _class_name="Transformer2DModel", norm_type=norm_type)

    component = only(open_checkpoint(sharded))

    assert component.class_name == expected
    assert component_class(component).__name__ == expected
    assert full_config(component)["_class_name"] == expected


@pytest.mark.parametrize("name", ["transformer", "vae"])
def test_the_merged_config_is_what_diffusers_builds_from(saved: Path, name: str) -> None:
    component = open_checkpoint(saved).components[name]
    keep = {"_class_name", "_diffusers_version", "norm_num_groups", "block_out_channels"}
    keep |= {"attention_head_dim", "num_layers"}
    component.config = {k: v for k, v in component.config.items() if k in keep}
    component.config["not_an_argument"] = 3

    merged = full_config(component)

    cls: Any = component_class(component)
    built = {k: v for k, v in cls.from_config(component.config).config.items() if k[0] != "_"}
    built.pop("not_an_argument", None)
    assert {k: v for k, v in merged.items() if k[0] != "_"} == json.loads(json.dumps(built))
    assert merged["_class_name"] == component.class_name
    assert merged["_diffusers_version"] == component.config["_diffusers_version"]


def test_transformers_defaults_are_filled_in(pipeline: Path) -> None:
    config_file = pipeline / "text_encoder" / "config.json"
    config = json.loads(config_file.read_text())
    config.pop("relative_attention_num_buckets")
    write_json(config_file, config)

    merged = full_config(open_checkpoint(pipeline).components["text_encoder"])

    assert merged["relative_attention_num_buckets"] == 32
    assert merged["d_model"] == 8
    json.dumps(merged)


def test_a_missing_required_argument_is_named(single: Path) -> None:
    component = only(open_checkpoint(single))
    component.class_name = "AutoencoderKLHunyuanImage"

    with pytest.raises(
        MlxconvError,
        match=r"AutoencoderKLHunyuanImage needs .*spatial_compression_ratio, .* have no default",
    ):
        full_config(component)


def test_opening_imports_neither_diffusers_nor_torch(saved: Path) -> None:
    code = (
        "import sys; from mlxconv.convert.source.checkpoint import open_checkpoint;"
        f"open_checkpoint({str(saved)!r});"
        "print([m for m in ('torch', 'diffusers', 'transformers') if m in sys.modules])"
    )

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


# Bad input


def test_no_such_folder(tmp_path: Path) -> None:
    fails(tmp_path / "nothing", "nothing: no such folder; check the path")
    fails("org/some-model.1", "no such folder; check the path, or give a repository of the Hub")


def test_a_file_is_no_folder(single: Path) -> None:
    fails(single / f"{STEM}.safetensors", "is a file, expected a folder.* from_single_file")
    fails(single / "config.json", f"is a file, expected a folder.*give its folder, {single},")


@pytest.mark.parametrize("name", ["pytorch_lora_weights.safetensors", "adapter_config.json"])
def test_a_lora_is_no_model(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"{}")
    fails(tmp_path, f"holds a LoRA .{name}., not a model; .* call fuse_lora")


def test_an_empty_folder(tmp_path: Path) -> None:
    fails(tmp_path, "is empty; expected model_index.json")


def test_a_folder_without_config(single: Path, pipeline: Path) -> None:
    (single / "config.json").unlink()

    fails(single, f"holds {STEM}.safetensors; expected .* config.json")
    fails(pipeline, "vae: has weights but no config.json")


def test_a_component_without_weights(single: Path, pipeline: Path) -> None:
    (single / f"{STEM}.safetensors").rename(single / "flax_model.msgpack")

    fails(single, "no PyTorch weights; .* found config.json, flax_model.msgpack")
    fails(pipeline, "vae: no PyTorch weights")


def test_an_index_of_nothing(tmp_path: Path) -> None:
    write_json(tmp_path / "model_index.json", {"_class_name": "P", "vae": ["diffusers", "A"]})

    fails(tmp_path, "no component with weights: vae: listed in model_index.json, but there is no")


@pytest.mark.parametrize("name", ["../x", "..", "a/b"])
def test_a_component_name_is_a_folder_name(pipeline: Path, name: str) -> None:
    edit_json(pipeline / "model_index.json", **{name: ["diffusers", "AutoencoderKL"]})

    fails(pipeline, "is not a folder's name")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "config.json: is not JSON"),
        ("\xff", "config.json: not UTF-8 text"),
        ("[1]", "holds a JSON list, expected an object"),
        ('{"a": 1}', "has neither _class_name .* nor architectures"),
        ('{"_class_name": 3}', "has neither _class_name"),
        ('{"_class_name": "A(b); import os"}', "is not a Python identifier"),
    ],
)
def test_a_bad_config(single: Path, text: str, message: str) -> None:
    (single / "config.json").write_text(text, encoding="latin-1")

    fails(single, message)


def test_a_missing_shard(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[0]
    gone.unlink()

    fails(sharded, f"index.json: names '{gone.name}', which is not in the folder")


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-4])

    fails(sharded, f"{shard.name}: header describes .* it is truncated, download it again")


def edit_map(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / f"{STEM}.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"] |= changes
    write_json(file, index)


def test_an_index_that_names_a_tensor_which_its_shard_lacks(sharded: Path) -> None:
    first, second = sorted(p.name for p in sharded.glob("*.safetensors"))[:2]
    edit_map(sharded, {"new.weight": first})
    fails(sharded, f"says that 'new.weight' is in '{first}', which lacks it")

    name = next(iter(load_file(sharded / second)))
    edit_map(sharded, {"new.weight": second, name: first})
    fails(sharded, "which lacks it")


def test_a_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    tensors = load_file(second)
    name, tensor = next(iter(load_file(first).items()))
    save_file(tensors | {name: tensor}, second, metadata={"format": "pt"})

    fails(sharded, f"'{name}' is also in {first.name}")


@pytest.mark.parametrize("bad", ["../x.safetensors", "/etc/passwd", "a\\b", "..", "", "C:x", 3])
def test_an_index_that_leads_out_of_the_folder(sharded: Path, bad: Any) -> None:
    edit_map(sharded, {"new.weight": bad})

    fails(sharded, "index.json: 'new.weight' is listed in .* refused, get the index")


@pytest.mark.parametrize("value", [[], {}, {"weight_map": {}}, {"weight_map": [1]}])
def test_an_index_without_a_map(sharded: Path, value: Any) -> None:
    write_json(sharded / f"{STEM}.safetensors.index.json", value)

    fails(sharded, "index.json: (has no weight_map|holds a JSON list)")


def test_symlinks_are_followed_as_the_hub_cache_needs(single: Path, tmp_path: Path) -> None:
    file = single / f"{STEM}.safetensors"
    file.rename(tmp_path / "blob")
    file.symlink_to(tmp_path / "blob")

    assert only(open_checkpoint(single)).files == [file]


def test_quantized_checkpoints_are_refused(single: Path) -> None:
    edit_json(single / "config.json", quantization_config={"quant_method": "bitsandbytes"})

    fails(single, r"quantization_config \(bitsandbytes\).* give the bf16 or fp16 checkpoint")


def test_an_empty_quantization_config_means_nothing(single: Path) -> None:
    edit_json(single / "config.json", quantization_config=None)

    assert only(open_checkpoint(single)).name == "vae"


def test_bundles_are_no_source(pipeline: Path, single: Path) -> None:
    (pipeline / "mlxconv.json").write_text("{}")

    fails(pipeline, "is an mlxconv bundle .* give the original diffusers checkpoint")
    fails(single, "vae: is an mlxconv bundle")


@pytest.mark.parametrize("key", ["quantization", "mlxconv"])
def test_configs_of_mlx_are_no_source(single: Path, key: str) -> None:
    edit_json(single / "config.json", **{key: {"bits": 4}, "quantization_config": {"bits": 4}})

    fails(single, f"has the entry '{key}', so these weights are already converted for MLX")


def test_weights_marked_as_mlx_are_no_source(single: Path) -> None:
    save_file({"a": torch.zeros(1)}, single / f"{STEM}.safetensors", metadata={"format": "mlx"})

    fails(single, r"already MLX's \(metadata format: mlx\)")


@pytest.mark.parametrize(
    "scale", ["a.weight_scale", "a.scale_weight", "a.weight_scale_inv", "scaled_fp8"]
)
def test_float8_with_scales_is_refused(single: Path, scale: str) -> None:
    weight = torch.zeros(2, 2).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight, scale: torch.ones(1)}, single / f"{STEM}.safetensors")

    fails(single, f"'a.weight' is F8_E4M3 with a scale in '{scale}'")


def test_plain_float8_and_unrelated_scales_are_accepted(single: Path) -> None:
    weight = torch.ones(2, 2).to(torch.float8_e5m2)
    save_file({"a.weight": weight, "logit_scale": torch.ones(1)}, single / f"{STEM}.safetensors")

    assert only(open_checkpoint(single)).tensors["a.weight"].read().tolist() == [[1, 1], [1, 1]]
