"""Latents and pixels: what image families share."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...schedulers import Schedule, Scheduler, make_schedule
from ..noise import Generator
from .parts import Defaults, Parts, Request

_UNSAID = 32  # AutoencoderKL's default for `sample_size`


def vae_scale(config: Mapping[str, Any]) -> int:
    """Pixels a latent, along each side: each level but the last halves, or those that are named."""
    if "temperal_downsample" in config:
        return int(2 ** len(config["temperal_downsample"]))
    levels = config.get("block_out_channels") or config["encoder_block_out_channels"]
    return int(2 ** (len(levels) - 1))


def trained_size(parts: Parts, multiple: int, most: int | None = None) -> int:
    """Pixels a side of a denoiser that does not say: the pipeline's own number (`most`, or 128
    latents), or fewer where the VAE was trained on smaller pictures."""
    config = parts.config("vae")
    most = most or 128 * vae_scale(config)
    size = config.get("sample_size")
    if not isinstance(size, int) or size == _UNSAID:
        return most
    return max(multiple, min(size, most) // multiple * multiple)


def pixels(decoded: mx.array) -> mx.array:
    """A decoder's output (n, 3, height, width) in -1 to 1 -> (n, height, width, 3) in 0 to 1.

    What is infinite becomes NaN: clipped it would pass for white.
    """
    given = decoded.astype(mx.float32)
    values = mx.clip(given / 2 + 0.5, 0, 1) + 0 * given
    return values.transpose(0, 2, 3, 1)


def scaled(z: mx.array, config: Mapping[str, Any]) -> mx.array:
    """Latents as the denoiser makes them -> as an AutoencoderKL or AutoencoderDC decodes them."""
    scale, shift = float(config["scaling_factor"]), float(config.get("shift_factor") or 0)
    return z / scale + shift


def noise_as(dtype: mx.Dtype, generator: Generator, shape: tuple[int, ...]) -> mx.array:
    """Standard normal of a shape, in the precision in which the pipeline draws it."""
    return generator.normal(shape, str(dtype).removeprefix("mlx.core."))


# ---- latents (n, channels, height, width), of an AutoencoderKL -----------------------------------


def plain_shape(parts: Parts, request: Request, denoiser: str = "transformer") -> tuple[int, ...]:
    """Of a request's latents (1, channels, height, width)."""
    scale, channels = vae_scale(parts.config("vae")), parts.config(denoiser)["in_channels"]
    return 1, channels, request.height // scale, request.width // scale


def patched_defaults(parts: Parts, steps: int, guidance: float) -> Defaults:
    """Of a transformer that says its size in latents, and its patches'."""
    scale, config = vae_scale(parts.config("vae")), parts.config("transformer")
    size = config["sample_size"] * scale
    return Defaults(size, size, steps, guidance, scale * config["patch_size"])


# ---- latents packed by 2 x 2, as FLUX.1 does -----------------------------------------------------


def packed(latents: mx.array) -> mx.array:
    """(n, channels, 2 rows, 2 columns) -> (n, rows * columns, 4 * channels)."""
    count, channels, height, width = latents.shape
    split = latents.reshape(count, channels, height // 2, 2, width // 2, 2)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(count, height * width // 4, 4 * channels)


def packed_noise(
    parts: Parts, dtype: mx.Dtype, generator: Generator, grid: tuple[int, int]
) -> mx.array:
    """Noise for (rows, columns) tokens, packed; see `noise_as`."""
    rows, columns = grid
    channels = parts.config("transformer")["in_channels"] // 4
    return packed(noise_as(dtype, generator, (1, channels, 2 * rows, 2 * columns)))


def unpacked(latents: mx.array, rows: int, columns: int) -> mx.array:
    """(n, rows * columns, 4 * channels) -> (n, channels, 2 rows, 2 columns)."""
    count, channels = latents.shape[0], latents.shape[-1] // 4
    split = latents.reshape(count, rows, columns, channels, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    return split.reshape(count, channels, 2 * rows, 2 * columns)


def image_ids(rows: int, columns: int) -> mx.array:
    """(rows * columns, 3): zero, row, column of each token."""
    ids = np.zeros((rows, columns, 3), np.float32)
    ids[..., 1] = np.arange(rows)[:, None]
    ids[..., 2] = np.arange(columns)
    return mx.array(ids.reshape(-1, 3))


def shifted_flow(scheduler: Scheduler, request: Request, mu: float | None) -> Schedule:
    """From 1 to 1 / steps, shifted by mu."""
    asked = request.spacing
    if "use_flow_sigmas" not in scheduler.options and "steps" in asked:
        asked = {"sigmas": np.linspace(1.0, 1 / request.steps, request.steps).tolist()}
    return make_schedule(scheduler, mu=mu, **asked)  # another solver has sigmas of its own
