"""Prompts to tokens, by the `tokenizers` library from a bundle's tokenizer.json."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from .bundle import read_json
from .errors import MlxconvError


@dataclass(frozen=True)
class Tokens:
    """ids and mask (1, length). `cut`: how many tokens of the text did not fit."""

    ids: mx.array
    mask: mx.array
    cut: int


class TextTokenizer:
    """A tokenizer folder of a bundle. special: add the tokens that begin and end a text; a chat
    template has them itself."""

    def __init__(self, folder: Path, *, special: bool = True) -> None:
        from tokenizers import Tokenizer

        self._special, self._folder = special, folder
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise MlxconvError(
                f"{file}: missing; convert the checkpoint again, or pass embeddings from Python"
            )
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no class of its own
            raise MlxconvError(f"{file}: cannot be read ({error}); copy it again") from error
        options = folder / "tokenizer_config.json"
        self._options: dict[str, Any] = read_json(options) if options.is_file() else {}

    def padded(self, text: str, length: int | None = None) -> Tokens:
        """Exactly `length` tokens (by default the tokenizer's own maximum), special ones too."""
        length = length or int(self._options.get("model_max_length", 77))
        whole = self._count(text)
        pad, token = self._pad
        side = self._options.get("padding_side") or "right"
        self._truncate(length)
        self._tokenizer.enable_padding(direction=side, pad_id=pad, pad_token=token, length=length)
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=self._special)
        finally:
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
        mask = mx.array([encoded.attention_mask])
        return Tokens(mx.array([encoded.ids]), mask, max(0, whole - length))

    def unpadded(self, text: str, length: int | None = None) -> Tokens:
        """As many tokens as the text has, or `length` where those are fewer."""
        whole = self._count(text)
        if length is not None:
            self._truncate(length)
        encoded = self._tokenizer.encode(text, add_special_tokens=self._special)
        self._tokenizer.no_truncation()
        mask = mx.array([encoded.attention_mask])
        return Tokens(mx.array([encoded.ids]), mask, whole - len(encoded.ids))

    def _truncate(self, length: int) -> None:
        side = self._options.get("truncation_side") or "right"
        self._tokenizer.enable_truncation(length, direction=side)

    def _count(self, text: str) -> int:
        """Tokens of the whole text; a file may come with a padding of its own."""
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        return len(self._tokenizer.encode(text, add_special_tokens=self._special).ids)

    @property
    def _pad(self) -> tuple[int, str]:
        named = self._options.get("pad_token")
        token = named["content"] if isinstance(named, dict) else named
        found = None if token is None else self._tokenizer.token_to_id(str(token))
        if found is None:
            raise MlxconvError(
                f"{self._folder / 'tokenizer_config.json'}: pad_token is {token!r}, which is no "
                "token of tokenizer.json, and this pipeline pads prompts; get both files from the "
                "model's source again"
            )
        return found, str(token)
