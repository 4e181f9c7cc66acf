"""The loop: guidance in its variants, schedules, evaluation, interruption; against diffusers."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

from mlxconv.runtime.bundle import LoadedComponent, load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.denoise import LoopSettings, Progress, denoise
from mlxconv.runtime.generate.guidance import Guidance, Guided
from mlxconv.runtime.generate.staging import Staged
from mlxconv.runtime.schedulers import Schedule, Scheduler, make_schedule, scheduler_of

from ...conftest import Bundles

STEPS, TOKENS, TEXT = 6, 6, 5


@pytest.fixture(scope="module")
def flux(flux_bundle: Bundles) -> LoadedComponent:
    return load_component(flux_bundle("fp32"))


def prompt(model: LoadedComponent, seed: int, text: int = TEXT) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    config = model.config
    return {
        "hidden_states": mx.zeros((1, TOKENS, config["in_channels"])),
        "encoder_hidden_states": mx.array(
            rng.standard_normal((1, text, config["joint_attention_dim"]), dtype=np.float32)
        ),
        "pooled_projections": mx.array(
            rng.standard_normal((1, config["pooled_projection_dim"]), dtype=np.float32)
        ),
        "img_ids": mx.arange(3 * TOKENS).reshape(TOKENS, 3).astype(mx.float32),
        "txt_ids": mx.zeros((text, 3)),
        "guidance": mx.full((1,), 4.0),
    }


def noise(model: LoadedComponent) -> mx.array:
    rng = np.random.default_rng(9)
    shape = (1, TOKENS, model.config["in_channels"])
    return mx.array(rng.standard_normal(shape, dtype=np.float32))


def flow(steps: int = STEPS) -> Schedule:
    # Sigmas exact in bf16, to which the class rounds its timesteps.
    return make_schedule(euler(), sigmas=[1 - i / 8 for i in range(steps)])


def euler(**options: Any) -> Scheduler:
    return scheduler_of({"_class_name": "FlowMatchEulerDiscreteScheduler", **options})


def times(schedule: Schedule) -> dict[str, mx.array]:
    return {"timestep": mx.array(schedule.timesteps)[:, None] / 1000}


def run(
    model: LoadedComponent,
    guidance: Guidance | None = None,
    *,
    text: int = TEXT,
    batched: bool | None = None,
    **options: Any,
) -> tuple[mx.array, Guided, Staged]:
    """Latents after the loop, under true guidance where there is some."""
    schedule = flow()
    staged = Staged(model)
    negative = None if guidance is None else prompt(model, 2, text)
    guided = Guided(staged, prompt(model, 1), times(schedule), negative, guidance, batched=batched)
    return denoise(guided, noise(model), schedule, **options), guided, staged


def rel_l2(a: Any, b: Any) -> float:
    x, y = np.array(a, np.float64), np.array(b, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


# ---- against diffusers ---------------------------------------------------------------------------


def by_diffusers(checkpoint: Path, model: LoadedComponent, guide: Any) -> np.ndarray[Any, Any]:
    """The same loop by diffusers' transformer and scheduler; `guide(pos, neg)` as pipelines do."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

    transformer = FluxTransformer2DModel.from_pretrained(checkpoint)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    scheduler.set_timesteps(sigmas=[1 - i / 8 for i in range(STEPS)])
    both = [
        {k: torch.from_numpy(np.array(v)) for k, v in prompt(model, seed).items()}
        for seed in (1, 2)
    ]
    latents = torch.from_numpy(np.array(noise(model)))
    with torch.no_grad():
        for t in scheduler.timesteps:
            pos, neg = (
                transformer(**{**p, "hidden_states": latents}, timestep=t[None] / 1000)[0]
                for p in both
            )
            latents = scheduler.step(guide(pos, neg), t, latents)[0]
    return latents.numpy()


def qwen(pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
    """diffusers 0.42.1, QwenImagePipeline."""
    guided = neg + 4.0 * (pos - neg)
    return guided * (pos.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))


def rescaled(pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
    from diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl import (
        rescale_noise_cfg,
    )

    return rescale_noise_cfg(neg + 4.0 * (pos - neg), pos, 0.7)


def z_image(pos: torch.Tensor, neg: torch.Tensor) -> torch.Tensor:
    """diffusers 0.42.1, ZImagePipeline with cfg_normalization 1.1."""
    guided = pos + 4.0 * (pos - neg)
    most = 1.1 * torch.linalg.vector_norm(pos)
    norm = torch.linalg.vector_norm(guided)
    return guided * (most / norm) if norm > most else guided


VARIANTS = {
    "none": (None, lambda pos, neg: pos),
    "cfg": (Guidance(4.0), lambda pos, neg: neg + 4.0 * (pos - neg)),
    "norm": (Guidance(4.0, rescale="norm"), qwen),
    "std": (Guidance(4.0, rescale="std", amount=0.7), rescaled),
    "limit": (Guidance(4.0, origin="positive", rescale="limit", amount=1.1), z_image),
}


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_loop_ends_where_that_of_diffusers_does(
    flux: LoadedComponent, flux_checkpoint: Path, variant: str, batched: bool
) -> None:
    guidance, guide = VARIANTS[variant]
    ours, guided, _ = run(flux, guidance, batched=batched)
    assert guided.batched == (batched and guidance is not None)
    assert rel_l2(ours, by_diffusers(flux_checkpoint, flux, guide)) <= 5e-5


# ---- guidance ------------------------------------------------------------------------------------


def counting(guided: Guided, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models called, in order."""
    called: list[str] = []
    for name in ("_positive", "_negative", "_both"):
        model = getattr(guided, name)
        if model is not None:

            def call(step: int, *, name: str = name, model: Any = model, **inputs: Any) -> Any:
                called.append(name)
                return model(step, **inputs)

            monkeypatch.setattr(guided, name, call)
    return called


@pytest.mark.parametrize(
    ("guidance", "expected"),
    [
        (Guidance(1.0), ["_positive"] * STEPS),
        (Guidance(0.0, origin="positive"), ["_positive"] * STEPS),
        (Guidance(3.0, end=0.5), ["_both"] * 3 + ["_positive"] * 3),
        (Guidance(3.0, start=0.5), ["_positive"] * 3 + ["_both"] * 3),
        (Guidance([3.0, 1.0, 2.0, 1.0, 1.0, 5.0]), "both pos both pos pos both".split()),
    ],
)
def test_where_guidance_is_off_one_prediction_is_made(
    flux: LoadedComponent,
    monkeypatch: pytest.MonkeyPatch,
    guidance: Guidance,
    expected: list[str],
) -> None:
    schedule = flow()
    guided = Guided(Staged(flux), prompt(flux, 1), times(schedule), prompt(flux, 2), guidance)
    called = counting(guided, monkeypatch)
    denoise(guided, noise(flux), schedule)
    assert [name[:4] for name in called] == [f"_{e.strip('_')[:3]}" for e in expected]


def test_twenty_steps_of_changing_guidance_are_one_trace(flux: LoadedComponent) -> None:
    schedule = make_schedule(euler(shift=3.0), 20)
    staged = Staged(flux)
    guidance = Guidance([1.5 + i / 10 for i in range(20)])
    guided = Guided(staged, prompt(flux, 1), times(schedule), prompt(flux, 2), guidance)
    combined = []
    compiled = guided._combine
    monitored = mx.compile(lambda *a: (combined.append(1), guidance.combine(*a))[1])
    guided._combine = monitored
    denoise(guided, noise(flux), schedule)
    assert staged.traces == 1
    assert len(combined) == 1
    assert compiled is not None


def test_prompts_of_other_lengths_are_guided_one_after_the_other(flux: LoadedComponent) -> None:
    assert run(flux, Guidance(2.0), text=3)[1].batched is False
    with pytest.raises(MlxconvError, match=r"encoder_hidden_states is \(1, 3, 64\) and \(1, 5"):
        run(flux, Guidance(2.0), text=3, batched=True)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rescale": "std2"}, "choose one of none, norm, std, limit"),
        ({"start": 0.5, "end": 0.2}, "expected 0 <= start <= end <= 1"),
    ],
)
def test_guidance_that_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(MlxconvError, match=says):
        Guidance(**wrong)


def test_a_scale_for_each_step_is_needed(flux: LoadedComponent) -> None:
    with pytest.raises(MlxconvError, match="2 guidance scales for 6 steps"):
        run(flux, Guidance([1.0, 2.0]))


# ---- the loop ------------------------------------------------------------------------------------


@pytest.mark.parametrize("evaluate", [1, 5, 0])
@pytest.mark.parametrize("clear", [0, 1, 10])
def test_when_results_are_computed_changes_none(
    flux: LoadedComponent, evaluate: int, clear: int
) -> None:
    settings = LoopSettings(evaluate_every=evaluate, clear_cache_every=clear)
    assert mx.array_equal(run(flux, settings=settings)[0], run(flux)[0])


def test_a_callback_sees_each_step(flux: LoadedComponent) -> None:
    seen: list[Progress] = []
    run(flux, callback=lambda p: seen.append(p))
    assert [p.step for p in seen] == list(range(STEPS))
    assert [p.timestep for p in seen] == [1000 - 125 * i for i in range(STEPS)]
    assert all(a.seconds < b.seconds for a, b in pairwise(seen))


def test_a_callback_ends_the_loop_between_steps(flux: LoadedComponent) -> None:
    seen: list[Progress] = []

    def stop(progress: Progress) -> bool:
        seen.append(progress)
        return progress.step < 2

    latents, _, _ = run(flux, callback=stop)
    assert len(seen) == 3
    assert mx.array_equal(latents, seen[-1].latents)


def test_an_interrupt_between_steps_leaves_the_loop(flux: LoadedComponent) -> None:
    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(flux, callback=interrupt)


def test_a_stochastic_schedule_needs_noise(flux: LoadedComponent) -> None:
    schedule = make_schedule(euler(stochastic_sampling=True), 3)
    guided = Guided(Staged(flux), prompt(flux, 1), times(schedule))
    with pytest.raises(MlxconvError, match="stochastic: pass noise"):
        denoise(guided, noise(flux), schedule)


def test_noise_is_asked_for_where_it_is_drawn(flux: LoadedComponent) -> None:
    """diffusers' LCM draws none at its last call."""
    schedule = make_schedule(scheduler_of({"_class_name": "LCMScheduler"}), 4)
    asked: list[int] = []

    def drawn(call: int) -> mx.array:
        asked.append(call)
        return noise(flux)

    guided = Guided(Staged(flux), prompt(flux, 1), times(schedule))
    latents = denoise(guided, noise(flux), schedule, noise=drawn)
    assert asked == [0, 1, 2]
    assert mx.isfinite(latents).all()


@pytest.mark.parametrize("q", ["bf16", "4bit"])
def test_nothing_in_the_loop_is_promoted(flux_bundle: Bundles, q: str) -> None:
    """The residual stream of a bf16 run is bf16, though latents and timesteps come as fp32."""
    model = load_component(flux_bundle(q), dtype="bfloat16")
    staged = Staged(model, compile="off")
    prepared = staged.prepare(prompt(model, 1), times(flow()))
    values = prepared.tapped(0, prepared.block_paths(), hidden_states=noise(model))
    assert len(values) == 4
    assert {v.dtype for found in values.values() for v in found} == {mx.bfloat16}
