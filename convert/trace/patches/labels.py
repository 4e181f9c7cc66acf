"""Attributes of a class's instances, watched to see when one is read."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from .replaced import replaced

Label = tuple[type, str]


def watched_labels(labels: Collection[Label], reads: list[Label]) -> AbstractContextManager[None]:
    """Inside, `reads` gets each of these attributes when it is read of an instance.

    Nothing in torch 2.13 tells which settings of a module its forward depends on.
    """
    return replaced(*((cls, name, _Watched(cls, name, reads)) for cls, name in labels))


@dataclass
class _Watched:
    """A descriptor in the place of the attribute."""

    cls: type
    name: str
    reads: list[Label]

    def __get__(self, instance: Any, owner: type) -> Any:
        if self.name not in vars(instance or owner):
            raise AttributeError(self.name)
        self.reads.append((self.cls, self.name))
        return vars(instance or owner)[self.name]

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self.name] = value
