"""The FLUX.1 transformer of the tiny pipeline, and its training by flow matching."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from mlxconv.convert.demo import TOKENS
from mlxconv.convert.demo.scenes import SIDE, is_held_out

from .autoencoder import LATENTS, drawn
from .loops import Log, Schedule, train
from .text import CLIP_WIDTH, T5_WIDTH, Encoders, said_otherwise

CONFIG: dict[str, Any] = {
    "in_channels": 4 * LATENTS,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 32,
    "num_attention_heads": 6,
    "joint_attention_dim": T5_WIDTH,
    "pooled_projection_dim": CLIP_WIDTH,
    "guidance_embeds": False,
    "axes_dims_rope": [8, 12, 12],
}
GRID = SIDE // 16  # tokens along a side: a token is 2 x 2 latents of 8 x 8 pixels each
_CHUNK = 64
_UNSAID = 0.1  # share of captions left empty, for classifier-free guidance (arXiv 2207.12598)


@dataclass
class Data:
    """Packed latents (scenes, tokens, channels); ids (scenes, 2 ways to say it, TOKENS)."""

    latents: Tensor
    clip_ids: Tensor
    t5_ids: Tensor

    def __add__(self, other: Data) -> Data:
        return Data(*(torch.cat(pair) for pair in zip(vars(self).values(), vars(other).values())))


class Growing:
    """Data that comes in parts: `(step, part)` is waited for and taken up at that step."""

    def __init__(self, parts: Sequence[tuple[int, Callable[[], Data]]]) -> None:
        self._parts = deque(parts)
        self._data: Data | None = None

    def at(self, step: int) -> Data:
        """All that a step may draw from; steps only rise."""
        while self._parts and self._parts[0][0] <= step:
            part = self._parts.popleft()[1]()
            self._data = part if self._data is None else self._data + part
        assert self._data is not None
        return self._data


@torch.no_grad()
def make_data(vae: Any, encoders: Encoders, first: int, count: int, seed: int) -> Data:
    """The training scenes `first` to `first + count`, in chunks of 64, as the transformer's."""
    latents, captions, others = list[Tensor](), list[str](), list[str]()
    for chunk in range(first // _CHUNK, (first + count) // _CHUNK):
        scenes, pictures = drawn(_CHUNK, seed, 4, chunk, loose=False)
        noise = torch.Generator().manual_seed(seed * 1_000_003 + chunk)
        latents.append(vae.encode(pictures).latent_dist.sample(noise).contiguous())
        for scene in scenes:
            other = said_otherwise(scene)
            captions.append(scene.caption)
            others.append((scene if is_held_out(other) else other).caption)
    values = (torch.cat(latents) - vae.config.shift_factor) * vae.config.scaling_factor
    pairs = zip(encoders.ids(captions), encoders.ids(others), strict=True)
    return Data(packed(values), *(torch.stack(pair, 1) for pair in pairs))


def packed(latents: Tensor) -> Tensor:
    """(batch, channels, 8, 8) -> (batch, 16, 4 * channels), as FluxPipeline packs 2 x 2 latents."""
    from diffusers import FluxPipeline

    batch, channels, rows, columns = latents.shape
    found: Tensor = FluxPipeline._pack_latents(latents, batch, channels, rows, columns)
    return found


def new_transformer() -> Any:
    """With nothing flowing through its gates at first, as DiT begins (arXiv 2212.09748, 3.2)."""
    from diffusers import FluxTransformer2DModel

    model = FluxTransformer2DModel(**CONFIG)
    gates = [model.norm_out.linear, model.proj_out]
    for block in (*model.transformer_blocks, *model.single_transformer_blocks):
        parts = dict(block.named_children())
        gates += [
            parts[name].linear for name in ("norm", "norm1", "norm1_context") if name in parts
        ]
    for linear in gates:
        nn.init.zeros_(linear.weight)
        nn.init.zeros_(linear.bias)
    return model


def train_transformer(
    folder: Path, growing: Growing, encoders: Encoders, seed: int, schedule: Schedule, batch: int,
    log: Log,
) -> nn.Module:  # fmt: skip
    """Learns the velocity noise - latents at times of a logit-normal (arXiv 2403.03206, 3.1)."""
    from diffusers import FluxPipeline

    torch.manual_seed(seed + 2)
    cpu = torch.device("cpu")
    places = FluxPipeline._prepare_latent_image_ids(1, GRID, GRID, cpu, torch.float32)
    nothing = encoders.ids([""])

    def loss_of(model: nn.Module, step: int) -> Tensor:
        data, rng = growing.at(step), np.random.default_rng((seed, 5, step))
        count = len(data.latents)
        rows, ways = (torch.from_numpy(rng.integers(n, size=batch)) for n in (count, 2))
        unsaid = torch.from_numpy(rng.random(batch) < _UNSAID)[:, None]
        clip_ids = torch.where(unsaid, nothing[0], data.clip_ids[rows, ways])
        t5_ids = torch.where(unsaid, nothing[1], data.t5_ids[rows, ways])
        with torch.no_grad():
            pooled, states = encoders(clip_ids, t5_ids)
        clean = data.latents[rows]
        noise = torch.from_numpy(rng.standard_normal(clean.shape, np.float32))
        time = torch.from_numpy(0.3 + 1.1 * rng.standard_normal(batch)).float().sigmoid()
        mixed = torch.lerp(clean, noise, time[:, None, None])
        dtype = next(model.parameters()).dtype
        with sdpa_kernel(SDPBackend.MATH):  # at 32 tokens, twice as fast as flash attention in bf16
            velocity = model(
                hidden_states=mixed.to(dtype), timestep=time.to(dtype),
                encoder_hidden_states=states.to(dtype), pooled_projections=pooled.to(dtype),
                img_ids=places, txt_ids=torch.zeros(TOKENS, 3), return_dict=False,
            )[0]  # fmt: skip
        return nn.functional.mse_loss(velocity.float(), noise - clean)

    return train("transformer", new_transformer(), loss_of, schedule, folder, log)
