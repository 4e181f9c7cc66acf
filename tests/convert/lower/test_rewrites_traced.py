"""Rewrites on what PyTorch's own modules trace to: the op that comes out, and the same numbers."""

from __future__ import annotations

from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.normalization import AdaLayerNormContinuous, FP32LayerNorm, RMSNorm
from diffusers.models.transformers.transformer_hidream_image import apply_rope as hidream_rope
from diffusers.models.transformers.transformer_kandinsky6 import apply_rotary as kandinsky_rope
from diffusers.models.transformers.transformer_prx import apply_rope as prx_rope
from torch import Tensor, nn
from transformers.activations import NewGELUActivation
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from mlxconv.convert.lower.rewrites import rewrite
from mlxconv.runtime.program.program import Entry

from ..trace.evaluation import Traced, error, recipe_for

pytestmark = pytest.mark.xdist_group("rewrites_traced")

WIDTH = 32
HEADS = ("batch", "tokens", 2, WIDTH)


class Rotation(nn.Module):
    """x turned by a table, in one of the forms that diffusers 0.42 and transformers 5 have."""


class Interleaved(Rotation):
    def forward(self, x: Tensor, table_cos: Tensor, table_sin: Tensor) -> Tensor:
        return apply_rotary_emb(x, (table_cos, table_sin), sequence_dim=1)  # type: ignore[no-any-return]


class Halves(Rotation):
    def forward(self, x: Tensor, table_cos: Tensor, table_sin: Tensor) -> Tensor:
        tables = (table_cos, table_sin)
        return apply_rotary_emb(x, tables, use_real_unbind_dim=-2, sequence_dim=1)  # type: ignore[no-any-return]


class Complex(Rotation):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return apply_rotary_emb(x, torch.view_as_complex(table), use_real=False)  # type: ignore[no-any-return]


class HiDream(Rotation):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return hidream_rope(x, x, table)[0]  # type: ignore[no-any-return]


class Prx(Rotation):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return prx_rope(x, table)  # type: ignore[no-any-return]


class Kandinsky(Rotation):
    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return kandinsky_rope(x, table)


class Llama(Rotation):
    def forward(self, x: Tensor, table_cos: Tensor, table_sin: Tensor) -> Tensor:
        turned = apply_rotary_pos_emb(x, x, table_cos, table_sin, unsqueeze_dim=2)
        return turned[0]  # type: ignore[no-any-return]


class Ernie(Rotation):
    """The inner function of `ErnieImageSingleStreamAttnProcessor`."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        cos, sin = torch.cos(table).to(x.dtype), torch.sin(table).to(x.dtype)
        x, rest = x[..., : table.shape[-1]], x[..., table.shape[-1] :]
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x * cos + torch.cat((-x2, x1), dim=-1) * sin, rest), dim=-1)


class Wan(Rotation):
    """The inner function of `WanAttnProcessor`."""

    def forward(self, x: Tensor, table_cos: Tensor, table_sin: Tensor) -> Tensor:
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = table_cos[..., 0::2], table_sin[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2] = x1 * cos - x2 * sin
        out[..., 1::2] = x1 * sin + x2 * cos
        return out.type_as(x)


class Gpt(Rotation):
    """Halves, both lines written out (GPT-NeoX and its heirs)."""

    def forward(self, x: Tensor, table_cos: Tensor, table_sin: Tensor) -> Tensor:
        x1, x2 = x[..., : WIDTH // 2], x[..., WIDTH // 2 :]
        return torch.cat((x1 * table_cos - x2 * table_sin, x2 * table_cos + x1 * table_sin), -1)


FLAT, SPREAD = ("tokens", WIDTH), (1, "tokens", 1, WIDTH)
ROTATIONS: dict[type[Rotation], dict[str, tuple[int | str, ...]]] = {
    Interleaved: {"table_cos": FLAT, "table_sin": FLAT},
    Halves: {"table_cos": FLAT, "table_sin": FLAT},
    Complex: {"table": (1, "tokens", WIDTH // 2, 2)},
    HiDream: {"table": (1, "tokens", 1, WIDTH // 2, 2, 2)},
    Prx: {"table": (1, "tokens", 1, WIDTH // 2, 2, 2)},
    Kandinsky: {"table": ("tokens", 1, WIDTH // 2, 2, 2)},
    Llama: {"table_cos": (1, "tokens", WIDTH), "table_sin": (1, "tokens", WIDTH)},
    Ernie: {"table": (1, "tokens", 1, WIDTH - 8)},
    Wan: {"table_cos": SPREAD, "table_sin": SPREAD},
    Gpt: {"table_cos": (1, "tokens", 1, WIDTH // 2), "table_sin": (1, "tokens", 1, WIDTH // 2)},
}


class Modulated(nn.Module):
    """FP32LayerNorm, modulated as in Wan's and AuraFlow's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = FP32LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return torch.addcmul(shift[:, None], self.norm(x), 1 + scale[:, None])


class WideModulated(nn.Module):
    """The whole norm in fp32, as in Wan's blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = FP32LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        normed = self.norm(x.float()) * (1 + scale.float()[:, None]) + shift.float()[:, None]
        return normed.type_as(x)


class GroupedHeads(nn.Module):
    """Two heads of keys and values for four of queries (transformers' `repeat_kv`)."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat_kv(k, 2), repeat_kv(v, 2)
        return nn.functional.scaled_dot_product_attention(q, k, v)


class Gate(nn.Module):
    """Siblings over one input; one of them without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 16)
        self.v = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q(x), self.k(x), self.v(x)], dim=-1)


NORM: dict[str, tuple[int | str, ...]] = {"hidden_states": ("batch", "tokens", WIDTH)}
LLM: dict[str, tuple[int | str, ...]] = {"x": ("batch", "tokens", WIDTH)}
MODULATED: dict[str, tuple[int | str, ...]] = {
    "x": ("batch", "tokens", WIDTH),
    "scale": ("batch", WIDTH),
    "shift": ("batch", WIDTH),
}
MODULES: dict[str, tuple[type[nn.Module], dict[str, Any], dict[str, Any], dict[str, int]]] = {
    **{c.__name__: (c, {}, {"x": HEADS, **t}, {"rotary": 1}) for c, t in ROTATIONS.items()},
    "RMSNorm": (RMSNorm, {"dim": WIDTH, "eps": 1e-6}, NORM, {"rms_norm": 1}),
    "T5LayerNorm": (T5LayerNorm, {"hidden_size": WIDTH}, NORM, {"rms_norm": 1}),
    "Qwen3RMSNorm": (Qwen3RMSNorm, {"hidden_size": WIDTH}, NORM, {"rms_norm": 1}),
    "Gemma2RMSNorm": (Gemma2RMSNorm, {"dim": WIDTH}, LLM, {"rms_norm": 1, "add": 1}),
    "AdaLayerNormContinuous": (
        AdaLayerNormContinuous,
        {"embedding_dim": WIDTH, "conditioning_embedding_dim": 16, "elementwise_affine": False},
        {"x": ("batch", "tokens", WIDTH), "conditioning_embedding": ("batch", 16)},
        {"modulated_norm": 1, "layer_norm": 0},
    ),
    "Modulated": (Modulated, {}, MODULATED, {"modulated_norm": 1, "cast": 0}),
    "WideModulated": (WideModulated, {}, MODULATED, {"modulated_norm": 1}),
    "NewGELUActivation": (
        NewGELUActivation,
        {},
        {"input": ("batch", "tokens", WIDTH)},
        {"gelu": 1, "tanh": 0},
    ),
    "GroupedHeads": (
        GroupedHeads,
        {},
        {
            "q": ("batch", 4, "tokens", WIDTH),
            "k": ("batch", 2, "tokens", WIDTH),
            "v": ("batch", 2, "tokens", WIDTH),
        },
        {"attention": 1, "broadcast": 0, "reshape": 0},
    ),
    "Gate": (Gate, {}, LLM, {"linears": 1, "linear": 1}),
}


@cache
def traced(name: str) -> tuple[Traced, Entry]:
    cls, config, shapes, _ = MODULES[name]
    found = Traced(cls, config, recipe_for(cls, **shapes))
    return found, rewrite(found.entry, found.parameters)


@pytest.mark.parametrize("name", MODULES)
def test_the_decomposed_form_becomes_the_op(name: str) -> None:
    _, rewritten = traced(name)
    counts = Counter(node.op for node in rewritten.nodes)
    wanted = MODULES[name][3]
    assert {op: counts[op] for op in wanted} == wanted


@pytest.mark.parametrize("dims", [{}, {"batch": 1, "tokens": 7}], ids=["traced", "other"])
@pytest.mark.parametrize("name", MODULES)
def test_fp32_results_are_the_same(name: str, dims: dict[str, int]) -> None:
    case, rewritten = traced(name)
    before, after = case.run(case.entry, dims=dims), case.run(rewritten, dims=dims)
    assert after.dtype == before.dtype
    assert error(after, before) < 1e-6


@pytest.mark.parametrize("dims", [{}, {"batch": 1, "tokens": 7}], ids=["traced", "other"])
@pytest.mark.parametrize("name", MODULES)
def test_bf16_is_no_farther_from_fp32_than_before(name: str, dims: dict[str, int]) -> None:
    case, rewritten = traced(name)
    exact = case.run(case.entry, dims=dims)
    before = case.run(case.entry, "bfloat16", dims)
    after = case.run(rewritten, "bfloat16", dims)
    assert after.dtype == before.dtype
    assert error(after, exact) <= max(1.1 * error(before, exact), 1e-6)
