"""Ctrl-C that libraries swallow: a bare `except` while one is imported, a callback out of C++."""

import signal
from types import FrameType

NOT_WAITED_FOR = "not waited for"  # name of threads that an interrupted process leaves behind
_seen = False


def remember_interrupts() -> None:
    """From now on SIGINT raises KeyboardInterrupt as before, and `check_interrupt` knows of it."""
    signal.signal(signal.SIGINT, _interrupted)


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen = True
    raise KeyboardInterrupt


def check_interrupt() -> None:
    """Raise KeyboardInterrupt if one came and went by."""
    if _seen:
        raise KeyboardInterrupt
