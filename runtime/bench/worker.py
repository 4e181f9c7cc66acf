"""One repetition of a benchmark, in a process of its own: a job as JSON in, figures as JSON out.

    python -m mlxconv.runtime.bench.worker '{"bundle": "...", ...}'

A change to the job is a row of `bench --ablate`; what it does to the program or to the op set
(`unfusing.py`) ends with the process.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import mlx.core as mx
import numpy as np

from ..bundle import LoadedComponent, load_component
from ..errors import MlxconvError
from ..exec.weights import Weights
from ..generate.denoise import LoopSettings, Progress, denoise
from ..generate.staging import Staged
from ..machine import peak_rss_bytes
from ..schedulers import Schedule, make_schedule, scheduler_of
from .examples import Example, Sizes, make_example
from .flops import gemm_seconds, step_products
from .unfusing import apply_change, with_ids_in_the_loop

Model = Callable[[int, mx.array], mx.array]
EULER = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
GUIDANCE = ("none", "batched", "sequential")


@dataclass(frozen=True)
class Repetition:
    """What to run. `scalars`: how the loop's coefficients are passed; "table" is the product's.

    `change`: a name of `unfusing.CHANGES`; `fold`: rotary tables outside of the loop.
    """

    bundle: str
    component: str | None
    steps: int = 4
    pixels: tuple[int, int] | None = None
    dims: dict[str, int] = field(default_factory=dict)
    batch: int = 1
    dtype: str | None = None
    compile: str = "program"
    guidance: str = "none"
    staged: bool = True
    fold: bool = True
    scalars: str = "table"
    evaluate_every: int = 1
    clear_cache_every: int = 0
    change: str | None = None
    gemm: bool = True
    output: str | None = None
    final: str | None = None
    inputs: str | None = None

    @classmethod
    def of(cls, data: dict[str, Any]) -> "Repetition":
        """A job of its JSON form."""
        pixels = data.get("pixels")
        known = {f.name for f in fields(cls)}
        values = {k: v for k, v in data.items() if k in known}
        return cls(**{**values, "pixels": None if pixels is None else (pixels[0], pixels[1])})

    def sizes(self, batch: int) -> Sizes:
        """The sizes of one call."""
        return Sizes(self.pixels, self.dims, batch)


def run(job: Repetition) -> dict[str, Any]:
    """Load, prepare, a first step, then the timed loop; afterwards what a step computes."""
    began = time.perf_counter()
    component = load(job)
    example = example_of(job, component)
    loaded = time.perf_counter()
    model = _model(job, component, example)
    prepared = time.perf_counter()
    figures: dict[str, Any] = {
        "load": loaded - began,
        "prepare": prepared - loaded,
        **_first(job, model, example.latents()),
        "prepare_peak_bytes": mx.get_peak_memory(),
        **_timed(job, model, example.latents()),
        "dims": example.dims,
        "dtype": str(component.dtype).removeprefix("mlx.core."),
        "class": component.program.class_name,
    }
    _save_inputs(job.inputs, example)
    return {**figures, **(_arithmetic(job, component, example) if job.gemm else {})}


def _first(job: Repetition, model: Model, latents: mx.array) -> dict[str, Any]:
    """The first step: it reads the weights that the loop keeps, and compiles."""
    began = time.perf_counter()
    with reads_timed() as reads:
        output = model(0, latents)
        mx.eval(output)
    seconds = time.perf_counter() - began
    _save(job.output, output)
    return {"first_step": seconds, "read": sum(reads)}


def _timed(job: Repetition, model: Model, latents: mx.array) -> dict[str, Any]:
    """The loop, after one of a single step that compiles the scheduler's part."""
    _loop(job, model, latents, 1)
    mx.reset_peak_memory()
    cpu = time.process_time()
    seconds, steps, last = _loop(job, model, latents, job.steps)
    cpu = time.process_time() - cpu
    _save(job.final, last)
    memory = {"peak_bytes": mx.get_peak_memory(), "peak_rss_bytes": peak_rss_bytes()}
    return {"loop": seconds, "cpu": cpu, "count": job.steps, "steps": steps, **memory}


@contextmanager
def reads_timed() -> Iterator[list[float]]:
    """Seconds of each look-up of weights while it lasts: a first step reads what it keeps."""
    seconds: list[float] = []

    def timed(look_up: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.perf_counter()
            try:
                return look_up(*args)
            finally:
                seconds.append(time.perf_counter() - began)

        return call

    before = Weights.get, Weights.stack
    Weights.get, Weights.stack = timed(before[0]), timed(before[1])  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Weights.get, Weights.stack = before  # type: ignore[method-assign]


def load(job: Repetition) -> LoadedComponent:
    """The component, with the job's change made to it."""
    component = load_component(job.bundle, job.component, dtype=job.dtype)
    if job.change is not None:
        component = apply_change(component, job.change)
    return component if job.fold else with_ids_in_the_loop(component)


def example_of(job: Repetition, component: LoadedComponent) -> Example:
    """The inputs of a call: twice the batch where both predictions are made in one."""
    batch = 2 * job.batch if job.guidance == "batched" else job.batch
    compute = str(component.dtype).removeprefix("mlx.core.")
    name = component.entries[0] if "forward" not in component.entries else "forward"
    return make_example(
        component.program,
        component.config,
        name,
        job.sizes(batch),
        steps=max(job.steps, 2),
        compute=compute,
    )


def _model(job: Repetition, component: LoadedComponent, example: Example) -> Model:
    """A step's number and latents -> a prediction of the latents' shape."""
    call = _staged(job, component, example) if job.staged else _whole(job, component, example)
    if job.guidance != "sequential":
        return call

    def twice(step: int, latents: mx.array) -> mx.array:
        positive, negative = call(step, latents), call(step, latents + 0)
        return negative + 4 * (positive - negative)

    return twice


def _staged(job: Repetition, component: LoadedComponent, example: Example) -> Model:
    prepared = Staged(component, example.entry.name, compile=job.compile).prepare(
        example.inputs, example.schedule
    )
    return lambda step, x: _fitted(prepared(step % prepared.steps, **example.moved(x)), x)


def _whole(job: Repetition, component: LoadedComponent, example: Example) -> Model:
    executor = component.executor
    executor.compile = job.compile
    return lambda step, x: _fitted(
        executor(example.entry.name, **{**example.at_step(step), **example.moved(x)}), x
    )


def _fitted(output: Any, latents: mx.array) -> mx.array:
    """An output as a prediction of the latents' shape: some give a variance too, or less."""
    found: mx.array = output[0] if isinstance(output, (tuple, list)) else output
    if found.shape == latents.shape:
        return found
    if found.size < latents.size:
        return mx.broadcast_to(found.mean(), latents.shape)
    return found.reshape(-1)[: latents.size].reshape(latents.shape)


# ---- the loop -----------------------------------------------------------------------------------


def _loop(
    job: Repetition, model: Model, latents: mx.array, steps: int
) -> tuple[float, list[float], mx.array]:
    """Seconds of the whole, of each step where each is evaluated, and the last latents."""
    schedule = make_schedule(scheduler_of(EULER), steps)
    if job.scalars != "table":
        return _plain_loop(job, model, latents, schedule)
    ends: list[float] = []

    def told(progress: Progress) -> None:
        ends.append(progress.seconds)

    settings = LoopSettings(job.evaluate_every, job.clear_cache_every)
    began = time.perf_counter()
    last = denoise(model, latents, schedule, settings=settings, callback=told)
    seconds = time.perf_counter() - began
    each = [b - a for a, b in zip([0.0, *ends], ends)] if job.evaluate_every == 1 else []
    return seconds, each, last


def _plain_loop(
    job: Repetition, model: Model, latents: mx.array, schedule: Schedule
) -> tuple[float, list[float], mx.array]:
    """Euler's method written out: x + (next sigma - sigma) v, by numbers or by arrays."""
    sigmas = [float(s) for s in schedule.sigmas]
    made = [mx.array(s) for s in sigmas]
    mx.eval(made)
    coefficient: dict[str, Callable[[int], Any]] = {
        "numbers": lambda i: sigmas[i],
        "inside": lambda i: mx.array(sigmas[i]),
        "outside": lambda i: made[i],
    }
    sigma, x, ends = coefficient[job.scalars], latents, []
    began = time.perf_counter()
    for i in range(schedule.calls):
        x = x + (sigma(i + 1) - sigma(i)) * model(i, x)
        mx.eval(x)
        ends.append(time.perf_counter() - began)
    return ends[-1], [b - a for a, b in zip([0.0, *ends], ends)], x


# ---- beside the time ----------------------------------------------------------------------------


def _arithmetic(job: Repetition, component: LoadedComponent, example: Example) -> dict[str, Any]:
    products = step_products(component, example, staged=job.staged)
    calls = 2 if job.guidance == "sequential" else 1
    seconds = gemm_seconds(products, component.dtype)
    return {"flops": products.flops * calls, "gemm": seconds * calls}


def _save(path: str | None, array: mx.array) -> None:
    if path is not None:
        np.save(path, np.array(array.astype(mx.float32)))


def _save_inputs(path: str | None, example: Example) -> None:
    """For a peer that makes none itself."""
    if path is not None:
        # numpy writes it: MLX's threads would hold the file while this process ends, and abort it.
        flat = _flat(example.at_step(0), "")
        arrays = {k: np.array(v.astype(mx.float32)) for k, v in flat.items()}
        np.savez(path, allow_pickle=False, **arrays)


def _flat(value: Any, path: str) -> dict[str, mx.array]:
    if isinstance(value, mx.array):
        return {path: value}
    if not isinstance(value, (dict, list)):
        return {}
    found = {}
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found.update(_flat(item, f"{path}.{key}".lstrip(".")))
    return found


def main() -> None:
    """Run the job on the command line; the last line on stdout is its figures."""
    try:
        print(json.dumps(run(Repetition.of(json.loads(sys.argv[1])))))
    except MlxconvError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
