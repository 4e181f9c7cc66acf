"""Pair the names a module wants with the names a checkpoint stores, by rule and never by guess.

In order: the same name; the spellings of attention before diffusers 0.15; tied weights; and
wrapper words, which transformers adds, drops or reorders when it loads (`text_model.encoder.x`
and `encoder.x`, `model.layers.0.x` and `model.language_model.layers.0.x`).
"""

from __future__ import annotations

import difflib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxconv.runtime.errors import MlxconvError

from .safetensors_io import StoredTensor

# diffusers 0.42.1, ModelMixin._fix_state_dict_keys_on_load. It renames and does not reshape: the
# 1x1 convolutions (out, in, 1, 1) of still older files are refused by diffusers, and here.
LEGACY_ATTENTION = {
    ".to_q.": ".query.",
    ".to_k.": ".key.",
    ".to_v.": ".value.",
    ".to_out.0.": ".proj_attn.",
}
_MAX_WRAPPERS = 2
_SHOWN = 5


@dataclass(frozen=True)
class KeyMatch:
    """Which stored tensor serves each wanted name, and what is left on either side.

    `wrong_shape` holds (wanted name, expected shape, found shape); `ambiguous` the candidates of
    missing names that had several.
    """

    found: dict[str, str]
    missing: list[str]
    unused: list[str]
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]]
    ambiguous: dict[str, list[str]] = field(default_factory=dict)
    wanted_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)
    stored_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def renamed(self) -> dict[str, str]:
        """The part of `found` where the names differ."""
        return {wanted: stored for wanted, stored in self.found.items() if wanted != stored}

    def check(self, where: str) -> None:
        """Raise MlxconvError, naming keys, shapes and nearest stored keys, unless all was found."""
        problems = []
        if self.wrong_shape:
            parts = [f"{n} expected {e} found {f}" for n, e, f in self.wrong_shape]
            problems.append(f"{len(parts)} of wrong shape: {_some(parts)}")
        if self.missing:
            parts = [self._describe_missing(name) for name in self.missing[:_SHOWN]]
            problems.append(f"{len(self.missing)} missing: {_some(parts, len(self.missing))}")
        if problems:
            raise MlxconvError(
                f"{where}: tensors do not fit the model: {'; '.join(problems)}; check that "
                "config.json and the weights are of the same model, or download the folder again"
            )

    def _describe_missing(self, name: str) -> str:
        text = f"{name} {self.wanted_shapes.get(name, ())}"
        if name in self.ambiguous:
            return f"{text} (could be any of {', '.join(self.ambiguous[name])})"
        near = difflib.get_close_matches(name, self.stored_shapes, n=1, cutoff=0.5)
        if not near:
            return f"{text} (nothing like it is stored)"
        return f"{text} (nearest stored: {near[0]} {self.stored_shapes[near[0]]})"


def match_keys(
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, StoredTensor],
    tied: Mapping[str, str] | None = None,
) -> KeyMatch:
    """Find a stored tensor of equal shape for each wanted name.

    `wanted` is name -> shape of the module's state dict; `tied` says which wanted name shares its
    tensor with which other, in either direction (see `tied_weights`); a name that is not wanted
    is when its first is. Raises nothing: ask `KeyMatch.check`.
    """
    tied = tied or {}
    others = {name: wanted[first] for name, first in tied.items() if first in wanted}
    wanted = {**others, **wanted}
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    found: dict[str, str] = {}
    wrong: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
    left = []
    for name, shape in wanted.items():
        same = _same_or_legacy(name, shapes)
        if same is None:
            left.append(name)
        elif shapes[same] == tuple(shape):
            found[name] = same
        else:
            wrong.append((name, tuple(shape), shapes[same]))
    taken = set(found.values()) | {_same_or_legacy(name, shapes) for name, _, _ in wrong}
    renamed, ambiguous = _match_wrapped(
        {name: tuple(wanted[name]) for name in left},
        {name: shape for name, shape in shapes.items() if name not in taken},
        settled=found,
    )
    found |= renamed
    found |= _match_tied([n for n in left if n not in found], wanted, found, tied)
    used = {*found.values(), *taken}
    return KeyMatch(
        found={name: found[name] for name in wanted if name in found},
        missing=[name for name in left if name not in found],
        unused=[name for name in shapes if name not in used],
        wrong_shape=wrong,
        ambiguous={n: names for n, names in ambiguous.items() if n not in found},
        wanted_shapes={name: tuple(shape) for name, shape in wanted.items()},
        stored_shapes=shapes,
    )


def tied_weights(module: Any) -> dict[str, str]:
    """Names of a torch module's parameters that are one tensor: other name -> first name."""
    first: dict[int, str] = {}
    tied = dict(getattr(module, "all_tied_weights_keys", None) or {})
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied.setdefault(name, first[id(parameter)])
    return tied


def _same_or_legacy(name: str, stored: Mapping[str, Any]) -> str | None:
    if name in stored:
        return name
    for now, then in LEGACY_ATTENTION.items():
        old = then.join(name.rsplit(now, 1))
        if old != name and old in stored:
            return old
    return None


def _match_tied(
    names: Iterable[str],
    wanted: Mapping[str, tuple[int, ...]],
    found: Mapping[str, str],
    tied: Mapping[str, str],
) -> dict[str, str]:
    partners: dict[str, set[str]] = defaultdict(set)
    for one, other in tied.items():
        partners[one] |= {other, *(a for a, b in tied.items() if b == other)}
        partners[other].add(one)
    matched = {}
    for name in names:
        choices = {found[p] for p in partners[name] if p in found and wanted[p] == wanted[name]}
        if len(choices) == 1:
            matched[name] = choices.pop()
    return matched


def _match_wrapped(
    wanted: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
    settled: Mapping[str, str],
) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Matches unique in both directions, and the candidates of those that are not."""
    # A word inside a name that matched as it is belongs to the structure: it is no wrapper.
    structure = {word for pair in settled.items() for name in pair for word in name.split(".")}
    buckets: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name in stored:
        buckets[_tail(name)].append(name)
    candidates = {
        name: [
            other
            for other in buckets[_tail(name)]
            if stored[other] == shape and _differ_by_wrappers(name, other, structure)
        ]
        for name, shape in wanted.items()
    }
    claims = Counter(other for others in candidates.values() for other in others)
    found, ambiguous = {}, {}
    for name, others in candidates.items():
        if len(others) == 1 and claims[others[0]] == 1:
            found[name] = others[0]
        elif others:
            ambiguous[name] = others
    return found, ambiguous


def _tail(name: str) -> tuple[str, ...]:
    """What wrapper words cannot change: the path from its first index on, or the last word."""
    words = name.split(".")
    first = next((i for i, word in enumerate(words) if word.isdigit()), len(words) - 1)
    return tuple(words[first:])


def _differ_by_wrappers(one: str, other: str, structure: set[str]) -> bool:
    """Equal but for leading words, of which one name's contain the other's, in any order."""
    a, b = one.split("."), other.split(".")
    common = 0
    while common < min(len(a), len(b)) and a[-1 - common] == b[-1 - common]:
        common += 1
    if common < 2 and a[-1] in ("weight", "bias"):
        return False  # an owner's name is the least that must agree
    head_a, head_b = Counter(a[: len(a) - common]), Counter(b[: len(b) - common])
    extra = (head_a - head_b) + (head_b - head_a)
    if head_a - head_b and head_b - head_a:
        return False
    return extra.total() <= _MAX_WRAPPERS and not structure.intersection(extra)


def _some(parts: list[str], total: int | None = None) -> str:
    hidden = (total or len(parts)) - min(len(parts), _SHOWN)
    return ", ".join(parts[:_SHOWN]) + (f", and {hidden} more" if hidden else "")
