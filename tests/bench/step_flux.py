"""A denoising step of FLUX.1 against mflux's hand-written MLX transformer, same weights.

    python tests/bench/step_flux.py FOLDER --mflux-python OTHER_VENV/bin/python

FOLDER gets, once, a FLUX.1 checkpoint of one double and one single block (true width, random,
seeded) and its fp32 bundle. mflux lives in an environment of its own, with the same MLX. Sides
alternate, one subprocess a repetition, warm-up apart; figures are medians a step. On Linux, MKL
(`pip install mkl`) is preloaded on both sides: MLX's own fp32 product is 27 times slower there.
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

IMAGE_SIDE, TEXT_TOKENS = 16, 64  # 256 image tokens: 256 pixels squared
GUIDANCE = 4.0  # times 1000 exact in bf16, to which models round it
SIDES = ("ours", "mflux")


def timesteps(count: int) -> list[float]:
    """`count` different timesteps; the first is the one whose outputs are compared."""
    return [0.5 - i / 64 for i in range(count)]


def inputs() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    shapes = {
        "hidden_states": (1, IMAGE_SIDE**2, 64),
        "encoder_hidden_states": (1, TEXT_TOKENS, 4096),
        "pooled_projections": (1, 768),
    }
    return {name: rng.standard_normal(s, dtype=np.float32) for name, s in shapes.items()}


# ---- the two sides ------------------------------------------------------------------------------


def prepare(folder: Path) -> None:
    """The checkpoint and its bundle, if they are not there yet."""
    if not (folder / "checkpoint").is_dir():
        import torch
        from diffusers import FluxTransformer2DModel

        torch.manual_seed(0)
        model = FluxTransformer2DModel(num_layers=1, num_single_layers=1, guidance_embeds=True)
        model.save_pretrained(folder / "checkpoint" / "transformer")
    if not (folder / "bundle").is_dir():
        import mlxconv

        mlxconv.convert(folder / "checkpoint" / "transformer", folder / "bundle", "fp32")


def make_ours(folder: Path, compile: str) -> Callable[[float], Any]:
    """Timestep -> output, by the bundle."""
    import mlx.core as mx

    import mlxconv

    transformer = mlxconv.load_component(folder / "bundle", compile=compile)
    grid = np.zeros((IMAGE_SIDE, IMAGE_SIDE, 3), np.float32)
    grid[..., 1] = np.arange(IMAGE_SIDE)[:, None]
    grid[..., 2] = np.arange(IMAGE_SIDE)[None]
    given = {name: mx.array(value) for name, value in inputs().items()}
    given["img_ids"] = mx.array(grid.reshape(-1, 3))
    given["txt_ids"] = mx.zeros((TEXT_TOKENS, 3))
    given["guidance"] = mx.array([GUIDANCE])
    return lambda t: transformer(**given, timestep=mx.array([t]))


def make_mflux(folder: Path, _: str) -> Callable[[float], Any]:
    """Timestep -> output, by mflux's transformer and its own loader, driven as its loop does."""
    from types import SimpleNamespace

    import mlx.core as mx
    from mflux.models.common.config.model_config import ModelConfig
    from mflux.models.common.weights.loading.weight_applier import WeightApplier
    from mflux.models.common.weights.loading.weight_loader import WeightLoader
    from mflux.models.flux.model.flux_transformer.transformer import Transformer
    from mflux.models.flux.weights.flux_weight_definition import FluxWeightDefinition

    ModelConfig.precision = mx.float32
    found = {c.name: c for c in FluxWeightDefinition.get_components()}["transformer"]
    model = Transformer(ModelConfig.dev(), 1, 1)
    weights = WeightLoader.load_single_local(found, folder / "checkpoint")
    WeightApplier.apply_and_quantize_single(weights, model, found, quantize_arg=None)
    given = {name: mx.array(value) for name, value in inputs().items()}
    pixels = 16 * IMAGE_SIDE

    def step(t: float) -> Any:
        config = SimpleNamespace(
            scheduler=SimpleNamespace(sigmas=mx.array([t])), num_train_steps=1000,
            precision=mx.float32, guidance=GUIDANCE, height=pixels, width=pixels,
        )  # fmt: skip
        return model(
            t=0,
            config=config,
            hidden_states=given["hidden_states"],
            prompt_embeds=given["encoder_hidden_states"],
            pooled_prompt_embeds=given["pooled_projections"],
        )

    return step


def cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def measure(step: Callable[[float], Any], count: int, out: Path) -> dict[str, Any]:
    """Seconds of each of `count` steps after two of warm-up, whose first output is saved."""
    import mlx.core as mx

    result = step(timesteps(1)[0])
    mx.eval(result)
    np.save(out, np.array(result))
    mx.eval(step(0.25))
    walls, cpus = [], []
    for t in timesteps(count):
        wall, cpu = time.perf_counter(), cpu_seconds()
        mx.eval(step(t))
        walls.append(time.perf_counter() - wall)
        cpus.append(cpu_seconds() - cpu)
    return {
        "wall": walls,
        "cpu": cpus,
        "peak_gb": mx.get_peak_memory() / 1e9,
        "mlx": version("mlx"),
        "mflux": version("mflux") if "mflux" in sys.modules else None,
    }


def run_side(args: argparse.Namespace) -> None:
    make = {"ours": make_ours, "mflux": make_mflux}[args.side]
    step = make(args.folder, args.compile)
    print(json.dumps(measure(step, args.steps, args.folder / f"{args.side}.npy")))


# ---- comparing ----------------------------------------------------------------------------------


def find_mkl() -> str | None:
    """MKL's one library, where `pip install mkl` puts it."""
    found = sorted(Path(sys.prefix).glob("lib/libmkl_rt.so*"))
    return str(found[-1]) if found else None


def environment(mkl: str | None, threads: int | None) -> dict[str, str]:
    variables = dict(os.environ)
    if mkl:
        variables |= {"LD_PRELOAD": mkl, "MKL_INTERFACE_LAYER": "LP64"}
    if threads:
        variables |= {"MKL_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
    return variables


def repetition(args: argparse.Namespace, side: str) -> dict[str, Any]:
    python = sys.executable if side == "ours" else args.mflux_python
    command = [python, __file__, str(args.folder), "--side", side]
    command += ["--steps", str(args.steps), "--compile", args.compile]
    variables = environment(args.mkl, args.threads)
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def difference(folder: Path) -> float:
    """Relative L2 distance of the two sides' outputs at one timestep."""
    ours, theirs = (np.load(folder / f"{side}.npy").astype(np.float64) for side in SIDES)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def chip() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{named[0] if named else platform.processor()}, {os.cpu_count()} cores"


def compare(args: argparse.Namespace) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for i in range(args.repeats):
        for side in SIDES:
            runs[side].append(repetition(args, side))
            wall, cpu = (statistics.median(runs[side][-1][key]) for key in ("wall", "cpu"))
            print(f"{i} {side:6} wall {wall:.3f} s  cpu {cpu:.3f} s", file=sys.stderr, flush=True)
    report: dict[str, Any] = {
        "chip": chip(),
        "mkl": Path(args.mkl).name if args.mkl else None,
        "threads": args.threads,
        "compile": args.compile,
        "mlx": [runs[side][0]["mlx"] for side in SIDES],
        "mflux": runs["mflux"][0]["mflux"],
        "rel_l2": difference(args.folder),
    }
    for key in ("wall", "cpu"):
        medians = [statistics.median(s for r in runs[side] for s in r[key]) for side in SIDES]
        pairs = zip(*(runs[side] for side in SIDES), strict=True)
        ratios = [statistics.median(a[key]) / statistics.median(b[key]) for a, b in pairs]
        report |= {f"{side}_{key}": m for side, m in zip(SIDES, medians, strict=True)}
        report |= {f"{key}_ratio": statistics.median(ratios), f"{key}_ratios": sorted(ratios)}
    report |= {f"{side}_peak_gb": max(r["peak_gb"] for r in runs[side]) for side in SIDES}
    return report


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path, help="where the model is kept between runs (5 GB)")
    parser.add_argument("--mflux-python", help="interpreter of an environment with mflux")
    parser.add_argument("--repeats", type=int, default=5, help="subprocesses a side")
    parser.add_argument("--steps", type=int, default=6, help="timed steps a subprocess")
    parser.add_argument("--threads", type=int, help="threads of MKL; its own choice by default")
    parser.add_argument("--compile", default="program", choices=("off", "block", "program"))
    parser.add_argument("--mkl", default=find_mkl(), help="libmkl_rt to preload; '' for none")
    parser.add_argument("--side", choices=SIDES, help="run one repetition of one side, here")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.side:
        run_side(args)
        return
    if not args.mflux_python:
        sys.exit("give --mflux-python: the interpreter of an environment with mflux installed")
    args.folder.mkdir(parents=True, exist_ok=True)
    prepare(args.folder)
    report = compare(args)
    print(json.dumps(report, indent=1))
    if report["rel_l2"] > 1e-3:
        sys.exit(f"the outputs differ: rel_l2 {report['rel_l2']:.1e}, expected at most 1e-3")


if __name__ == "__main__":
    main()
