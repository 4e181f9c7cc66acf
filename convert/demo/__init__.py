"""A tiny trained FLUX.1 pipeline: its captioned pictures, its training and its checkpoint."""

from pathlib import Path

TOKENS = 16  # of each encoder, padding and special tokens included
CHECKPOINT = Path(__file__).parent / "checkpoint"
