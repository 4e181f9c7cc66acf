"""Nothing that a user can get wrong is called unexpected."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from mlxconv.cli import _reason, cli
from mlxconv.convert.verify.reference import Reference, replaced_weights
from mlxconv.runtime.errors import MlxconvError

from .bundles import change_json
from .conftest import Bundles


def reason(*arguments: str | Path) -> str:
    error = CliRunner().invoke(cli, [*map(str, arguments)]).exception
    assert isinstance(error, Exception)
    return _reason(error)


@pytest.mark.parametrize("command", [("convert", "-o", "out"), ("inspect",)])
def test_a_name_that_is_too_long(command: tuple[str, ...]) -> None:
    found = reason(*command, "x" * 5000)
    assert "File name too long; check the path" in found
    assert len(found) < 300


def test_a_working_folder_that_is_gone(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    shutil.rmtree(folder)
    found = reason("convert", flux_checkpoint, "-o", "out")
    assert "the current folder no longer exists" in found


@pytest.mark.parametrize("option", ["--recipe", "--q"])
@pytest.mark.parametrize("text", [b"\xff\xfe", b"a = " + b"[" * 100_000])
def test_toml_that_is_none(
    option: str, text: bytes, flux_checkpoint: Path, tmp_path: Path
) -> None:
    file = tmp_path / "bad.toml"
    file.write_bytes(text)
    found = reason("convert", flux_checkpoint, "-o", tmp_path / "out", option, file)
    assert "bad.toml" in found
    assert "unexpected" not in found


@pytest.mark.parametrize(
    ("component", "key", "value", "says"),
    [
        ("vae", "block_out_channels", 5, "AutoencoderKL .*TypeError: 'int' object is not subs"),
        ("vae", "act_fn", [0], "AutoencoderKL .*AttributeError: 'list' object has no attribute"),
        ("transformer", "num_attention_heads", "x", "FluxTransformer2DModel .*TypeError: empty"),
        ("transformer", "_class_name", 5, "FluxTransformer2DModel .*ValueError: Make sure"),
        ("text_encoder", "num_attention_heads", 0, "CLIPTextModel .*ZeroDivisionError: "),
        ("text_encoder", "hidden_act", 5, "CLIPTextModel .*Validation error for field 'hidden_act"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("command", ["dry run", "convert", "weights only", "verify"])
def test_whatever_a_constructor_raises_names_file_and_class(
    command: str, component: str, key: str, value: object, says: str,
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, tmp_path: Path,
) -> None:  # fmt: skip
    source = shutil.copytree(pipeline_checkpoint, tmp_path / "source")
    change_json(source / component / "config.json", lambda data: {**data, key: value})
    convert = ["convert", source, "-o", tmp_path / "out", "--component", component]
    lines = {"dry run": [*convert, "--dry-run"], "weights only": [*convert, "--weights-only"],
             "convert": convert, "verify": ["verify", pipeline_bundle("fp32"), "--against", source,
                                            "--component", component]}  # fmt: skip
    found = reason(*lines[command])
    assert "unexpected" not in found and "\n" not in found
    assert f"{source / component}" in found
    if command != "verify":
        assert f"{source / component / 'config.json'}: " in found
        assert re.search(says, found), found


def test_a_checkpoint_of_fewer_layers_than_the_bundle() -> None:
    reference = Reference(torch.nn.Linear(2, 2), "")
    tensors = {"weight": torch.zeros(2, 2), "layers.2.weight": torch.zeros(2)}
    with (
        pytest.raises(MlxconvError, match=r"Linear of the checkpoint has no layers\.2\.weight"),
        replaced_weights(reference, tensors),
    ):
        pass


def test_checksums_that_are_no_table(
    flux_bundle: Bundles, flux_checkpoint: Path, tmp_path: Path
) -> None:
    bundle = shutil.copytree(flux_bundle("fp32"), tmp_path / "bundle")
    index = bundle / "transformer" / "model.safetensors.index.json"
    for metadata in (5, {"crc32": 5}):
        change_json(index, lambda data, metadata=metadata: {**data, "metadata": metadata})
        found = reason("verify", bundle, "--against", flux_checkpoint)
        assert found.startswith(f"{index}: its metadata is not a table")


def test_a_quantization_that_is_no_table(flux_bundle: Bundles, tmp_path: Path) -> None:
    bundle = shutil.copytree(flux_bundle("4bit"), tmp_path / "bundle")
    config = bundle / "transformer" / "config.json"
    change_json(config, lambda data: {**data, "quantization": ["x"]})
    assert "config.json: quantization is not a table" in reason("inspect", bundle)
    change_json(config, lambda data: {**data, "_class_name": None, "architectures": 5})
    assert "unexpected" not in reason("inspect", bundle)


def test_a_class_of_no_module() -> None:
    assert "cannot import" in reason("recipe", "new", "..:X")
