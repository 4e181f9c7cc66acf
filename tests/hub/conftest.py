"""The test hub, and the command line run against it: each run is a process with its own HF_HOME."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from .server import TOKEN, Hub

Env = dict[str, str]


@dataclass(frozen=True)
class Finished:
    """A command's end: `err` is what people read."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def error(self) -> str:
        """The line that begins with `error:`, "" where there is none."""
        lines = [line for line in self.err.splitlines() if line.startswith("error: ")]
        return lines[-1].removeprefix("error: ") if lines else ""


@pytest.fixture(scope="session")
def hub_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    """One hub for all tests of a worker; use `hub`."""
    with Hub(tmp_path_factory.mktemp("hub")) as running:
        yield running


@pytest.fixture
def hub(hub_server: Hub) -> Iterator[Hub]:
    """The hub without faults and with an empty log; at the end, no token reached storage.

    Repositories that a test makes go with it; those of session fixtures stay.
    """
    hub_server.reset()
    before = hub_server.repos.ids()
    yield hub_server
    hub_server.repos.keep(before)
    leaks = [str(request) for request in hub_server.leaks()]
    bugs = list(hub_server.bugs)
    hub_server.bugs.clear()
    hub_server.reset()
    assert not leaks
    assert not bugs, bugs[0]


@pytest.fixture(params=["xet", "http"])
def transport(request: pytest.FixtureRequest) -> str:
    """How large files travel."""
    return str(request.param)


@pytest.fixture
def env(hub: Hub, tmp_path: Path) -> Env:
    """A process's environment: this hub, a writer's token, an empty HF_HOME, quick retries."""
    return hub_env(hub, tmp_path / "hf")


def hub_env(hub: Hub, home: Path, token: str | None = TOKEN, transport: str = "xet") -> Env:
    """The environment of a client; `token` None: nobody is logged in."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    found = {
        **kept,
        "HF_HOME": str(home),
        "HF_ENDPOINT": hub.url,
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "0",
        "HF_HUB_ETAG_TIMEOUT": "5",
        "HF_XET_CLIENT_RETRY_BASE_DELAY": "100ms",
        "HF_XET_DATA_XORB_COMPRESSION_POLICY": "none",
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "OMP_NUM_THREADS": "1",
    }
    if token is not None:
        found["HF_TOKEN"] = token
    if transport == "http":
        found["HF_HUB_DISABLE_XET"] = "1"
    return found


MLXCONV = "from mlxconv.cli import main; main()"
# The download alone: all files of a repository that end in argv[2], without PyTorch and MLX.
FETCH = """
import sys
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.hub.download import open_remote
from mlxconv.runtime.hub.names import hub_name
try:
    remote = open_remote(hub_name(sys.argv[1]), checksums="--verify-checksums" in sys.argv)
    print(remote.fetch(path for path in remote.files if path.endswith(sys.argv[2])))
except MlxconvError as error:
    sys.exit(f"error: {error}")
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(*arguments: object, env: Env, program: str = MLXCONV) -> subprocess.Popen[str]:
    """`mlxconv ARGUMENTS`, or another program, as a process of its own."""
    command = [sys.executable, "-c", program, *(str(argument) for argument in arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True)


def run(
    *arguments: object, env: Env, timeout: float = 240, program: str = MLXCONV
) -> Finished:  # fmt: skip
    """The same to its end. Neither the token nor a traceback may be in what it says."""
    began = time.monotonic()
    process = start(*arguments, env=env, program=program)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert env.get("HF_TOKEN", TOKEN) not in out + err
    assert "Traceback" not in err, err
    return Finished(process.returncode, out, err, time.monotonic() - began)
