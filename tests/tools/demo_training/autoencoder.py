"""Pictures to latents and back: an AutoencoderKL of four levels, and its training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlxconv.convert.demo.scenes import Scene, draw, training_scene

from .loops import Log, Schedule, train

LATENTS = 8  # channels
CONFIG: dict[str, Any] = {
    "block_out_channels": [16, 32, 32, 64],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "latent_channels": LATENTS,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "mid_block_add_attention": False,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "sample_size": 64,
}
_KL = 2e-4  # weight of the divergence from a unit normal, a latent value


def as_tensor(pictures: np.ndarray[Any, Any]) -> Tensor:
    """(batch, side, side, 3) uint8 -> (batch, 3, side, side) in -1 to 1."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def drawn(count: int, *seed: int, loose: bool = True) -> tuple[list[Scene], Tensor]:
    """Training scenes and their pictures, by a seed."""
    rng = np.random.default_rng(seed)
    scenes = [training_scene(rng) for _ in range(count)]
    return scenes, as_tensor(np.stack([draw(scene, rng, loose) for scene in scenes]))


def train_autoencoder(
    folder: Path, seed: int, schedule: Schedule, batch: int, log: Log
) -> nn.Module:
    """The trained model, its latents scaled and shifted to mean 0 and deviation 1 by its config."""
    from diffusers import AutoencoderKL

    torch.manual_seed(seed)
    model = AutoencoderKL(**CONFIG).to(memory_format=torch.channels_last)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        _, pictures = drawn(batch, seed, 1, step)
        noise = torch.Generator().manual_seed(seed * 1_000_003 + step)
        posterior = model.encode(pictures).latent_dist  # type: ignore[operator]
        error = model.decode(posterior.sample(noise)).sample - pictures  # type: ignore[operator]
        divergence: Tensor = posterior.kl().mean() / posterior.mean[0].numel()
        loss: Tensor = error.abs().mean() + error.square().mean() + _KL * divergence
        return loss

    trained = train("autoencoder", model, loss_of, schedule, folder, log)
    mean, deviation = _statistics(trained, seed)
    trained.register_to_config(shift_factor=mean, scaling_factor=1 / deviation)  # type: ignore[operator]
    return trained.eval()


def train_decoder(
    vae: Any, folder: Path, seed: int, schedule: Schedule, batch: int, log: Log
) -> nn.Module:
    """Sharper edges from the same latents, which stay what the transformer learned."""
    vae.requires_grad_(False).decoder.requires_grad_(True)

    def loss_of(model: nn.Module, step: int) -> Tensor:
        _, pictures = drawn(batch, seed, 6, step)
        noise = torch.Generator().manual_seed(seed * 1_000_003 + step)
        with torch.no_grad():
            latents = model.encode(pictures).latent_dist.sample(noise)  # type: ignore[operator]
        error = model.decode(latents).sample - pictures  # type: ignore[operator]
        loss: Tensor = error.abs().mean() + error.square().mean()
        return loss

    return train("decoder", vae, loss_of, schedule, folder, log).eval()


@torch.no_grad()
def _statistics(model: nn.Module, seed: int) -> tuple[float, float]:
    _, pictures = drawn(256, seed, 2)
    noise = torch.Generator().manual_seed(seed)
    latents = model.encode(pictures).latent_dist.sample(noise)  # type: ignore[operator]
    return float(latents.mean()), float(latents.std())
