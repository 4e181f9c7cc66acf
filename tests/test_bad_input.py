"""Bad input, end to end: exit 1, one line that says what is wrong and where, nothing lost."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import struct
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from mlxconv.cli import cli
from mlxconv.convert.store import bundle as filled
from mlxconv.convert.store import writer
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.errors import MlxconvError

from .bundles import INDEX, PROGRAM, WEIGHTS, Arrays, change_json, change_tensors, copy, read_json
from .conftest import Bundles

STEM = "diffusion_pytorch_model"


def failure(*arguments: str | Path) -> str:
    """The one line that a failing command gives."""
    result = CliRunner().invoke(cli, [*map(str, arguments), "--json"])
    assert result.exit_code == 1, result.output
    assert isinstance(result.exception, MlxconvError), result.exception
    assert result.stdout == ""
    message = str(result.exception)
    assert "\n" not in message
    return message


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


@pytest.fixture
def source(flux_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny transformer that may be damaged."""
    return Path(shutil.copytree(flux_checkpoint, tmp_path / "transformer"))


@pytest.fixture
def sharded(flux_checkpoint: Path, tmp_path: Path) -> Path:
    """The same in shards."""
    from diffusers import FluxTransformer2DModel

    module = FluxTransformer2DModel.from_pretrained(str(flux_checkpoint))
    module.save_pretrained(str(tmp_path / "sharded"), max_shard_size="500KB")
    return tmp_path / "sharded"


@pytest.fixture
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused before minutes of tracing."""
    monkeypatch.delattr("mlxconv.convert.store.jobs.compile_program")


def usage_error(*arguments: str | Path) -> str:
    """What a command says of an option's value, which ends it with exit 2."""
    result = CliRunner().invoke(cli, [*map(str, arguments)])
    assert result.exit_code == 2, result.output
    return result.stderr.partition("Error: ")[2]


def convert_failure(
    source: Path, tmp_path: Path, *more: str, says: Callable[..., str] = failure
) -> str:
    """What converting it says; nothing is left behind."""
    target = tmp_path / "target"
    message = says("convert", source, "-o", target / "bundle", *more)
    assert not target.exists()
    return message


# ---- checkpoints --------------------------------------------------------------------------------


def test_a_source_that_changes_while_it_is_read_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights,) = source.glob("*.safetensors")

    def write_then_touch(*args: Any, **options: Any) -> Any:
        index = writer.write_weights(*args, **options)
        os.utime(weights)
        return index

    monkeypatch.setattr(filled, "write_weights", write_then_touch)
    message = convert_failure(source, tmp_path, "--weights-only")
    assert message.startswith(f"{weights}: changed while it was read")


def test_no_such_folder(tmp_path: Path) -> None:
    assert "no such folder" in convert_failure(tmp_path / "absent", tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "is empty; expected model_index.json" in convert_failure(tmp_path / "empty", tmp_path)


def test_a_folder_without_config(source: Path, tmp_path: Path) -> None:
    (source / "config.json").unlink()
    assert "expected model_index.json (a pipeline) or config" in convert_failure(source, tmp_path)


def test_an_unknown_class_says_how_to_add_a_recipe(source: Path, tmp_path: Path) -> None:
    change_json(source / "config.json", lambda c: {**c, "_class_name": "NoSuchTransformer"})
    message = convert_failure(source, tmp_path)
    assert "NoSuchTransformer" in message
    assert "--class MODULE:NoSuchTransformer" in message


def test_a_known_class_whose_recipe_cannot_be_derived_says_why(tmp_path: Path) -> None:
    from diffusers import LuminaNextDiT2DModel

    LuminaNextDiT2DModel(
        sample_size=8, in_channels=4, hidden_size=32, num_layers=1, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, cross_attention_dim=32,
    ).save_pretrained(str(tmp_path / "lumina"))  # fmt: skip
    message = convert_failure(tmp_path / "lumina", tmp_path)
    assert "LuminaNextDiT2DModel" in message
    assert "image_rotary_emb" in message
    assert "--recipe" in message


def test_a_missing_shard(sharded: Path, tmp_path: Path) -> None:
    name = sorted(sharded.glob("*.safetensors"))[1].name
    (sharded / name).unlink()
    assert name in convert_failure(sharded, tmp_path)


def test_a_truncated_shard(sharded: Path, tmp_path: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[1]
    os.truncate(file, file.stat().st_size - 100)
    message = convert_failure(sharded, tmp_path)
    assert file.name in message
    assert "truncated" in message


def test_an_index_that_names_an_absent_file(sharded: Path, tmp_path: Path) -> None:
    def change(index: Any) -> None:
        index["weight_map"]["proj_out.weight"] = "absent.safetensors"

    change_json(sharded / f"{STEM}.safetensors.index.json", change)
    assert "absent.safetensors" in convert_failure(sharded, tmp_path)


def test_an_index_that_leads_out_of_the_folder(sharded: Path, tmp_path: Path) -> None:
    def change(index: Any) -> None:
        index["weight_map"]["proj_out.weight"] = "../secret.safetensors"

    change_json(sharded / f"{STEM}.safetensors.index.json", change)
    assert "../secret.safetensors" in convert_failure(sharded, tmp_path)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / f"{STEM}.safetensors")
    tensors["proj_out.weight"] = tensors["proj_out.weight"][:, :-1].contiguous()
    save_file(tensors, source / f"{STEM}.safetensors")
    message = convert_failure(source, tmp_path)
    assert "proj_out.weight" in message
    assert "64" in message
    assert "63" in message


def test_a_missing_tensor_is_named(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / f"{STEM}.safetensors")
    del tensors["transformer_blocks.1.attn.to_q.bias"]
    save_file(tensors, source / f"{STEM}.safetensors")
    assert "transformer_blocks.1.attn.to_q.bias" in convert_failure(source, tmp_path)


def test_nan_weights_convert_with_a_warning_and_a_count(source: Path, tmp_path: Path) -> None:
    tensors = load_file(source / f"{STEM}.safetensors")
    tensors["proj_out.weight"][0, :3] = float("nan")
    tensors["x_embedder.bias"][1] = float("inf")
    save_file(tensors, source / f"{STEM}.safetensors")
    command = ["convert", str(source), "-o", str(tmp_path / "out"), "--q", "4bit", "--json"]
    result = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    part = data["components"]["transformer"]
    assert part["not_finite"] == {"proj_out.weight": 3, "x_embedder.bias": 1}
    assert data["warnings"] == ["transformer: 4 NaN or infinite values in 2 tensors"]


def test_duplicate_keys_in_a_header(source: Path, tmp_path: Path) -> None:
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{entry},{entry}}}".encode()
    data = struct.pack("<Q", len(header)) + header + bytes(4)
    (source / f"{STEM}.safetensors").write_bytes(data)
    assert f"{STEM}.safetensors" in convert_failure(source, tmp_path)


def test_a_header_longer_than_the_file(source: Path, tmp_path: Path) -> None:
    (source / f"{STEM}.safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"{}")
    assert f"{STEM}.safetensors" in convert_failure(source, tmp_path)


class Code:
    def __reduce__(self) -> Any:
        return (os.system, ("echo executed > executed.txt",))


def test_a_pickle_with_code_is_refused_and_not_run(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (source / f"{STEM}.safetensors").unlink()
    (source / f"{STEM}.bin").write_bytes(pickle.dumps({"weight": Code()}))
    assert f"{STEM}.bin" in convert_failure(source, tmp_path)
    assert not (tmp_path / "executed.txt").exists()


def test_a_bundle_is_no_source(flux_bundle: Bundles, tmp_path: Path) -> None:
    assert "already converted" in convert_failure(flux_bundle("bf16"), tmp_path)
    assert "already converted" in convert_failure(flux_bundle("bf16") / "transformer", tmp_path)


# ---- options ------------------------------------------------------------------------------------


def test_an_unknown_precision_lists_those_there_are(flux_checkpoint: Path, tmp_path: Path) -> None:
    message = convert_failure(flux_checkpoint, tmp_path, "--q", "7bit", says=usage_error)
    assert "unknown precision '7bit': expected one of fp32, bf16" in message
    assert "int8, int4" in message and "FILE.toml" in message


@pytest.mark.usefixtures("no_tracing")
def test_a_missing_policy_file_is_found_before_tracing(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    message = convert_failure(flux_checkpoint, tmp_path, "--q", "absent.toml", says=usage_error)
    assert "absent.toml: no such policy file" in message


@pytest.mark.parametrize("option", ["--keep", "--set"])
def test_a_pattern_that_matches_nothing_names_the_nearest(
    option: str, flux_checkpoint: Path, tmp_path: Path
) -> None:
    pattern = "transformer_blocks.*.attn.to_qq" + ("=8" if option == "--set" else "")
    message = convert_failure(flux_checkpoint, tmp_path, "--q", "4bit", option, pattern)
    assert "'transformer_blocks.*.attn.to_qq' matches no module" in message


def test_an_unknown_component_lists_those_there_are(flux_checkpoint: Path, tmp_path: Path) -> None:
    message = convert_failure(flux_checkpoint, tmp_path, "--component", "unet")
    assert "no component unet; it has transformer" in message


def test_a_size_and_a_precision_cannot_both_be_asked_for(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    more = ["--q", "4bit", "--target-size", "1"]
    assert "cannot be combined with --q" in convert_failure(flux_checkpoint, tmp_path, *more)


# ---- targets ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_tracing")
def test_an_existing_target_needs_force(flux_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("years of work")
    for more in ((), ("--force",)):  # which would not help, so that it is not named either
        message = failure("convert", flux_checkpoint, "-o", tmp_path / "out", *more)
        assert "is not a bundle" in message and "--force" not in message
    assert (tmp_path / "out" / "thesis.txt").read_text() == "years of work"


@pytest.mark.usefixtures("no_tracing")
def test_the_source_as_the_target(source: Path) -> None:
    before = files_of(source)
    assert "choose another folder" in failure("convert", source, "-o", source, "--force")
    assert "choose another folder" in failure("convert", source, "-o", source / "mlx")
    assert files_of(source) == before


def test_a_target_below_a_file(flux_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "cannot be created" in failure("convert", flux_checkpoint, "-o", tmp_path / "file/out")


def test_a_disk_without_room_is_found_before_writing(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 1000))
    assert "1,000 are free on that disk" in convert_failure(flux_checkpoint, tmp_path)


def no_space(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def broken(*_: Any, **__: Any) -> None:
    raise MlxconvError("broken midway")


@pytest.mark.parametrize(("fault", "says"), [(no_space, "the disk is full"), (broken, "midway")])
def test_an_old_bundle_stays_when_its_replacement_fails(
    fault: Callable[..., None], says: str, flux_bundle: Bundles, flux_checkpoint: Path,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    old = copy(flux_bundle("bf16"), tmp_path)
    before = files_of(old)
    monkeypatch.setattr(filled, "_write_program", fault)
    assert says in failure("convert", flux_checkpoint, "-o", old, "--q", "4bit", "--force")
    assert files_of(old) == before
    assert [p.name for p in tmp_path.iterdir()] == [old.name]


# ---- bundles ------------------------------------------------------------------------------------


@pytest.fixture
def bundle(flux_bundle: Bundles, tmp_path: Path) -> Path:
    """A copy of an fp32 bundle that may be damaged."""
    return copy(flux_bundle("fp32"), tmp_path)


def newer_manifest(bundle: Path) -> None:
    change_json(bundle / "mlxconv.json", lambda data: {**data, "version": 99})


def newer_program(bundle: Path) -> None:
    change_json(bundle / "transformer" / PROGRAM, lambda data: {**data, "version": 99})


def unknown_op(bundle: Path) -> None:
    def change(data: Any) -> None:
        data["entries"][0]["nodes"][0][0] = "teleport"

    change_json(bundle / "transformer" / PROGRAM, change)


def absent(name: str) -> Callable[[Path], None]:
    return lambda bundle: (bundle / "transformer" / name).unlink()


def truncated(bundle: Path) -> None:
    file = bundle / "transformer" / WEIGHTS
    os.truncate(file, file.stat().st_size - 10)


def tensor_gone(bundle: Path) -> None:
    def change(arrays: Arrays) -> None:
        del arrays["proj_out.weight"]

    change_tensors(bundle / "transformer", change)


def leads_out(bundle: Path) -> None:
    def change(index: Any) -> None:
        index["weight_map"]["proj_out.weight"] = "../../etc/passwd"

    change_json(bundle / "transformer" / INDEX, change)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "a newer format": (newer_manifest, "bundle format 99, this mlxconv reads 1; upgrade"),
    "a newer program": (newer_program, "program format 99, this mlxconv reads 2; upgrade"),
    "an unknown op": (unknown_op, "unknown op 'teleport'"),
    "no program": (absent(PROGRAM), "has no program.json"),
    "no index": (absent(INDEX), "model.safetensors.index.json: cannot be read"),
    "no weights": (absent(WEIGHTS), "model.safetensors: No such file"),
    "no config": (absent("config.json"), "config.json: cannot be read"),
    "a truncated file": (truncated, "copy the bundle again"),
    "a missing tensor": (tensor_gone, "tensor 'proj_out.weight' is missing"),
    "an index that leads out of the folder": (leads_out, "is not a file of this folder; refused"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_bundle_is_refused_when_it_is_run(case: str, bundle: Path) -> None:
    damage, says = BROKEN[case]
    damage(bundle)
    with pytest.raises(MlxconvError) as raised:
        mx.eval(load_component(bundle)(**inputs()))
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("case", ["no index", "no weights", "no config", "a truncated file"])
def test_a_broken_bundle_is_refused_when_it_is_verified(
    case: str, bundle: Path, flux_checkpoint: Path
) -> None:
    BROKEN[case][0](bundle)
    failure("verify", bundle, "--against", flux_checkpoint)
    failure("inspect", bundle)


def test_verify_refuses_another_checkpoint(
    flux_bundle: Bundles, source: Path, tmp_path: Path
) -> None:
    from diffusers import FluxTransformer2DModel

    config = {k: v for k, v in read_json(source / "config.json").items() if not k.startswith("_")}
    other = FluxTransformer2DModel(**{**config, "joint_attention_dim": 32})
    other.save_pretrained(str(tmp_path / "other" / "transformer"))
    message = failure("verify", flux_bundle("fp32"), "--against", tmp_path / "other/transformer")
    assert "context_embedder.weight" in message


def test_verify_refuses_what_is_no_bundle(flux_checkpoint: Path) -> None:
    assert "is not a bundle" in failure("verify", flux_checkpoint, "--against", flux_checkpoint)


def test_verify_refuses_an_unknown_component(flux_bundle: Bundles, flux_checkpoint: Path) -> None:
    command = ("verify", flux_bundle("fp32"), "--against", flux_checkpoint, "--component", "vae")
    assert "no component 'vae'; it has transformer" in failure(*command)


# ---- inputs -------------------------------------------------------------------------------------


def inputs() -> dict[str, Any]:
    shapes = {
        "hidden_states": (1, 12, 16), "encoder_hidden_states": (1, 5, 64),
        "pooled_projections": (1, 32), "img_ids": (12, 3), "txt_ids": (5, 3), "timestep": (1,),
        "guidance": (1,),
    }  # fmt: skip
    return {name: mx.zeros(shape) for name, shape in shapes.items()}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a wrong width": ({"hidden_states": mx.zeros((1, 12, 17))},
                      "has shape (1, 12, 17), expected [batch, image_tokens, 16]"),
    "a missing axis": ({"timestep": mx.zeros(())}, "timestep has shape (), expected [batch]"),
    "a missing input": ({"guidance": None}, "missing input guidance"),
    "an unknown input": ({"controlnet": mx.zeros(1)}, "traced without controlnet; it takes"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_name_the_input_and_what_was_expected(case: str, flux_bundle: Bundles) -> None:
    changed, says = WRONG[case]
    with pytest.raises(MlxconvError) as raised:
        load_component(flux_bundle("fp32"))(**{**inputs(), **changed})
    assert says in str(raised.value)


def test_sizes_that_do_not_fit_together_name_the_node(flux_bundle: Bundles) -> None:
    bad = {**inputs(), "img_ids": np.zeros((11, 3), np.float32)}
    with pytest.raises(MlxconvError, match=r"FluxTransformer2DModel"):
        mx.eval(load_component(flux_bundle("fp32"))(**bad))
