"""Distributions that encoders return, seen as tensors."""

import pytest
import torch
from diffusers.models.autoencoders import vae
from diffusers.models.autoencoders.autoencoder_kl_minimax_h3_audio import (
    MiniMaxH3AudioDiagonalGaussianDistribution,
)
from torch import nn
from torch.utils import _pytree as pytree

from mlxconv.convert.trace.patches.posteriors import posteriors


@pytest.mark.parametrize(
    ("cls", "count"),
    [
        (vae.DiagonalGaussianDistribution, 1),
        (vae.IdentityDistribution, 1),
        (MiniMaxH3AudioDiagonalGaussianDistribution, 2),
    ],
)
def test_a_posterior_is_the_tensors_that_it_was_made_of(cls: type, count: int) -> None:
    class Encoder(nn.Module):
        __module__ = cls.__module__

    parts = [torch.randn(2, 4, 3, 3) for _ in range(count)]
    with posteriors(Encoder()), posteriors(Encoder()):
        leaves, spec = pytree.tree_flatten((cls(*parts),))
        assert len(leaves) == count
        for leaf, part in zip(leaves, parts, strict=True):
            assert torch.equal(leaf, part)
        (again,) = pytree.tree_unflatten(leaves, spec)
        assert torch.equal(again.mode(), cls(*parts).mode())
    assert cls not in pytree.SUPPORTED_NODES
