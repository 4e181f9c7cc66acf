"""A bundle's folder filled: weights, programs, configurations, the manifest; then read back."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from tqdm import tqdm

from mlxconv.runtime.bundle import MANIFEST
from mlxconv.runtime.exec.weights import WEIGHTS_STEM
from mlxconv.runtime.files import write_json
from mlxconv.runtime.program.program import CONSTANTS_FILE, PROGRAM_FILE
from mlxconv.runtime.program.stored import load_program, to_json

from ..lower.program_cache import versions
from ..recipe.recipe import RECIPE_FILE
from ..report import grouped_kept
from ..source.checkpoint import Component
from ..source.source_card import read_source_card
from .bundle_files import (
    BUNDLE_FORMAT,
    BUNDLE_VERSION,
    component_config,
    copy_rest,
    quantization_table,
)
from .options import Job, Run
from .summary import kept
from .unread import unread_tensors
from .writer import Saved, read_back, write_weights


def write_bundle(
    run: Run,
    jobs: dict[str, Job],
    folder: Path,
    saved: Callable[[str], Saved | None],
    command: str | None,
    progress: bool,
) -> None:
    """Fill an empty folder. saved: what an earlier run finished of a component's weights."""
    total = sum(job.plan.nbytes for job in jobs.values())
    hidden = not progress or not sys.stderr.isatty()
    bar = tqdm(
        total=total, unit="B", unit_scale=True, desc="writing", file=sys.stderr, disable=hidden
    )
    with bar:
        for name, job in jobs.items():
            target = folder / name
            target.mkdir(exist_ok=True)
            write_weights(
                target, WEIGHTS_STEM, job.plan.groups, progress=bar.update, saved=saved(name)
            )
            _write_component(run, job, target)
    for name, component in run.checkpoint.components.items():
        if name not in jobs:
            shutil.copytree(component.path, folder / name)
    copy_rest(run.checkpoint, folder, run.warnings)
    _write_manifest(run, jobs, folder, command)


def read_bundle_back(run: Run, jobs: dict[str, Job], folder: Path) -> None:
    """MlxconvError unless each component's files are whole and its program loads."""
    for name, job in jobs.items():
        read_back(folder / name, WEIGHTS_STEM)
        if job.compiled is not None:
            load_program(folder / name / PROGRAM_FILE)
    run.say("read back: whole")


def _write_component(run: Run, job: Job, target: Path) -> None:
    """What stands beside a component's weights."""
    _write_program(job, target)
    _write_recipe(run, job, target)
    quantization = quantization_table(job.policy.default, job.plan.decisions.values())
    sizes = None if job.recipe is None else job.recipe.sizes_table(job.config)
    config = component_config(job.config, job.policy.default.dtype, quantization, sizes)
    write_json(target / "config.json", config)
    _copy_extras(job.component, target)


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
            "kept": grouped_kept(kept(job)),
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
