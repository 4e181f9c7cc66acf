"""A prompt through a whole pipeline: by diffusers in PyTorch, or by a bundle in MLX.

A run keeps what the pipeline made and its latents after every call of the scheduler. Those are
found by watching the `step` of the scheduler's class, which every pipeline calls, whatever hooks it
offers of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diffusers
import mlx.core as mx
import numpy as np
import torch

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.denoise import Progress
from mlxconv.runtime.generate.pipeline import Pipeline

from ..source.arrays import torch_to_numpy
from ..source.checkpoint import Checkpoint
from ..source.model_class import in_one_line
from ..trace.patches.pipelines import drawing, watched_steps, without_bars, without_remote_code
from ..trace.patches.threads import threads_for
from .metrics import Array

DEFAULT_PROMPT = "a photo of a cat on a red sofa"
DEFAULT_STEPS = 4
# Arguments that would change what was asked for: another size, another prompt.
_AS_ASKED = {"use_resolution_binning": False, "clean_caption": False}


@dataclass(frozen=True)
class Request:
    """What to generate. size: (width, height) in pixels. tokens: of the longest text encoder.

    None: the pipeline's own default.
    """

    prompts: tuple[str, ...] = (DEFAULT_PROMPT,)
    steps: int = DEFAULT_STEPS
    size: tuple[int, int] | None = None
    guidance: float | None = None
    tokens: int | None = None
    seed: int = 0


@dataclass
class Run:
    """One prompt's result. latents: after each call of the scheduler.

    pixels: (pictures or frames, height, width, channels) in 0 to 1; None where a pipeline makes
    something else.
    """

    pixels: Array | None
    latents: list[Array]


# ---- the class -----------------------------------------------------------------------------------


def pipeline_class(checkpoint: Checkpoint) -> type:
    """diffusers' class of a pipeline folder; MlxconvError where there is none to call."""
    name = checkpoint.class_name
    cls = getattr(diffusers, name or "", None)
    if not (isinstance(cls, type) and issubclass(cls, diffusers.DiffusionPipeline)):
        raise MlxconvError(
            f"{checkpoint.path}: its pipeline class is {name}, which diffusers "
            f"{diffusers.__version__} has no DiffusionPipeline of; use --tier forward or block"
        )
    return cls


def call_arguments(cls: type, request: Request, prompt: str) -> dict[str, Any]:
    """Keywords of `cls.__call__` for one prompt, without the generator.

    MlxconvError for an option that the class has no argument for, and for an argument that the
    class cannot go without and a prompt does not give.
    """
    takes = inspect.signature(cls.__call__).parameters
    asked = {
        "prompt": (prompt, "--prompt", prompt != DEFAULT_PROMPT),
        "num_inference_steps": (request.steps, "--steps", request.steps != DEFAULT_STEPS),
        "guidance_scale": (request.guidance, "--guidance", True),
        "max_sequence_length": (request.tokens, "--tokens", True),
        "width": (request.size and request.size[0], "--size", True),
        "height": (request.size and request.size[1], "--size", True),
    }
    given: dict[str, Any] = {}
    for name, (value, option, chosen) in asked.items():
        if name in takes and value is not None:
            given[name] = value
        elif value is not None and chosen:
            raise MlxconvError(f"{cls.__name__}: takes no {name}, which {option} would set")
    given |= {k: v for k, v in _AS_ASKED.items() if k in takes}
    needed = [n for n in _needed(takes) if n not in given]
    if needed:
        raise MlxconvError(
            f"{cls.__name__}: cannot be called without {', '.join(needed)}, which verify cannot "
            "provide; use --tier forward or block"
        )
    return given


def _needed(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, p in takes.items()
        if name != "self" and p.default is inspect.Parameter.empty and p.kind in named
    ]


def _media(cls: type) -> list[str]:
    """Arguments for pictures and the like that are None by default against their own type."""
    return [
        name
        for name, p in inspect.signature(cls.__call__).parameters.items()
        if any(word in name.split("_") for word in ("image", "images", "video", "mask", "audio"))
        and p.default is None
        and not any(word in str(p.annotation) for word in ("None", "Optional"))
    ]


# ---- PyTorch -------------------------------------------------------------------------------------


def load_pipeline(checkpoint: Checkpoint, dtypes: Mapping[str, str], variant: str | None) -> Any:
    """diffusers' pipeline on the CPU; a dtype a component, that of the others as "default"."""
    cls: Any = pipeline_class(checkpoint)
    try:
        with without_bars(), without_remote_code():
            pipe = cls.from_pretrained(
                str(checkpoint.path),
                local_files_only=True,
                trust_remote_code=False,
                variant=variant,
                dtype={name: getattr(torch, dtype) for name, dtype in dtypes.items()},
            )
    except Exception as error:  # diffusers and transformers raise many kinds
        raise MlxconvError(
            f"{checkpoint.path}: diffusers cannot load the pipeline ({in_one_line(error)})"
        ) from error
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_pipeline(
    pipe: Any, arguments: Mapping[str, Any], seed: int, noise: Noise | None = None
) -> Run:
    """Call a diffusers pipeline, its noise that of `seed`, or that which `noise` has drawn."""
    cls, latents = type(pipe), list[Array]()
    parts = pipe.components.values()
    schedulers = {type(part) for part in parts if hasattr(part, "set_timesteps")}
    models = [part for part in parts if isinstance(part, torch.nn.Module)]
    generator = torch.Generator().manual_seed(seed)

    def seen(result: Any) -> None:
        made = result if torch.is_tensor(result) else result[0]
        latents.append(torch_to_numpy(made).astype(np.float32))

    with (
        watched_steps(schedulers, seen),
        (noise or Noise()).drawn(),
        threads_for(sum(p.numel() for model in models for p in model.parameters())),
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
    ):
        torch.manual_seed(seed)  # for what is drawn without a generator
        try:
            result = pipe(**arguments, generator=generator, output_type="np")
        except MlxconvError:
            raise
        except Exception as error:  # whatever a pipeline raises for what it cannot do
            media = _media(cls)
            wants = f"; it takes {', '.join(media)}, which verify has none of" if media else ""
            dtype = str(getattr(pipe, "dtype", "")).removeprefix("torch.")
            raise MlxconvError(
                f"{cls.__name__}: diffusers cannot run it in {dtype} ({in_one_line(error)})"
                f"{wants}; use --tier forward or block"
            ) from error
    return Run(_pixels(result), latents)


def _pixels(result: Any) -> Array | None:
    """Images (n, height, width, channels), or the frames of the first video."""
    if hasattr(result, "images"):
        found = np.asarray(result.images)
    elif hasattr(result, "frames"):
        found = np.asarray(result.frames)[0]
    else:
        return None
    found = found / np.float32(255) if found.dtype == np.uint8 else found.astype(np.float32)
    return found[..., None] if found.ndim == 3 else found if found.ndim == 4 else None


@dataclass
class Noise:
    """Normals that one run draws and others take again, cast: the same noise in every precision.

    torch draws other values in bfloat16 than in float32 from one seed.
    """

    values: list[torch.Tensor] | None = None

    @contextmanager
    def drawn(self) -> Iterator[None]:
        """The first time whatever torch.randn gives is kept, from then on it is given."""
        kept: list[torch.Tensor] = []
        again = None if self.values is None else iter(self.values)
        randn = torch.randn

        def draw(*args: Any, **kwargs: Any) -> torch.Tensor:
            fresh = randn(*args, **kwargs)
            if again is None:
                kept.append(fresh.clone())
                return fresh
            known = next(again, None)
            if known is None or known.shape != fresh.shape:
                raise MlxconvError("the pipeline draws different noise in different precisions")
            return known.to(fresh.dtype).clone()

        with drawing(draw):
            yield
        if again is None:
            self.values = kept


# ---- MLX -----------------------------------------------------------------------------------------


def native_request(bundle: Path, asked: Request) -> Request:
    """A request with the native pipeline's defaults, so that both sides are asked the same."""
    own = Pipeline(bundle).defaults
    guidance = own.guidance if asked.guidance is None else asked.guidance
    return replace(asked, size=asked.size or (own.width, own.height), guidance=guidance)


def run_native(bundle: Path, dtype: str | None, asked: Request) -> list[Run]:
    """All prompts by `mlxconv.load`; its weights are freed afterwards."""
    pipeline = Pipeline(bundle, dtype=dtype, keep=len(asked.prompts) > 1)
    width, height = asked.size or (None, None)
    runs: list[Run] = []
    for prompt in asked.prompts:
        latents: list[Array] = []

        def told(progress: Progress, latents: list[Array] = latents) -> None:
            latents.append(np.array(progress.latents.astype(mx.float32)))

        made = pipeline(
            prompt,
            steps=asked.steps,
            guidance=asked.guidance,
            width=width,
            height=height,
            seed=asked.seed,
            tokens=asked.tokens,
            callback=told,
        )
        runs.append(Run(made.pixels, latents))
    return runs
