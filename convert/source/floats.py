"""Floats as safetensors stores them, chunk by chunk in numpy: cast, and what is not finite."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Safetensors dtype -> array type of its bytes; numpy has no bfloat16.
KINDS: dict[str, np.dtype[Any]] = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
}
# NaN and infinity have all exponent bits: (unsigned type, signed type, the exponent's bits).
_EXPONENTS = {
    "BF16": (np.uint16, np.int16, 0x7F80),
    "F16": (np.uint16, np.int16, 0x7C00),
    "F32": (np.uint32, np.int32, 0x7F800000),
}


def count_not_finite(data: memoryview, code: str) -> int:
    """How many values are NaN or infinite; 0 for a dtype that is no float of 16 or 32 bit."""
    if code not in _EXPONENTS or not len(data):
        return 0
    unsigned, signed, exponent = _EXPONENTS[code]
    bits = np.frombuffer(data, unsigned)
    sign = 1 << (8 * bits.itemsize - 1)
    # The largest of the positive and of the negative values tell, without a temporary array.
    if bits.view(signed).max() < exponent and bits.max() < exponent + sign:
        return 0
    return int(np.count_nonzero(bits & unsigned(exponent) == exponent))


def cast(data: memoryview, source: str, target: str) -> memoryview:
    """The bytes of the same values in another dtype of `KINDS`, rounded to nearest, ties to even.

    What the target cannot hold becomes infinite.
    """
    with np.errstate(all="ignore"):
        values = _FROM[source](np.frombuffer(data, KINDS[source]))
        return memoryview(_TO[target](values).view(np.uint8))  # type: ignore[arg-type]


_Floats = NDArray[np.float32]


def _from_bfloat(bits: NDArray[np.uint16]) -> _Floats:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat(values: _Floats) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, ties to even."""
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
    if np.isnan(values.max(initial=-np.inf)):
        # Rounding could carry into the exponent, and cutting could leave an infinity.
        rounded = np.where(np.isnan(values), (bits >> 16) | 0x40, rounded)
    return rounded.astype(np.uint16)


def _to_single(values: NDArray[np.float16]) -> _Floats:
    return values.astype(np.float32)


_FROM: dict[str, Callable[..., _Floats]] = {
    "BF16": _from_bfloat,
    "F16": _to_single,
    "F32": np.asarray,
}
_TO: dict[str, Callable[[_Floats], NDArray[np.generic]]] = {
    "BF16": to_bfloat,
    "F16": lambda values: values.astype(np.float16),
    "F32": np.ascontiguousarray,
}
