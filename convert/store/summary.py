"""What a conversion reports of each component, and what to do with the bundle."""

from __future__ import annotations

import math
import re
import resource
import shlex
import sys
import time
from typing import Any

from mlxconv.runtime.files import read_json
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.tokens import longest_prompt

from ..report import ComponentReport, ConvertReport
from .options import Job, Run
from .unread import unread_tensors


def summary(
    run: Run, jobs: dict[str, Job], out: str, started: float, download: dict[str, Any] | None
) -> ConvertReport:
    """The report of a conversion that began at `started`, as `time.perf_counter` gives it."""
    reports = {}
    for name, component in run.checkpoint.components.items():
        if name in jobs:
            reports[name] = _component_report(jobs[name])
        else:
            size = sum(t.nbytes for t in component.tensors.values())
            count = sum(t.size for t in component.tensors.values())
            reports[name] = ComponentReport(
                component.class_name, "copied", count, size, size, 8 * size / max(1, count)
            )
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    peak = usage if sys.platform == "darwin" else usage * 1024
    warnings = [*run.warnings, *(f"{k}: {v}" for k, v in run.checkpoint.skipped.items())]
    for name, job in jobs.items():
        if job.plan.not_finite:
            total = sum(job.plan.not_finite.values())
            warnings.append(
                f"{name}: {total} NaN or infinite values in {len(job.plan.not_finite)} tensors"
            )
    source, revision, q = run.checkpoint.source, run.checkpoint.revision, run.options.q
    seconds = time.perf_counter() - started
    dry_run = run.options.dry_run
    steps = [] if dry_run else _next_steps(run, jobs, out)
    return ConvertReport(
        out, source, revision, q, seconds, peak, reports, warnings, download, dry_run, steps
    )


def _next_steps(run: Run, jobs: dict[str, Job], out: str) -> list[str]:
    """Commands for the new bundle, as they work in a shell."""
    verify = ["mlxconv", "verify", out]
    if run.options.model_class is not None:
        verify += ["--class", run.options.model_class]
    steps = [shlex.join(verify)]
    needed = re.compile(r"transformer.*|unet|vae|text_encoder.*")
    programs = {name for name, job in jobs.items() if job.compiled is not None}
    missing = {name for name in run.checkpoint.components if needed.fullmatch(name)} - programs
    if run.checkpoint.class_name in FAMILIES and not missing:
        reads_text = any("tokenizer" in name for name in run.checkpoint.others)
        prompt = "a photo of a cat" if reads_text else "0"  # a class's number
        command = ["mlxconv", "generate", out, prompt, *_tokens(run), "-o", "picture.png"]
        steps.append(shlex.join(command))
    return steps


def _tokens(run: Run) -> list[str]:
    """`--tokens N` where the tokenizer of the longest prompt takes fewer than are padded to."""
    default = FAMILIES[str(run.checkpoint.class_name)].default_tokens
    names = sorted(name for name in run.checkpoint.others if name.startswith("tokenizer"))
    file = run.checkpoint.path / names[-1] / "tokenizer_config.json" if names else None
    if not default or file is None or not file.is_file():
        return []
    longest = longest_prompt(read_json(file))
    return ["--tokens", str(longest)] if longest is not None and longest < default else []


def _component_report(job: Job) -> ComponentReport:
    parameters = sum(group.parameters for group in job.plan.groups)
    bytes_in = sum(t.nbytes for t in job.component.tensors.values())
    program = None
    if job.compiled is not None:
        made = job.compiled.program
        sizes = [entry.sizes for entry in made.entries if entry.sizes]
        program = {"nodes": made.count_nodes(), "blocks": len(made.blocks), "sizes": sizes}
    return ComponentReport(
        job.component.class_name,
        "converted",
        parameters,
        bytes_in,
        job.plan.nbytes,
        8 * job.plan.nbytes / max(1, parameters),
        sum(d.precision.quantized for d in job.plan.decisions.values()),
        _linear_quantized(job),
        kept(job),
        unread_tensors(job.match, job.compiled),
        job.plan.not_finite,
        program,
        job.note,
    )


def _linear_quantized(job: Job) -> float | None:
    sizes = {n: math.prod(p.shape) for n, p in job.parameters.items() if p.kind == "linear"}
    if not (job.policy.default.quantized and sizes):
        return None
    quantized = sum(sizes[n] for n in sizes if job.plan.decisions[n].precision.quantized)
    return round(quantized / sum(sizes.values()), 4)


def kept(job: Job) -> list[dict[str, str]]:
    """Parameters that did not get the precision asked, each with the reason."""
    return [
        {"name": d.name, "dtype": str(d.precision), "why": d.why}
        for d in job.plan.decisions.values()
        if d.why is not None and (d.why != "not a linear weight" or _is_matrix(job, d.name))
    ]


def _is_matrix(job: Job, name: str) -> bool:
    stored = job.component.tensors.get(job.match.found.get(name, name))
    return stored is not None and len(stored.shape) > 1
