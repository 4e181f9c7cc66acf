"""Reproduces figures of docs/PERFORMANCE.md that are too slow for the test suite.

    python tests/bench/figures.py depth CLASS     parity at full depth, narrow width
    python tests/bench/figures.py trace CLASS     real size, no weights: time, memory, JSON
    python tests/bench/figures.py size CLASS PX...  an autoencoder's error in fp32 by picture size
    python tests/bench/figures.py make FOLDER D S a FLUX.1-shaped bf16 checkpoint of D + S blocks
    python tests/bench/figures.py convert FOLDER Q   convert it: CPU seconds beyond tracing, memory
    python tests/bench/figures.py plain FOLDER    the same to 4 bit by mx.quantize and mx.save alone
    python tests/bench/figures.py refit           gain of the default rounding over mx.quantize
    python tests/bench/figures.py strips PIXELS MIB  memory of decoding whole and in strips
    python tests/bench/figures.py decoder         cost of half precision in the trained VAE
    python tests/bench/figures.py steps PROMPTS   solvers and numbers of steps on the trained model

Each prints one JSON object. Nothing is downloaded; weights are seeded noise.
"""

import json
import math
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

DEEP = {
    "FluxTransformer2DModel": {"num_layers": 19, "num_single_layers": 38},
    "QwenImageTransformer2DModel": {"num_layers": 60},
}
NARROW: dict[str, dict[str, Any]] = {  # as many values in a group as at true width
    "AutoencoderKL": {
        "block_out_channels": [32, 32, 32, 32], "norm_num_groups": 8, "layers_per_block": 2,
    },
}  # fmt: skip
REAL: dict[str, dict[str, Any]] = {
    "FluxTransformer2DModel": {"guidance_embeds": True},  # FLUX.1-dev
    "QwenImageTransformer2DModel": {},
    "SD3Transformer2DModel": {  # 3.5-large
        "num_layers": 38, "num_attention_heads": 38, "caption_projection_dim": 2432,
        "pos_embed_max_size": 192, "qk_norm": "rms_norm", "out_channels": 16,
    },
    "ZImageTransformer2DModel": {},
    "Flux2Transformer2DModel": {},
    "WanTransformer3DModel": {},
}  # fmt: skip


def peak_bytes() -> int:
    """Peak resident memory of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return usage if sys.platform == "darwin" else usage * 1024


def depth(class_name: str) -> dict[str, Any]:
    """fp32 parity of the recipe's tiny width at the real number of blocks."""
    from mlxconv.convert.catalog.figures import measure
    from mlxconv.convert.recipe.reading import load_recipe

    recipe = load_recipe(class_name)
    deep = replace(recipe, tiny={**recipe.tiny, **DEEP[class_name]})
    rows = list(measure(deep, None, ("fp32", "4bit")))
    return {"class": class_name, **DEEP[class_name]} | {
        row.q: {"rel_l2": row.rel_l2, "runtime": row.runtime, "passed": row.passed} for row in rows
    }


def trace(class_name: str) -> dict[str, Any]:
    """Trace, lower, rewrite, outline and write the program of the class at real size."""
    import diffusers

    from mlxconv.convert.lower.compile import compile_program
    from mlxconv.convert.recipe.reading import load_recipe
    from mlxconv.runtime.program.stored import to_json

    base = peak_bytes()
    started, cpu = time.perf_counter(), time.process_time()
    cls = getattr(diffusers, class_name)
    made = compile_program(cls, REAL[class_name], load_recipe(class_name))
    text = to_json(made.program)
    parameters = sum(_size(p.shape) for p in made.parameters.values())
    return {
        "class": class_name,
        "parameters": parameters,
        "seconds": round(time.perf_counter() - started, 1),
        "cpu_seconds": round(time.process_time() - cpu, 1),
        "peak_rss_gib": round(peak_bytes() / 2**30, 2),
        "rss_before_gib": round(base / 2**30, 2),
        "json_mb": round(len(text) / 1e6, 3),
        "nodes": made.program.count_nodes(),
        "blocks": len(made.program.blocks),
        "entries": len(made.program.entries),
    }


def size(class_name: str, *pixels: str) -> dict[str, Any]:
    """The error of each entry at these sizes, beside that of sums added one after the other."""
    from mlxconv.convert.catalog.figures import tiny_checkpoint
    from mlxconv.convert.conversion import convert as run
    from mlxconv.convert.recipe.reading import load_recipe
    from mlxconv.convert.verify.verify import verify
    from mlxconv.runtime.ops import long_sums

    recipe = load_recipe(class_name)
    recipe = replace(recipe, tiny={**recipe.tiny, **NARROW.get(class_name, {})})
    found: dict[str, Any] = {"class": class_name, **NARROW.get(class_name, {})}
    with tempfile.TemporaryDirectory() as name:
        source = tiny_checkpoint(recipe, None, Path(name) / "source")
        run(source, Path(name) / "bundle", "fp32")
        for side in map(int, pixels):
            for way, long in (("in rows", long_sums.LONG), ("one by one", sys.maxsize)):
                before, long_sums.LONG = long_sums.LONG, long
                report = verify(Path(name) / "bundle", source, size=(side, side))
                long_sums.LONG = before
                found[f"{side} {way}"] = {
                    row.name: float(f"{row.rel_l2:.2g}")
                    for row in report.tiers
                    if row.tier == "forward"
                }
    return found


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def make(folder: str, double: str, single: str) -> dict[str, Any]:
    """A FLUX.1-dev-shaped checkpoint of that many blocks, true width, bf16 noise of std 0.02."""
    import diffusers
    import numpy as np

    from mlxconv.convert.store.writer import Output, pass_through, write_weights
    from mlxconv.convert.trace.fake_module import build_module

    config = {"num_layers": int(double), "num_single_layers": int(single), "guidance_embeds": True}
    module, _ = build_module(diffusers.FluxTransformer2DModel, config)
    noise = np.random.default_rng(0).standard_normal(8_000_003).astype(np.float32) * 0.02
    halves = (noise.view(np.uint32) >> 16).astype(np.uint16)

    def chunks(count: int, offset: int) -> Any:
        while count:
            piece = halves[offset : offset + count]
            yield piece.tobytes()
            count, offset = count - len(piece), 0

    groups = []
    for i, (name, value) in enumerate(module.state_dict(keep_vars=True).items()):
        output = Output(name, tuple(value.shape), "BF16")
        start = i * 1_234_567 % len(halves)
        groups.append(pass_through(output, partial(chunks, value.numel(), start)))
    target = Path(folder)
    target.mkdir(parents=True)
    write_weights(target, "diffusion_pytorch_model", groups, max_shard_bytes=10_000_000_000)
    for file in target.glob("*.safetensors"):
        _call_it_pytorch(file)
    head = {"_class_name": "FluxTransformer2DModel", "_diffusers_version": diffusers.__version__}
    (target / "config.json").write_text(json.dumps({**head, **config}))
    return {"folder": folder, "bytes": sum(f.stat().st_size for f in target.glob("*.safetensors"))}


def _call_it_pytorch(file: Path) -> None:
    """Our writer marks files as MLX's; a source must not be."""
    with file.open("r+b") as stream:
        head = stream.read(4096)
        stream.seek(head.index(b'"mlx"'))
        stream.write(b'"pt" ')


def convert(folder: str, q: str) -> dict[str, Any]:
    """Convert; the trace is made first, and kept, so that its time stands apart."""
    from mlxconv.convert.conversion import convert as run

    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as name:
        out = Path(name) / "out"
        cpu = time.process_time()
        run(folder, out, q, dry_run=True)
        traced = time.process_time() - cpu
        cpu = time.process_time()
        report = run(folder, out, q)
        spent = time.process_time() - cpu
        part = next(iter(report.components.values()))
        shutil.rmtree(out)
    gigabytes = part.bytes_in / 1e9
    return {
        "q": q,
        "source_gb": round(gigabytes, 2),
        "out_gb": round(part.bytes_out / 1e9, 2),
        "cpu_s_tracing": round(traced, 1),
        "cpu_s_converting": round(spent, 1),
        "cpu_s_per_gb": round(spent / gigabytes, 2),
        "wall_s": round(report.seconds, 1),
        "peak_rss_gib": round(peak_bytes() / 2**30, 3),
    }


def plain(folder: str) -> dict[str, Any]:
    """What a converter by MLX's own means spends on it: load, `mx.quantize` to 4 bit, save."""
    import mlx.core as mx

    files = [str(file) for file in Path(folder).glob("*.safetensors")]
    gigabytes = sum(Path(file).stat().st_size for file in files) / 1e9
    made: dict[str, mx.array] = {}
    cpu = time.process_time()
    for file in files:
        weights: Any = mx.load(file)
        for name, weight in weights.items():
            if weight.ndim == 2 and weight.shape[1] % 64 == 0:
                parts = zip(("", ".scales", ".biases"), mx.quantize(weight, 64, 4))
                made |= {name + end: part for end, part in parts}
            else:
                made[name] = weight
    with tempfile.TemporaryDirectory(dir=Path(folder).parent) as target:
        mx.save_safetensors(str(Path(target) / "out.safetensors"), made)
    return {
        "source_gb": round(gigabytes, 2),
        "cpu_s_per_gb": round((time.process_time() - cpu) / gigabytes, 2),
        "peak_rss_gib": round(peak_bytes() / 2**30, 3),
    }


def refit() -> dict[str, Any]:
    """Gain of the default method over `mx.quantize`, in dB: Gaussian bf16 weights, groups of 64."""
    import mlx.core as mx
    import numpy as np

    from mlxconv.convert.quantize.affine import quantize_affine

    rows, width, group = 1024, 4096, 64
    noise = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    weight = mx.array(noise).astype(mx.bfloat16)
    bits16 = np.array(weight.view(mx.uint16))

    def error(parts: Any, bits: int) -> float:
        back = mx.dequantize(*(p.reshape(rows, -1) for p in parts), group_size=group, bits=bits)
        return float(mx.linalg.norm(back.astype(mx.float32) - weight.astype(mx.float32)))

    gains = {}
    for bits in (8, 6, 5, 4, 3, 2):
        scales, biases = (np.empty(rows * width // group, np.uint16) for _ in range(2))
        made = quantize_affine([bits16.ravel()], scales, biases, bits=bits, group=group,
                               dtype="bfloat16", method="refit")  # fmt: skip
        codes = np.concatenate([piece.copy() for piece in made])
        halves = (mx.array(part).view(mx.bfloat16) for part in (scales, biases))
        ours = error((mx.array(codes), *halves), bits)
        plain = error(mx.quantize(weight, group, bits), bits)
        gains[f"{bits}bit"] = round(20 * math.log10(plain / ours), 2)
    return gains


def strips(pixels: str, budget_mib: str) -> dict[str, Any]:
    """Decoding whole and in strips: AutoencoderKL of FLUX.1's width, seeded weights, fp32."""
    import mlx.core as mx
    import numpy as np

    from mlxconv import convert as run
    from mlxconv.convert.catalog.figures import tiny_checkpoint
    from mlxconv.convert.recipe.reading import load_recipe
    from mlxconv.runtime.bundle import load_component
    from mlxconv.runtime.generate.tiling import in_strips

    recipe = load_recipe("AutoencoderKL")
    wide = {"block_out_channels": [128, 256, 512, 512], "norm_num_groups": 32,
            "layers_per_block": 2, "latent_channels": 16}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        tiny_checkpoint(replace(recipe, tiny={**recipe.tiny, **wide}), None, Path(name) / "source")
        run(Path(name) / "source", Path(name) / "bundle", "fp32")
        component = load_component(Path(name) / "bundle")
        side = int(pixels) // 8
        noise = np.random.default_rng(0).standard_normal((1, 16, side, side))
        found: dict[str, Any] = {"pixels": int(pixels)}
        pictures = []
        for what, budget in (("whole", 2**40), ("strips", int(budget_mib) << 20)):
            with in_strips(component, budget):
                component.decode(z=mx.zeros((1, 16, 8, 8)))  # reads the weights
                mx.clear_cache()
                mx.reset_peak_memory()
                before, cpu = mx.get_active_memory(), time.process_time()
                values = component.decode(z=mx.array(noise.astype(np.float32)))
                picture = np.array(values[0] if isinstance(values, tuple) else values)
                found[what] = {"peak_mb": round((mx.get_peak_memory() - before) / 1e6, 1),
                               "cpu_s": round(time.process_time() - cpu, 1)}  # fmt: skip
            pictures.append(picture)
    found["largest_difference_of_255"] = float(np.abs(pictures[0] - pictures[1]).max() * 127.5)
    return found


def decoder() -> dict[str, Any]:
    """What half precision costs the trained demo pipeline's VAE, over 24 pictures."""
    import numpy as np

    import mlxconv
    from mlxconv.convert.demo import CHECKPOINT
    from mlxconv.convert.demo.accuracy import by_mlx
    from mlxconv.convert.demo.scenes import held_out_scenes

    captions = [scene.caption for scene in held_out_scenes(24)]
    with tempfile.TemporaryDirectory() as name:
        mlxconv.convert(CHECKPOINT, Path(name) / "bundle", "bf16")
        pictures = {
            dtype: by_mlx(mlxconv.load(Path(name) / "bundle", vae_dtype=dtype), captions)[0]
            for dtype in ("float32", "bfloat16", "float16")
        }
    found = {}
    for dtype in ("bfloat16", "float16"):
        gaps = np.abs(pictures[dtype] - pictures["float32"]) * 255
        largest = gaps.reshape(len(captions), -1).max(1)
        found[dtype] = {
            "psnr_db": round(float(-10 * np.log10(np.mean((gaps / 255) ** 2))), 1),
            "largest_of_255": [round(float(v), 2) for v in (largest.min(), largest.max())],
        }
    return found


def steps(count: str) -> dict[str, Any]:
    """Of so many pictures of the trained demo pipeline, in fp32: how many are right, and how close
    they are to those of 40 steps of Heun, by solver and number of steps."""
    import numpy as np
    from tests.tools.demo_training.text import TOKENS

    import mlxconv
    from mlxconv.convert.demo import CHECKPOINT
    from mlxconv.convert.demo.accuracy import is_right
    from mlxconv.convert.demo.scenes import SIDE, held_out_scenes

    scenes = held_out_scenes(int(count))
    with tempfile.TemporaryDirectory() as name:
        mlxconv.convert(CHECKPOINT, Path(name) / "bundle", "fp32")
        pipeline = mlxconv.load(Path(name) / "bundle", keep=True)

        def made(solver: str, number: int) -> Any:
            return np.concatenate([
                pipeline(scene.caption, steps=number, seed=i, width=SIDE, height=SIDE,
                         tokens=TOKENS, scheduler=solver).pixels
                for i, scene in enumerate(scenes)
            ])  # fmt: skip

        exact, found = made("Heun", 40), dict[str, Any]()
        for solver in ("Euler", "DPM++ 2M", "UniPC", "Heun"):
            for number in (2, 4, 8, 16):
                pictures = made(solver, number)
                right = sum(map(is_right, pictures, scenes))
                decibels = -10 * np.log10(np.mean((pictures - exact) ** 2))
                found[f"{solver}, {number} steps"] = [right, round(float(decibels), 1)]
        right = sum(map(is_right, exact, scenes))
    return {"prompts": len(scenes), "right_of_exact": right, "right_and_psnr_db": found}


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    actions: dict[str, Any] = {
        "depth": depth,
        "trace": trace,
        "size": size,
        "make": make,
        "convert": convert,
        "plain": plain,
        "refit": refit,
        "strips": strips,
        "decoder": decoder,
        "steps": steps,
    }
    print(json.dumps(actions[command](*arguments)))
