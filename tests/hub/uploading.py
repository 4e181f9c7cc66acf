"""`mlxconv upload` as a process of its own against the test hub, with short pauses."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from .conftest import Env, Finished
from .server import READ_TOKEN, TOKEN

PROGRAM = """
import time
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.02))  # of the client's retries, and of ours
from mlxconv.cli import main
main()
"""


def start(*arguments: object, env: Env, cwd: Path | None = None) -> subprocess.Popen[str]:
    """`mlxconv ARGUMENTS`, started."""
    command = [sys.executable, "-c", PROGRAM, *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, cwd=cwd, stdout=pipe, stderr=pipe, text=True)


def finish(process: subprocess.Popen[str], timeout: float = 240) -> Finished:
    """Its end. It must show neither a token nor a traceback, and call nothing done that failed."""
    began = time.monotonic()
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert not [token for token in (TOKEN, READ_TOKEN) if token in out + err]
    assert "Traceback" not in err, err
    done = Finished(process.returncode, out, err, time.monotonic() - began)
    said = '"published": true' in out or any(
        line.startswith("published: ") for line in err.splitlines()
    )
    assert done.code == 0 or not said
    return done


def run(*arguments: object, env: Env, cwd: Path | None = None) -> Finished:
    """`mlxconv ARGUMENTS` to its end."""
    return finish(start(*arguments, env=env, cwd=cwd))
