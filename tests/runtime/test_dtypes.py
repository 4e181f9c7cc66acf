"""The table of dtypes: each row says the same of MLX, of safetensors files and of programs."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from mlxconv.runtime.dtypes import BY_CODE, BY_MLX, BY_NAME, Dtype
from mlxconv.runtime.headers import read_header


@pytest.mark.parametrize("dtype", BY_MLX.values(), ids=lambda dtype: dtype.name)
def test_a_row_is_what_mlx_writes(dtype: Dtype, tmp_path: Path) -> None:
    assert BY_NAME[dtype.name] is BY_CODE[dtype.code] is dtype
    assert str(dtype.mlx) in (f"mlx.core.{dtype.name}", f"mlx.core.{dtype.name}_")
    assert dtype.mlx.size == dtype.size
    if dtype.name == "float64":
        return  # which MLX does not save
    file = tmp_path / "x.safetensors"
    mx.save_safetensors(str(file), {"x": mx.zeros((2, 3), dtype.mlx)})
    span = read_header(file)[0]["x"]
    assert (span.dtype, span.shape, span.end - span.begin) == (dtype.code, (2, 3), 6 * dtype.size)
