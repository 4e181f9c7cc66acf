"""A component's weights, read lazily from its files: dense arrays and quantized matrices."""

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import MlxconvError
from ..files import is_plain, read_text
from ..headers import read_header
from ..ops import dtype_of, on_cpu
from ..program.program import CONSTANTS_FILE, Parameter

WEIGHTS_STEM = "model"
# What `mx.quantize` has: mode, group size, bits.
_QUANTIZATIONS = {
    ("mxfp4", 32, 4),
    ("mxfp8", 32, 8),
    ("nvfp4", 16, 4),
    *(("affine", group, bits) for group in (32, 64, 128) for bits in (2, 3, 4, 5, 6, 8)),
}
INDEX_FILE = f"{WEIGHTS_STEM}.safetensors.index.json"


@dataclass(frozen=True)
class Quantization:
    """How a matrix was quantized: the arguments of `mx.quantize`."""

    group_size: int
    bits: int
    mode: str = "affine"


@dataclass(frozen=True)
class QuantizedWeight:
    """A matrix (out, in) as `mx.quantize` packs it along its rows."""

    packed: mx.array
    scales: mx.array
    biases: mx.array | None
    spec: Quantization

    def arrays(self) -> list[mx.array]:
        """The arrays it is made of."""
        return [a for a in (self.packed, self.scales, self.biases) if a is not None]

    def dequantized(self, dtype: mx.Dtype) -> mx.array:
        """The dense matrix (out, in)."""
        spec = self.spec
        return mx.dequantize(
            self.packed, self.scales, self.biases, spec.group_size, spec.bits, spec.mode
        ).astype(dtype)

    def product(self, x: mx.array) -> mx.array:
        """x (..., in) times the transposed matrix -> (..., out).

        On a CPU MLX's quantized product accumulates in the activation's dtype and is slow; there
        the matrix is dequantized first, which is exact in fp32 and some fifteen times faster.
        """
        if on_cpu():
            return x @ self.dequantized(x.dtype).T
        spec = self.spec
        return mx.quantized_matmul(
            x,
            self.packed,
            self.scales,
            self.biases,
            transpose=True,
            group_size=spec.group_size,
            bits=spec.bits,
            mode=spec.mode,
        )


Held = mx.array | QuantizedWeight


def arrays_of(held: "Held | Stack") -> list[mx.array]:
    """The arrays a weight is made of."""
    return [held] if isinstance(held, mx.array) else held.arrays()


def rebuild(like: Held, arrays: Sequence[mx.array]) -> Held:
    """A weight of the same make as `like` from other arrays (as `mx.compile` passes them)."""
    if not isinstance(like, QuantizedWeight):
        return arrays[0]
    return QuantizedWeight(arrays[0], arrays[1], arrays[2] if len(arrays) > 2 else None, like.spec)


def spec_of(held: Held) -> Any:
    """What must agree for two weights to share a compiled function."""
    return held.spec if isinstance(held, QuantizedWeight) else None


def _for_products(held: Any) -> Any:
    """A matrix (out, in) that is quicker to multiply by on a CPU: its columns lie together.

    The product then reads the transposed matrix as it lies: 1.9 times as fast by MLX's own BLAS,
    1.03 times by MKL.
    """
    if not isinstance(held, mx.array) or held.ndim != 2 or held.dtype != mx.float32:
        return held
    return mx.contiguous(held.T).T if on_cpu() else held


class Stack(tuple[Any, ...]):
    """Several matrices over one input, held as one where their make agrees (`stacked`).

    Rows of a product are independent, so the stacked product equals the separate ones.
    """

    stacked: Any = None
    bounds: list[int]

    def arrays(self) -> list[mx.array]:
        """The arrays it is made of: those of the stacked matrix, or of each."""
        if self.stacked is not None:
            return arrays_of(self.stacked)
        return [a for item in self if item is not None for a in arrays_of(item)]

    @classmethod
    def of(cls, held: Iterable[Any]) -> "Stack":
        """Stack along the output axis; left separate when dtypes or quantizations differ."""
        items = tuple(held)
        makes = {(type(h), h is not None and (spec_of(h), len(arrays_of(h)))) for h in items}
        if len(makes) != 1:
            return cls(items)
        first = items[0]
        if first is None:
            return cls(items)
        if isinstance(first, QuantizedWeight):
            columns = zip(*(h.arrays() for h in items), strict=True)
            whole: Any = rebuild(first, [mx.concatenate(list(c)) for c in columns])
            rows = [h.packed.shape[0] for h in items]
        else:
            if len({h.dtype for h in items}) > 1:
                return cls(items)
            whole, rows = mx.concatenate(list(items)), [h.shape[0] for h in items]
        stack = cls((None,) * len(items))
        stack.stacked = whole
        stack.bounds = [sum(rows[: i + 1]) for i in range(len(rows) - 1)]
        return stack


class Weights:
    """Looks tensors up by name, in the dtype the program wants; keeps what it read if `resident`.

    `compute` is the precision of activations and of every weight that the program does not pin.
    """

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, Parameter],
        constants: Mapping[str, str],
        config: dict[str, Any],
        *,
        compute: mx.Dtype,
        resident: bool = True,
    ) -> None:
        self.folder = folder
        self.parameters = parameters
        self.constants = dict(constants)
        self.compute = compute
        self.config = config
        self.resident = resident
        self._files = weight_map(folder)
        self._quantization = Specs(config.get("quantization") or {}, str(folder))
        self.added: dict[str, np.ndarray[Any, Any]] = {}
        self._open: dict[str, dict[str, mx.array]] = {}
        self._held: dict[str | tuple[str, ...], Any] = {}
        self._laid_out = resident
        self.replaced: Mapping[str, mx.array] = {}  # read instead of what the files have

    def again(self, *, resident: bool) -> "Weights":
        """The same files and precision, with nothing read yet; laid out as resident weights are,
        so that products are the same to the bit."""
        other = copy(self)
        other.resident, other._open, other._held = resident, {}, {}
        other._laid_out = True
        return other

    def add(
        self,
        parameters: Mapping[str, Parameter],
        constants: Mapping[str, str],
        values: Mapping[str, np.ndarray[Any, Any]],
    ) -> None:
        """What further entries of the program read, here and in all that `again` gave."""
        self.parameters.update(parameters)
        self.constants.update(constants)
        self.added.update(values)

    def nbytes(self, names: Iterable[str]) -> int:
        """Bytes that these take as they are held; nothing is read."""
        return sum(a.nbytes for name in names for a in arrays_of(self._read(name)))

    def get(self, name: str) -> Held:
        """One tensor, dense or quantized. MlxconvError names it when it is missing."""
        if name in self._held:
            return self._held[name]  # type: ignore[no-any-return]
        held = self._read(name)
        linear = name in self.parameters and self.parameters[name].kind == "linear"
        if linear and self._laid_out:
            held = _for_products(held)
        return self._keep(name, held) if self.resident else held

    def stack(self, names: tuple[str | None, ...]) -> Stack:
        """Several tensors as one stack; the separate ones are not kept."""
        key = tuple(name or "" for name in names)
        if key in self._held:
            return self._held[key]  # type: ignore[no-any-return]
        stack = Stack.of(None if name is None else self._read(name) for name in names)
        if self._laid_out:
            stack.stacked = _for_products(stack.stacked)
        return self._keep(key, stack) if self.resident else stack

    def _keep(self, key: str | tuple[str, ...], held: Any) -> Any:
        """Hold a weight, computed: a compiled function would cast or join a lazy one each time."""
        mx.eval(arrays_of(held))
        self._held[key] = held
        return held

    def release(self) -> None:
        """Forget everything read; the next look-up reads the files again."""
        self._held.clear()
        self._open.clear()

    def resident_bytes(self) -> int:
        """Bytes of the weights held now."""
        return sum(a.nbytes for held in self._held.values() for a in arrays_of(held))

    def _read(self, name: str) -> Held:
        if name in self.constants:
            added = self.added.get(name)
            value = (
                load_constant(self.folder / CONSTANTS_FILE, name)
                if added is None
                else as_constant(added)
            )
            return value.astype(self.compute) if self.constants[name] == "compute" else value
        dtype = self.parameters[name].dtype if name in self.parameters else "compute"
        target = self.compute if dtype == "compute" else dtype_of(_stored(dtype))
        if name in self.replaced:
            return self.replaced[name].astype(target)
        module = name.removesuffix(".weight")
        scales = f"{module}.scales"
        if name.endswith(".weight") and scales in self._files:
            biases = f"{module}.biases"
            spec = self._quantization.of(module)
            held: Held = QuantizedWeight(
                self._tensor(self._file(name), name),
                self._scale(scales, spec, target),
                self._scale(biases, spec, target) if biases in self._files else None,
                spec,
            )
        else:
            held = self._tensor(self._file(name), name).astype(target)
        self._check_shape(name, held)
        return held

    def _check_shape(self, name: str, held: Held) -> None:
        """MlxconvError for a tensor that is not what the program was traced for."""
        expected = self.parameters[name].stored_shape if name in self.parameters else None
        if not isinstance(held, QuantizedWeight):
            if expected not in (None, tuple(held.shape)):
                raise self._misshapen(name, tuple(held.shape), expected)
            return
        spec, rows = held.spec, tuple(held.packed.shape[:-1])
        width = held.packed.shape[-1] * 32 // spec.bits if held.packed.ndim else 0
        if held.packed.dtype != mx.uint32 or expected not in (None, (*rows, width)):
            raise self._misshapen(name, (*rows, width), expected)
        for part in held.arrays()[1:]:
            if tuple(part.shape) != (*rows, width // spec.group_size):
                raise self._misshapen(
                    f"{name} (its scales)", part.shape, (*rows, width // spec.group_size)
                )
        if (held.biases is None) == (spec.mode == "affine"):
            raise MlxconvError(f"{self.folder}: {name}: biases belong to affine quantization")

    def _misshapen(self, name: str, found: Any, expected: Any) -> MlxconvError:
        return MlxconvError(
            f"{self._file(name.partition(' ')[0])}: {name} has shape {tuple(found)}, the program "
            f"expects {expected}; convert the component again"
        )

    def _scale(self, name: str, spec: Quantization, target: mx.Dtype) -> mx.array:
        value = self._tensor(self._file(name), name)
        return value.astype(target) if spec.mode == "affine" else value

    def _file(self, name: str) -> Path:
        if name not in self._files:
            raise MlxconvError(
                f"{self.folder}: tensor {name!r} is missing; the bundle is incomplete, "
                "copy it again or convert the component again"
            )
        return self.folder / self._files[name]

    def _tensor(self, file: Path, name: str) -> mx.array:
        """A tensor that nothing but its reader holds. One that is read again is opened again."""
        if name not in self._open.get(file.name, ()):
            self._open[file.name] = _load(file)
        if name not in self._open[file.name]:
            raise MlxconvError(f"{file}: tensor {name!r} is missing; convert the component again")
        return self._open[file.name].pop(name)


def load_constant(file: Path, name: str) -> mx.array:
    """One tensor that the program computes from the configuration alone, float64 included."""
    try:
        with safe_open(str(file), framework="numpy") as stream:
            value = stream.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise MlxconvError(
            f"{file}: constant {name!r} cannot be read ({error}); convert the component again"
        ) from error
    return as_constant(value)


def as_constant(value: np.ndarray[Any, Any]) -> mx.array:
    """As MLX holds it, float64 included."""
    return mx.array(value, dtype=mx.float64) if value.dtype == np.float64 else mx.array(value)


def _stored(dtype: str) -> str:
    return {"int64": "int32", "int16": "int32", "int8": "int32"}.get(dtype, dtype)


def check_whole(file: Path) -> None:
    """MlxconvError when a safetensors file is missing, cut short, or has no readable header.

    MLX itself notices a short file only when the tensor behind the cut is evaluated, and believes
    its shapes and offsets.
    """
    if not file.exists():
        raise MlxconvError(f"{file}: No such file; the bundle is incomplete, copy it again")
    read_header(file, "copy the bundle again")


def _load(file: Path) -> dict[str, mx.array]:
    check_whole(file)
    try:
        loaded = mx.load(str(file))
    except (RuntimeError, ValueError) as error:
        raise MlxconvError(f"{file}: cannot be read ({error}); copy the bundle again") from error
    assert isinstance(loaded, dict)
    return loaded


def weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX_FILE
    try:
        files = json.loads(read_text(index))["weight_map"]
        names = {str(k): str(v) for k, v in files.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise MlxconvError(f"{index}: not a weight index; convert the component again") from error
    for file in set(names.values()):
        if not is_plain(file):
            raise MlxconvError(f"{index}: {file!r} is not a file of this folder; refused")
    return names


class Specs:
    """`quantization` of a config: defaults and per-module overrides, mlx-lm's convention."""

    def __init__(self, table: dict[str, Any], where: str) -> None:
        if not isinstance(table, dict):
            raise MlxconvError(f"{where}/config.json: quantization is not a table; convert again")
        self.table, self.where = table, where

    def of(self, module: str) -> Quantization:
        entry = self.table.get(module, self.table)
        try:
            found = Quantization(
                int(entry["group_size"]), int(entry["bits"]), str(entry.get("mode", "affine"))
            )
            if (found.mode, found.group_size, found.bits) not in _QUANTIZATIONS:
                raise ValueError("MLX has no such quantization")
            return found
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
            raise MlxconvError(
                f"{self.where}/config.json: no quantization for {module!r}, whose scales are in "
                f"the weight files ({error}); convert the component again"
            ) from error
