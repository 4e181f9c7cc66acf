"""A loaded diffusers pipeline whose modules run in MLX."""

from .replace import into_diffusers as into_diffusers
