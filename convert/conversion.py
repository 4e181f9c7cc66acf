"""Checkpoint -> bundle: open, compile programs, decide precisions, write, read back."""

from __future__ import annotations

import math
import re
import resource
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
from tqdm import tqdm

from mlxconv.runtime.bundle import MANIFEST
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import WEIGHTS_STEM
from mlxconv.runtime.files import write_json
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.generate.options import several, spelled_out
from mlxconv.runtime.hub.names import hub_name
from mlxconv.runtime.interrupts import check_interrupt
from mlxconv.runtime.program.program import CONSTANTS_FILE, PROGRAM_FILE, load_program, to_json

from .lower.program_cache import unpatched, versions
from .recipe.recipe import RECIPE_FILE, Recipe, load_recipe_file
from .report import ComponentReport, ConvertReport, grouped_kept
from .source.checkpoint import INDEX_NAMES, Component, refuse_foreign_links
from .source.hub import Asked, Download, opened
from .source.source_card import published_root, read_source_card
from .source.weight_files import check_unchanged
from .store.bundle_files import (
    BUNDLE_FORMAT,
    BUNDLE_VERSION,
    component_config,
    copy_rest,
    quantization_table,
)
from .store.bundle_folder import atomic_folder, check_target, settle
from .store.jobs import bundle_bytes, check_options, prepare
from .store.options import Job, Options, Run
from .store.resume import fingerprint, unfinished_folder, unfinished_path
from .store.unread import unread_tensors
from .store.writer import Saved, read_back, write_weights


@spelled_out(Options)
def convert(
    source: str | Path,
    out: str | Path = "mlx_model",
    q: str | int = "bf16",
    *,
    set: Mapping[str, str | int] | Iterable[tuple[str, str]] = (),
    progress: bool = False,
    command: str | None = None,
    **options: Any,
) -> ConvertReport:
    """Convert a diffusers pipeline folder, or one component's folder, to an MLX bundle.

    The bundle appears whole at `out` or not at all. Raises MlxconvError for everything a user can
    mend; the message says how.

    source: also a repository of the Hub, ORG/NAME, at `revision`. q: precision of the denoiser, as
    "bf16" or "4bit" (or 4), or a policy FILE.toml; text_encoder_q and vae_q: of the others.
    group_size: weights that share a scale. components: names to convert; the rest is copied. keep:
    anchored globs on modules that stay unquantized. set: bits by such globs, {"blocks.*.ff.**": 8}.
    sizes: (width, height) in pixels, for classes that fix theirs. recipe, model_class: for classes
    of other packages. method: how quantized values are chosen. target_size: gigabytes, instead of
    q. force replaces a bundle; dry_run writes none, and traces with `trace` alone; weights_only
    traces no program. progress: say on stderr what is done. command: recorded in the bundle.
    """
    started = time.perf_counter()
    chosen, use_cache = Options(**_plain(q, set, options)), unpatched()
    check_options(chosen)
    if not chosen.dry_run:
        settle(Path(out))
        if hub_name(source) is not None:
            check_target(Path(out), chosen.force)  # before the Hub is asked anything
    recipe = load_recipe_file(chosen.recipe) if chosen.recipe else None
    model_class = chosen.model_class or _recipe_class(recipe, source)
    asked = Asked(
        chosen.variant,
        model_class,
        chosen.components,
        chosen.revision,
        chosen.low_disk,
        chosen.verify_checksums,
        progress,
    )
    with opened(source, asked) as found:
        if found.download is None:
            path = found.checkpoint.path
            refuse_foreign_links(path, published_root(path))
        run = Run(found.checkpoint, chosen, recipe, use_cache=use_cache)
        if progress:
            run.say = lambda text: print(text, file=sys.stderr, flush=True)
        if found.download is None and not chosen.dry_run:
            check_target(Path(out), chosen.force, found.checkpoint.path)
        jobs = _prepared(run, found.download)
        check_interrupt()
        download = None if found.download is None else found.download.as_json()
        if not chosen.dry_run:
            _convert(run, jobs, found.download, Path(out), command, progress)
        return _report(run, jobs, str(out), started, download)


def _plain(
    q: str | int,
    settings: Mapping[str, str | int] | Iterable[tuple[str, str]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """The fields of `Options`, of what is natural to write in Python."""
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    try:
        chosen = tuple((pattern, _bits(bits)) for pattern, bits in pairs)
    except (TypeError, ValueError):
        raise MlxconvError(
            f"set is {settings!r:.80}: a mapping of patterns on modules to bits, as "
            "{'blocks.*.ff.**': 8}"
        ) from None
    given = {**options, "q": _bits(q), "set": chosen}
    given |= {name: several(given[name]) for name in ("components", "keep") if name in given}
    sizes = tuple(given.get("sizes", ()))
    given["sizes"] = (sizes,) if sizes and isinstance(sizes[0], int) else sizes
    return given


def _bits(precision: str | int) -> str:
    return f"{precision}bit" if isinstance(precision, int) else str(precision)


def _recipe_class(recipe: Recipe | None, source: str | Path) -> str | None:
    """The class that a recipe names in a package of the user's, for a component of its own."""
    if recipe is None or recipe.library in ("diffusers", "transformers"):
        return None
    if any((Path(source).expanduser() / name).is_file() for name in INDEX_NAMES):
        return None
    return f"{recipe.library}:{recipe.class_name}"


def _prepared(run: Run, download: Download | None) -> dict[str, Job]:
    """The jobs; of weights that are on the Hub, by their headers alone where that is asked for."""
    if download is None or not (run.options.dry_run or run.options.low_disk):
        return prepare(run)
    option = "--dry-run" if run.options.dry_run else "--low-disk"
    download.sealed = f"nvfp4 looks at the weights to plan, {option} is without them; leave it out"
    jobs = prepare(run)
    download.sealed = ""
    return jobs


def _convert(
    run: Run,
    jobs: dict[str, Job],
    download: Download | None,
    out: Path,
    command: str | None,
    progress: bool,
) -> None:
    """Fetch what is on the Hub, write the bundle, read it back."""
    needed = bundle_bytes(run.checkpoint, jobs)
    if download is not None:
        download.check_room(out, needed)
        if not run.options.low_disk:
            run.say(f"{download.remote.name}: fetching {len(download.weights)} weight files")
        download.fetch_all()
    with _no_cache(), _target(run, jobs, download, out, needed) as (folder, saved):
        _write(run, jobs, folder, progress, saved)
        _write_manifest(run, jobs, folder, command)
        _verify_written(run, jobs, folder)
        for component in run.checkpoint.components.values():
            check_unchanged(component.stamps)
        check_interrupt()


@contextmanager
def _target(
    run: Run, jobs: dict[str, Job], download: Download | None, out: Path, needed: int
) -> Iterator[tuple[Path, Callable[[str], Saved | None]]]:
    """The folder to fill, and what earlier runs finished of a component: of low-disk runs alone."""
    force = run.options.force
    if download is None or not run.options.low_disk:
        source = run.checkpoint.path
        with atomic_folder(out, force=force, needed_bytes=needed, source=source) as folder:
            yield folder, lambda name: None
        return
    needed += download.largest
    with unfinished_folder(out, _key(run, jobs), force=force, needed_bytes=needed) as work:
        work.keep_only(jobs.keys())
        download.shelf = unfinished_path(out) / "shelf"
        yield work.folder, work.saved
        download.drop()


def _key(run: Run, jobs: dict[str, Job]) -> str:
    """Of all that decides the weights' bytes."""
    outputs = {
        name: [output for group in job.plan.groups for output in group.outputs]
        for name, job in jobs.items()
    }
    origin = [run.checkpoint.source, run.checkpoint.revision, versions()]
    return fingerprint({"origin": origin, "method": run.options.method, "outputs": outputs})


# ---- writing ------------------------------------------------------------------------------------


@contextmanager
def _no_cache() -> Any:
    """MLX keeps freed buffers for later; a conversion has no use for them."""
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)


def _write(
    run: Run,
    jobs: dict[str, Job],
    folder: Path,
    progress: bool,
    saved: Callable[[str], Saved | None],
) -> None:
    total = sum(job.plan.nbytes for job in jobs.values())
    bar = tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="writing",
        file=sys.stderr,
        disable=not progress or not sys.stderr.isatty(),
    )
    with bar:
        for name, job in jobs.items():
            target = folder / name
            target.mkdir(exist_ok=True)
            write_weights(
                target, WEIGHTS_STEM, job.plan.groups, progress=bar.update, saved=saved(name)
            )
            _write_program(job, target)
            _write_recipe(run, job, target)
            quantization = quantization_table(job.policy.default, job.plan.decisions.values())
            sizes = None if job.recipe is None else job.recipe.sizes_table(job.config)
            config = component_config(job.config, job.policy.default.dtype, quantization, sizes)
            write_json(target / "config.json", config)
            _copy_extras(job.component, target)
    for name, component in run.checkpoint.components.items():
        if name not in jobs:
            shutil.copytree(component.path, folder / name)
    copy_rest(run.checkpoint, folder, run.warnings)


def _write_program(job: Job, target: Path) -> None:
    if job.compiled is None:
        return
    from safetensors.numpy import save_file

    (target / PROGRAM_FILE).write_text(to_json(job.compiled.program), encoding="utf-8")
    if job.compiled.constants:
        save_file(job.compiled.constants, str(target / CONSTANTS_FILE))


def _write_recipe(run: Run, job: Job, target: Path) -> None:
    """A recipe that does not come with mlxconv goes into the bundle: `verify` needs it."""
    if job.derived:
        (target / RECIPE_FILE).write_text(job.derived, encoding="utf-8")
    elif run.options.recipe and job.compiled is not None and job.recipe is run.recipe:
        shutil.copyfile(run.options.recipe, target / RECIPE_FILE)


def _copy_extras(component: Component, target: Path) -> None:
    """Small text files beside the weights, such as generation_config.json."""
    for file in sorted(component.path.glob("*.json")):
        if (
            file.name != "config.json"
            and not file.name.endswith(".index.json")
            and (".safetensors.index." not in file.name and ".bin.index." not in file.name)
        ):
            shutil.copyfile(file, target / file.name)


def _write_manifest(run: Run, jobs: dict[str, Job], folder: Path, command: str | None) -> None:
    converted = {
        name: {
            "class": job.component.class_name,
            "library": job.component.library,
            "q": str(job.policy.default),
            "method": run.options.method if job.policy.default.quantized else None,
            "program": job.compiled is not None,
            "source_bytes": sum(t.nbytes for t in job.component.tensors.values()),
            "kept": grouped_kept(_kept(job)),
            "unused": unread_tensors(job.match, job.compiled),
        }
        for name, job in jobs.items()
    }
    copied = [name for name in run.checkpoint.components if name not in jobs]
    source, path = run.checkpoint.source, run.checkpoint.path
    if source == str(path):  # of this disk: `verify` finds it from another folder too
        source = str(path.absolute())
    manifest = {
        "format": BUNDLE_FORMAT,
        "version": BUNDLE_VERSION,
        "pipeline": run.checkpoint.class_name,
        "source": source,
        "revision": run.checkpoint.revision,
        "variant": run.options.variant,
        "source_card": read_source_card(run.checkpoint.path),
        "command": command,
        "versions": versions(),
        "components": converted,
        "copied": copied,
    }
    write_json(folder / MANIFEST, manifest)
    # A root config.json makes the Hub count downloads, and tells loaders what this is.
    root = {"model_type": "mlxconv", "_class_name": run.checkpoint.class_name, "library": "mlx"}
    write_json(folder / "config.json", root)


def _verify_written(run: Run, jobs: dict[str, Job], folder: Path) -> None:
    for name, job in jobs.items():
        read_back(folder / name, WEIGHTS_STEM)
        if job.compiled is not None:
            load_program(folder / name / PROGRAM_FILE)
    run.say("read back: whole")


# ---- reporting ----------------------------------------------------------------------------------


def _report(
    run: Run, jobs: dict[str, Job], out: str, started: float, download: dict[str, Any] | None
) -> ConvertReport:
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
        steps.append(shlex.join(["mlxconv", "generate", out, prompt, "-o", "picture.png"]))
    return steps


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
        _kept(job),
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


def _kept(job: Job) -> list[dict[str, str]]:
    """Parameters that did not get the precision asked, each with the reason."""
    return [
        {"name": d.name, "dtype": str(d.precision), "why": d.why}
        for d in job.plan.decisions.values()
        if d.why is not None and (d.why != "not a linear weight" or _is_matrix(job, d.name))
    ]


def _is_matrix(job: Job, name: str) -> bool:
    stored = job.component.tensors.get(job.match.found.get(name, name))
    return stored is not None and len(stored.shape) > 1
