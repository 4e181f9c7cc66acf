"""Tokenizers of the captions' words, tiny CLIP and T5 encoders, and their training.

The encoders learn to name everything that a caption says: the pooled state of CLIP, and the state
of T5 at every token, which also knows what its own phrase is about and where that is. They are then
fixed, as those of FLUX.1 are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mlxconv.convert.demo import TOKENS
from mlxconv.convert.demo.scenes import (
    COLOURS,
    EXTENTS,
    PLACES,
    RELATIONS,
    SHAPES,
    Scene,
    training_scene,
)

from .loops import Log, Schedule, train

CLIP_WIDTH, T5_WIDTH = 64, 128
_ROWS = 64  # of T5's vocabulary and CLIP's positions; more than are used, as in the published ones
_SENTENCES = tuple(
    f"a {size} {colour} {shape} on {colour}, {where} a"
    for size in EXTENTS for colour in COLOURS for shape in SHAPES for where in (*PLACES, *RELATIONS)
)  # fmt: skip
_OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}


@dataclass
class Encoders:
    """Both encoders with their tokenizers."""

    clip_tokenizer: Any
    t5_tokenizer: Any
    clip: Any
    t5: Any

    def ids(self, captions: list[str]) -> tuple[Tensor, Tensor]:
        """Token ids (batch, TOKENS) for CLIP and for T5."""
        options = {"padding": "max_length", "max_length": TOKENS, "return_tensors": "pt"}
        return (self.clip_tokenizer(captions, **options).input_ids,
                self.t5_tokenizer(captions, **options).input_ids)  # fmt: skip

    def __call__(self, clip_ids: Tensor, t5_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Pooled (batch, CLIP_WIDTH) and states (batch, TOKENS, T5_WIDTH), as FluxPipeline's."""
        return self.clip(clip_ids).pooler_output, self.t5(t5_ids).last_hidden_state

    def save(self, folder: Path) -> None:
        """As the parts of a FluxPipeline."""
        self.clip_tokenizer.save_pretrained(str(folder / "tokenizer"))
        self.t5_tokenizer.save_pretrained(str(folder / "tokenizer_2"))
        self.clip.to(torch.bfloat16).save_pretrained(str(folder / "text_encoder"))
        self.t5.to(torch.bfloat16).save_pretrained(str(folder / "text_encoder_2"))


def clip_tokenizer() -> Any:
    """CLIP's byte-pair encoding with merges up to each whole word."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    ends = sorted({f"{word[-1]}</w>" for word in " ".join(_SENTENCES).replace(",", " ,").split()})
    trained = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    trained.pre_tokenizer = pre_tokenizers.Whitespace()
    trained.train_from_iterator(_SENTENCES, trainers.BpeTrainer(
        vocab_size=400, end_of_word_suffix="</w>", show_progress=False,
        special_tokens=["<|startoftext|>", "<|endoftext|>", *ends],  # else numbered by chance
    ))  # fmt: skip
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return CLIPTokenizer(vocab=model["vocab"], merges=merges, model_max_length=TOKENS)


def t5_tokenizer() -> Any:
    """T5's unigram model with one piece a word."""
    from transformers import T5TokenizerFast

    words = sorted({word for text in _SENTENCES for word in text.replace(",", "").split()})
    pieces = ["<pad>", "</s>", "<unk>", ",", *(f"▁{word}" for word in words)]
    vocab = [(piece, 0.0 if i < 3 else -2.0) for i, piece in enumerate(pieces)]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=TOKENS)


def new_encoders() -> Encoders:
    """Untrained, from torch's seed."""
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    clip, t5 = clip_tokenizer(), t5_tokenizer()
    return Encoders(clip, t5, CLIPTextModel(CLIPTextConfig(
        vocab_size=len(clip), hidden_size=CLIP_WIDTH, intermediate_size=2 * CLIP_WIDTH,
        num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=_ROWS,
        projection_dim=CLIP_WIDTH, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )), T5EncoderModel(T5Config(
        vocab_size=_ROWS, d_model=T5_WIDTH, d_kv=32, d_ff=T5_WIDTH, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu", dropout_rate=0.0,
    )))  # fmt: skip


# ---- what a caption says ------------------------------------------------------------------------

_ANSWERS: tuple[tuple[str | None, ...], ...] = (
    tuple(COLOURS),
    (None, *PLACES, *RELATIONS),
    *((None, *EXTENTS), tuple(COLOURS), SHAPES),
    *((None, *EXTENTS), (None, *COLOURS), (None, *SHAPES)),
)  # background, place; size, colour and shape of the first thing; and of the second


def answers(scene: Scene) -> list[int]:
    """The index of what the caption says in each row of the questions."""
    said: list[str | None] = [scene.background, scene.where]
    for thing in scene.things:
        said += [thing.size, thing.colour, thing.shape]
    said += [None] * (len(_ANSWERS) - len(said))
    return [row.index(value) for row, value in zip(_ANSWERS, said, strict=True)]


_OWN: tuple[tuple[Any, ...], ...] = (
    (None, *PLACES.values()),
    (None, *EXTENTS),
    (None, *COLOURS),
    (None, *SHAPES),
)  # of the thing that a word is about: direction from the centre, size, colour, shape


def own_answers(scene: Scene) -> list[list[int]]:
    """For each of TOKENS, the answers about the thing whose phrase the word is in, or None's."""
    first = (
        PLACES.get(scene.where or "") if len(scene.things) == 1 else RELATIONS[scene.where or ""]
    )
    rows = [[0] * len(_OWN) for _ in range(TOKENS)]
    start = 0
    for thing, direction in zip(scene.things, (first, first and (-first[0], -first[1]))):
        said = (direction, thing.size, thing.colour, thing.shape)
        length = len(str(thing).split())
        for row in range(start, start + length):
            rows[row] = [row_.index(value) for row_, value in zip(_OWN, said, strict=True)]
        start += length + len(f"on {scene.background} , {scene.where}".split())
    return rows


def said_otherwise(scene: Scene) -> Scene:
    """The same of two things, named from the other: left of becomes right of."""
    if len(scene.things) == 1 or scene.where is None:
        return scene
    return replace(scene, things=scene.things[::-1], where=_OPPOSITE[scene.where])


# ---- training -----------------------------------------------------------------------------------


class _Reader(nn.Module):
    """Both encoders with a linear layer each that answers every question."""

    def __init__(self, encoders: Encoders) -> None:
        super().__init__()
        self.clip, self.t5 = encoders.clip, encoders.t5
        self.from_clip = nn.Linear(CLIP_WIDTH, sum(map(len, _ANSWERS)))
        self.from_t5 = nn.Linear(T5_WIDTH, sum(map(len, _ANSWERS + _OWN)))

    def loss(
        self, encoders: Encoders, clip_ids: Tensor, t5_ids: Tensor, truth: Tensor, own: Tensor
    ) -> Tensor:
        """Mean cross-entropy of the answers; truth (batch, questions), own (batch, TOKENS, 4)."""
        pooled, states = replace(encoders, clip=self.clip, t5=self.t5)(clip_ids, t5_ids)
        each = torch.cat((truth[:, None].expand(-1, TOKENS, -1), own), -1)
        return _surprise(self.from_clip(pooled), truth, _ANSWERS) + _surprise(
            self.from_t5(states.flatten(0, 1)), each.flatten(0, 1), _ANSWERS + _OWN
        )


def _surprise(logits: Tensor, truth: Tensor, rows: tuple[tuple[Any, ...], ...]) -> Tensor:
    each = torch.split(logits, [len(row) for row in rows], dim=-1)
    losses = [nn.functional.cross_entropy(row, truth[:, i]) for i, row in enumerate(each)]
    return torch.stack(losses).mean()


def train_encoders(folder: Path, seed: int, schedule: Schedule, batch: int, log: Log) -> Encoders:
    """Encoders that know what a caption says, their weights fixed."""
    torch.manual_seed(seed + 1)
    encoders = new_encoders()

    def loss_of(model: nn.Module, step: int) -> Tensor:
        rng = np.random.default_rng((seed, 3, step))
        scenes = [training_scene(rng) for _ in range(batch)]
        ids = encoders.ids([scene.caption for scene in scenes])
        truth = torch.tensor([answers(scene) for scene in scenes])
        own = torch.tensor([own_answers(scene) for scene in scenes])
        return model.loss(encoders, *ids, truth, own)  # type: ignore[operator, no-any-return]

    trained: Any = train("encoders", _Reader(encoders), loss_of, schedule, folder, log)
    return replace(encoders, clip=trained.clip.eval(), t5=trained.t5.eval())
