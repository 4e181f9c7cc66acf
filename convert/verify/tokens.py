"""Whether a bundle's prompts become the tokens that transformers makes of them."""

from __future__ import annotations

from mlxconv.runtime.bundle import Bundle
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.generate.tokens import TextTokenizer

from ..source.checkpoint import Checkpoint
from ..store.tokenizers import PROMPTS, TOKENIZER_FILE, difference, listed_class, load_tokenizer
from .metrics import Row, Sums, make_row


def tokenizer_rows(bundle: Bundle, checkpoint: Checkpoint) -> list[Row]:
    """A row for each tokenizer of a bundle: whether the runtime's ids are transformers' own."""
    rows = []
    for name, folder in checkpoint.others.items():
        if not (bundle.path / name / TOKENIZER_FILE).is_file():
            continue
        try:
            theirs = load_tokenizer(folder, listed_class(checkpoint, name))
            note = difference(TextTokenizer(bundle.path / name), theirs)
        except MlxconvError as error:
            note = str(error)
        what = f"{len(PROMPTS)} prompts"
        sums = Sums(other=float(bool(note)))  # tokens are equal or they are not
        rows.append(
            make_row("tokens", name, what, sums, None, "transformers", passed=not note, note=note)
        )
    return rows
