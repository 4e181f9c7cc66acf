"""Refuses options of `convert` that would have no effect."""

from __future__ import annotations

from collections.abc import Mapping

from mlxconv.runtime.errors import MlxconvError

from ..quantize.policy import Decision, Precision, matches
from .options import ConvertOptions, Job, is_vae


def check_effects(options: ConvertOptions, jobs: Mapping[str, Job]) -> None:
    """Raise MlxconvError for an option that decides nothing of any component's plan."""
    decisions = [decision for job in jobs.values() for decision in job.plan.decisions.values()]
    made = [decision.precision for decision in decisions]
    encoders = [job for job in jobs.values() if job.component.library == "transformers"]
    vaes = [job for job in jobs.values() if is_vae(job.component)]
    fixed = any(job.recipe and job.recipe.fixed_sizes() for job in jobs.values())
    quantizing = any(job.policy.default.quantized for job in jobs.values())
    for given, option, has_effect, why in (
        (options.text_encoder_q, "--text-encoder-q", encoders, "no text encoder is converted"),
        (options.vae_q, "--vae-q", vaes, "no VAE is converted"),
        (options.keep, "--keep", quantizing, f"--q {options.q} quantizes no weight by default"),
        (
            options.method != "refit",
            f"--method {options.method}",
            any(p.mode == "affine" for p in made),
            "nothing is quantized in an affine precision",
        ),
        (
            options.group_size,
            "--group-size",
            any(p.mode == "affine" and p.group_size for p in made)
            and not (options.q.endswith(".toml") and not options.set),
            "the groups are those of the policy file"
            if options.q.endswith(".toml")
            else "nothing is quantized in an affine precision",
        ),
        (
            options.sizes,
            "--size",
            fixed and not options.weights_only,
            "nothing is traced with --weights-only"
            if options.weights_only
            else "no class here builds its image size in, one bundle runs at every size",
        ),
    ):
        if given and not has_effect:
            raise MlxconvError(f"{option} has no effect: {why}; leave it out")
    overrides = [policy.overrides for policy in (job.policy for job in jobs.values())]
    for (pattern, bits), (_, asked) in zip(options.set, *overrides[:1]):
        _check_set(f"--set {pattern}={bits}", pattern, asked, decisions)


def _check_set(option: str, pattern: str, asked: Precision, decisions: list[Decision]) -> None:
    """At least one weight that the pattern matches has to be stored as it says."""
    found = [d for d in decisions if matches(pattern, d.name.removesuffix(".weight"))]
    if any((d.precision.mode, d.precision.bits) == (asked.mode, asked.bits) for d in found):
        return
    why = next((d.why for d in found if d.why), "an earlier --set decides them")
    raise MlxconvError(
        f"{option} has no effect on any of the {len(found)} weights that it matches, such as "
        f"{found[0].name}: {why}; leave it out, or match linear weights"
    )
