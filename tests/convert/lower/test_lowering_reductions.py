"""Norms, reductions, running sums and sorting against torch."""

import math

import pytest
import torch
import torch.nn.functional as F

from .lowering_cases import Row, check, exact, f, f32, flags, free, i64, row, w

pytestmark = pytest.mark.xdist_group("lowering")  # tables are traced once

TIES = exact([[1.0, 3.0, 3.0, 0.0, 1.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
SMALL = exact([[1e-3, -2e-3, 3e-3, 1e-3], [2e-4, 1e-4, -1e-4, 3e-4]])

NORMS = (
    row("layer_norm", lambda x, g, b: F.layer_norm(x, (8,), g, b), f(2, 3, 8), w(8), w(8)),
    row("layer_norm plain", lambda x: F.layer_norm(x, (8,), eps=1e-6), f(2, 3, 8)),
    row("layer_norm no bias", lambda x, g: F.layer_norm(x, (8,), g), f(2, 3, 8), w(8)),
    row("layer_norm two axes", lambda x, g, b: F.layer_norm(x, (3, 8), g, b), f(2, 3, 8),
        w(3, 8), w(3, 8)),
    row("layer_norm two axes plain", lambda x: F.layer_norm(x, (3, 8)), f(2, 3, 8)),
    row("layer_norm of a vector", lambda x: F.layer_norm(x, (8,)), f(8)),
    row("layer_norm in fp32", lambda x: F.layer_norm(x.float(), (8,)).type_as(x), f(2, 8)),
    row("rms_norm", lambda x, g: F.rms_norm(x, (8,), g, 1e-6), f(2, 3, 8), w(8)),
    row("rms_norm plain", lambda x: F.rms_norm(x, (8,), eps=1e-5), f(2, 3, 8)),
    row("rms_norm own eps", lambda x: F.rms_norm(x, (4,)), SMALL),
    row("rms_norm two axes", lambda x, g: F.rms_norm(x, (3, 8), g, 1e-6), f(2, 3, 8), w(3, 8)),
    row("group_norm", lambda x, g, b: F.group_norm(x, 2, g, b), f(2, 6, 3, 4), w(6), w(6)),
    row("group_norm plain", lambda x: F.group_norm(x, 3, eps=1e-6), f(2, 6, 3, 4)),
    row("group_norm one axis", lambda x, g, b: F.group_norm(x, 2, g, b), f(2, 6, 5), w(6), w(6)),
    row("group_norm of rank 2", lambda x: F.group_norm(x, 2), f(2, 6)),
    row("group_norm of rank 5", lambda x, g, b: F.group_norm(x, 2, g, b), f(1, 6, 2, 3, 4),
        w(6), w(6)),
    row("instance_norm", F.instance_norm, f(2, 3, 4, 5)),
    row("instance_norm statistics", lambda x, m, v: F.instance_norm(x, m, v,
        use_input_stats=False), f(2, 3, 4), f(3), f(3, low=0.5, high=2)),
    row("batch_norm", lambda x, m, v, g, b: F.batch_norm(x, m, v, g, b), f(2, 3, 4, 5), f(3),
        f(3, low=0.5, high=2), w(3), w(3)),
    row("batch_norm plain", lambda x, m, v: F.batch_norm(x, m, v, eps=1e-3), f(2, 3), f(3),
        f(3, low=0.5, high=2)),
    row("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), w(4, 3, 2), w(4, 1, 1)),
    row("weight_norm last", lambda v, g: torch._weight_norm(v, g, 2), w(4, 3, 2), w(1, 1, 2)),
    row("normalize", lambda x: F.normalize(x, dim=-1), f(3, 5)),
    row("vector norm", lambda x: x.norm(dim=-1, keepdim=True), f(3, 5)),
    row("vector norm of all", lambda x: x.norm(), f(3, 5)),
    row("vector norm of 1", lambda x: x.norm(p=1, dim=(0, 1)), f(3, 5)),
    row("vector norm of 3", lambda x: torch.linalg.vector_norm(x, 3, dim=1), f(3, 5), tolerance=2),
    row("vector norm of infinity", lambda x: torch.linalg.vector_norm(x, math.inf), f(3, 5)),
    row("vector norm dtype", lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float32),
        f(3, 5)),
    row("softmax", lambda x: x.softmax(-1), f(3, 5)),
    row("softmax dim", lambda x: F.softmax(x, 0), f(3, 5)),
    row("softmax dtype", lambda x: F.softmax(x, -1, dtype=torch.float32), f(3, 5)),
    row("softmax many", lambda x: x.softmax(-1), f(2, 3000)),
    row("softmax masked", lambda x: x.softmax(-1), exact([[0.0, -math.inf, 1.0]])),
    row("softmax of integers", lambda x: x.softmax(-1, dtype=torch.float32), i64(3, 5)),
    row("log_softmax", lambda x: F.log_softmax(x, 1), f(3, 5)),
)  # fmt: skip

REDUCTIONS = (
    row("sum", torch.sum, f(3, 4)),
    row("sum dim", lambda x: x.sum(-1), f(3, 4)),
    row("sum dims keepdim", lambda x: x.sum((0, -1), keepdim=True), f(3, 4, 2)),
    row("sum no dims", lambda x: x.sum(()), f(3, 4)),
    row("sum of booleans", torch.sum, flags(9)),
    row("sum of booleans along", lambda x: x.sum(1), flags(3, 4)),
    row("sum dtype", lambda x: x.sum(1, dtype=torch.float32), f(3, 4)),
    row("sum many", lambda x: x.sum(1), f(2, 4096, low=0, high=1)),
    row("sum of nothing", lambda x: x.sum(1), f(3, 0)),
    row("sum of nothing kept", lambda x: x.sum(1, keepdim=True), f(3, 0)),
    row("sum of all nothing", lambda x: x.sum(), f(3, 0)),
    row("product of nothing", lambda x: x.prod(1), f(3, 0)),
    row("mean beside nothing", lambda x: x.mean(1), f(0, 3)),
    row("any and all of nothing", lambda x: ((x > 0).any(1), (x > 0).all(1)), f(3, 0)),
    row("sum of a scalar", torch.sum, f()),
    row("mean", torch.mean, f(3, 4)),
    row("mean dims", lambda x: x.mean((1, 2), keepdim=True), f(2, 3, 4)),
    row("mean many", lambda x: x.mean(1), f(2, 4096, low=0, high=1)),
    row("mean of integers", lambda x: x.mean(dtype=torch.float32), i64(5)),
    row("mean of flags", lambda x: x.float().mean(), flags(5)),
    row("prod", torch.prod, f(5)),
    row("prod dim", lambda x: x.prod(1), i64(3, 4)),
    row("any", torch.any, flags(4)),
    row("any dim", lambda x: x.any(1), flags(3, 4)),
    row("any dims of numbers", lambda x: x.any(dim=(0, 1)), i64(3, 4, high=2)),
    row("all", lambda x: x.all(-1, keepdim=True), flags(3, 4)),
    row("all of numbers", torch.all, i64(3, 4, high=2)),
    row("amax", lambda x: x.amax(-1), f(3, 4)),
    row("amax of all", torch.amax, f(3, 4)),
    row("amin dims", lambda x: x.amin((0, 2), keepdim=True), f(3, 4, 2)),
    row("max", torch.max, f(3, 4)),
    row("max of integers", torch.max, i64(3, 4)),
    row("max NaN", torch.max, exact([1.0, math.nan, 2.0])),
    row("max dim ties", lambda x: x.max(-1), TIES),
    row("max dim keepdim", lambda x: x.max(0, keepdim=True), f(3, 4)),
    row("max dim of booleans", lambda x: x.max(1), flags(3, 4)),
    row("min", torch.min, f(3, 4)),
    row("min dim", lambda x: x.min(1), TIES),
    row("aminmax", lambda x: tuple(torch.aminmax(x)), f(3, 4)),
    row("aminmax dim", lambda x: tuple(torch.aminmax(x, dim=1, keepdim=True)), f(3, 4)),
    row("argmax", torch.argmax, f(3, 4)),
    row("argmax ties", lambda x: x.argmax(-1), TIES),
    row("argmax keepdim", lambda x: x.argmax(0, keepdim=True), f(3, 4)),
    row("argmax of flags", lambda x: x.int().argmax(-1), flags(3, 4)),
    row("argmin", lambda x: x.argmin(1), TIES),
    row("logsumexp", lambda x: x.logsumexp(-1), f(3, 4)),
    row("logsumexp dims", lambda x: x.logsumexp((0, 1), keepdim=True), f(3, 4)),
    row("var", torch.var, f(3, 4)),
    row("var unbiased", lambda x: torch.var(x, unbiased=False), f(3, 4)),
    row("var dim", lambda x: x.var(-1, keepdim=True), f(3, 8)),
    row("var dim biased", lambda x: x.var(-1, unbiased=False), f(3, 8)),
    row("var correction", lambda x: torch.var(x, (0, 1), correction=0), f(3, 8)),
    row("var far from zero", lambda x: x.var(-1), f(3, 256, low=99, high=100)),
    row("std", lambda x: x.std(-1), f(3, 8)),
    row("std of all", lambda x: torch.std(x, unbiased=False), f(3, 8)),
    row("std correction", lambda x: torch.std(x, 1, correction=2, keepdim=True), f(3, 8)),
    row("var_mean", lambda x: torch.var_mean(x, 1, correction=0), f(3, 8)),
    row("std_mean", lambda x: torch.std_mean(x, -1), f(3, 8)),
    row("count_nonzero", torch.count_nonzero, i64(3, 4, high=2)),
    row("count_nonzero dim", lambda x: torch.count_nonzero(x, dim=1), i64(3, 4, high=2)),
    row("cumsum", lambda x: x.cumsum(-1), f(3, 4)),
    row("cumsum of booleans", lambda x: x.cumsum(1), flags(3, 4)),
    row("cumsum dtype", lambda x: x.cumsum(0, dtype=torch.float32), i64(5)),
    row("cumsum many", lambda x: x.cumsum(1), f(2, 1024, low=0, high=1)),
    row("cumprod", lambda x: x.cumprod(0), f(5, 2)),
)  # fmt: skip

SORTING = (
    row("argsort", lambda x: x.argsort(stable=True), TIES),
    row("argsort distinct", lambda x: x.argsort(0), f(8)),
    row("argsort descending", lambda x: torch.argsort(x, descending=True, stable=True), TIES),
    row("argsort of booleans", lambda x: torch.argsort(x, dim=0, descending=True, stable=True),
        flags(9)),
    row("argsort of integers", lambda x: torch.argsort(x, stable=True), i64(3, 9)),
    row("argsort of many", lambda x: torch.argsort(x, stable=True), i64(300)),
    row("sort", lambda x: torch.sort(x), f(3, 9)),
    row("sort stable", lambda x: torch.sort(x, stable=True, dim=0, descending=True), i64(9, 2)),
    row("topk", lambda x: x.topk(3), f(2, 9)),
    row("topk smallest", lambda x: x.topk(2, dim=0, largest=False), f(9, 2)),
    row("topk of all", lambda x: x.topk(4)[0], f(2, 4)),
    row("bucketize", lambda x: torch.bucketize(x, torch.tensor([0.0, 0.5, 1.0])), f32(2, 9)),
    row("bucketize on borders", lambda x, y: torch.bucketize(x, y), exact([0.0, 0.5, 1.0, 2.0]),
        exact([0.0, 0.5, 1.0])),
    row("bucketize right", lambda x, y: torch.bucketize(x, y, right=True),
        exact([0.0, 0.5, 1.0, 2.0]), exact([0.0, 0.5, 1.0])),
    row("searchsorted", torch.searchsorted, exact([[0.0, 1.0, 2.0], [1.0, 2.0, 3.0]]), f(2, 4)),
    row("searchsorted side", lambda x, y: torch.searchsorted(x, y, side="right"),
        exact([0.0, 1.0, 2.0]), exact([1.0, 3.0, -1.0])),
)  # fmt: skip

FREE = (
    free("free layer_norm two axes", lambda x: F.layer_norm(x, (3, 8)), (f(2, 3, 8),),
         (f(1, 3, 8),)),
    free("free group_norm", lambda x: F.group_norm(x, 2), (f(2, 6, 3, 4),), (f(1, 6, 5, 2),)),
    free("free instance_norm", F.instance_norm, (f(2, 3, 4, 5),), (f(1, 3, 6, 2),)),
    free("free mean", lambda x: x.mean((1, 2), keepdim=True) + x.sum(), (f(2, 3, 4),),
         (f(1, 7, 2),)),
    free("free var", lambda x: x.var(-1), (f(2, 3),), (f(1, 5),)),
    free("free argmax", lambda x: x.argmax(-1), (f(2, 3),), (f(1, 5),)),
    free("free softmax", lambda x: x.softmax(-1), (f(2, 3),), (f(1, 1),)),
    free("free cumsum", lambda x: x.cumsum(1), (f(2, 3),), (f(1, 6),)),
    free("free topk", lambda x: x.topk(2)[0], (f(3, 4),), (f(1, 9),)),
)  # fmt: skip

ROWS = (*NORMS, *REDUCTIONS, *SORTING, *FREE)


@pytest.mark.parametrize(
    "one, precision", [pytest.param(r, p, id=f"{r.name}-{p}") for r in ROWS for p in r.runs]
)
def test_gives_what_torch_gives(one: Row, precision: str) -> None:
    check(ROWS, one, precision)
