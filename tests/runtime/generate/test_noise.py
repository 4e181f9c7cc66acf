"""Noise: equal to torch's bit for bit, whatever was drawn before it."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from diffusers.utils.torch_utils import randn_tensor

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.noise import Generator

SEEDS = (0, 1, 42, 2**31, 2**32 - 1, 2**32 + 7, 2**64 - 1, -1, -(2**63))
SMALL = ((), (0,), (1,), (5,), (15,), (16,), (17,), (31,), (3, 7, 11), (1, 4, 8, 8))
LATENTS = (2, 16, 64, 64)
DTYPES = ("float32", "bfloat16", "float16", "float64")
AVX2 = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def torch_generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def bits(array: mx.array | torch.Tensor) -> Any:
    """The integers that the values are stored as."""
    if isinstance(array, torch.Tensor):
        whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[array.element_size()]
        return array.view(whole).numpy()
    if array.dtype == mx.bfloat16:
        return np.array(array.view(mx.int16))
    values = np.array(array)
    return values.view(f"i{values.itemsize}")


def assert_equal(ours: mx.array, theirs: torch.Tensor) -> None:
    assert str(ours.dtype).split(".")[-1] == str(theirs.dtype).split(".")[-1]
    np.testing.assert_array_equal(bits(ours), bits(theirs))


def assert_normals_equal(ours: mx.array, theirs: torch.Tensor) -> None:
    """Bit for bit; where torch has no AVX2, as close as two of its own CPU paths are."""
    if AVX2:
        assert_equal(ours, theirs)
        return
    error = np.abs(np.array(ours.astype(mx.float32, stream=mx.cpu)) - theirs.float().numpy())
    assert error.max(initial=0) <= (2**-5 if theirs.element_size() == 2 else 5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", SEEDS)
def test_normals_are_those_of_torch(seed: int, dtype: str) -> None:
    for shape in (*SMALL, LATENTS) if seed == 42 else SMALL:
        ours = Generator(seed).normal(shape, dtype)
        theirs = torch.randn(shape, generator=torch_generator(seed), dtype=getattr(torch, dtype))
        assert_normals_equal(ours, theirs)


def test_a_million_normals_are_those_of_torch() -> None:
    theirs = torch.randn(1 << 20, generator=torch_generator(1234))

    assert_normals_equal(Generator(1234).normal((1 << 20,)), theirs)


def test_normals_do_not_depend_on_the_machine() -> None:
    values = np.array(Generator(0).normal((4096, 64)))

    digest = hashlib.sha256(values.tobytes()).hexdigest()
    assert digest == "dce02e02da56c18c29a262a316bf45fbfe564688cdb52f255f223aefdadfa3d5"


def test_successive_draws_keep_the_second_of_two_normals() -> None:
    ours, theirs = Generator(7), torch_generator(7)

    for n, dtype in enumerate(DTYPES * 6):
        shape = ((1,), (17,), (3,), (2, 16), (15,), (5, 5), (0,), (1,))[n % 8]
        expected = torch.randn(shape, generator=theirs, dtype=getattr(torch, dtype))
        assert_normals_equal(ours.normal(shape, dtype), expected)
        uniform = torch.rand((3,), generator=theirs, dtype=getattr(torch, dtype))
        assert_equal(ours.uniform((3,), dtype), uniform)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniforms_are_those_of_torch_and_never_one(dtype: str) -> None:
    ours = Generator(3).uniform((40, 1000), dtype)
    theirs = torch.rand((40, 1000), generator=torch_generator(3), dtype=getattr(torch, dtype))

    assert_equal(ours, theirs)
    assert not mx.any(ours == 1, stream=mx.cpu).item()


@pytest.mark.parametrize("low, high", [(0, 1000), (-5, 2), (0, 2**28 - 1), (1, 2**28 + 1)])
def test_integers_are_those_of_torch(low: int, high: int) -> None:
    theirs = torch.randint(low, high, (7, 9), generator=torch_generator(5))

    assert_equal(Generator(5).integers(low, high, (7, 9)), theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_generators_one_a_sample_draw_the_batch_of_diffusers(dtype: str) -> None:
    seeds, shape = (1, 2, 3), (3, 4, 5, 5)
    theirs = randn_tensor(
        shape, generator=[torch_generator(seed) for seed in seeds], dtype=getattr(torch, dtype)
    )

    ours = mx.concatenate([Generator(seed).normal((1, *shape[1:]), dtype) for seed in seeds])

    assert_normals_equal(ours, theirs)


def test_an_image_of_noise_takes_milliseconds() -> None:
    generator, seconds = Generator(0), []
    for _ in range(5):
        began = time.perf_counter()
        generator.normal((4096, 64))
        seconds.append(time.perf_counter() - began)

    assert min(seconds) < 0.05


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_that_torch_refuses_are_refused(seed: int) -> None:
    with pytest.raises(MlxconvError, match="as torch takes"):
        Generator(seed)


def test_what_cannot_be_drawn_is_refused() -> None:
    generator = Generator(0)

    with pytest.raises(MlxconvError, match="dtype 'int8'"):
        generator.normal((2,), "int8")
    with pytest.raises(MlxconvError, match="shape"):
        generator.uniform((2, -1))
    with pytest.raises(MlxconvError, match="there are none"):
        generator.integers(3, 3, (2,))
