"""Changing bundles and reading them, for tests: tensors of one component, and its program."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

WEIGHTS, INDEX, PROGRAM = "model.safetensors", "model.safetensors.index.json", "program.json"
Arrays = dict[str, mx.array]


def copy(bundle: Path, target: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(bundle, target / bundle.name))


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def change_json(path: Path, change: Callable[[Any], Any]) -> None:
    """`change` edits the data in place, or returns other data."""
    data = read_json(path)
    path.write_text(json.dumps(change(data) or data), encoding="utf-8")


def tensors(folder: Path) -> Arrays:
    """All tensors of a component, evaluated."""
    loaded = mx.load(str(folder / WEIGHTS))
    assert isinstance(loaded, dict)
    mx.eval(loaded)
    return loaded


def change_tensors(folder: Path, change: Callable[[Arrays], None]) -> None:
    """Rewrite the weight file, validly, after `change` edited its tensors; the index follows."""
    arrays = tensors(folder)
    change(arrays)
    mx.save_safetensors(str(folder / WEIGHTS), arrays, metadata={"format": "mlx"})

    def relist(index: Any) -> None:
        index["weight_map"] = dict.fromkeys(sorted(arrays), WEIGHTS)

    change_json(folder / INDEX, relist)


def change_nodes(
    folder: Path, body: str, op: str, change: Callable[[list[Any]], None], which: int = 0
) -> None:
    """Change a node of `op` on arrays in a block of the program file (or the entry `forward`)."""

    def edit(data: Any) -> None:
        found = data["entries"][0] if body == "forward" else data["blocks"][body]
        nodes = [node for node in found["nodes"] if node[0] == op and node[4] != ["int"]]
        change(nodes[which])

    change_json(folder / PROGRAM, edit)
