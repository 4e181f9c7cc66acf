"""Products, attention and convolutions against torch."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from .lowering_cases import In, Row, check, exact, f, f32, flags, free, i64, row, w

pytestmark = pytest.mark.xdist_group("lowering")  # tables are traced once

MATRICES = (
    row("linear", F.linear, f(2, 3, 8), w(5, 8), w(5)),
    row("linear no bias", F.linear, f(3, 8), w(5, 8)),
    row("linear of a vector", F.linear, f(8), w(5, 8), w(5)),
    row("linear of no rows", F.linear, f(0, 8), w(5, 8), w(5)),
    row("linear tied weight", lambda x, i, e: F.linear(x + F.embedding(i, e), e), f(2, 8),
        i64(2), w(6, 8)),
    row("linear computed weight", lambda x, e: F.linear(x, e * 2), f(2, 8), w(6, 8)),
    row("matmul", torch.matmul, f(2, 3, 4), f(2, 4, 5)),
    row("matmul broadcasts", torch.matmul, f(2, 1, 3, 4), f(6, 4, 5)),
    row("matmul vector first", torch.matmul, f(4), f(2, 4, 5)),
    row("matmul vector last", torch.matmul, f(2, 3, 4), f(4)),
    row("qr", torch.linalg.qr, f32(6, 3)),
    row("qr of many", lambda x: torch.linalg.qr(x)[0], f32(2, 4, 4)),
    row("matmul transposed", lambda x: x @ x.transpose(-1, -2), f(2, 3, 4)),
    row("mm", torch.mm, f(3, 4), f(4, 5)),
    row("bmm", torch.bmm, f(2, 3, 4), f(2, 4, 5)),
    row("mv", torch.mv, f(3, 4), f(4)),
    row("dot", torch.dot, f(4), f(4)),
    row("addmm", torch.addmm, f(5), f(3, 4), f(4, 5)),
    row("addmm scaled", lambda c, x, y: torch.addmm(c, x, y, beta=0.5, alpha=2), f(3, 5),
        f(3, 4), f(4, 5)),
    row("baddbmm", lambda c, x, y: torch.baddbmm(c, x, y, alpha=0.3), f(2, 3, 5), f(2, 3, 4),
        f(2, 4, 5)),
    row("baddbmm beta 0", lambda c, x, y: torch.baddbmm(c, x, y, beta=0, alpha=0.3), f(2, 3, 5),
        f(2, 3, 4), f(2, 4, 5)),
    row("outer", torch.outer, f(3), f(4)),
    row("outer positions", torch.outer, i64(3), f32(4)),
    row("outer doubles", lambda x, y: torch.outer(x, y).sin().float(),
        exact([1.0, 700.0], "float64"), exact([0.1, 0.7], "float64")),
    row("einsum", lambda x, y: torch.einsum("bhid, bhjd -> bhij", x, y), f(2, 2, 3, 4),
        f(2, 2, 5, 4)),
    row("einsum ellipsis", lambda x, y: torch.einsum("...n,d->...nd", x, y), f(2, 3), f(4)),
    row("einsum implicit", lambda x, y: torch.einsum("ij,jk", x, y), f(2, 3), f(3, 4)),
    row("einsum permutes", lambda x: torch.einsum("nhwpqc->nchpwq", x), f(1, 2, 3, 2, 2, 2)),
    row("einsum of positions", lambda x, y: torch.einsum("n,d->nd", x.double(), y).float(),
        i64(3), exact([0.1, 0.7], "float64")),
    row("embedding", F.embedding, i64(2, 3), w(6, 4)),
    row("embedding padding", lambda i, e: F.embedding(i, e, padding_idx=0), i64(4), w(6, 4)),
    row("embedding computed", lambda i, e: F.embedding(i, e), i64(4), f(6, 4)),
)  # fmt: skip


def _sdpa(**options: Any) -> Callable[..., torch.Tensor]:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    return attend


def _qkv(*lead: int) -> tuple[In, In, In]:
    return f(*lead, 3, 8), f(*lead, 5, 8), f(*lead, 5, 8)


ATTENTION = (
    row("sdpa", _sdpa(), *_qkv(2, 4)),
    row("sdpa rank 2", _sdpa(), *_qkv()),
    row("sdpa rank 3", _sdpa(), *_qkv(4)),
    row("sdpa rank 5", _sdpa(), *_qkv(2, 3, 2)),
    row("sdpa strided", lambda x: F.scaled_dot_product_attention(
        *(y.unflatten(-1, (2, 4)).transpose(1, 2) for y in x.chunk(3, -1))), f(2, 5, 24)),
    row("sdpa scale", _sdpa(scale=0.3), *_qkv(2, 4)),
    row("sdpa scale 1", _sdpa(scale=1.0), *_qkv(2, 4)),
    row("sdpa causal", _sdpa(is_causal=True), f(2, 4, 5, 8), f(2, 4, 5, 8), f(2, 4, 5, 8)),
    row("sdpa causal fewer queries", _sdpa(is_causal=True), *_qkv(2, 4)),
    row("sdpa value width", _sdpa(), f(2, 4, 3, 8), f(2, 4, 5, 8), f(2, 4, 5, 6)),
    row("sdpa grouped", _sdpa(enable_gqa=True), f(2, 4, 3, 8), f(2, 2, 5, 8), f(2, 2, 5, 8)),
    row("sdpa bool mask", _sdpa(), *_qkv(2, 4), flags(3, 5)),
    row("sdpa bool mask of keys", _sdpa(), *_qkv(2, 4),
        exact([[[[True] * 3 + [False] * 2]], [[[True] * 5]]], "bool")),
    row("sdpa bool mask per head", _sdpa(), *_qkv(2, 4), flags(2, 4, 3, 5)),
    row("sdpa rank 3 mask", _sdpa(), *_qkv(4), flags(4, 3, 5)),
    row("sdpa rank 5 mask", _sdpa(), *_qkv(2, 3, 2), flags(2, 3, 1, 3, 5)),
    row("sdpa rank 5 smaller mask", _sdpa(), *_qkv(2, 3, 2), f(3, 1, 3, 5)),
    row("sdpa rank 5 plain mask", _sdpa(), *_qkv(2, 3, 2), f(3, 5)),
    row("sdpa float mask", _sdpa(), *_qkv(2, 4), f(2, 1, 3, 5)),
    row("sdpa fp32 mask", _sdpa(), *_qkv(2, 4), f32(2, 1, 3, 5)),
    row("sdpa infinite mask", _sdpa(), *_qkv(2, 4), exact([[0.0, -float("inf"), 0.0, 0.0, 0.0]])),
    row("sdpa masks all of a query", _sdpa(), *_qkv(2, 4),
        exact([[True] * 5, [False] * 5, [True] * 5], "bool")),
)  # fmt: skip

CONVOLUTIONS = (
    row("conv1d", F.conv1d, f(2, 3, 9), w(4, 3, 3), w(4)),
    row("conv1d settings", lambda x, k: F.conv1d(x, k, None, 2, 2, 2), f(2, 3, 9), w(4, 3, 3)),
    row("conv1d depthwise", lambda x, k: F.conv1d(x, k, None, 1, 1, 1, 4), f(2, 4, 9), w(4, 1, 3)),
    row("conv1d unbatched", F.conv1d, f(3, 9), w(4, 3, 3), w(4)),
    row("conv1d same", lambda x, k: F.conv1d(x, k, padding="same"), f(2, 3, 9), w(4, 3, 3)),
    row("conv1d same even", lambda x, k: F.conv1d(x, k, padding="same"), f(2, 3, 9), w(4, 3, 4)),
    row("conv1d valid", lambda x, k: F.conv1d(x, k, padding="valid"), f(2, 3, 9), w(4, 3, 3)),
    row("conv2d", lambda x, k, b: F.conv2d(x, k, b, padding=1), f(2, 3, 6, 5), w(4, 3, 3, 3), w(4)),
    row("conv2d patches", lambda x, k: F.conv2d(x, k, stride=2), f(2, 3, 6, 4), w(4, 3, 2, 2)),
    row("conv2d uneven", lambda x, k: F.conv2d(x, k, None, (2, 1), (1, 0), (1, 2)),
        f(2, 3, 6, 7), w(4, 3, 3, 2)),
    row("conv2d groups", lambda x, k: F.conv2d(x, k, groups=2), f(2, 4, 6, 5), w(6, 2, 3, 3)),
    row("conv2d depthwise", lambda x, k, b: F.conv2d(x, k, b, padding=1, groups=4), f(2, 4, 6, 5),
        w(8, 1, 3, 3), w(8)),
    row("conv2d same dilated", lambda x, k: F.conv2d(x, k, padding="same", dilation=2),
        f(2, 3, 6, 7), w(4, 3, 3, 2)),
    row("conv2d unbatched", F.conv2d, f(3, 6, 5), w(4, 3, 3, 3)),
    row("conv2d computed weight", lambda x, k: F.conv2d(x, k / 2), f(1, 3, 6, 5), w(4, 3, 3, 3)),
    row("conv2d of a channels-last input", lambda x, k: F.conv2d(x.permute(0, 3, 1, 2), k),
        f(1, 6, 5, 3), w(4, 3, 3, 3)),
    row("conv3d", lambda x, k, b: F.conv3d(x, k, b, (1, 2, 2), (0, 1, 1)), f(1, 3, 4, 6, 5),
        w(4, 3, 3, 3, 3), w(4)),
    row("conv3d patches", lambda x, k: F.conv3d(x, k, stride=(1, 2, 2)), f(1, 3, 4, 6, 4),
        w(4, 3, 1, 2, 2)),
    row("conv3d groups", lambda x, k: F.conv3d(x, k, groups=2), f(1, 4, 3, 4, 4), w(6, 2, 2, 2, 2)),
    row("conv_transpose1d", lambda x, k, b: F.conv_transpose1d(x, k, b, 2, 1), f(2, 3, 5),
        w(3, 4, 4), w(4)),
    row("conv_transpose1d output padding", lambda x, k: F.conv_transpose1d(x, k, None, 2, 1, 1),
        f(2, 3, 5), w(3, 4, 3)),
    row("conv_transpose1d unbatched", F.conv_transpose1d, f(3, 5), w(3, 4, 3)),
    row("conv_transpose2d", lambda x, k, b: F.conv_transpose2d(x, k, b, 2), f(2, 3, 5, 4),
        w(3, 4, 2, 2), w(4)),
    row("conv_transpose2d settings", lambda x, k: F.conv_transpose2d(x, k, None, (2, 3), (1, 0),
        (1, 2), 1, (1, 2)), f(2, 3, 5, 4), w(3, 4, 3, 2)),
    row("conv_transpose2d groups", lambda x, k, b: F.conv_transpose2d(x, k, b, 2, groups=2),
        f(2, 4, 3, 4), w(4, 3, 2, 2), w(6)),
    row("conv_transpose2d computed weight", lambda x, k: F.conv_transpose2d(x, k * 2),
        f(2, 3, 5, 4), w(3, 4, 2, 2)),
    row("conv_transpose3d", lambda x, k: F.conv_transpose3d(x, k, stride=(1, 2, 2)),
        f(1, 3, 2, 3, 3), w(3, 2, 1, 2, 2)),
)  # fmt: skip

FREE = (
    free("free linear", F.linear, (f(2, 3, 8), w(5, 8), w(5)), (f(1, 7, 8), w(5, 8), w(5))),
    free("free sdpa", _sdpa(), (f(2, 4, 6, 8), f(2, 4, 5, 8), f(2, 4, 5, 8)),
         (f(1, 3, 2, 8), f(1, 3, 7, 8), f(1, 3, 7, 8))),
    free("free sdpa rank 3", _sdpa(), (f(4, 6, 8), f(4, 5, 8), f(4, 5, 8)),
         (f(1, 2, 8), f(1, 7, 8), f(1, 7, 8))),
    free("free sdpa split heads", lambda x: F.scaled_dot_product_attention(
        *(y.view(y.shape[0], -1, 2, 4).transpose(1, 2) for y in x.chunk(3, -1))
        ).transpose(1, 2).flatten(2), (f(2, 5, 24),), (f(1, 9, 24),)),
    free("free conv2d", lambda x, k: F.conv2d(x, k, padding=1), (f(2, 3, 6, 5), w(4, 3, 3, 3)),
         (f(1, 3, 3, 8), w(4, 3, 3, 3))),
    free("free conv_transpose2d", lambda x, k: F.conv_transpose2d(x, k, stride=2),
         (f(2, 3, 6, 5), w(3, 4, 2, 2)), (f(1, 3, 2, 3), w(3, 4, 2, 2))),
    free("free einsum", lambda x, y: torch.einsum("bnd,bmd->bnm", x, y), (f(2, 3, 4), f(2, 5, 4)),
         (f(1, 6, 4), f(1, 2, 4))),
)  # fmt: skip

ROWS = (*MATRICES, *ATTENTION, *CONVOLUTIONS, *FREE)


@pytest.mark.parametrize(
    "one, precision", [pytest.param(r, p, id=f"{r.name}-{p}") for r in ROWS for p in r.runs]
)
def test_gives_what_torch_gives(one: Row, precision: str) -> None:
    check(ROWS, one, precision)
