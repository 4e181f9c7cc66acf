"""Latents and pixels: what image families share."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx


def vae_scale(config: Mapping[str, Any]) -> int:
    """Pixels a latent, along each side: each level but the last halves."""
    return int(2 ** (len(config["block_out_channels"]) - 1))


def pixels(decoded: mx.array) -> mx.array:
    """A decoder's output (n, 3, height, width) in -1 to 1 -> (n, height, width, 3) in 0 to 1."""
    values = mx.clip(decoded.astype(mx.float32) / 2 + 0.5, 0, 1)
    return values.transpose(0, 2, 3, 1)
