"""What counts as a repository of the Hub, and what as a path."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.hub.names import HubName, hub_name

GOOD = {
    "org/name": HubName("org/name"),
    "black-forest-labs/FLUX.1-schnell": HubName("black-forest-labs/FLUX.1-schnell"),
    "hf://org/name": HubName("org/name"),
    "hf://models/org/name": HubName("org/name"),
    "hf://org/name@v1.0": HubName("org/name", "v1.0"),
    "org/name@v1.0": HubName("org/name", "v1.0"),
    "org/name@v1.0/vae": HubName("org/name", "v1.0", "vae"),
    "hf://org/name@refs%2Fpr%2F7/vae": HubName("org/name", "refs/pr/7", "vae"),
    "hf://org/name/unet/deep": HubName("org/name", None, "unet/deep"),
    "https://huggingface.co/org/name": HubName("org/name"),
    "https://huggingface.co/org/name/": HubName("org/name"),
    "https://hf.co/org/name/tree/main": HubName("org/name", "main"),
    "https://huggingface.co/org/name/tree/refs%2Fpr%2F7/vae": HubName(
        "org/name", "refs/pr/7", "vae"
    ),
    "https://huggingface.co/org/name/commit/0123456": HubName("org/name", "0123456"),
}
PATHS = (
    "./org/name", "../org/name", "/org/name", "~/org/name", "org/name/vae", "name", "", "org/",
    "a b/c", "-x/y", "a@b/c",
)  # fmt: skip
BAD = {
    "hf://name": "expected ORG/NAME",
    "hf://datasets/org/name": "not a model repository",
    "hf://org/name/../x": "expected ORG/NAME",
    "hf://org/na--me": "expected ORG/NAME",
    "https://example.com/org/name": "example.com is not the Hub",
    "https://huggingface.co/datasets/org/name": "not a model's page",
    "https://huggingface.co/org": "not a model's page",
    "https://huggingface.co/org/name/blob/main/config.json": "give https://huggingface.co/org/name",
    "https://huggingface.co/org/name/discussions": "give https://huggingface.co/org/name",
}


@pytest.mark.parametrize("text", GOOD)
def test_repositories(text: str) -> None:
    assert hub_name(text) == GOOD[text]


@pytest.mark.parametrize("text", PATHS)
def test_paths(text: str) -> None:
    assert hub_name(text) is None


@pytest.mark.parametrize("text", BAD)
def test_addresses_of_other_things(text: str) -> None:
    with pytest.raises(MlxconvError, match=BAD[text]):
        hub_name(text)


def test_what_exists_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert hub_name("org/name") is not None
    (tmp_path / "org/name").mkdir(parents=True)
    assert hub_name("org/name") is None
    assert hub_name("hf://org/name") == HubName("org/name")
    with pytest.raises(MlxconvError, match=r"no such folder in org; .* use hf://org/other"):
        hub_name("org/other")
    assert hub_name(Path("some/thing")) is None


def test_a_revision_is_said_once() -> None:
    name = HubName("org/name", "v1")
    assert name.at(None) == name == name.at("v1")
    assert HubName("org/name").at("v2").revision == "v2"
    with pytest.raises(MlxconvError, match="has revision 'v1', but --revision is 'v2'"):
        name.at("v2")
