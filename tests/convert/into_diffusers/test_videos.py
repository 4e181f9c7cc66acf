"""Video pipelines with all their components in MLX, at the frame counts that people use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlxconv.convert.conversion import convert
from mlxconv.convert.into_diffusers.replace import into_diffusers

from .tiny_videos import VIDEOS

pytestmark = pytest.mark.usefixtures("shared_programs")


def frames(pipe: Any, call: dict[str, Any]) -> np.ndarray[Any, Any]:
    """A video of two steps, or its latents."""
    generator = torch.Generator().manual_seed(0)
    asked = {"output_type": "np", "num_inference_steps": 2, "generator": generator}
    return np.asarray(pipe(**{**asked, **call}).frames)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n if n == "wan" else pytest.param(n, marks=pytest.mark.coverage) for n in VIDEOS]
)
def test_a_video_is_the_same_with_every_component_replaced(name: str, tmp_path: Path) -> None:
    pipe, call = VIDEOS[name]()
    pipe.save_pretrained(tmp_path / "source")
    wanted = frames(pipe, call)
    convert(tmp_path / "source", tmp_path / "bundle", "fp32")
    into_diffusers(pipe, tmp_path / "bundle")
    found = frames(pipe, call)
    assert wanted.std() > 0.01
    assert np.abs(found - wanted).max() <= 1e-3 * np.ptp(wanted)
