"""Resampling, pooling, windows and creation against torch."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .lowering_cases import Row, check, f, f32, flags, free, i64, row

pytestmark = pytest.mark.xdist_group("lowering")  # tables are traced once


def _resize(**options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: F.interpolate(x, **options)


RESAMPLING = (
    row("nearest 2", _resize(scale_factor=2), f(1, 2, 3, 4)),
    row("nearest 1-D", _resize(scale_factor=2), f(1, 2, 5)),
    row("nearest 3-D", _resize(scale_factor=(1, 2, 2)), f(1, 2, 2, 3, 4)),
    row("nearest half", _resize(scale_factor=0.5), f(1, 2, 6, 5)),
    row("nearest 1.5", _resize(scale_factor=1.5), f(1, 2, 5, 7)),
    row("nearest 2.3", _resize(scale_factor=2.3), f(1, 2, 5, 7)),
    row("nearest recomputed", _resize(scale_factor=2.3, recompute_scale_factor=True),
        f(1, 2, 5, 7)),
    row("nearest sizes", _resize(size=(7, 3)), f(1, 2, 4, 5)),
    row("nearest same size", _resize(size=(4, 10)), f(1, 2, 4, 5)),
    row("nearest-exact", _resize(scale_factor=2, mode="nearest-exact"), f(1, 2, 3, 4)),
    row("nearest-exact 1.7", _resize(scale_factor=1.7, mode="nearest-exact"), f(1, 2, 5, 7)),
    row("nearest-exact sizes", _resize(size=(7, 3), mode="nearest-exact"), f(1, 2, 4, 5)),
    row("nearest-exact 1-D", _resize(size=3, mode="nearest-exact"), f(1, 2, 5)),
    row("nearest-exact 3-D", _resize(size=(2, 3, 5), mode="nearest-exact"), f(1, 2, 2, 2, 4)),
    row("linear", _resize(scale_factor=2, mode="linear"), f(1, 2, 5)),
    row("linear down", _resize(size=3, mode="linear"), f(1, 2, 7)),
    row("bilinear", _resize(scale_factor=2, mode="bilinear"), f(1, 2, 3, 4)),
    row("bilinear 1.7", _resize(scale_factor=1.7, mode="bilinear"), f(1, 2, 5, 7)),
    row("bilinear down", _resize(size=(2, 3), mode="bilinear"), f(1, 2, 5, 7)),
    row("bilinear corners", _resize(size=(7, 1), mode="bilinear", align_corners=True),
        f(1, 2, 5, 7)),
    row("bilinear antialias", _resize(size=(3, 9), mode="bilinear", antialias=True), f(1, 2, 8, 5),
        runs=("fp32",)),
    row("trilinear", _resize(size=(2, 5, 7), mode="trilinear"), f(1, 2, 3, 3, 4)),
    row("bicubic", _resize(size=(7, 3), mode="bicubic"), f(1, 2, 4, 5)),
    row("bicubic scale", _resize(scale_factor=1.5, mode="bicubic"), f(1, 2, 5, 4)),
    row("bicubic corners", _resize(size=(7, 9), mode="bicubic", align_corners=True), f(1, 2, 4, 5)),
    row("bicubic antialias", _resize(size=(3, 9), mode="bicubic", antialias=True), f(1, 2, 8, 5),
        runs=("fp32",)),
)  # fmt: skip

POOLING = (
    row("avg_pool1d", lambda x: F.avg_pool1d(x, 2), f(1, 2, 7)),
    row("avg_pool2d", lambda x: F.avg_pool2d(x, 2), f(1, 2, 6, 5)),
    row("avg_pool2d padding", lambda x: F.avg_pool2d(x, 3, 2, 1), f(1, 2, 6, 5)),
    row("avg_pool2d without padding", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
        f(1, 2, 6, 5)),
    row("avg_pool2d uneven", lambda x: F.avg_pool2d(x, (3, 2), (1, 2)), f(1, 2, 6, 5)),
    row("avg_pool2d ceil without effect", lambda x: F.avg_pool2d(x, 2, ceil_mode=True),
        f(1, 2, 6, 4)),
    row("avg_pool2d ceil", lambda x: F.avg_pool2d(x, 2, ceil_mode=True), f(1, 2, 7, 5)),
    row("avg_pool2d ceil overlapping", lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True),
        f(1, 2, 6, 7)),
    row("max_pool2d ceil", lambda x: F.max_pool2d(x, 2, ceil_mode=True), f(1, 2, 7, 5)),
    row("avg_pool2d unbatched", lambda x: F.avg_pool2d(x, 2), f(2, 6, 5)),
    row("avg_pool3d", lambda x: F.avg_pool3d(x, (1, 2, 2)), f(1, 2, 3, 6, 4), runs=("fp32",)),
    row("max_pool1d", lambda x: F.max_pool1d(x, 3, 1), f(1, 2, 7)),
    row("max_pool2d", lambda x: F.max_pool2d(x, 2), f(1, 2, 6, 5)),
    row("max_pool2d padding", lambda x: F.max_pool2d(x, 3, 2, 1), f(1, 2, 6, 5)),
    row("max_pool3d", lambda x: F.max_pool3d(x, 2), f(1, 2, 4, 6, 4)),
    row("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), f(1, 2, 7)),
    row("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, 3)), f(1, 2, 6, 5)),
    row("adaptive_avg_pool2d to one", lambda x: F.adaptive_avg_pool2d(x, 1), f(1, 2, 6, 5)),
    row("adaptive_avg_pool2d keeps", lambda x: F.adaptive_avg_pool2d(x, (None, 2)), f(1, 2, 6, 5)),
    row("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, (1, 2, 4)), f(1, 2, 3, 6, 3),
        runs=("fp32",)),
)  # fmt: skip

PIXELS = (
    row("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), f(2, 8, 3, 4)),
    row("pixel_shuffle unbatched", lambda x: F.pixel_shuffle(x, 2), f(8, 3, 4)),
    row("pixel_shuffle of rank 5", lambda x: F.pixel_shuffle(x, 2), f(2, 3, 8, 3, 4)),
    row("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), f(2, 3, 4, 6)),
    row("pixel_unshuffle unbatched", lambda x: F.pixel_unshuffle(x, 3), f(2, 6, 3)),
    row("channel_shuffle", lambda x: F.channel_shuffle(x, 2), f(2, 6, 2, 3)),
    row("unfold", lambda x: x.unfold(1, 3, 2), f(2, 8, 3)),
    row("unfold last", lambda x: x.unfold(-1, 2, 1), f(2, 5)),
    row("unfold whole", lambda x: x.unfold(0, 5, 1), f(5)),
    row("im2col", lambda x: F.unfold(x, 2), f(2, 3, 4, 5)),
    row("im2col settings", lambda x: F.unfold(x, (2, 3), 2, 1, (1, 2)), f(2, 3, 6, 7)),
)

CREATION = (
    row("arange", lambda x: torch.arange(5) + x, i64(1)),
    row("arange start", lambda x: torch.arange(2, 7) + x, i64(1)),
    row("arange step", lambda x: torch.arange(7, 0, -2) + x, i64(1)),
    row("arange floats", lambda x: torch.arange(0, 1, 0.1) + x, f32(1)),
    row("arange dtype", lambda x: torch.arange(0, 8, 2, dtype=torch.float32) / 8 + x, f32(1)),
    row("arange doubles", lambda x: (1.0 / 10000 ** (torch.arange(0, 8, 2, dtype=torch.float64) / 8)
        ).float() + x, f32(1)),
    row("arange of nothing", lambda x: torch.arange(0) + x, i64(1)),
    row("linspace", lambda x: torch.linspace(-1, 1, 7) + x, f32(1)),
    row("linspace of many", lambda x: 1e5 * torch.linspace(-0.7, 9.2, 128) + x, f32(1),
        tolerance=0.1),
    row("linspace one", lambda x: torch.linspace(2, 5, 1) + x, f32(1)),
    row("logspace", lambda x: torch.logspace(0, 2, 5, base=2.0) + x, f32(1)),
    row("full", lambda x: torch.full((2, 3), 1.5) + x, f32(1)),
    row("full infinity", lambda x: torch.full((2, 2), -math.inf) + x, f32(1)),
    row("full booleans", lambda x: torch.full((2,), True) & x, flags(2)),
    row("full integers", lambda x: torch.full((2,), 3) + x, i64(2)),
    row("zeros", lambda x: torch.zeros(2, 3, dtype=x.dtype) + x, f(3)),
    row("zeros integers", lambda x: torch.zeros(2, dtype=torch.int64) + x, i64(2)),
    row("ones", lambda x: torch.ones(2, dtype=torch.bool) & x, flags(2)),
    row("empty filled", lambda x: torch.empty(2, 3).fill_(0.5) + x, f32(3)),
    row("empty zeroed", lambda x: x.new_empty(2, 3).zero_() + x, f(3)),
    row("empty like", lambda x: torch.empty_like(x).copy_(x), f(3)),
    row("empty permuted", lambda x: torch.empty_permuted((2, 3), (1, 0)).fill_(1) + x, f32(3)),
    row("empty strided", lambda x: x.new_empty_strided((2, 3), (3, 1)).fill_(1) + x, f(3)),
    row("new_zeros", lambda x: x.new_zeros(2, 3), f(3)),
    row("new_ones", lambda x: x.new_ones((2, 3), dtype=torch.int64), f(3)),
    row("new_full", lambda x: x.new_full((2, 3), 0.1), f(3)),
    row("zeros_like", lambda x: torch.zeros_like(x, dtype=torch.bool), f(3)),
    row("ones_like", lambda x: torch.ones_like(x), i64(3)),
    row("full_like", lambda x: torch.full_like(x, 0.1), f(3)),
    row("fill scalar tensor", lambda x, y: x.clone().fill_(y), f(3), f32()),
    row("scalar_tensor", lambda x: torch.scalar_tensor(2.5) + x, f(3)),
    row("scalar tensor constant", lambda x: torch.tensor(2.5) * x, f(3)),
    row("tensor constant", lambda x: torch.tensor([1.0, 2.0, 3.0]) * x, f(3)),
    row("where scalar tensors", lambda c: torch.where(c, torch.tensor(1.0), torch.tensor(0.0)),
        flags(3)),
    row("eye", lambda x: torch.eye(3) + x, f32(3)),
    row("diag_embed", torch.diag_embed, f(2, 3)),
    row("diag_embed of booleans", torch.diag_embed, flags(3)),
    row("eye wide", lambda x: torch.eye(2, 3, dtype=torch.bool) & x, flags(3)),
)  # fmt: skip

FREE = (
    free("free nearest", _resize(scale_factor=2), (f(1, 2, 3, 4),), (f(2, 2, 5, 6),)),
    free("free nearest 1.5", _resize(scale_factor=1.5), (f(1, 2, 6, 4),), (f(1, 2, 5, 7),)),
    free("free nearest to another", lambda x, y: F.interpolate(x, size=y.shape[-2:]),
         (f(1, 2, 3, 4), f(6, 5)), (f(1, 2, 4, 2), f(3, 9))),
    free("free bilinear", _resize(scale_factor=2, mode="bilinear"), (f(1, 2, 3, 4),),
         (f(2, 2, 5, 6),)),
    free("free avg_pool2d", lambda x: F.avg_pool2d(x, 2), (f(1, 2, 6, 4),), (f(1, 2, 8, 10),)),
    free("free avg_pool2d ceil", lambda x: F.avg_pool2d(x, 2, ceil_mode=True), (f(1, 2, 6, 5),),
        (f(1, 2, 7, 10),)),
    free("free avg_pool2d without padding", lambda x: F.avg_pool2d(x, 3, 1, 1, False, False),
         (f(1, 2, 6, 4),), (f(1, 2, 8, 5),)),
    free("free adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, 1), (f(1, 2, 6, 4),),
         (f(1, 2, 3, 5),)),
    free("free pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), (f(2, 8, 3, 4),), (f(1, 8, 5, 2),)),
    free("free pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), (f(2, 3, 4, 6),),
         (f(1, 3, 2, 8),)),
    free("free channel_shuffle", lambda x: F.channel_shuffle(x, 2), (f(2, 6, 2, 3),),
         (f(1, 6, 3, 4),)),
    free("free unfold", lambda x: x.unfold(-1, 2, 1), (f(2, 5),), (f(1, 7),)),
    free("free im2col", lambda x: F.unfold(x, 2, stride=2), (f(2, 3, 4, 6),), (f(1, 3, 8, 4),)),
    free("free arange", lambda x: torch.arange(x.shape[0]) * 2 + torch.arange(0, x.shape[0] * 3, 3),
         (f(3),), (f(7),)),
    free("free zeros", lambda x: torch.zeros(x.shape[1], x.shape[0], dtype=x.dtype) + x.mT,
         (f(3, 2),), (f(1, 5),)),
    free("free full_like", lambda x: torch.full_like(x, 2.0), (f(3, 2),), (f(1, 5),)),
    free("free one_hot", lambda x: F.one_hot(x, 6), (i64(3, 2),), (i64(1, 5),)),
    free("free eye", lambda x: torch.eye(x.shape[0]) + x.float(), (f(3),), (f(5),)),
    free("free number of elements", lambda x: x.sum() / x.numel(), (f(3, 2),), (f(1, 5),)),
    free("free size roots", lambda x: x[: int(x.shape[0] ** 0.5)], (f(9),), (f(9),)),
)  # fmt: skip

ROWS = (*RESAMPLING, *POOLING, *PIXELS, *CREATION, *FREE)


@pytest.mark.parametrize(
    "one, precision", [pytest.param(r, p, id=f"{r.name}-{p}") for r in ROWS for p in r.runs]
)
def test_gives_what_torch_gives(one: Row, precision: str) -> None:
    check(ROWS, one, precision)
