"""Tensors of safetensors files, known by their headers; their bytes are read on demand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import mlx.core as mx
import numpy as np

from mlxconv.runtime import headers
from mlxconv.runtime.dtypes import BY_CODE
from mlxconv.runtime.errors import MlxconvError

from .block_io import BlockReader

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
        return self.size * BY_CODE[self.dtype].size

    @property
    def read_as(self) -> mx.Dtype:
        """The dtype that `read` gives; MLX has float64 on the CPU alone."""
        return mx.float32 if self.dtype == "F64" else BY_CODE[self.dtype].mlx

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
        out = mx.zeros(shape, dtype=_RAW[BY_CODE[self.dtype].size])
        if out.size:
            mx.eval(out)
            with self._open(skip) as stream:
                self._fill(stream, out)
        return out

    def _strided(self) -> np.ndarray[Any, Any]:
        """A view, `shape`, of the bytes that the strides span, as unsigned integers."""
        assert self.strides is not None
        item = BY_CODE[self.dtype].size
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
        return raw.view(self.read_as)

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
    spans, metadata = headers.read_header(file)
    tensors = {
        name: StoredTensor(name, span.shape, span.dtype, file, span.begin)
        for name, span in spans.items()
    }
    return tensors, metadata
