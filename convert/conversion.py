"""Checkpoint -> bundle: open, compile programs, decide precisions, write, read back."""

from __future__ import annotations

import gc
import resource
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program import CONSTANTS_FILE, PROGRAM_FILE, Parameter, load_program, to_json
from mlxconv.runtime.weights import WEIGHTS_STEM

from .bundle_files import (
    BUNDLE_FORMAT,
    BUNDLE_VERSION,
    component_config,
    copy_rest,
    quantization_table,
    refuse_nested,
    versions,
    write_json,
)
from .checkpoint import (
    Checkpoint,
    Component,
    KeyMatch,
    component_class,
    match_keys,
    merged_config,
    open_checkpoint,
    tied_weights,
)
from .plan import Plan, make_plan
from .programs import Compiled, Size, compile_program, module_parameters
from .quantization import (
    Policy,
    check_patterns,
    load_policy_file,
    parse_precision,
)
from .recipe import Recipe, all_recipes, load_recipe, load_recipe_file
from .report import ComponentReport, ConvertReport
from .writer import MANIFEST, atomic_folder, read_back, write_weights


@dataclass(frozen=True)
class Options:
    """The arguments of `convert`; the CLI's options have the same names."""

    q: str = "bf16"
    group_size: int | None = None
    components: tuple[str, ...] = ()
    text_encoder_q: str | None = None
    vae_q: str | None = None
    keep: tuple[str, ...] = ()
    set: tuple[tuple[str, str], ...] = ()
    sizes: tuple[Size, ...] = ()
    recipe: Path | None = None
    method: str = "refit"
    target_size: float | None = None
    variant: str | None = None
    weights_only: bool = False
    force: bool = False
    dry_run: bool = False


@dataclass
class _Job:
    """One component on its way: what is known before anything is written."""

    component: Component
    config: dict[str, Any]
    policy: Policy
    compiled: Compiled | None
    match: KeyMatch
    plan: Plan
    note: str = ""


@dataclass
class _Run:
    """A conversion: its options, and what it learned on the way."""

    checkpoint: Checkpoint
    options: Options
    recipe: Recipe | None
    warnings: list[str] = field(default_factory=list)
    say: Callable[[str], None] = lambda text: None


def convert(
    source: str | Path,
    out: str | Path,
    q: str = "bf16",
    *,
    progress: bool = False,
    command: str | None = None,
    **options: Any,
) -> ConvertReport:
    """Convert a diffusers pipeline folder, or one component's folder, to an MLX bundle.

    `options` are those of `Options`. The bundle appears whole at `out` or not at all. Raises
    MlxconvError for everything a user can mend; the message says how.
    """
    started = time.perf_counter()
    chosen = Options(q=q, **options)
    checkpoint = open_checkpoint(source, chosen.variant)
    recipe = load_recipe_file(chosen.recipe) if chosen.recipe else None
    run = _Run(checkpoint, chosen, recipe)
    if progress:
        run.say = lambda text: print(text, file=sys.stderr, flush=True)
    names = _chosen(checkpoint, chosen)
    _check_early(run)
    jobs = {name: _prepare(run, checkpoint.components[name]) for name in names}
    _check_keep(run, jobs)
    gc.collect()
    needed = sum(job.plan.nbytes for job in jobs.values()) + _copied_bytes(checkpoint, names)
    if not chosen.dry_run:
        with (
            _no_cache(),
            atomic_folder(
                Path(out), force=chosen.force, needed_bytes=needed + (4 << 20),
                source=checkpoint.path,
            ) as folder,
        ):  # fmt: skip
            _write(run, jobs, folder, progress)
            _write_manifest(run, jobs, folder, command)
            _verify_written(run, jobs, folder)
    return _report(run, jobs, str(out), started)


def _check_early(run: _Run) -> None:
    """Mistakes in the options, before minutes of tracing."""
    options = run.options
    if not options.q.endswith(".toml"):
        parse_precision(options.q, options.group_size)
    for text in (options.text_encoder_q, options.vae_q, *(bits for _, bits in options.set)):
        if text is not None:
            parse_precision(_bits(text))
    if options.method not in ("rtn", "refit", "search"):
        raise MlxconvError(
            f"--method {options.method}: expected refit, rtn or search "
            "(imatrix and gptq need calibration, which this version does not have)"
        )


def _bits(text: str) -> str:
    return f"{text}bit" if text.isdigit() else text


def _chosen(checkpoint: Checkpoint, options: Options) -> list[str]:
    unknown = sorted(set(options.components) - set(checkpoint.components))
    if unknown:
        have = ", ".join(checkpoint.components)
        raise MlxconvError(f"{checkpoint.path}: no component {', '.join(unknown)}; it has {have}")
    names = [n for n in checkpoint.components if not options.components or n in options.components]
    for name in names:
        refuse_nested(name)
    return names


# ---- preparing ----------------------------------------------------------------------------------


def _prepare(run: _Run, component: Component) -> _Job:
    config = merged_config(component)
    cls = component_class(component)
    recipe = _recipe_for(run, component)
    compiled, note = None, ""
    if recipe is None or run.options.weights_only:
        note = "weights only" + ("" if recipe else f" (no recipe for {component.class_name})")
        if recipe is None and len(run.checkpoint.components) == 1 and not run.options.weights_only:
            load_recipe(component.class_name)  # raises: it says how to add one
        parameters, tied = _module_parameters(cls, component, config)
    else:
        run.say(f"{component.name}: tracing {component.class_name}")
        compiled = compile_program(cls, config, recipe, run.options.sizes)
        parameters, tied = compiled.parameters, {}
    match = match_keys({n: p.shape for n, p in parameters.items()}, component.tensors, tied)
    match.check(str(component.path))
    named = parameters if compiled else _stored_names(parameters, match)
    found = match.found if compiled else {name: name for name in named}
    policy = _policy(run, component, recipe)
    plan = make_plan(component, named, found, policy, run.options.method)
    return _Job(component, config, policy, compiled, match, plan, note)


def _recipe_for(run: _Run, component: Component) -> Recipe | None:
    if run.recipe is not None and run.recipe.class_name == component.class_name:
        return run.recipe
    return all_recipes().get(component.class_name)


def _module_parameters(
    cls: type, component: Component, config: dict[str, Any]
) -> tuple[dict[str, Parameter], dict[str, str]]:
    """Without a program, a tensor's kind is that of the module that owns it."""
    module, parameters = module_parameters(cls, component.library, component.path, config)
    return parameters, tied_weights(module)


def _stored_names(parameters: dict[str, Parameter], match: KeyMatch) -> dict[str, Parameter]:
    """Parameters under the names of the files; tied ones once."""
    return {stored: parameters[name] for name, stored in match.found.items()}


def _policy(run: _Run, component: Component, recipe: Recipe | None) -> Policy:
    options = run.options
    keep, overrides = list(options.keep), [
        (pattern, parse_precision(_bits(bits))) for pattern, bits in options.set
    ]  # fmt: skip
    text = _q_for(run, component)
    if text.endswith(".toml"):
        file = load_policy_file(Path(text))
        default = file.default
        keep, overrides = [*keep, *file.keep], [*overrides, *file.overrides]
    else:
        default = parse_precision(text, options.group_size if text == options.q else None)
    return Policy(
        default,
        keep=keep,
        recipe_keep=recipe.precision.keep if recipe else (),
        modulation=recipe.precision.modulation if recipe else (),
        overrides=overrides,
    )


def _q_for(run: _Run, component: Component) -> str:
    """`--q` is for the denoiser, and for a component given alone; others follow floats only."""
    options = run.options
    alone = len(run.checkpoint.components) == 1 or options.components == (component.name,)
    special = None
    if component.library == "transformers":
        special = options.text_encoder_q or "bf16"
        alone = alone and options.text_encoder_q is None
    elif "autoencoder" in component.class_name.lower() or component.name.startswith("vae"):
        special = options.vae_q or "bf16"
        alone = alone and options.vae_q is None
    if special is None or alone:
        return options.q
    explicit = options.text_encoder_q if component.library == "transformers" else options.vae_q
    is_float = not options.q.endswith(".toml") and not parse_precision(options.q).quantized
    return options.q if is_float and explicit is None else special


def _check_keep(run: _Run, jobs: dict[str, _Job]) -> None:
    modules = {name.removesuffix(".weight") for job in jobs.values() for name in job.plan.decisions}
    patterns = [*run.options.keep, *(pattern for pattern, _ in run.options.set)]
    if patterns:
        check_patterns(patterns, modules)


# ---- writing ------------------------------------------------------------------------------------


@contextmanager
def _no_cache() -> Any:
    """MLX keeps freed buffers for later; a conversion has no use for them."""
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def _write(run: _Run, jobs: dict[str, _Job], folder: Path, progress: bool) -> None:
    total = sum(job.plan.nbytes for job in jobs.values())
    bar = tqdm(
        total=total, unit="B", unit_scale=True, desc="writing", file=sys.stderr,
        disable=not progress or not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        for name, job in jobs.items():
            target = folder / name
            target.mkdir()
            write_weights(target, WEIGHTS_STEM, job.plan.groups, progress=bar.update)
            _write_program(job, target)
            quantization = quantization_table(job.policy.default, job.plan.decisions.values())
            config = component_config(job.config, job.policy.default.dtype, quantization)
            write_json(target / "config.json", config)
            _copy_extras(job.component, target)
    for name, component in run.checkpoint.components.items():
        if name not in jobs:
            shutil.copytree(component.path, folder / name)
    copy_rest(run.checkpoint, folder, run.warnings)


def _write_program(job: _Job, target: Path) -> None:
    if job.compiled is None:
        return
    from safetensors.numpy import save_file

    (target / PROGRAM_FILE).write_text(to_json(job.compiled.program), encoding="utf-8")
    if job.compiled.constants:
        save_file(job.compiled.constants, str(target / CONSTANTS_FILE))


def _copy_extras(component: Component, target: Path) -> None:
    """Small text files beside the weights, such as generation_config.json."""
    for file in sorted(component.path.glob("*.json")):
        if file.name != "config.json" and not file.name.endswith(".index.json") and (
            ".safetensors.index." not in file.name and ".bin.index." not in file.name
        ):  # fmt: skip
            shutil.copyfile(file, target / file.name)


def _write_manifest(run: _Run, jobs: dict[str, _Job], folder: Path, command: str | None) -> None:
    converted = {
        name: {
            "class": job.component.class_name,
            "library": job.component.library,
            "q": str(job.policy.default),
            "method": run.options.method if job.policy.default.quantized else None,
            "program": job.compiled is not None,
            "unused": _unused(job),
        }
        for name, job in jobs.items()
    }
    copied = [name for name in run.checkpoint.components if name not in jobs]
    manifest = {
        "format": BUNDLE_FORMAT,
        "version": BUNDLE_VERSION,
        "pipeline": run.checkpoint.class_name,
        "source": str(run.checkpoint.path),
        "revision": _revision(run.checkpoint.path),
        "command": command,
        "versions": versions(),
        "components": converted,
        "copied": copied,
    }
    write_json(folder / MANIFEST, manifest)
    # A root config.json makes the Hub count downloads, and tells loaders what this is.
    root = {"model_type": "mlxconv", "_class_name": run.checkpoint.class_name, "library": "mlx"}
    write_json(folder / "config.json", root)


def _revision(path: Path) -> str | None:
    """The commit, when the checkpoint lies in the Hub's cache (`snapshots/<commit>`)."""
    resolved = path.absolute()
    return resolved.name if resolved.parent.name == "snapshots" else None


def _verify_written(run: _Run, jobs: dict[str, _Job], folder: Path) -> None:
    for name, job in jobs.items():
        read_back(folder / name, WEIGHTS_STEM)
        if job.compiled is not None:
            load_program(folder / name / PROGRAM_FILE)
    run.say("read back: whole")


# ---- reporting ----------------------------------------------------------------------------------


def _copied_bytes(checkpoint: Checkpoint, names: Sequence[str]) -> int:
    folders = [c.path for n, c in checkpoint.components.items() if n not in names]
    folders += checkpoint.others.values()
    return sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file())


def _unused(job: _Job) -> list[str]:
    """Checkpoint tensors that no program reads: unknown to the class, or dead in its forward."""
    unused = list(job.match.unused)
    if job.compiled is not None:
        read = {job.match.found[name] for name in job.compiled.program.parameters}
        unused += [s for n, s in job.match.found.items() if s not in read]
    return sorted(set(unused))


def _report(run: _Run, jobs: dict[str, _Job], out: str, started: float) -> ConvertReport:
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
    source, q = str(run.checkpoint.path), run.options.q
    seconds = time.perf_counter() - started
    revision = _revision(run.checkpoint.path)
    return ConvertReport(out, source, revision, q, seconds, peak, reports, warnings)


def _component_report(job: _Job) -> ComponentReport:
    parameters = sum(group.parameters for group in job.plan.groups)
    bytes_in = sum(t.nbytes for t in job.component.tensors.values())
    kept = [
        {"name": d.name, "dtype": str(d.precision), "why": d.why}
        for d in job.plan.decisions.values()
        if d.why is not None and (d.why != "not a linear weight" or _is_matrix(job, d.name))
    ]
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
        kept,
        _unused(job),
        job.plan.not_finite,
        program,
        job.note,
    )


def _is_matrix(job: _Job, name: str) -> bool:
    stored = job.component.tensors.get(job.match.found.get(name, name))
    return stored is not None and len(stored.shape) > 1

