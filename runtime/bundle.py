"""Opens bundles: which components they hold, and each as a callable."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from .errors import MlxconvError
from .exec.executor import Executor
from .exec.weights import INDEX_FILE, Weights
from .files import is_plain
from .files import read_json as read_json
from .hub.names import hub_name
from .ops import dtype_of, on_cpu
from .program.program import CONSTANTS_FILE, PROGRAM_FILE, Program
from .program.stored import load_program

if TYPE_CHECKING:
    from .hub.bundles import HubBundle

MANIFEST = "mlxconv.json"
BUNDLE_VERSION = 1


@dataclass(frozen=True)
class Bundle:
    """A bundle's folder and its manifest (`mlxconv.json`).

    `remote`: of a bundle on the Hub; its folder is filled with the components that are used.
    """

    path: Path
    manifest: dict[str, Any]
    remote: HubBundle | None = None

    @property
    def name(self) -> str:
        """Its repository on the Hub, or its folder's name."""
        return self.path.resolve().name if self.remote is None else str(self.remote.remote.name)

    def need(self, names: Iterable[str]) -> None:
        """Fetch those of these components that the bundle has; nothing where it is not remote."""
        if self.remote is not None:
            self.remote.fetch(n for n in names if n in self.manifest["components"])

    def component(self, name: str, *, weights: bool = True) -> Path:
        """The folder of a converted component; MlxconvError lists those that exist.

        `weights`: they will be read, so that those of a remote bundle are fetched.
        """
        known = self.manifest["components"]
        if name not in known:
            copied = " (copied, not converted)" if name in self.manifest.get("copied", []) else ""
            raise MlxconvError(
                f"{self.path}: no component {name!r}{copied}; it has {', '.join(known)}"
            )
        if weights:
            self.need([name])
        return self.path / name


DENOISERS = ("transformer", "unet", "prior", "decoder")


def denoiser_of(bundle: Bundle) -> str:
    """The component that denoises; MlxconvError where none does."""
    listed = bundle.manifest["components"]
    found = [name for name in DENOISERS if name in listed]
    if not found:
        raise MlxconvError(
            f"{bundle.path}: no denoiser ({', '.join(DENOISERS)}) in it, only "
            f"{', '.join(listed) or 'nothing'}; give --component"
        )
    return found[0]


def is_bundle(path: Path) -> bool:
    """Whether a folder is a bundle."""
    return (path / MANIFEST).is_file()


def open_bundle(path: str | Path) -> Bundle:
    """Open what `convert` wrote, a folder or a repository of the Hub.

    MlxconvError when it is no bundle, or of a newer format.
    """
    name, remote = hub_name(path), None
    if name is not None:
        from .hub.bundles import open_hub_bundle

        remote = open_hub_bundle(name)
        path = remote.path
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise MlxconvError(f"{folder}: no such folder; give what `mlxconv convert` wrote")
    if not is_bundle(folder):
        raise MlxconvError(
            f"{folder}: is not a bundle (no {MANIFEST}); give what `mlxconv convert` wrote"
        )
    manifest = read_json(folder / MANIFEST)
    version = manifest.get("version")
    if version != BUNDLE_VERSION:
        raise MlxconvError(
            f"{folder / MANIFEST}: bundle format {version!r}, this mlxconv reads {BUNDLE_VERSION}; "
            "upgrade mlxconv (`pip install -U mlxconv`) or convert again"
        )
    _check_manifest(folder / MANIFEST, manifest)
    return Bundle(folder, manifest, remote)


def _check_manifest(file: Path, manifest: Mapping[str, Any]) -> None:
    """MlxconvError unless all that is read of it is of its kind, and names folders in this one."""
    if not isinstance(manifest.get("components"), dict):
        raise MlxconvError(f"{file}: lists no components; convert again")
    parts = manifest["components"]
    tables = [("", manifest, _FIELDS), *((f"{n}: ", p, _OF_COMPONENT) for n, p in parts.items())]
    for where, table, kinds in tables:
        if not isinstance(table, dict):
            raise MlxconvError(f"{file}: {where}{table!r:.80} is not a table; convert again")
        for key, kind in kinds.items():
            value = table.get(key, kind())
            if not (isinstance(value, kind) or (value is None and kind is str)):
                raise MlxconvError(
                    f"{file}: {where}{key} is {value!r:.80}, not a {kind.__name__}; convert again"
                )
    outside = [
        n for n in [*parts, *manifest.get("copied", [])] if not (isinstance(n, str) and is_plain(n))
    ]
    if outside:
        raise MlxconvError(f"{file}: {outside[0]!r:.80} is not a folder inside this one; refused")


_FIELDS: dict[str, type] = {
    "copied": list,
    "source": str,
    "revision": str,
    "variant": str,
    "pipeline": str,
    "source_card": dict,
    "versions": dict,
    "command": str,
    "base_model": str,
}
_OF_COMPONENT: dict[str, type] = {
    "class": str,
    "library": str,
    "q": str,
    "method": str,
    "unused": list,
    "kept": list,
}
_DECISIVE = ("config.json", INDEX_FILE, PROGRAM_FILE, CONSTANTS_FILE, "scheduler_config.json")


def fingerprint(bundle: Bundle, names: Iterable[str]) -> str:
    """SHA-256 over what decides the results of these components, or of a scheduler: programs,
    configurations, and the weights' checksums, of which an index holds one a tensor."""
    digest = hashlib.sha256()
    for name in sorted(names):
        for part in _DECISIVE:
            file = bundle.path / name / part
            data = file.read_bytes() if file.is_file() else b""
            digest.update(f"{name}/{part} {len(data)}\n".encode() + data)
    return digest.hexdigest()


class LoadedComponent:
    """One component: call it as the diffusers forward, by position or by keyword.

    Arguments and results are `mx.array` (NumPy arrays and lists are taken too). Entries other
    than `forward` are methods: `vae.decode(latents)`.
    """

    def __init__(self, path: Path, config: dict[str, Any], executor: Executor) -> None:
        self.path, self.config, self.executor = path, config, executor

    @property
    def program(self) -> Program:
        """The program it runs."""
        return self.executor.program

    @property
    def dtype(self) -> mx.Dtype:
        """Precision of its activations."""
        return self.executor.weights.compute

    @property
    def entries(self) -> list[str]:
        """Names of the entries: `forward`, `decode`, ..."""
        return list(dict.fromkeys(e.name for e in self.program.entries))

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run `forward`, or the one entry there is."""
        names = self.entries
        if "forward" not in names and len(names) > 1:
            raise MlxconvError(f"{self.path}: has no forward; call one of {', '.join(names)}")
        return self._run("forward" if "forward" in names else names[0], *inputs, **named)

    def _run(self, entry: str, /, *inputs: Any, **named: Any) -> Any:
        return self.executor(entry, **self._named(entry, inputs, named))

    def _named(self, entry: str, inputs: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        """Inputs by position joined with those by keyword."""
        if not inputs:
            return named
        order, called = self.program.entry(entry).arguments, f"{self.program.class_name}.{entry}"
        if not order:
            raise MlxconvError(
                f"{self.path}: was converted by an older mlxconv, which did not record the order "
                f"of the inputs of {called}; pass keywords, or convert again"
            )
        if len(inputs) > len(order):
            raise TypeError(f"{called} takes {', '.join(order)}; {len(inputs)} inputs were given")
        found = dict(zip(order, inputs))
        twice = [name for name in found if name in named]
        if twice:
            raise TypeError(f"{called} got {twice[0]} by position and by keyword")
        return {**found, **named}

    def __repr__(self) -> str:
        shown = []
        for name in self.entries:
            paths = (i.path.split(".")[0] for i in self.program.entry(name).inputs)
            shown.append(f"{name}({', '.join(dict.fromkeys(paths))})")
        dtype = str(self.dtype).removeprefix("mlx.core.")
        return f"<{self.program.class_name} in {dtype}: {', '.join(shown)}>"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.entries]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        executor = self.__dict__.get("executor")
        if executor is not None and name in self.entries:
            return partial(self._run, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


def load_component(
    path: str | Path,
    name: str | None = None,
    *,
    dtype: str | None = None,
    compile: str = "off",
    stream: bool = False,
) -> LoadedComponent:
    """Load one component of a bundle, or a component's own folder; weights are read when used.

    `dtype`: precision of the activations ("float32", "bfloat16", "float16"). By default that of
    the conversion; on a CPU quantized weights run in float32, since MLX's CPU product would
    accumulate in bf16. `compile` and `stream`: see `Executor`.
    """
    folder = _component_folder(path, name)
    config = read_json(folder / "config.json")
    ours = config.get("mlxconv")
    if not isinstance(ours, dict) or ours.get("version") != BUNDLE_VERSION:
        raise MlxconvError(
            f"{folder / 'config.json'}: not written by this version of mlxconv; convert again"
        )
    program = load_program(folder / PROGRAM_FILE)
    chosen = dtype or default_dtype(config)
    weights = Weights(
        folder,
        program.parameters,
        program.constants,
        config,
        compute=dtype_of(chosen),
        resident=not stream,
    )
    return LoadedComponent(
        folder, config, Executor(program, weights, compile=compile, stream=stream)
    )


def program_of(path: str | Path, name: str | None = None) -> Program:
    """The program of a bundle's component, without its weights."""
    return load_program(_component_folder(path, name, weights=False) / PROGRAM_FILE)


def default_dtype(config: dict[str, Any]) -> str:
    """Precision of activations for a component's configuration, on the default device."""
    if config.get("quantization") and on_cpu():
        return "float32"
    return str(config["mlxconv"].get("dtype", "float32"))


def _component_folder(given: str | Path, name: str | None, weights: bool = True) -> Path:
    path = Path(given).expanduser()
    if (
        hub_name(given) is None
        and not is_bundle(path)
        and (path / "config.json").is_file()
        and (name is None or not (path / name).is_dir())
    ):
        folder = path
    else:
        bundle = open_bundle(given)
        if name is None:
            names = list(bundle.manifest["components"])
            if len(names) != 1:
                raise MlxconvError(f"{given}: which component? It has {', '.join(names)}")
            name = names[0]
        folder = bundle.component(name, weights=weights)
    if not (folder / PROGRAM_FILE).is_file():
        raise MlxconvError(
            f"{folder}: has no {PROGRAM_FILE}: it was converted weights-only, or copied in part"
        )
    return folder
