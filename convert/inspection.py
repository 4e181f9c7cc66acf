"""What a checkpoint or a bundle holds, read from its files' headers, never from intent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mlxconv.runtime.bundle import is_bundle, open_bundle, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.exec.weights import INDEX_FILE, Specs
from mlxconv.runtime.files import format_bytes
from mlxconv.runtime.hub.bundles import is_hub_bundle
from mlxconv.runtime.hub.download import open_remote
from mlxconv.runtime.hub.names import hub_name
from mlxconv.runtime.program.program import PROGRAM_FILE
from mlxconv.runtime.program.stored import load_program

from .report import describe_unread, human_count
from .source.checkpoint import Checkpoint, open_checkpoint, open_component
from .source.hub import Asked, bundle_outline, opened_remote, shown_name
from .source.safetensors_io import StoredTensor
from .store.bundle_files import bundle_tensors


@dataclass
class Held:
    """One component's contents. `kept` are the matrices that are not quantized, with dtypes."""

    class_name: str
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    quantized: int
    kept: list[dict[str, str]]
    program: dict[str, Any] | None = None
    status: str = ""
    tensors: list[dict[str, Any]] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)  # tensors of the source that nothing reads

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per parameter, scales and biases included."""
        return 8 * self.bytes / max(1, self.parameters)


@dataclass
class Inspection:
    """A checkpoint's or a bundle's components; `revision` is the commit, where it is on the Hub."""

    kind: str
    path: str
    format_version: int | None
    components: dict[str, Held]
    source: str | None = None
    revision: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What `inspect --json` prints."""
        components = {}
        for name, held in self.components.items():
            components[name] = {
                "class": held.class_name,
                "status": held.status,
                "parameters": held.parameters,
                "bytes": held.bytes,
                "dtypes": held.dtypes,
                "bits_per_weight": round(held.bits_per_weight, 4),
                "quantized": held.quantized,
                "kept": held.kept,
                "unused": held.unused,
                "program": held.program,
            }
            if held.tensors:
                components[name]["tensors"] = held.tensors
        return {
            "kind": self.kind,
            "path": self.path,
            "source": self.source,
            "revision": self.revision,
            "format_version": self.format_version,
            "components": components,
        }

    def as_text(self) -> str:
        """A table for people."""
        origin = f", from {self.source}" if self.source else ""
        lines = [f"{self.path}: {self.kind}{origin}"]
        lines.append(
            f"{'component':<18}{'class':<32}{'params':>10}{'bytes':>11}{'bits':>7}  dtypes"
        )
        for name, held in self.components.items():
            dtypes = ", ".join(f"{k} {human_count(v)}" for k, v in held.dtypes.items())
            lines.append(
                f"{name:<18}{held.class_name:<32}{human_count(held.parameters):>10}"
                f"{format_bytes(held.bytes):>11}{held.bits_per_weight:>7.2f}  {dtypes}"
            )
            if held.quantized:
                lines.append(f"{'':<18}{held.quantized} matrices quantized, {len(held.kept)} kept")
            if held.program:
                made = {**held.program, "entries": ", ".join(held.program["entries"])}
                sizes = f", {len(made['sizes'])} sizes" if made["sizes"] else ""
                lines.append(
                    f"{'':<18}program of {made['nodes']} nodes and {made['blocks']} "
                    f"repeated blocks: {made['entries']}{sizes}"
                )
            if held.unused:
                lines.append(f"{'':<18}{describe_unread(held.unused)}")
            for t in held.tensors:
                lines.append(f"  {t['name']:<70}{t['dtype']:<9}{t['shape']}{t['note']}")
        return "\n".join(lines)


def inspect(path: str | Path, *, tensors: bool = False, revision: str | None = None) -> Inspection:
    """Look at a checkpoint or a bundle (or one component's folder of either).

    Of a repository of the Hub, at `revision`, small files and the weights' headers are fetched.
    """
    name = hub_name(path)
    if name is None:
        if revision is not None:
            raise MlxconvError(
                f"{path}: is a local path, and --revision applies only to Hub repositories"
            )
        return _of_folder(Path(path).expanduser(), tensors)
    name = name.at(revision)
    remote = open_remote(name)
    if is_hub_bundle(remote):
        with bundle_outline(remote) as folder:
            found = _of_folder(folder, tensors)
    else:
        with opened_remote(remote, Asked()) as source:
            found = _of_checkpoint(source.checkpoint, tensors)
    return replace(found, path=shown_name(name), revision=remote.commit)


def _of_folder(folder: Path, tensors: bool) -> Inspection:
    if is_bundle(folder):
        bundle = open_bundle(folder)
        held = {n: _converted(folder / n, tensors) for n in bundle.manifest["components"]}
        for name, part in bundle.manifest["components"].items():
            held[name].unused = list(part.get("unused") or [])
        for name in bundle.manifest.get("copied", []):
            held[name] = _source(folder / name, tensors)
        version, source = bundle.manifest["version"], bundle.manifest.get("source")
        return Inspection("bundle", str(folder), version, held, source)
    if (folder / INDEX_FILE).is_file() and _is_ours(folder):
        config = read_json(folder / "config.json")
        version = config["mlxconv"].get("version")
        held = {folder.name: _converted(folder, tensors)}
        return Inspection("bundle", str(folder), version, held)
    return _of_checkpoint(open_checkpoint(folder), tensors)


def _of_checkpoint(checkpoint: Checkpoint, tensors: bool) -> Inspection:
    held = {
        name: _held(c.class_name, c.tensors, {}, tensors, "")
        for name, c in checkpoint.components.items()
    }
    return Inspection("checkpoint", str(checkpoint.path), None, held)


def _is_ours(folder: Path) -> bool:
    return isinstance(read_json(folder / "config.json").get("mlxconv"), dict)


def _source(folder: Path, tensors: bool) -> Held:
    component = open_component(folder)
    return _held(component.class_name, component.tensors, {}, tensors, "copied")


def _converted(folder: Path, tensors: bool) -> Held:
    config = read_json(folder / "config.json")
    found = bundle_tensors(folder)
    listed = config.get("architectures")
    name = config.get("_class_name") or (listed[0] if isinstance(listed, list) and listed else "?")
    held = _held(str(name), found, config, tensors, "converted")
    if (folder / PROGRAM_FILE).is_file():
        program = load_program(folder / PROGRAM_FILE)
        held.class_name = program.class_name
        held.program = {
            "nodes": program.count_nodes(),
            "blocks": len(program.blocks),
            "entries": list(dict.fromkeys(e.name for e in program.entries)),
            "sizes": [e.sizes for e in program.entries if e.sizes],
        }
    return held


def _held(
    class_name: str,
    found: Mapping[str, StoredTensor],
    config: Mapping[str, Any],
    tensors: bool,
    status: str,
) -> Held:
    specs = Specs(config.get("quantization") or {}, class_name)
    dtypes: Counter[str] = Counter()
    count, quantized, kept, listed = 0, 0, [], []
    for name, tensor in found.items():
        module, _, part = name.rpartition(".")
        packed = part == "weight" and f"{module}.scales" in found
        companion = part in ("scales", "biases") and f"{module}.scales" in found
        shape, note = tensor.shape, ""
        if packed:
            spec = specs.of(module)
            shape = (tensor.shape[0], tensor.shape[1] * 32 // spec.bits)
            note = f"  {spec.mode} {spec.bits} bit, group {spec.group_size}"
            quantized += 1
        size = 1
        for n in shape:
            size *= n
        if not companion:
            count += size
            dtypes[f"{spec.bits}bit" if packed else tensor.dtype] += size
            if not packed and len(shape) > 1 and config.get("quantization"):
                kept.append({"name": name, "dtype": tensor.dtype})
        if tensors:
            listed.append(
                {"name": name, "dtype": tensor.dtype, "shape": list(tensor.shape), "note": note}
            )
    total = sum(t.nbytes for t in found.values())
    return Held(class_name, count, total, dict(dtypes), quantized, kept, None, status, listed)
