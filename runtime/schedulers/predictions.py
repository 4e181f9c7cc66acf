"""What a model predicts, as coefficients of (latents, output), and how it is limited.

Latents are `alpha * clean + sigma * noise`; v is `alpha * noise - sigma * clean` (Progressive
Distillation, arXiv 2202.00512, section 4); a flow's output is `noise - clean`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Literal

import mlx.core as mx
import numpy as np

from .schedule import Array, Limit

Pair = tuple[Array, Array]
Prediction = Literal["epsilon", "sample", "v_prediction"]
NoiseOrV = Literal["epsilon", "v_prediction"]
WithFlow = Literal["epsilon", "sample", "v_prediction", "flow_prediction"]


def clean_of(kind: str, alpha: Array, sigma: Array) -> Pair:
    """The clean latents: arrays (a, b), a value a call, of `a * latents + b * output`."""
    zero, one = np.zeros_like(sigma), np.ones_like(sigma)
    pairs = {
        "epsilon": (one / alpha, -sigma / alpha),
        "sample": (zero, one),
        "original_sample": (zero, one),
        "v_prediction": (alpha, -sigma),
        "flow_prediction": (one, -sigma),
    }
    return pairs[kind]


def noise_of(kind: str, alpha: Array, sigma: Array) -> Pair:
    """The noise in the latents: arrays (a, b) of `a * latents + b * output`."""
    zero, one = np.zeros_like(sigma), np.ones_like(sigma)
    pairs = {
        "epsilon": (zero, one),
        "sample": (one / sigma, -alpha / sigma),
        "v_prediction": (sigma, alpha),
    }
    return pairs[kind]


def exploding_clean_of(kind: str, sigma: Array) -> Pair:
    """As `clean_of` for latents `clean + sigma * noise`, whose model sees them divided by
    sqrt(sigma^2 + 1) (EDM, arXiv 2206.00364, table 1)."""
    alpha = 1 / np.sqrt(sigma**2 + 1)
    a, b = clean_of(kind, alpha, sigma * alpha)
    return a * alpha, b


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
