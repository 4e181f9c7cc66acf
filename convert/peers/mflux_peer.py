"""One repetition of `bench --against mflux`: run by the interpreter that has mflux, not by ours.

    OTHER_VENV/bin/python mflux_peer.py '{"source": "...", "inputs": "....npz", ...}'

FLUX.1 and Qwen-Image, by mflux's transformers and its own loader, driven as its loop does. It
builds some widths in, so the checkpoint has to be of true width; the number of blocks is free.
"""

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np

Step = Callable[[float], Any]


def flux(job: dict[str, Any], root: Path, config: dict[str, Any]) -> Step:
    """Timestep -> output of mflux's FLUX.1 transformer."""
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.flux.model.flux_transformer.transformer import Transformer
    from mflux.models.flux.weights.flux_weight_definition import FluxWeightDefinition

    ModelConfig.precision = getattr(mx, job["dtype"])
    kind = ModelConfig.dev() if config.get("guidance_embeds") else ModelConfig.schnell()
    model = Transformer(kind, config["num_layers"], config["num_single_layers"])
    _load(model, FluxWeightDefinition, root)
    given = _inputs(job)
    guidance = float(np.array(given["guidance"])[0]) if "guidance" in given else None
    return lambda t: model(
        t=0,
        config=_config(job, t, guidance),
        hidden_states=given["hidden_states"],
        prompt_embeds=given["encoder_hidden_states"],
        pooled_prompt_embeds=given["pooled_projections"],
    )


def qwen_image(job: dict[str, Any], root: Path, config: dict[str, Any]) -> Step:
    """Timestep -> output of mflux's Qwen-Image transformer."""
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.qwen.model.qwen_transformer.qwen_transformer import QwenTransformer
    from mflux.models.qwen.weights.qwen_weight_definition import QwenWeightDefinition

    ModelConfig.precision = getattr(mx, job["dtype"])
    names = (
        "in_channels",
        "out_channels",
        "num_layers",
        "attention_head_dim",
        "num_attention_heads",
        "joint_attention_dim",
        "patch_size",
    )
    model = QwenTransformer(**{k: config[k] for k in names if config.get(k) is not None})
    _load(model, QwenWeightDefinition, root)
    given = _inputs(job)
    mask = mx.ones(given["encoder_hidden_states"].shape[:2])
    return lambda t: model(
        t=0,
        config=_config(job, t, None),
        hidden_states=given["hidden_states"],
        encoder_hidden_states=given["encoder_hidden_states"],
        encoder_hidden_states_mask=mask,
    )


MODELS = {"FluxTransformer2DModel": flux, "QwenImageTransformer2DModel": qwen_image}


def _load(model: Any, definition: Any, root: Path) -> None:
    from mflux.models.common.weights.loading.weight_applier import WeightApplier
    from mflux.models.common.weights.loading.weight_loader import WeightLoader

    found = {c.name: c for c in definition.get_components()}["transformer"]
    weights = WeightLoader.load_single_local(found, root)
    WeightApplier.apply_and_quantize_single(weights, model, found, quantize_arg=None)


def _inputs(job: dict[str, Any]) -> dict[str, mx.array]:
    dtype = getattr(mx, job["dtype"])
    return {name: mx.array(value).astype(dtype) for name, value in np.load(job["inputs"]).items()}


def _config(job: dict[str, Any], t: float, guidance: float | None) -> Any:
    return SimpleNamespace(
        scheduler=SimpleNamespace(sigmas=mx.array([t])),
        num_train_steps=1000,
        precision=getattr(mx, job["dtype"]),
        guidance=guidance,
        height=job["height"],
        width=job["width"],
    )


def measure(job: dict[str, Any], root: Path) -> dict[str, Any]:
    """Seconds of loading, of a first step, and of each timed one; its first output is saved."""
    config = json.loads((root / "transformer" / "config.json").read_text(encoding="utf-8"))
    began = time.perf_counter()
    step = MODELS[job["class"]](job, root, config)
    loaded = time.perf_counter()
    timesteps = [1 - (i % 64) / 64 for i in range(job["steps"])]
    output = step(timesteps[0])
    mx.eval(output)
    first = time.perf_counter() - loaded
    np.save(job["output"], np.array(output.astype(mx.float32)))
    mx.reset_peak_memory()
    steps, cpu = [], time.process_time()
    for t in timesteps:
        start = time.perf_counter()
        mx.eval(step(t))
        steps.append(time.perf_counter() - start)
    cpu = time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "load": loaded - began,
        "first_step": first,
        "steps": steps,
        "cpu": cpu,
        "count": job["steps"],
        "peak_bytes": mx.get_peak_memory(),
        "peak_rss_bytes": peak if sys.platform == "darwin" else peak * 1024,
        "version": f"{version('mflux')} (mlx {version('mlx')})",
    }


def main() -> None:
    """mflux looks for `transformer/` under a root: one is made where the folder is called else."""
    job = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "transformer").symlink_to(Path(job["source"]).absolute())
        print(json.dumps(measure(job, Path(folder))))


if __name__ == "__main__":
    main()
