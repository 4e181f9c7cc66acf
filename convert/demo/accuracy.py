"""Pictures of captions by diffusers and by a bundle, and whether they are right."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from mlxconv.runtime.generate.pipeline import Pipeline

from . import TOKENS
from .checker import faults
from .scenes import SIDE, Scene

STEPS = 8
Array = np.ndarray[Any, Any]


def is_right(picture: Array, scene: Scene) -> bool:
    """Whether a picture (SIDE, SIDE, 3) in 0 to 1 shows all that the scene's caption says."""
    return not faults(np.round(picture * 255).astype(np.uint8), scene)


def by_diffusers(checkpoint: Path, captions: list[str], steps: int = STEPS) -> Array:
    """FluxPipeline in fp32: (captions, SIDE, SIDE, 3) in 0 to 1, caption i from seed i."""
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(
        str(checkpoint), dtype=torch.float32, trust_remote_code=False
    )
    pipeline.set_progress_bar_config(disable=True)
    seeds = [torch.Generator().manual_seed(i) for i in range(len(captions))]
    pictures: Array = pipeline(
        captions,
        num_inference_steps=steps,
        generator=seeds,
        width=SIDE,
        height=SIDE,
        max_sequence_length=TOKENS,
        output_type="np",
    ).images
    return pictures


def by_mlx(pipeline: Pipeline, captions: list[str], steps: int = STEPS) -> tuple[Array, float]:
    """The same by a loaded bundle, and the median seconds of a step."""
    made = [
        pipeline(caption, steps=steps, seed=i, width=SIDE, height=SIDE, tokens=TOKENS)
        for i, caption in enumerate(captions)
    ]
    pictures = np.concatenate([each.pixels for each in made])
    return pictures, median(each.seconds["step_median"] for each in made)
