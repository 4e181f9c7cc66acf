"""Prompts to tokens, by the `tokenizers` library from a bundle's tokenizer.json."""

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from ..bundle import read_json
from ..errors import MlxconvError
from ..files import read_text

MAX_TOKENS = 1 << 15  # of a prompt; pipelines take 77 to 4,096
MAX_GROWTH = 1 << 12  # how many times longer a tokenizer may make a text before it cuts it up


def check_growth(text: str, file: Path) -> None:
    """MlxconvError for a tokenizer.json whose steps make a short prompt fill the memory."""
    try:
        data = json.loads(text)
        growth = math.prod(
            _growth(step) for key in ("normalizer", "pre_tokenizer") for step in _steps(data[key])
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise MlxconvError(f"{file}: not a tokenizer ({error}); copy it again") from error
    if growth > MAX_GROWTH:
        raise MlxconvError(
            f"{file}: its normalizers make a text up to {growth:.3g} times longer; refused"
        )


def _steps(data: Any) -> Iterator[dict[str, Any]]:
    for key in ("normalizers", "pretokenizers"):
        for step in (data or {}).get(key, ()):
            yield from _steps(step)
    if data and data["type"] != "Sequence":
        yield data


def _growth(step: dict[str, Any]) -> int:
    """How many times longer a step can make a text; 2 stands for what writes bytes as letters."""
    if step["type"] != "Replace":
        return 2 if step["type"] in ("ByteLevel", "NFD", "NFKD", "NFKC", "Precompiled") else 1
    pattern = step["pattern"].get("String", "")
    length = len(step["content"])
    return -(-length // len(pattern)) or 1 if pattern else length + 1


@contextlib.contextmanager
def _silenced(descriptor: int) -> Iterator[None]:
    """Nothing written to a descriptor arrives, by whatever language."""
    try:
        kept = os.dup(descriptor)
    except OSError:  # it is closed already
        yield
        return
    try:
        with Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), descriptor)
        yield
    finally:
        os.dup2(kept, descriptor)
        os.close(kept)


def longest_prompt(options: Mapping[str, Any]) -> int | None:
    """`model_max_length` of a tokenizer_config.json; None where it says no limit, by 1e30."""
    length = options.get("model_max_length")
    return int(length) if isinstance(length, (int, float)) and 1 <= length <= MAX_TOKENS else None


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
        self._file, text = file, read_text(file)
        check_growth(text, file)
        with self._guarded():
            self._tokenizer = Tokenizer.from_str(text)
        options = folder / "tokenizer_config.json"
        self._options: dict[str, Any] = read_json(options) if options.is_file() else {}

    @property
    def longest(self) -> int | None:
        """Tokens of the longest prompt, where its configuration says so."""
        return longest_prompt(self._options)

    def padded(self, text: str, length: int | None = None, side: str | None = None) -> Tokens:
        """Exactly `length` tokens (by default the tokenizer's own maximum), special ones too.

        side: `left` or `right`, to pad on; by default the tokenizer's own.
        """
        length = self._checked(length or self._options.get("model_max_length", 77))
        whole = self._count(text)
        pad, token = self._pad
        side = side or self._options.get("padding_side") or "right"
        with self._guarded():
            self._truncate(length)
            self._tokenizer.enable_padding(
                direction=side, pad_id=pad, pad_token=token, length=length
            )
            encoded = self._encode(text)
        self._tokenizer.no_padding()
        mask = mx.array([encoded.attention_mask])
        return Tokens(mx.array([encoded.ids]), mask, max(0, whole - length))

    def unpadded(self, text: str, length: int | None = None) -> Tokens:
        """As many tokens as the text has, or `length` where those are fewer."""
        whole = self._count(text)
        with self._guarded():
            if length is not None:
                self._truncate(self._checked(length))
            encoded = self._encode(text)
        mask = mx.array([encoded.attention_mask])
        return Tokens(mx.array([encoded.ids]), mask, whole - len(encoded.ids))

    def _truncate(self, length: int) -> None:
        side = self._options.get("truncation_side") or "right"
        self._tokenizer.enable_truncation(length, direction=side)

    def _count(self, text: str) -> int:
        """Tokens of the whole text; a file may come with a padding of its own."""
        with self._guarded():
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            return len(self._encode(text).ids)

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=self._special)

    def _checked(self, length: Any) -> int:
        if not isinstance(length, (int, float)) or not 1 <= length <= MAX_TOKENS:
            raise MlxconvError(
                f"{self._folder.name}: prompts of {length!r:.40} tokens (max_sequence_length, or "
                f"model_max_length in tokenizer_config.json), expected 1 to {MAX_TOKENS}; give "
                "another number (--tokens N)"
            )
        return int(length)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """What the library raises as MlxconvError. Its panics are no `Exception`, and are printed:
        standard error is closed to it meanwhile."""
        try:
            with _silenced(2):
                yield
        except (MlxconvError, KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise MlxconvError(
                f"{self._file}: the tokenizer fails ({reason:.200}); get it from the model's "
                "source again"
            ) from error

    @property
    def _pad(self) -> tuple[int, str]:
        named = self._options.get("pad_token")
        token = named["content"] if isinstance(named, dict) else named
        found = None if token is None else self._tokenizer.token_to_id(str(token))
        if found is None:
            raise MlxconvError(
                f"{self._folder / 'tokenizer_config.json'}: pad_token is {token!r}, which is not "
                "a token of tokenizer.json, but this pipeline pads prompts; get both files from "
                "the model's source again"
            )
        return found, str(token)
