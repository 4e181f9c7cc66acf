"""Safetensors files: what their headers say, the bytes behind them, and every way to be damaged."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mlxconv.convert.source.safetensors_io import fp8_values, read_header
from mlxconv.runtime.errors import MlxconvError

TORCH_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "C64": torch.complex64,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: Any, shape: list[Any], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def bits(array: mx.array) -> bytes:
    raw = {1: mx.uint8, 2: mx.uint16, 4: mx.uint32, 8: mx.uint64}[array.itemsize]
    return np.array(array.view(raw)).tobytes()


@pytest.mark.parametrize("code", TORCH_DTYPES)
def test_every_plain_dtype_is_read_bit_for_bit(tmp_path: Path, code: str) -> None:
    tensor = (torch.arange(30) * 7 - 3).reshape(5, 6).to(TORCH_DTYPES[code])
    save_file({"pad": torch.zeros(3, dtype=torch.uint8), "x": tensor}, tmp_path / "a.safetensors")

    stored = read_header(tmp_path / "a.safetensors")[0]["x"]

    expected = tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert (stored.dtype, stored.shape, stored.nbytes) == (code, (5, 6), len(expected))
    assert bits(stored.read()) == expected
    assert b"".join(map(bytes, stored.chunks(7))) == expected
    assert bits(stored.read_rows(1, 3)) == expected[len(expected) // 5 : 3 * len(expected) // 5]


def test_scalars_and_empty_tensors_are_read(tmp_path: Path) -> None:
    tensors = {"one": torch.tensor(2.5), "none": torch.zeros(0, 4), "wide": torch.zeros(3, 0)}
    save_file(tensors, tmp_path / "a.safetensors")
    stored = read_header(tmp_path / "a.safetensors")[0]

    assert stored["one"].read().item() == 2.5
    assert stored["none"].read().shape == (0, 4)
    assert stored["wide"].read_rows(1, 3).shape == (2, 0)
    assert list(stored["none"].chunks()) == []


def test_float64_is_read_as_float32_and_still_says_f64(tmp_path: Path) -> None:
    values = torch.tensor([[1 / 3, 1e-30], [-2.0, torch.inf]], dtype=torch.float64)
    save_file({"x": values}, tmp_path / "a.safetensors")
    stored = read_header(tmp_path / "a.safetensors")[0]["x"]

    assert stored.dtype == "F64"
    assert stored.read().dtype == mx.float32
    np.testing.assert_array_equal(np.array(stored.read()), values.float().numpy())
    np.testing.assert_array_equal(np.array(stored.read_rows(1, 2)), values[1:].float().numpy())


@pytest.mark.parametrize(
    ("code", "dtype"), [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)]
)
def test_all_256_float8_values_equal_torch(tmp_path: Path, code: str, dtype: torch.dtype) -> None:
    tensor = torch.arange(256, dtype=torch.uint8).view(dtype)
    save_file({"x": tensor}, tmp_path / "a.safetensors")
    stored = read_header(tmp_path / "a.safetensors")[0]["x"]

    got = np.array(stored.read().astype(mx.float32))

    expected = tensor.float().numpy()
    np.testing.assert_array_equal(got, expected)  # NaN equals NaN here
    numbers = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(got[numbers]), np.signbit(expected[numbers]))
    assert stored.dtype == code and stored.read().dtype == mx.bfloat16


def test_our_float8_table_equals_mlx_decoder() -> None:
    decoded = mx.from_fp8(mx.arange(256).astype(mx.uint8), dtype=mx.float32)

    ours = np.array(fp8_values("F8_E4M3").astype(mx.float32))

    np.testing.assert_array_equal(ours, np.array(decoded))


def test_reading_keeps_one_copy_in_memory(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1024, 1024)}, tmp_path / "a.safetensors")
    stored = read_header(tmp_path / "a.safetensors")[0]["x"]
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    array = stored.read()
    mx.eval(array)

    assert mx.get_peak_memory() - before <= 1.1 * stored.nbytes
    del array
    assert mx.get_active_memory() - before < 0.1 * stored.nbytes


def test_rows_beyond_the_tensor_are_refused(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(3, 2)}, tmp_path / "a.safetensors")
    stored = read_header(tmp_path / "a.safetensors")[0]["x"]

    with pytest.raises(MlxconvError, match=r"rows 2:5 of 'x' do not exist.*\(3, 2\)"):
        stored.read_rows(2, 5)


def test_a_file_cut_after_opening_is_an_error_at_reading(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.zeros(100)}, path)
    stored = read_header(path)[0]["x"]
    path.write_bytes(path.read_bytes()[:-40])

    with pytest.raises(MlxconvError, match=r"a\.safetensors: 'x' ends after 360 bytes, exp.* 400"):
        stored.read()
    with pytest.raises(MlxconvError, match="ends after"):
        list(stored.chunks())
    path.unlink()
    with pytest.raises(MlxconvError, match="cannot read 'x'"):
        stored.read()


F32 = entry("F32", [2], 0, 8)
DAMAGED: dict[str, tuple[Any, bytes, str]] = {
    "header not JSON": (b"{nope", b"", "header is not JSON"),
    "header not UTF-8": (b'{"\xff": 1}', b"", "header is not JSON"),
    "header a list": ([1], b"", "JSON list, expected an object"),
    "nested too deep": (b"[" * 100_000, b"", "header is not JSON"),
    "key twice": (b'{"a": 1, "a": 2}', b"", "'a' is in the header twice"),
    "entry no object": ({"a": 3}, b"", "header entry of 'a' is 3"),
    "entry without dtype": ({"a": {"shape": [1]}}, b"", "header entry of 'a'"),
    "negative size": ({"a": entry("F32", [-2], 0, 8)}, bytes(8), "non-negative"),
    "bool as size": ({"a": entry("F32", [True], 0, 4)}, bytes(4), "non-negative"),
    "negative offset": ({"a": entry("F32", [2], -8, 0)}, bytes(8), "non-negative"),
    "one offset": ({"a": F32 | {"data_offsets": [0]}}, bytes(8), "header entry of 'a'"),
    "unknown dtype": (
        {"a": entry("F4", [2], 0, 1)},
        b"0",
        "'a' has dtype 'F4', mlxconv reads BOOL",
    ),
    "unhashable dtype": ({"a": entry([], [2], 0, 8)}, bytes(8), "header entry of 'a'"),
    "size against offsets": (
        {"a": entry("F32", [3], 0, 8)},
        bytes(8),
        r"'a' F32 \(3,\) needs 12 bytes, data_offsets \[0, 8\] give 8",
    ),
    "end before begin": ({"a": entry("F32", [0], 8, 0)}, bytes(8), "needs 0 bytes"),
    "overlap": (
        {"a": F32, "b": entry("F32", [2], 4, 12)},
        bytes(12),
        "'b' starts at byte 4 and overlaps 'a', which ends at 8",
    ),
    "gap": ({"a": F32, "b": entry("F32", [1], 12, 16)}, bytes(16), "leaves a gap after 'a'"),
    "gap at the start": ({"a": entry("F32", [1], 4, 8)}, bytes(8), "gap after 'the header'"),
    "truncated data": ({"a": F32}, bytes(5), "8 bytes of data, the file has 5; it is truncated"),
    "trailing data": ({"a": F32}, bytes(9), "has bytes of no tensor"),
    "metadata a list": ({"__metadata__": [], "a": F32}, bytes(8), "__metadata__"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_one_clear_line(tmp_path: Path, case: str) -> None:
    header, data, message = DAMAGED[case]
    path = write(tmp_path / "bad.safetensors", header, data)

    with pytest.raises(MlxconvError, match=message) as caught:
        read_header(path)

    text = str(caught.value)
    assert text.startswith(f"{path}: ") and "\n" not in text and len(text) < 600


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has 0 bytes"),
        (b"1234", "has 4 bytes"),
        (struct.pack("<Q", 500) + b"{}", "header needs 508 bytes, the file has 10; it is truncat"),
        (struct.pack("<Q", 2**40), "header length 1099511627776 is over the limit of 100000000"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "Git LFS pointer"),
    ],
)
def test_files_that_are_no_safetensors_are_named(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)

    with pytest.raises(MlxconvError, match=message):
        read_header(path)
