"""The tiny trained pipeline: its pictures, what checks them, its training, and its files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tools.demo_training.text import clip_tokenizer, said_otherwise, t5_tokenizer

from mlxconv.convert.demo import CHECKPOINT, TOKENS
from mlxconv.convert.demo.accuracy import by_diffusers, is_right
from mlxconv.convert.demo.checker import faults
from mlxconv.convert.demo.scenes import (
    COLOURS,
    SHAPES,
    Scene,
    Thing,
    draw,
    held_out_scenes,
    random_scene,
    training_scene,
)

PAIR = Scene("blue", (Thing("red", "circle", "large"), Thing("green", "square", "small")), "above")
SINGLE = Scene("white", (Thing("black", "cross", "small"),), "at the top")


def drawn(scenes: list[Scene], seed: int = 0) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [draw(scene, rng) for scene in scenes]


# ---- the checker --------------------------------------------------------------------------------


def test_drawings_show_what_their_captions_say() -> None:
    rng = np.random.default_rng(1)
    scenes = [random_scene(rng) for _ in range(400)]
    wrong = [s.caption for p, s in zip(drawn(scenes), scenes, strict=True) if faults(p, s)]
    assert len(wrong) <= 4, wrong


def test_the_drawing_of_another_caption_is_wrong() -> None:
    scenes = held_out_scenes(200)
    others = drawn(scenes[1:] + scenes[:1])
    assert all(faults(picture, scene) for picture, scene in zip(others, scenes, strict=True))


def _with_first(scene: Scene, **changed: Any) -> Scene:
    return replace(scene, things=(replace(scene.things[0], **changed), *scene.things[1:]))


@pytest.mark.parametrize(
    ("scene", "said"),
    [
        (PAIR, replace(PAIR, background="black")),
        (PAIR, replace(PAIR, where="below")),
        (PAIR, replace(PAIR, where="left of")),
        (PAIR, replace(PAIR, things=PAIR.things[::-1])),
        (PAIR, replace(PAIR, things=PAIR.things[:1], where=None)),
        *((PAIR, _with_first(PAIR, shape=shape)) for shape in SHAPES if shape != "circle"),
        *((PAIR, _with_first(PAIR, colour=c)) for c in COLOURS if c not in ("red", "blue")),
        (PAIR, _with_first(PAIR, size="small")),
        *((SINGLE, _with_first(SINGLE, shape=shape)) for shape in SHAPES if shape != "cross"),
        (SINGLE, replace(SINGLE, where="in the centre")),
        (SINGLE, replace(SINGLE, where="at the bottom")),
        (SINGLE, replace(SINGLE, where="on the left")),
        (SINGLE, _with_first(SINGLE, size="large")),
    ],
)  # fmt: skip
def test_one_word_wrong_is_a_fault(scene: Scene, said: Scene) -> None:
    for picture in drawn([scene] * 5):
        assert not faults(picture, scene)
        assert faults(picture, said), said.caption


def test_a_caption_without_size_or_place_leaves_them_open() -> None:
    said = Scene("white", (Thing("black", "cross"),), None)
    assert not any(faults(picture, said) for picture in drawn([SINGLE, said, said, said]))


def test_a_shape_too_many_or_unlike_any_is_a_fault() -> None:
    (picture,) = drawn([SINGLE])
    more = picture.copy()
    more[50:56, 50:56] = COLOURS["black"]
    assert faults(more, SINGLE) == ["2 shapes, not 1"]
    rows, columns = np.nonzero((picture == COLOURS["black"]).all(-1))
    half = picture.copy()
    half[rows[columns < columns.mean()], columns[columns < columns.mean()]] = COLOURS["white"]
    assert faults(half, SINGLE)


# ---- what is trained on -------------------------------------------------------------------------


def test_training_never_sees_a_held_out_caption() -> None:
    held_out = {scene.caption for scene in held_out_scenes(200)}
    assert len(held_out) == 200
    rng = np.random.default_rng(2)
    seen = {training_scene(rng).caption for _ in range(5000)}
    drawn_freely = {random_scene(rng).caption for _ in range(5000)}
    assert not held_out & seen
    assert held_out & drawn_freely  # they are captions like all others


def test_saying_it_otherwise_keeps_the_picture_right() -> None:
    (picture,) = drawn([PAIR])
    other = said_otherwise(PAIR)
    assert other.caption == "a small green square on blue, below a large red circle"
    assert not faults(picture, other)
    assert said_otherwise(SINGLE) == SINGLE


@pytest.mark.parametrize("make", [clip_tokenizer, t5_tokenizer])
def test_the_tokenizers_know_every_word(make: Any) -> None:
    tokenizer = make()
    for scene in (PAIR, SINGLE, *held_out_scenes(50)):
        ids = tokenizer(scene.caption).input_ids
        assert len(ids) <= TOKENS
        assert tokenizer.convert_tokens_to_ids("<unk>") not in ids[:-1]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        assert text.replace(" ,", ",").strip() == scene.caption


# ---- training -----------------------------------------------------------------------------------


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(tmp_path: Path) -> None:
    import torch
    from tests.tools.demo_training.loops import Log, Schedule, train
    from torch import nn

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        dtype = next(model.parameters()).dtype
        return (model(x.to(dtype)).float() - x.sum(-1, keepdim=True)).square().mean()

    def run(folder: Path, say: Any) -> Any:
        folder.mkdir(exist_ok=True)
        torch.manual_seed(0)
        schedule = Schedule(20, 0.05, warmup=2, exact_from=0.5)
        log = Log(folder / "log.csv", say)
        return train("line", nn.Linear(4, 1), loss_of, schedule, folder, log, every=3)

    def interrupt(text: str) -> None:
        if text.startswith(("line 9", "line 15")):
            raise KeyboardInterrupt

    whole = run(tmp_path / "whole", lambda text: None)
    for _ in range(3):
        try:
            resumed = run(tmp_path / "parts", interrupt)
        except KeyboardInterrupt:
            continue
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters()))
    assert "line,20," in (tmp_path / "parts" / "log.csv").read_text()


@pytest.mark.slow
def test_training_runs_end_to_end_and_follows_its_seed(tmp_path: Path) -> None:
    from tests.tools.demo_training.loops import Schedule
    from tests.tools.demo_training.training import Plan, train_pipeline

    short = Schedule(2, 1e-3, warmup=1)
    mixed = replace(short, exact_from=0.5)
    plan = Plan(short, short, mixed, short, parts=((0, 64), (1, 64)), batches=(2, 4, 4))
    folders = [train_pipeline(tmp_path / name, seed, plan) for name, seed in
               (("a", 0), ("b", 0), ("c", 1))]  # fmt: skip
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2"):
        name = "model" if "text" in part else "diffusion_pytorch_model"
        a, b, c = ((folder / part / f"{name}.safetensors").read_bytes() for folder in folders)
        assert a == b, part
        assert a != c, part
    pictures = by_diffusers(folders[0], [PAIR.caption], steps=1)
    assert pictures.shape == (1, 64, 64, 3)


# ---- what is shipped ----------------------------------------------------------------------------


def test_the_shipped_checkpoint_is_small() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.rglob("*")) <= 8_000_000


def test_the_shipped_checkpoint_draws_held_out_captions_in_diffusers() -> None:
    scenes = held_out_scenes(32)
    pictures = by_diffusers(CHECKPOINT, [scene.caption for scene in scenes])
    right = [is_right(p, s) for p, s in zip(pictures, scenes, strict=True)]
    assert sum(right) >= 29, right
