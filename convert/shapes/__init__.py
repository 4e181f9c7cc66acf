"""A tiny trained FLUX.1 pipeline: its captioned pictures, its training and its checkpoint."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
