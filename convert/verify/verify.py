"""Parity: a bundle against diffusers: weights, blocks, forwards, trajectories and pictures.

Metrics, for a result a and its reference b over all outputs together: `max_abs` max|a-b|,
`max_rel` max|a-b| / max|b|, `rel_l2` ||a-b|| / ||b||, `cosine`, `sqnr_db` -20 log10(rel_l2).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxconv.runtime.bundle import Bundle, is_bundle, open_bundle, read_json
from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.exec.bounds import MEMORY_BYTES
from mlxconv.runtime.exec.weights import weight_map
from mlxconv.runtime.generate.options import several
from mlxconv.runtime.hub.bundles import is_hub_bundle
from mlxconv.runtime.hub.download import open_remote
from mlxconv.runtime.hub.names import hub_name
from mlxconv.runtime.program.program import PROGRAM_FILE, Parameter
from mlxconv.runtime.program.stored import load_program

from ..inspection import inspect
from ..lower.compile import module_parameters
from ..recipe.reading import bundle_recipe, load_recipe_file
from ..recipe.recipe import Recipe
from ..source.checkpoint import Checkpoint, Component, component_class
from ..source.hub import Asked, is_recorded_source, opened, recorded_source, shown_name
from ..source.model_class import named_config, recorded_class
from ..source.source_card import origin_of
from ..trace.class_config import full_config
from .bundles import bundle_rows
from .coverage import not_covered, pixel_dims, sizes_of
from .forward import Case, compare_entries
from .metrics import Row, make_row
from .parity_report import ParityReport as ParityReport
from .record import save_parity, saved_report
from .tokens import tokenizer_rows
from .weights import Audit, audit

if TYPE_CHECKING:
    from .pictures import PipelineCase

PIPELINE_TIERS = ("trajectory", "image")
TIERS = ("forward", "block", *PIPELINE_TIERS)


def verify(
    bundle: str | Path,
    against: str | Path | None = None,
    *,
    components: str | Sequence[str] = (),
    tier: str = "forward",
    seed: int = 0,
    dtype: str | None = None,
    threshold: float | None = None,
    recipe: str | Path | None = None,
    model_class: str | None = None,
    stream: bool = False,
    dims: Mapping[str, int] | None = None,
    prompts: str | Sequence[str] = (),
    steps: int | None = None,
    size: tuple[int, int] | None = None,
    guidance: float | None = None,
    tokens: int | None = None,
    page: str | Path | None = None,
    command: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> ParityReport:
    """Compare a bundle with the checkpoint it was made from, run by diffusers in PyTorch.

    against: by default the source that the bundle records; another bundle is compared in MLX, by
    one forward pass of every entry, and judged by `threshold` alone.

    First every weight is compared with the checkpoint's; then `tier` "forward" compares one
    forward pass of every entry, "block" each block's outputs too. fp32 passes at rel_l2 <= 1e-4;
    bf16 and fp16 when the error is at most 1.5x that of PyTorch in that dtype against PyTorch in
    fp32; a quantized bundle when the runtime equals its dequantized weights run in PyTorch (1e-4),
    the error against the fp32 original being reported beside. `stream` holds one block at a time.
    `model_class` is the "package.module:Class" of a component converted alone; by default the one
    that the bundle was converted by.
    `dims` are sizes to run at, by the recipe's names (by default others than those traced with).

    "trajectory" and "image" run whole pipelines, for each prompt: latents after each step, and
    pictures. They pass at 50 dB (of latents to themselves; PSNR of pictures in 0 to 1) where the
    other tiers ask for 1e-4; half precision may also be at most 1.5x as far off as PyTorch's own.
    size: (width, height), of the other tiers' forward passes too; tokens: of the longest text
    encoder. Steps are 4, all else is the pipeline's by default.

    Weights that are zero throughout hide errors before them: the float32 forward is compared once
    more with noise in their place, on both sides. An output of one number throughout fails.

    components: names to compare; by default all. prompts: one or several, for those tiers.
    page: an HTML report to write, with blocks, and pictures where the source is a whole pipeline;
    command: what it shows as the way to get it again.
    """
    os.environ["MLX_ENABLE_TF32"] = "0"
    components = several(components)
    asked = _asked(several(prompts), steps=steps, size=size, guidance=guidance, tokens=tokens)
    _check(tier, page, stream, dims or {}, asked)
    made = open_bundle(bundle)
    against = recorded_source(made) if against is None else against
    if _is_bundle(against):
        if tier != "forward" or page or stream or asked or recipe or model_class:
            raise MlxconvError(
                f"{against}: is a bundle, which can only be compared with --tier forward; only "
                "--component, --seed, --dim, --dtype and --threshold apply"
            )
        rows = bundle_rows(
            made,
            open_bundle(against),
            components,
            seed=seed,
            dtype=dtype,
            threshold=threshold,
            dims=dims or {},
        )
        notes = [
            f"both ran in {dtype or 'float32'}, so that they differ by their weights alone "
            "(--dtype)"
        ]
        judged = threshold is not None
        return ParityReport(str(bundle), str(against), seed, rows, notes=notes, judged=judged)
    model_class = model_class or _recorded_class(made, against)
    whole = tier in PIPELINE_TIERS or page is not None
    with opened(against, _wanted(made, against, components, model_class, whole)) as source:
        if source.download is not None:
            source.download.fetch_all()
        checkpoint = source.checkpoint
        given = load_recipe_file(recipe) if recipe else None
        names = _names(made, checkpoint, components)
        found = ParityReport(str(bundle), str(against), seed)
        pipeline = None
        if whole:
            from .pictures import PipelineCase
            from .pipelines import Request

            request = Request(**asked, seed=seed)
            pipeline = PipelineCase(made, checkpoint, tuple(components), request, dtype, threshold)
            pipeline = _runnable(pipeline, tier, stream, found)
        cases = [
            _case(made, checkpoint, name, given, seed, dtype, threshold, stream, dims or {})
            for name in names
        ]
        if size is not None and not whole:
            cases = _at_size(cases, size)
        own = "block" if page is not None else tier
        made_of = made.manifest["components"]
        found.unused = {n: list(made_of[n]["unused"]) for n in names if made_of[n].get("unused")}
        complete = []
        for case in cases:
            with named_config(case.component.path):
                complete.append(_verify_component(case, own, found, say))
        if not components:
            found.tiers += tokenizer_rows(made, checkpoint)
        if pipeline is not None and all(complete):
            tiers = [t for t in PIPELINE_TIERS if t == tier or page is not None]
            _verify_pipeline(pipeline, tier, tiers, found, say)
            if not found.passed and not found.begins_at:
                _locate(cases, threshold, found, say)
        if page is not None:
            from .page import write_page

            write_page(Path(page), found, made, checkpoint, command or _call(bundle, against))
    if not components and threshold is None and dtype is None:
        _remember(made, found, against)
    return found


def _is_bundle(source: str | Path) -> bool:
    """Whether a folder or a repository of the Hub is a bundle, not a checkpoint."""
    name = hub_name(source)
    if name is not None:
        return is_hub_bundle(open_remote(name))
    return is_bundle(Path(source).expanduser())


def _remember(bundle: Bundle, report: ParityReport, against: str | Path) -> None:
    """Keep the figures in a bundle that was compared with its own source: `upload` shows them."""
    manifest = bundle.manifest
    if bundle.remote is not None or not is_recorded_source(bundle, against):
        return
    origin = origin_of(str(manifest["source"]), manifest["revision"])
    try:
        save_parity(bundle, report, origin.label)
    except MlxconvError as error:
        report.notes.append(f"not remembered: {error}")


def measure(bundle: Path, source: str, *, known: bool = False, **options: Any) -> ParityReport:
    """Verify a bundle against its source and keep the figures in it.

    known: figures that it has already, of these very files and passed, will do. `options` are
    those of `verify`. Models of more than a quarter of the memory are streamed. A source on the
    Hub is taken at the commit that was converted.
    """
    held = open_bundle(bundle)
    manifest = held.manifest
    found = saved_report(held) if known else None
    if found is not None:
        return found
    largest = max(part.parameters for part in inspect(held.path).components.values())
    streamed = {"stream": True} if 4 * largest > MEMORY_BYTES / 4 else {}
    report = verify(bundle, _without_revision(source), **{**streamed, **options})
    origin = origin_of(str(manifest["source"]), manifest["revision"])
    save_parity(held, report, origin.label)
    return report


def _without_revision(source: str) -> str:
    """A Hub source without the branch that its name says: the converted commit counts."""
    name = hub_name(source)
    if name is None or name.revision is None:
        return source
    return f"hf://{replace(name, revision=None)}"


def _call(bundle: str | Path, against: str | Path) -> str:
    return f"mlxconv.verify({str(bundle)!r}, {str(against)!r}, ...)"


def _asked(prompts: Sequence[str], **options: Any) -> dict[str, Any]:
    """What was asked of pictures; all else is the default of `Request`."""
    given = {"prompts": tuple(prompts) or None, **options}
    return {name: value for name, value in given.items() if value is not None}


def _check(
    tier: str, page: str | Path | None, stream: bool, dims: Mapping[str, int], asked: dict[str, Any]
) -> None:
    """ArgumentError for options that do not go together, before anything is read."""
    if tier not in TIERS:
        raise ArgumentError(f"--tier {tier}: expected one of {', '.join(TIERS)}")
    if page is not None:
        from .page import check_place

        check_place(Path(page))
    of_forwards = page is None and tier not in PIPELINE_TIERS
    if of_forwards:
        asked = {name: value for name, value in asked.items() if name != "size"}
    options = ", ".join(
        f"--{name.removesuffix('s') if name == 'prompts' else name}" for name in asked
    )
    if asked and of_forwards:
        raise ArgumentError(
            f"{options}: applies to whole pipelines, which --tier {tier} does not run; add "
            "--tier image, --tier trajectory or --report FILE.html"
        )
    if asked.get("steps", 1) < 1:
        raise ArgumentError(f"--steps {asked['steps']}: at least 1")
    if tier in PIPELINE_TIERS and stream:
        raise ArgumentError(
            f"--stream holds one block at a time and --tier {tier} a whole pipeline, so they "
            "cannot be combined"
        )
    if tier in PIPELINE_TIERS and dims and page is None:
        raise ArgumentError(
            f"--dim applies to single components; with --tier {tier} use --size WxH"
        )


def _wanted(
    bundle: Bundle,
    against: str | Path,
    components: Sequence[str],
    model_class: str | None,
    whole: bool,
) -> Asked:
    """Of the Hub only what is compared, at the commit that the bundle was made of."""
    manifest, name = bundle.manifest, hub_name(against)
    own = name is not None and shown_name(name) == manifest.get("source") and not name.revision
    return Asked(
        manifest.get("variant"),
        model_class,
        () if whole else tuple(n for n in manifest["components"] if n in (components or [n])),
        manifest.get("revision") if own else None,
        progress=True,
    )


def _recorded_class(bundle: Bundle, against: str | Path) -> str | None:
    """The `module:Class` of a component that was converted alone, where it is a package's own."""
    manifest = bundle.manifest
    parts = [] if manifest.get("pipeline") else list(manifest["components"].values())
    if len(parts) != 1 or parts[0].get("library") in (None, "diffusers", "transformers"):
        return None
    folders = [bundle.path, *([] if hub_name(against) else [Path(against).expanduser()])]
    return recorded_class(str(parts[0]["library"]), str(parts[0]["class"]), folders)


def _names(bundle: Bundle, checkpoint: Checkpoint, asked: Sequence[str]) -> list[str]:
    converted = list(bundle.manifest["components"])
    for name in asked:
        bundle.component(name)
    names = [n for n in converted if not asked or n in asked]
    absent = [n for n in names if n not in checkpoint.components]
    if absent:
        have = ", ".join(checkpoint.components)
        raise MlxconvError(
            f"{checkpoint.path}: has no component {', '.join(absent)} (it has {have}); "
            "give the checkpoint this bundle was made from"
        )
    return names


def _recipe(folder: Path, component: Component, given: Recipe | None) -> Recipe | None:
    if not (folder / PROGRAM_FILE).is_file():
        return None
    if given is not None and given.class_name == component.class_name:
        return given
    return bundle_recipe(folder, component.class_name)


def _case(
    bundle: Bundle,
    checkpoint: Checkpoint,
    name: str,
    given: Recipe | None,
    seed: int,
    dtype: str | None,
    threshold: float | None,
    stream: bool,
    dims: Mapping[str, int],
) -> Case:
    folder, component = bundle.component(name), checkpoint.components[name]
    config = read_json(folder / "config.json")
    if "mlxconv" not in config:
        raise MlxconvError(f"{folder}/config.json: not written by mlxconv; convert again")
    own = _recipe(folder, component, given)
    return Case(name, folder, component, config, own, seed, dtype, threshold, stream, dims)


def _at_size(cases: Sequence[Case], size: tuple[int, int]) -> list[Case]:
    """The cases at the sizes that these pixels give; those of `--dim` go before."""
    found = []
    for case in cases:
        config = full_config(case.component)
        pixels = {} if case.recipe is None else pixel_dims(case.recipe, config, size, exact=True)
        found.append(replace(case, dims={**pixels, **case.dims}))
    if all(case.dims == at.dims for case, at in zip(cases, found)):
        names = ", ".join(case.name for case in cases)
        raise MlxconvError(f"--size has no effect on the sizes of {names}; use --dim NAME=SIZE")
    return found


# ---- components ---------------------------------------------------------------------------------


def _verify_component(
    case: Case, tier: str, report: ParityReport, say: Callable[[str], None]
) -> bool:
    """Rows of its weights, and of what `tier` asks; whether it has all the weights to run."""
    say(f"{case.name}: comparing weights")
    program = load_program(case.folder / PROGRAM_FILE) if case.recipe else None
    parameters = program.parameters if program else _module_parameters(case)
    audited = audit(case.folder, case.component, parameters, case.config)
    report.tiers.append(_weights_row(case, audited))
    if audited.bad:
        first = min(audited.bad, key=_natural)
        report.begins_at[case.name] = f"{_module(first)} (weight {first}: {audited.bad[first]})"
    if audited.missing:
        return False
    if program is None or case.recipe is None or tier in PIPELINE_TIERS:
        return True
    recipe, zeros = case.recipe, [name for name in audited.zeros if name in parameters]
    case = replace(case, zeros=tuple(zeros))
    sizes = report.sizes[case.name] = sizes_of(case, recipe, program)
    report.notes += filter(None, [not_covered(case, recipe, sizes)])
    for rows, begins in compare_entries(case, recipe, tier, say):
        report.tiers.extend(rows)
        if begins:
            report.begins_at.setdefault(case.name, begins)
    return True


def _module_parameters(case: Case) -> dict[str, Parameter]:
    """What a bundle without a program holds; which tensors are convolutions, the module knows."""
    component = case.component
    cls, config = component_class(component), full_config(component)
    _, found = module_parameters(cls, component.library, component.path, config)
    held = weight_map(case.folder)
    return {name: p for name, p in found.items() if name in held}


def _natural(name: str) -> list[Any]:
    return [(0, int(p), "") if p.isdigit() else (1, 0, p) for p in name.split(".")]


def _module(tensor: str) -> str:
    """The block that a tensor belongs to: up to its last number, else its module."""
    parts = tensor.split(".")
    last = next((i for i, p in enumerate(parts) if p.isdigit()), None)
    return ".".join(parts[: last + 1]) if last is not None else ".".join(parts[:-1])


def _weights_row(case: Case, audited: Audit) -> Row:
    shown = [f"{name} ({why})" for name, why in list(audited.bad.items())[:3]]
    note = f"{len(audited.bad)} wrong: {', '.join(shown)}" if shown else ""
    label = f"{audited.tensors} tensors"
    source = f"checkpoint {case.component.path.name}"
    return make_row(
        "weights", case.name, label, audited.sums, None, source, passed=not audited.bad, note=note
    )


# ---- pipelines ----------------------------------------------------------------------------------


def _runnable(
    whole: PipelineCase, tier: str, stream: bool, report: ParityReport
) -> PipelineCase | None:
    """The case; None, and a note, where pictures cannot be made and `tier` does not need them."""
    try:
        if stream:
            raise MlxconvError("--stream holds one block at a time, but a pipeline is held whole")
        whole.check()
    except MlxconvError as error:
        if tier in PIPELINE_TIERS:
            raise
        report.notes.append(f"no pictures: {error}")
        return None
    return whole


def _verify_pipeline(
    whole: PipelineCase,
    tier: str,
    tiers: Sequence[str],
    report: ParityReport,
    say: Callable[[str], None],
) -> None:
    """Rows of whole generations; a note where one cannot be run and `tier` does not need it."""
    from .pictures import image_rows, run_both, trajectory_rows

    judged = {"trajectory": trajectory_rows, "image": image_rows}
    report.generated = whole.described()
    try:
        report.compared = run_both(whole, say)
        for each in report.compared:
            for name in tiers:
                report.tiers += judged[name](each, whole.threshold)
    except MlxconvError as error:
        if tier in PIPELINE_TIERS:
            raise
        report.notes.append(f"no pictures: {error}")


def _locate(
    cases: Sequence[Case],
    threshold: float | None,
    report: ParityReport,
    say: Callable[[str], None],
) -> None:
    """Where the error of a pipeline begins: in a component's forward, else at a step."""
    from .pictures import PIPELINE, trajectory_rows

    for case in cases:
        if case.recipe is not None:
            for rows, begins in compare_entries(case, case.recipe, "forward", say):
                if begins:
                    report.tiers.extend(rows)
                    report.begins_at.setdefault(case.name, begins)
    if report.begins_at:
        return
    for each in report.compared:
        steps = trajectory_rows(each, threshold)
        name = next((row.name for row in steps if not row.passed), "decoding, after the last step")
        report.begins_at.setdefault(PIPELINE, f"{name}; each component's own forward passes")
