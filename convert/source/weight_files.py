"""Which files of a folder hold its weights: formats, variants, shards and their index."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import read_json

from .pickle_io import read_pickle
from .safetensors_io import StoredTensor, read_header

# `NAME.fp16-00001-of-00003.safetensors`, and the older `NAME-00001-of-00003.fp16.safetensors`.
_STEM = r"(?P<stem>diffusion_pytorch_model|pytorch_model|model)"
_WEIGHTS = re.compile(
    _STEM + r"(?:\.(?P<variant>[\w-]+?))?(?:-(?P<number>\d{5})-of-(?P<count>\d{5}))?"
    r"(?:\.(?P<late>[\w-]+))?\.(?P<format>safetensors|bin)"
)
_INDEX = re.compile(
    _STEM + r"\.(?P<format>safetensors|bin)(?:\.(?P<late>[\w-]+))?\.index"
    r"(?:\.(?P<variant>[\w-]+))?\.json"
)
_STEMS = {
    "diffusers": ("diffusion_pytorch_model", "model", "pytorch_model"),
    "other": ("model", "pytorch_model", "diffusion_pytorch_model"),
}
# Names beside a weight `a.weight` which say that its values need a scale to mean anything.
_SCALE_SUFFIXES = ("_scale", "_scale_inv", "_scale_2", ".scale", ".scale_inv")
_SCALE_SIBLINGS = ("scale_weight", "weight_scale", "weight_scale_inv", "scale", "SCB")


Stamp = tuple[int, int]  # bytes, and nanoseconds of the last change


class ChosenWeights(NamedTuple):
    """The weight files that were chosen and the tensors in them, by name in sorted order.

    `stamps`: size and time of each file from before its header was read, see `check_unchanged`.
    """

    variant: str | None
    files: list[Path]
    tensors: dict[str, StoredTensor]
    stamps: dict[Path, Stamp]


class Chosen(NamedTuple):
    """Which files of a folder are read: their names, and where an index said so, its weight map."""

    variant: str | None
    files: list[str]
    index_file: Path | None = None
    weight_map: Mapping[str, str] | None = None


@dataclass
class _FileSet:
    """Names of one stem, variant and format: a single file, an index, numbered shards."""

    stem: str
    variant: str | None
    format: str
    single: str | None = None
    index: str | None = None
    shards: dict[int, str] = field(default_factory=dict)
    count: int = 0


def file_names(folder: Path) -> list[str]:
    """Names of the files in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir() if not path.is_dir())


def has_weights(names: Iterable[str]) -> bool:
    """Whether PyTorch weight files (safetensors or .bin), or an index of some, are among them."""
    return bool(_file_sets(names))


def read_weights(folder: Path, library: str, variant: str | None, fallback: bool) -> ChosenWeights:
    """Choose the weight files of a folder, see `choose_files`, and read their headers."""
    chosen = choose_files(folder, file_names(folder), library, variant, fallback)
    files = [folder / name for name in chosen.files]
    stamps = {file: _stamp(file) for file in files}
    tensors = _merge(files)
    if chosen.index_file and chosen.weight_map:
        _check_index(chosen.index_file, chosen.weight_map, tensors)
    _refuse_scaled_fp8(folder, tensors)
    return ChosenWeights(chosen.variant, files, dict(sorted(tensors.items())), stamps)


def _stamp(file: Path) -> Stamp:
    try:
        found = file.stat()
    except OSError as error:
        raise MlxconvError(f"{file}: cannot be read ({error.strerror})") from error
    return found.st_size, found.st_mtime_ns


def check_unchanged(stamps: Mapping[Path, Stamp]) -> None:
    """MlxconvError where a weight file is not the one that was opened."""
    for file, stamp in stamps.items():
        if _stamp(file) != stamp:
            raise MlxconvError(
                f"{file}: changed while it was read; convert again once nothing writes to it"
            )


def choose_files(
    folder: Path, names: Collection[str], library: str, variant: str | None, fallback: bool
) -> Chosen:
    """Choose the weight files among the `names` of the files in a folder.

    The folder may be on the Hub: of it only an index is read, which has to be in `folder` by then.
    `variant=None` takes the plain files, or else the only variant there is. With `fallback` a
    variant that the folder lacks gives the plain files, as diffusers does for each component.
    Safetensors win over .bin. Raises MlxconvError for what is missing or ambiguous.
    """
    sets = _file_sets(names)
    if not sets:
        found = ", ".join(sorted(names)[:8]) or "nothing"
        raise MlxconvError(
            f"{folder}: no PyTorch weights; expected diffusion_pytorch_model.safetensors, "
            f"model.safetensors, shards with an index, or .bin, found {found}"
        )
    chosen_variant = _choose_variant(folder, {s.variant for s in sets}, variant, fallback)
    stems = _STEMS.get(library, _STEMS["other"])
    chosen = min(
        (s for s in sets if s.variant == chosen_variant),
        key=lambda s: (s.format != "safetensors", stems.index(s.stem)),
    )
    return _files_of(chosen, folder, names, prefer_index=library == "diffusers")


def _file_sets(names: Iterable[str]) -> list[_FileSet]:
    sets: dict[tuple[str, str | None, str], _FileSet] = {}
    for name in sorted(names):
        is_index = _INDEX.fullmatch(name)
        match = is_index or _WEIGHTS.fullmatch(name)
        if match is None:
            continue
        key = (match["stem"], match["variant"] or match["late"], match["format"])
        entry = sets.setdefault(key, _FileSet(*key))
        if is_index:
            entry.index = name
        elif match["number"]:
            entry.shards[int(match["number"])] = name
            entry.count = max(entry.count, int(match["count"]))
        else:
            entry.single = name
    return list(sets.values())


def _choose_variant(
    folder: Path, present: set[str | None], wanted: str | None, fallback: bool
) -> str | None:
    if wanted in present:
        return wanted
    names = sorted(name for name in present if name)
    if wanted is None and len(names) == 1:
        return names[0]
    if wanted is not None and fallback and None in present:
        return None
    listed = ", ".join(([] if None not in present else ["the plain files"]) + names)
    asked = "none was asked for" if wanted is None else f"{wanted!r} was asked for"
    raise MlxconvError(
        f"{folder}: weight variants are {listed}, {asked}; choose one of them with variant="
    )


def _files_of(chosen: _FileSet, folder: Path, names: Collection[str], prefer_index: bool) -> Chosen:
    """Given an index and a single file, diffusers reads the index and transformers the file."""
    if chosen.single and not (chosen.index and prefer_index):
        return Chosen(chosen.variant, [chosen.single])
    if chosen.index:
        index = folder / chosen.index
        weight_map = _weight_map(index)
        files = sorted(set(weight_map.values()))
        absent = [name for name in files if name not in names]
        if absent:
            raise MlxconvError(
                f"{index}: names {absent[0]!r}, which is not in the folder ({len(absent)} of "
                f"{len(files)} shards missing); download the folder again"
            )
        return Chosen(chosen.variant, files, index, weight_map)
    missing = [n for n in range(1, chosen.count + 1) if n not in chosen.shards]
    files = [chosen.shards[n] for n in sorted(chosen.shards)]
    if missing:
        raise MlxconvError(
            f"{folder}: shard {missing[0]} of {chosen.count} is missing, found "
            f"{', '.join(files)}; download the folder again"
        )
    return Chosen(chosen.variant, files)


def _check_index(
    index: Path, weight_map: Mapping[str, str], tensors: Mapping[str, StoredTensor]
) -> None:
    for name, file_name in weight_map.items():
        if name not in tensors or tensors[name].file.name != file_name:
            raise MlxconvError(
                f"{index}: says that {name!r} is in {file_name!r}, which lacks it; "
                "index and shards are of different models, download the folder again"
            )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise MlxconvError(
            f"{index}: has no weight_map of tensor name to file name; download it again"
        )
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_name(file_name):
            raise MlxconvError(
                f"{index}: {name!r} is listed in {file_name!r}, expected the name of a file "
                "in the same folder; refused, get the index from its source again"
            )
    return weight_map


def _is_plain_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in name for c in "/\\\0:")


def _merge(files: Iterable[Path]) -> dict[str, StoredTensor]:
    merged: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_file(file).items():
            if name in merged:
                raise MlxconvError(
                    f"{file}: {name!r} is also in {merged[name].file.name}; "
                    "shards of two checkpoints are mixed, download the folder again"
                )
            merged[name] = tensor
    return merged


def _read_file(file: Path) -> dict[str, StoredTensor]:
    if file.suffix == ".bin":
        return read_pickle(file)
    tensors, metadata = read_header(file)
    if metadata.get("format") == "mlx":
        raise MlxconvError(
            f"{file}: these weights are already MLX's (metadata format: mlx); "
            "give the original diffusers checkpoint"
        )
    return tensors


def _refuse_scaled_fp8(folder: Path, tensors: dict[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if not tensor.dtype.startswith("F8"):
            continue
        if found := scale_beside(name, tensors):
            raise MlxconvError(
                f"{folder}: {name!r} is {tensor.dtype} with a scale in {found!r}: these weights "
                "are already quantized; give the bf16 or fp16 checkpoint"
            )


def scale_beside(name: str, tensors: Collection[str]) -> str | None:
    """The stored tensor that scales `name`, if its name says so."""
    parent = name.rpartition(".")[0]
    scales = [name + suffix for suffix in _SCALE_SUFFIXES]
    scales += [f"{parent}.{sibling}" for sibling in _SCALE_SIBLINGS]
    return next((s for s in [*scales, "scaled_fp8"] if s in tensors and s != name), None)
