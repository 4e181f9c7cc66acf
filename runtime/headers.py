"""Headers of safetensors files: what is stored and where, checked before any weight is read.

The layout is https://github.com/huggingface/safetensors#format: 8 bytes of header length, a JSON
header, then the data. Every check of its reference reader is made here, and named in the error.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from .dtypes import BY_CODE
from .errors import MlxconvError

MAX_HEADER_BYTES = 100_000_000  # the reference reader's own limit


class Span(NamedTuple):
    """A tensor of a file: safetensors dtype, shape, and bytes `begin` to `end` of the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(
    file: Path, mend: str = "download it again"
) -> tuple[dict[str, Span], dict[str, str]]:
    """Tensors by name, and the metadata, of a safetensors file; only its header is read.

    Raises MlxconvError where the file is no safetensors file, is cut short, or contradicts itself;
    the message ends with `mend`, what to do about it.
    """
    return _Reader(file, mend).read()


class _Reader:
    def __init__(self, file: Path, mend: str) -> None:
        self.file, self.mend = file, mend

    def _fail(self, problem: str) -> NoReturn:
        raise MlxconvError(f"{self.file}: {problem} {self.mend}")

    def read(self) -> tuple[dict[str, Span], dict[str, str]]:
        """As `read_header`."""
        header, start, size = self._json()
        metadata = header.pop("__metadata__", None)
        metadata = {} if metadata is None else metadata  # MLX writes null for none
        if not isinstance(metadata, dict):
            self._fail("__metadata__ is no JSON object;")
        spans = {name: self._span(name, entry, start) for name, entry in header.items()}
        self._check_layout(spans, start, size)
        return spans, metadata

    def _json(self) -> tuple[dict[str, Any], int, int]:
        """The header, where the data begins, and the file's size, in bytes."""
        try:
            size = self.file.stat().st_size
            with self.file.open("rb") as stream:
                prefix = stream.read(8)
                length = int.from_bytes(prefix, "little")
                self._check_length(prefix, length, size)
                text = stream.read(length)
        except OSError as error:
            self._fail(f"cannot be read ({error.strerror});")
        try:
            header = json.loads(text.decode("utf-8"), object_pairs_hook=self._unique_pairs)
        except (ValueError, RecursionError) as error:
            self._fail(f"header is not JSON ({error}); the file is damaged,")
        if not isinstance(header, dict):
            found = type(header).__name__
            self._fail(f"header is a JSON {found}, expected an object; the file is damaged,")
        return header, 8 + length, size

    def _check_length(self, prefix: bytes, length: int, size: int) -> None:
        if prefix == b"version ":
            raise MlxconvError(
                f"{self.file}: is a Git LFS pointer, not weights; run `git lfs pull`"
            )
        if len(prefix) < 8:
            self._fail(f"has {size} bytes, a safetensors file has at least 8;")
        if length > MAX_HEADER_BYTES:
            self._fail(
                f"header length {length} is over the limit of {MAX_HEADER_BYTES} bytes; "
                "this is no safetensors file, or a damaged one:"
            )
        if 8 + length > size:
            self._fail(f"header needs {8 + length} bytes, the file has {size}; it is truncated,")

    def _unique_pairs(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            self._fail(f"{twice!r} is in the header twice; the file is damaged,")
        return found

    def _span(self, name: str, entry: Any, start: int) -> Span:
        """One header entry, checked on its own."""
        try:
            dtype, shape = entry["dtype"], entry["shape"]
            begin, end = entry["data_offsets"]
            well_formed = isinstance(dtype, str) and all(
                type(n) is int and n >= 0 for n in (*shape, begin, end)
            )
        except (TypeError, KeyError, ValueError):
            well_formed = False
        if not well_formed:
            self._fail(
                f"header entry of {name!r} is {str(entry)[:200]}, expected dtype, shape and "
                "data_offsets of non-negative integers; the file is damaged,"
            )
        if dtype not in BY_CODE:
            raise MlxconvError(
                f"{self.file}: {name!r} has dtype {dtype!r}, mlxconv reads {', '.join(BY_CODE)}; "
                "save the weights in one of these"
            )
        expected = math.prod(shape) * BY_CODE[dtype].size
        if end - begin != expected:
            self._fail(
                f"{name!r} {dtype} {tuple(shape)} needs {expected} bytes, data_offsets "
                f"[{begin}, {end}] give {end - begin}; the file is damaged,"
            )
        return Span(dtype, tuple(shape), start + begin, start + end)

    def _check_layout(self, spans: dict[str, Span], start: int, size: int) -> None:
        """Tensors must follow each other without gap or overlap, and fill the file."""
        ordered = sorted((s.begin - start, s.end - start, name) for name, s in spans.items())
        for (_, previous_end, previous), (begin, _, name) in pairwise([(0, 0, ""), *ordered]):
            if begin != previous_end:
                what = "overlaps" if begin < previous_end else "leaves a gap after"
                self._fail(
                    f"{name!r} starts at byte {begin} and {what} {previous or 'the header'!r}, "
                    f"which ends at {previous_end}; the file is damaged,"
                )
        needed, found = max((end for _, end, _ in ordered), default=0), size - start
        if needed != found:
            problem = "it is truncated" if needed > found else "it has bytes of no tensor"
            self._fail(f"header describes {needed} bytes of data, the file has {found}; {problem},")
