"""Files that say how their picture was made, and the pictures that are made again from them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from mlxconv.cli import cli
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.families.parts import Parts
from mlxconv.runtime.generate.options import Options
from mlxconv.runtime.generate.picture_files import as_text, read_record, records_of, target_names
from mlxconv.runtime.generate.pipeline import load

from ...conftest import Bundles

SHORT = ["--size", "48x32", "--tokens", "16", "--steps", "2"]


def generate(bundle: Path, *options: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["generate", *map(str, [bundle, *options])], input=stdin)


def written(done: Result) -> list[Path]:
    assert done.exit_code == 0, done.stderr
    return [Path(line) for line in done.stdout.splitlines()]


def same(one: Path, other: Path) -> bool:
    return bool(np.array_equal(np.asarray(Image.open(one)), np.asarray(Image.open(other))))


@pytest.fixture(scope="module")
def bundle(pipeline_bundle: Bundles) -> Path:
    return pipeline_bundle("4bit")


@pytest.fixture(scope="module")
def picture(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made with options that are not the defaults, and a random seed."""
    out = tmp_path_factory.mktemp("picture") / "cat.png"
    options = ["--negative", "rain", "--cfg", "2.5", "--scheduler", "FlowMatchLCMScheduler"]
    return written(generate(bundle, "a cat, 猫", "-o", out, *SHORT, *options))[0]


def test_a_png_has_the_usual_text_and_all_settings_as_json(picture: Path) -> None:
    text = Image.open(picture).text
    record = json.loads(text["mlxconv"])
    first, negative, facts = text["parameters"].splitlines()
    assert (first, negative) == ("a cat, 猫", "Negative prompt: rain")
    assert f"CFG scale: 2.5, Distilled CFG Scale: 3.5, Seed: {record['seed']}, Size: 48x32" in facts
    assert facts.startswith("Steps: 2, Sampler: FlowMatchLCMScheduler, ")
    assert record.items() >= {
        "prompt": "a cat, 猫", "negative": "rain", "steps": 2, "size": [48, 32], "cfg": 2.5,
        "guidance": 3.5, "precision": {"weights": "4bit", "activations": "float32"},
        "pipeline": "FluxPipeline",
    }.items()  # fmt: skip
    assert len(record["bundle_hash"]) == 64
    assert {"mlxconv", "mlx"} <= record["versions"].keys()
    assert not any(str(value).startswith("/") for value in record.values())  # no local path


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_a_picture_is_made_again_from_its_file(
    picture: Path, bundle: Path, tmp_path: Path, suffix: str
) -> None:
    first = written(generate(bundle, "--like", picture, "-o", tmp_path / f"first{suffix}"))[0]
    again = written(generate(bundle, "--like", first, "-o", tmp_path / "again.png"))[0]
    assert same(again, picture)
    assert read_record(first) == read_record(picture)
    kind = {".png": "PNG", ".jpg": "JPEG", ".webp": "WEBP"}[suffix]
    assert Image.open(first).format == kind
    if kind != "PNG":
        comment = Image.open(first).getexif().get_ifd(0x8769)[0x9286]
        assert comment[8:].decode("utf-16-be").startswith("a cat, 猫\nNegative prompt: rain\n")


def test_options_override_what_a_picture_says(picture: Path, bundle: Path, tmp_path: Path) -> None:
    options = ["--sigmas", "1.0,0.5,0.2", "--seed", "7"]
    done = generate(bundle, "a dog", "--like", picture, "-o", tmp_path / "dog.png", *options)
    record = read_record(written(done)[0])
    assert (record["prompt"], record["seed"], record["steps"]) == ("a dog", 7, 3)
    assert (record["negative"], record["call"]["cfg"]) == ("rain", 2.5)
    assert "another bundle" not in done.stderr


def test_another_bundle_is_noted(picture: Path, pipeline_bundle: Bundles, tmp_path: Path) -> None:
    done = generate(pipeline_bundle("fp32"), "--like", picture, "-o", tmp_path / "cat.png")
    assert "was made with another bundle" in done.stderr
    assert not same(written(done)[0], picture)


def test_a_folder_takes_files_named_by_seed_and_overwrites_none(
    bundle: Path, tmp_path: Path
) -> None:
    command = ["a cat", "-o", f"{tmp_path / 'new'}/", *SHORT, "--seed", "5"]
    assert [f.name for f in written(generate(bundle, *command, "--count", "2"))] == [
        "5.png",
        "6.png",
    ]
    assert [f.name for f in written(generate(bundle, *command))] == ["5-1.png"]
    assert same(tmp_path / "new/5.png", tmp_path / "new/5-1.png")


def test_prompts_come_from_a_file_or_stdin_with_several_seeds(bundle: Path, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("\ufeffa cat\n\n  a dog \n", encoding="utf-8")
    seeds = ["--seed", "3", "--seed", "1"]
    made = written(generate(bundle, "--prompts", lines, "-o", tmp_path, *SHORT, *seeds))
    assert [f.name for f in made] == ["1-3.png", "1-1.png", "2-3.png", "2-1.png"]
    assert [read_record(f)["prompt"] for f in made] == ["a cat"] * 2 + ["a dog"] * 2
    again = generate(bundle, "--prompts", "-", "-o", tmp_path / "x.webp", *SHORT, "--seed", "1",
                     stdin="a dog\n")  # fmt: skip
    assert read_record(written(again)[0]) == read_record(made[3])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([], "give a PROMPT, --prompts FILE or --like PICTURE"),
        (["a", "--prompts", "-"], "not both"),
        (["a", "--seed", "1", "--seed", "2", "--count", "2"], "--count needs a single --seed"),
    ],
)
def test_what_contradicts_itself_is_a_usage_error(
    bundle: Path, options: list[str], says: str
) -> None:
    done = generate(bundle, *options, "-o", "x.png")
    assert done.exit_code == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("out", "options", "says"),
    [
        ("x.gif", ["a"], r"ends in \.png, \.jpg, \.jpeg, \.webp, or a folder"),
        ("x", ["a"], "a folder that exists or ends in /"),
        ("absent/x.png", ["a"], "no folder .*absent; create it first"),
        ("absent/x/", ["a"], "no folder .*absent; create it first"),
        ("x.png", ["--prompts", "-"], "the file has no prompts; write one per line"),
        ("x.png", ["--like", __file__], "not an image that can be read"),
        ("x.png", ["--like", "docs/demo.png"], "stores no settings"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    tmp_path: Path, out: str, options: list[str], says: str
) -> None:
    options = [str(Path(o).absolute()) if o.endswith(".png") else o for o in options]
    done = generate(tmp_path / "no-bundle", *options, "-o", f"{tmp_path}/{out}", stdin="\n")
    if done.exit_code == 2:
        assert re.search(says, done.stderr), done.stderr
        return
    with pytest.raises(MlxconvError, match=says):
        raise done.exception or AssertionError(done.output)


def test_several_pictures_are_named_by_one_rule(tmp_path: Path) -> None:
    one = [{"prompt": "a", "seed": seed} for seed in (3, 4, 4)]
    two = [{"prompt": prompt, "seed": 7} for prompt in ("a", "b")]
    (tmp_path / "3.png").touch()
    (tmp_path / "x-3.png").touch()
    for out, records, names in (
        (tmp_path / "x.webp", one[:1], ["x.webp"]),
        (tmp_path / "x.png", one, ["x-3.png", "x-4.png", "x-4-1.png"]),
        (tmp_path / "x.png", two, ["x-1-7.png", "x-2-7.png"]),
        (tmp_path, one, ["3-1.png", "4.png", "4-1.png"]),
        (tmp_path, two, ["1-7.png", "2-7.png"]),
    ):
        assert [file.name for file in target_names(out, records)] == names
    shown = " ".join(CliRunner().invoke(cli, ["generate", "--help"]).stdout.split())
    assert "named NAME-SEED.png, with several prompts NAME-1-SEED.png; in a folder without" in shown


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"prompt": "a cat", "seed": 1}, "does not hold all that made it"),
        ({"call": {"prompt": "a", "listener": "x"}}, "unusable 'listener'"),
        ({"call": {"prompt": "a", "steps": "9"}}, "unusable 'steps'"),
    ],
)
def test_a_record_from_anywhere_is_checked_and_the_hint_works(
    bundle: Path, tmp_path: Path, record: dict[str, Any], says: str
) -> None:
    from PIL.PngImagePlugin import PngInfo

    info = PngInfo()
    info.add_text("mlxconv", json.dumps(record))
    Image.new("RGB", (8, 8)).save(tmp_path / "old.png", pnginfo=info)
    done = generate(bundle, "--like", tmp_path / "old.png", "-o", tmp_path / "new.png")
    with pytest.raises(MlxconvError, match=f"{says}.*; pass prompt, seed, steps and size"):
        raise done.exception or AssertionError(done.output)
    assert written(generate(bundle, "a cat", "--seed", "1", "-o", tmp_path / "new.png", *SHORT))


def test_pictures_of_python_save_themselves(bundle: Path, tmp_path: Path) -> None:
    made = load(bundle)("a cat", width=48, height=32, steps=1, tokens=16, count=2)
    one, other = made.save(tmp_path / "cat.webp")
    assert [one.name, other.name] == [f"cat-{seed}.webp" for seed in made.seeds]
    assert [read_record(f)["seed"] for f in (one, other)] == made.seeds
    with pytest.raises(MlxconvError, match="the prompt is too long for a JPEG"):
        made.records[0]["prompt"] = "a cat " * 9000
        made.save(tmp_path / "cat.jpg")


def test_guidance_that_a_checkpoint_does_not_read_is_not_recorded(bundle: Path) -> None:
    pipe = load(bundle)
    plan = pipe.plan(Options("a cat", seed=1, steps=2))
    assert records_of(pipe.parts, pipe.family, plan)[0]["guidance"] == 3.5
    parts: Any = pipe.parts
    parts.config = lambda name: {**Parts.config(parts, name), "guidance_embeds": False}
    record = records_of(pipe.parts, pipe.family, plan)[0]
    assert record["guidance"] is None
    assert "Distilled CFG Scale" not in as_text(record)
