"""Safetensors files, read by their headers: what is stored, where, and the bytes on demand.

The layout is https://github.com/huggingface/safetensors#format: 8 bytes of header length, a JSON
header, then the data. Every check of its reference reader is made here, and named in the error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import mlx.core as mx
import numpy as np

from mlxconv.runtime.errors import MlxconvError

from .block_io import BlockReader

MAX_HEADER_BYTES = 100_000_000  # the reference reader's own limit

# Code in the header -> (bytes an element, MLX dtype that `read` gives). F8 values are exact in
# bfloat16; F64 exists on MLX's CPU device only, so it is read as float32.
DTYPES: dict[str, tuple[int, Any]] = {
    "BOOL": (1, mx.bool_),
    "U8": (1, mx.uint8),
    "I8": (1, mx.int8),
    "U16": (2, mx.uint16),
    "I16": (2, mx.int16),
    "U32": (4, mx.uint32),
    "I32": (4, mx.int32),
    "U64": (8, mx.uint64),
    "I64": (8, mx.int64),
    "F16": (2, mx.float16),
    "BF16": (2, mx.bfloat16),
    "F32": (4, mx.float32),
    "F64": (8, mx.float32),
    "C64": (8, mx.complex64),
    "F8_E4M3": (1, mx.bfloat16),
    "F8_E5M2": (1, mx.bfloat16),
}
_RAW = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a weight file, known by its header; bytes are read when asked for.

    `offset` is in bytes from the start of the file. `strides` (in elements) is None for the
    row-major tensors of safetensors; pickles may hold transposed ones. `ready` is called before the
    file is opened: a file of the Hub is fetched then.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    file: Path
    offset: int
    strides: tuple[int, ...] | None = None
    ready: Callable[[], object] = field(default=lambda: None, repr=False, compare=False)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's elements as stored."""
        return self.size * DTYPES[self.dtype][0]

    def read(self) -> mx.array:
        """The whole tensor, `shape`, in its own dtype (F64 as float32, F8 as bfloat16)."""
        if self.strides is not None:
            return self._decode(mx.array(self._strided()))
        return self._decode(self._raw(self.shape, 0))

    def read_rows(self, start: int, stop: int) -> mx.array:
        """Rows `start` to `stop` of axis 0, shape (stop - start, ...); reads no other row."""
        if not self.shape or not 0 <= start <= stop <= self.shape[0]:
            raise MlxconvError(
                f"{self.file}: rows {start}:{stop} of {self.name!r} do not exist, its shape is "
                f"{self.shape}; ask for rows within axis 0"
            )
        if self.strides is not None:
            return self._decode(mx.array(self._strided()[start:stop]))
        row_bytes = self.nbytes // max(self.shape[0], 1)
        return self._decode(self._raw((stop - start, *self.shape[1:]), start * row_bytes))

    def chunks(self, size: int = 8 << 20) -> Iterator[memoryview]:
        """The row-major little-endian bytes, `size` at a time, for verbatim copies.

        They lie in one reused buffer: a chunk is valid until the next is asked for.
        """
        if self.strides is not None:
            data = memoryview(np.ascontiguousarray(self._strided()).reshape(-1).view(np.uint8))  # type: ignore[arg-type]
            yield from (data[i : i + size] for i in range(0, len(data), size))
            return
        with self._reader(max(1, min(size, self.nbytes))) as reader:
            left = self.nbytes
            for piece in reader.pieces(self.offset, self.offset + self.nbytes):
                if len(piece) < min(size, left):
                    self._truncated(self.nbytes - left + len(piece), self.nbytes)
                left -= len(piece)
                yield piece

    def _raw(self, shape: tuple[int, ...], skip: int) -> mx.array:
        """Elements as unsigned integers. The file is read into MLX's own memory: no second copy."""
        out = mx.zeros(shape, dtype=_RAW[DTYPES[self.dtype][0]])
        if out.size:
            mx.eval(out)
            with self._open(skip) as stream:
                self._fill(stream, out)
        return out

    def _strided(self) -> np.ndarray[Any, Any]:
        """A view, `shape`, of the bytes that the strides span, as unsigned integers."""
        assert self.strides is not None
        item = DTYPES[self.dtype][0]
        dtype = np.dtype(f"<u{item}")
        if not self.size:
            return np.empty(self.shape, dtype)
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides))
        span = np.empty(last + 1, dtype)
        with self._open(0) as stream:
            self._fill(stream, span)
        strides = tuple(s * item for s in self.strides)
        return np.lib.stride_tricks.as_strided(span, self.shape, strides, writeable=False)

    def _decode(self, raw: mx.array) -> mx.array:
        if self.dtype in ("F8_E4M3", "F8_E5M2"):
            return fp8_values(self.dtype)[raw]
        if self.dtype == "F64":
            return mx.array(np.array(raw).view("<f8").astype(np.float32))
        return raw.view(DTYPES[self.dtype][1])

    def _open(self, skip: int) -> BinaryIO:
        self.ready()
        with self._named_errors():
            stream = self.file.open("rb", buffering=0)
        stream.seek(self.offset + skip)
        return stream

    def _reader(self, size: int) -> BlockReader:
        self.ready()
        with self._named_errors():
            return BlockReader(self.file, size)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise MlxconvError(
                f"{self.file}: cannot read {self.name!r} ({error.strerror}); was the file moved?"
            ) from error

    def _fill(self, stream: BinaryIO, buffer: Any) -> None:
        target = memoryview(buffer).cast("B")
        done = 0
        while done < len(target):
            count = stream.readinto(target[done:])  # type: ignore[attr-defined]
            if not count:
                self._truncated(done, len(target))
            done += count

    def _truncated(self, found: int, expected: int) -> NoReturn:
        raise MlxconvError(
            f"{self.file}: {self.name!r} ends after {found} bytes, expected {expected}; the file "
            "changed while it was read, download it again"
        )


@cache
def fp8_values(dtype: str) -> mx.array:
    """The 256 values (256,) bfloat16 of an 8-bit float, by its code (OCP OFP8 1.0, section 5)."""
    exponent_bits, mantissa_bits = {"F8_E4M3": (4, 3), "F8_E5M2": (5, 2)}[dtype]
    top, bias = 2**exponent_bits - 1, 2 ** (exponent_bits - 1) - 1
    values = []
    for byte in range(128):
        exponent, mantissa = byte >> mantissa_bits, byte & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        if dtype == "F8_E5M2" and exponent == top:
            values.append(math.nan if mantissa else math.inf)
        elif dtype == "F8_E4M3" and byte == 0x7F:
            values.append(math.nan)
        elif exponent == 0:
            values.append(math.ldexp(fraction, 1 - bias))
        else:
            values.append(math.ldexp(1 + fraction, exponent - bias))
    return mx.array(values + [-value for value in values], dtype=mx.bfloat16)


def read_header(file: Path) -> tuple[dict[str, StoredTensor], dict[str, str]]:
    """Tensors by name, and the metadata, of a safetensors file; only its header is read.

    Raises MlxconvError where the file is no safetensors file, is cut short, or contradicts itself.
    """
    header, start, size = _header_json(file)
    metadata = header.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata  # MLX writes null for none
    if not isinstance(metadata, dict):
        raise MlxconvError(f"{file}: __metadata__ is no JSON object; download the file again")
    spans = {name: _entry(file, name, entry) for name, entry in header.items()}
    _check_layout(file, spans, size - start)
    tensors = {
        name: StoredTensor(name, shape, dtype, file, start + begin)
        for name, (dtype, shape, begin, _) in spans.items()
    }
    return tensors, metadata


def _header_json(file: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the data begins, and the file's size, in bytes."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = int.from_bytes(prefix, "little")
            _check_length(file, prefix, length, size)
            text = stream.read(length)
    except OSError as error:
        raise MlxconvError(f"{file}: cannot be read ({error.strerror})") from error
    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=lambda p: _unique_pairs(file, p)
        )
    except (ValueError, RecursionError) as error:
        raise MlxconvError(
            f"{file}: header is not JSON ({error}); the file is damaged, download it again"
        ) from error
    if not isinstance(header, dict):
        raise MlxconvError(
            f"{file}: header is a JSON {type(header).__name__}, expected an object; "
            "the file is damaged, download it again"
        )
    return header, 8 + length, size


def _check_length(file: Path, prefix: bytes, length: int, size: int) -> None:
    if prefix == b"version ":
        raise MlxconvError(f"{file}: is a Git LFS pointer, not weights; run `git lfs pull`")
    if len(prefix) < 8:
        raise MlxconvError(
            f"{file}: has {size} bytes, a safetensors file has at least 8; download it again"
        )
    if length > MAX_HEADER_BYTES:
        raise MlxconvError(
            f"{file}: header length {length} is over the limit of {MAX_HEADER_BYTES} bytes; "
            "this is no safetensors file, or a damaged one: download it again"
        )
    if 8 + length > size:
        raise MlxconvError(
            f"{file}: header needs {8 + length} bytes, the file has {size}; "
            "it is truncated, download it again"
        )


def _unique_pairs(file: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MlxconvError(
                f"{file}: {key!r} is in the header twice; the file is damaged, download it again"
            )
        found[key] = value
    return found


def _entry(file: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], int, int]:
    """(dtype, shape, begin, end) of one header entry, checked on its own."""
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
        well_formed = isinstance(dtype, str) and all(
            type(n) is int and n >= 0 for n in (*shape, begin, end)
        )
    except (TypeError, KeyError, ValueError):
        well_formed = False
    if not well_formed:
        raise MlxconvError(
            f"{file}: header entry of {name!r} is {str(entry)[:200]}, expected dtype, shape and "
            "data_offsets of non-negative integers; the file is damaged, download it again"
        )
    if dtype not in DTYPES:
        raise MlxconvError(
            f"{file}: {name!r} has dtype {dtype!r}, mlxconv reads {', '.join(DTYPES)}; "
            "save the weights in one of these"
        )
    expected = math.prod(shape) * DTYPES[dtype][0]
    if end - begin != expected:
        raise MlxconvError(
            f"{file}: {name!r} {dtype} {tuple(shape)} needs {expected} bytes, data_offsets "
            f"[{begin}, {end}] give {end - begin}; the file is damaged, download it again"
        )
    return dtype, tuple(shape), begin, end


def _check_layout(
    file: Path, spans: dict[str, tuple[str, tuple[int, ...], int, int]], data_bytes: int
) -> None:
    """Tensors must follow each other without gap or overlap, and fill the file."""
    ordered = sorted((begin, end, name) for name, (_, _, begin, end) in spans.items())
    for (_, previous_end, previous), (begin, _, name) in pairwise([(0, 0, ""), *ordered]):
        if begin != previous_end:
            what = "overlaps" if begin < previous_end else "leaves a gap after"
            raise MlxconvError(
                f"{file}: {name!r} starts at byte {begin} and {what} "
                f"{previous or 'the header'!r}, which ends at {previous_end}; "
                "the file is damaged, download it again"
            )
    needed = max((end for _, end, _ in ordered), default=0)
    if needed != data_bytes:
        problem = "it is truncated" if needed > data_bytes else "it has bytes of no tensor"
        raise MlxconvError(
            f"{file}: header describes {needed} bytes of data, the file has {data_bytes}; "
            f"{problem}, download it again"
        )
