"""Pictures and trajectories: one prompt, seed, size and number of steps through both pipelines.

Three runs by diffusers may be needed beside the bundle's: in float32 with the checkpoint's weights;
in float32 with the bundle's weights, dequantized, where it is quantized; and in the bundle's
precision, where that is half, on noise that all runs then share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import diffusers
import numpy as np

from mlxconv.runtime.bundle import Bundle, read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.families import FAMILIES
from mlxconv.runtime.program.program import PROGRAM_FILE
from mlxconv.runtime.program.stored import load_program

from ..into_diffusers.replace import into_diffusers
from ..source.checkpoint import Checkpoint
from .dequantized import dequantized_tensors
from .forward import HALF_FACTOR
from .metrics import QUANTIZATION_ERROR, Array, Row, Sums, compare, make_row, psnr_db
from .pipelines import (
    Noise,
    Request,
    Run,
    call_arguments,
    load_pipeline,
    native_request,
    pipeline_class,
    run_native,
    run_pipeline,
)
from .reference import Reference, replaced_weights

PIPELINE = "pipeline"  # `component` of the rows
LEAST_DB = 50.0  # PSNR of pictures, signal to noise of latents: steps and guidance add errors up
_LIMIT = 10 ** (-LEAST_DB / 20)
_RUNTIME = " (runtime)"


@dataclass(frozen=True)
class PipelineCase:
    """A bundle's pipeline beside its checkpoint's. components: those to run in MLX; all if none."""

    bundle: Bundle
    checkpoint: Checkpoint
    components: tuple[str, ...]
    request: Request
    dtype: str | None
    threshold: float | None

    @cached_property
    def replaced(self) -> list[str]:
        """Components that run in MLX; MlxconvError where there is none, or no pipeline."""
        for path, whole in (
            (self.checkpoint.path, self.checkpoint.class_name is not None),
            (self.bundle.path, (self.bundle.path / "model_index.json").is_file()),
        ):
            if not whole:
                raise MlxconvError(
                    f"{path}: has no pipeline (model_index.json), which comparing images needs; "
                    "use --tier forward or block"
                )
        names = self.components or tuple(self.bundle.manifest["components"])
        found = [n for n in names if (self.bundle.component(n) / PROGRAM_FILE).is_file()]
        if not found:
            raise MlxconvError(
                f"{self.bundle.path}: no program for {', '.join(names)}, nothing to run in MLX; "
                "convert without --weights-only"
            )
        return found

    def _config(self, name: str) -> dict[str, Any]:
        return read_json(self.bundle.component(name) / "config.json")

    @cached_property
    def quantized(self) -> bool:
        """Whether a component that runs has quantized weights."""
        return any(self._config(name).get("quantization") for name in self.replaced)

    @cached_property
    def dtypes(self) -> dict[str, str]:
        """Precision of the run, a component; quantized bundles are compared in float32."""
        asked = self.dtype or ("float32" if self.quantized else None)
        found = {n: asked or str(self._config(n)["mlxconv"]["dtype"]) for n in self.replaced}
        narrow = [dtype for dtype in found.values() if dtype != "float32"]
        return {**found, "default": narrow[0] if narrow else "float32"}

    @property
    def half(self) -> bool:
        """Whether some of it runs in half precision."""
        return self.dtypes["default"] != "float32"

    @property
    def precision(self) -> str:
        """That of the components that run, all of them where they differ."""
        return ", ".join(sorted({self.dtypes[n] for n in self.replaced}))

    @cached_property
    def native(self) -> bool:
        """Whether the native pipeline runs: the class has a family, all of it was converted."""
        family = FAMILIES.get(self.checkpoint.class_name or "")
        if family is None or self.components:
            return False
        needed = {family.denoiser, *family.encoders, "vae"} & set(self.checkpoint.components)
        return needed <= set(self.replaced)

    @cached_property
    def asked(self) -> Request:
        """The request, with the defaults that the two sides do not share."""
        return native_request(self.bundle.path, self.request) if self.native else self.request

    @cached_property
    def calls(self) -> list[dict[str, Any]]:
        """Keywords of diffusers' pipeline, a prompt; MlxconvError for what it cannot do."""
        cls = pipeline_class(self.checkpoint)
        return [call_arguments(cls, self.asked, prompt) for prompt in self.asked.prompts]

    def check(self) -> None:
        """MlxconvError for what cannot be run, before any weight is read."""
        _ = self.replaced, self.calls

    def described(self) -> dict[str, Any]:
        """How the pictures are asked for; None: the pipeline's own default."""
        width, height = self.asked.size or (None, None)
        return {
            "pipeline": self.checkpoint.class_name,
            "runtime": "native" if self.native else "into_diffusers",
            "components": self.replaced,
            "precision": self.precision,
            "prompts": list(self.asked.prompts),
            "steps": self.asked.steps,
            "width": width,
            "height": height,
            "guidance": self.asked.guidance,
            "seed": self.asked.seed,
        }

    def load(self, *, exact: bool) -> Any:
        """diffusers' pipeline, in float32 or in the precision of the run."""
        dtypes = {"default": "float32"} if exact else self.dtypes
        return load_pipeline(self.checkpoint, dtypes, self.bundle.manifest.get("variant"))

    def run(self, pipe: Any, noise: Sequence[Noise]) -> list[Run]:
        """All prompts by diffusers' pipeline."""
        seed = self.request.seed
        return [run_pipeline(pipe, call, seed, drawn) for call, drawn in zip(self.calls, noise)]

    def run_natively(self) -> list[Run]:
        """All prompts by the bundle, without PyTorch."""
        dtype = self.dtype or ("float32" if self.quantized else None)
        return run_native(self.bundle.path, dtype, self.asked)

    def run_replaced(self, pipe: Any) -> list[Run]:
        """All prompts by diffusers' pipeline, its modules replaced by the bundle's."""
        for name in self.replaced:
            into_diffusers(pipe, self.bundle.path, components=[name], dtype=self.dtypes[name])
        return self.run(pipe, [Noise() for _ in self.calls])

    @contextmanager
    def own_weights(self, pipe: Any) -> Iterator[None]:
        """The bundle's weights, dequantized, in a pipeline of diffusers, for a while."""
        with ExitStack() as stack:
            for name in self.replaced if self.quantized else []:
                folder = self.bundle.component(name)
                program, config = load_program(folder / PROGRAM_FILE), self._config(name)
                tensors = dequantized_tensors(folder, program, config)
                reference = Reference(getattr(pipe, name), "")
                stack.enter_context(replaced_weights(reference, tensors))
            yield


@dataclass
class Compared:
    """One prompt's runs. exact: float32 with the bundle's weights; half: those in its precision;
    original: float32 with the checkpoint's, where the bundle is quantized."""

    prompt: str
    label: str  # of its rows, where there are several prompts
    reference: str
    ours: Run
    exact: Run
    half: Run | None = None
    original: Run | None = None


def run_both(case: PipelineCase, say: Callable[[str], None] = lambda text: None) -> list[Compared]:
    """Every prompt through both sides, one pipeline in memory at a time."""
    noise = [Noise() for _ in case.calls]
    say(f"pipeline: running diffusers in fp32, the bundle in {case.precision}")
    ours = case.run_natively() if case.native else []
    half, original = list[Run](), list[Run]()
    if case.half:
        pipe = case.load(exact=False)
        with case.own_weights(pipe):
            half = case.run(pipe, noise)
        ours = ours or case.run_replaced(pipe)
        del pipe
    pipe = case.load(exact=True)
    if case.quantized:
        original = case.run(pipe, noise)
    with case.own_weights(pipe):
        exact = case.run(pipe, noise)
    ours = ours or case.run_replaced(pipe)
    reference, several = f"diffusers {diffusers.__version__} fp32 cpu", len(ours) > 1
    return [
        Compared(
            prompt,
            f"prompt {i + 1}, " if several else "",
            reference,
            ours[i],
            exact[i],
            half[i] if half else None,
            original[i] if original else None,
        )
        for i, prompt in enumerate(case.request.prompts)
    ]


# ---- judging -------------------------------------------------------------------------------------


def trajectory_rows(compared: Compared, threshold: float | None) -> list[Row]:
    """A row for the latents after each call of the scheduler."""
    count = len(compared.exact.latents)
    if not count or len(compared.ours.latents) != count:
        raise MlxconvError(
            f"the bundle's schedule has {len(compared.ours.latents)} steps, that of diffusers "
            f"{count}: trajectories cannot be compared"
        )
    rows: list[Row] = []
    for i in range(count):
        name = f"{compared.label}step {i + 1} of {count}"
        rows += _rows("trajectory", name, compared, threshold, partial(_latents, i))
    return rows


def image_rows(compared: Compared, threshold: float | None) -> list[Row]:
    """A row for the pictures of a prompt; MlxconvError where the pipeline makes none."""
    if compared.exact.pixels is None or compared.ours.pixels is None:
        raise MlxconvError("the pipeline makes no images; use --tier trajectory")
    shape = compared.exact.pixels.shape
    name = f"{compared.label}{shape[2]}x{shape[1]}"
    rows = _rows("image", name, compared, threshold, _pixels)
    flat = compared.exact.pixels.std() < 1 / 255
    note = "the picture is of one colour: it says little" if flat else ""
    return [replace(r, note=", ".join(filter(None, (r.note, note)))) for r in rows]


def _latents(step: int, run: Run) -> Array:
    return run.latents[step]


def _pixels(run: Run) -> Array:
    assert run.pixels is not None
    return run.pixels


def _rows(
    tier: str, name: str, compared: Compared, threshold: float | None, part: Callable[[Run], Array]
) -> list[Row]:
    """The row that is judged, and before it what quantization cost, where there is any."""
    ours, exact, label = part(compared.ours), part(compared.exact), compared.reference
    sums = _sums(ours, exact)
    limit = _limit(tier, sums, exact.size) if threshold is None else threshold
    if compared.half is not None and threshold is None:
        limit = max(limit, HALF_FACTOR * _sums(part(compared.half), exact).rel_l2)
    quantized = compared.original is not None
    shown = f"{label}, dequantized weights" if quantized else label
    row = make_row(tier, PIPELINE, name + _RUNTIME * quantized, sums, limit, shown)
    row = _with_psnr(row, sums, exact.size)
    if compared.original is None:
        return [row]
    cost = _sums(ours, part(compared.original))
    first = make_row(
        tier, PIPELINE, name, cost, None, label, passed=row.passed, note=QUANTIZATION_ERROR
    )
    return [_with_psnr(first, cost, exact.size), row]


def _sums(a: Array, b: Array) -> Sums:
    return compare([a.reshape(b.shape) if a.size == b.size else a], [b])


def _limit(tier: str, sums: Sums, count: int) -> float:
    """LEAST_DB as a `rel_l2`: of latents to themselves, of pictures to a peak of 1."""
    if tier != "image":
        return _LIMIT
    root = math.sqrt(count)
    return _LIMIT * root / math.sqrt(sums.reference) if sums.reference else _LIMIT * root


def _with_psnr(row: Row, sums: Sums, count: int) -> Row:
    return replace(row, psnr_db=psnr_db(sums, count)) if row.tier == "image" else row


def worst_frame(a: Array, b: Array) -> int:
    """Which of several pictures (n, height, width, channels) differs most."""
    gaps = ((a.astype(np.float64) - b) ** 2).reshape(len(a), -1).mean(axis=1)
    return int(np.nan_to_num(gaps, nan=math.inf).argmax())
