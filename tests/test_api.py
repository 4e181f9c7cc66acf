"""The Python API as a user meets it: names, signatures, help, positions, and short results."""

from __future__ import annotations

import inspect
import pydoc
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxconv
from mlxconv.convert.store.options import ConvertOptions
from mlxconv.runtime.bundle import LoadedComponent
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.executor import Executor

from .conftest import Bundles


def test_dir_shows_the_api_and_nothing_else() -> None:
    assert dir(mlxconv) == sorted(mlxconv.__all__)
    assert all(getattr(mlxconv, name) is not None for name in dir(mlxconv))


@pytest.mark.parametrize("name", ["convert", "verify", "load", "load_component", "inspect"])
def test_signatures_have_names_types_and_defaults(name: str) -> None:
    signature = inspect.signature(getattr(mlxconv, name))
    for parameter in signature.parameters.values():
        assert parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        assert parameter.annotation is not parameter.empty
    assert signature.return_annotation is not signature.empty


def test_the_signature_of_convert_has_every_option() -> None:
    found = inspect.signature(mlxconv.convert).parameters
    assert list(found)[:3] == ["source", "out", "q"]
    assert found.keys() >= set(inspect.signature(ConvertOptions).parameters)
    assert (found["q"].default, found["method"].default) == ("bf16", "refit")


@pytest.mark.parametrize(
    ("name", "shows"),
    [
        ("convert", ["convert(source:", "text_encoder_q: ", "anchored globs on modules"]),
        ("load", ["load(bundle:", "keep: hold text encoders"]),
        ("Pipeline.__call__", ["negative: ", "guidance: float | None = None", "cfg_end: the part"]),
    ],
)
def test_help_explains(name: str, shows: list[str]) -> None:
    called: Any = mlxconv
    for part in name.split("."):
        called = getattr(called, part)
    text = pydoc.plain(pydoc.render_doc(called))
    assert not [each for each in shows if each not in text]


def test_convert_is_still_a_package() -> None:
    import mlxconv.convert.conversion as module
    from mlxconv.convert.store import jobs

    assert mlxconv.convert.conversion is module
    assert mlxconv.convert.store.jobs is jobs


def test_help_on_convert_is_of_the_function_alone() -> None:
    text = pydoc.plain(pydoc.render_doc(mlxconv.convert))
    assert "PACKAGE CONTENTS" not in text and "text_encoders" not in text
    assert inspect.isfunction(mlxconv.convert) and not inspect.ismodule(mlxconv.convert)
    assert text.count("\n") < 60


def test_a_keyword_of_other_interfaces_is_answered_with_ours(pipeline_bundle: Bundles) -> None:
    with pytest.raises(TypeError, match="unknown keyword 'size'; give width= and height="):
        mlxconv.load(pipeline_bundle("fp32"))("a cat", size=(64, 64))


# ---- convert -------------------------------------------------------------------------------------


def test_what_is_natural_in_python_is_taken(flux_checkpoint: Path, tmp_path: Path) -> None:
    made = mlxconv.convert(
        str(flux_checkpoint), tmp_path / "out", q=4, components="transformer", dry_run=True,
        set={"transformer_blocks.0.**": 8}, keep="transformer_blocks.1.ff.**",
    )  # fmt: skip
    assert made.q == "4bit"
    kept = {item["name"].rsplit(".", 1)[0] for item in made.components["transformer"].kept}
    assert {name for name in kept if name.startswith("transformer_blocks.1.ff.net")}
    assert repr(made).startswith(f"<ConvertReport {tmp_path / 'out'}: 4bit, 1 components, ")


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"q": 16}, MlxconvError, "16bit"),
        ({"q": 4.5}, MlxconvError, "4.5"),
        ({"set": ["all"]}, MlxconvError, "a mapping of module patterns to bits"),
        ({"set": {"proj_out": "many"}}, MlxconvError, "many"),
        ({"quantize": 4}, TypeError, "unknown keyword 'quantize'"),
        ({"componets": ["vae"]}, TypeError, "did you mean 'components'"),
    ],
)
def test_what_convert_cannot_take_is_said_in_a_sentence(
    flux_checkpoint: Path, tmp_path: Path, options: dict[str, Any], error: type, says: str
) -> None:
    with pytest.raises(error, match=says):
        mlxconv.convert(flux_checkpoint, tmp_path / "out", **options)


def test_a_string_is_one_component_of_verify(flux_checkpoint: Path, flux_bundle: Bundles) -> None:
    found = mlxconv.verify(flux_bundle("fp32"), flux_checkpoint, components="transformer")
    assert repr(found).startswith(f"<ParityReport {flux_bundle('fp32')}: PASSED, ")
    with pytest.raises(MlxconvError, match="absent"):
        mlxconv.verify(flux_bundle("fp32"), flux_checkpoint, components="absent")


# ---- components ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def transformer(flux_bundle: Bundles) -> LoadedComponent:
    return mlxconv.load_component(flux_bundle("fp32"), "transformer")


@pytest.fixture(scope="module")
def inputs(transformer: LoadedComponent) -> dict[str, mx.array]:
    config = transformer.config
    return {
        "hidden_states": mx.random.normal((1, 6, config["in_channels"])),
        "encoder_hidden_states": mx.random.normal((1, 5, config["joint_attention_dim"])),
        "pooled_projections": mx.random.normal((1, config["pooled_projection_dim"])),
        "timestep": mx.array([0.5]),
        "img_ids": mx.zeros((6, 3)),
        "txt_ids": mx.zeros((5, 3)),
        "guidance": mx.array([3.5]),
    }


def test_inputs_by_position_are_in_the_order_of_the_forward(
    transformer: LoadedComponent, inputs: dict[str, mx.array]
) -> None:
    from diffusers import FluxTransformer2DModel

    theirs = list(inspect.signature(FluxTransformer2DModel.forward).parameters)[1:]
    assert transformer.program.entry("forward").arguments == tuple(theirs)
    taken = {name for name in theirs if name in inputs}
    given = [inputs[name] for name in theirs if name in taken]
    expected = transformer(**{name: inputs[name] for name in taken})
    assert np.array_equal(transformer(*given), expected)
    assert np.array_equal(transformer(*given[:3], **dict(zip(theirs[3:], given[3:]))), expected)


def test_positions_that_do_not_fit_are_refused(
    transformer: LoadedComponent, inputs: dict[str, mx.array]
) -> None:
    first = inputs["hidden_states"]
    with pytest.raises(TypeError, match="forward got hidden_states by position and by keyword"):
        transformer(first, **inputs)
    with pytest.raises(TypeError, match=r"takes hidden_states, .*; 30 inputs were given"):
        transformer(*[first] * 30)
    program = transformer.program
    old = replace(program, entries=[replace(e, arguments=()) for e in program.entries])
    executor = Executor(old, transformer.executor.weights)
    with pytest.raises(MlxconvError, match="pass keywords, or convert again"):
        LoadedComponent(transformer.path, transformer.config, executor)(first)
    assert transformer(**inputs) is not None


def test_components_and_pipelines_have_a_short_repr(
    transformer: LoadedComponent, pipeline_bundle: Bundles
) -> None:
    shown = "<FluxTransformer2DModel in float32: forward(hidden_states, encoder_hidden_states, "
    assert repr(transformer).startswith(shown)
    pipeline = mlxconv.load(pipeline_bundle("fp32"))
    assert repr(pipeline) == f"<Pipeline {pipeline_bundle('fp32')}: FluxPipeline, float32>"
    vae = pipeline.parts.component("vae")
    assert "decode(z)" in repr(vae)
    assert "decode" in dir(vae)
    z = mx.zeros((1, vae.config["latent_channels"], 4, 4))
    assert np.array_equal(vae.decode(z), vae.decode(z=z))
