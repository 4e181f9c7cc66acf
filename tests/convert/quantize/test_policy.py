"""Who gets which precision and why; and codes, scales and biases against `mx.quantize`."""

import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxconv.convert.quantize.policy import (
    AFFINE_BITS,
    Policy,
    Precision,
    Quantized,
    affine,
    check_patterns,
    fit_group,
    guard_flush,
    layout,
    load_policy_file,
    matches,
    parse_precision,
    quantize,
    quantize_stream,
    relative_error,
)
from mlxconv.convert.store.writer import array_bytes
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.program.program import Parameter

DTYPES = ("bfloat16", "float16", "float32")


def gaussian(rows: int, width: int, std: float = 0.02, dtype: str = "bfloat16") -> mx.array:
    weight = mx.random.normal((rows, width), key=mx.random.key(0)) * std
    return weight.astype(getattr(mx, dtype))


def bits_of(array: mx.array | None) -> list[list[int]]:
    assert array is not None
    return array.view(mx.uint8).tolist()  # type: ignore[return-value]


def assert_equals_mlx(result: Quantized, weight: mx.array) -> None:
    precision = result.precision
    cast = weight.astype(getattr(mx, precision.dtype))
    expected = mx.quantize(
        cast, precision.group_size, precision.bits, precision.mode or "", stream=mx.cpu
    )
    for ours, theirs in zip(result.tensors().values(), expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert bits_of(ours) == bits_of(theirs)


# ------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bf16", Precision("bfloat16")),
        ("fp32", Precision("float32")),
        ("fp16", Precision("float16")),
        ("mxfp4", Precision("bfloat16", "mxfp4", 4, 32)),
        ("nvfp4", Precision("bfloat16", "nvfp4", 4, 16)),
        *[(text, affine(4)) for text in ("4bit", "4-bit", "int4", "q4", "Q4", "4", "4bits")],
    ],
)
def test_names_and_aliases(text: str, expected: Precision) -> None:
    assert parse_precision(text) == expected


@pytest.mark.parametrize("text", ["7bit", "1bit", "", "fp8", "q", "4bit64"])
def test_an_unknown_precision_lists_what_exists(text: str) -> None:
    with pytest.raises(MlxconvError, match="8bit, 6bit, 5bit, 4bit, 3bit, 2bit, mxfp8"):
        parse_precision(text)


def test_group_sizes_that_a_precision_cannot_take_are_errors() -> None:
    assert parse_precision("8bit", 32).group_size == 32
    assert parse_precision("mxfp8", 32).group_size == 32
    for text, group in (("4bit", 48), ("nvfp4", 32), ("bf16", 64)):
        with pytest.raises(MlxconvError, match="group"):
            parse_precision(text, group)


def test_bits_per_weight_count_scales_and_biases() -> None:
    assert affine(4).bits_per_weight == 4.5
    assert affine(8, 32).bits_per_weight == 9.0
    assert affine(4, dtype="float32").bits_per_weight == 5.0
    assert parse_precision("nvfp4").bits_per_weight == 4.5
    assert parse_precision("mxfp8").bits_per_weight == 8.25
    assert parse_precision("fp32").bits_per_weight == 32


# ---------------------------------------------------------------------------------------- policy


@pytest.mark.parametrize(
    ("pattern", "module", "expected"),
    [
        ("proj_out", "proj_out", True),
        ("proj_out", "single_transformer_blocks.3.proj_out", False),
        ("**.proj_out", "single_transformer_blocks.3.proj_out", True),
        ("**.proj_out", "proj_out", True),
        ("blocks.*.attn", "blocks.12.attn", True),
        ("blocks.*", "blocks.12.attn", False),
        ("blocks.**", "blocks.12.attn", True),
        ("blocks.[01].attn.to_?", "blocks.1.attn.to_q", True),
        ("blocks.[01].attn.to_?", "blocks.2.attn.to_q", False),
        ("time_*.**.linear_1", "time_text_embed.guidance_embedder.linear_1", True),
        ("Proj_out", "proj_out", False),
    ],
)
def test_patterns_are_anchored_globs(pattern: str, module: str, expected: bool) -> None:
    assert matches(pattern, module) is expected


def test_a_pattern_that_matches_nothing_names_close_modules() -> None:
    modules = ["proj_out", "blocks.0.proj_mlp", "blocks.1.proj_mlp"]
    check_patterns(["proj_out", "blocks.*.proj_mlp"], modules)
    with pytest.raises(MlxconvError, match=r"'prj_out' matches no module: did you mean proj_out"):
        check_patterns(["prj_out"], modules)
    with pytest.raises(MlxconvError, match=r"blocks.0.proj_mlp, .*patterns match the whole name"):
        check_patterns(["proj_mlp"], modules)


def linear(name: str = "blocks.0.to_q.weight", width: int = 128) -> tuple[str, Parameter]:
    return name, Parameter((64, width), "compute", "linear")


def test_user_overrides_beat_keep_beats_the_recipe_beats_modulation_beats_the_default() -> None:
    policy = Policy(
        default=affine(4),
        overrides=[("a", affine(6))],
        keep=["a", "b"],
        recipe_keep=["a", "b", "c"],
        modulation=["?"],
    )
    expected = {
        "a": (affine(6), "set by a, which overrides the recipe's keep a"),
        "b": (Precision("bfloat16"), "--keep b"),
        "c": (Precision("bfloat16"), "recipe keeps c"),
        "d": (affine(8), "modulation at 8 bit"),
        "blocks.0": (affine(4), None),
    }
    for module, (precision, why) in expected.items():
        decision = policy.decide(*linear(f"{module}.weight"))
        assert (decision.name, decision.precision, decision.why) == (
            f"{module}.weight",
            precision,
            why,
        )


def test_whose_rule_it_was_is_said() -> None:
    name, parameter = linear()
    module = name.removesuffix(".weight")
    kept = Policy(affine(4), recipe_keep=[module], overrides=[(module, affine(6))])
    decision = kept.decide(name, parameter)
    assert decision.precision == affine(6)
    assert decision.why == f"set by {module}, which overrides the recipe's keep {module}"
    of_file = Policy(affine(4), file_keep=[module], file="mine.toml").decide(name, parameter)
    assert of_file.why == f"mine.toml keeps {module}"


def test_close_modules_are_no_parameters() -> None:
    with pytest.raises(MlxconvError, match=r"did you mean norm_out\.linear\?"):
        check_patterns(["norm_out.linea"], ["norm_out.linear", "norm_out.linear.bias"])


@pytest.mark.parametrize("default", ["8bit", "bf16"])
def test_modulation_is_not_raised_above_what_it_gets_anyway(default: str) -> None:
    precision = parse_precision(default)
    decision = Policy(precision, modulation=["**"]).decide(*linear())
    assert (decision.precision, decision.why) == (precision, None)


def test_modulation_is_affine_8_bit_under_an_mx_default() -> None:
    decision = Policy(parse_precision("nvfp4"), modulation=["**"]).decide(*linear())
    assert decision.precision == affine(8)


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("embed.weight", (100, 64), "embedding"),
        ("conv.weight", (8, 8, 3, 3), "conv"),
        ("blocks.0.to_q.bias", (64,), "other"),
        ("experts.weight", (4, 64, 64), "linear"),
    ],
)
def test_what_is_not_a_linear_weight_is_kept_and_says_so(
    name: str, shape: tuple[int, ...], kind: str
) -> None:
    parameter = Parameter(shape, "compute", kind)
    decision = Policy(affine(4)).decide(name, parameter)
    assert (decision.precision, decision.why) == (Precision("bfloat16"), "not a linear weight")
    assert Policy(Precision("float16")).decide(name, parameter).why is None


def test_a_fixed_dtype_is_kept_and_says_so() -> None:
    decision = Policy(affine(4)).decide("table", Parameter((8, 2), "float32", "other"))
    assert (decision.precision, decision.why) == (
        Precision("float32"),
        "the model keeps it in float32",
    )


def test_the_group_falls_back_and_says_so() -> None:
    def fitted(width: int, group: int) -> tuple[int | None, str | None]:
        decision = Policy(affine(4, group)).decide(*linear(width=width))
        return decision.precision.group_size, decision.why

    assert fitted(256, 128) == (128, None)
    assert fitted(192, 128) == (64, "group 64: width 192 is not divisible by 128")
    assert fitted(96, 64) == (32, "group 32: width 96 is not divisible by 64")
    assert fitted(1365, 128) == (None, "width 1365 is divisible by none of 128, 64, 32")
    assert fitted(48, 32) == (None, "width 48 is not divisible by 32")
    assert fit_group(parse_precision("nvfp4"), 24)[0] == Precision("bfloat16")


def test_a_policy_file(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        'default = "4bit"\ngroup_size = 32\nkeep = ["proj_out"]\n[set]\n"blocks.0.**" = "8bit"\n'
    )
    policy = load_policy_file(path)
    assert policy.default == affine(4, 32)
    assert policy.keep == ("proj_out",)
    assert policy.overrides == (("blocks.0.**", affine(8)),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('default = "7bit"', "key 'default': unknown precision '7bit'"),
        ("default = 4", "key 'default': expected str, found 4"),
        ('[set]\n"a.b" = 8', "key 'set.a.b': expected a precision"),
        ('keep = "proj_out"', "key 'keep': expected list"),
        ("keep = [1]", "key 'keep': expected patterns, found 1"),
        ("bits = 4", "unknown key 'bits'"),
        ("default =", "cannot read the precision policy"),
    ],
)
def test_errors_in_a_policy_file_name_the_file_and_the_key(
    tmp_path: Path, text: str, message: str
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(MlxconvError) as caught:
        load_policy_file(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


# -------------------------------------------------------------------------------------- quantize


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", DTYPES)
def test_rtn_is_bit_identical_to_mlx(bits: int, group: int, dtype: str, source: str) -> None:
    weight = gaussian(5, 384, dtype=source)
    assert_equals_mlx(quantize(weight, affine(bits, group, dtype), "rtn"), weight)


@pytest.mark.parametrize(("rows", "width"), [(1, 32), (1, 128), (3, 96), (1037, 288)])
def test_odd_shapes_and_a_short_last_block(rows: int, width: int) -> None:
    weight = gaussian(rows, width)
    assert_equals_mlx(quantize(weight, affine(3, 32), "rtn"), weight)


def test_a_transposed_weight_is_read_in_its_own_order() -> None:
    weight = gaussian(128, 6).T
    assert_equals_mlx(quantize(weight, affine(4), "rtn"), weight)


@pytest.mark.parametrize("size", [1000, 4096, 1 << 20])
@pytest.mark.parametrize("q", ["4bit", "5bit", "mxfp8"])
@pytest.mark.parametrize(("dtype", "code"), [("bfloat16", "BF16"), ("float32", "F32")])
def test_a_stream_of_bytes_gives_the_same_whatever_its_chunks(
    size: int, q: str, dtype: str, code: str
) -> None:
    weight, precision = gaussian(70, 192, dtype=dtype), parse_precision(q)
    streamed = quantize_stream((70, 192), code, reused(bytes(array_bytes(weight)), size), precision)
    expected = quantize(weight, precision).tensors().values()
    for part, array in zip(streamed, expected, strict=True):
        assert b"".join(map(bytes, part)) == bytes(array_bytes(array))


def reused(data: bytes, size: int) -> Iterator[memoryview]:
    """The data in chunks of one buffer, as files are read."""
    buffer = bytearray(size)
    for start in range(0, len(data), size):
        chunk = data[start : start + size]
        buffer[: len(chunk)] = chunk
        yield memoryview(buffer)[: len(chunk)]


@pytest.mark.parametrize("count", [0, 1, 63, 65])
def test_a_stream_of_the_wrong_length_is_an_error(count: int) -> None:
    with pytest.raises(MlxconvError, match=f"expected 256 bytes .* found {4 * count}"):
        consume(quantize_stream((1, 64), "F32", [b"1234"] * count, affine(4)))
    with pytest.raises(MlxconvError, match="stream of F8_E4M3"):
        consume(quantize_stream((1, 64), "F8_E4M3", [bytes(64)], affine(4)))


def consume(parts: Iterable[Iterable[memoryview]]) -> None:
    for part in parts:
        for _ in part:
            pass


@pytest.mark.parametrize("method", ["rtn", "refit", "search"])
def test_the_stored_parts_have_the_layout_that_was_announced(method: str) -> None:
    for precision in (affine(6), affine(8, 32, "float32"), affine(3, 128, "float16")):
        parts = quantize(gaussian(4, 256), precision, method).tensors()
        assert {name: array.shape for name, array in parts.items()} == {
            name: shape for name, (shape, _) in layout((4, 256), precision).items()
        }
        assert parts["scales"].dtype == getattr(mx, precision.dtype)


def group_errors(result: Quantized, weight: mx.array) -> np.ndarray:
    exact = np.array(weight.astype(mx.float32), dtype=np.float64)
    error = (np.array(result.dequantized(), dtype=np.float64) - exact) ** 2
    return error.reshape(-1, result.precision.group_size or 0).sum(1)


@pytest.mark.parametrize("bits", AFFINE_BITS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("source", ["bfloat16", "float32"])
def test_refit_is_worse_than_rtn_in_no_group(bits: int, dtype: str, source: str) -> None:
    weight, precision = gaussian(64, 256, dtype=source), affine(bits, dtype=dtype)
    rtn, refit, search = (
        group_errors(quantize(weight, precision, method), weight)
        for method in ("rtn", "refit", "search")
    )
    # Sums in float32 decide between candidates that are as good as equal.
    assert (refit <= rtn * (1 + 1e-3)).all()
    assert (search <= rtn * (1 + 1e-3)).all()
    assert search.sum() <= refit.sum() * (1 + 1e-5)


@pytest.mark.parametrize(("bits", "spread"), [*((bits, 1e-3) for bits in AFFINE_BITS), (8, 1e-4)])
def test_refit_is_no_worse_where_all_weights_are_nearly_one(bits: int, spread: float) -> None:
    weight = 1 + gaussian(64, 256, spread, "float32")
    rtn, refit = (
        group_errors(quantize(weight, affine(bits, dtype="float32"), method), weight)
        for method in ("rtn", "refit")
    )
    assert (refit <= rtn * (1 + 1e-3)).all()


@pytest.mark.parametrize(
    ("bits", "refit_db", "search_db"),
    [(8, 2.0, 2.0), (6, 0.2, 0.3), (5, 0.15, 0.4), (4, 0.2, 0.5), (3, 0.3, 0.8), (2, 0.6, 1.1)],
)
def test_gain_over_rtn_on_gaussian_weights(bits: int, refit_db: float, search_db: float) -> None:
    weight = gaussian(128, 1024)
    rtn, refit, search = (
        relative_error(quantize(weight, affine(bits), method), weight)
        for method in ("rtn", "refit", "search")
    )
    assert 20 * np.log10(rtn / refit) >= refit_db
    assert 20 * np.log10(rtn / search) >= search_db


@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_packed_codes_survive_dequantization_exactly(bits: int) -> None:
    """With scale 1 and bias 0 the dequantized values are the codes themselves."""
    codes = np.tile(np.arange(2**bits), 128)[: 32 * 32].reshape(4, -1).astype(np.float32)
    codes.reshape(-1, 32)[:, 0], codes.reshape(-1, 32)[:, -1] = 0, 2**bits - 1
    for method in ("rtn", "refit"):
        result = quantize(mx.array(codes), affine(bits, 32), method)
        assert result.dequantized().tolist() == codes.tolist()


@pytest.mark.parametrize("method", ["rtn", "refit", "search"])
@pytest.mark.parametrize("bits", AFFINE_BITS)
def test_zeros_stay_zeros_and_constants_stay_constant(bits: int, method: str) -> None:
    weight = mx.concatenate([mx.zeros((1, 128)), mx.full((1, 128), 0.5)]).astype(mx.bfloat16)
    result = quantize(weight, affine(bits), method).dequantized()
    assert result.tolist() == weight.tolist()


@pytest.mark.parametrize("method", ["rtn", "refit", "search"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_group_with_nan_or_infinity_stays_visible_and_alone(method: str, bad: float) -> None:
    weight = gaussian(2, 128)
    clean = quantize(weight, affine(4), method).dequantized()
    weight[1, 70] = bad
    result = quantize(weight, affine(4), method).dequantized()
    assert not mx.isfinite(result[1, 64:]).any()
    assert result[0].tolist() == clean[0].tolist()
    assert result[1, :64].tolist() == clean[1, :64].tolist()


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("std", [1e-30, 1e-5, 0.02, 1.0, 1e4, 1e30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_mx_formats_are_bit_identical_to_mlx(mode: str, std: float, dtype: str) -> None:
    weight = gaussian(70, 192, std, dtype)
    assert_equals_mlx(quantize(weight, parse_precision(mode)), weight)


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
def test_mx_formats_equal_mlx_for_every_bfloat16_beside_many_others(mode: str) -> None:
    """Every value, both signs, in groups whose largest is 1 to 2**15 times as large, or smaller."""
    values = np.arange(1 << 15, dtype=np.uint16)[: 0x7F80 // 32 * 32].reshape(-1, 32)
    larger = np.minimum(values + (np.arange(len(values))[:, None] % 16 << 7), 0x7F7F)
    weight = values ^ (np.arange(32, dtype=np.uint16) % 2 << 15)
    weight[:, 31], weight[:, 13] = larger[:, 31], larger[:, 0]
    bits = mx.array(np.concatenate([weight, values]).astype(np.uint16))
    assert_equals_mlx(
        quantize(bits.view(mx.bfloat16), parse_precision(mode)), bits.view(mx.bfloat16)
    )


@pytest.mark.parametrize("mode", ["mxfp4", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    "odd", [0.0, 1e-39, 1e-34, 3e38, float("inf"), -float("inf"), float("nan")]
)
def test_mx_formats_do_with_odd_values_what_mlx_does(mode: str, odd: float) -> None:
    weight = gaussian(4, 64)
    weight[1, 7], weight[2], weight[3, 32:] = odd, odd, -odd
    assert_equals_mlx(quantize(weight, parse_precision(mode)), weight)


def test_nvfp4_falls_back_where_it_would_flush_small_weights() -> None:
    nvfp4 = parse_precision("nvfp4")
    assert guard_flush(gaussian(100, 256), nvfp4) == (nvfp4, None)
    assert guard_flush(gaussian(100, 256, 0.001), nvfp4) == (
        affine(4),
        "nvfp4 would flush: error 1.00",
    )
    assert guard_flush(gaussian(100, 96, 0.001), nvfp4)[0] == affine(4, 32)
    assert guard_flush(mx.zeros((4, 64)), nvfp4) == (nvfp4, None)
    assert guard_flush(gaussian(100, 256, 0.001), affine(4)) == (affine(4), None)


def test_what_cannot_be_quantized_is_an_error() -> None:
    for weight, precision, method in (
        (gaussian(2, 64), Precision("bfloat16"), "rtn"),
        (gaussian(2, 48), affine(4), "rtn"),
        (gaussian(2, 64).reshape(-1), affine(4), "rtn"),
        (gaussian(2, 64), affine(4), "gptq"),
    ):
        with pytest.raises(MlxconvError):
            quantize(weight, precision, method)


MEMORY = """
import mlx.core as mx, re
from pathlib import Path
from mlxconv.runtime.program.program import Parameter
from mlxconv.convert.quantize.policy import parse_precision, quantize
def peak():
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\\s+(\\d+)", status)[1]) * 1024
weight = mx.full((21504, 3072), 0.02, mx.bfloat16)
mx.eval(weight)
quantize(weight[:64], parse_precision("{q}"))
before = peak()
result = quantize(weight, parse_precision("{q}"))
print(peak() - before - sum(part.nbytes for part in result.tensors().values()))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("q", ["4bit", "8bit"])
def test_memory_beyond_the_result_is_small_for_the_largest_matrix(q: str) -> None:
    command = [sys.executable, "-c", MEMORY.format(q=q)]
    extra = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert extra < 50_000_000
