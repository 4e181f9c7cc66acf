"""What is decided of a generation before anything is computed."""

from dataclasses import dataclass

from ..schedulers import Scheduler
from .decode import TinyDecoder
from .families.family import Request
from .options import Options


@dataclass(frozen=True)
class Plan:
    """requests: one a picture, those of a prompt together."""

    requests: list[Request]
    scheduler: Scheduler
    decoder: TinyDecoder | None
    work: int
    options: Options
    notes: list[str]

    @property
    def by_prompt(self) -> list[list[Request]]:
        """The requests of each prompt."""
        step = len(self.requests) // len(self.options.prompts)
        return [self.requests[i : i + step] for i in range(0, len(self.requests), step)]
