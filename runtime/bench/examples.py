"""Example inputs for an entry of a program, at chosen sizes: what benchmarks and profiles run on.

The values are seeded noise, whole masks and falling timesteps. A bundle's config.json says what
sizes its inputs have (`mlxconv.sizes`): each dim's size when it was traced, and how an image's
pixels W and H decide it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from ..errors import MlxconvError
from ..ops import dtype_of
from ..program.expressions import evaluate, names_in
from ..program.program import Entry, Input, Program
from ..program.types import INT

PIXELS = (512, 512)  # width and height, where no size is asked for
_GUIDANCE = 4.0  # times 1000 exact in bf16, to which models round it


@dataclass(frozen=True)
class Sizes:
    """What a run is to be sized by: `pixels` (W, H), dims by name, and the batch."""

    pixels: tuple[int, int] | None = None
    dims: Mapping[str, int] | None = None
    batch: int | None = None

    def asked(self) -> dict[str, int]:
        """The dims that were asked for by name."""
        batch = {} if self.batch is None else {"batch": self.batch}
        return {**(self.dims or {}), **batch}


@dataclass(frozen=True)
class Example:
    """Inputs of one entry. `schedule` has a value a step, (steps, *shape); `moving` names the
    arrays that change from step to step, the latents first."""

    entry: Entry
    dims: dict[str, int]
    inputs: dict[str, Any]
    schedule: dict[str, mx.array]
    moving: tuple[str, ...]

    def at_step(self, step: int) -> dict[str, Any]:
        """All keyword inputs of one step."""
        return {**self.inputs, **{path: rows[step] for path, rows in self.schedule.items()}}

    def latents(self) -> mx.array:
        """What the loop denoises; MlxconvError where nothing moves."""
        if not self.moving:
            raise MlxconvError(f"{self.entry.name}: no input changes from step to step")
        found: Any = self.inputs
        for part in self.moving[0].split("."):
            found = found[int(part)] if isinstance(found, list) else found[part]
        return found  # type: ignore[no-any-return]

    def moved(self, latents: mx.array) -> dict[str, Any]:
        """The keyword inputs that a step takes, with these latents."""
        heads = {path.split(".")[0] for path in self.moving}
        given = {k: v for k, v in self.inputs.items() if k in heads}
        changed: dict[str, Any] = replaced(given, self.moving[0].split("."), latents)
        return changed


def replaced(tree: Any, path: list[str], value: Any) -> Any:
    """A copy of nested dicts and lists with another value at `path`."""
    if not path:
        return value
    if isinstance(tree, list):
        at = int(path[0])
        return [replaced(v, path[1:], value) if i == at else v for i, v in enumerate(tree)]
    return {k: replaced(v, path[1:], value) if k == path[0] else v for k, v in tree.items()}


# ---- sizes --------------------------------------------------------------------------------------


def entry_at(
    program: Program, config: Mapping[str, Any], name: str, sizes: Sizes
) -> tuple[Entry, dict[str, int]]:
    """The entry that has these sizes, and every dim's size. MlxconvError says what there is."""
    table = config.get("mlxconv", {}).get("sizes") or {}
    entries = [e for e in program.entries if e.name == name] or [program.entry(name)]
    asked = {**_pixel_dims(program, table, config, sizes.pixels), **sizes.asked()}
    free = {n for e in entries for n in (*e.sizes, *_symbols(e), *_integers(e, table).values())}
    known = {*table.get("dims", {}), *free, "batch"}
    unknown = sorted(set(sizes.asked()) - known)
    if unknown:
        raise MlxconvError(
            f"{program.class_name}: no dim {', '.join(unknown)}; it has {', '.join(sorted(known))}"
        )
    if "batch" not in asked and all(e.sizes.get("batch", 1) != 1 for e in entries):
        entry = program.entry(name, asked)
    else:
        entry = program.entry(name, {"batch": 1, **asked})
    defaults = _pixel_dims(program, table, config, PIXELS) if table.get("pixels") else {}
    dims = {**table.get("dims", {}), "batch": 1, **defaults, **entry.sizes, **asked}
    _check_complete(program, entry, table, dims)
    return entry, {k: int(v) for k, v in dims.items()}


def _pixel_dims(
    program: Program,
    table: Mapping[str, Any],
    config: Mapping[str, Any],
    pixels: tuple[int, int] | None,
) -> dict[str, int]:
    if pixels is None:
        return {}
    if not table.get("pixels"):
        names = sorted({name for entry in program.entries for name in _symbols(entry)})
        raise MlxconvError(
            f"{program.class_name}: this bundle does not record how its sizes follow from "
            f"pixels; use --dim NAME=SIZE with {', '.join(names)}"
        )
    values = {**config, "W": pixels[0], "H": pixels[1]}
    found = {dim: int(evaluate(text, values)) for dim, text in table["pixels"].items()}
    small = [dim for dim, size in found.items() if size < 1]
    if small:
        raise MlxconvError(
            f"{program.class_name}: {pixels[0]}x{pixels[1]} pixels are too few ({small[0]} is 0)"
        )
    return found


def _symbols(entry: Entry) -> set[str]:
    """The dims in the shapes of an entry's inputs."""
    return {
        name for item in entry.inputs for size in item.type.dims or () for name in names_in(size)
    }


def _check_complete(
    program: Program, entry: Entry, table: Mapping[str, Any], dims: Mapping[str, int]
) -> None:
    integers = _integers(entry, table)
    missing = sorted(
        {*_symbols(entry), *(n for t in integers.values() for n in names_in(t))} - set(dims)
    )
    if missing:
        raise MlxconvError(
            f"{program.class_name}.{entry.name}: no size is known for {', '.join(missing)}; "
            "give --dim NAME=SIZE for each, or convert again"
        )


def _integers(entry: Entry, table: Mapping[str, Any]) -> dict[str, str]:
    """Expressions of the entry's integer inputs, by path; without a table the dim so called."""
    listed = table.get("arguments", {}).get(entry.name, {})
    return {
        i.path: str(listed.get(i.path, i.name.removeprefix("num_")))
        for i in entry.inputs
        if i.type == INT
    }


def text_sizes(config: Mapping[str, Any], tokens: int | None, batch: int) -> Sizes:
    """Of a text encoder: as many tokens as the denoiser takes, or as the encoder has places for."""
    places = config.get("max_position_embeddings")
    if tokens is None:
        return Sizes(batch=batch)
    return Sizes(None, {"text_tokens": min(tokens, places or tokens)}, batch)


# ---- values -------------------------------------------------------------------------------------


def make_example(
    program: Program,
    config: Mapping[str, Any],
    name: str = "forward",
    sizes: Sizes | None = None,
    *,
    steps: int = 1,
    compute: str = "float32",
    seed: int = 0,
) -> Example:
    """Inputs for one entry; `compute` is the dtype of the inputs that follow the precision.

    Values drawn with one seed are equal at every dtype before they are rounded to it.
    """
    sizes = sizes or Sizes()
    entry, dims = entry_at(program, config, name, sizes)
    maker = _Maker(dims, sizes.pixels or PIXELS, compute, steps, np.random.default_rng(seed))
    table = config.get("mlxconv", {}).get("sizes") or {}
    integers = _integers(entry, table)
    flat: dict[str, Any] = dict(entry.literals)
    schedule: dict[str, mx.array] = {}
    for item in entry.inputs:
        if item.path in integers:
            flat[item.path] = int(evaluate(integers[item.path], dims))
        elif item.stage == "schedule" and "." not in item.path:
            schedule[item.path] = maker.schedule(item)
        else:
            full = entry.literals.get(item.path)
            full = full.get("reaches") if isinstance(full, Mapping) else full
            flat[item.path] = maker.value(item, full)
    moving = [i.path for i in entry.inputs if i.stage == "step" and i.path not in integers]
    return Example(entry, dims, _nested(flat), schedule, tuple(moving))


@dataclass(frozen=True)
class _Maker:
    dims: Mapping[str, int]
    pixels: tuple[int, int]
    compute: str
    steps: int
    random: np.random.Generator

    def value(self, item: Input, full: float | None = None) -> mx.array:
        """Noise; ones where it masks or scales; zeros and counts where it numbers."""
        shape = tuple(int(evaluate(size, self.dims)) for size in item.type.dims or ())
        name, dtype = item.path.lower(), item.type.dtype
        if full is not None:
            return self._array(np.full(shape, full, np.float32), dtype)
        if "mask" in name or "lens" in name:
            return self._array(np.ones(shape, np.float32), dtype)
        if "img_ids" in name and len(shape) > 1 and shape[-1] > 2:
            return self._array(self._grid(shape), dtype)
        if dtype not in ("compute", "float32", "bfloat16", "float16") or "ids" in name:
            return self._array(np.zeros(shape, np.float32), dtype)
        if "guidance" in name:
            return self._array(np.full(shape, _GUIDANCE, np.float32), dtype)
        if len(shape) < 2:
            return self._array(np.ones(shape, np.float32), dtype)
        return self._array(self.random.standard_normal(shape, dtype=np.float32), dtype)

    def schedule(self, item: Input) -> mx.array:
        """(steps, *shape), falling; exact in bf16 and different at each of 64 steps."""
        shape = tuple(int(evaluate(size, self.dims)) for size in item.type.dims or ())
        dtype = item.type.dtype
        falling = np.array([1 - (i % 64) / 64 for i in range(self.steps)], np.float32)
        if dtype.startswith("int"):
            falling = np.floor(999 * falling)
        rows = np.broadcast_to(falling.reshape(-1, *(1 for _ in shape)), (self.steps, *shape))
        return self._array(rows, dtype)

    def _grid(self, shape: tuple[int, ...]) -> Any:
        """Positions of an image's tokens: rows and columns on the second and third axis."""
        count, grid = math.prod(shape[:-1]), np.zeros(shape, np.float32).reshape(-1, shape[-1])
        tokens = shape[-2]
        columns = self.pixels[0] // 16
        if columns < 1 or tokens != columns * (self.pixels[1] // 16):
            columns = math.isqrt(tokens) or 1
        index = np.arange(count) % tokens
        grid[:, 1], grid[:, 2] = index // columns, index % columns
        return grid.reshape(shape)

    def _array(self, value: Any, dtype: str) -> mx.array:
        return mx.array(value).astype(dtype_of(self.compute if dtype == "compute" else dtype))


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.0.b": 1}` -> `{"a": [{"b": 1}]}`."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parts, last = path.split(".")
        level = tree
        for part in parts:
            level = level.setdefault(part, {})
        level[last] = value
    return {name: _listed(value) for name, value in tree.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(key.isdigit() for key in value):
        return [_listed(value[key]) for key in sorted(value, key=int)]
    return {key: _listed(item) for key, item in value.items()}
