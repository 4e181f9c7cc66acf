"""README.md and docs/: what they show runs, what they name exists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import pytest

import mlxconv
from mlxconv.cli import cli

from .conftest import Bundles

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OF_OTHER_TOOLS = {"--index-url", "--strict"}
# What fits FLUX.1-schnell, and what fits the tiny pipeline, which has guidance as FLUX.1-dev does.
TINY = {
    '"timestep": mx.array([0.5])': '"timestep": mx.array([0.5]), "guidance": mx.array([3.5])',
    "(1, 256, 4096)": "(1, 256, 64)",
    "(1, 768)": "(1, 32)",
    "blocks.3": "blocks.1",
    "steps=4": "steps=2, width=32, height=32",
}


def pages() -> Iterator[Any]:
    return (pytest.param(page, id=page.name) for page in PAGES)


def blocks(page: str, language: str = "") -> list[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def commands() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks(str(page)):
            for line in block.replace("\\\n", " ").splitlines():
                if line.startswith("mlxconv "):
                    yield pytest.param(line, id=f"{page.stem}: {line[8:48]}")


def flat(group: click.Group) -> Iterator[click.Command]:
    """The group's commands, and those of the groups in it."""
    for command in group.commands.values():
        yield command
        if isinstance(command, click.Group):
            yield from flat(command)


COMMANDS = list(flat(cli))
OPTIONS = {name for each in (cli, *COMMANDS) for p in each.params for name in p.opts}
OPTIONS |= {"--help", "--no-check"}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_help_explains_every_option_in_a_sentence(command: click.Command) -> None:
    options = [each for each in command.params if isinstance(each, click.Option)]
    unclear = [o.name for o in options if not re.match(r"[A-Z].{8,}[.\]]$", o.help or "", re.S)]
    assert (unclear, bool(re.match(r"[A-Z].*\.", command.help or "", re.S))) == ([], True)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 170


@pytest.mark.parametrize("line", commands())
def test_a_command_that_a_page_shows_is_one(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("VENV/bin", "FLUX.1-schnell", "checkpoint/transformer"):
        Path(folder).mkdir(parents=True)
    for file in ("policy.toml", "mine.toml", "checkpoint/transformer/config.json"):
        Path(file).touch()
    Path("VENV/bin/python").symlink_to("/bin/sh")
    _, *words = shlex.split(line, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    command: click.Command = cli
    while isinstance(command, click.Group):
        command = command.commands[words.pop(0)]
    command.make_context(line, words)


@pytest.mark.parametrize("page", pages())
def test_a_page_names_options_and_files_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", text))
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    files = re.findall(r"`((?:convert|runtime|recipes|tests|src|docs)/[\w./]+)`", text)
    assert named <= OPTIONS | OF_OTHER_TOOLS
    assert [link for link in links if not (page.parent / link).exists()] == []
    assert [name for name in files if not (ROOT / name).exists() and "CLASS" not in name] == []


def test_every_command_and_every_public_name_is_on_a_page() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    names = set(mlxconv.__all__) - {"__version__"}
    api = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in cli.commands if f"mlxconv {name}" not in text] == []
    assert [name for name in names if f"`{name}`" not in api] == []


SNIPPETS = [
    pytest.param(text, id=f"{page}-{number}")
    for page in ("README.md", "docs/pictures.md", "docs/loop.md", "docs/python.md")
    for number, text in enumerate(blocks(page, "python"))
]  # docs/diffusers.md: tests/convert/into_diffusers


@pytest.mark.slow
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_a_snippet_runs(
    snippet: str,
    pipeline_checkpoint: Path,
    pipeline_bundle: Bundles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "FLUX.1-schnell").symlink_to(pipeline_checkpoint)
    if "convert(" not in snippet:
        (tmp_path / "flux-4bit").symlink_to(pipeline_bundle("4bit"))
    monkeypatch.chdir(tmp_path)
    for published, tiny in TINY.items():
        snippet = snippet.replace(published, tiny)
    names: dict[str, Any] = {"prompt": flux_inputs(1), "negative_prompt": flux_inputs(2)}
    names["noise"] = mx.random.normal((1, 16, 64))
    exec(snippet, names)
    for name in ("latents", "velocity"):
        assert name not in names or mx.isfinite(names[name]).all()


def flux_inputs(seed: int) -> dict[str, mx.array]:
    """Of the tiny transformer: 16 tokens of latents, 8 of text."""
    mx.random.seed(seed)
    return {
        "hidden_states": mx.zeros((1, 16, 64)),
        "encoder_hidden_states": mx.random.normal((1, 8, 64)),
        "pooled_projections": mx.random.normal((1, 32)),
        "img_ids": mx.zeros((16, 3)),
        "txt_ids": mx.zeros((8, 3)),
        "guidance": mx.array([3.5]),
    }
