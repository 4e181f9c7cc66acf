"""Downloads by the real client in processes of their own: what is fetched, and every failure."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import FETCH, Env, Finished, hub_env, run, start
from .server import READ_TOKEN, Hub
from .tiny_repos import NEEDED, NEEDED_WEIGHTS, messy_pipeline, write_json

REPO = "acme/messy"
WEIGHTS = ".safetensors"
# A body that faults can cut: no Xet chunk nor buffer is as large.
SIZE = 1200  # a side of a float32 matrix: 5.8 MB a file
BODY = r"/get/|/xorb/"  # the requests for the weights' bytes, without Xet and with it


@pytest.fixture(scope="session")
def seeded(hub_server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`acme/messy`, in the Xet store too; the folder it was made of."""
    folder = messy_pipeline(tmp_path_factory.mktemp("messy"))
    hub_server.repos.seed(REPO, folder, xet=True)
    return folder


@pytest.fixture(scope="session")
def large(hub_server: Hub, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`acme/large`: one weight file of 5.8 MB."""
    folder = messy_pipeline(tmp_path_factory.mktemp("large"), SIZE) / "vae"
    hub_server.repos.seed("acme/large", folder, xet=True)
    return folder


def fetch(env: Env, *options: str, repo: str = "acme/large") -> Finished:
    return run(repo, WEIGHTS, *options, env=env, program=FETCH)


def same_bytes(snapshot: str, folder: Path) -> bool:
    name = "diffusion_pytorch_model.safetensors"
    return (Path(snapshot.strip()) / name).read_bytes() == (folder / name).read_bytes()


def fetched(hub: Hub) -> set[str]:
    """Paths of the files that were asked for whole; ranges are looks at headers."""
    found = set()
    for request in hub.requests("GET", "/resolve/"):
        if "range" not in request.headers:
            found.add(request.path.split("/resolve/")[1].partition("/")[2])
    return found


# ---- what is fetched


def test_inspect_fetches_small_files_and_headers_once(
    hub: Hub, seeded: Path, tmp_path: Path
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport="http")
    done = run("inspect", REPO, "--json", env=env)
    assert done.code == 0, done.err
    assert '"kind": "checkpoint"' in done.out and hub.repos[REPO].head.oid in done.out
    assert {p for p in fetched(hub) if not p.endswith("index.fp16.json")} == NEEDED
    looked = {
        r.path.partition("/resolve/")[2].partition("/")[2] for r in hub.requests("GET", "/resolve/")
    } - fetched(hub)
    assert looked == NEEDED_WEIGHTS
    assert len(hub.requests("GET", r"/api/models/acme/messy(/revision/.*)?$")) == 1
    assert hub.requests("GET", "/api/models/acme/messy")[0].headers["authorization"]

    # Warm: offline, and when the Hub is down, what is there is enough but for the headers.
    fetch(env, repo=REPO)
    hub.reset()
    offline = run("inspect", REPO, "--json", env={**env, "HF_HUB_OFFLINE": "1"})
    down = run("inspect", REPO, "--json", env={**env, "HF_ENDPOINT": dead_address()})
    assert (offline.code, down.code) == (0, 0), offline.err + down.err
    assert offline.out == down.out == done.out and not hub.log


def test_a_download_arrives(hub: Hub, large: Path, tmp_path: Path, transport: str) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    done = fetch(env)
    assert done.code == 0 and same_bytes(done.out, large)
    assert done.err == ""  # no bars where there is no terminal
    assert bool(hub.requests("GET", "/xorb/")) == (transport == "xet")
    sent = hub.storage_bytes()
    assert fetch(env, "--verify-checksums").code == 0
    assert hub.storage_bytes() == sent


# ---- refusals, each a line that says what to do


def test_refusals(hub: Hub, seeded: Path, large: Path, tmp_path: Path) -> None:
    repos = hub.repos
    repos.seed("acme/gated", seeded / "vae", gated="manual")
    repos.seed("acme/private", seeded / "vae", private=True)
    repos.create("acme/empty")
    nobody = hub_env(hub, tmp_path / "hf", token=None)
    reader = hub_env(hub, tmp_path / "hf", token=READ_TOKEN)
    bad = hub_env(hub, tmp_path / "hf", token="hf_wrong_secret")

    def refused(source: str, env: Env, pattern: str, *options: str) -> None:
        done = run("inspect", source, *options, env=env)
        assert done.code == 1 and done.out == "" and done.err.count("\n") == 1, done.err
        assert re.search(pattern, done.error), done.error

    refused("acme/none", reader, f"^acme/none: no such repository.*{hub.url}/acme/none")
    refused("acme/none", nobody, "^acme/none: no such repository.*you are not logged in.*HF_TOKEN")
    page = f"accept its terms at {hub.url}/acme/gated"
    refused("acme/gated", nobody, f"^acme/gated: is gated: {page}, then log in")
    refused("acme/gated", reader, f"^acme/gated: is gated and this account has no access: {page}")
    refused("acme/private", nobody, "a private one and you are not logged in.*`hf auth login`")
    refused("acme/private", reader, "a private one that this account's token does not see")
    refused(REPO, bad, "the Hub does not accept the token .*Invalid credentials.*log in")
    refused(REPO, reader, "^acme/messy: has no revision 'v9', .*acme/messy/commits",
            "--revision", "v9")  # fmt: skip
    refused("acme/empty", reader, r"^acme/empty: holds \.gitattributes; expected model_index.json")
    refused("hf://acme/messy/nowhere", reader, "^acme/messy/nowhere: holds nothing")
    offline = {**reader, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "fresh")}
    refused(REPO, offline, "^acme/messy: is not whole in the local cache, and HF_HUB_OFFLINE=1")
    down = {**reader, "HF_ENDPOINT": dead_address(), "HF_HOME": str(tmp_path / "fresh")}
    refused(REPO, down, "^acme/messy: cannot reach http://127.0.0.1:.*check the connection")
    refused(str(seeded), reader, "a local path, and --revision applies only", "--revision", "x")


def test_a_token_that_may_not_and_a_file_that_is_not_there(
    hub: Hub, large: Path, tmp_path: Path
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport="http")
    hub.fail("GET", "/api/models/acme/large", status=403, message="not for you")
    done = fetch(env)
    assert done.code == 1 and "refuses this token (not for you)" in done.error
    hub.reset()
    hub.fail("HEAD", "/resolve/", status=404, code="EntryNotFound")
    done = fetch(env)
    assert "has no file diffusion_pytorch_model.safetensors" in done.error, done.err
    hub.reset()
    done = run("acme/large", ".gguf", env=env, program=FETCH)
    assert "has no files that mlxconv can use" in done.error


# ---- failures of servers and connections


def test_a_stumble_is_got_over(hub: Hub, seeded: Path, large: Path, tmp_path: Path) -> None:
    """Once each: a server error for the info, a file, a header; a reset; a cut header."""
    env = hub_env(hub, tmp_path / "hf", transport="http")
    hub.fail("GET", "/api/models/acme/messy$", nth=1)
    hub.fail("GET", "/tree/", "reset", nth=1)
    hub.fail("GET", "/resolve/.*/model_index.json", "reset", nth=1)
    hub.fail("GET", "/get/", nth=1)
    hub.fail("GET", "/get/", "drop", nth=2, after=100)
    done = run("inspect", REPO, env=env)
    assert done.code == 0, done.err
    assert {r.fault for r in hub.log} >= {"status", "reset", "drop"}


@pytest.mark.parametrize("action", ["status", "reset", "drop"])
def test_a_body_that_breaks_once(
    hub: Hub, large: Path, tmp_path: Path, transport: str, action: str
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    hub.fail("GET", BODY, action, nth=1, after=1_000_000)
    done = fetch(env)
    assert done.code == 0 and same_bytes(done.out, large), done.err
    assert [r.fault for r in hub.requests("GET", BODY)].count(action) == 1


def test_a_body_that_always_breaks(hub: Hub, large: Path, tmp_path: Path, transport: str) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    hub.fail("GET", BODY, status=503, message="down for maintenance")
    done = fetch(env)
    assert done.code == 1 and "run the same command again" in done.error, done.err
    if transport == "xet":
        assert "the Xet transfer failed" in done.error and "HF_HUB_DISABLE_XET=1" in done.error
    else:
        assert "the Hub fails with HTTP 503 (down for maintenance)" in done.error
    assert not list((tmp_path / "hf").rglob("*.incomplete"))
    hub.reset()
    assert fetch(env).code == 0


def test_a_dead_xet_store(hub: Hub, large: Path, tmp_path: Path) -> None:
    env = hub_env(hub, tmp_path / "hf")
    hub.xet.alive = False
    done = fetch(env)
    assert done.code == 1 and "the Xet transfer failed" in done.error, done.err
    assert "HF_HUB_DISABLE_XET=1 goes another way" in done.error
    assert fetch({**env, "HF_HUB_DISABLE_XET": "1"}).code == 0  # as it says


def test_a_flipped_byte_is_found_when_asked_for(
    hub: Hub, large: Path, tmp_path: Path, transport: str
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    hub.fail("GET", BODY, "corrupt", nth=1, after=500_000)
    accepted = fetch(env)
    assert accepted.code == 0 and not same_bytes(accepted.out, large)
    done = fetch(env, "--verify-checksums")
    assert done.code == 1, done.out
    assert "diffusion_pytorch_model.safetensors arrived damaged" in done.error
    again = fetch(env, "--verify-checksums")
    assert again.code == 0 and same_bytes(again.out, large)


# ---- interruptions


def test_killed_and_run_again(hub: Hub, tmp_path: Path, transport: str) -> None:
    """Files that were complete are not sent again; the one in flight is, from its beginning."""
    folder = messy_pipeline(tmp_path / "source", SIZE) / "transformer"
    hub.repos.seed("acme/killed", folder, xet=True)
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    first = "diffusion_pytorch_model-00001-of-00002.safetensors"
    done = run("acme/killed", first, env=env, program=FETCH)
    assert done.code == 0
    whole = hub.storage_bytes()
    hub.reset()
    hub.fail("GET", BODY, "stall", nth=1, after=2_000_000)
    process = start("acme/killed", "-of-00002.safetensors", env=env, program=FETCH)
    hub.wait_for("GET", BODY, sent=2_000_000)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    sent = hub.storage_bytes()
    hub.reset()
    done = run("acme/killed", "-of-00002.safetensors", env=env, program=FETCH)
    assert done.code == 0, done.err
    names = [f"diffusion_pytorch_model{v}-0000{n}-of-00002.safetensors" for v in ("", ".fp16")
             for n in (1, 2)]  # fmt: skip
    for name in names:
        assert (Path(done.out.strip()) / name).read_bytes() == (folder / name).read_bytes()
    assert hub.storage_bytes() <= 3 * whole + 100_000 and sent >= 2_000_000


def test_ctrl_c(hub: Hub, large: Path, tmp_path: Path, transport: str) -> None:
    """The process ends at once, though the client's threads wait for a silent server."""
    bundle = tmp_path / "bundle"
    shutil.copytree(large, bundle / "transformer")
    write_json(bundle / "mlxconv.json", {"version": 1, "components": {"transformer": {}}})
    write_json(bundle / "model_index.json", {"_class_name": "FluxPipeline"})
    hub.repos.seed("acme/bundle", bundle, xet=True)
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    hub.fail("GET", BODY, "stall", nth=1, after=2_000_000)
    process = start("generate", "acme/bundle", "a cat", "-o", tmp_path / "cat.png", env=env)
    hub.wait_for("GET", BODY, sent=2_000_000)
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130 and "interrupted" in err and "Traceback" not in err, err
    assert time.monotonic() - began < 10  # 0.2 s on a machine that has nothing else to do
    assert not list((tmp_path / "hf").rglob("*.incomplete"))


# ---- disks


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB; only root may make one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = shutil.which("mount")
    if mount is None or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    made = subprocess.run([mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], check=False)
    if made.returncode != 0:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_disk_that_is_too_small_is_found_before_the_first_byte(
    hub: Hub, large: Path, tmp_path: Path, small_disk: Path
) -> None:
    done = fetch(hub_env(hub, small_disk))
    size = f"{(large / 'diffusion_pytorch_model.safetensors').stat().st_size:,}"
    assert done.code == 1 and f"{size} bytes are needed in {small_disk}" in done.error, done.err
    assert not hub.requests("GET", BODY)


def test_a_disk_that_fills_up_on_the_way(
    hub: Hub, large: Path, small_disk: Path, transport: str
) -> None:
    """Another process takes the room after the check: 3 of the 4 MB."""
    program = FETCH.replace(
        "remote = open_remote",
        "import shutil; shutil.disk_usage = lambda path: shutil._ntuple_diskusage(9**9, 0, 9**9)\n"
        "    remote = open_remote",
    )
    env = hub_env(hub, small_disk, transport=transport)
    done = run("acme/large", WEIGHTS, env=env, program=program)
    assert done.code == 1, done.out
    assert "the disk of" in done.error and "is full" in done.error, done.err
    assert "bytes were still to come" in done.error and "HF_HOME" in done.error
    assert not list(small_disk.rglob("*.incomplete"))


def dead_address() -> str:
    """An address on this machine where nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{taken.getsockname()[1]}"
