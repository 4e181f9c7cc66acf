"""Keeps tokens, and where a user's files lie, out of what is shown, written or published."""

from __future__ import annotations

import re
from pathlib import Path

HIDDEN = "hf_***"
_TOKEN = re.compile(r"hf_[A-Za-z0-9]{16,}")


def current_token() -> str | None:
    """The token that the Hub's client would use, if there is one."""
    from huggingface_hub import get_token

    return get_token()


def without_token(text: str, token: str | None = None) -> str:
    """`text` with everything that looks like a token, and `token` itself, hidden."""
    if token:
        text = text.replace(token, HIDDEN)
    return _TOKEN.sub(HIDDEN, text)


def without_home(text: str) -> str:
    """`text` with the home folder's path as `~`: it may hold the user's name."""
    home = str(Path.home())
    return text if home == "/" else re.sub(rf"{re.escape(home)}(?=/|\s|'|\"|$)", "~", text)
