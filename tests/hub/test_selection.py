"""Which files of a repository are fetched: what a folder of the same files would be read for."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from mlxconv.convert.source.checkpoint import open_checkpoint
from mlxconv.convert.source.hub import Asked, opened_remote
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.hub.download import Remote, RemoteFile
from mlxconv.runtime.hub.names import HubName

from .tiny_repos import NEEDED, NEEDED_WEIGHTS, messy_pipeline, weights, write_json


@dataclass(frozen=True)
class OnDisk(Remote):
    """A repository whose files are in a folder: `fetched` and `peeked` say what was asked for."""

    folder: Path = Path()
    fetched: set[str] = field(default_factory=set)
    peeked: set[str] = field(default_factory=set)

    def cached(self, path: str) -> Path | None:
        return None

    def fetch(self, paths: Iterable[str]) -> Path:
        self.fetched.update(self._known(paths))
        return self.folder

    def read(self, path: str, begin: int, end: int) -> bytes:
        self.peeked.add(path)
        return (self.folder / path).read_bytes()[begin:end]


def on_disk(folder: Path, inside: str = "") -> OnDisk:
    files = {
        path.relative_to(folder).as_posix(): RemoteFile(
            path.relative_to(folder).as_posix(), path.stat().st_size, None, ""
        )
        for path in sorted(folder.rglob("*")) if path.is_file()
    }  # fmt: skip
    return OnDisk(HubName("acme/tiny", None, inside), "c" * 40, files, folder=folder)


def test_small_files_and_the_headers_of_one_set_of_weights(tmp_path: Path) -> None:
    remote = on_disk(messy_pipeline(tmp_path))
    with opened_remote(remote, Asked()) as source:
        assert source.download is not None
        assert set(source.download.weights.values()) == NEEDED_WEIGHTS
        assert not any(file.exists() for file in source.download.weights)  # no hollow file is left
        assert source.checkpoint.source == "acme/tiny"
        assert source.checkpoint.revision == "c" * 40
    unneeded = {p for p in remote.fetched - NEEDED if not p.endswith("index.fp16.json")}
    assert not unneeded and remote.fetched >= NEEDED
    assert remote.peeked == NEEDED_WEIGHTS


def test_a_tensor_that_is_read_brings_its_file(tmp_path: Path) -> None:
    remote = on_disk(messy_pipeline(tmp_path))
    with opened_remote(remote, Asked()) as source:
        tensor = source.checkpoint.components["vae"].tensors["c.weight"]
        local = open_checkpoint(tmp_path).components["vae"].tensors["c.weight"]
        assert (tensor.read() == local.read()).all()
    assert remote.fetched & NEEDED_WEIGHTS == {"vae/diffusion_pytorch_model.safetensors"}


LAYOUTS: dict[str, tuple[list[str], str | None]] = {
    "plain": (["diffusion_pytorch_model.safetensors"], None),
    "variant asked for": (
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"], "fp16",
    ),
    "variant not asked for": (
        ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"], None,
    ),
    "the only variant": (["diffusion_pytorch_model.fp16.safetensors"], None),
    "other stem": (["model.safetensors", "pytorch_model.bin"], None),
    "numbered shards": (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"], None,
    ),
    "onnx beside": (["model.safetensors", "model.onnx", "openvino_model.bin"], None),
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_choice_is_that_of_a_folder(layout: str, tmp_path: Path) -> None:
    names, variant = LAYOUTS[layout]
    folder = tmp_path / "some-vae"
    write_json(folder / "config.json", {"_class_name": "AutoencoderKL"})
    for name in names:
        weights(folder / name, f"{name[:-12]}.weight")
    local = open_checkpoint(folder, variant)
    (component,) = local.components.values()
    with opened_remote(on_disk(folder), Asked(variant)) as source:
        assert source.download is not None
        chosen = {file.name for file in source.download.weights}
        assert chosen == {file.name for file in component.files}
        (found,) = source.checkpoint.components.values()
        assert (found.variant, found.name) == (component.variant, component.name)


def test_one_component_of_a_pipeline(tmp_path: Path) -> None:
    remote = on_disk(messy_pipeline(tmp_path))
    with opened_remote(remote, Asked(components=("vae",))) as source:
        assert list(source.checkpoint.components) == ["vae"]
        assert source.checkpoint.skipped == {
            "transformer": "not asked for, so it was not downloaded"
        }
    assert remote.peeked == {"vae/diffusion_pytorch_model.safetensors"}
    assert "transformer/config.json" not in remote.fetched
    assert "tokenizer/vocab.txt" in remote.fetched
    with pytest.raises(MlxconvError, match=r"acme/tiny: no component vea; it has .*vae"), \
            opened_remote(remote, Asked(components=("vea",))):  # fmt: skip
        pass


def test_a_folder_of_a_repository(tmp_path: Path) -> None:
    remote = on_disk(messy_pipeline(tmp_path), "transformer")
    with opened_remote(remote, Asked()) as source:
        assert source.checkpoint.source == "acme/tiny/transformer"
        assert list(source.checkpoint.components) == ["transformer"]
    assert all(path.startswith("transformer/") for path in remote.fetched | remote.peeked)


def test_what_cannot_be_converted_is_refused_before_weights(tmp_path: Path) -> None:
    def refused(text: str) -> None:
        remote = on_disk(tmp_path / "repo")
        with pytest.raises(MlxconvError, match=text), opened_remote(remote, Asked()):
            pass
        assert not any(path.endswith(".safetensors") for path in remote.fetched)

    folder = messy_pipeline(tmp_path / "repo")
    (folder / "transformer/diffusion_pytorch_model-00002-of-00002.safetensors").unlink()
    refused("^acme/tiny/transformer/.*index.json: names .*00002-of-00002.*not in the folder")
    (folder / "model_index.json").write_text("[]", encoding="utf-8")
    refused("^acme/tiny/model_index.json: holds a JSON list")
    (folder / "model_index.json").unlink()
    refused("^acme/tiny: holds .*expected model_index.json")
    write_json(folder / "mlxconv.json", {})
    refused("^acme/tiny: is an mlxconv bundle, already converted")
    shutil.rmtree(folder)
    folder.mkdir()
    refused("^acme/tiny: holds nothing; expected model_index.json")


def test_a_damaged_header_is_found_by_its_range(tmp_path: Path) -> None:
    folder = messy_pipeline(tmp_path)
    file = folder / "vae/diffusion_pytorch_model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(MlxconvError, match="truncated, download it again"), \
            opened_remote(on_disk(folder), Asked()):  # fmt: skip
        pass
    file.write_bytes((2**40).to_bytes(8, "little") + whole[8:])
    with pytest.raises(MlxconvError, match="header length 1099511627776 is over the limit"), \
            opened_remote(on_disk(folder), Asked()):  # fmt: skip
        pass


def test_a_long_header_takes_a_second_look(tmp_path: Path) -> None:
    folder = tmp_path / "some-vae"
    write_json(folder / "config.json", {"_class_name": "AutoencoderKL"})
    weights(folder / "model.safetensors", *(f"{n:090d}" for n in range(1000)), size=1)
    with opened_remote(on_disk(folder), Asked()) as source:
        assert len(source.checkpoint.components["vae"].tensors) == 1000
