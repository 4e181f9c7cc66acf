"""Pictures of held-out captions, and the share of them that is right."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from .checker import faults
from .pictures import SIDE, Scene
from .text import TOKENS

STEPS = 8
Array = np.ndarray[Any, Any]


def share_right(pictures: Iterable[Array], scenes: Iterable[Scene]) -> float:
    """Of pictures (SIDE, SIDE, 3) uint8, the share without a fault."""
    right = [not faults(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    return sum(right) / len(right)


def by_diffusers(checkpoint: Path, captions: list[str], steps: int = STEPS) -> Array:
    """FluxPipeline in fp32: (captions, SIDE, SIDE, 3) in 0 to 1, caption i from seed i."""
    import torch
    from diffusers import FluxPipeline

    pipeline = FluxPipeline.from_pretrained(str(checkpoint), torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    seeds = [torch.Generator().manual_seed(i) for i in range(len(captions))]
    pictures: Array = pipeline(
        captions, num_inference_steps=steps, generator=seeds, width=SIDE, height=SIDE,
        max_sequence_length=TOKENS, output_type="np",
    ).images  # fmt: skip
    return pictures


def by_mlx(pipeline: Callable[..., Any], captions: list[str], steps: int = STEPS) -> Array:
    """The same of a loaded bundle (`mlxconv.load`)."""
    made = [
        pipeline(caption, steps=steps, seed=i, width=SIDE, height=SIDE, tokens=TOKENS).pixels[0]
        for i, caption in enumerate(captions)
    ]
    return np.stack(made)


def as_bytes(pictures: Array) -> Array:
    """0 to 1 -> uint8."""
    return np.round(pictures * 255).astype(np.uint8)
