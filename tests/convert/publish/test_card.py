"""The card of a bundle: its code runs, its figures are those of the files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import mlx.core as mx
import pytest
import yaml
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from mlxconv.convert.inspection import inspect
from mlxconv.convert.publish.card import make_card
from mlxconv.convert.publish.card_facts import CardFacts, Sample, card_facts, read_sample
from mlxconv.convert.publish.licence import Given, licence_of
from mlxconv.convert.publish.listing import PICTURE_FILE
from mlxconv.convert.publish.pipeline_tag import pipeline_tag
from mlxconv.convert.source.source_card import Origin
from mlxconv.convert.verify.record import read_parity, save_parity, saved_report
from mlxconv.convert.verify.verify import ParityReport
from mlxconv.runtime.bundle import open_bundle
from mlxconv.runtime.errors import MlxconvError

from ...bundles import change_json, copy
from ...conftest import Bundles
from ...hub.ready_bundle import COMMIT, SOURCE, make_bundle

REPO = "me/tiny-4bit"


def facts_of(folder: Path, source_card: dict[str, Any] | None = None) -> CardFacts:
    bundle = open_bundle(folder)
    card = source_card or {"license": "apache-2.0"}
    bundle.manifest["source_card"] = card
    origin = Origin(SOURCE, SOURCE, COMMIT)
    licence = licence_of(card, origin, Given(), bundle.path)
    return card_facts(REPO, bundle, origin, licence, read_parity(bundle))


def metadata(card: str) -> dict[str, Any]:
    data = yaml.safe_load(card.split("---\n")[1])
    assert isinstance(data, dict)
    return data


def python_blocks(card: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", card, re.DOTALL)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    return make_bundle(tmp_path / "tiny-4bit")


# ---- its code runs -------------------------------------------------------------------------------


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Path], dict[str, Any]]:
    """Run code of a card with a local folder in place of the repository."""

    def execute(code: str, bundle: Path) -> dict[str, Any]:
        def download(repo: str, **_: Any) -> str:
            assert repo == str(bundle)
            return repo

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        monkeypatch.chdir(bundle.parent)
        names: dict[str, Any] = {}
        exec(compile(code.replace(REPO, str(bundle)), "card", "exec"), names)
        return names

    return execute


def sample_picture(path: Path, **made: Any) -> None:
    info = PngInfo()
    info.add_text("mlxconv", json.dumps(made))
    Image.new("RGB", (32, 48), "red").save(path, pnginfo=info)


def test_the_code_of_a_native_pipeline_runs(
    pipeline_bundle: Bundles, tmp_path: Path, local: Callable[..., Any]
) -> None:
    bundle = copy(pipeline_bundle("4bit"), tmp_path)
    sample_picture(bundle / PICTURE_FILE, prompt='a "cat"', steps=1, seed=3)
    card = make_card(facts_of(bundle))
    assert "--seed 3 --steps 1 --size 32x48" in card
    generate, weights = python_blocks(card)
    assert local(generate, bundle)["pictures"].images[0].size == (32, 48)
    assert (tmp_path / "picture.png").is_file()
    names = local(weights, bundle)
    stored = inspect(bundle, tensors=True).components["transformer"].tensors
    assert names["weights"].keys() == {tensor["name"] for tensor in stored}
    assert names["matrix"].shape == (64, 64) and mx.all(mx.isfinite(names["matrix"]))


def test_the_code_of_another_pipeline_runs(
    pipeline_bundle: Bundles, pipeline_checkpoint: Path, tmp_path: Path, local: Callable[..., Any]
) -> None:
    bundle = copy(pipeline_bundle("4bit"), tmp_path)

    def partly(manifest: Any) -> None:
        manifest["components"]["text_encoder_2"]["program"] = False

    change_json(bundle / "mlxconv.json", partly)
    code = python_blocks(make_card(facts_of(bundle)))[0]
    assert f'from_pretrained("{SOURCE}", revision="{COMMIT}")' in code
    found = local(code.replace(SOURCE, str(pipeline_checkpoint)), bundle)
    assert type(found["pipe"].transformer.forward).__name__ != "method"  # it was replaced


def test_the_code_of_one_component_runs(
    flux_bundle: Bundles, local: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = flux_bundle("4bit")
    component, weights = python_blocks(make_card(facts_of(bundle)))
    local(component, bundle)
    assert "encoder_hidden_states" in capsys.readouterr().out
    assert "matrix" in local(weights, bundle)


def test_the_code_of_dense_weights_runs(ready: Path, local: Callable[..., Any]) -> None:
    names = local(python_blocks(make_card(facts_of(ready)))[-1], ready)
    assert len(names["weights"]) == 4


# ---- its figures ---------------------------------------------------------------------------------


def test_sizes_and_bits_are_those_of_the_files(pipeline_bundle: Bundles) -> None:
    card = make_card(facts_of(pipeline_bundle("4bit")))
    for name, held in inspect(pipeline_bundle("4bit")).components.items():
        row = next(line for line in card.splitlines() if line.startswith(f"| `{name}` | `"))
        assert f"| {held.bits_per_weight:.2f} |" in row
    assert "4-bit" in metadata(card)["tags"]


def test_reasons_are_grouped(pipeline_bundle: Bundles) -> None:
    card = make_card(facts_of(pipeline_bundle("4bit")))
    part = card.partition("## What stayed precise, and why")[2].partition("##")[0]
    assert "`transformer_blocks.*.norm*.linear`" in part
    assert "not quantized (bf16)" in part
    assert len(part.strip().splitlines()) < 6


def measured(bundle: Path) -> None:
    row = {
        "tier": "forward", "component": "transformer", "name": "forward", "max_abs": 0.1,
        "max_rel": 0.2, "rel_l2": 1.234e-6, "cosine": 1.0, "sqnr_db": 118.2, "threshold": 1e-4,
        "reference": "diffusers 0.42.1 fp32 cpu", "passed": True, "note": "",
    }  # fmt: skip
    from mlxconv.convert.verify.metrics import Row

    report = ParityReport("/home/somebody/b", "/home/somebody/s", 7, [Row(**row)])  # type: ignore[arg-type]
    save_parity(open_bundle(bundle), report, SOURCE)


def test_figures_are_those_measured(ready: Path) -> None:
    measured(ready)
    card = make_card(facts_of(ready))
    assert "| `transformer` | forward | 1.2e-06 | 118.2\u00a0dB | 1.0e-04 | passed |" in card
    assert "seed 7" in card and "diffusers 0.42.1 fp32 cpu" in card
    assert "somebody" not in (ready / "parity.json").read_text()
    report = saved_report(open_bundle(ready))
    assert report is not None and report.tiers[0].rel_l2 == 1.234e-6


@pytest.mark.parametrize("part", ["config.json", "model.safetensors.index.json"])
def test_figures_of_other_files_are_not_shown(part: str, ready: Path) -> None:
    measured(ready)
    file = ready / "transformer" / part
    file.write_text(file.read_text() + " ")
    card = make_card(facts_of(ready))
    assert "1.2e-06" not in card
    assert "Not measured: the figures of parity.json are of other files" in card
    assert saved_report(open_bundle(ready)) is None


def test_without_figures_the_card_says_so(ready: Path) -> None:
    assert "Not measured: no parity was measured" in make_card(facts_of(ready))


# ---- its metadata --------------------------------------------------------------------------------


def test_metadata_name_the_library_the_source_and_the_licence(ready: Path) -> None:
    assert metadata(make_card(facts_of(ready))) == {
        "library_name": "mlx",
        "base_model": SOURCE, "base_model_relation": "quantized", "license": "apache-2.0",
        "tags": ["mlx", "mlxconv"],
    }  # fmt: skip


def test_the_sources_tag_and_language_are_copied(ready: Path) -> None:
    card = {"license": "mit", "pipeline_tag": "image-to-video", "language": ["no", "en"]}
    data = metadata(make_card(facts_of(ready, card)))
    assert (data["pipeline_tag"], data["language"]) == ("image-to-video", ["no", "en"])


def test_a_local_source_names_no_base_model(ready: Path) -> None:
    facts = replace(facts_of(ready), origin=Origin("art"))
    data = metadata(make_card(facts))
    assert "base_model" not in data and "base_model_relation" not in data


def test_a_gated_source_and_its_obligations_are_told(ready: Path) -> None:
    source = {"license": "other", "license_name": "x-non-commercial", "license_link": "LICENSE"}
    facts = facts_of(ready, source)
    card = make_card(replace(facts, origin=replace(facts.origin, gated=True)))
    assert "The source is **gated**" in card and "**non-commercial**" in card
    link = f"https://huggingface.co/{SOURCE}/blob/{COMMIT}/LICENSE"
    assert metadata(card)["license_link"] == link
    assert "[LICENSE](LICENSE)" in card


def test_the_command_is_told_without_tokens_and_home(ready: Path) -> None:
    facts = facts_of(ready)
    home = str(Path.home())
    facts.manifest["command"] = f"mlxconv convert {home}/art --x hf_{'a1' * 17}"
    card = make_card(facts)
    assert "mlxconv convert ~/art --x hf_***" in card
    assert COMMIT[:12] in card


def test_a_sources_words_cannot_write_the_card(ready: Path) -> None:
    """Its licence's name, prompts, reasons and settings are text, whatever is in them."""
    sample_picture(ready / PICTURE_FILE, prompt="](https://evil.org)\n```\n<script>", steps=4)
    facts = facts_of(ready)
    licence = replace(
        facts.licence, id="other", name="[Free](https://evil.org)\n# Free <b>", link="https://e.org"
    )
    facts.manifest["variant"] = "fp16`\n# Evil"
    facts.manifest["command"] = "mlxconv convert 'a\n```\n# Evil'"
    card = make_card(replace(facts, licence=licence))
    body = card.split("---\n", 2)[2]
    outside = re.sub(r"(?ms)^(`{3,})\w*$.*?^\1$", "", body)
    assert "](https://evil.org)" not in outside.replace("\\](", "")
    assert "<script>" not in outside and "<b>" not in outside
    assert not re.search(r"^# (Free|Evil)", outside, re.MULTILINE)


@pytest.mark.parametrize("part", ["pipeline", "class"])
def test_a_class_that_is_no_identifier_is_not_published(part: str, ready: Path) -> None:
    """It would become code in the card's samples."""
    name = "FluxPipeline.from_pretrained(x); import os #"
    file = ready / ("mlxconv.json" if part == "pipeline" else "transformer/config.json")
    data = json.loads(file.read_text(encoding="utf-8"))
    data["pipeline" if part == "pipeline" else "_class_name"] = name
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(MlxconvError, match="is not the name of a class; convert again"):
        facts_of(ready)


def test_a_picture_is_shown_with_how_it_was_made(ready: Path) -> None:
    sample_picture(ready / PICTURE_FILE, prompt="a fox", steps=4, seed=7)
    card = make_card(facts_of(ready))
    assert f"]({PICTURE_FILE})" in card
    assert "*“a fox”, 4 steps, seed 7*" in card


def test_a_pictures_settings_become_code_only_as_numbers(ready: Path) -> None:
    sample_picture(ready / PICTURE_FILE, prompt=["x"], steps="4); import os  #", seed=True)
    assert read_sample(ready / PICTURE_FILE) == Sample(size=(32, 48))
    assert "import os" not in make_card(facts_of(ready))


def test_a_picture_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(b"\x89PNG\r\n not really")
    with pytest.raises(MlxconvError, match=r"a\.png: not a PNG"):
        read_sample(file)


@pytest.mark.parametrize(
    ("class_name", "components", "rank", "tag"),
    [
        ("FluxPipeline", "text_encoder vae", 4, "text-to-image"),
        ("FluxImg2ImgPipeline", "text_encoder vae", 4, "image-to-image"),
        ("StableDiffusionInpaintPipeline", "text_encoder vae", 4, "image-to-image"),
        ("StableDiffusionInstructPix2PixPipeline", "text_encoder vae", 4, "image-to-image"),
        ("QwenImagePipeline", "text_encoder vae", 5, "text-to-image"),
        ("QwenImageEditPipeline", "text_encoder vae", 5, "image-to-image"),
        ("PixArtSigmaPipeline", "text_encoder vae", 4, "text-to-image"),
        ("WanPipeline", "text_encoder vae", 5, "text-to-video"),
        ("WanImageToVideoPipeline", "text_encoder image_encoder vae", 5, "image-to-video"),
        ("I2VGenXLPipeline", "text_encoder image_encoder vae", 4, "image-to-video"),
        ("StableVideoDiffusionPipeline", "image_encoder vae", 5, "image-to-video"),
        ("TextToVideoSDPipeline", "text_encoder vae", 4, "text-to-video"),
        ("AnimateDiffPipeline", "text_encoder motion_adapter vae", 4, "text-to-video"),
        ("CogVideoXVideoToVideoPipeline", "text_encoder vae", 5, "video-to-video"),
        ("StableAudioPipeline", "text_encoder vae", 3, "text-to-audio"),
        ("MusicLDMPipeline", "text_encoder vae", 4, "text-to-audio"),
        ("DiTPipeline", "transformer vae", 4, "unconditional-image-generation"),
        ("SomethingPipeline", "transformer", 2, None),
        (None, "transformer", 4, None),
    ],
)
def test_pipeline_tags(class_name: str | None, components: str, rank: int, tag: str | None) -> None:
    assert pipeline_tag(class_name, components.split(), {rank: 9, 1: 40, 2: 20}) == tag


def test_a_bundle_keeps_its_card_when_it_moves(ready: Path, tmp_path: Path) -> None:
    """Nothing in a card depends on where the bundle lies."""
    measured(ready)
    moved = Path(shutil.copytree(ready, tmp_path / "elsewhere"))
    assert make_card(facts_of(ready)) == make_card(facts_of(moved))
