"""`generate` in a terminal: a bar for each phase, and Ctrl-C that leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ...conftest import Bundles

pty = pytest.importorskip("pty")
MAIN = "from mlxconv.cli import main; main()"
SHORT = ["--size", "48x32", "--tokens", "16"]


def command(bundle: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-c", MAIN, "generate", str(bundle), "a cat", "-o", str(out), *SHORT,
            *options]  # fmt: skip


def in_terminal(command: list[str], interrupt_at: str | None = None) -> tuple[int, str]:
    """Exit code, and all that a terminal of 80 columns was sent; Ctrl-C once a pattern appears."""
    import fcntl
    import struct
    import termios

    pid, terminal = pty.fork()
    if pid == 0:
        # Commands run inside tests turn bars off for their process, which is ours.
        os.execve(command[0], command, {k: v for k, v in os.environ.items() if k != "TQDM_DISABLE"})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    seen = ""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # Linux: the other end is closed
            break
        if not read:
            break
        seen += read.decode(errors="replace")
        if interrupt_at is not None and re.search(interrupt_at, seen):
            os.write(terminal, b"\x03")
            interrupt_at = None
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), seen


def left_on_screen(seen: str) -> list[str]:
    """The lines that remain: a carriage return goes back to overwrite, ESC [K clears the line."""
    lines = []
    for line in seen.split("\n"):
        shown = ""
        for part in line.replace("\x1b[K", "\x1b[K\r").split("\r"):
            shown = "" if part == "\x1b[K" else part + shown[len(part) :]
        lines.append(shown.rstrip())
    return [line for line in lines if line and not line.startswith("MLX is compiling")]


def test_each_phase_has_a_bar_that_is_cleared(pipeline_bundle: Bundles, tmp_path: Path) -> None:
    out = tmp_path / "cat.png"
    code, seen = in_terminal(command(pipeline_bundle("4bit"), out, "--steps", "3"))
    assert code == 0
    for bar in ("encode:   0%", "prepare:   0%", "steps:   0%", "0/3", "decode:   0%"):
        assert bar in seen
    said, written, figures = left_on_screen(seen)
    assert "3 steps, seed" in said
    assert written == str(out)
    assert "peak memory" in figures


def test_ctrl_c_between_steps_leaves_a_clean_terminal_and_no_file(
    pipeline_bundle: Bundles, tmp_path: Path
) -> None:
    line = command(pipeline_bundle("4bit"), tmp_path / "cat.png", "--steps", "5000")
    code, seen = in_terminal(line, interrupt_at=r" [1-9]\d*/5000")
    assert code == 130
    assert left_on_screen(seen)[1:] == ["interrupted; nothing was left half-written"]
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_drawn_beside_json(
    pipeline_bundle: Bundles, tmp_path: Path
) -> None:
    line = command(pipeline_bundle("4bit"), tmp_path / "cat.png", "--steps", "1", "--json")
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stderr == ""
