"""Views, joining, slicing, gathering, padding and replacing against torch."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from .lowering_cases import Row, check, exact, f, f32, flags, free, i64, row, whole

pytestmark = pytest.mark.xdist_group("lowering")  # tables are traced once

VIEWS = (
    row("reshape", lambda x: x.reshape(2, -1), f(2, 3, 4)),
    row("reshape strided", lambda x: x.transpose(0, 1).reshape(-1), f(2, 3)),
    row("reshape of nothing", lambda x: x.reshape(-1, 4), f(0, 3, 4)),
    row("reshape to a scalar", lambda x: x.reshape(()), f(1, 1)),
    row("view", lambda x: x.view(3, 1, -1), f(3, 4)),
    row("flatten", lambda x: x.transpose(1, 2).flatten(1, 2), f(2, 3, 4)),
    row("flatten negative", lambda x: x.flatten(-3, -2), f(2, 3, 4)),
    row("flatten a scalar", lambda x: x.flatten(), f()),
    row("unflatten", lambda x: x.unflatten(-1, (2, -1)), f(3, 8)),
    row("unflatten first", lambda x: x.unflatten(0, (2, 2)), f(4, 3)),
    row("expand", lambda x: x.expand(3, -1, 4), f(2, 1)),
    row("expand of nothing", lambda x: x.expand(-1, 4), f(0, 1)),
    row("broadcast_to", lambda x: x.broadcast_to(3, 2), f(2)),
    row("broadcast_tensors", torch.broadcast_tensors, f(3, 1), f(4)),
    row("expand_as", lambda x, y: x.expand_as(y), f(1, 4), f(3, 4)),
    row("permute", lambda x: x.permute(-1, 0, 1), f(2, 3, 4)),
    row("transpose", lambda x: x.transpose(-1, 0), f(2, 3, 4)),
    row("transpose a vector", lambda x: x.transpose(0, -1), f(4)),
    row("t", lambda x: (x.t(), x.T, x.mT), f(3, 4)),
    row("t of a vector", lambda x: x.t(), f(3)),
    row("movedim", lambda x: x.movedim(-1, 1), f(2, 3, 4)),
    row("movedim several", lambda x: torch.movedim(x, (0, 1), (-1, 0)), f(2, 3, 4)),
    row("swapaxes", lambda x: x.swapaxes(0, 2), f(2, 3, 4)),
    row("unsqueeze", lambda x: (x.unsqueeze(-1), x[:, None]), f(2, 3)),
    row("squeeze", lambda x: x.squeeze(), f(1, 3, 1)),
    row("squeeze dim", lambda x: (x.squeeze(0), x.squeeze(-2), x.squeeze(-1)), f(1, 3, 1)),
    row("squeeze dims", lambda x: x.squeeze((0, -1)), f(1, 3, 1)),
    row("squeeze a scalar", lambda x: x.squeeze(0), f()),
    row("diagonal", lambda x: torch.diagonal(x, 1), f(3, 4)),
    row("diagonal dims", lambda x: x.diagonal(0, -2, -1), f(2, 3, 4)),
)

# What torch decomposes into other rows, unless a graph is taken as it was exported.
WHOLE = (
    whole("whole reshape", lambda x: x.reshape(x.shape[0], -1, 2), (f(2, 3, 4),), f(3, 5, 4)),
    whole(
        "whole reshape_as",
        lambda x, y: (x.reshape_as(y), x.view_as(y)),
        (f(2, 6), f(3, 4)),
        f(4, 6),
        f(3, 8),
    ),
    whole(
        "whole flatten",
        lambda x: (x.flatten(1, 2), x.flatten(-2), x.flatten()),
        (f(2, 3, 4),),
        f(3, 5, 4),
    ),
    whole(
        "whole unflatten",
        lambda x: (x.unflatten(-1, (2, -1)), x.unflatten(1, (-1, 4))),
        (f(3, 8),),
        f(5, 12),
    ),
    whole(
        "whole expand_as",
        lambda x, y: (x[:, None].expand_as(y), x[:, None].broadcast_to(y.shape)),
        (f(3), f(3, 4)),
        f(5),
        f(5, 2),
    ),
    whole(
        "whole movedim",
        lambda x: (x.movedim(-1, 1), x.movedim(0, -1), x.mT, x[0].T, x.swapaxes(0, 2)),
        (f(2, 3, 4),),
        f(5, 2, 3),
    ),
    whole("whole literal", lambda x: x * torch.tensor([2.0, 3.0]), (f(3, 2),), f(5, 2)),
    whole("whole chunk", lambda x: (*x.chunk(2, -1), *x.unsafe_chunk(3, 0)), (f(6, 8),), f(9, 6)),
    whole("whole chunk uneven", lambda x: x.chunk(2, -1), (f(2, 7),), f(3, 9)),
    whole(
        "whole to",
        lambda x, y: (x.to(torch.float32), x.to(y.dtype), x.to("cpu"), x.to(y)),
        (f(5), f32(2)),
        f(7),
        f32(3),
    ),
    whole(
        "whole same", lambda x: (F.dropout(x, 0.5, False), x.mT.contiguous()), (f(2, 3),), f(4, 2)
    ),
)

JOINING = (
    row("cat", lambda x, y: torch.cat([x, y], -1), f(2, 3), f(2, 4)),
    row("cat with nothing", lambda x, y: torch.cat([x, y], 1), f(2, 3), f(2, 0)),
    row("cat with an old empty", lambda x, y: torch.cat([x, y], 0), f(0), f(2, 3)),
    row("cat of empties", lambda x, y: torch.cat([x, y]), f(0), f(0)),
    row("cat promotes", lambda x, y: torch.cat([x, y]), i64(3), f(3)),
    row("cat fp32", lambda x, y: torch.cat([x, y]), f32(3), f(3)),
    row("concat", lambda x: torch.concat([x, x]), f(2)),
    row("concatenate", lambda x: torch.concatenate([x, x], 1), f(2, 2)),
    row("stack", lambda x, y: torch.stack([x, y], -1), f(2, 3), f(2, 3)),
    row("stack scalars", lambda x, y: torch.stack([x, y]), f(), f()),
    row("hstack", lambda x, y: torch.hstack([x, y]), f(2, 3), f(2, 1)),
    row("hstack vectors", lambda x, y: torch.hstack([x, y]), f(2), f(3)),
    row("vstack", lambda x, y: torch.vstack([x, y]), f(3), f(2, 3)),
    row("dstack", lambda x, y: torch.dstack([x, y]), f(2, 3), f(2, 3)),
    row("dstack vectors", lambda x, y: torch.dstack([x, y]), f(3), f(3)),
    row("pad_sequence", lambda x, y: pad_sequence([x, y], True), f(3, 2), f(1, 2)),
    row("pad_sequence left", lambda x, y: pad_sequence(
        [x, y], padding_value=2.0, padding_side="left"), f(3), f(1)),
    row("meshgrid ij", lambda x, y: torch.meshgrid(x, y, indexing="ij"), f(2), f(3)),
    row("meshgrid xy", lambda x, y: torch.meshgrid(x, y, indexing="xy"), f(2), f(3)),
    row("meshgrid of three", lambda x, y, z: torch.meshgrid(x, y, z, indexing="xy"), f(2), f(3),
        f(4)),
    row("meshgrid default", lambda x, y: torch.meshgrid(x, y), f(2), f(3)),
    row("meshgrid scalar", lambda x, y: torch.meshgrid(x, y, indexing="ij"), f(2), f()),
    row("cartesian_prod", torch.cartesian_prod, f(2), f(3)),
)  # fmt: skip

SLICES = (
    row("slice", lambda x: x[1:3], f(5)),
    row("slice negative", lambda x: x[:, -3:-1], f(2, 5)),
    row("slice too long", lambda x: x[-9:99], f(5)),
    row("slice steps", lambda x: (x[::2], x[1::2], x[1:4:3]), f(5)),
    row("slice to nothing", lambda x: x[3:1], f(5)),
    row("slice empty", lambda x: x[5:], f(5, 2)),
    row("slice of nothing", lambda x: x[:, 1:], f(0, 3)),
    row("slice halves", lambda x: (x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]),
        f(2, 5)),
    row("narrow", lambda x: torch.narrow(x, 1, 1, 2), f(2, 5)),
    row("select", lambda x: (x[0], x[-1], x[..., 1], x.select(1, -2)), f(3, 4)),
    row("split", lambda x: x.split(2), f(5)),
    row("split dim", lambda x: x.split(2, -1), f(3, 4)),
    row("split larger", lambda x: x.split(9), f(5)),
    row("split sizes", lambda x: x.split([1, 0, 3], 1), f(2, 4)),
    row("split one size", lambda x: x.split([4], 1), f(2, 4)),
    row("split_with_sizes", lambda x: torch.split_with_sizes(x, [3, 2]), f(5)),
    row("chunk", lambda x: x.chunk(3, -1), f(2, 6)),
    row("chunk uneven", lambda x: x.chunk(3), f(7)),
    row("chunk fewer pieces", lambda x: x.chunk(4), f(5)),
    row("unsafe_chunk", lambda x: x.unsafe_chunk(2, 1), f(2, 4)),
    row("tensor_split", lambda x: torch.tensor_split(x, 3), f(7)),
    row("tensor_split at", lambda x: torch.tensor_split(x, (1, 4), -1), f(2, 7)),
    row("unbind", lambda x: x.unbind(-1), f(2, 3)),
    row("unbind one", lambda x: x.unbind(0), f(1, 3)),
    row("unbind a vector", lambda x: x.unbind(), f(3)),
    row("diff", lambda x: (x.diff(), torch.diff(x, 2, 0)), f(3, 4)),
    row("diff prepend", lambda x, y: torch.diff(x, prepend=y), f(3, 4), f(3, 1)),
    row("triu", lambda x: (x.triu(), x.triu(1), x.triu(-1)), f(3, 4)),
    row("tril", lambda x: (x.tril(), x.tril(-1)), f(2, 3, 4)),
    row("tril of booleans", lambda x: x.tril(), flags(3, 3)),
    row("triu of infinities", lambda x: torch.full((3, 3), -math.inf).triu(1) + x, f32(3, 3)),
)  # fmt: skip

ORDER = (
    row("repeat", lambda x: x.repeat(2, 1, 3), f(2, 3)),
    row("repeat zero", lambda x: x.repeat(0, 2), f(2, 3)),
    row("tile", lambda x: x.tile(2), f(2, 3)),
    row("tile more", lambda x: torch.tile(x, (2, 1, 2)), f(2, 3)),
    row("repeat_interleave", lambda x: x.repeat_interleave(2, -1), f(2, 3)),
    row("repeat_interleave flat", lambda x: x.repeat_interleave(2), f(2, 3)),
    row("repeat_interleave counts", lambda x: x.repeat_interleave(torch.tensor([1, 0, 2]), 1,
        output_size=3), f(2, 3)),
    row("flip", lambda x: x.flip((0, -1)), f(2, 3)),
    row("fliplr", lambda x: (torch.fliplr(x), torch.flipud(x)), f(2, 3)),
    row("rot90", lambda x: [torch.rot90(x, k) for k in (1, 2, 3, 4)], f(2, 3)),
    row("rot90 dims", lambda x: torch.rot90(x, 1, (-2, -1)), f(2, 3, 4)),
    row("roll", lambda x: x.roll((1, -2), (0, 1)), f(3, 5)),
    row("roll one", lambda x: x.roll(-1, -1), f(3, 5)),
    row("roll flat", lambda x: x.roll(2), f(3, 5)),
)  # fmt: skip

PADDING = (
    row("pad", lambda x: F.pad(x, (1, 2)), f(2, 3)),
    row("pad value", lambda x: F.pad(x, (0, 1, 2, 0), value=-1.5), f(2, 3)),
    row("pad crops", lambda x: F.pad(x, (-1, 1, 0, -1)), f(2, 3)),
    row("pad integers", lambda x: F.pad(x, (1, 0), value=7), i64(4)),
    row("pad booleans", lambda x: F.pad(x, (0, 2), value=False), flags(4)),
    row("pad infinity", lambda x: F.pad(x, (0, 2), value=-math.inf), f(4)),
    *(
        row(f"pad {mode} {rank}", lambda x, m=mode, n=rank: F.pad(x, (2, 1) * n, mode=m),
            f(2, 2, *(4,) * rank))
        for mode in ("reflect", "replicate", "circular") for rank in (1, 2, 3)
    ),
    row("pad reflect all", lambda x: F.pad(x, (3, 3), mode="reflect"), f(1, 4)),
    row("pad circular all", lambda x: F.pad(x, (4, 3), mode="circular"), f(1, 4)),
    row("pad replicate crops", lambda x: F.pad(x, (-1, 2), mode="replicate"), f(1, 4)),
    row("constant_pad_nd", lambda x: torch.constant_pad_nd(x, (1, 1), 2.0), f(3)),
)  # fmt: skip

INDEXING = (
    row("index_select", lambda x, i: x.index_select(1, i), f(2, 6), i64(3)),
    row("index_select negative dim", lambda x, i: x.index_select(-2, i), f(6, 2), i64(3)),
    row("gather", lambda x, i: x.gather(1, i), f(3, 6), i64(3, 2)),
    row("gather smaller", lambda x, i: x.gather(0, i), f(6, 5), i64(2, 3)),
    row("gather last", lambda x, i: torch.gather(x, -1, i), f(2, 3, 6), i64(2, 3, 1)),
    row("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 1), f(3, 6), i64(3, 2)),
    row("take_along_dim flat", lambda x, i: torch.take_along_dim(x, i), f(2, 3), i64(4)),
    row("take_along_dim broadcasts", lambda x, i: torch.take_along_dim(x, i, 1), f(3, 6),
        i64(1, 2)),
    row("index", lambda x, i: x[i], f(6, 2), i64(3)),
    row("index list", lambda x: x[[0, 2, -1]], f(3, 2)),
    row("index second", lambda x, i: x[:, i], f(2, 6), i64(2, 2)),
    row("index two", lambda x, i, j: x[i, j], f(6, 6), i64(3), i64(3)),
    row("index two broadcast", lambda x, i, j: x[i[:, None], j], f(6, 6, 2), i64(3), i64(2)),
    row("index two inner", lambda x, i, j: x[:, i, j], f(2, 6, 6), i64(3), i64(3)),
    row("index two apart", lambda x, i, j: x[i, :, j], f(6, 2, 6), i64(3), i64(3)),
    row("index two later apart", lambda x, i, j: x[:, i, :, j], f(2, 6, 3, 6), i64(3), i64(3)),
    row("index scalar tensor", lambda x, i: x[i], f(6, 2), i64()),
    row("index negative", lambda x, i: x[i - 3], f(3, 2), i64(4, high=3)),
    row("index_put", lambda x, i, v: x.index_put((i,), v), f(6, 2),
        exact([3, 1], "int64"), f(2, 2)),
    row("index_put inner", lambda x, i, v: _set(x.clone(), (slice(None), i), v), f(2, 6),
        exact([3, 1], "int64"), f(2, 2)),
    row("index_put adds", lambda x, i, v: x.index_put((i,), v, accumulate=True), f(6),
        exact([3, 1, 3], "int64"), f(3)),
    row("setitem", lambda x, i: _set(x.clone(), i, 2.0), f(6, 2), i64(2)),
    row("setitem slice", lambda x, y: _set(x.clone(), (slice(None), slice(1, 3)), y), f(3, 4),
        f(3, 2)),
    row("setitem column", lambda x: _set(x.clone(), (Ellipsis, 0), 2.0), f(3, 4)),
    row("setitem mask", lambda x, m: _set(x.clone(), m, 0.5), f(3, 4), flags(3, 4)),
    row("setitem rows by mask", lambda x, m, v: _set(x.clone(), m, v), f(3, 4), flags(3), f(4)),
    row("slice_scatter", lambda x, y: torch.slice_scatter(x, y, 1, -3, -1), f(2, 5), f(2, 2)),
    row("slice_scatter steps", lambda x, y: torch.slice_scatter(x, y, 0, 1, 99, 2), f(5), f(2)),
    row("slice_scatter promotes", lambda x, y: torch.slice_scatter(x, y.to(x), 0, 0, 2), f(5),
        f32(2)),
    row("select_scatter", lambda x, y: (torch.select_scatter(x, y, 0, 1),
        torch.select_scatter(x, y, -2, -1), torch.select_scatter(x, y, 0, -2)), f(3, 4), f(4)),
    row("index_add", lambda x, i, y: x.index_add(1, i, y, alpha=2), f(2, 4),
        exact([1, 1, 3], "int64"), f(2, 3)),
    row("index_copy", lambda x, i, y: x.index_copy(0, i, y), f(4, 2), exact([3, 0], "int64"),
        f(2, 2)),
    row("index_fill", lambda x, i: x.index_fill(-1, i, 2), f(3, 4), exact([3, 0], "int64")),
    row("scatter", lambda x, i, y: x.scatter(1, i, y), f(2, 4), exact([[1, 3], [0, 2]], "int64"),
        f(2, 2)),
    row("scatter larger source", lambda x, i, y: x.scatter(0, i, y), f(4, 3),
        exact([[1, 3], [0, 2]], "int64"), f(3, 3)),
    row("scatter value", lambda x, i: x.scatter(-1, i, 1.5), f(2, 4), i64(2, 2, high=4)),
    row("scatter_add", lambda x, i, y: x.scatter_add(1, i, y), f(2, 4),
        exact([[1, 1], [0, 2]], "int64"), f(2, 2)),
    row("nonzero", lambda x: torch.nonzero(x), i64(3, 5, high=3)),
    row("nonzero of floats", lambda x: torch.nonzero(torch.relu(x)), f(7)),
    row("nonzero and its size", lambda x, m: (y := x[torch.nonzero(m)[:, 0]]) * y.shape[0],
        f(7, 4), flags(7)),
    row("masked_scatter", lambda x, m, y: x.masked_scatter(m, y), f(3, 4),
        exact([[True], [False], [True]], "bool"), f(2, 4)),
    row("one_hot", lambda x: F.one_hot(x, 7), i64(2, 3)),
)  # fmt: skip


def _set(x: torch.Tensor, where: object, value: object) -> torch.Tensor:
    x[where] = value  # type: ignore[index, assignment]
    return x


FREE = (
    free("free reshape", lambda x: x.reshape(x.shape[0] * x.shape[1], -1), (f(2, 3, 4),),
         (f(1, 5, 2),)),
    free("free split heads", lambda x: x.unflatten(-1, (-1, 2)).transpose(1, 2).flatten(-2),
         (f(2, 3, 8),), (f(1, 5, 8),)),
    free("free flatten", lambda x: x.flatten(1, 2), (f(2, 3, 4),), (f(1, 5, 2),)),
    free("free expand", lambda x, y: x.expand(y.shape[0], -1, y.shape[1]), (f(3, 1), f(2, 4)),
         (f(5, 1), f(1, 3))),
    free("free expand of batch", lambda x: x[None].expand(4, -1, -1), (f(2, 3),), (f(1, 5),)),
    free("free broadcast_tensors", lambda x, y: torch.broadcast_tensors(x[:, None], y),
         (f(3), f(4)), (f(1), f(2))),
    free("free squeeze", lambda x: x[:, None].squeeze(1), (f(2, 3),), (f(1, 1),)),
    free("free cat", lambda x, y: torch.cat([x, y], 1), (f(2, 3), f(2, 5)), (f(1, 1), f(1, 2))),
    free("free stack", lambda x: torch.stack([x, -x], 1).flatten(0, 1), (f(2, 3),), (f(1, 2),)),
    free("free halves", lambda x: (x[: x.shape[0] // 2], x[x.shape[0] // 2 :]), (f(6, 2),),
         (f(4, 1),)),
    free("free slice by another", lambda x, y: x[:, : y.shape[0]], (f(2, 9), f(4)),
         (f(1, 5), f(3))),
    free("free slice from the end", lambda x, y: x[-y.shape[0] :], (f(9), f(4)), (f(5), f(3))),
    free("free chunk", lambda x: x.chunk(2, -1), (f(3, 8),), (f(1, 8),)),
    free("free split", lambda x: x.split([x.shape[1] - 2, 2], 1), (f(3, 8),), (f(1, 5),)),
    free("free repeat", lambda x, y: x.repeat(y.shape[0], 1), (f(2, 3), f(4)), (f(1, 2), f(2))),
    free("free repeat_interleave", lambda x: x.repeat_interleave(3, 0), (f(2, 3),), (f(1, 2),)),
    free("free roll", lambda x: x.roll(x.shape[1] // 2, 1), (f(2, 6),), (f(1, 5),)),
    free("free pad", lambda x: F.pad(x, (0, (-x.shape[1]) % 4)), (f(2, 6),), (f(1, 9),)),
    free("free pad reflect", lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (f(1, 2, 4, 5),),
         (f(1, 2, 3, 6),)),
    free("free meshgrid", lambda x, y: torch.stack(torch.meshgrid(
        torch.arange(x.shape[0]), torch.arange(y.shape[0]), indexing="xy")), (f(2), f(3)),
        (f(4), f(5))),
    free("free index", lambda x, i: x[i], (f(6, 2), i64(3)), (f(7, 5), i64(2))),
    free("free index_put", lambda x, i, v: x.index_put((i,), v), (f(6, 2), i64(3, high=2), f(2)),
         (f(7, 5), i64(1), f(5))),
    free("free gather", lambda x, i: x.gather(1, i), (f(3, 6), i64(3, 2)), (f(2, 7), i64(2, 4))),
    free("free scatter", lambda x, i: x.scatter(1, i, 1.0), (f(3, 6), i64(3, 2)),
         (f(2, 7), i64(2, 4))),
    free("free setitem", lambda x: _set(x.clone(), (slice(None), slice(0, x.shape[1] // 2)), 1.0),
         (f(2, 6),), (f(1, 4),)),
    free("free masked_scatter", lambda x, m, y: x.masked_scatter(m[..., None], y),
         (f(2, 3, 4), flags(2, 3), f(6, 4)), (f(1, 5, 2), flags(1, 5), f(5, 2))),
    free("free causal mask", lambda x: torch.ones(x.shape[0], x.shape[0]).tril(), (f(4),), (f(2),)),
)  # fmt: skip

ROWS = (*VIEWS, *WHOLE, *JOINING, *SLICES, *ORDER, *PADDING, *INDEXING, *FREE)


@pytest.mark.parametrize(
    "one, precision", [pytest.param(r, p, id=f"{r.name}-{p}") for r in ROWS for p in r.runs]
)
def test_gives_what_torch_gives(one: Row, precision: str) -> None:
    check(ROWS, one, precision)
