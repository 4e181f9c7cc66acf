"""However a program is run, it gives the same numbers; weights are held once."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.errors import MlxconvError


def inputs(image_tokens: int = 6, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "hidden_states": rng.standard_normal((1, image_tokens, 16), np.float32),
        "encoder_hidden_states": rng.standard_normal((1, 4, 64), np.float32),
        "pooled_projections": rng.standard_normal((1, 32), np.float32),
        "timestep": np.array([0.5], np.float32),
        "img_ids": np.stack([np.arange(image_tokens)] * 3, 1).astype(np.float32),
        "txt_ids": np.zeros((4, 3), np.float32),
        "guidance": np.array([4.0], np.float32),
    }


@pytest.fixture(params=["fp32", "4bit"])
def bundle(request: pytest.FixtureRequest, flux_bundle: Any) -> Path:
    return Path(flux_bundle(request.param))


def distance(a: Any, b: Any) -> float:
    a, b = (np.array(x).astype(np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("compile", ["block", "program"])
def test_compiling_changes_nothing(bundle: Path, compile: str) -> None:
    plain, compiled = load_component(bundle), load_component(bundle, compile=compile)
    for tokens in (6, 9, 6):
        given = inputs(tokens, seed=tokens)
        assert distance(compiled(**given), plain(**given)) < 2e-6


def test_streaming_changes_nothing(bundle: Path) -> None:
    streamed = load_component(bundle, stream=True)
    expected = load_component(bundle)(**inputs())
    assert distance(streamed(**inputs()), expected) < 1e-6
    assert distance(streamed(**inputs()), expected) < 1e-6


def test_taps_of_a_compiled_program_are_those_of_a_plain_one(bundle: Path) -> None:
    path = "transformer_blocks.1"
    found = []
    for compile in ("off", "program"):
        component = load_component(bundle, compile=compile)
        found.append(component.executor.run("forward", inputs(), [path])[1][path])
    for one, other in zip(*found, strict=True):
        assert distance(one, other) < 1e-6


def test_each_weight_is_held_once(bundle: Path) -> None:
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    component = load_component(bundle, compile="program")
    mx.eval(component(**inputs()))
    held = component.executor.weights.resident_bytes()
    gc.collect()
    mx.clear_cache()
    assert mx.get_active_memory() - before < 1.05 * held


@pytest.mark.parametrize("compile", ["off", "block", "program"])
def test_a_held_matrix_that_is_stacked_may_be_read_alone_too(bundle: Path, compile: str) -> None:
    component: LoadedComponent = load_component(bundle, compile=compile)
    mx.eval(component(**inputs()))
    alone = component.executor.weights.get("transformer_blocks.0.attn.to_k.bias")
    assert alone.shape == (64,)  # type: ignore[union-attr]


def test_an_unknown_compile_mode_is_refused(bundle: Path) -> None:
    with pytest.raises(MlxconvError, match="choose one of off, block, program"):
        load_component(bundle, compile="fast")
