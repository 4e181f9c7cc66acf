"""`.bin` weights: PyTorch's zip files, described without loading a weight or running their code."""

from __future__ import annotations

import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from mlxconv.runtime.errors import MlxconvError

from .safetensors_io import StoredTensor


def read_pickle(file: Path) -> dict[str, StoredTensor]:
    """Tensors by name. Only `torch.load(weights_only=True)` is used, onto the meta device.

    Raises MlxconvError for pickles with code, files that are not torch's zip format, and entries
    that are not plain tensors.
    """
    state = _load_on_meta(file)
    records = _records(file)
    tensors = {}
    for name, value in state.items():
        tensors[str(name)] = _stored(file, str(name), value, records)
    return tensors


def _load_on_meta(file: Path) -> dict[Any, Any]:
    import torch

    try:
        state = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise MlxconvError(
            f"{file}: refused: this pickle holds code or objects other than tensors "
            f"({_first_line(error)}); get the safetensors files of this model"
        ) from error
    except Exception as error:  # damaged bytes raise a dozen kinds here
        raise _not_torch(file, error) from error
    if not isinstance(state, dict):
        raise MlxconvError(
            f"{file}: holds a {type(state).__name__}, expected a dict of tensors; "
            "get the safetensors files of this model"
        )
    return state


def _not_torch(file: Path, error: Exception) -> MlxconvError:
    return MlxconvError(
        f"{file}: not a PyTorch weight file of torch 1.6 or later, or damaged "
        f"({_first_line(error)}); download it again, or get the safetensors files of this model"
    )


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:160]


def _records(file: Path) -> dict[int, int]:
    """Where each uncompressed record of the zip starts, in bytes, and how long it is."""
    try:
        return _zip_records(file)
    except MlxconvError:
        raise
    except Exception as error:  # as in _load_on_meta
        raise _not_torch(file, error) from error


def _zip_records(file: Path) -> dict[int, int]:
    found = {}
    with zipfile.ZipFile(file) as archive, file.open("rb") as stream:
        for info in archive.infolist():
            if info.filename.endswith("/byteorder") and archive.read(info) != b"little":
                raise MlxconvError(
                    f"{file}: holds big-endian data; save it again on a little-endian machine"
                )
            if info.compress_type == zipfile.ZIP_STORED:
                stream.seek(info.header_offset + 26)
                name_bytes, extra_bytes = struct.unpack("<HH", stream.read(4))
                found[info.header_offset + 30 + name_bytes + extra_bytes] = info.file_size
    return found


def _stored(file: Path, name: str, value: Any, records: dict[int, int]) -> StoredTensor:
    import torch

    code = _dtype_codes().get(value.dtype) if isinstance(value, torch.Tensor) else None
    if code is None or value.layout is not torch.strided:
        kind = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise MlxconvError(
            f"{file}: {name!r} is {kind}, expected a plain tensor; "
            "get the safetensors files of this model"
        )
    storage = value.untyped_storage()
    # torch computes this offset; the zip's own directory must agree with it.
    start = storage._checkpoint_offset
    last = sum((n - 1) * step for n, step in zip(value.shape, value.stride()))
    needed = (value.storage_offset() + last + 1) * value.element_size() if value.numel() else 0
    if records.get(start, -1) < max(storage.nbytes(), needed):
        raise MlxconvError(
            f"{file}: data of {name!r} is not where the file says (byte {start}); "
            "the file is damaged, download it again"
        )
    offset = start + value.storage_offset() * value.element_size()
    strides = None if value.is_contiguous() else tuple(value.stride())
    return StoredTensor(name, tuple(value.shape), code, file, offset, strides)


def _dtype_codes() -> dict[Any, str]:
    import torch

    return {
        torch.bool: "BOOL",
        torch.uint8: "U8",
        torch.int8: "I8",
        torch.int16: "I16",
        torch.int32: "I32",
        torch.int64: "I64",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float64: "F64",
        torch.complex64: "C64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e5m2: "F8_E5M2",
    }
