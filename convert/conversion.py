"""Checkpoint -> bundle: open, compile programs, decide precisions, write, read back."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.options import several, spelled_out
from mlxconv.runtime.hub.names import hub_name
from mlxconv.runtime.interrupts import check_interrupt

from .lower.program_cache import unpatched, versions
from .recipe.reading import load_recipe_file
from .recipe.recipe import Recipe
from .report import ConvertReport
from .source.checkpoint import INDEX_NAMES, refuse_foreign_links
from .source.hub import Asked, Download, opened
from .source.source_card import published_root
from .source.weight_files import check_unchanged
from .store.bundle import read_bundle_back, write_bundle
from .store.bundle_folder import atomic_folder, check_target, settle
from .store.jobs import bundle_bytes, check_options, prepare
from .store.options import ConvertOptions, Job, Run
from .store.resume import fingerprint, unfinished_folder, unfinished_path
from .store.summary import summary
from .store.writer import Saved


@spelled_out(ConvertOptions)
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

    The bundle appears whole at `out` or not at all. Raises MlxconvError for every error that a
    user can fix; the message says how.

    source: also a repository of the Hub, ORG/NAME, at `revision`. q: precision of the denoiser,
    such as "bf16" or "4bit" (or 4), or a policy FILE.toml; text_encoder_q, vae_q: of the others.
    group_size: number of weights that share a scale. components: names to convert; the others are
    copied. keep: anchored globs on modules that stay unquantized. set: bits by such globs,
    {"blocks.*.ff.**": 8}. sizes: (width, height) in pixels, for classes with a fixed size. recipe,
    model_class: for classes of your own. method: how quantized values are chosen. target_size:
    largest size in gigabytes, instead of q. force replaces a bundle; dry_run writes none, and
    traces with `trace` alone; weights_only traces no program. progress: report progress on stderr.
    command: recorded in the bundle.
    """
    started = time.perf_counter()
    chosen, target = ConvertOptions(**_plain(q, set, options)), Path(out)
    use_cache = unpatched()  # before torch is imported
    check_options(chosen)
    _check_early(chosen, source, target)
    recipe = load_recipe_file(chosen.recipe) if chosen.recipe else None
    with opened(source, _asked(chosen, recipe, source, progress)) as found:
        run, download = Run(found.checkpoint, chosen, recipe, use_cache=use_cache), found.download
        if progress:
            run.say = lambda text: print(text, file=sys.stderr, flush=True)
        if download is None:
            _check_local(run, target)
        jobs = _prepared(run, download)  # each component traced, lowered, its weights decided
        check_interrupt()
        about = None if download is None else download.as_json()
        if not chosen.dry_run:
            needed = bundle_bytes(run.checkpoint, jobs)
            _fetch(run, download, target, needed)
            with _no_cache(), _folder(run, jobs, download, target, needed) as (folder, saved):
                write_bundle(run, jobs, folder, saved, command, progress)
                read_bundle_back(run, jobs, folder)
                _check_source(run)
        return summary(run, jobs, str(out), started, about)


def _check_early(options: ConvertOptions, source: str | Path, out: Path) -> None:
    """What an earlier conversion left is settled, and a bundle in the way refused."""
    if not options.dry_run:
        settle(out)
        if hub_name(source) is not None:
            check_target(out, options.force)  # before the Hub is asked anything


def _asked(
    options: ConvertOptions, recipe: Recipe | None, source: str | Path, progress: bool
) -> Asked:
    return Asked(
        options.variant,
        options.model_class or _recipe_class(recipe, source),
        options.components,
        options.revision,
        options.low_disk,
        options.verify_checksums,
        progress,
    )


def _check_local(run: Run, out: Path) -> None:
    """MlxconvError where a source of this disk may not be read, or lies where the bundle goes."""
    path = run.checkpoint.path
    refuse_foreign_links(path, published_root(path))
    if not run.options.dry_run:
        check_target(out, run.options.force, path)


def _plain(
    q: str | int,
    settings: Mapping[str, str | int] | Iterable[tuple[str, str]],
    options: dict[str, Any],
) -> dict[str, Any]:
    """The fields of `ConvertOptions`, of what is natural to write in Python."""
    pairs = settings.items() if isinstance(settings, Mapping) else settings
    try:
        chosen = tuple((pattern, _bits(bits)) for pattern, bits in pairs)
    except (TypeError, ValueError):
        raise MlxconvError(
            f"set is {settings!r:.80}: expected a mapping of module patterns to bits, such as "
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


def _fetch(run: Run, download: Download | None, out: Path, needed: int) -> None:
    """The weights that are on the Hub, unless they are fetched one by one (`low_disk`)."""
    if download is not None:
        download.check_room(out, needed)
        if not run.options.low_disk:
            run.say(f"{download.remote.name}: fetching {len(download.weights)} weight files")
        download.fetch_all()


def _check_source(run: Run) -> None:
    """MlxconvError where a source file was changed meanwhile."""
    for component in run.checkpoint.components.values():
        check_unchanged(component.stamps)
    check_interrupt()


@contextmanager
def _folder(
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


@contextmanager
def _no_cache() -> Iterator[None]:
    """MLX keeps freed buffers for later; a conversion has no use for them."""
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
