"""Licences of conversions: copied from the source, refused where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxconv.convert.publish.licence import Given, licence_of, notice_text
from mlxconv.convert.source.source_card import (
    Origin,
    copied_facts,
    front_matter,
    origin_of,
    read_source_card,
)
from mlxconv.runtime.errors import MlxconvError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = Origin("acme/art", "acme/art", COMMIT)
LOCAL = Origin("art")
FLUX = {"license": "other", "license_name": "flux-1-dev-non-commercial-license"}


def licence(facts: dict[str, Any], folder: Path | None = None, *given: str | None) -> Any:
    return licence_of(facts, HUB, Given(*given), folder)


# ---- the source's card ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("---\nlicense: mit\n---\n# Title", {"license": "mit"}),
        ("\ufeff---\r\nlicense: mit\r\n---\r\n", {"license": "mit"}),
        ("\n---\nlicense: mit\n---", {"license": "mit"}),
        ("# No front matter\n---\nlicense: mit\n---\n", {}),
        ("---\n---\n", {}),
        ("", {}),
    ],
)
def test_front_matter_is_at_the_beginning(text: str, found: dict[str, Any]) -> None:
    assert front_matter(text, "README.md") == found


@pytest.mark.parametrize("text", ["---\na: [\n---\n", "---\n- a\n---\n"])
def test_broken_front_matter_is_refused(text: str) -> None:
    with pytest.raises(MlxconvError, match=r"README\.md: its front matter"):
        front_matter(text, "README.md")


def test_only_what_a_conversion_shares_is_copied() -> None:
    facts = copied_facts({"license": "mit", "tags": ["x"], "language": ["en"], "license_link": ""})
    assert facts == {"license": "mit", "language": ["en"]}


def test_a_component_has_its_pipelines_card(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    (tmp_path / "vae").mkdir()
    assert read_source_card(tmp_path / "vae") == {}
    (tmp_path / "model_index.json").write_text("{}")
    assert read_source_card(tmp_path / "vae") == {"license": "mit"}


@pytest.mark.parametrize(
    ("source", "revision", "base_model", "origin"),
    [
        ("acme/art", COMMIT, None, HUB),
        ("hf://acme/art@main/vae", COMMIT, None, HUB),
        (f"/h/hub/models--acme--art/snapshots/{COMMIT}", None, None, HUB),
        (f"/h/hub/models--acme--art/snapshots/{COMMIT}/vae", None, None, HUB),
        ("models/art", None, None, LOCAL),  # a folder, not a repository of that name
        ("/home/me/art", None, None, LOCAL),
        ("/home/me/art", None, "acme/art", Origin("acme/art", "acme/art")),
        (f"/h/hub/models--acme--art/snapshots/{COMMIT}", None, "other/art", HUB),
    ],
)
def test_origins(source: str, revision: str | None, base_model: str | None, origin: Origin) -> None:
    assert origin_of(source, revision, base_model) == origin


# ---- the licence ---------------------------------------------------------------------------------


def test_a_source_without_a_licence_is_refused() -> None:
    with pytest.raises(MlxconvError, match=r"acme/art: its card states no licence.*--license ID"):
        licence({})


def test_a_licence_can_be_given_where_there_is_none() -> None:
    found = licence({}, None, "mit")
    assert (found.id, found.copied) == ("mit", False)


def test_a_given_licence_does_not_override_the_sources() -> None:
    with pytest.raises(MlxconvError, match=r"--license mit: the card of acme/art says apache-2\.0"):
        licence({"license": "apache-2.0"}, None, "mit")


def test_the_same_licence_may_be_repeated() -> None:
    assert licence({"license": "mit"}, None, "mit").copied


@pytest.mark.parametrize(
    ("link", "origin", "absolute"),
    [
        ("LICENSE.md", HUB, f"https://huggingface.co/acme/art/blob/{COMMIT}/LICENSE.md"),
        ("./legal/L.txt", HUB, f"https://huggingface.co/acme/art/blob/{COMMIT}/legal/L.txt"),
        ("https://example.org/l", HUB, "https://example.org/l"),
        ("https://e.org/a_(b) <i>", HUB, "https://e.org/a_%28b%29%20%3Ci%3E"),
        ("L) [x](evil.md", HUB,
         f"https://huggingface.co/acme/art/blob/{COMMIT}/L%29%20%5Bx%5D%28evil.md"),
        ("LICENSE.md", LOCAL, "LICENSE.md"),  # it lies beside the card
        ("missing.md", LOCAL, None),
    ],
)
def test_links_hold_in_another_repository(
    link: str, origin: Origin, absolute: str | None, tmp_path: Path
) -> None:
    (tmp_path / "LICENSE.md").write_text("text")
    facts = {"license": "mit", "license_link": link}
    assert licence_of(facts, origin, Given(), tmp_path).link == absolute


@pytest.mark.parametrize("link", ["javascript:alert(1)", "data:text/html,x", "//evil.org/l"])
def test_links_are_http_or_files(link: str) -> None:
    with pytest.raises(MlxconvError, match="neither an http\\(s\\) address nor a file's name"):
        licence_of({"license": "mit", "license_link": link}, HUB, Given(), None)


def test_a_licence_without_an_id_needs_a_name() -> None:
    with pytest.raises(MlxconvError, match="without a license_name; give --license-name"):
        licence({"license": "other"})


def test_a_licence_without_an_id_needs_its_text(tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match="neither its text"):
        licence(FLUX, tmp_path)
    assert licence(FLUX, tmp_path, None, None, "https://example.org/l").link
    (tmp_path / "LICENSE").write_text("text")
    assert licence(FLUX, tmp_path).files == ("LICENSE",)


@pytest.mark.parametrize(
    ("identifier", "name", "word"),
    [
        ("cc-by-nc-4.0", None, "non-commercial"),
        ("cc-by-nc-sa-4.0", None, "non-commercial"),
        ("other", "flux-1-dev-non-commercial-license", "non-commercial"),
        ("other", "stabilityai-nc-research-community", "non-commercial"),
        ("creativeml-openrail-m", None, "use restrictions"),
        ("bigscience-bloom-rail-1.0", None, "use restrictions"),
        ("gpl-3.0", None, "share-alike"),
        ("cc-by-sa-4.0", None, "share-alike"),
    ],
)
def test_obligations_are_told(identifier: str, name: str | None, word: str, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("text")
    facts = {"license": identifier, **({"license_name": name} if name else {})}
    assert any(word in text for text in licence(facts, tmp_path).obligations)


@pytest.mark.parametrize("identifier", ["apache-2.0", "mit", "cc-by-4.0", "bsd-3-clause"])
def test_permissive_licences_have_none(identifier: str, tmp_path: Path) -> None:
    (tmp_path / "LICENSE").write_text("may be distributed noncommercially, too")
    assert licence({"license": identifier}, tmp_path).obligations == ()


def test_the_text_of_a_licence_without_an_id_is_read(tmp_path: Path) -> None:
    (tmp_path / "LICENSE.md").write_text("for Research and Non-Commercial use, or below $1M")
    facts = {"license": "other", "license_name": "some-community-license"}
    assert "conditions on commercial use" in licence(facts, tmp_path).obligations[0]


# ---- the notice ----------------------------------------------------------------------------------


def test_the_notice_says_what_was_changed_and_carries_quoted_notices(tmp_path: Path) -> None:
    quoted = "Model X is licensed by Acme Inc. under the X License. Copyright Acme Inc."
    (tmp_path / "LICENSE").write_text(f"You must include the following notice:\n“{quoted}”\nend")
    text = notice_text("me/x-4bit", HUB, licence(FLUX, tmp_path), "weights quantized")
    assert "modified version of acme/art" in text and COMMIT in text
    assert "Changes: weights quantized" in text
    assert "published by me, not by the authors" in text
    assert quoted in text
