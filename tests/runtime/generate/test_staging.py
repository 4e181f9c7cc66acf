"""An entry by stages: the same results, the weights of the early stages freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.staging import Staged
from mlxconv.runtime.program.stages import split, weights_by_stage
from mlxconv.runtime.program.stored import validate

from ...conftest import Bundles

TIMES = [0.75, 0.5, 0.25]


@pytest.fixture(scope="module")
def flux(flux_bundle: Bundles) -> LoadedComponent:
    return load_component(flux_bundle("fp32"))


def arrays(flux: LoadedComponent, tokens: int = 6, text: int = 5, batch: int = 2) -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> mx.array:
        return mx.array(rng.standard_normal(shape, dtype=np.float32))

    config = flux.config
    return {
        "hidden_states": normal(batch, tokens, config["in_channels"]),
        "encoder_hidden_states": normal(batch, text, config["joint_attention_dim"]),
        "pooled_projections": normal(batch, config["pooled_projection_dim"]),
        "img_ids": mx.arange(3 * tokens).reshape(tokens, 3).astype(mx.float32),
        "txt_ids": mx.zeros((text, 3)),
        "guidance": mx.full((batch,), 4.0),
    }


def schedule(batch: int = 2) -> dict[str, mx.array]:
    return {"timestep": mx.array([[t] * batch for t in TIMES])}


def rel_l2(a: mx.array, b: mx.array) -> float:
    x, y = np.array(a, np.float64), np.array(b, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@pytest.mark.parametrize("compile", ["off", "block", "program"])
@pytest.mark.parametrize("batched", [True, False])
def test_a_staged_step_equals_the_whole_entry(
    flux: LoadedComponent, compile: str, batched: bool
) -> None:
    inputs = arrays(flux)
    staged = Staged(flux, compile=compile, batched=batched).prepare(inputs, schedule())
    for step, time in enumerate(TIMES):
        latents = inputs["hidden_states"] * (1 + step)
        whole = flux(**{**inputs, "hidden_states": latents, "timestep": mx.full((2,), time)})
        assert rel_l2(staged(step, hidden_states=latents), whole) <= 1e-5


@pytest.mark.parametrize("q", ["fp32", "4bit"])
def test_step_by_step_a_staged_run_is_bit_identical(flux_bundle: Bundles, q: str) -> None:
    model = load_component(flux_bundle(q))
    inputs = arrays(model)
    staged = Staged(model, compile="off", batched=False).prepare(inputs, schedule())
    for step, time in enumerate(TIMES):
        whole = model(**inputs, timestep=mx.full((2,), time))
        assert mx.array_equal(staged(step, hidden_states=inputs["hidden_states"]), whole)


def test_many_steps_are_one_trace(flux: LoadedComponent) -> None:
    inputs = arrays(flux)
    staged = Staged(flux)
    times = mx.linspace(1, 0.05, 20)[:, None]
    run = staged.prepare(arrays(flux, batch=1), {"timestep": times})
    for step in range(run.steps):
        mx.eval(run(step, hidden_states=inputs["hidden_states"][:1]))
    assert staged.traces == 1


def test_the_loop_holds_its_own_weights_alone(flux: LoadedComponent) -> None:
    inputs = arrays(flux)
    staged = Staged(flux)
    run = staged.prepare(inputs, schedule())
    mx.eval(run(0, hidden_states=inputs["hidden_states"]))
    (parts,) = staged._parts.values()
    sizes = staged.weight_bytes()
    assert parts.loop.weights.resident_bytes() == sizes["step"]
    assert parts.early.weights.resident_bytes() == 0
    assert sizes["step"] < 0.73 * sizes["all"]
    assert sizes["step"] + sizes["schedule"] + sizes["prompt"] + sizes["constant"] == sizes["all"]


def test_modulation_inside_blocks_leaves_the_loop(flux: LoadedComponent) -> None:
    stages = weights_by_stage(flux.program, flux.program.entries[0])
    early = set().union(*stages[:3])
    modulations = {n for n in flux.program.parameters if ".norm1.linear." in n}
    assert modulations
    assert modulations <= early
    assert not modulations & stages[3]


def test_the_parts_are_a_valid_program(flux: LoadedComponent) -> None:
    parts = split(flux.program, flux.program.entries[0])
    validate(parts)
    assert [entry.name for entry in parts.entries] == ["constant", "prompt", "schedule", "step"]
    assert {i.path for i in parts.entries[3].inputs} & {"timestep", "guidance"} == set()


@pytest.mark.parametrize("q", ["bf16", "8bit"])
def test_other_precisions_stage_as_well(flux_bundle: Bundles, q: str) -> None:
    model = load_component(flux_bundle(q))
    inputs = arrays(model)
    run = Staged(model).prepare(inputs, schedule())
    whole = model(**inputs, timestep=mx.full((2,), TIMES[2]))
    got = run(2, hidden_states=inputs["hidden_states"]).astype(mx.float32)
    assert rel_l2(got, whole.astype(mx.float32)) <= (1e-5 if q == "8bit" else 2e-2)


def test_another_size_is_prepared_anew(flux: LoadedComponent) -> None:
    staged = Staged(flux)
    run = staged.prepare(arrays(flux), schedule())
    with pytest.raises(MlxconvError, match=r"prepared for \(2, 6, \d+\), given \(2, 8"):
        run(0, hidden_states=arrays(flux, tokens=8)["hidden_states"])


def test_only_the_schedule_changes_from_step_to_step(flux: LoadedComponent) -> None:
    with pytest.raises(MlxconvError, match=r"pooled_projections cannot change.*timestep can"):
        Staged(flux).prepare(
            arrays(flux), {**schedule(), "pooled_projections": mx.zeros((3, 2, 32))}
        )


def test_a_schedule_of_unequal_lengths_is_refused(flux: LoadedComponent) -> None:
    with pytest.raises(MlxconvError, match="differ in their number of steps"):
        Staged(flux).prepare(arrays(flux), {**schedule(), "guidance": mx.zeros((2, 2))})


def test_a_bundle_is_left_as_it_was(flux_bundle: Bundles) -> None:
    folder: Path = flux_bundle("fp32")
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    model = load_component(folder)
    Staged(model).prepare(arrays(model), schedule())
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()} == before
