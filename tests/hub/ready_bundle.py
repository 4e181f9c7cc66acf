"""Bundles that need no PyTorch to make: seeded weights in shards, without a program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxconv.convert.store.writer import output_of, single, write_weights
from mlxconv.runtime.bundle import MANIFEST

COMMIT = "1234567890abcdef1234567890abcdef12345678"
SOURCE = "acme/tiny-picture"


def make_bundle(
    folder: Path, *, tensors: int = 4, width: int = 64, shard_bytes: int = 5_000_000_000,
    seed: int = 0, **manifest: Any,
) -> Path:  # fmt: skip
    """A bundle of one `transformer` of `tensors` matrices (width, width) in fp32, and a scheduler.

    `manifest` replaces entries of mlxconv.json; by default the source is a repository whose card
    says apache-2.0.
    """
    part = folder / "transformer"
    part.mkdir(parents=True)
    keys = mx.random.split(mx.random.key(seed), tensors)
    arrays = {f"blocks.{i}.weight": mx.random.normal((width, width), key=keys[i])
              for i in range(tensors)}  # fmt: skip
    groups = [single(output_of(name, array), lambda a=array: a) for name, array in arrays.items()]
    write_weights(part, "model", groups, shard_bytes)
    _write(part / "config.json", {"_class_name": "TinyModel", "mlxconv": {"version": 1}})
    (folder / "scheduler").mkdir()
    _write(folder / "scheduler" / "scheduler_config.json", {"_class_name": "DDIMScheduler"})
    index = {"_class_name": "TinyPipeline", "scheduler": ["diffusers", "DDIMScheduler"],
             "transformer": ["diffusers", "TinyModel"]}  # fmt: skip
    _write(folder / "model_index.json", index)
    _write(folder / "config.json", {"model_type": "mlxconv", "library": "mlx"})
    (folder / "LICENSE").write_text("The licence of the tests.\n", encoding="utf-8")
    component = {"class": "TinyModel", "library": "diffusers", "q": "float32", "method": None,
                 "program": False, "unused": []}  # fmt: skip
    _write(folder / MANIFEST, {
        "format": "mlxconv-bundle", "version": 1, "pipeline": "TinyPipeline", "source": SOURCE,
        "revision": COMMIT, "variant": None, "source_card": {"license": "apache-2.0"},
        "command": "mlxconv convert acme/tiny-picture", "versions": {"mlxconv": "0.1.0"},
        "components": {"transformer": component}, "copied": [], **manifest,
    })  # fmt: skip
    return folder


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
