"""Train the tiny pipeline: python -m tests.tools.demo_training.training OUT.

Autoencoder, text encoders, then the transformer on one core while the other makes its latents and
trains the decoder further; all by one seed. OUT/work holds the states: a run that was interrupted
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .autoencoder import train_autoencoder, train_decoder
from .loops import Log, Schedule
from .text import Encoders, train_encoders
from .transformer import Data, Growing, make_data, train_transformer


@dataclass(frozen=True)
class Plan:
    """How long each part is trained, and on how many pictures a step."""

    autoencoder: Schedule
    encoders: Schedule
    transformer: Schedule
    decoder: Schedule  # more of the autoencoder's, its latents fixed
    parts: tuple[tuple[int, int], ...]  # (step, scenes) that the transformer draws from then on
    batches: tuple[int, int, int] = (16, 128, 128)


FULL = Plan(
    autoencoder=Schedule(2400, 2e-3, average=0.995),
    encoders=Schedule(600, 2e-3, warmup=50, average=0.99),
    transformer=Schedule(5000, 1e-3, warmup=100, average=0.999, exact_from=0.92),
    decoder=Schedule(4000, 1e-3, average=0.998),
    parts=((0, 32768), (1100, 73728), *((step, 65536) for step in range(1600, 4600, 700))),
)


def train_pipeline(
    out: Path, seed: int = 0, plan: Plan = FULL, say: Callable[[str], None] = lambda text: None
) -> Path:
    """Train all parts and write `out/checkpoint`, a FluxPipeline in bf16; its folder."""
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    log = Log(out / "training_log.csv", say)
    vae = train_autoencoder(work, seed, plan.autoencoder, plan.batches[0], log)
    encoders = train_encoders(work, seed, plan.encoders, plan.batches[1], log)
    with ThreadPoolExecutor(1) as second_core, log.stopping_all():
        parts, first = list[tuple[int, Callable[[], Data]]](), 0
        for step, count in plan.parts:
            path = work / f"scenes-{first}.pt"
            made = second_core.submit(_part, path, vae, encoders, first, count, seed)
            parts.append((step, made.result))
            first += count
        sharper = second_core.submit(
            train_decoder, copy.deepcopy(vae), work, seed, plan.decoder, plan.batches[0], log
        )
        transformer = train_transformer(
            work, Growing(parts), encoders, seed, plan.transformer, plan.batches[2], log
        )
        vae = sharper.result()
    return save_pipeline(out / "checkpoint", vae, encoders, transformer)


def _part(path: Path, vae: Any, encoders: Encoders, first: int, count: int, seed: int) -> Data:
    if not path.exists():
        partial = path.with_suffix(".partial")
        torch.save(vars(make_data(vae, encoders, first, count, seed)), partial)
        partial.rename(path)
    return Data(**torch.load(path, weights_only=True))


def save_pipeline(folder: Path, vae: Any, encoders: Encoders, transformer: Any) -> Path:
    """A FluxPipeline as `save_pretrained` writes it, its weights rounded to bf16."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

    pipeline = FluxPipeline(
        FlowMatchEulerDiscreteScheduler(), vae, encoders.clip, encoders.clip_tokenizer,
        encoders.t5, encoders.t5_tokenizer, transformer,
    )  # fmt: skip
    pipeline.to(torch.bfloat16).save_pretrained(str(folder))
    return folder


def main(arguments: list[str] | None = None) -> None:
    """The command."""
    import diffusers

    parser = argparse.ArgumentParser(description="Train the tiny pipeline that mlxconv ships.")
    parser.add_argument("out", type=Path, help="folder for the checkpoint, the log and the states")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(chosen.threads)
    diffusers.utils.logging.set_verbosity_error()
    folder = train_pipeline(
        chosen.out, chosen.seed, say=lambda text: print(text, file=sys.stderr, flush=True)
    )
    print(folder)


if __name__ == "__main__":
    main()
