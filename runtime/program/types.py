"""The type of a value: its dtype, and its sizes as expressions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..errors import MlxconvError


@dataclass(frozen=True, slots=True)
class Type:
    """`compute[batch, 64]` has dtype `compute` and dims ("batch", "64").

    dims: None where a value is no array (`int`, a size) or where nothing is known (dtype ""); only
    the latter is false.
    """

    dtype: str = ""
    dims: tuple[str, ...] | None = None

    def __str__(self) -> str:
        return self.dtype if self.dims is None else f"{self.dtype}[{', '.join(self.dims)}]"

    def __bool__(self) -> bool:
        return bool(self.dtype)


INT = Type("int")
UNKNOWN = Type()


@lru_cache(maxsize=4096)
def parse_type(text: str) -> Type:
    """`float32[batch, Max(1, n), 64]` -> Type("float32", ("batch", "Max(1, n)", "64"))."""
    dtype, bracket, rest = text.partition("[")
    if not bracket:
        return Type(dtype)
    if not dtype or not rest.endswith("]"):
        raise MlxconvError(f"not a type: {text!r:.80}, expected one as float32[batch, 64]")
    sizes, depth = [""], 0
    for char in rest[:-1]:
        depth += (char == "(") - (char == ")")
        if char == "," and depth == 0:
            sizes.append("")
        else:
            sizes[-1] += char
    dims = tuple(size.strip() for size in sizes)
    return Type(dtype, () if dims == ("",) else dims)
