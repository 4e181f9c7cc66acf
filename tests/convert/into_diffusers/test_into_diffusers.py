"""diffusers pipelines whose modules run in MLX give what diffusers gives."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import mlxconv
from mlxconv.convert.conversion import convert
from mlxconv.convert.into_diffusers.parameters import BundleParameter
from mlxconv.convert.into_diffusers.replace import into_diffusers
from mlxconv.runtime.errors import MlxconvError

from ...conftest import Bundles
from .tiny_pipelines import PIPELINES, flux, tiny, two_levels

pytestmark = pytest.mark.usefixtures("shared_programs")
HALF = (torch.float32, torch.bfloat16)


def pictures(pipe: Any, call: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Images or frames in 0 to 1, of three steps."""
    generator = torch.Generator().manual_seed(0)
    result = pipe(**call, num_inference_steps=3, generator=generator, output_type="np")
    return np.asarray(result.frames if hasattr(result, "frames") else result.images)


def bundle(pipe: Any, folder: Path, q: str = "fp32") -> Path:
    pipe.save_pretrained(folder / "source")
    convert(folder / "source", folder / q, q)
    return folder / q


@pytest.mark.slow
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_gives_the_same_pictures(name: str, tmp_path: Path) -> None:
    pipe, call = PIPELINES[name]()
    wanted = pictures(pipe, call)
    into_diffusers(pipe, bundle(pipe, tmp_path))
    assert wanted.std() > 0.01
    assert np.abs(pictures(pipe, call) - wanted).max() <= 1e-3


def test_text_encoders_are_replaced_too(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles
) -> None:
    """T5's embedding is tied, and both encoders are called with flags of their own."""
    from diffusers import FluxPipeline

    pipe = FluxPipeline.from_pretrained(pipeline_checkpoint)
    pipe.set_progress_bar_config(disable=True)
    call = {"prompt": "a photo of a cat", "height": 32, "width": 48, "max_sequence_length": 16}
    wanted = pictures(pipe, call)
    into_diffusers(pipe, pipeline_bundle("fp32"))
    names = ("text_encoder", "text_encoder_2", "transformer")
    assert {type(getattr(pipe, name).forward).__name__ for name in names} == {"_Bridge"}
    assert np.abs(pictures(pipe, call) - wanted).max() <= 1e-3


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any]]:
    pipe, call = flux()
    into_diffusers(pipe, bundle(pipe, tmp_path_factory.mktemp("flux-pipeline")))
    return pipe, call


def test_the_modules_stay_what_they_were(replaced: tuple[Any, dict[str, Any]]) -> None:
    pipe, _ = replaced
    assert {type(p) for p in pipe.transformer.parameters()} == {BundleParameter}
    assert pipe.transformer.dtype == torch.float32
    assert pipe.transformer.device == torch.device("cpu")
    assert pipe.transformer.config.in_channels == 16


def test_results_have_the_method_s_own_structure(replaced: tuple[Any, dict[str, Any]]) -> None:
    vae = replaced[0].vae
    encoded = vae.encode(torch.rand(1, 3, 32, 32))
    assert type(encoded).__name__ == "AutoencoderKLOutput"
    latents = encoded.latent_dist.mode()
    decoded = vae.decode(latents)
    assert type(decoded).__name__ == "DecoderOutput"
    assert decoded.sample.shape == (1, 3, 32, 32)
    (plain,) = vae.decode(latents, return_dict=False)
    assert torch.equal(plain, decoded.sample)


def test_the_prompt_is_computed_once(
    replaced: tuple[Any, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, call = replaced
    staged = pipe.transformer.forward.ways[0].staged
    begun: list[int] = []
    begin = staged.begin
    monkeypatch.setattr(staged, "begin", lambda inputs: (begun.append(1), begin(inputs))[1])
    pictures(pipe, call)
    assert len(begun) == 1
    other = {**call, "prompt_embeds": call["prompt_embeds"] + 1}
    assert not np.array_equal(pictures(pipe, call), pictures(pipe, other))


def test_a_prompt_changed_in_place_is_computed_again(
    replaced: tuple[Any, dict[str, Any]],
) -> None:
    pipe, call = replaced
    changing = {**call, "prompt_embeds": call["prompt_embeds"].clone()}
    before = pictures(pipe, changing)
    changing["prompt_embeds"].add_(1)
    assert not np.array_equal(pictures(pipe, changing), before)


def test_another_class_is_refused(tmp_path: Path) -> None:
    pipe, _ = flux()
    made = bundle(pipe, tmp_path)
    pipe.transformer = pipe.vae
    with pytest.raises(MlxconvError, match=r"pipeline's is a AutoencoderKL, the bundle's a Flux"):
        into_diffusers(pipe, made, components=["transformer"])
    with pytest.raises(MlxconvError, match=r"no program for unet; it has transformer, vae"):
        into_diffusers(pipe, made, components=["unet"])


def test_what_no_program_takes_is_traced_from_the_call(
    replaced: tuple[Any, dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    pipe, call = replaced
    transformer = pipe.transformer
    plain = type(transformer).from_config(transformer.config).eval()
    plain.load_state_dict(transformer.state_dict())
    for tokens, given in ((4, "block"), (6, "block"), (6, "single_block")):
        inputs = {
            "hidden_states": torch.ones(1, tokens, 16), "timestep": torch.tensor([0.5]),
            "encoder_hidden_states": call["prompt_embeds"], "guidance": torch.tensor([4.0]),
            "pooled_projections": call["pooled_prompt_embeds"],
            "img_ids": torch.ones(tokens, 3), "txt_ids": torch.zeros(6, 3),
        }  # fmt: skip
        name = f"controlnet_{given}_samples"
        inputs[name] = [torch.rand(1, tokens, 64), torch.rand(1, tokens, 64)]
        with torch.no_grad():
            wanted, found = (module(**inputs).sample for module in (plain, transformer))
        assert (found - wanted).norm() <= 1e-5 * wanted.norm()
    said = capfd.readouterr().err
    assert said.count("tracing FluxTransformer2DModel.forward for calls with") == 2


def test_a_call_that_the_class_refuses_is_traced_once_at_most(
    replaced: tuple[Any, dict[str, Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    pipe, call = replaced
    for _ in range(2):
        with pytest.raises(MlxconvError, match=r"expected \[batch, image_tokens, 16\].*Nor can it"):
            pictures(pipe, {**call, "latents": torch.zeros(1, 256, 17)})
    assert capfd.readouterr().err.count("tracing") == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALF)
def test_the_snippet_of_the_page_runs_on_a_bf16_bundle(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype,
) -> None:  # fmt: skip
    """Its pictures are no further from float32 than those of diffusers in bf16."""
    import diffusers
    from PIL import Image

    (tmp_path / "FLUX.1-schnell").symlink_to(pipeline_checkpoint)
    (tmp_path / "flux-4bit").symlink_to(pipeline_bundle("bf16"))
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs/diffusers.md").read_text(encoding="utf-8")
    (snippet,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    cls = diffusers.FluxImg2ImgPipeline
    load = cls.from_pretrained

    def small(path: str) -> Any:
        pipe = load(path, torch_dtype=dtype)
        pipe.default_sample_size = 16
        return pipe

    monkeypatch.setattr(cls, "from_pretrained", small)
    picture = Image.effect_noise((32, 32), 60).convert("RGB")
    names: dict[str, Any] = {"picture": picture, "diffusers": diffusers, "mlxconv": mlxconv}
    exec(snippet, names)
    call = {"prompt": "a cat", "image": picture, "height": 32, "width": 32}
    exact, half, found = (
        pictures(pipe, call)
        for pipe in (*(load("FLUX.1-schnell", torch_dtype=d) for d in HALF), names["pipe"])
    )
    assert np.abs(found - exact).mean() <= 1.5 * np.abs(half - exact).mean()


@pytest.mark.slow
def test_two_frame_counts_share_their_weights(tmp_path: Path) -> None:
    vae = tiny("AutoencoderKLCogVideoX", 1)
    vae.save_pretrained(tmp_path / "vae")
    convert(tmp_path / "vae", tmp_path / "fp32", "fp32")
    size = sum(p.numel() * 4 for n, p in vae.named_parameters() if n.startswith("decoder"))
    into_diffusers(SimpleNamespace(vae=vae), tmp_path / "fp32")
    held = []
    for frames in (1, 3):
        vae.decode(torch.ones(1, 4, frames, 2, 2))
        gc.collect()
        held.append(mx.get_active_memory())
    assert held[0] > size > 4 * (held[1] - held[0])


def test_a_module_cast_later_runs_in_that_precision(
    pipeline_checkpoint: Path, pipeline_bundle: Bundles
) -> None:
    """SDXL's pipelines decode in float32 where half precision overflows."""
    from diffusers import AutoencoderKL

    wanted = AutoencoderKL.from_pretrained(pipeline_checkpoint / "vae")
    vae = AutoencoderKL.from_pretrained(pipeline_checkpoint / "vae", torch_dtype=torch.bfloat16)
    into_diffusers(SimpleNamespace(vae=vae), pipeline_bundle("fp32"), components=["vae"],
                   dtype="bfloat16")  # fmt: skip
    z = torch.randn(1, wanted.config.latent_channels, 4, 4)
    with torch.no_grad():
        want = wanted.decode(z).sample
        assert vae.decode(z.bfloat16()).sample.dtype == torch.bfloat16
        found = vae.to(torch.float32).decode(z).sample
    assert (found - want).norm() <= 1e-5 * want.norm()


def _tiled(vae: Any, value: torch.Tensor) -> list[torch.Tensor]:
    """What a VAE makes of latents, or of pictures: whole, in tiles, and sample by sample."""
    run = (lambda: vae.encode(value).latent_dist.mode()) if value.shape[1] == 3 else (
        lambda: vae.decode(value).sample)  # fmt: skip
    found = [run()]
    for on, off in ((vae.enable_tiling, vae.disable_tiling),
                    (vae.enable_slicing, vae.disable_slicing)):  # fmt: skip
        on()
        found.append(run())
        off()
    return found


@pytest.mark.slow
def test_tiling_and_slicing_do_what_they_do_in_diffusers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    vaes = [two_levels() for _ in range(2)]
    into_diffusers(SimpleNamespace(vae=vaes[1]), bundle(vaes[0], tmp_path))
    for vae in vaes:
        vae.tile_latent_min_size, vae.tile_sample_min_size = 8, 16
    for value in (torch.randn(2, 4, 12, 18), torch.rand(2, 3, 24, 36)):
        with torch.no_grad():
            wanted, found = (_tiled(vae, value) for vae in vaes)
        assert (wanted[1] - wanted[0]).norm() > 1e-2 * wanted[0].norm()
        for want, got in zip(wanted, found, strict=True):
            assert (got - want).norm() <= 1e-5 * want.norm()
    assert capfd.readouterr().err.count("tracing") == 2  # the decoder, the encoder


@pytest.mark.slow
def test_tiling_that_cannot_be_followed_is_noted_once(tmp_path: Path) -> None:
    """A decoder that leaves its state in a list that it is given."""
    plain, vae = (tiny("AutoencoderKLWan", 1) for _ in range(2))
    into_diffusers(SimpleNamespace(vae=vae), bundle(plain, tmp_path))
    vae.enable_tiling(tile_sample_min_height=16, tile_sample_min_width=16,
                      tile_sample_stride_height=8, tile_sample_stride_width=8)  # fmt: skip
    latents = torch.randn(1, vae.config.z_dim, 1, 8, 8)
    with torch.no_grad():
        with pytest.warns(UserWarning, match=r"vae: tiling has no effect.*computed whole") as noted:
            found = [vae.decode(latents).sample for _ in range(2)]
        wanted = plain.decode(latents).sample
    assert len([w for w in noted if "tiling" in str(w.message)]) == 1
    for got in found:
        assert (got - wanted).norm() <= 1e-5 * wanted.norm()
