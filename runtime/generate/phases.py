"""The phases of a generation: how long each takes, what memory it needs, and how far it is."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import mlx.core as mx

from ..files import format_bytes
from ..interrupts import check_interrupt

# Told a phase's name, how many of its parts are done, and how many there are.
Listener = Callable[[str, int, int], None]


@dataclass
class Phases:
    """Seconds and peak bytes of MLX's memory by phase; `wall` is from the first to now.

    later: seconds of each step but the first.
    """

    listener: Listener | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    later: list[float] = field(default_factory=list)
    began: float = field(default_factory=time.perf_counter)

    @contextmanager
    def phase(self, name: str, parts: int = 1) -> Iterator[Callable[[], None]]:
        """Book the body's time and memory; what it is given is called after each of its parts.

        A phase may come again; `book` inside it takes a part of its memory to another one.
        """
        done = 0

        def ended() -> None:
            nonlocal done
            done += 1
            self._tell(name, done, parts)

        mx.reset_peak_memory()
        self._tell(name, 0, parts)
        began = time.perf_counter()
        try:
            yield ended
        finally:
            self.book(name, time.perf_counter() - began)

    def book(self, name: str, seconds: float) -> None:
        """Add time to a phase, and the memory that was needed since the last booking."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self.peak_bytes[name] = max(self.peak_bytes.get(name, 0), mx.get_peak_memory())
        mx.reset_peak_memory()

    @property
    def wall(self) -> float:
        return time.perf_counter() - self.began

    def _tell(self, name: str, done: int, parts: int) -> None:
        if self.listener is not None:
            self.listener(name, done, parts)
        check_interrupt()  # a listener's terminal library may have swallowed it


def phase_table(
    names: Sequence[str], seconds: Mapping[str, float], peak_bytes: Mapping[str, int], total: float
) -> list[str]:
    """Lines: each phase's seconds, share of the total, and peak memory; what is left, as other."""
    lines = [f"{'phase':12}{'seconds':>10}{'share':>8}{'peak':>12}"]
    spent = {name: seconds[name] for name in names if name in seconds}
    lines += [
        f"{name.replace('_', ' '):12}{value:10.3f}{value / total:8.1%}"
        f"{format_bytes(peak_bytes[name]) if name in peak_bytes else '':>12}".rstrip()
        for name, value in spent.items()
    ]
    other = total - sum(spent.values())
    if other > 0.001 * total:
        lines.append(f"{'other':12}{other:10.3f}{other / total:8.1%}")
    most = format_bytes(max(peak_bytes.values()))
    return [*lines, f"{'total':12}{total:10.3f}{1:8.1%}{most:>12}"]
