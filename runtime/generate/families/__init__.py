"""What a pipeline does around the loop: prompt, packing, guidance, decoding. One file a family."""

from ...errors import MlxconvError
from .chroma import CHROMA
from .dit import DIT
from .family import Family
from .flux import FLUX
from .flux2 import FLUX2, FLUX2_KLEIN
from .pixart import PIXART_SIGMA
from .qwen_image import QWEN_IMAGE
from .sana import SANA
from .stable_diffusion import STABLE_DIFFUSION
from .stable_diffusion_3 import STABLE_DIFFUSION_3
from .stable_diffusion_xl import STABLE_DIFFUSION_XL
from .z_image import Z_IMAGE

FAMILIES: dict[str, Family] = {
    "FluxPipeline": FLUX,
    "Flux2Pipeline": FLUX2,
    "Flux2KleinPipeline": FLUX2_KLEIN,
    "StableDiffusionPipeline": STABLE_DIFFUSION,
    "StableDiffusionXLPipeline": STABLE_DIFFUSION_XL,
    "StableDiffusion3Pipeline": STABLE_DIFFUSION_3,
    "ChromaPipeline": CHROMA,
    "DiTPipeline": DIT,
    "PixArtSigmaPipeline": PIXART_SIGMA,
    "QwenImagePipeline": QWEN_IMAGE,
    "SanaPipeline": SANA,
    "ZImagePipeline": Z_IMAGE,
}


def family_of(pipeline: str, where: str) -> Family:
    """The family of a pipeline class; MlxconvError names those that there are."""
    if pipeline not in FAMILIES:
        raise MlxconvError(
            f"{where}: no native generation for {pipeline or 'a single component'} yet, only for "
            f"{', '.join(FAMILIES)}; in Python, mlxconv.into_diffusers(pipe, bundle) runs any "
            "diffusers pipeline with this bundle's modules"
        )
    return FAMILIES[pipeline]
