"""Schedulers from their files: what is read, moved to another class, and refused."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import diffusers
import pytest

from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.schedulers import (
    calculate_shift,
    fitting,
    make_schedule,
    read_scheduler,
    scheduler_of,
    shift_for,
    with_class,
)
from mlxconv.runtime.schedulers.config import check_name
from mlxconv.runtime.schedulers.flow_match import Flow
from mlxconv.runtime.schedulers.table import SCHEDULERS


@pytest.mark.parametrize(("tokens", "mu"), [(256, 0.5), (2176, 0.825), (4096, 1.15)])
def test_shift_is_linear_in_the_tokens(tokens: int, mu: float) -> None:
    config = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}
    assert calculate_shift(tokens) == pytest.approx(mu, rel=1e-12)
    assert shift_for(scheduler_of(config), tokens) == pytest.approx(mu, rel=1e-12)
    assert shift_for(scheduler_of({**config, "max_shift": 2.0}), 4096) == pytest.approx(2.0)
    assert shift_for(scheduler_of({**config, "use_dynamic_shifting": False}), tokens) is None


@pytest.mark.parametrize("name", SCHEDULERS)
def test_knows_the_options_and_defaults_of_diffusers(name: str) -> None:
    signature = inspect.signature(getattr(diffusers, name).__init__)
    theirs = {key: p.default for key, p in signature.parameters.items() if key != "self"}
    ours = dict(SCHEDULERS[name].options)
    hidden = {"sigma_min", "sigma_max"} - set(theirs)  # read where a config holds them
    if name in ("FlowMatchHeunDiscreteScheduler", "LTXEulerAncestralRFScheduler"):
        hidden |= set(Flow.__dataclass_fields__) - set(theirs)  # theirs read few: see the table
    assert {key: ours[key] for key in ours if key not in hidden} == {
        key: tuple(value) if isinstance(value, list) else value for key, value in theirs.items()
    }


# SD 1.5's own file, with options of other classes that diffusers drops.
SD15 = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
    "clip_sample": False,
}


@pytest.mark.parametrize("name", fitting("beta"))
def test_another_class_takes_the_options_that_from_config_gives_it(name: str) -> None:
    theirs = getattr(diffusers, name).from_config(SD15).config
    ours = with_class(scheduler_of(SD15), name).options
    assert {k: ours[k] for k in ours if k in theirs} == {
        k: tuple(theirs[k]) if isinstance(theirs[k], list) else theirs[k]
        for k in ours
        if k in theirs
    }


SDE = {"algorithm_type": "sde-dpmsolver++"}
TRAILING = {"timestep_spacing": "trailing"}
NAMES: list[tuple[str, str, dict[str, Any]]] = [
    ("DPM++ 2M Karras", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    ("dpm++2m-karras", "DPMSolverMultistepScheduler", {"use_karras_sigmas": True}),
    ("dpm++_2m_sde", "DPMSolverMultistepScheduler", SDE),
    ("DPM++ 2M SDE Karras", "DPMSolverMultistepScheduler", {**SDE, "use_karras_sigmas": True}),
    ("DPM++ 3M", "DPMSolverMultistepScheduler", {"solver_order": 3}),
    ("Euler a", "EulerAncestralDiscreteScheduler", {}),
    ("Euler sgm_uniform", "EulerDiscreteScheduler", TRAILING),
    ("euler trailing", "EulerDiscreteScheduler", TRAILING),
    ("DDIM trailing", "DDIMScheduler", TRAILING),
    ("UniPC Karras", "UniPCMultistepScheduler", {"use_karras_sigmas": True}),
    ("LCM", "LCMScheduler", {}),
    ("PLMS", "PNDMScheduler", {"skip_prk_steps": True}),
    ("DPMSolverMultistepScheduler:use_karras_sigmas=True,solver_order=3",
     "DPMSolverMultistepScheduler", {"use_karras_sigmas": True, "solver_order": 3}),
    ("unipc:final_sigmas_type=sigma_min", "UniPCMultistepScheduler",
     {"final_sigmas_type": "sigma_min"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "name", "options"), NAMES, ids=[n[0] for n in NAMES])
def test_a_usual_name_is_from_config_with_its_options(
    text: str, name: str, options: dict[str, Any]
) -> None:
    theirs = getattr(diffusers, name).from_config(SD15, **options)
    ours = with_class(scheduler_of(SD15), text)
    known = {k: v for k, v in ours.options.items() if k in theirs.config}
    assert ours.name == name
    assert {k: list(v) if isinstance(v, tuple) else v for k, v in known.items()} == {
        k: theirs.config[k] for k in known
    }
    theirs.set_timesteps(6)
    schedule = make_schedule(ours, 6)
    assert schedule.timesteps.tolist() == pytest.approx(theirs.timesteps.tolist(), rel=1e-6)
    if hasattr(theirs, "sigmas") and name != "LCMScheduler":
        levels = theirs.sigmas.tolist()
        assert schedule.sigmas.tolist() == pytest.approx(levels[: len(schedule.sigmas)], rel=1e-5)


def test_a_usual_name_takes_the_place_of_the_file_s_spacing() -> None:
    beta = with_class(scheduler_of(SD15), "DPM++ 2M beta")
    config = {**SD15, **beta.options, "_class_name": beta.name}
    karras = with_class(scheduler_of(config), "DPM++ 2M Karras")
    assert (karras.options["use_beta_sigmas"], karras.options["use_karras_sigmas"]) == (False, True)


def test_of_a_flow_short_names_are_its_own_classes() -> None:
    flux = scheduler_of({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    karras = with_class(flux, "Euler Karras")
    assert karras.name == "FlowMatchEulerDiscreteScheduler"
    assert (karras.options["use_karras_sigmas"], karras.options["shift"]) == (True, 3.0)
    assert with_class(flux, "heun").name == "FlowMatchHeunDiscreteScheduler"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("foo karras", r"'foo karras' is not known; there are Euler, .*, behind which karras"),
        ("ddim:eta", "'eta' is not option=value"),
        ("DPM++ 2M:order=2", "reads no option order; it reads: algorithm_type"),
        ("DPM++ 2M:solver_order=7", "solver_order 7 is not supported; supported: 1, 2, 3"),
        ("Euler a Karras", "Euler a has no karras levels; .* model Euler, Heun, DPM"),
        ("LCM:timestep_spacing=trailing", "LCMScheduler reads no option timestep_spacing"),
    ],
)
def test_a_name_that_is_none_says_which_there_are(text: str, says: str) -> None:
    with pytest.raises(MlxconvError, match=says):
        with_class(scheduler_of(SD15), text)


def test_an_option_that_no_class_has_names_the_nearest() -> None:
    with pytest.raises(ArgumentError, match="no class reads an option order; did you mean solver_"):
        check_name("DPM++ 2M:order=2")
    check_name("FlowMatchEuler:shift=2")


def test_options_of_other_classes_are_listed_as_unused() -> None:
    assert scheduler_of(SD15).unused == {"clip_sample": False}


def test_a_flow_stays_a_flow_under_another_class() -> None:
    flux = scheduler_of({"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0})
    unipc = with_class(flux, "unipc")
    assert unipc.name == "UniPCMultistepScheduler"
    assert (unipc.options["use_flow_sigmas"], unipc.options["flow_shift"]) == (True, 3.0)
    assert with_class(unipc, "FlowMatchEuler").options["shift"] == 3.0
    assert unipc.unused == {}


def test_reads_a_bundles_scheduler_folder(tmp_path: Path) -> None:
    file = tmp_path / "scheduler" / "scheduler_config.json"
    file.parent.mkdir()
    file.write_text(json.dumps(SD15))
    assert read_scheduler(tmp_path) == read_scheduler(file.parent) == read_scheduler(file)
    assert read_scheduler(tmp_path).name == "PNDMScheduler"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"_class_name": "DPMSolverSDEScheduler"}, "DPMSolverSDEScheduler is not supp.*DDIMSch"),
        (
            {"_class_name": "HeliosScheduler"},
            "not supported; those that fit: Euler, Euler a, Heun, ",
        ),
        ({"shift": 1.0}, "expected a class under _class_name, found None"),
        ({**SD15, "skip_prk": True}, "has no option skip_prk; it has: .*skip_prk_steps"),
        ({**SD15, "beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid' .*supported: linear, sc"),
        ({**SD15, "prediction_type": "sample"}, "'sample' is not supported; .*epsilon, v_pred"),
        ({**SD15, "num_train_timesteps": "many"}, "num_train_timesteps must be a int, found 'm"),
        ({**SD15, "_class_name": "DDPMScheduler", "variance_type": "learned"}, "'learned' is not"),
        (
            {**SD15, "_class_name": "HeunDiscreteScheduler"}
            | {"use_karras_sigmas": True, "use_beta_sigmas": True},
            "use_karras_sigmas and use_beta_sigmas exclude",
        ),
    ],
)
def test_an_unsupported_file_is_an_error_that_names_what_fits(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "scheduler_config.json").write_text(json.dumps(config))
    with pytest.raises(MlxconvError, match=message) as error:
        read_scheduler(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_class_of_another_family_is_refused() -> None:
    with pytest.raises(MlxconvError, match="does not fit a beta model; those that fit: Euler"):
        with_class(scheduler_of(SD15), "FlowMatchEulerDiscreteScheduler")


def test_a_model_of_inverted_time_keeps_a_class_that_knows_it() -> None:
    mochi = {"_class_name": "FlowMatchEulerDiscreteScheduler", "invert_sigmas": True}
    with pytest.raises(MlxconvError, match="cannot run time backwards"):
        with_class(scheduler_of(mochi), "UniPC")


def test_a_missing_file_says_where_it_was_looked_for(tmp_path: Path) -> None:
    with pytest.raises(MlxconvError, match="here, nor under scheduler/"):
        read_scheduler(tmp_path)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "scheduler_config.json").write_text("{")
    with pytest.raises(MlxconvError, match=r"scheduler_config\.json: is not JSON"):
        read_scheduler(tmp_path)


FLUX = {"_class_name": "FlowMatchEulerDiscreteScheduler", "use_dynamic_shifting": True}


@pytest.mark.parametrize(
    ("config", "asks", "message"),
    [
        (SD15, {"steps": 0}, "steps must be 1 to 1000"),
        (SD15, {"steps": 1001}, "steps must be 1 to 1000"),
        (SD15, {}, "steps, or timesteps or sigmas"),
        (SD15, {"steps": 1000}, "beyond num_train_timesteps"),
        ({**SD15, "trained_betas": [0.01] * 9}, {"steps": 4}, "9 values, fewer than num_train_t"),
        (SD15, {"steps": 4, "begin": 4}, "begin must be one of the 4 model calls"),
        (SD15, {"steps": 4, "sigmas": [1, 0]}, "takes no sigmas; it takes only steps"),
        (FLUX, {"steps": 4}, "needs mu"),
        (FLUX, {"steps": 4, "mu": 1.0, "sigmas": [1.0]}, "that agree"),
        (FLUX, {"steps": 4, "eta": 1.0}, "takes no eta; it takes mu, sigmas, timesteps"),
        ({"_class_name": "DDIMScheduler"}, {"steps": 4, "eta": 2.0}, r"lie in \[0, 1\]"),
        ({"_class_name": "LCMScheduler"}, {"steps": 51}, "more than the 50 timesteps distilled"),
        ({"_class_name": "LCMScheduler"}, {"timesteps": [9, 99]}, "timesteps must fall"),
        ({"_class_name": "HeunDiscreteScheduler"}, {"steps": 4, "begin": 1}, "1 is odd"),
        ({"_class_name": "PNDMScheduler"}, {"steps": 3}, "takes four steps or more"),
        ({"_class_name": "UniPCMultistepScheduler"}, {"sigmas": [1.0]}, "with use_flow_sigmas"),
        (
            {"_class_name": "EulerDiscreteScheduler", "use_karras_sigmas": True},
            {"timesteps": [9, 8]},
            "exclude each other",
        ),
        *(
            ({"_class_name": "DPMSolverMultistepScheduler", option: True}, {"timesteps": [9, 8]},
             f"timesteps and {option} exclude each other")
            for option in ("use_karras_sigmas", "use_lu_lambdas", "use_flow_sigmas")
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "algorithm_type": "dpmsolver"},
            {"steps": 4},
            "needs final_sigmas_type sigma_min",
        ),
        (
            {"_class_name": "UniPCMultistepScheduler", "lower_order_final": False},
            {"steps": 4},
            "no finite step 4 of 4",
        ),
        (
            {"_class_name": "DPMSolverMultistepScheduler", "use_flow_sigmas": True}
            | {"use_lu_lambdas": True, "prediction_type": "flow_prediction"},
            {"steps": 4},
            "combine use_flow_sigmas with no other",
        ),
        (
            {"_class_name": "DDIMScheduler", "rescale_betas_zero_snr": True}
            | {"timestep_spacing": "trailing"},
            {"steps": 4},
            "use prediction_type v_prediction",
        ),
    ],
)
def test_a_schedule_that_cannot_be_made_says_why(
    config: dict[str, Any], asks: dict[str, Any], message: str
) -> None:
    with pytest.raises(MlxconvError, match=message):
        make_schedule(scheduler_of(config), **asks)
