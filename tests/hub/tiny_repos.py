"""Small repositories as they are found on the Hub: pipelines with much that is not needed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

# What a conversion of `messy_pipeline` needs, and nothing else.
NEEDED = {
    "LICENSE.md",
    "README.md",
    "model_index.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer.json",
    "tokenizer/vocab.txt",
    "transformer/config.json",
    "transformer/diffusion_pytorch_model.safetensors.index.json",
    "vae/config.json",
}
NEEDED_WEIGHTS = {
    "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
    "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
}


def weights(file: Path, *names: str, size: int = 64) -> None:
    """A safetensors file of `size` x `size` float32 matrices, different in every file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(len(str(file.name)) + sum(map(ord, file.name)))
    save_file({name: noise.standard_normal((size, size)).astype(np.float32) for name in names},
              str(file))  # fmt: skip


def write_json(file: Path, data: object) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(data), encoding="utf-8")


def messy_pipeline(folder: Path, size: int = 64) -> Path:
    """A pipeline in shards; beside it variants, pickles, ONNX, Flax, a single-file checkpoint."""
    write_json(folder / "model_index.json", {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "image_encoder": [None, None],
    })  # fmt: skip
    write_json(folder / "scheduler/scheduler_config.json", {"_class_name": "Flow"})
    write_json(folder / "tokenizer/tokenizer.json", {"model": {}})
    (folder / "tokenizer/vocab.txt").write_text("a\nb\n", encoding="utf-8")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    (folder / "LICENSE.md").write_text("MIT\n", encoding="utf-8")
    model = folder / "transformer"
    write_json(model / "config.json", {"_class_name": "FluxTransformer2DModel"})
    stem = "diffusion_pytorch_model"
    for variant in ("", ".fp16"):
        names = [f"{stem}{variant}-0000{n}-of-00002.safetensors" for n in (1, 2)]
        weights(model / names[0], "a.weight", size=size)
        weights(model / names[1], "b.weight", size=size)
        index = f"{stem}.safetensors.index{variant}.json"
        write_json(model / index, {"weight_map": {"a.weight": names[0], "b.weight": names[1]}})
    write_json(folder / "vae/config.json", {"_class_name": "AutoencoderKL"})
    weights(folder / f"vae/{stem}.safetensors", "c.weight", size=size)
    weights(folder / "all-in-one.safetensors", "d.weight", size=size)
    for junk in ("vae/diffusion_pytorch_model.bin", "vae/model.onnx", "vae/flax_model.msgpack",
                 "transformer/old.ckpt", "teaser.png", "onnx/model.onnx"):  # fmt: skip
        (folder / junk).parent.mkdir(exist_ok=True)
        (folder / junk).write_bytes(b"not to be downloaded")
    return folder
