"""What may decode latents in place of a pipeline's own VAE: a tiny autoencoder, or a linear map.

Both take the VAE's place in `Parts`, so that a family unpacks and scales latents as usual.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from ..bundle import LoadedComponent, load_component
from ..errors import ArgumentError, MlxconvError
from ..exec.executor import Executor
from .families.parts import Parts

TINY = "tiny_vae"  # the folder in a bundle that `tiny` names
_POOLED = 16  # latents a side, of the small picture that a linear map is fitted to


class Decoder(Protocol):
    """What stands in for the VAE: all that families read of it. The executor is the VAE's own,
    whose weights some normalize latents by (FLUX.2)."""

    config: dict[str, Any]
    executor: Executor

    def decode(self, z: mx.array) -> mx.array:
        """Latents (1, channels, height, width) -> (1, 3, ...) in -1 to 1."""


@contextmanager
def standing_in(parts: Parts, decoder: Decoder | None) -> Iterator[None]:
    """While it lasts, `decoder` is the VAE; None: the VAE itself."""
    if decoder is None:
        yield
        return
    parts.instead["vae"] = decoder
    try:
        yield
    finally:
        del parts.instead["vae"]


class TinyDecoder:
    """An autoencoder of the same latents: TAESD and its like, which take them unscaled."""

    def __init__(self, component: LoadedComponent, vae: LoadedComponent) -> None:
        self.component, self.executor = component, vae.executor
        own = component.config
        if "decode" not in component.entries:
            raise MlxconvError(f"{component.path}: has no decode; give an autoencoder")
        channels = {
            name: c.get("latent_channels") or c.get("z_dim")
            for name, c in (("own", own), ("vae", vae.config))
        }
        if channels["own"] != channels["vae"]:
            raise MlxconvError(
                f"{component.path}: decodes latents of {channels['own']} channels, the pipeline's "
                f"VAE {channels['vae']}; give the tiny autoencoder of this VAE"
            )
        self.config = {**vae.config, **_unscaled(vae.config), **_own_scale(own)}
        self._input = component.program.entry("decode").inputs[0]

    def decode(self, z: mx.array) -> mx.array:
        """As the VAE: latents (1, channels, height, width), or with frames before the height."""
        frames = z.ndim == 5 and len(self._input.type.dims or ()) == 4
        found = self.component.decode(**{self._input.path: z[:, :, 0] if frames else z})
        values: mx.array = found[0] if isinstance(found, tuple) else found
        return values[:, :, None] if frames else values


class LinearDecoder:
    """A linear map of each latent to a colour, fitted to what the VAE makes of them when small.

    Every picture has a map of its own: its latents are averaged down to at most 16 x 16, decoded,
    and the colours of the cells regressed on their latents, with a ridge.
    """

    def __init__(self, vae: LoadedComponent) -> None:
        self._vae, self.config, self.executor = vae, vae.config, vae.executor

    def decode(self, z: mx.array) -> mx.array:
        """Latents (1, channels, [1,] height, width) -> (1, 3, [1,] height, width): a pixel each."""
        frames = z.ndim == 5
        flat = np.array((z[:, :, 0] if frames else z)[0].astype(mx.float32))
        small = _pooled(flat)
        given = mx.array(small)[None]
        (name,) = (i.path for i in self._vae.program.entry("decode").inputs)
        decoded = self._vae.decode(**{name: given[:, :, None] if frames else given})
        decoded = decoded[0] if isinstance(decoded, tuple) else decoded
        colours = np.array((decoded[:, :, 0] if frames else decoded)[0].astype(mx.float32))
        found = _linear(small, _to_cells(colours, small.shape[1:]), flat)
        values = mx.array(found)[None]
        return values[:, :, None] if frames else values


def check_decoder(name: str | Path) -> None:
    """ArgumentError for a path without a folder; `tiny` is of the bundle."""
    if str(name) != "tiny":
        _check_folder(Path(name).expanduser())


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ArgumentError(
            f"{folder}: no such folder; convert a tiny autoencoder of this VAE's latents (TAESD, "
            f"TAESDXL, TAESD3, TAEF1): mlxconv convert SOURCE -o {folder}"
        )


def find_decoder(parts: Parts, name: str | Path) -> TinyDecoder:
    """`tiny`: the bundle's `tiny_vae` folder; else the path of a converted autoencoder."""
    folder = parts.bundle.path / TINY if str(name) == "tiny" else Path(name).expanduser()
    _check_folder(folder)
    component = load_component(folder)
    component = load_component(folder, dtype=parts.precise_enough(component.config))
    return TinyDecoder(component, parts.component("vae"))


def _unscaled(vae: Mapping[str, Any]) -> dict[str, Any]:
    """Options under which latents are taken as the denoiser makes them."""
    neutral: dict[str, Any] = {"scaling_factor": 1.0, "shift_factor": 0.0}
    for name, value in (("latents_mean", 0.0), ("latents_std", 1.0)):
        if isinstance(vae.get(name), list):
            neutral[name] = [value] * len(vae[name])
    return neutral


def _own_scale(own: Mapping[str, Any]) -> dict[str, Any]:
    names = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
    return {name: own[name] for name in names if own.get(name) is not None}


# ---- the linear map ------------------------------------------------------------------------------


def _pooled(z: Any) -> Any:
    """(channels, height, width) averaged down by whole factors to at most 16 a side."""
    for axis in (1, 2):
        size = z.shape[axis]
        count = -(-size // -(-size // _POOLED))
        starts = np.arange(count) * size // count
        widths = np.diff([*starts, size]).reshape([-1 if a == axis else 1 for a in range(3)])
        z = np.add.reduceat(z, starts, axis=axis) / widths
    return z


def _to_cells(colours: Any, cells: tuple[int, ...]) -> Any:
    """(3, rows * a, columns * b) averaged to (3, rows, columns)."""
    rows, columns = cells
    height, width = colours.shape[1] // rows, colours.shape[2] // columns
    return colours.reshape(3, rows, height, columns, width).mean(axis=(2, 4))


def _linear(small: Any, colours: Any, z: Any) -> Any:
    """Regress `colours` (3, cells) on `small` (channels, cells), and apply it to z."""
    x, y = small.reshape(len(small), -1), colours.reshape(3, -1)
    mean, middle = x.mean(axis=1, keepdims=True), y.mean(axis=1, keepdims=True)
    x, ridge = x - mean, 1e-2 * x.shape[1] * max(float(x.var()), 1e-6)
    slopes = np.linalg.solve(x @ x.T + ridge * np.eye(len(x)), x @ (y - middle).T)
    return (slopes.T @ (z.reshape(len(z), -1) - mean) + middle).reshape(3, *z.shape[1:])
