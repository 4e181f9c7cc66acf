"""Tiny pipelines in diffusers' format, text encoders and tokenizers included: one a family."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.recipe.reading import load_recipe
from mlxconv.runtime.generate.families.flux2 import _MISTRAL
from mlxconv.runtime.generate.families.qwen_image import _TEMPLATE
from mlxconv.runtime.generate.families.sana import _INSTRUCTION

from ...conftest import SENTENCES, _clip_tokenizer, _save, _t5_tokenizer
from .test_generate import NEGATIVE, PROMPT

_VOCABULARY = 400


def _model(
    folder: Path, name: str, class_name: str, variant: str | None = None, **changed: Any
) -> None:
    recipe = load_recipe(class_name)
    recipe = replace(recipe, tiny={**recipe.tiny, **changed})
    tiny_checkpoint(recipe, variant, folder / name, seed=len(name))


def _more_contrast(folder: Path, name: str) -> None:
    """Scale a decoder's last weight, so that a prompt is seen in the picture."""
    from safetensors.torch import load_file, save_file

    (file,) = (folder / "vae").glob("*.safetensors")
    tensors = load_file(file)
    tensors[name] *= 10
    save_file(tensors, file, metadata={"format": "pt"})


def _index(folder: Path, pipeline: str, **parts: str) -> None:
    """model_index.json: `library.Class` a part."""
    rows = {name: path.split(".") for name, path in parts.items()}
    data = {"_class_name": pipeline, "_diffusers_version": "0.42.1", **rows}
    (folder / "model_index.json").write_text(json.dumps(data), encoding="utf-8")


def _clip(folder: Path, suffix: str, width: int, *, projected: bool = True, **options: Any) -> None:
    tokenizer = _clip_tokenizer(**options)
    _model(
        folder, f"text_encoder{suffix}", f"CLIPTextModel{'WithProjection' if projected else ''}",
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, projection_dim=width, eos_token_id=1, max_position_embeddings=77,
    )  # fmt: skip
    tokenizer.save_pretrained(str(folder / f"tokenizer{suffix}"))


def _t5(folder: Path, suffix: str = "") -> None:
    from transformers import T5Config, T5EncoderModel

    tokenizer = _t5_tokenizer()
    _save(T5EncoderModel(T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )), folder / f"text_encoder{suffix}", seed=3)  # fmt: skip
    tokenizer.save_pretrained(str(folder / f"tokenizer{suffix}"))


def _byte_level(special: list[str], template: str) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    trained.train_from_iterator([*SENTENCES, template], trainers.BpeTrainer(
        vocab_size=_VOCABULARY, show_progress=False, special_tokens=special,
    ))  # fmt: skip
    return trained


def _qwen_tokenizer(**options: Any) -> Any:
    """A token a word, as in large vocabularies: Qwen-Image's template has 34 before the prompt."""
    from transformers import Qwen2Tokenizer

    trained = _byte_level(["<|endoftext|>", "<|im_start|>", "<|im_end|>"], _TEMPLATE)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    special = ["<|im_start|>", "<|im_end|>"]
    return Qwen2Tokenizer(
        vocab=model["vocab"], merges=merges, additional_special_tokens=special, **options
    )


TWO_LEVELS = {
    "block_out_channels": [16, 32],
    "down_block_types": ["DownEncoderBlock2D"] * 2,
    "up_block_types": ["UpDecoderBlock2D"] * 2,
}


def _vae(folder: Path, variant: str | None = None, **changed: Any) -> None:
    """Two pixels a latent."""
    options = {"scaling_factor": 0.5, "shift_factor": 0.1, **TWO_LEVELS, **changed}
    _model(folder, "vae", "AutoencoderKL", variant, **options)


def _flow(folder: Path, **options: Any) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler

    FlowMatchEulerDiscreteScheduler(**options).save_pretrained(str(folder / "scheduler"))


_CLIP = {
    "text_encoder": "transformers.CLIPTextModelWithProjection",
    "text_encoder_2": "transformers.CLIPTextModelWithProjection",
    "tokenizer": "transformers.CLIPTokenizer",
    "tokenizer_2": "transformers.CLIPTokenizer",
}
_T5 = {"text_encoder": "transformers.T5EncoderModel", "tokenizer": "transformers.T5TokenizerFast"}
_FLOW = {"scheduler": "diffusers.FlowMatchEulerDiscreteScheduler", "vae": "diffusers.AutoencoderKL"}


def stable_diffusion_3(folder: Path) -> None:
    """Two CLIPs of different widths, the second one's padding another token."""
    _clip(folder, "", 16)
    _clip(folder, "_2", 32, pad_token="!")
    _t5(folder, "_3")
    _model(folder, "transformer", "SD3Transformer2DModel", pooled_projection_dim=48, num_layers=2)
    _vae(folder, "flux")
    _flow(folder, shift=3.0)
    _index(
        folder, "StableDiffusion3Pipeline", **_CLIP, **{f"{k}_3": v for k, v in _T5.items()},
        **_FLOW, transformer="diffusers.SD3Transformer2DModel",
    )  # fmt: skip


def chroma(folder: Path) -> None:
    _t5(folder)
    _model(folder, "transformer", "ChromaTransformer2DModel", in_channels=64)
    _vae(folder, "flux")
    _flow(folder, use_dynamic_shifting=True)
    _index(
        folder, "ChromaPipeline", **_T5, **_FLOW, transformer="diffusers.ChromaTransformer2DModel"
    )


def pixart_sigma(folder: Path) -> None:
    """With a learned variance, which is dropped."""
    from diffusers import DPMSolverMultistepScheduler

    _t5(folder)
    _model(folder, "transformer", "PixArtTransformer2DModel")
    _vae(folder)
    DPMSolverMultistepScheduler().save_pretrained(str(folder / "scheduler"))
    _index(
        folder, "PixArtSigmaPipeline", **_T5, scheduler="diffusers.DPMSolverMultistepScheduler",
        vae="diffusers.AutoencoderKL", transformer="diffusers.PixArtTransformer2DModel",
    )  # fmt: skip


QWEN_VAE: dict[str, Any] = {
    "dim_mult": [1, 2], "temperal_downsample": [False],
    "latents_mean": [0.1, -0.2, 0.3, 0.0], "latents_std": [1.5, 0.5, 1.0, 2.0],
}  # fmt: skip


def qwen_image(folder: Path) -> None:
    _qwen_tokenizer().save_pretrained(str(folder / "tokenizer"))
    recipe = load_recipe("Qwen2_5_VLForConditionalGeneration")
    language = {**recipe.tiny["text_config"], "vocab_size": _VOCABULARY}
    _model(folder, "text_encoder", recipe.class_name, text_config=language)
    _model(folder, "transformer", "QwenImageTransformer2DModel")
    _model(folder, "vae", "AutoencoderKLQwenImage", **QWEN_VAE)
    _more_contrast(folder, "decoder.conv_out.weight")
    _flow(folder, use_dynamic_shifting=True)
    _index(
        folder, "QwenImagePipeline", scheduler=_FLOW["scheduler"],
        text_encoder="transformers.Qwen2_5_VLForConditionalGeneration",
        tokenizer="transformers.Qwen2Tokenizer", vae="diffusers.AutoencoderKLQwenImage",
        transformer="diffusers.QwenImageTransformer2DModel",
    )  # fmt: skip


def qwen_image_edit(folder: Path) -> None:
    """With the tokens between which the encoder's vision tower puts a picture."""
    qwen_image(folder)
    tokenizer = _qwen_tokenizer()
    vision = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": vision})
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    recipe = load_recipe("Qwen2_5_VLForConditionalGeneration")
    language = {**recipe.tiny["text_config"], "vocab_size": len(tokenizer)}
    ids = dict(zip(("vision_start_token_id", "image_token_id", "vision_end_token_id"),
                   tokenizer.convert_tokens_to_ids(vision)))  # fmt: skip
    _model(folder, "text_encoder", recipe.class_name, text_config=language, **ids)


_CHAT = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""  # Qwen3's, of a conversation without tools


def z_image(folder: Path) -> None:
    tokenizer = _qwen_tokenizer(chat_template=_CHAT)
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    _model(folder, "text_encoder", "Qwen3Model", vocab_size=_VOCABULARY)
    _model(folder, "transformer", "ZImageTransformer2DModel")
    _vae(folder, "flux")
    _flow(folder, shift=3.0)
    _index(
        folder, "ZImagePipeline", **_FLOW, tokenizer="transformers.Qwen2Tokenizer",
        text_encoder="transformers.Qwen3Model", transformer="diffusers.ZImageTransformer2DModel",
    )  # fmt: skip


def _gemma_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import GemmaTokenizer

    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")  # type: ignore[assignment]
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    trained.train_from_iterator([*SENTENCES, _INSTRUCTION], trainers.BpeTrainer(
        vocab_size=_VOCABULARY, show_progress=False,
        special_tokens=["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"],
    ))  # fmt: skip
    model = json.loads(trained.to_str())["model"]
    return GemmaTokenizer(vocab=model["vocab"], merges=[tuple(pair) for pair in model["merges"]])


def sana(folder: Path) -> None:
    """Two pixels a latent where the published ones have 32."""
    from diffusers import DPMSolverMultistepScheduler

    _gemma_tokenizer().save_pretrained(str(folder / "tokenizer"))
    _model(folder, "text_encoder", "Gemma2Model", vocab_size=_VOCABULARY)
    changed = {"in_channels": 4, "out_channels": 4, "caption_channels": 96, "timestep_scale": 0.5}
    _model(folder, "transformer", "SanaTransformer2DModel", **changed)
    half = {"block_types": ["ResBlock", "EfficientViTBlock"], "block_out_channels": [8, 32],
            "layers_per_block": [1, 1], "qkv_multiscales": [[], [5]]}  # fmt: skip
    halves = {f"{side}_{k}": v for side in ("encoder", "decoder") for k, v in half.items()}
    _model(folder, "vae", "AutoencoderDC", scaling_factor=0.5, **halves)
    DPMSolverMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    ).save_pretrained(str(folder / "scheduler"))
    _index(
        folder, "SanaPipeline", scheduler="diffusers.DPMSolverMultistepScheduler",
        vae="diffusers.AutoencoderDC", tokenizer="transformers.GemmaTokenizer",
        text_encoder="transformers.Gemma2Model", transformer="diffusers.SanaTransformer2DModel",
    )  # fmt: skip


def flux2_klein(folder: Path) -> None:
    """An encoder as deep as is read, and a VAE whose statistics are not those of the start."""
    _qwen_tokenizer(chat_template=_CHAT).save_pretrained(str(folder / "tokenizer"))
    language = {"vocab_size": _VOCABULARY, "num_hidden_layers": 28, "hidden_size": 32}
    _model(folder, "text_encoder", "Qwen3ForCausalLM", intermediate_size=32, **language)
    _flux2_denoiser(folder, guidance_embeds=False)
    _index(
        folder, "Flux2KleinPipeline", **_FLUX2, tokenizer="transformers.Qwen2TokenizerFast",
        text_encoder="transformers.Qwen3ForCausalLM",
    )  # fmt: skip


_FLUX2 = {
    "scheduler": "diffusers.FlowMatchEulerDiscreteScheduler",
    "transformer": "diffusers.Flux2Transformer2DModel",
    "vae": "diffusers.AutoencoderKLFlux2",
}


def _flux2_denoiser(folder: Path, *, guidance_embeds: bool) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    changed = {"in_channels": 32, "joint_attention_dim": 96, "guidance_embeds": guidance_embeds}
    _model(folder, "transformer", "Flux2Transformer2DModel", **changed)
    _model(folder, "vae", "AutoencoderKLFlux2", **TWO_LEVELS)
    (file,) = (folder / "vae").glob("*.safetensors")
    tensors = load_file(file)
    count = len(tensors["bn.running_mean"])
    tensors["bn.running_mean"] = torch.linspace(-0.5, 0.3, count)
    tensors["bn.running_var"] = torch.linspace(0.5, 2.0, count)
    save_file(tensors, file, metadata={"format": "pt"})
    _flow(folder, use_dynamic_shifting=True)


_MISTRAL_CHAT = """{{- bos_token }}{%- for message in messages %}
    {%- set tag = 'SYSTEM_PROMPT' if message.role == 'system' else 'INST' %}
    {{- '[' + tag + ']' + message.content[0].text + '[/' + tag + ']' }}
{%- endfor %}"""  # Mistral Small's, of messages of text


def flux2(folder: Path) -> None:
    """A tokenizer that begins a text with a token of its own, as its chat template does.

    The published one is in a PixtralProcessor, which needs torchvision.
    """
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    special = ["[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[INST]", "[/INST]", "[IMG]"]
    trained = _byte_level(["<unk>", "<s>", "</s>", "<pad>", *special], _MISTRAL)
    trained.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", trained.token_to_id("<s>"))]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=trained, bos_token="<s>", pad_token="<pad>", padding_side="left",
        chat_template=_MISTRAL_CHAT,
    ).save_pretrained(str(folder / "tokenizer"))  # fmt: skip
    recipe = load_recipe("Mistral3ForConditionalGeneration")
    language = {**recipe.tiny["text_config"], "vocab_size": _VOCABULARY, "num_hidden_layers": 31}
    small = {"hidden_size": 32, "intermediate_size": 32}
    _model(folder, "text_encoder", recipe.class_name, text_config={**language, **small})
    _flux2_denoiser(folder, guidance_embeds=True)
    _index(
        folder, "Flux2Pipeline", **_FLUX2, tokenizer="transformers.PreTrainedTokenizerFast",
        text_encoder="transformers.Mistral3ForConditionalGeneration",
    )  # fmt: skip


_UNET = {"unet": "diffusers.UNet2DConditionModel", "vae": "diffusers.AutoencoderKL"}
_BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def stable_diffusion(folder: Path) -> None:
    """With options of its scheduler that its pipeline corrects."""
    from diffusers import PNDMScheduler

    _clip(folder, "", 64, projected=False)
    _model(folder, "unet", "UNet2DConditionModel")
    _vae(folder)
    PNDMScheduler(skip_prk_steps=True, **_BETAS).save_pretrained(str(folder / "scheduler"))
    _index(
        folder, "StableDiffusionPipeline", **_UNET, scheduler="diffusers.PNDMScheduler",
        text_encoder="transformers.CLIPTextModel", tokenizer="transformers.CLIPTokenizer",
    )  # fmt: skip


def stable_diffusion_xl(folder: Path) -> None:
    """Two CLIPs, of which the second has the projection."""
    from diffusers import EulerDiscreteScheduler

    _clip(folder, "", 32, projected=False)
    _clip(folder, "_2", 32, pad_token="!")
    _model(folder, "unet", "UNet2DConditionModel", "sdxl")
    _vae(folder)
    EulerDiscreteScheduler(timestep_spacing="leading", steps_offset=1, **_BETAS).save_pretrained(
        str(folder / "scheduler")
    )
    parts = {**_CLIP, "text_encoder": "transformers.CLIPTextModel"}
    _index(
        folder, "StableDiffusionXLPipeline", **_UNET, **parts,
        scheduler="diffusers.EulerDiscreteScheduler",
    )  # fmt: skip


def sdxl_refiner(folder: Path) -> None:
    """A score in place of the target's size among the time ids, the second encoder alone; and the
    nine channels of a UNet for inpainting."""
    stable_diffusion_xl(folder)
    _model(folder, "unet", "UNet2DConditionModel", **{
        **load_recipe("UNet2DConditionModel").tiny_config("sdxl"), "in_channels": 9,
        "projection_class_embeddings_input_dim": 32 + 5 * 8, "cross_attention_dim": 32,
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"], "attention_head_dim": [1, 2],
        "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"], "block_out_channels": [32, 64],
        "transformer_layers_per_block": [1, 1],
    })  # fmt: skip
    parts = {k: v for k, v in _CLIP.items() if k.endswith("_2")}
    _index(
        folder, "StableDiffusionXLInpaintPipeline", **_UNET, **parts,
        scheduler="diffusers.EulerDiscreteScheduler",
    )  # fmt: skip


def dit(folder: Path) -> None:
    from diffusers import DDIMScheduler

    _model(folder, "transformer", "DiTTransformer2DModel")
    _vae(folder)
    DDIMScheduler(clip_sample=False).save_pretrained(str(folder / "scheduler"))
    _index(
        folder, "DiTPipeline", scheduler="diffusers.DDIMScheduler", vae="diffusers.AutoencoderKL",
        transformer="diffusers.DiTTransformer2DModel",
    )  # fmt: skip
    file = folder / "model_index.json"
    labels = {"281": f"tabby, {PROMPT}", "500": NEGATIVE}
    data = {**json.loads(file.read_text(encoding="utf-8")), "id2label": labels}
    file.write_text(json.dumps(data), encoding="utf-8")


_ALL = (
    chroma, dit, flux2, flux2_klein, pixart_sigma, qwen_image, sana, stable_diffusion,
    stable_diffusion_3, stable_diffusion_xl, z_image,
)  # fmt: skip
TINY: dict[str, Callable[[Path], None]] = {f.__name__: f for f in _ALL}
CALLED_WITH: dict[str, dict[str, Any]] = {
    "dit": {"class_labels": [281]},
    "sana": {"use_resolution_binning": False},
    "pixart_sigma": {"clean_caption": False, "use_resolution_binning": False},
}
SIZES = {"dit": (16, 16), "flux": (64, 32), "sana": (64, 32)}  # pixels; others 32 x 16
# With their templates; None where the encoders read a fixed number; others 16.
TOKENS: dict[str, int | None] = {
    "flux2": 64, "flux2_klein": 48, "dit": None, "stable_diffusion": None,
    "stable_diffusion_xl": None,
}  # fmt: skip
