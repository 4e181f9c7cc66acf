"""Attributes of modules and classes replaced for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ABSENT = object()


@contextmanager
def replaced(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Inside, each (owner, name) has another value.

    Afterwards it has what the owner itself held; what was inherited or absent is so again.
    """
    before: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, value in changes:
            before.append((owner, name, vars(owner).get(name, _ABSENT)))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, held in reversed(before):
            if held is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, held)
