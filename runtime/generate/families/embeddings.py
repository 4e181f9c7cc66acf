"""Both prompts to embeddings: by the bundle's text encoders, or as the caller made them."""

from collections.abc import Iterator, Mapping
from typing import Any

import mlx.core as mx
import numpy as np

from ...errors import MlxconvError
from ...exec.finite import is_finite
from ...program.expressions import evaluate, names_in
from .family import Family
from .parts import Inputs, Parts, Request


def embedded(
    family: Family, parts: Parts, request: Request, own: Inputs | None, negative: Inputs | None
) -> Iterator[Inputs]:
    """The prompt's embeddings, then the negative prompt's where guidance needs them.

    own, negative: the caller's, by the names of `Family.embeddings`. MlxconvError where neither
    they nor the encoders are there, or a name or a shape is another.
    """
    if own is None:
        _check_encoders(family, parts, "embeddings")
        own = family.encode(parts, request.prompt, request)
    else:
        own = _checked(family, parts, own, "embeddings")
    yield own
    if not request.guided:
        return
    if negative is not None:
        yield _checked(family, parts, negative, "negative_embeddings")
        return
    unasked = family.unasked(parts, own) if request.negative is None else None
    if unasked is None:
        _check_encoders(family, parts, "negative_embeddings")
        unasked = family.negative(parts, request.negative or "", request)
    yield unasked


def _check_encoders(family: Family, parts: Parts, keyword: str) -> None:
    needed = [name for name in family.encoders if name not in family.optional]
    missing = [name for name in needed if not parts.has(name)]
    if not missing:
        return
    shapes = ", ".join(f"{name!r}: {told(s)}" for name, s in _shapes(family, parts).items())
    copied = parts.bundle.manifest.get("copied", [])
    names = [f"{name} (copied, not converted)" if name in copied else name for name in missing]
    off = "" if keyword == "embeddings" else f", or guidance={family.guidance.off:g}"
    raise MlxconvError(
        f"{parts.bundle.path}: no {' and no '.join(names)}, which prompts are read by; convert "
        f"the checkpoint with it, or pass arrays from Python, {keyword}={{{shapes}}}{off}"
    )


def _checked(family: Family, parts: Parts, given: Inputs, keyword: str) -> dict[str, mx.array]:
    """The caller's arrays; MlxconvError where names or shapes are not those of the family."""
    shapes = _shapes(family, parts)
    if set(given) != set(shapes):
        raise MlxconvError(
            f"{keyword} has {', '.join(given) or 'nothing'}; expected {', '.join(shapes)}"
        )
    arrays = {name: _array(f"{keyword}[{name!r}]", given[name]) for name in shapes}
    for name, expected in shapes.items():
        found = arrays[name].shape
        fits = len(found) == len(expected) and all(
            isinstance(e, str) or e == n for e, n in zip(expected, found)
        )
        if not fits:
            raise MlxconvError(f"{keyword}[{name!r}] has shape {found}, expected {told(expected)}")
        if not is_finite(arrays[name]).item():
            raise MlxconvError(f"{keyword}[{name!r}] has NaN or infinity; pass finite numbers")
    return arrays


def _array(what: str, value: Any) -> mx.array:
    if isinstance(value, mx.array):
        return value
    try:
        return mx.array(np.asarray(value))
    except (TypeError, ValueError) as error:
        raise MlxconvError(f"{what}: not an array ({error}); pass one of MLX or NumPy") from error


def _shapes(family: Family, parts: Parts) -> dict[str, tuple[str | int, ...]]:
    config = parts.config(family.denoiser)
    return {
        name: tuple(_size(size, config) for size in shape)
        for name, shape in family.embeddings.items()
    }


def _size(size: str | int, config: Mapping[str, Any]) -> str | int:
    """A number where the configuration knows it."""
    known = all(isinstance(config.get(name), int) for name in names_in(size))
    return int(evaluate(size, config)) if known else size


def told(shape: tuple[str | int, ...]) -> str:
    """(1, tokens, 4096)"""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
