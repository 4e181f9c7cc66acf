"""Tensors of a checkpoint that nothing reads: which of them are expected, and what others mean.

The weights of another model can have every tensor that a class asks for, with its shape, and more:
they load, run, and are wrong. So each tensor that is left over needs a reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import MlxconvError

from ..lower.compile import Compiled
from ..quantize.policy import matches
from ..report import describe_unread
from ..source.keys import KeyMatch


def unread_tensors(match: KeyMatch, compiled: Compiled | None) -> list[str]:
    """Stored names of what no program reads: unknown to the class, or dead in its forward."""
    unread = set(match.unused)
    if compiled is not None:
        read = {match.found[name] for name in compiled.program.parameters}
        unread |= {stored for stored in match.found.values() if stored not in read}
    return sorted(unread)


def with_unused(recipe: str, names: Iterable[str]) -> str:
    """A derived recipe's text, listing what its own trace does not read."""
    globs = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in sorted(names))
    if not globs:
        return recipe
    listed = ", ".join(f'"{glob}"' for glob in globs)
    return recipe.replace("\n[dims]\n", f"unused = [{listed}]\n\n[dims]\n", 1)


def refuse_unread(
    path: Path,
    cls: Any,
    module: Any,
    match: KeyMatch,
    unread: Iterable[str],
    tied: Mapping[str, str],
    allowed: Iterable[str],
) -> None:
    """MlxconvError for tensors whose being left over nothing explains.

    Expected are those that match `allowed` (a recipe's `unused`); second names of tied tensors;
    buffers that the module computes itself; what the class says it ignores; and, as transformers
    loads parts of larger models, whole parts that the class does not have.
    """
    names = {stored: name for name, stored in match.found.items()}
    parts = {stored.split(".")[0] for stored in match.found.values()}
    state = set(module.state_dict(keep_vars=True))
    computed = {n.rpartition(".")[2] for n, _ in module.named_buffers() if n not in state}
    ignored = getattr(cls, "_keys_to_ignore_on_load_unexpected", None) or ()

    def expected(stored: str) -> bool:
        name = names.get(stored, stored)
        return (
            name in tied
            or stored.rpartition(".")[2] in computed
            or any(matches(p, n) for p in allowed for n in (name, stored))
            or any(re.search(p, stored) for p in ignored)
            or (hasattr(cls, "config_class") and stored.split(".")[0] not in parts)
        )

    left = [stored for stored in unread if not expected(stored)]
    if left:
        raise MlxconvError(
            f"{describe_unread(left, f'{path}: ')}. The weights may be of another model than "
            "config.json: check that they belong together. If the model does not need these "
            "tensors, add --allow-unused, or list them as `unused` in a recipe (--recipe FILE)"
        )
