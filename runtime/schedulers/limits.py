"""What is done to a predicted clean image before it is used."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import mlx.core as mx

from .schedule import Limit


@dataclass(frozen=True)
class Clip:
    clip_sample: bool = False
    clip_sample_range: float = 1.0

    def limit(self) -> Limit | None:
        return partial(clip, bound=self.clip_sample_range) if self.clip_sample else None


@dataclass(frozen=True)
class Threshold:
    thresholding: bool = False
    dynamic_thresholding_ratio: float = 0.995
    sample_max_value: float = 1.0

    def limit(self) -> Limit | None:
        ratio, largest = self.dynamic_thresholding_ratio, self.sample_max_value
        return partial(threshold, ratio=ratio, largest=largest) if self.thresholding else None


@dataclass(frozen=True)
class Limits(Threshold, Clip):
    """Thresholding comes before clipping, as in diffusers."""

    def limit(self) -> Limit | None:
        return Threshold.limit(self) or Clip.limit(self)


CLIPPED = Limits(clip_sample=True)


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
