"""A checkpoint's tokenizers, written as the runtime reads them, compared with transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxconv.runtime.bundle import read_json
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import write_json
from mlxconv.runtime.generate.tokens import TextTokenizer

from ..source.checkpoint import Checkpoint

_CONFIG = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
_LENGTH = 77  # tokens that the padded prompts are cut or padded to

# What prompts look like: plain, empty, long, weighted, in many scripts, and hard on normalizers.
PROMPTS = (
    "",
    " ",
    "a",
    "a cat on a red sofa",
    "A Cat On A Red Sofa",
    "  two  spaces  ",
    "trailing ",
    "line one\nline two",
    "tabs\tand\r\nreturns",
    "don't, can't; it's \"quoted\"",
    "e.g. 3.5 x 10^4",
    "1234567890 007 1,000.50",
    "a (red:1.3) [blue|green] {sofa} AND ((best quality))",
    "50% off!!!",
    "https://example.org/a?b=c&d=%20",
    "<lora:style:0.8> photo",
    "<b>bold</b> &amp; code `x = 1`",
    "naïve café, Ångström, Straße",
    "cafe\u0301 vs caf\u00e9",
    "İstanbul ıI ŞşĞğ",
    "ﬁne ﬂuﬀ Ⅷ ½ ²",
    "ＦＵＬＬ ｗｉｄｔｈ",
    "zero\u200bwidth\u200djoiner\ufeff",
    "non\u00a0breaking\u2009space",
    "a\u0000b\u0007c",
    "红色沙发上的一只猫",
    "赤いソファの上の猫",
    "빨간 소파 위의 고양이",
    "кошка на красном диване",
    "γάτα σε κόκκινο καναπέ",
    "قطة على أريكة حمراء",
    "חתול על ספה אדומה",
    "लाल सोफे पर एक बिल्ली",
    "แมวบนโซฟาสีแดง",
    "con mèo trên ghế sô pha đỏ",
    "🐈",
    "a 🐈 on a 🟥 🛋️",
    "👩‍👩‍👧‍👦 👍🏽 🇫🇷",
    "∑ ∫ √2 ≈ 1.414 ≠ ∞",
    "→ ← “quotes” ‘single’ — dash … ellipsis",
    "x" * 300,
    "supercalifragilistic " * 3,
    "a photo of a cat, " * 40,
    "猫" * 200,
    "🙂" * 90,
    "</s> <pad> <unk> <bos>",
    "<|endoftext|> <|im_end|>",
    "<|startoftext|>cat<|endoftext|>",
    "_under_score-and-dash/and\\slash",
    "#hashtag @mention $5 ~tilde^",
)


def listed_class(checkpoint: Checkpoint, name: str) -> str:
    """The tokenizer's class in the pipeline's index; what its folder says where there is none."""
    listed = checkpoint.index.get(name)
    return str(listed[1]) if isinstance(listed, list) and len(listed) > 1 else "AutoTokenizer"


def load_tokenizer(folder: Path, class_name: str = "AutoTokenizer") -> Any:
    """transformers' tokenizer of a folder, in any layout that it reads; runs no code of the folder.

    MlxconvError when transformers cannot read it.
    """
    import transformers

    cls: Any = getattr(transformers, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedTokenizerBase)):
        cls = transformers.AutoTokenizer  # a processor, for one, has a tokenizer among its parts
    try:
        return cls.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise MlxconvError(f"{folder}: {cls.__name__} cannot read it ({first:.120})") from error


def write_tokenizer(folder: Path, class_name: str, out: Path) -> None:
    """Write tokenizer.json, and in tokenizer_config.json what the runtime reads, to `out`.

    Both say what transformers resolves from all files of `folder`: vocabularies, sentencepiece
    models, special and added tokens. MlxconvError when transformers cannot read the folder, which
    leaves `out` as it is, or when the runtime's ids would differ: then it has no tokenizer.json.
    """
    tokenizer = load_tokenizer(folder, class_name)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise MlxconvError(
            f"{folder}: {type(tokenizer).__name__} is written in Python, so it has "
            f"no {TOKENIZER_FILE}"
        )
    backend.no_padding()
    backend.no_truncation()
    (out / TOKENIZER_FILE).unlink(missing_ok=True)
    backend.save(str(out / TOKENIZER_FILE))
    options = read_json(out / _CONFIG) if (out / _CONFIG).is_file() else {}
    for name in ("pad_token", "padding_side", "truncation_side", "model_max_length"):
        options[name] = getattr(tokenizer, name, None)
    write_json(out / _CONFIG, options)
    if wrong := difference(TextTokenizer(out), tokenizer):
        (out / TOKENIZER_FILE).unlink()
        raise MlxconvError(f"{folder}: {wrong}")


def difference(ours: TextTokenizer, theirs: Any) -> str:
    """The first of `PROMPTS` that the two tokenize differently, and how; "" where none is."""
    cut = {"padding": "max_length", "max_length": _LENGTH, "truncation": True}
    for text in PROMPTS:
        pairs = [(_row(ours.unpadded(text).ids), theirs(text, verbose=False).input_ids)]
        if theirs.pad_token is not None:
            padded, expected = ours.padded(text, _LENGTH), theirs(text, **cut)
            pairs += [
                (_row(padded.ids), expected.input_ids),
                (_row(padded.mask), expected.attention_mask),
            ]
        for found, wanted in pairs:
            if found != list(wanted):
                return (
                    f"the prompt {text[:40]!r} becomes the tokens {found[:8]}..., by "
                    f"transformers {list(wanted)[:8]}..."
                )
    return ""


def _row(values: mx.array) -> list[Any]:
    """The only row of an array (1, n)."""
    row: list[Any] = np.array(values)[0].tolist()
    return row
