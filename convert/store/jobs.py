"""What a conversion will do, before anything is written: programs, precisions, sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.files import format_bytes
from mlxconv.runtime.program.program import Parameter
from mlxconv.runtime.program.stored import to_json

from ..lower.compile import compile_program, module_parameters
from ..lower.program_cache import Analysis, entry_key, read_entry, write_entry
from ..quantize.policy import (
    Policy,
    PolicyFile,
    Precision,
    check_patterns,
    load_policy_file,
    matches,
    parse_precision,
)
from ..recipe.reading import load_recipe, parse_recipe, recipe_names
from ..recipe.recipe import Recipe
from ..source.checkpoint import (
    Checkpoint,
    Component,
    KeyMatch,
    component_class,
    match_keys,
    tied_weights,
)
from ..source.model_class import named_config
from ..trace.class_config import full_config, unknown_keys
from .bundle_files import refuse_nested
from .effects import check_effects
from .options import ConvertOptions, Job, Run, is_vae
from .plan import make_plan
from .unread import refuse_unread, unread_tensors, with_unused

# What `target_size` chooses from, the most precise first.
BY_PRECISION = ("bf16", "8bit", "6bit", "5bit", "4bit", "3bit", "2bit")
# Bytes beside the tensors: of each one's entries in header and index, beside three times its
# name, and of the small files of a component.
_ENTRY_BYTES, _OTHER_BYTES = 160, 16_000


def prepare(run: Run) -> dict[str, Job]:
    """A job for every component to convert. Everything that can be refused is refused here."""
    names = chosen_components(run)
    _check_recipe(run, names)
    _check_patterns_early(run, names)
    jobs = {name: _prepare(run, run.checkpoint.components[name]) for name in names}
    _check_patterns(run, jobs)
    if run.options.target_size is not None:
        jobs = _fit(run, jobs, run.options.target_size)
    check_effects(run.options, jobs)
    return jobs


def check_options(options: ConvertOptions) -> None:
    """Mistakes in the options, before the source is opened."""
    if options.q.endswith(".toml"):
        load_policy_file(Path(options.q))
    else:
        parse_precision(options.q, options.group_size)
    if options.target_size is not None and options.q not in ("bf16", "bfloat16"):
        raise ArgumentError(
            f"--target-size chooses the precision, so it cannot be combined with --q {options.q}"
        )
    for text in (options.text_encoder_q, options.vae_q, *(bits for _, bits in options.set)):
        if text is not None:
            parse_precision(_bits(text))
    given = (options.q, options.text_encoder_q, options.vae_q)
    floats = all(not (q.endswith(".toml") or parse_precision(q).quantized) for q in given if q)
    if options.keep and floats and options.target_size is None:
        raise ArgumentError(
            f"--keep has no effect: --q {options.q} quantizes no weight by default; leave it out"
        )
    if options.method not in ("rtn", "refit", "search"):
        raise ArgumentError(
            f"--method {options.method}: expected refit, rtn or search "
            "(imatrix and gptq need calibration, which this version does not support)"
        )


def _check_recipe(run: Run, names: Sequence[str]) -> None:
    """A recipe that was given is for one of the components."""
    classes = {run.checkpoint.components[name].class_name for name in names}
    if run.recipe is not None and run.recipe.class_name not in classes:
        raise MlxconvError(
            f"--recipe {run.options.recipe}: is for {run.recipe.class_name}, "
            f"{run.checkpoint.path} has {', '.join(sorted(classes))}; leave it out, or give the "
            "recipe of one of these"
        )


def _bits(text: str) -> str:
    return f"{text}bit" if text.isdigit() else text


def chosen_components(run: Run) -> list[str]:
    """Names of the components to convert, in the checkpoint's order."""
    checkpoint, options = run.checkpoint, run.options
    unknown = sorted(set(options.components) - set(checkpoint.components))
    if unknown:
        have = ", ".join(checkpoint.components)
        raise MlxconvError(f"{checkpoint.path}: no component {', '.join(unknown)}; it has {have}")
    names = [n for n in checkpoint.components if not options.components or n in options.components]
    for name in names:
        refuse_nested(name)
    return names


# ---- one component ------------------------------------------------------------------------------


def _prepare(run: Run, component: Component) -> Job:
    recipe = _known_recipe(run, component)
    with named_config(component.path):
        known = _analysis(run, component, recipe)
    if known.derived:
        recipe = parse_recipe(known.derived, f"the recipe derived for {component.class_name}")
    parameters, compiled = known.parameters, known.compiled
    shapes = {n: p.shape for n, p in parameters.items()}
    match = match_keys(shapes, component.tensors, known.tied)
    match.check(str(component.path))
    _check_unread(run, component, known, recipe, match)
    named, found = parameters, match.found
    if compiled is None and not _untraced(run.options):  # the bundle has the files' names
        named = _stored_names(parameters, match)
        found = {name: name for name in named}
    policy = _policy(run.options, run.checkpoint, component, recipe)
    plan = make_plan(component, named, found, policy, run.options.method)
    return Job(
        component,
        known.config,
        recipe,
        compiled,
        match,
        named,
        found,
        policy,
        plan,
        known.note,
        known.derived,
    )


def _check_unread(
    run: Run, component: Component, known: Analysis, recipe: Recipe | None, match: KeyMatch
) -> None:
    """Refuse tensors that nothing reads, unless they are expected or `--allow-unused` is given."""
    allowed = recipe.unused if recipe else ()
    unread = unread_tensors(match, known.compiled)
    left = [name for name in unread if not any(matches(p, name) for p in allowed)]
    if run.options.allow_unused or not left:
        return
    cls = component_class(component)
    module, _ = module_parameters(cls, component.library, component.path, known.config)
    refuse_unread(component.path, cls, module, match, left, known.tied, allowed)


def _known_recipe(run: Run, component: Component) -> Recipe | None:
    """The recipe that was given, or the one that is shipped."""
    if run.options.weights_only:
        return None
    if run.recipe is not None and run.recipe.class_name == component.class_name:
        return run.recipe
    if component.class_name in recipe_names() and not component.named:
        return load_recipe(component.class_name)
    return None


def _analysis(run: Run, component: Component, recipe: Recipe | None) -> Analysis:
    """`_analyse`, or what it gave for the same component in an earlier process."""
    key = None
    if run.use_cache and not component.named:
        key = entry_key(
            library=component.library,
            class_name=component.class_name,
            config=component.config,
            recipe=recipe,
            sizes=run.options.sizes,
            weights_only=run.options.weights_only,
            alone=len(run.checkpoint.components) == 1,
        )
    if key is not None and (known := read_entry(key)) is not None:
        run.say(f"{component.name}: {component.class_name} was traced before")
        run.warnings += known.warnings
        return known
    if _untraced(run.options):
        _note_ignored(run, component)
        return _of_class(component, "not traced (--trace traces)")
    before = len(run.warnings)
    made = _analyse(run, component, recipe)
    if key is not None:
        try:
            write_entry(key, replace(made, warnings=run.warnings[before:]))
        except OSError as error:
            run.say(f"the program is not cached: {error}")
    return made


def _analyse(run: Run, component: Component, recipe: Recipe | None) -> Analysis:
    """All that is asked of the component's class. What it depends on is in the key above."""
    _note_ignored(run, component)
    if run.options.weights_only:
        return _of_class(component, "weights only")
    config, cls = full_config(component), component_class(component)
    derived, note = "", ""
    if recipe is None:
        recipe, derived, note = _derived(run, component, cls, config)
    if recipe is None:
        return _of_class(component, note)
    run.say(f"{component.name}: tracing {component.class_name}")
    compiled = compile_program(cls, config, recipe, run.options.sizes)
    if derived:
        dead = compiled.parameters.keys() - compiled.program.parameters.keys()
        derived = with_unused(derived, dead)
    return Analysis(config, compiled, compiled.parameters, compiled.tied, derived, note)


def _note_ignored(run: Run, component: Component) -> None:
    """A warning for keys of config.json that the class does not take."""
    if ignored := unknown_keys(component_class(component), component.config):
        run.warnings.append(
            f"{component.name}: {component.class_name} does not take {', '.join(sorted(ignored))} "
            "of its config.json; ignored"
        )


def _derived(
    run: Run, component: Component, cls: type, config: dict[str, Any]
) -> tuple[Recipe | None, str, str]:
    """A derived recipe, its text, and a note for the report."""
    from ..trace.derive import derive_recipe

    run.say(f"{component.name}: no recipe for {component.class_name}, deriving one")
    try:
        recipe, text = derive_recipe(cls, config, component.library)
    except MlxconvError as error:
        if len(run.checkpoint.components) == 1:
            raise
        return None, "", f"weights only (no recipe for {component.class_name}: {error})"
    return recipe, text, "by a derived recipe (recipe.toml): verify it"


def _of_class(component: Component, note: str) -> Analysis:
    """Without a program, a tensor's kind is that of the module that owns it."""
    config = full_config(component)
    cls = component_class(component)
    module, parameters = module_parameters(cls, component.library, component.path, config)
    return Analysis(config, None, parameters, tied_weights(module), note=note)


def _untraced(options: ConvertOptions) -> bool:
    """Whether nothing is traced, though a conversion with these options would."""
    return options.dry_run and not (options.trace or options.weights_only)


def _stored_names(parameters: dict[str, Parameter], match: KeyMatch) -> dict[str, Parameter]:
    """Parameters under the names of the files; tied ones once."""
    return {stored: parameters[name] for name, stored in match.found.items()}


def _policy(
    options: ConvertOptions, checkpoint: Checkpoint, component: Component, recipe: Recipe | None
) -> Policy:
    text = _q_for(options, checkpoint, component)
    file = _policy_file(options, text)
    return Policy(
        file.default,
        keep=options.keep,
        recipe_keep=recipe.precision.keep if recipe else (),
        modulation=recipe.precision.modulation if recipe else (),
        overrides=[*(_override(options, *item) for item in options.set), *file.overrides],
        file_keep=file.keep,
        file=Path(text).name,
    )


def _policy_file(options: ConvertOptions, text: str) -> PolicyFile:
    """The policy of `--q`: a file's, or the one precision."""
    if text.endswith(".toml"):
        return load_policy_file(Path(text))
    return PolicyFile(parse_precision(text, options.group_size if text == options.q else None))


def _override(options: ConvertOptions, pattern: str, bits: str) -> tuple[str, Precision]:
    """One `--set`; `--group-size` holds for it too where the precision leaves a choice."""
    precision = parse_precision(_bits(bits))
    if precision.mode == "affine" and options.group_size is not None:
        precision = parse_precision(_bits(bits), options.group_size)
    return pattern, precision


def _q_for(options: ConvertOptions, checkpoint: Checkpoint, component: Component) -> str:
    """`--q` is for the denoiser, and for a component given alone; others follow floats only."""
    alone = len(checkpoint.components) == 1 or tuple(options.components) == (component.name,)
    special = None
    if component.library == "transformers":
        special = options.text_encoder_q or "bf16"
        alone = alone and options.text_encoder_q is None
    elif is_vae(component):
        special = options.vae_q or "bf16"
        alone = alone and options.vae_q is None
    if special is None or alone:
        return options.q
    explicit = options.text_encoder_q if component.library == "transformers" else options.vae_q
    is_float = not options.q.endswith(".toml") and not parse_precision(options.q).quantized
    return options.q if is_float and explicit is None else special


def _patterns(options: ConvertOptions) -> list[str]:
    """All that a user gave that must match some module."""
    patterns = [*options.keep, *(pattern for pattern, _ in options.set)]
    if options.q.endswith(".toml"):
        file = load_policy_file(Path(options.q))
        patterns += [*file.keep, *(pattern for pattern, _ in file.overrides)]
    return patterns


def _check_patterns_early(run: Run, names: Sequence[str]) -> None:
    """A pattern that matches nothing is an error before minutes of tracing."""
    components = [run.checkpoint.components[name] for name in names]
    modules = {name.removesuffix(".weight") for c in components for name in c.tensors}
    patterns = [p for p in _patterns(run.options) if not any(matches(p, m) for m in modules)]
    if patterns:  # the class may call its modules otherwise than the files do
        for component in components:
            modules |= {n.removesuffix(".weight") for n in _of_class(component, "").parameters}
        check_patterns(patterns, modules)


def _check_patterns(run: Run, jobs: Mapping[str, Job]) -> None:
    modules = {name.removesuffix(".weight") for job in jobs.values() for name in job.plan.decisions}
    check_patterns(_patterns(run.options), modules)


# ---- sizes --------------------------------------------------------------------------------------


def copied_bytes(checkpoint: Checkpoint, names: Sequence[str]) -> int:
    """Bytes of all that is copied: components not in `names`, folders without weights."""
    folders = [c.path for n, c in checkpoint.components.items() if n not in names]
    folders += checkpoint.others.values()
    return sum(f.stat().st_size for folder in folders for f in folder.rglob("*") if f.is_file())


def bundle_bytes(checkpoint: Checkpoint, jobs: Mapping[str, Job]) -> int:
    """An upper estimate of the whole bundle's size, from headers alone."""
    return copied_bytes(checkpoint, list(jobs)) + sum(_job_bytes(job) for job in jobs.values())


def _job_bytes(job: Job) -> int:
    names = [output.name for group in job.plan.groups for output in group.outputs]
    total = job.plan.nbytes + sum(3 * len(n) + _ENTRY_BYTES for n in names) + _OTHER_BYTES
    if job.compiled is not None:
        constants = sum(value.nbytes for value in job.compiled.constants.values())
        total += len(to_json(job.compiled.program).encode()) + constants
    return total


def _fit(run: Run, jobs: dict[str, Job], gigabytes: float) -> dict[str, Job]:
    """The jobs at the most precise `q` whose bundle is at most that large; sets the run's `q`."""
    sizes = {}
    for q in BY_PRECISION:
        options = replace(run.options, q=q)
        planned = {name: _planned(options, run.checkpoint, job) for name, job in jobs.items()}
        sizes[q] = bundle_bytes(run.checkpoint, planned)
        if sizes[q] <= gigabytes * 1e9:
            run.options = options
            return planned
    listed = ", ".join(f"{q} {format_bytes(size)}" for q, size in sizes.items())
    raise MlxconvError(
        f"{run.checkpoint.path}: no precision fits --target-size {gigabytes:g} GB: {listed}; "
        "text encoders and VAE count too (--text-encoder-q, --vae-q)"
    )


def _planned(options: ConvertOptions, checkpoint: Checkpoint, job: Job) -> Job:
    policy = _policy(options, checkpoint, job.component, job.recipe)
    plan = make_plan(job.component, job.parameters, job.found, policy, options.method)
    return replace(job, policy=policy, plan=plan)
