"""Precision policy: which tensor is stored how; and `quantize`, which does it."""

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from mlxconv.runtime.dtypes import BY_NAME, SHORT_NAMES
from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.exec.weights import Quantization
from mlxconv.runtime.program.program import Parameter

from ..source.floats import KINDS
from .affine import AFFINE_BITS, METHODS, quantize_affine
from .mx_formats import MX_FORMATS, quantize_mx
from .rounding import dequantize

AFFINE_GROUPS = (128, 64, 32)
DEFAULT_GROUP = 64
MODULATION_BITS = 8
NVFP4_MAX_ERROR = 0.12


# ------------------------------------------------------------------------------------- precision


@dataclass(frozen=True)
class Precision:
    """How one tensor is stored.

    dtype: of an unquantized tensor, and of affine scales and biases ("float32", "bfloat16", ...).
    mode: None (not quantized), "affine", "mxfp4", "mxfp8" or "nvfp4".
    bits, group_size: of the codes; weights of one group share a scale. None when not quantized.
    """

    dtype: str
    mode: str | None = None
    bits: int | None = None
    group_size: int | None = None

    @property
    def quantized(self) -> bool:
        return self.mode is not None

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per weight, scales and biases included."""
        if self.bits is None or self.group_size is None:
            return 32.0 if self.dtype in ("float32", "int32", "uint32") else 16.0
        if self.mode != "affine":
            return self.bits + 8 / self.group_size
        return self.bits + 2 * (32 if self.dtype == "float32" else 16) / self.group_size

    def __str__(self) -> str:
        if self.mode is None:
            return self.dtype
        name = f"{self.bits}bit" if self.mode == "affine" else self.mode
        return f"{name} g{self.group_size}"


def affine(bits: int, group_size: int = DEFAULT_GROUP, dtype: str = "bfloat16") -> Precision:
    """Affine precision: `bits` a weight, one scale and one bias in `dtype` a group."""
    return Precision(dtype, "affine", bits, group_size)


def precision_names() -> list[str]:
    """The canonical names `parse_precision` takes, most precise first."""
    bits = [f"{b}bit" for b in sorted(AFFINE_BITS, reverse=True)]
    return ["fp32", "bf16", "fp16", *bits, "mxfp8", "mxfp4", "nvfp4"]


def parse_precision(text: str, group_size: int | None = None) -> Precision:
    """Read a precision as the CLI's `--q` writes it: "bf16", "4bit", "int4", "q4", "nvfp4", ...

    Raises MlxconvError for an unknown name, and for a group size that the precision cannot take.
    """
    name = text.strip().lower()
    if (name := SHORT_NAMES.get(name, name)) in SHORT_NAMES.values():
        _refuse_group(text, group_size, None)
        return Precision(name)
    if name in MX_FORMATS:
        bits, group = MX_FORMATS[name]
        _refuse_group(text, group_size, group)
        return Precision("bfloat16", name, bits, group)
    match = re.fullmatch(r"(?:int|q)?(\d+)(?:-?bits?)?", name)
    if match is None or int(match[1]) not in AFFINE_BITS:
        known = ", ".join(precision_names())
        raise ArgumentError(
            f"unknown precision {text!r}: expected one of {known} (int8, int4, ... are 8bit, 4bit, "
            "...), or for --q a policy FILE.toml"
        )
    group = DEFAULT_GROUP if group_size is None else group_size
    if group not in AFFINE_GROUPS:
        raise ArgumentError(f"group size {group} is not supported: {text} takes 32, 64 or 128")
    return affine(int(match[1]), group)


def _refuse_group(text: str, asked: int | None, fixed: int | None) -> None:
    if asked is not None and asked != fixed:
        has = "has no groups" if fixed is None else f"has a fixed group size of {fixed}"
        raise ArgumentError(
            f"{text} {has}: drop --group-size {asked}, or choose an affine precision"
        )


def layout(shape: Sequence[int], precision: Precision) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shapes and safetensors dtypes of a stored (out, in) weight, known before it is read.

    The keys are the last name component in the file: "weight", and when quantized "scales" and
    (affine only) "biases".
    """
    if precision.bits is None or precision.group_size is None:
        return {"weight": (tuple(shape), BY_NAME[precision.dtype].code)}
    rows, width = shape
    scales = (rows, width // precision.group_size)
    parts: dict[str, tuple[tuple[int, ...], str]] = {
        "weight": ((rows, width * precision.bits // 32), "U32")
    }
    if precision.mode != "affine":
        return parts | {"scales": (scales, "U8")}
    code = BY_NAME[precision.dtype].code
    return parts | {"scales": (scales, code), "biases": (scales, code)}


# ---------------------------------------------------------------------------------------- policy


@dataclass(frozen=True)
class Decision:
    """How a parameter is stored. `why` is None when it got what was asked, else a short reason."""

    name: str
    precision: Precision
    why: str | None = None


@dataclass(frozen=True)
class Policy:
    """Precision of each parameter. The first rule that speaks wins, in this order:

    overrides (`--set`), keep (`--keep`), recipe_keep, modulation (8 bit below 8 bit), default.
    Patterns are anchored globs on module names, see `matches`.
    """

    default: Precision
    keep: Sequence[str] = ()
    recipe_keep: Sequence[str] = ()
    modulation: Sequence[str] = ()
    overrides: Sequence[tuple[str, Precision]] = ()
    file_keep: Sequence[str] = ()  # of the policy file `file`
    file: str = ""

    def decide(self, name: str, parameter: Parameter) -> Decision:
        if parameter.dtype != "compute":
            same = parameter.dtype == self.default.dtype
            why = None if same else f"the model keeps it in {parameter.dtype}"
            return Decision(name, Precision(parameter.dtype), why)
        asked, why = self._asked(name.removesuffix(".weight"))
        if not asked.quantized:
            return Decision(name, asked, why)
        if parameter.kind != "linear" or len(parameter.shape) != 2:
            return Decision(name, Precision(asked.dtype), "not a linear weight")
        fitted, unfit = fit_group(asked, parameter.shape[-1])
        return Decision(name, fitted, "; ".join(filter(None, (why, unfit))) or None)

    def _asked(self, module: str) -> tuple[Precision, str | None]:
        kept = Precision(self.default.dtype)
        for pattern, precision in self.overrides:
            if matches(pattern, module):
                kept_by = self.default.quantized and _first_match(self.recipe_keep, module)
                why = f"set by {pattern}, which overrides the recipe's keep {kept_by}"
                return precision, why if kept_by else None
        if self.default.quantized:
            if user := _first_match(self.keep, module):
                return kept, f"--keep {user}"
            if listed := _first_match(self.file_keep, module):
                return kept, f"{self.file} keeps {listed}"
            if recipe := _first_match(self.recipe_keep, module):
                return kept, f"recipe keeps {recipe}"
            if (self.default.bits or 0) < MODULATION_BITS and _first_match(self.modulation, module):
                return _modulation_precision(self.default), f"modulation at {MODULATION_BITS} bit"
        return self.default, None


def _modulation_precision(default: Precision) -> Precision:
    """adaLN at 4 bit is what breaks Qwen-Image at 4 bit; at 8 bit it costs little."""
    group = default.group_size if default.mode == "affine" else None
    return affine(MODULATION_BITS, group or DEFAULT_GROUP, default.dtype)


def fit_group(precision: Precision, width: int) -> tuple[Precision, str | None]:
    """The precision with the largest group, at most the one asked, that divides `width`.

    When none does, the unquantized precision. The second value says so, and is None when the group
    asked for divides.
    """
    asked = precision.group_size
    if asked is None or width % asked == 0:
        return precision, None
    groups = [asked]
    if precision.mode == "affine":
        groups = [group for group in AFFINE_GROUPS if group <= asked]
    for group in groups:
        if width % group == 0:
            why = f"group {group}: width {width} is not divisible by {asked}"
            return replace(precision, group_size=group), why
    tried = ", ".join(map(str, groups))
    fails = (
        f"is divisible by none of {tried}" if len(groups) > 1 else f"is not divisible by {tried}"
    )
    return Precision(precision.dtype), f"width {width} {fails}"


@lru_cache(maxsize=65536)
def matches(pattern: str, module: str) -> bool:
    """Whether an anchored glob matches a whole module name.

    `*`, `?` and `[..]` match within one dotted component, `**` matches any number of components
    (also none). So `proj_out` does not match `single_transformer_blocks.3.proj_out`.
    """
    return _match_parts(tuple(pattern.split(".")), tuple(module.split(".")))


def _match_parts(pattern: tuple[str, ...], parts: tuple[str, ...]) -> bool:
    if not pattern:
        return not parts
    head, rest = pattern[0], pattern[1:]
    if head == "**":
        return any(_match_parts(rest, parts[skip:]) for skip in range(len(parts) + 1))
    return bool(parts) and fnmatchcase(parts[0], head) and _match_parts(rest, parts[1:])


def _first_match(patterns: Iterable[str], module: str) -> str | None:
    return next((pattern for pattern in patterns if matches(pattern, module)), None)


def check_patterns(patterns: Iterable[str], modules: Iterable[str]) -> None:
    """Raise MlxconvError when a pattern matches no module, naming the closest modules."""
    names = list(modules)
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise MlxconvError(f"pattern {pattern!r} matches no module{_closest(pattern, names)}")


def _closest(pattern: str, names: list[str]) -> str:
    known = set(names)
    names = [name for name in names if name.rpartition(".")[0] not in known]  # modules alone
    inside = [name for name in names if matches(f"**.{pattern}", name)]
    close = inside[:3] or difflib.get_close_matches(pattern, names, n=3, cutoff=0.4)
    hint = "; patterns match the whole name: `**.` before it reaches into blocks"
    return (f": did you mean {', '.join(close)}?" if close else "") + (hint if inside else "")


@dataclass(frozen=True)
class PolicyFile:
    """What a `--q FILE.toml` says: see `load_policy_file`."""

    default: Precision
    overrides: tuple[tuple[str, Precision], ...] = ()
    keep: tuple[str, ...] = ()


def load_policy_file(path: Path) -> PolicyFile:
    """Read a precision policy: `default = "4bit"`, `group_size = 64`, `keep = ["pattern"]`, and
    a table `[set]` of `"pattern" = "8bit"`.

    Raises MlxconvError, naming the file and the key, when it cannot be read as one.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise MlxconvError(f"{path}: cannot read the precision policy: {error}") from error
    if unknown := sorted(table.keys() - {"default", "group_size", "keep", "set"}):
        raise MlxconvError(
            f"{path}: unknown key {unknown[0]!r}: expected default, group_size, keep or [set]"
        )
    group = _entry(path, table, "group_size", int, None)
    keep = _entry(path, table, "keep", list, [])
    if bad := [pattern for pattern in keep if not isinstance(pattern, str)]:
        raise MlxconvError(f"{path}: key 'keep': expected patterns, found {bad[0]!r}")
    chosen = _entry(path, table, "set", dict, {})
    return PolicyFile(
        _file_precision(path, "default", _entry(path, table, "default", str, "bf16"), group),
        tuple((name, _file_precision(path, f"set.{name}", chosen[name])) for name in chosen),
        tuple(keep),
    )


def _entry(path: Path, table: dict[str, Any], key: str, kind: type, default: Any) -> Any:
    value = table.get(key, default)
    if value is not default and not isinstance(value, kind):
        raise MlxconvError(f"{path}: key {key!r}: expected {kind.__name__}, found {value!r}")
    return value


def _file_precision(path: Path, key: str, text: object, group: int | None = None) -> Precision:
    if not isinstance(text, str):
        raise MlxconvError(f'{path}: key {key!r}: expected a precision like "8bit", found {text!r}')
    try:
        return parse_precision(text, group)
    except MlxconvError as error:
        raise MlxconvError(f"{path}: key {key!r}: {error}") from error


# ------------------------------------------------------------------------------------- quantize


@dataclass(frozen=True)
class Quantized:
    """A quantized (out, in) matrix in MLX's layout.

    weight: uint32 (out, in * bits / 32), codes as an LSB-first bit stream per row.
    scales: (out, in / group_size); biases: the same for affine, None for mx formats.
    """

    weight: mx.array
    scales: mx.array
    biases: mx.array | None
    precision: Precision

    def tensors(self) -> dict[str, mx.array]:
        """The parts under the names of `layout`, in its order."""
        parts = {"weight": self.weight, "scales": self.scales}
        return parts if self.biases is None else parts | {"biases": self.biases}

    def dequantized(self) -> mx.array:
        """The (out, in) matrix in float32, computed in float32."""
        group, bits = self.precision.group_size or 0, self.precision.bits or 0
        spec = Quantization(group, bits, self.precision.mode or "affine")
        return dequantize((self.weight, self.scales, self.biases), spec)


def quantize(weight: mx.array, precision: Precision, method: str = "refit") -> Quantized:
    """Quantize a float (out, in) matrix; `in` must be divisible by the group size.

    method (affine only; mx formats are always rounded to nearest):
    "rtn": bit-identical to `mx.quantize` of the weight cast to `precision.dtype`.
    "refit": codes are derived against the scale and bias *as stored*, and scale and bias are
    fitted to the codes by least squares; per group the candidate with the least squared error
    against `weight` is kept, so no group is worse than with "rtn".
    "search": the same with more iterations, and from a clipped range too.

    Needs about 10 MB beyond the result, for a matrix of any size.
    A group with NaN or infinity gets a scale of NaN or infinity: it stays visible.
    """
    _check_quantizable(weight.shape, precision, method)
    parts = [_zeros(*spec) for spec in layout(weight.shape, precision).values()]
    codes, *fits = (_view(part) for part in parts)
    codes, done = codes.reshape(-1, _words(precision)), 0
    for block in _blocks([_view(weight)], [fit.reshape(-1) for fit in fits], precision, method):
        codes[done : done + len(block)] = block
        done += len(block)
    if precision.mode != "affine":
        return Quantized(parts[0], parts[1], None, precision)
    scales, biases = (part.view(BY_NAME[precision.dtype].mlx) for part in parts[1:])
    return Quantized(parts[0], scales, biases, precision)


def quantize_stream(
    shape: tuple[int, ...],
    dtype: str,
    chunks: Iterable[bytes | memoryview],
    precision: Precision,
    method: str = "refit",
) -> Iterator[Iterable[memoryview]]:
    """The same, of a matrix that arrives as its row-major little-endian bytes in chunks.

    dtype: "BF16", "F16" or "F32". Gives the bytes of each part of `layout`, in its order. The codes
    come in blocks, as their chunks are taken, each valid until the next; the other parts are known
    when the codes are exhausted. So no matrix is in memory, and its CPU time is not spent on fresh
    pages. Chunks may share a buffer. Raises MlxconvError when the bytes are not those of the shape.
    """
    _check_quantizable(shape, precision, method)
    if dtype not in KINDS:
        known = ", ".join(KINDS)
        raise MlxconvError(f"cannot quantize a stream of {dtype}: expected one of {known}")
    kind = np.dtype(KINDS[dtype])
    unit = kind.itemsize * (precision.group_size or 1)
    total = math.prod(shape) * kind.itemsize
    pieces = (np.frombuffer(chunk, kind) for chunk in _whole_groups(chunks, unit, total))
    _, *specs = layout(shape, precision).values()
    fits = [np.empty(math.prod(size), _KINDS[code]) for size, code in specs]
    yield (_bytes(block) for block in _blocks(pieces, fits, precision, method))
    yield from ([_bytes(fit)] for fit in fits)


# Arrays that hold the bytes of a safetensors dtype; numpy has no bfloat16.
_KINDS = {"U32": "<u4", "U8": "u1", "F32": "<f4", "BF16": "<u2", "F16": "<u2"}


def _bytes(array: NDArray[Any]) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _words(precision: Precision) -> int:
    """uint32 words of codes a group."""
    return (precision.group_size or 0) * (precision.bits or 0) // 32


def _blocks(
    pieces: Iterable[NDArray[Any]], fits: list[NDArray[Any]], precision: Precision, method: str
) -> Iterator[NDArray[Any]]:
    """Codes (groups, words) block by block; scales (and biases) go into `fits`, one a group."""
    if precision.mode != "affine":
        return quantize_mx(pieces, fits[0], precision.mode or "")
    return quantize_affine(
        pieces,
        *fits,
        bits=precision.bits or 0,
        group=precision.group_size or 0,
        dtype=precision.dtype,
        method=method,
    )


def _whole_groups(chunks: Iterable[bytes | memoryview], unit: int, total: int) -> Iterator[Any]:
    """The same bytes, cut at multiples of `unit`; MlxconvError when they are not `total`."""
    given, rest = 0, b""
    for chunk in chunks:
        view = memoryview(rest + bytes(chunk) if rest else chunk)
        given += len(chunk)
        cut = len(view) - len(view) % unit
        rest = bytes(view[cut:])
        if given > total:
            break
        yield view[:cut]
    if given != total:
        raise MlxconvError(f"expected {total} bytes of a weight to quantize, found {given}")


def _check_quantizable(shape: Sequence[int], precision: Precision, method: str) -> None:
    if precision.bits is None or precision.group_size is None:
        raise MlxconvError(f"cannot quantize to {precision}: it is not a quantized precision")
    if len(shape) != 2 or shape[1] % precision.group_size:
        raise MlxconvError(
            f"cannot quantize a weight of shape {tuple(shape)} to {precision}: expected "
            f"(out, in) with `in` divisible by {precision.group_size}"
        )
    if method not in METHODS:
        raise MlxconvError(f"unknown method {method!r}: expected one of {', '.join(METHODS)}")


def relative_error(quantized: Quantized, weight: mx.array) -> float:
    """||dequantized - weight|| / ||weight||, 0 for a weight of zeros."""
    exact = np.asarray(weight.astype(mx.float32))
    size = float(np.linalg.norm(exact))
    return (
        float(np.linalg.norm(np.asarray(quantized.dequantized()) - exact)) / size if size else 0.0
    )


def guard_flush(weight: mx.array, precision: Precision) -> tuple[Precision, str | None]:
    """Replace nvfp4 where it would flush a small weight to zero; say so in the second value.

    nvfp4 has an E4M3 scale per 16 weights and MLX's products take no global scale, so groups below
    about 0.006 lose their scale: error 100 % at a weight std of 0.001. Call it before the layout of
    the file is fixed; it measures the round trip of at most 64 rows spread over the (out, in)
    `weight`. The fallback is affine 4 bit (as many bytes); other precisions return unchanged.
    """
    if precision.mode != "nvfp4":
        return precision, None
    rows = np.unique(np.linspace(0, weight.shape[0] - 1, 64).astype(np.int32))
    sample = weight[mx.array(rows)]
    error = relative_error(quantize(sample, precision), sample)
    if error <= NVFP4_MAX_ERROR:
        return precision, None
    fitted, why = fit_group(affine(4, dtype=precision.dtype), weight.shape[1])
    return fitted, "; ".join(filter(None, (f"nvfp4 would flush: error {error:.2f}", why)))


def _zeros(shape: tuple[int, ...], code: str) -> mx.array:
    kinds = {"U32": mx.uint32, "U8": mx.uint8, "F32": mx.float32}
    array = mx.zeros(shape, kinds.get(code, mx.uint16))
    mx.eval(array)
    return array


def _view(array: mx.array) -> NDArray[Any]:
    """The evaluated array's own memory, writable; bfloat16 as its uint16 bits."""
    bits = array.view(mx.uint16) if array.dtype == mx.bfloat16 else array
    mx.eval(bits)
    return np.array(bits, copy=False)
