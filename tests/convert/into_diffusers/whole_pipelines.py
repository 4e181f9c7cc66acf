"""Tiny pipelines with their text encoders and tokenizers, and the ways in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
from PIL import Image

from mlxconv.convert.recipe.reading import load_recipe

from ...conftest import _pipeline
from ...runtime.generate import tiny_families as families
from .tiny_pipelines import tiny


@dataclass(frozen=True)
class Use:
    """One pipeline class over a family's components. parts: those that it has besides."""

    pipeline: str
    call: Callable[[], dict[str, Any]] = dict
    parts: Callable[[Path], dict[str, Any]] = lambda folder: {}


@dataclass(frozen=True)
class Family:
    """A checkpoint, and the pipelines that run on its components."""

    make: Callable[[Path], None]
    uses: Mapping[str, Use]
    options: Mapping[str, Any] = field(default_factory=dict)


def picture(size: int = 32) -> Image.Image:
    noise = np.random.default_rng(0).integers(0, 255, (size, size, 3), np.uint8)
    return Image.fromarray(noise)


def hole(size: int = 32) -> Image.Image:
    mask = np.zeros((size, size), np.uint8)
    mask[8:24, 8:24] = 255
    return Image.fromarray(mask)


def _inpaint(**more: Any) -> dict[str, Any]:
    return {"image": picture(), "mask_image": hole(), "strength": 0.8, **more}


# ---- Qwen-Image ---------------------------------------------------------------------------------

_GUIDED = {"negative_prompt": "blurry", "true_cfg_scale": 3.0}


class _Processor:
    """What Qwen2VLProcessor does; that needs torchvision for its videos."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
            Qwen2VLImageProcessorPil,
        )

        self.tokenizer = tokenizer
        self.images = Qwen2VLImageProcessorPil(
            size={"shortest_edge": 56 * 56, "longest_edge": 84 * 84}
        )

    def __call__(self, text: list[str], images: Any, padding: bool, return_tensors: str) -> Any:
        seen = self.images(images=images, return_tensors=return_tensors)
        for grid in seen["image_grid_thw"]:
            count = int(grid.prod()) // self.images.merge_size**2
            text = [t.replace("<|image_pad|>", "<|image|>" * count, 1) for t in text]
        text = [t.replace("<|image|>", "<|image_pad|>") for t in text]
        found = self.tokenizer(text, padding=padding, return_tensors=return_tensors)
        found.update(seen)
        return found


def _processor(folder: Path) -> dict[str, Any]:
    from transformers import Qwen2Tokenizer

    return {"processor": _Processor(Qwen2Tokenizer.from_pretrained(folder / "tokenizer"))}


def _two_pictures() -> dict[str, Any]:
    return {"image": [picture(), picture().resize((48, 24))], **_GUIDED}


def _three_pictures() -> dict[str, Any]:
    return {"image": [picture(), picture().resize((24, 48)), picture()], **_GUIDED}


def _controlled() -> dict[str, Any]:
    return {"control_image": picture(), **_GUIDED}


def controlnet(class_name: str, variant: str | None = None, **changed: Any) -> dict[str, Any]:
    """A ControlNet whose outputs are not the zeros that its class starts from."""
    net = tiny(class_name, 7, variant, **changed)
    for name, parameter in net.named_parameters():
        if name.startswith("controlnet_"):
            torch.nn.init.normal_(parameter.data, std=0.2)
    return {"controlnet": net}


def _qwen_controlnet(folder: Path) -> dict[str, Any]:
    return controlnet("QwenImageControlNetModel", num_layers=1, extra_condition_channels=0)


QWEN_IMAGE = Family(
    families.qwen_image_edit,
    {
        "text": Use("QwenImagePipeline", lambda: _GUIDED),
        "img2img": Use("QwenImageImg2ImgPipeline", lambda: {"image": picture(), "strength": 0.8}),
        "inpaint": Use("QwenImageInpaintPipeline", _inpaint),
        "edit": Use("QwenImageEditPipeline", lambda: {"image": picture(), **_GUIDED}, _processor),
        "edit_inpaint": Use("QwenImageEditInpaintPipeline", _inpaint, _processor),
        "edit_plus": Use("QwenImageEditPlusPipeline", lambda: {"image": [picture()]}, _processor),
        "edit_plus_2": Use("QwenImageEditPlusPipeline", _two_pictures, _processor),
        "edit_plus_3": Use("QwenImageEditPlusPipeline", _three_pictures, _processor),
        "controlnet": Use("QwenImageControlNetPipeline", _controlled, _qwen_controlnet),
    },
)

# ---- FLUX ---------------------------------------------------------------------------------------

FLUX2 = Family(
    families.flux2,
    {
        "text": Use("Flux2Pipeline", lambda: {"max_sequence_length": 64}),
        "image": Use("Flux2Pipeline", lambda: {"max_sequence_length": 64, "image": picture(64)}),
    },
)
FLUX = Family(
    _pipeline,
    {
        "controlnet": Use(
            "FluxControlNetPipeline",
            lambda: {"max_sequence_length": 16, "control_image": picture()},
            lambda folder: controlnet("FluxControlNetModel", in_channels=64),
        ),
    },
)
KLEIN = Family(
    families.flux2_klein,
    {
        "text": Use("Flux2KleinPipeline", lambda: {"max_sequence_length": 48}),
        "inpaint": Use("Flux2KleinInpaintPipeline", lambda: _inpaint(max_sequence_length=48)),
    },
)

# ---- SDXL ---------------------------------------------------------------------------------------

def _unet_controlnet(folder: Path, variant: str | None = None) -> dict[str, Any]:
    """Of the UNet's own making; it sees two pixels a latent, as the VAE makes them."""
    import json

    unet = json.loads((folder / "unet" / "config.json").read_text(encoding="utf-8"))
    recipe = load_recipe("ControlNetModel")
    taken = {k: v for k, v in unet.items() if k in recipe.tiny_config("sdxl")}
    return controlnet(
        "ControlNetModel", variant, **taken, conditioning_embedding_out_channels=[8, 8]
    )


def _adapter(folder: Path) -> dict[str, Any]:
    return {"adapter": tiny("T2IAdapter", 7, channels=[32, 64, 64], downscale_factor=2)}


SDXL = Family(
    families.stable_diffusion_xl,
    {
        "text": Use("StableDiffusionXLPipeline"),
        "inpaint": Use("StableDiffusionXLInpaintPipeline", _inpaint),
        "controlnet": Use(
            "StableDiffusionXLControlNetPipeline",
            lambda: {"image": picture(64), "height": 64, "width": 64},
            lambda folder: _unet_controlnet(folder, "sdxl"),
        ),
    },
)
SD = Family(
    families.stable_diffusion,
    {
        "controlnet": Use(
            "StableDiffusionControlNetPipeline",
            lambda: {"image": picture(64), "height": 64, "width": 64},
            _unet_controlnet,
        ),
        "adapter": Use("StableDiffusionAdapterPipeline", lambda: {"image": picture()}, _adapter),
    },
)
REFINER = Family(
    families.sdxl_refiner,
    {"inpaint": Use("StableDiffusionXLInpaintPipeline", _inpaint)},
    {"requires_aesthetics_score": True},
)

FAMILIES = {
    "qwen_image": QWEN_IMAGE, "flux": FLUX, "flux2": FLUX2, "klein": KLEIN, "sd": SD, "sdxl": SDXL,
    "refiner": REFINER,
}  # fmt: skip


def run(pipe: Any, call: Mapping[str, Any], steps: int = 2) -> np.ndarray[Any, Any]:
    """Pictures in 0 to 1."""
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    size = {"height": 32, "width": 32}
    given = {"prompt": "a photo of a cat", **size, **call, "num_inference_steps": steps}
    return np.asarray(pipe(**given, generator=generator, output_type="np").images)


def using(pipe: Any, use: Use, folder: Path, options: Mapping[str, Any]) -> Any:
    """A pipeline of another class over the same components."""
    cls = getattr(diffusers, use.pipeline)
    taken = cls._get_signature_keys(cls)[0]
    parts = {**dict.fromkeys(cls._optional_components), **pipe.components, **use.parts(folder)}
    return cls(**{k: v for k, v in parts.items() if k in taken}, **options)
