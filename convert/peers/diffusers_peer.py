"""One repetition of `bench --against diffusers` or `diffusers-compiled`: the reference's step, in a
process of its own.

python -m mlxconv.convert.peers.diffusers_peer '{"source": "...", "bundle": "...", ...}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import mlx.core as mx
import numpy as np
import torch

from mlxconv.runtime.bench.examples import Example
from mlxconv.runtime.bench.worker import Repetition, example_of
from mlxconv.runtime.bundle import load_component
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import counted
from mlxconv.runtime.machine import peak_rss_bytes

from ..recipe.reading import bundle_recipe
from ..source.arrays import mlx_to_torch
from ..source.checkpoint import open_checkpoint
from ..verify.reference import Reference, load_reference

_WIDE = {torch.int32: torch.int64}


def run(data: dict[str, Any]) -> dict[str, Any]:
    """Load the checkpoint as diffusers loads it, a first step, then the timed ones."""
    job = Repetition.of(data)
    component = load_component(job.bundle, job.component, dtype=job.dtype)
    example = example_of(job, component)
    method = (
        bundle_recipe(component.path, component.program.class_name)
        .program(example.entry.name)
        .method
    )
    began = time.perf_counter()
    (source,) = open_checkpoint(data["source"]).components.values()
    reference = load_reference(source, getattr(torch, data["dtype"]))
    loaded = time.perf_counter()
    if data.get("compiled"):
        owner, _, name = f"module.{method}".rpartition(".")
        holder = attrgetter(owner)(reference)
        setattr(holder, name, torch.compile(getattr(holder, name)))
    try:
        output = _step(reference, method, example, 0)
    except Exception as error:
        if not data.get("compiled"):
            raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
        raise MlxconvError(
            f"torch.compile failed ({lines[0]:.200}); it needs a working C++ compiler: g++ or "
            "clang++, or the one that the environment variable CXX names"
        ) from error
    first = time.perf_counter() - loaded
    np.save(data["output"], output)
    steps, cpu = [], time.process_time()
    for i in range(job.steps):
        start = time.perf_counter()
        _step(reference, method, example, i)
        steps.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    return {
        "load": loaded - began,
        "first_step": first,
        "steps": steps,
        "cpu": cpu,
        "count": job.steps,
        "peak_rss_bytes": peak_rss_bytes(),
        "version": _version(reference) + (", torch.compile" if data.get("compiled") else ""),
    }


def _step(reference: Reference, method: str, example: Example, step: int) -> Any:
    inputs = {k: _as_torch(v) for k, v in example.at_step(step).items()}
    return reference.run(method, inputs)[0][0].astype(np.float32)


def _as_torch(value: Any) -> Any:
    if isinstance(value, mx.array):
        tensor = mlx_to_torch(value)
        return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))
    if isinstance(value, Mapping):
        return {k: _as_torch(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_as_torch(v) for v in value]
    return value


def _version(reference: Reference) -> str:
    import diffusers

    with reference.running():
        threads = torch.get_num_threads()
    return f"{diffusers.__version__} (torch {torch.__version__}, {counted(threads, 'thread')})"


def main() -> None:
    """Run the job on the command line; the last line on stdout is its figures."""
    try:
        print(json.dumps(run(json.loads(sys.argv[1]))))
    except MlxconvError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
