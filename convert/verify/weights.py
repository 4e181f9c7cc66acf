"""Compares a bundle's weight files with the checkpoint they came from, tensor by tensor."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxconv.runtime.bundle import read_json
from mlxconv.runtime.dtypes import BY_CODE
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import INDEX_FILE, Quantization, Specs
from mlxconv.runtime.program.program import Parameter

from ..quantize.rounding import dequantize, group_error, group_limit
from ..source.checkpoint import (
    Component,
    KeyMatch,
    StoredTensor,
    component_class,
    match_keys,
    tied_weights,
)
from ..source.floats import KINDS
from ..store.bundle_files import bundle_tensors
from ..store.plan import to_stored
from ..trace.class_config import full_config
from .metrics import Sums

_ROWS = 1 << 20  # elements compared at a time
_CHUNK = 1 << 24  # bytes read at a time
_FIRST = 1 << 16  # bytes, where the first are likely to answer


@dataclass
class Audit:
    """What was compared, and the tensors that are not what the checkpoint has, with the reason.

    `missing`: tensors that the program reads and the bundle lacks; they are in `bad` too.
    `zeros`: floats that are zero throughout in the checkpoint.
    """

    tensors: int = 0
    sums: Sums = field(default_factory=Sums)
    bad: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    zeros: list[str] = field(default_factory=list)


def torch_shape(tensor: StoredTensor, kind: str) -> tuple[int, ...]:
    """The shape in PyTorch's layout of a tensor stored in the bundle's."""
    shape = tensor.shape
    if kind == "conv":
        return (shape[0], shape[-1], *shape[1:-1])
    return (shape[-1], shape[0], *shape[1:-1]) if kind == "conv_transpose" else shape


def audit(
    folder: Path,
    component: Component,
    parameters: Mapping[str, Parameter],
    config: Mapping[str, Any],
    progress: Callable[[int], None] = lambda count: None,
) -> Audit:
    """Dense tensors must equal the checkpoint's, cast; quantized ones be as near as rounding.

    All must still have the bytes that were written (the index's CRC-32). Reads both sides in
    pieces. Raises MlxconvError when the bundle has tensors that the checkpoint lacks.
    """
    tensors = bundle_tensors(folder)
    specs = Specs(config.get("quantization") or {}, str(folder))
    found = _pairs(tensors, component, parameters, str(component.path), specs)
    result = Audit(bad=_changed(folder, tensors))
    result.missing = [name for name in parameters if name not in found]
    result.bad |= dict.fromkeys(result.missing, "missing in the bundle")
    for name, source in found.items():
        kind = parameters[name].kind if name in parameters else "other"
        scales, finite = tensors.get(_part(name, "scales")), result.sums.finite
        if scales is None:
            reason = _compare_dense(tensors[name], source, kind, result.sums)
        else:
            spec = specs.of(name.removesuffix(".weight"))
            biases = tensors.get(_part(name, "biases"))
            reason = _compare_quantized(tensors[name], scales, biases, spec, source, result.sums)
        result.tensors += 1
        if _is_zero(source):
            result.zeros.append(name)
        if finite and not result.sums.finite:
            result.bad.setdefault(name, f"NaN or infinity {result.sums.not_finite}")
        progress(source.nbytes)
        if reason:
            result.bad[name] = reason
    return result


def _is_zero(source: StoredTensor) -> bool:
    """Whether a tensor of floats is zero throughout; of most the first bytes answer."""
    bits = {2: np.uint16, 4: np.uint32}.get(BY_CODE[source.dtype].size)
    return source.dtype in KINDS and not any(
        (np.frombuffer(chunk, bits) << 1).any()  # without the sign
        for chunk in source.chunks(_FIRST)
    )


def _changed(folder: Path, tensors: Mapping[str, StoredTensor]) -> dict[str, str]:
    """Tensors whose bytes are not those written; a small change of a scale shows nowhere else."""
    metadata = read_json(folder / INDEX_FILE).get("metadata", {})
    checks = metadata.get("crc32", {}) if isinstance(metadata, dict) else None
    if not isinstance(checks, dict):
        raise MlxconvError(f"{folder / INDEX_FILE}: its metadata is not a table; convert again")
    changed = {}
    for name, tensor in tensors.items():
        crc = 0
        for chunk in tensor.chunks(_CHUNK):
            crc = zlib.crc32(chunk, crc)
        if name in checks and checks[name] != f"{crc:08x}":
            changed[name] = "its bytes are not those written"
    return changed


def _part(name: str, part: str) -> str:
    return f"{name.removesuffix('.weight')}.{part}"


def _pairs(
    tensors: Mapping[str, StoredTensor],
    component: Component,
    parameters: Mapping[str, Parameter],
    where: str,
    specs: Specs,
) -> dict[str, StoredTensor]:
    wanted: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases") and f"{module}.weight" in tensors:
            continue
        if _part(name, "scales") in tensors and name.endswith(".weight"):
            width = tensor.shape[1] * 32 // specs.of(module).bits
            wanted[name] = (tensor.shape[0], width)
        else:
            kind = parameters[name].kind if name in parameters else "other"
            wanted[name] = torch_shape(tensor, kind)
    match = match_keys(wanted, component.tensors)
    if match.missing:
        match = _match_tied(wanted, component)
    match.check(where)
    return {name: component.tensors[match.found[name]] for name in wanted}


def _match_tied(wanted: Mapping[str, tuple[int, ...]], component: Component) -> KeyMatch:
    """The checkpoint may store a tensor under another of its names."""
    from ..trace.fake_module import build_module

    module, _ = build_module(component_class(component), full_config(component))
    return match_keys(wanted, component.tensors, tied_weights(module))


def _compare_dense(made: StoredTensor, source: StoredTensor, kind: str, sums: Sums) -> str:
    value = made.read()
    expected = to_stored(source.read(), kind)
    floats = mx.issubdtype(value.dtype, mx.floating)
    if floats and value.dtype == expected.dtype and mx.array_equal(value, expected):
        sums.add_equal(value.astype(mx.float32))
        return ""
    if floats:
        sums.add(value.astype(mx.float32), expected.astype(mx.float32))
    same = mx.array_equal(value, expected.astype(value.dtype), equal_nan=value.dtype != mx.bool_)
    if bool(same):
        return ""
    differing = int(mx.sum(value != expected.astype(value.dtype)))
    return f"{differing} of {value.size} values differ"


def _row_chunks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _ROWS // max(1, width))
    for start in range(0, rows, step):
        yield start, min(rows, start + step)


def _compare_quantized(
    packed: StoredTensor,
    scales: StoredTensor,
    biases: StoredTensor | None,
    spec: Quantization,
    source: StoredTensor,
    sums: Sums,
) -> str:
    rows, width = source.shape
    worst, bad = 0.0, 0
    for start, stop in _row_chunks(rows, width):
        parts = [p.read_rows(start, stop) if p else None for p in (packed, scales, biases)]
        value = dequantize(parts, spec)
        exact = source.read_rows(start, stop)
        wanted = exact.astype(mx.float32)
        sums.add(value, wanted)
        error = group_error(value, wanted, spec)
        limit = group_limit(exact, wanted, spec, None if parts[1] is None else parts[1].dtype)
        over = np.asarray(error) > np.asarray(limit)
        bad += int(over.sum())
        if over.any():
            ratio = np.asarray(error)[over] / np.maximum(np.asarray(limit)[over], 1e-30)
            worst = max(worst, float(ratio.max()))
    return f"{bad} groups up to {worst:.1f} times worse than rounding" if bad else ""
