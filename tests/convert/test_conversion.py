"""What a conversion writes: the bundle's layout, its tensors, and what each option changes."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file

import mlxconv
from mlxconv.cli import cli
from mlxconv.convert.conversion import convert
from mlxconv.convert.report import ConvertReport
from mlxconv.convert.verify.verify import verify
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.stored import load_program

from ..bundles import INDEX, PROGRAM, WEIGHTS, read_json, tensors
from ..conftest import Bundles


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


# ---- layout -------------------------------------------------------------------------------------


def test_a_bundle_is_laid_out_as_its_checkpoint(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles
) -> None:
    bundle = pipeline_bundle("4bit")
    folders = {p.name for p in pipeline_checkpoint.iterdir() if p.is_dir()}
    assert {p.name for p in bundle.iterdir() if p.is_dir()} == folders
    assert {p.name for p in bundle.iterdir() if p.is_file()} == {
        "LICENSE.md", "config.json", "mlxconv.json", "model_index.json",
    }  # fmt: skip
    for name in ("model_index.json", "scheduler/scheduler_config.json", "LICENSE.md"):
        assert (bundle / name).read_bytes() == (pipeline_checkpoint / name).read_bytes()
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        files = {p.name for p in (bundle / name).iterdir()}
        assert files >= {"config.json", WEIGHTS, INDEX, PROGRAM}


def test_tokenizers_can_be_read_without_transformers(pipeline_bundle: Bundles) -> None:
    from tokenizers import Tokenizer

    for name in ("tokenizer", "tokenizer_2"):
        file = pipeline_bundle("4bit") / name / "tokenizer.json"
        assert len(Tokenizer.from_file(str(file)).encode("a cat on a sofa").ids) > 5


def test_a_tokenizer_of_vocabulary_files_becomes_one_file(
    pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    """Older checkpoints have vocab.json and merges.txt only."""
    from tokenizers import Tokenizer

    source = Path(shutil.copytree(pipeline_checkpoint, tmp_path / "source"))
    file = source / "tokenizer" / "tokenizer.json"
    model = read_json(file)["model"]
    (file.parent / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (file.parent / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    expected = Tokenizer.from_file(str(file)).encode("a cat on a sofa").ids
    file.unlink()
    report = convert(source, tmp_path / "out", components=("vae",))
    assert report.warnings == []
    made = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json"))
    assert made.encode("a cat on a sofa").ids == expected


def test_config_json_is_the_merged_one_with_how_it_was_converted(
    flux_checkpoint: Path, flux_bundle: Bundles
) -> None:
    config = read_json(flux_bundle("4bit") / "transformer" / "config.json")
    stored = read_json(flux_checkpoint / "config.json")
    assert config.items() >= {k: v for k, v in stored.items() if v is not None}.items()
    assert config["patch_size"] == 1
    sizes = config["mlxconv"].pop("sizes")
    assert config["mlxconv"] == {"version": 1, "dtype": "bfloat16"}
    assert sizes["dims"] == {"batch": 2, "image_tokens": 26, "text_tokens": 11}
    assert sizes["pixels"]["image_tokens"] == "(H // 16) * (W // 16)"
    assert config["quantization"] == config["quantization_config"]
    assert config["quantization"].items() >= {"bits": 4, "group_size": 64, "mode": "affine"}.items()
    assert config["quantization"]["transformer_blocks.0.norm1.linear"]["bits"] == 8


def test_defaults_of_the_constructor_are_written(flux_checkpoint: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(flux_checkpoint, tmp_path / "transformer"))
    config = read_json(source / "config.json")
    del config["patch_size"], config["out_channels"]
    (source / "config.json").write_text(json.dumps(config), encoding="utf-8")
    convert(source, tmp_path / "out")
    assert read_json(tmp_path / "out/transformer/config.json")["patch_size"] == 1


def test_an_unquantized_bundle_has_no_quantization(flux_bundle: Bundles) -> None:
    config = read_json(flux_bundle("bf16") / "transformer" / "config.json")
    assert not {"quantization", "quantization_config"} & config.keys()


def test_the_manifest_says_where_it_came_from(flux_checkpoint: Path, tmp_path: Path) -> None:
    command = "mlxconv convert transformer -o out"
    convert(flux_checkpoint, tmp_path / "out", "4bit", command=command)
    manifest = read_json(tmp_path / "out" / "mlxconv.json")
    assert manifest["source"] == str(flux_checkpoint)
    assert manifest["command"] == command
    assert manifest["versions"].keys() >= {"python", "mlx", "torch", "diffusers", "mlxconv"}
    assert manifest["components"]["transformer"]["class"] == "FluxTransformer2DModel"
    assert (manifest["format"], manifest["version"]) == ("mlxconv-bundle", 1)


def test_the_revision_is_that_of_the_hub_cache(flux_checkpoint: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--me--flux" / "snapshots" / "0123abc"
    shutil.copytree(flux_checkpoint, snapshot)
    assert convert(snapshot, tmp_path / "out").revision == "0123abc"


def test_two_conversions_are_byte_identical(
    flux_checkpoint: Path, flux_bundle: Bundles, tmp_path: Path
) -> None:
    convert(flux_checkpoint, tmp_path / "again", "4bit")
    for name in (WEIGHTS, INDEX, PROGRAM, "config.json"):
        again = (tmp_path / "again" / "transformer" / name).read_bytes()
        assert again == (flux_bundle("4bit") / "transformer" / name).read_bytes()


# ---- tensors ------------------------------------------------------------------------------------


def test_weights_keep_the_names_of_diffusers(flux_checkpoint: Path, flux_bundle: Bundles) -> None:
    stored = load_file(flux_checkpoint / "diffusion_pytorch_model.safetensors")
    made = tensors(flux_bundle("fp32") / "transformer")
    assert made.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_array_equal(np.array(made[name]), value.numpy())


def test_convolutions_are_channels_last(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles
) -> None:
    name = "decoder.conv_in.weight"
    stored = load_file(pipeline_checkpoint / "vae" / "diffusion_pytorch_model.safetensors")[name]
    made = tensors(pipeline_bundle("bf16") / "vae")[name]
    expected = stored.to(torch.bfloat16).float().numpy().transpose(0, 2, 3, 1)
    np.testing.assert_array_equal(np.array(made.astype(mx.float32)), expected)


def test_plain_mlx_reads_a_quantized_linear(flux_checkpoint: Path, flux_bundle: Bundles) -> None:
    """`mx.load` and `nn.QuantizedLinear`, with what config.json says, and nothing of ours."""
    folder, name = flux_bundle("8bit") / "transformer", "single_transformer_blocks.0.proj_mlp"
    spec, made = read_json(folder / "config.json")["quantization"], tensors(folder)
    rows, packed = made[f"{name}.weight"].shape
    layer = nn.QuantizedLinear(
        packed * 32 // spec["bits"], rows, group_size=spec["group_size"], bits=spec["bits"]
    )
    parts = ("weight", "scales", "biases", "bias")
    layer.load_weights([(p, made[f"{name}.{p}"].astype(
        mx.uint32 if p == "weight" else mx.float32)) for p in parts])  # fmt: skip
    x = np.random.default_rng(0).standard_normal((3, packed * 32 // spec["bits"]), np.float32)
    stored = load_file(flux_checkpoint / "diffusion_pytorch_model.safetensors")
    expected = x @ stored[f"{name}.weight"].numpy().T + stored[f"{name}.bias"].numpy()
    found = np.array(layer(mx.array(x)))
    assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-2


@pytest.mark.parametrize(
    "q", ["6bit", "5bit", "3bit", "2bit", "mxfp8", "mxfp4", "nvfp4", "fp16"]
)  # fmt: skip
def test_every_precision_converts_loads_and_runs(
    q: str, flux_checkpoint: Path, tmp_path: Path
) -> None:
    report = convert(flux_checkpoint, tmp_path / q, q)
    assert (report.components["transformer"].quantized > 0) == (q != "fp16")
    checked = verify(tmp_path / q, flux_checkpoint)
    assert checked.passed, checked.as_text()


def test_more_bits_are_never_worse(flux_checkpoint: Path, tmp_path: Path) -> None:
    errors = []
    for q in ("2bit", "3bit", "4bit", "5bit", "6bit", "8bit"):
        convert(flux_checkpoint, tmp_path / q, q)
        errors.append(verify(tmp_path / q, flux_checkpoint).tiers[0].rel_l2)
    assert errors == sorted(errors, reverse=True)


# ---- options ------------------------------------------------------------------------------------


def of(report: ConvertReport) -> dict[str, tuple[str, int]]:
    """What became of each component: its status, and how many matrices were quantized."""
    return {name: (part.status, part.quantized) for name, part in report.components.items()}


def test_the_precision_is_that_of_the_denoiser(pipeline_checkpoint: Path, tmp_path: Path) -> None:
    report = convert(pipeline_checkpoint, tmp_path / "out", "4bit", dry_run=True)
    quantized = {name for name, (_, count) in of(report).items() if count}
    assert quantized == {"transformer"}
    bits = {name: part.bits_per_weight for name, part in report.components.items()}
    assert bits["vae"] == bits["text_encoder_2"] == 16


def test_floats_are_for_every_component(pipeline_checkpoint: Path, tmp_path: Path) -> None:
    report = convert(pipeline_checkpoint, tmp_path / "out", "fp32", dry_run=True)
    assert {part.bits_per_weight for part in report.components.values()} == {32}


def test_text_encoders_can_be_quantized_without_a_program(
    pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    report = convert(
        pipeline_checkpoint, tmp_path / "out", text_encoder_q="8bit", weights_only=True
    )
    assert of(report)["text_encoder_2"][1] > 0
    assert of(report)["transformer"][1] == 0
    assert report.components["text_encoder_2"].program is None
    stored = set(read_json(pipeline_checkpoint / "text_encoder_2" / INDEX)["weight_map"])
    made = tensors(tmp_path / "out" / "text_encoder_2")
    assert {n for n in made if n.rpartition(".")[2] not in ("scales", "biases")} == stored
    checked = verify(tmp_path / "out", pipeline_checkpoint, components=["text_encoder_2"])
    assert checked.passed, checked.as_text()


def test_the_vae_takes_a_precision_of_its_own(pipeline_checkpoint: Path, tmp_path: Path) -> None:
    report = convert(pipeline_checkpoint, tmp_path / "out", "4bit", vae_q="fp32", dry_run=True)
    assert report.components["vae"].bits_per_weight == 32


def test_one_component_is_converted_and_the_rest_copied(
    pipeline_checkpoint: Path, tmp_path: Path
) -> None:
    report = convert(pipeline_checkpoint, tmp_path / "out", "4bit", components=["transformer"])
    assert {name: status for name, (status, _) in of(report).items()} == {
        "transformer": "converted", "vae": "copied",
        "text_encoder": "copied", "text_encoder_2": "copied",
    }  # fmt: skip
    for file in (pipeline_checkpoint / "vae").iterdir():
        assert (tmp_path / "out" / "vae" / file.name).read_bytes() == file.read_bytes()
    assert verify(tmp_path / "out", pipeline_checkpoint).passed
    assert mlxconv.inspect(tmp_path / "out").components["vae"].status == "copied"


def test_a_dry_run_reports_the_same_and_writes_nothing(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    dry = convert(flux_checkpoint, tmp_path / "out", "4bit", dry_run=True, trace=True)
    assert list(tmp_path.iterdir()) == []
    wet = convert(flux_checkpoint, tmp_path / "out", "4bit")
    assert dry.components == wet.components
    assert dry.as_json()["dry_run"] is True and wet.as_json()["dry_run"] is False
    assert "dry run: nothing was written; " in dry.as_text()
    assert "dry run" not in wet.as_text()


@pytest.fixture
def no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("mlxconv.convert.store.jobs.compile_program")


def test_a_dry_run_decides_the_same_without_tracing(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wet = convert(flux_checkpoint, tmp_path / "out", "4bit").components["transformer"]
    monkeypatch.delattr("mlxconv.convert.store.jobs.compile_program")
    dry = convert(flux_checkpoint, tmp_path / "dry", "4bit", dry_run=True).components["transformer"]
    assert (dry.bytes_out, dry.quantized, dry.kept) == (wet.bytes_out, wet.quantized, wet.kept)
    assert dry.program is None and dry.note == "not traced (--trace traces)"


@pytest.mark.parametrize("options", [{"keep": ("nowhere.**",)}, {"set": (("nowhere", "8"),)}])
def test_a_pattern_that_matches_nothing_is_found_before_tracing(
    flux_checkpoint: Path, tmp_path: Path, no_tracing: None, options: dict[str, Any]
) -> None:
    with pytest.raises(MlxconvError, match="matches no module"):
        convert(flux_checkpoint, tmp_path / "out", "4bit", **options)


def test_what_to_do_next_works_as_printed(
    pipeline_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["convert", str(pipeline_checkpoint), "-o", "my bundle", "--q", "fp32"]
    printed = CliRunner().invoke(cli, line, catch_exceptions=False).stdout
    steps = printed.split("next:\n")[1].splitlines()
    assert [shlex.split(step)[1] for step in steps] == ["verify", "generate"]
    cheap = {"generate": ["--size", "32x32", "--steps", "1"]}  # the defaults are FLUX.1's own
    for step in steps:
        line = shlex.split(step)[1:]
        done = CliRunner().invoke(cli, [*line, *cheap.get(line[0], [])], catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "picture.png").is_file()


def test_a_bundle_is_written_to_mlx_model_by_default(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = ["convert", str(flux_checkpoint), "--weights-only"]
    assert CliRunner().invoke(cli, line, catch_exceptions=False).exit_code == 0
    assert (tmp_path / "mlx_model" / "mlxconv.json").is_file()
    again = CliRunner().invoke(cli, line)
    assert again.exit_code == 1 and "mlx_model: exists" in str(again.exception)


def test_weights_only_has_no_program(flux_checkpoint: Path, tmp_path: Path) -> None:
    convert(flux_checkpoint, tmp_path / "out", weights_only=True)
    assert not (tmp_path / "out" / "transformer" / PROGRAM).exists()
    with pytest.raises(MlxconvError, match="converted weights-only"):
        load_component(tmp_path / "out")
    assert verify(tmp_path / "out", flux_checkpoint).passed


def bits_of(bundle: Path, module: str) -> int:
    """Bits of a module's weight, from the shapes in its file; 16 where it is not quantized."""
    made = tensors(bundle / "transformer")
    if f"{module}.scales" not in made:
        return made[f"{module}.weight"].dtype.size * 8
    table = read_json(bundle / "transformer" / "config.json")["quantization"]
    spec = table.get(module, table)
    groups = made[f"{module}.scales"].shape[1]
    return int(made[f"{module}.weight"].shape[1] * 32 // (groups * spec["group_size"]))


TO_Q = "transformer_blocks.0.attn.to_q"


def test_keep_and_set_choose_modules(flux_checkpoint: Path, tmp_path: Path) -> None:
    report = convert(
        flux_checkpoint, tmp_path / "out", "4bit",
        keep=("transformer_blocks.0.ff.**",), set=(("**.to_q", "6"), ("**.to_k", "mxfp8")),
    )  # fmt: skip
    out = tmp_path / "out"
    assert bits_of(out, "transformer_blocks.0.ff.net.2") == 16
    assert bits_of(out, "transformer_blocks.1.ff.net.2") == 4
    assert bits_of(out, TO_Q) == 6
    assert bits_of(out, "transformer_blocks.0.attn.to_k") == 8
    kept = {item["name"]: item["why"] for item in report.components["transformer"].kept}
    assert "transformer_blocks.0.ff.net.2.weight" in kept
    assert verify(out, flux_checkpoint).passed


def test_a_group_size_holds_for_set_too(flux_checkpoint: Path, tmp_path: Path) -> None:
    convert(flux_checkpoint, tmp_path / "out", "4bit", group_size=32, set=((TO_Q, "8"),))
    config = read_json(tmp_path / "out" / "transformer" / "config.json")
    assert config["quantization"]["group_size"] == 32
    assert config["quantization"][TO_Q] == {"group_size": 32, "bits": 8, "mode": "affine"}


def test_a_policy_file_decides(flux_checkpoint: Path, tmp_path: Path) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text(
        'default = "8bit"\nkeep = ["**.ff_context.**"]\n[set]\n"**.attn.to_q" = "4bit"\n'
    )
    convert(flux_checkpoint, tmp_path / "out", str(policy))
    assert bits_of(tmp_path / "out", "transformer_blocks.0.attn.to_k") == 8
    assert bits_of(tmp_path / "out", TO_Q) == 4
    assert bits_of(tmp_path / "out", "transformer_blocks.0.ff_context.net.2") == 16


def test_a_policy_file_whose_pattern_matches_nothing_is_an_error(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    policy = tmp_path / "policy.toml"
    policy.write_text('default = "8bit"\nkeep = ["**.ff_contxt.**"]\n')
    with pytest.raises(MlxconvError, match=r"'\*\*\.ff_contxt\.\*\*' matches no module"):
        convert(flux_checkpoint, tmp_path / "out", str(policy))


# ---- target size --------------------------------------------------------------------------------


@pytest.mark.parametrize("q", ["bf16", "6bit", "2bit"])
def test_the_most_precise_bundle_that_fits_is_made(
    q: str, flux_checkpoint: Path, tmp_path: Path
) -> None:
    convert(flux_checkpoint, tmp_path / "wanted", q)
    room = 1.07 * size_of(tmp_path / "wanted") / 1e9  # the estimate is above the real size
    report = convert(flux_checkpoint, tmp_path / "out", target_size=room)
    assert report.q == q
    assert size_of(tmp_path / "out") <= room * 1e9
    assert bits_of(tmp_path / "out", TO_Q) == bits_of(tmp_path / "wanted", TO_Q)


def test_a_size_that_nothing_fits_lists_the_sizes(flux_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match=r"no precision fits --target-size 0\.0001 GB: bf16"):
        convert(flux_checkpoint, tmp_path / "out", target_size=1e-4)
    assert list(tmp_path.iterdir()) == []


# ---- Python -------------------------------------------------------------------------------------


def test_the_package_has_the_functions_of_the_commands(
    flux_checkpoint: Path, tmp_path: Path
) -> None:
    report: Any = mlxconv.convert(flux_checkpoint, tmp_path / "out", q="4bit")
    assert isinstance(report, mlxconv.ConvertReport)
    assert mlxconv.verify(tmp_path / "out", flux_checkpoint).passed
    assert mlxconv.load_component(tmp_path / "out", "transformer").entries == ["forward"]
    program = load_program(tmp_path / "out" / "transformer" / PROGRAM)
    assert report.components["transformer"].program["nodes"] == program.count_nodes()
