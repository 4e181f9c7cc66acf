"""What a pipeline does around the loop: prompt, packing, guidance, decoding. One file a family."""

from ...errors import MlxconvError
from .chroma import Chroma
from .dit import Dit
from .family import Family
from .flux import Flux
from .flux2 import Flux2, Flux2Klein
from .pixart import PixArtSigma
from .qwen_image import QwenImage
from .sana import Sana
from .stable_diffusion import StableDiffusion
from .stable_diffusion_3 import StableDiffusion3
from .stable_diffusion_xl import StableDiffusionXL
from .z_image import ZImage

FAMILIES: dict[str, Family] = {
    "FluxPipeline": Flux(),
    "Flux2Pipeline": Flux2(),
    "Flux2KleinPipeline": Flux2Klein(),
    "StableDiffusionPipeline": StableDiffusion(),
    "StableDiffusionXLPipeline": StableDiffusionXL(),
    "StableDiffusion3Pipeline": StableDiffusion3(),
    "ChromaPipeline": Chroma(),
    "DiTPipeline": Dit(),
    "PixArtSigmaPipeline": PixArtSigma(),
    "QwenImagePipeline": QwenImage(),
    "SanaPipeline": Sana(),
    "ZImagePipeline": ZImage(),
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
