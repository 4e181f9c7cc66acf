"""The command line: `mlxconv convert | verify | generate | bench | ...`.

Results go to stdout, as text or as one JSON object with `--json`; progress and notes go to stderr.
Exit 0: success; 1: a clear failure; 2: usage, which is what the command line alone shows to be
wrong (see `parameters`); 130: interrupted. Everything heavy is imported inside the command that
needs it.
"""

import json
import os
import shlex
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click

from . import __version__
from . import parameters as types
from .runtime.errors import ArgumentError, MlxconvError
from .runtime.interrupts import NOT_WAITED_FOR, remember_interrupts

_INTERRUPTED = 130


def say(text: str = "") -> None:
    """Progress or a note, on stderr."""
    click.echo(text, err=True)


def show(text: str, *, newline: bool = True) -> None:
    """A result, on stdout; a reader that has gone away (`| head`) ends the command."""
    try:
        click.echo(text, nl=newline)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        raise SystemExit(1) from None


def _emit(as_json: bool, data: dict[str, Any], text: str, note: str = "") -> None:
    """Print the result as JSON, or as text with a note on stderr."""
    if as_json:
        show(json.dumps(data, indent=2))
        return
    if text:
        show(text)
    if note:
        say(note)


def _command_line() -> str:
    """The command line with tokens and the home folder's path removed, fit to publish."""
    from .convert.publish.redaction import without_home, without_token

    return without_home(without_token(shlex.join(["mlxconv", *sys.argv[1:]])))


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that every command has."""

    @wraps(command)
    def run(quiet: bool, **options: Any) -> Any:
        if not quiet:
            return command(**options)
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            return command(**options)

    for option in (
        click.option("--debug", is_flag=True, help="Show a traceback on failure."),
        click.option("--quiet", is_flag=True, help="Print results and errors only."),
        click.option(
            "-v", "--verbose", is_flag=True, help="Print progress and more detail on stderr."
        ),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout."),
    ):
        run = option(run)
    return run


def _publishing(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the commands that publish, passed on together as `publishing`."""
    names = ("private", "license_id", "license_name", "license_link", "base_model")

    @wraps(command)
    def gathered(**options: Any) -> Any:
        return command(publishing={name: options.pop(name) for name in names}, **options)

    for option in (
        click.option(
            "--base-model",
            type=types.REPOSITORY,
            help="Hub repository of the original model, for the model card of a local source.",
        ),
        click.option(
            "--license-link", type=types.URL, help="URL of the licence text, for the model card."
        ),
        click.option(
            "--license-name", metavar="NAME", help="Name of the licence, with `--license other`."
        ),
        click.option(
            "--license",
            "license_id",
            metavar="ID",
            help="Licence id, such as apache-2.0, if the source states none.",
        ),
        click.option("--private", is_flag=True, help="Create the Hub repository as private."),
    ):
        gathered = option(gathered)
    return gathered


def _publish_options(repo: str, publishing: dict[str, Any], as_json: bool, **more: Any) -> Any:
    """The options of publishing; with `--json` the client shows no progress bars."""
    from huggingface_hub.utils import disable_progress_bars

    from .convert.publish.licence import Given
    from .convert.publish.publish import PublishOptions

    if as_json and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ:
        disable_progress_bars()
    given = Given(*(publishing[f"license_{part}"] for part in ("id", "name", "link")))
    base_model = publishing["base_model"]
    return PublishOptions(repo, publishing["private"], given=given, base_model=base_model, **more)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="mlxconv")
def cli() -> None:
    """Convert diffusers models, not only their weights, to MLX, and prove parity."""
    _quiet()  # before option values are read, which may import these libraries


@cli.command()
@click.argument("source")
@click.option(
    "-o",
    "--out",
    type=types.FOLDER,
    help="Folder of the bundle to write. [default: mlx_model, or the name in --upload-repo]",
)
@click.option(
    "--q",
    "q",
    default="bf16",
    show_default=True,
    type=types.PRECISION,
    help="Precision of the denoiser: fp32, bf16, fp16, 8bit (or int8), 6bit, 5bit, "
    "4bit (or int4), 3bit, 2bit, mxfp8, mxfp4, nvfp4, or a policy FILE.toml.",
)
@click.option(
    "--group-size",
    type=types.GROUP_SIZE,
    help="Number of weights that share a scale. [default: 64]",
)
@click.option(
    "--component",
    "components",
    multiple=True,
    metavar="NAME",
    help="Convert only this component (repeatable). The others are copied unchanged.",
)
@click.option(
    "--text-encoder-q",
    type=types.PRECISION,
    help="Precision of the text encoders. [default: bf16, or --q if that is fp32 or fp16]",
)
@click.option(
    "--vae-q",
    type=types.PRECISION,
    help="Precision of the VAE. [default: bf16, or --q if that is fp32 or fp16]",
)
@click.option(
    "--keep",
    multiple=True,
    metavar="PATTERN",
    help="Leave modules unquantized whose full name matches this glob, "
    "such as 'blocks.0.**' (repeatable).",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    type=types.SETTING,
    help="Number of bits for modules that match a glob, such as 'blocks.*.attn.**=8' (repeatable).",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=types.SIZE,
    help="Image size in pixels to trace, for classes with a fixed size (repeatable).",
)
@click.option(
    "--recipe",
    type=types.OLD_FILE,
    help="Recipe file (TOML) to use instead of the one that mlxconv ships.",
)
@click.option(
    "--class",
    "model_class",
    type=types.CLASS,
    help="Python class of the model, if SOURCE is one component of your own package.",
)
@click.option(
    "--method",
    default="refit",
    show_default=True,
    type=click.Choice(["refit", "rtn", "search"]),
    help="How to quantize: refit fits the scales by least squares, rtn rounds to nearest, "
    "search tries more scales than refit.",
)
@click.option(
    "--target-size",
    type=types.POSITIVE,
    metavar="GB",
    help="Choose the most precise --q whose bundle is at most this many gigabytes.",
)
@click.option("--variant", help="Variant of the weight files to read, such as fp16.")
@click.option("--revision", help="Branch, tag or commit of a SOURCE on the Hub. [default: main]")
@click.option(
    "--verify-checksums", is_flag=True, help="Compare downloaded files with the Hub's checksums."
)
@click.option(
    "--low-disk", is_flag=True, help="Keep only one downloaded weight file on disk at a time."
)
@click.option("--weights-only", is_flag=True, help="Convert the weights without tracing a program.")
@click.option(
    "--allow-unused",
    is_flag=True,
    help="Convert even if the checkpoint has tensors that no program reads.",
)
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--dry-run", is_flag=True, help="Report what would be done; write nothing.")
@click.option("--trace", is_flag=True, help="With --dry-run: trace the programs too.")
@click.option(
    "--verify", "verify_after", is_flag=True, help="Run `verify` against SOURCE afterwards."
)
@click.option(
    "--upload-repo",
    type=types.REPOSITORY,
    help="Verify the bundle and publish it to this Hub repository, "
    "which is checked before the conversion.",
)
@_publishing
@_common
def convert(
    source: str,
    out: Path | None,
    q: str,
    settings: tuple[tuple[str, str], ...],
    as_json: bool,
    verbose: bool,
    debug: bool,
    verify_after: bool,
    upload_repo: str | None,
    publishing: dict[str, Any],
    **options: Any,
) -> None:
    """Convert SOURCE to an MLX bundle.

    SOURCE is a diffusers pipeline folder, one component's folder, or a Hub repository:
    ORG/NAME[@REVISION], hf://ORG/NAME[@REVISION][/FOLDER] or the URL of its page.
    """
    _exact()
    if options["trace"] and not options["dry_run"]:
        raise click.UsageError("--trace needs --dry-run: a conversion always traces")
    if upload_repo is None and (given := [name for name, value in publishing.items() if value]):
        option = given[0].replace("license_id", "license").replace("_", "-")
        raise click.UsageError(f"--{option} is for publishing: add --upload-repo")
    if verify_after and options["low_disk"]:
        raise click.UsageError("--low-disk deletes the weights that --verify needs")
    if verify_after and options["dry_run"]:
        raise click.UsageError("--dry-run writes no bundle for --verify to compare")
    progress = not as_json or verbose
    options |= {"set": settings, "progress": progress, "command": _command_line()}
    if upload_repo is not None:
        from .convert.publish.one_command import convert_and_publish

        out = out or Path(upload_repo.rpartition("/")[2])
        publish_options = _publish_options(upload_repo, publishing, as_json)
        shown = say if as_json else show  # as they come
        data, passed = convert_and_publish(
            source, out, q, publish_options, say=say, show=shown, **options
        )
        text, note = "", "" if passed else f"{out}: verify failed, so it was not published"
    else:
        from .convert.conversion import convert as run

        out = out or Path("mlx_model")
        report = run(source, out, q, **options)
        if verify_after:  # which is the first of the next steps
            report.next_steps = report.next_steps[1:]
        data, text, note, passed = report.as_json(), report.as_text(), report.notes(), True
        if verify_after and not options["dry_run"]:
            from .convert.verify.verify import measure

            chosen = {name: options[name] for name in ("recipe", "model_class")}
            parity = measure(out, source, **chosen)
            data["verify"], passed = parity.as_json(), parity.passed
            text += "\n" + parity.as_text()
    _emit(as_json, data, text, note)
    if not passed:
        raise SystemExit(1)


@cli.command()
@click.argument("bundle")
@click.option(
    "--against",
    metavar="SOURCE|BUNDLE",
    help="Checkpoint or other bundle to compare with. [default: the source that BUNDLE records]",
)
@click.option(
    "--component",
    "components",
    multiple=True,
    metavar="NAME",
    help="Compare only this component (repeatable).",
)
@click.option(
    "--tier",
    default="forward",
    show_default=True,
    type=click.Choice(["forward", "block", "trajectory", "image"]),
    help="Compare the outputs of each model (forward), each block too (block), the latents of "
    "each step (trajectory) or the final images (image).",
)
@click.option(
    "--seed", type=types.SEED, default=0, show_default=True, help="Seed of the example inputs."
)
@click.option(
    "--dtype", type=types.FLOAT_TYPE, help="Precision of the activations. [default: the bundle's]"
)
@click.option(
    "--threshold",
    type=types.POSITIVE,
    help="Largest rel_l2 that passes. [default: depends on the precision]",
)
@click.option(
    "--recipe", type=types.OLD_FILE, help="Recipe file (TOML) to use instead of the one in BUNDLE."
)
@click.option(
    "--class",
    "model_class",
    type=types.CLASS,
    help="Python class of the model, if SOURCE is one component of your own package.",
)
@click.option(
    "--stream", is_flag=True, help="Hold only one block in memory at a time, in PyTorch and in MLX."
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    type=types.DIM,
    help="Size to run at, by its name in the recipe, such as batch=2 (repeatable).",
)
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    metavar="PROMPT",
    help="Prompt for --tier trajectory and image (repeatable).",
)
@click.option(
    "--steps",
    type=types.COUNT,
    help="Denoising steps for --tier trajectory and image. [default: 4]",
)
@click.option(
    "--size",
    type=types.SIZE,
    help="Image size in pixels. [default: small for --tier forward and block, else the pipeline's]",
)
@click.option(
    "--guidance",
    type=types.SCALE,
    help="Guidance scale for --tier trajectory and image. [default: the pipeline's]",
)
@click.option(
    "--tokens",
    type=types.TOKENS,
    help="Length of the prompt in tokens for --tier trajectory and image. "
    "[default: the pipeline's]",
)
@click.option(
    "--report",
    "page",
    type=types.FILE,
    metavar="FILE.html",
    help="Write an HTML report with every block, and with images if the source is a pipeline.",
)
@_common
def verify(
    bundle: str,
    against: str | None,
    dims: tuple[tuple[str, int], ...],
    as_json: bool,
    verbose: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Compare BUNDLE with the checkpoint it was made from; exit 1 if it differs.

    The result is stored in BUNDLE, where `upload` reads it. Two bundles are compared in MLX, and
    can fail only if --threshold is given.
    """
    _exact()
    from .convert.verify.verify import verify as run

    progress = (lambda text: None) if as_json and not verbose else say
    report = run(bundle, against, dims=dict(dims), command=_command_line(), say=progress, **options)
    _emit(as_json, report.as_json(), report.as_text())
    if not report.passed:
        raise SystemExit(1)


@cli.command()
@click.argument("path")
@click.option("--revision", help="Branch, tag or commit, if PATH is on the Hub. [default: main]")
@click.option(
    "--program",
    "program",
    metavar="COMPONENT",
    help="Print the program of this component as pseudo-code.",
)
@click.option("--tensors", is_flag=True, help="List every tensor.")
@_common
def inspect(
    path: str,
    revision: str | None,
    program: str | None,
    tensors: bool,
    as_json: bool,
    verbose: bool,
    debug: bool,
) -> None:
    """Show what a checkpoint or bundle contains, locally or on the Hub. Reads file headers only."""
    from .convert.inspection import inspect as look

    if program is not None and (tensors or revision):
        raise click.UsageError(
            "--program cannot be combined with --tensors or --revision; "
            "give the revision as ORG/NAME@REVISION"
        )
    if program is not None:
        from .runtime.bundle import program_of
        from .runtime.program.printed import show as pseudo_code
        from .runtime.program.stored import to_json

        found = program_of(path, program)
        show(to_json(found) if as_json else pseudo_code(found))
        return
    report = look(path, tensors=tensors, revision=revision)
    _emit(as_json, report.as_json(), report.as_text())


def _sized(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of the commands that run a bundle on example inputs."""
    for option in (
        click.option(
            "--batch", type=types.COUNT, default=1, show_default=True, help="Samples per step."
        ),
        click.option(
            "--dim",
            "dims",
            multiple=True,
            type=types.DIM,
            help="Size to run at, by its name in the recipe, such as batch=2 (repeatable).",
        ),
        click.option(
            "--size", "pixels", type=types.SIZE, help="Image size in pixels. [default: 512x512]"
        ),
        click.option(
            "--dtype",
            type=types.FLOAT_TYPE,
            help="Precision of the activations. [default: the bundle's]",
        ),
        click.option(
            "--compile",
            default="program",
            show_default=True,
            type=click.Choice(["off", "block", "program"]),
            help="Compile nothing, each block, or the whole program.",
        ),
        click.option(
            "--component",
            metavar="NAME",
            help="Component to run. [default: the transformer or UNet]",
        ),
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--steps", type=types.COUNT, help="Timed steps per repetition. [default: 4, with --ablate 10]"
)
@click.option(
    "--repeat",
    type=types.COUNT,
    default=3,
    show_default=True,
    help="Repetitions, each in its own process.",
)
@click.option(
    "--guidance",
    default="none",
    show_default=True,
    type=click.Choice(["none", "batched", "sequential"]),
    help="Guidance with a negative prompt: both prompts in one batch, or one after the other.",
)
@click.option(
    "--against",
    default="none",
    show_default=True,
    type=click.Choice(["none", "diffusers", "diffusers-compiled", "mflux"]),
    help="Also run another implementation: the source's weights, unquantized, at the same sizes "
    "and precision of activations.",
)
@click.option(
    "--source",
    type=types.OLD_FOLDER,
    help="Checkpoint folder that --against runs. [default: the source that BUNDLE records]",
)
@click.option(
    "--mflux-python", type=types.PROGRAM, help="Python interpreter of an environment with mflux."
)
@click.option("--ablate", is_flag=True, help="Ablation table: one change per row.")
@_sized
@_common
def bench(
    bundle: Path,
    steps: int | None,
    dims: tuple[tuple[str, int], ...],
    ablate: bool,
    as_json: bool,
    verbose: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Measure one denoising step of BUNDLE: time and memory, alone or against a peer."""
    from .convert.peers.command import peer_command
    from .runtime.bench.bench import Settings
    from .runtime.bench.bench import bench as run

    chosen = (10 if ablate else 4) if steps is None else steps
    settings = Settings(bundle.expanduser(), steps=chosen, dims=dict(dims), **options)
    progress = say if verbose or not as_json else lambda text: None
    if ablate:
        from .runtime.bench.ablation import ablate as run_rows

        table = run_rows(settings, progress)
        _emit(as_json, table.as_json(), table.as_text())
        return
    report = run(settings, progress, peer_command)
    _emit(as_json, report.as_json(), report.as_text())


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--steps", type=types.COUNT, default=4, show_default=True, help="Denoising steps.")
@_sized
@_common
def profile(
    bundle: Path,
    dims: tuple[tuple[str, int], ...],
    as_json: bool,
    verbose: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Show where the time of a generation goes: each phase, and each block and op of a step."""
    from .runtime.bench.bench import Settings
    from .runtime.bench.profiling import profile as run

    report = run(Settings(bundle.expanduser(), dims=dict(dims), **options))
    _emit(as_json, report.as_json(), report.as_text())


@cli.command("add-size")
@click.argument("bundle")
@click.option(
    "--component",
    metavar="NAME",
    help="Component to add the size to. [default: the denoiser]",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=types.SIZE,
    help="Image size in pixels to add (repeatable).",
)
@click.option(
    "--dim",
    "dims",
    multiple=True,
    type=types.DIM,
    help="Size to add, by its name in the recipe, such as latent_frames=21 (repeatable).",
)
@_common
def add_size(
    bundle: str,
    component: str | None,
    sizes: tuple[tuple[int, int], ...],
    dims: tuple[tuple[str, int], ...],
    as_json: bool,
    verbose: bool,
    debug: bool,
) -> None:
    """Add a size to BUNDLE, for a class with a fixed size. The weights do not change."""
    if not sizes and not dims:
        raise click.UsageError("give --size WxH or --dim NAME=SIZE")
    from .convert.store.add_size import add_sizes

    name, have = add_sizes(bundle, component, sizes, dict(dims))
    shown = "; ".join(" ".join(f"{dim}={n}" for dim, n in size.items()) for size in have)
    data = {"bundle": bundle, "component": name, "sizes": have}
    _emit(as_json, data, f"{name} has the sizes: {shown}")


def _lines(file: TextIO) -> list[str]:
    try:
        found = [line.strip() for line in file if line.strip()]
    except UnicodeDecodeError as error:
        raise MlxconvError(f"--prompts: not UTF-8 text ({error}); save it as UTF-8") from error
    if not found:
        raise MlxconvError("--prompts: the file has no prompts; write one per line")
    return found


@cli.command()
@click.argument("bundle")
@click.argument("prompt", required=False)
@click.option(
    "-o",
    "--out",
    required=True,
    type=types.PICTURE,
    help="Image file (.png, .jpg, .webp) or folder to write. Several images are named "
    "NAME-SEED.png, with several prompts NAME-1-SEED.png; in a folder without NAME.",
)
@click.option(
    "--prompts",
    type=click.File(encoding="utf-8-sig"),
    metavar="FILE",
    help="File with one prompt per line; - reads stdin.",
)
@click.option(
    "--like",
    type=types.OLD_FILE,
    metavar="IMAGE",
    help="Reuse the settings stored in an image; other options override them.",
)
@click.option("--steps", type=types.COUNT, help="Denoising steps. [default: the pipeline's]")
@click.option(
    "--guidance",
    type=types.SCALE,
    help="Guidance scale: guidance_scale in diffusers. [default: the pipeline's]",
)
@click.option("--negative", metavar="PROMPT", help="Negative prompt.")
@click.option(
    "--cfg",
    type=types.SCALE,
    help="Scale of true classifier-free guidance, for FLUX.1 and Qwen-Image. "
    "[default: 4 with --negative]",
)
@click.option(
    "--cfg-end",
    type=types.SHARE,
    help="Fraction of the schedule after which the negative prompt is ignored. [default: 1.0]",
)
@click.option("--size", type=types.SIZE, help="Image size in pixels. [default: the checkpoint's]")
@click.option(
    "--seed",
    "seeds",
    type=types.SEED,
    multiple=True,
    help="Seed of the noise (repeatable: one image per seed). [default: random]",
)
@click.option(
    "--batch",
    type=types.COUNT,
    default=1,
    show_default=True,
    help="Images of a prompt to compute at once.",
)
@click.option(
    "--count",
    type=types.COUNT,
    default=1,
    show_default=True,
    help="Images per prompt, with seeds counting up from --seed.",
)
@click.option(
    "--tokens",
    type=types.TOKENS,
    help="Length of the prompt in tokens, for the text encoder that takes the longest. "
    "[default: the pipeline's]",
)
@click.option(
    "--scheduler",
    type=types.SCHEDULER,
    help="Scheduler to use instead of the checkpoint's: a diffusers class, or a name such as "
    "'DPM++ 2M Karras'. NAME:option=value,... sets its options.",
)
@click.option("--sigmas", type=types.NUMBERS, help="Custom schedule, as decreasing noise levels.")
@click.option("--timesteps", type=types.NUMBERS, help="Custom schedule, as timesteps.")
@click.option(
    "--decoder",
    type=types.DECODER,
    help="Decode with a tiny autoencoder instead of the VAE: tiny for BUNDLE/tiny_vae, or the "
    "path of a converted one.",
)
@click.option(
    "--tile",
    default="auto",
    show_default=True,
    type=types.TILE,
    help="Decode large images in strips of rows that need at most this many MB each.",
)
@click.option(
    "--preview",
    type=types.PICTURE_FILE,
    help="Write the image that each step predicts to this file.",
)
@click.option("--warmup", is_flag=True, help="Run one untimed step first.")
@click.option(
    "--compile",
    default="program",
    show_default=True,
    type=click.Choice(["off", "block", "program", "all"]),
    help="Compile nothing, each block of the denoiser, its whole program, or all: the text "
    "encoders and the VAE too.",
)
@click.option(
    "--evaluate-every",
    type=types.FROM_ZERO,
    default=1,
    show_default=True,
    metavar="STEPS",
    help="Evaluate every so many steps; 0 evaluates once, at the end.",
)
@click.option(
    "--clear-cache-every",
    type=types.FROM_ZERO,
    default=0,
    show_default=True,
    metavar="STEPS",
    help="Return cached buffers to the system every so many steps; 0 never does.",
)
@click.option(
    "--check/--no-check",
    default=True,
    show_default=True,
    help="Fail at the first step that produces NaN or infinity.",
)
@click.option(
    "--dtype", type=types.FLOAT_TYPE, help="Precision of the activations. [default: the bundle's]"
)
@click.option(
    "--vae-dtype",
    type=types.FLOAT_TYPE,
    help="Precision of the decoder's activations. [default: as the rest, but fp32 instead of bf16]",
)
@_common
def generate(
    bundle: str,
    prompt: str | None,
    prompts: TextIO | None,
    out: str,
    seeds: tuple[int, ...],
    size: tuple[int, int] | None,
    as_json: bool,
    verbose: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Generate images of PROMPT with BUNDLE.

    A seed gives the same noise as in PyTorch. The path of each image is printed on stdout, and
    each file stores the settings that made it.
    """
    if prompt is None and prompts is None and options["like"] is None:
        raise click.UsageError("give a PROMPT, --prompts FILE or --like PICTURE")
    if prompt is not None and prompts is not None:
        raise click.UsageError("give a PROMPT or --prompts FILE, not both")
    if len(seeds) > 1 and options["count"] != 1:
        raise click.UsageError("--count needs a single --seed, from which it counts up")
    from .runtime.exec.finite import NotFinite
    from .runtime.generate.command import generate as run
    from .runtime.generate.denoise import LoopSettings

    asked = prompt if prompts is None else _lines(prompts)
    each = len(asked) if isinstance(asked, list) else 1
    width, height = size or (None, None)
    seed = list(seeds) * each if len(seeds) > 1 else next(iter(seeds), None)
    names = ("evaluate_every", "clear_cache_every", "check")
    options["loop"] = LoopSettings(**{name: options.pop(name) for name in names})
    options |= {"prompt": asked, "seed": seed, "width": width, "height": height}
    try:
        report = run(bundle, out, progress=verbose or not as_json, **options)
    except NotFinite as error:
        raise NotFinite(f"{error}; --no-check generates the image anyway") from None
    _emit(as_json, report.as_json(), report.as_text(), report.notes(verbose))


@cli.command()
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("repo", type=types.REPOSITORY)
@click.option("--revision", metavar="BRANCH", help="Branch to upload to. [default: main]")
@click.option(
    "--picture",
    type=types.OLD_FILE,
    metavar="PNG",
    help="Image generated with BUNDLE, to show in the model card.",
)
@click.option(
    "--against",
    metavar="SOURCE",
    help="Run `verify` against this source first, for the figures in the model card.",
)
@click.option(
    "--dry-run",
    is_flag=True,
    help="Write the model card and list the files; upload nothing. Works offline.",
)
@_publishing
@_common
def upload(
    bundle: Path,
    repo: str,
    dry_run: bool,
    publishing: dict[str, Any],
    as_json: bool,
    verbose: bool,
    debug: bool,
    **options: Any,
) -> None:
    """Publish BUNDLE to the Hub repository NAMESPACE/NAME, with a model card.

    Reports "published" once every remote checksum matches.
    """
    _exact()
    from .convert.publish.publish import publish

    publish_options = _publish_options(repo, publishing, as_json, **options)
    report = publish(bundle, publish_options, dry_run=dry_run, say=say)
    _emit(as_json, report.as_json(), report.as_text())


@cli.group()
def recipe() -> None:
    """Show or derive the recipe of a model class: its inputs, sizes and precision."""


@recipe.command("new")
@click.argument("class_name", metavar="CLASS")
@click.option(
    "--config",
    type=types.OLD_PATH,
    metavar="FILE",
    help="Configuration file (config.json) to derive the recipe from. "
    "[default: the constructor's defaults]",
)
@click.option("-o", "--out", type=types.FILE, help="File to write. [default: print the recipe]")
@click.option("--derive", is_flag=True, help="Derive a recipe even if mlxconv ships one.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@_common
def recipe_new(
    class_name: str,
    config: Path | None,
    out: Path | None,
    derive: bool,
    force: bool,
    as_json: bool,
    verbose: bool,
    debug: bool,
) -> None:
    """Print the recipe that mlxconv ships for CLASS, or derive one.

    CLASS is a class of diffusers or transformers, or package.module:Class.
    """
    from .convert.recipe.reading import recipe_names

    if not derive and class_name in recipe_names():
        unused = "; --config has no effect without it" if config else ""
        say(f"mlxconv ships this recipe, and `convert` uses it; --derive derives a new one{unused}")
    from .convert.trace.derive import new_recipe

    if force and out is None:
        raise click.UsageError("--force needs -o FILE")
    text = new_recipe(class_name, config, derive=derive)
    if out is not None:
        if out.exists() and not force:
            raise MlxconvError(f"{out}: exists; --force replaces it")
        out.write_text(text, encoding="utf-8")
        hint = shlex.join(["--recipe", str(out), "--verify"])
        say(f"{out}: written; try it with: mlxconv convert SOURCE -o OUT {hint}")
    if as_json:
        show(json.dumps({"class": class_name, "recipe": text, "path": out and str(out)}))
    elif out is None:
        show(text, newline=False)


@cli.command()
@click.argument("name", required=False)
@click.option(
    "--markdown", is_flag=True, help="Print the table as the Markdown page docs/MODELS.md."
)
@_common
def models(name: str | None, markdown: bool, as_json: bool, verbose: bool, debug: bool) -> None:
    """List every supported class with the parity measured for it in this version.

    NAME selects classes and pipelines by part of their name. A single match is shown in full.
    """
    from .convert.catalog.supported import supported_models

    if markdown and (as_json or name):
        raise click.UsageError("--markdown prints the whole page: it takes neither NAME nor --json")
    table = supported_models(name)
    if markdown:
        show(table.as_markdown(), newline=False)
        return
    _emit(as_json, table.as_json(), table.as_text())


@cli.command()
@click.option(
    "-o",
    "--out",
    type=types.FOLDER,
    help="Folder to keep the bundles in. [default: a temporary one]",
)
@click.option(
    "--prompts",
    type=types.UP_TO_200,
    default=24,
    show_default=True,
    help="Prompts for which correct images are counted.",
)
@_common
def demo(out: Path | None, prompts: int, as_json: bool, verbose: bool, debug: bool) -> None:
    """Convert, verify and generate with a tiny trained FLUX.1, offline, beside diffusers."""
    _exact()
    from .convert.demo.demo import demo as run

    report = run(out, say if verbose or not as_json else lambda text: None, prompts)
    _emit(as_json, report.as_json(), report.as_text())
    if not report.passed:
        raise SystemExit(1)


def _quiet() -> None:
    """Reduce the log output of libraries."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    if not sys.stderr.isatty():
        for bars in ("HF_HUB_DISABLE_PROGRESS_BARS", "TQDM_DISABLE"):
            os.environ.setdefault(bars, "1")


def _exact() -> None:
    """Compute fp32 products in full precision, for comparisons with PyTorch. Other commands use
    MLX's own setting."""
    os.environ["MLX_ENABLE_TF32"] = "0"


def main() -> None:
    """Entry point of the `mlxconv` command."""
    remember_interrupts()
    before = set(threading.enumerate())
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        raise SystemExit(2) from None
    except click.ClickException as error:
        error.show()
        raise SystemExit(error.exit_code) from None
    except (KeyboardInterrupt, click.Abort) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error
        say(str(cause or "") or "interrupted; nothing was left half-written")
        _leave(_INTERRUPTED, before)
    except Exception as error:
        if "--debug" in sys.argv:
            raise
        from .convert.publish.redaction import without_token

        say(f"error: {without_token(_reason(error))}")
        raise SystemExit(2 if isinstance(error, ArgumentError) else 1) from None


def _leave(code: int, before: set[threading.Thread]) -> NoReturn:
    """Exit without waiting for transfers: their threads may hang on a server for minutes, and
    Python would join them."""
    begun = [thread for thread in threading.enumerate() if thread not in before]
    if any(not thread.daemon or thread.name == NOT_WAITED_FOR for thread in begun):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code) from None


def _of_system(error: OSError) -> str:
    """A failure of the operating system: paths, permissions, disks."""
    try:
        Path.cwd()
    except OSError:
        return "the current folder no longer exists; change to another one (cd)"
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes)) else ""
    short = name if len(name) <= 200 else f"{name[:80]}...{name[-40:]}"
    start = f"{short}: " if short else ""
    return f"{start}{error.strerror}; check the path, its permissions and the disk"


def _reason(error: Exception) -> str:
    """One line: what is wrong, and what to do."""
    if isinstance(error, MlxconvError):
        return " ".join(str(error).splitlines())
    missing = (isinstance(error, ModuleNotFoundError) and error.name) or ""
    if missing.partition(".")[0] in ("torch", "diffusers", "transformers", "accelerate"):
        return f"{missing} is not installed; `pip install 'mlxconv[convert]'`"
    if isinstance(error, OSError) and error.strerror:
        return _of_system(error)
    if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
        return "out of memory; close other programs, or choose a smaller size or model"
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first} (unexpected; --debug shows where, please report it)"
