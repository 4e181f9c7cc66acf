"""What a model predicts, as coefficients of (latents, output).

Latents are `alpha * clean + sigma * noise`; v is `alpha * noise - sigma * clean` (Progressive
Distillation, arXiv 2202.00512, section 4); a flow's output is `noise - clean`.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from .schedule import Array

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
