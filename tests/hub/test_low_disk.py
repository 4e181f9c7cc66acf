"""`convert` from the Hub: a file at a time, gone on from after a kill, and the same bytes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from mlxconv.convert.catalog.figures import tiny_checkpoint
from mlxconv.convert.conversion import convert
from mlxconv.convert.recipe.reading import load_recipe

from .conftest import hub_env, run, start
from .server import Hub
from .tiny_repos import write_json

REPO = "acme/sharded"
STEM = "diffusion_pytorch_model"
SHARDS = 4


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny FluxTransformer2DModel in four shards of much the same size."""
    folder = tmp_path_factory.mktemp("sharded") / "sharded"
    tiny_checkpoint(load_recipe("FluxTransformer2DModel"), None, folder)
    (single,) = folder.glob("*.safetensors")
    tensors = dict(sorted(load_file(str(single)).items(), key=lambda item: item[1].nbytes))
    single.unlink()
    weight_map = {}
    for n in range(SHARDS):
        name = f"{STEM}-{n + 1:05d}-of-{SHARDS:05d}.safetensors"
        part = dict(list(tensors.items())[n::SHARDS])
        save_file(part, str(folder / name))
        weight_map |= dict.fromkeys(part, name)
    write_json(folder / f"{STEM}.safetensors.index.json", {"weight_map": weight_map})
    return folder


def shards_sent(hub: Hub) -> list[int]:
    """The shards whose bytes were asked for whole, in order; ranges are looks at headers."""
    files = hub.repos[REPO].head.files
    found = []
    for request in hub.requests("GET", r"/get/|/v1/reconstructions/"):
        for n in range(1, SHARDS + 1):
            file = files[f"{STEM}-{n:05d}-of-{SHARDS:05d}.safetensors"]
            by_http = f"/get/{file.lfs}" in request.path and "range" not in request.headers
            if by_http or f"/v1/reconstructions/{file.xet}" in request.path:
                found.append(n)
    return found


class Watch:
    """The largest number of bytes that a folder ever held, looked at every few milliseconds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.peak, self._stop = folder, 0, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.003):
            held = 0
            for folder, _, names in os.walk(self.folder):  # skips what goes meanwhile
                for name in names:
                    with suppress(OSError):
                        held += (Path(folder) / name).stat().st_size
            self.peak = max(self.peak, held)


@pytest.mark.slow
def test_killed_interrupted_and_gone_on_from(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    hub.repos.seed(REPO, sharded, xet=True)
    env = hub_env(hub, tmp_path / "hf")
    out = tmp_path / "out"
    work = tmp_path / ".out.unfinished"
    arguments = ("convert", REPO, "-o", out, "--q", "4bit", "--weights-only", "--low-disk")
    largest = max(file.stat().st_size for file in sharded.glob("*.safetensors"))

    with Watch(work / "shelf") as watch:
        hub.fail("GET", "/xorb/", "stall", nth=3, after=50_000)
        process = start(*arguments, env=env)
        _wait_for_stall(hub, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert shards_sent(hub) == [1, 2, 3] and not out.exists()

        hub.reset()
        hub.fail("GET", "/xorb/", "stall", nth=2, after=50_000)
        process = start(*arguments, env=env)
        _wait_for_stall(hub, process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 130 and "the same command goes on" in err, err
        assert shards_sent(hub) == [3, 4] and not out.exists()

        hub.reset()
        done = run(*arguments, "--json", env=env)
    assert done.code == 0, done.err
    assert shards_sent(hub) == [4]
    assert largest <= watch.peak < 1.5 * largest
    assert not work.exists() and sorted(p.name for p in tmp_path.glob("*out*")) == ["out"]
    assert not list((tmp_path / "hf").rglob("*.safetensors"))

    report = json.loads(done.out)
    assert report["source"] == REPO and report["revision"] == hub.repos[REPO].head.oid
    convert(sharded, tmp_path / "local", "4bit", weights_only=True)
    name = "transformer/model.safetensors"
    assert (out / name).read_bytes() == (tmp_path / "local" / name).read_bytes()


def _wait_for_stall(hub: Hub, process: subprocess.Popen[str]) -> None:
    """Until the server has fallen silent in the middle of a body."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if any(request.fault == "stall" and request.sent for request in hub.requests()):
            return
        time.sleep(0.02)
    process.kill()
    raise AssertionError(process.communicate()[1] + str([str(r) for r in hub.requests()]))


@pytest.mark.slow
def test_a_dry_run_and_then_the_whole(hub: Hub, sharded: Path, tmp_path: Path) -> None:
    hub.repos.seed(REPO, sharded, xet=True)
    env = hub_env(hub, tmp_path / "hf")
    out = tmp_path / "out"
    size = sum(file.stat().st_size for file in sharded.glob("*.safetensors"))
    arguments = ("convert", REPO, "-o", out, "--weights-only", "--json")

    done = run(*arguments, "--dry-run", env=env)
    assert done.code == 0, done.err
    told = json.loads(done.out)["download"]
    assert (told["files"], told["bytes"], told["to_fetch"]) == (SHARDS, size, size)
    assert told["free"] > size and told["cache"] == str(tmp_path / "hf" / "hub")
    assert not out.exists() and not hub.requests("GET", "/v1/reconstructions/")

    done = run(*arguments, "--verify", "--verify-checksums", env=env)
    assert done.code == 0, done.err
    report = json.loads(done.out)
    assert report["verify"]["passed"] and report["verify"]["source"] == REPO
    manifest = json.loads((out / "mlxconv.json").read_text(encoding="utf-8"))
    assert manifest["source"] == REPO
    assert manifest["revision"] == report["revision"] == hub.repos[REPO].head.oid
    assert sorted(shards_sent(hub)) == [1, 2, 3, 4]
