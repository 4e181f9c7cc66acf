"""What is done to a predicted clean image before it is used."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import mlx.core as mx

from .schedule import Limit


def limit_of(options: Mapping[str, Any]) -> Limit | None:
    """Thresholding before clipping, as in diffusers; None where neither is asked for."""
    if options.get("thresholding"):
        return partial(
            threshold,
            ratio=options["dynamic_thresholding_ratio"],
            largest=options["sample_max_value"],
        )
    if options.get("clip_sample"):
        return partial(clip, bound=options["clip_sample_range"])
    return None


def clip(clean: mx.array, bound: float) -> mx.array:
    return mx.clip(clean, -bound, bound)


def threshold(clean: mx.array, ratio: float, largest: float) -> mx.array:
    """Dynamic thresholding (Imagen, arXiv 2205.11487, section 2.3): clip at a quantile, rescale.

    clean (batch, ...); the quantile is each image's own, between 1 and `largest`.
    """
    ordered = mx.sort(mx.abs(clean).reshape(clean.shape[0], -1), axis=1)
    rank = ratio * (ordered.shape[1] - 1)
    low, high = ordered[:, math.floor(rank)], ordered[:, math.ceil(rank)]
    bound = low + (rank - math.floor(rank)) * (high - low)
    bound = mx.minimum(mx.maximum(bound, 1.0), largest).reshape(-1, *[1] * (clean.ndim - 1))
    return mx.clip(clean, -bound, bound) / bound
