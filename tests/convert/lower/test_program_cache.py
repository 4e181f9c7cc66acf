"""Programs kept between runs: the same bundle without PyTorch, and nothing believed unchecked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxconv.convert import conversion
from mlxconv.convert.conversion import convert
from mlxconv.convert.lower import program_cache
from mlxconv.convert.lower.compile import Compiled
from mlxconv.convert.lower.program_cache import (
    Analysis,
    cache_folder,
    entry_key,
    read_entry,
    unpatched,
    write_entry,
)
from mlxconv.convert.store import jobs
from mlxconv.runtime.program.stored import from_json

from ...bundles import PROGRAM
from ...conftest import Bundles


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXCONV_CACHE", str(tmp_path / "cache"))
    return cache_folder()


@pytest.fixture
def analysis(flux_bundle: Bundles) -> Analysis:
    program = from_json((flux_bundle("fp32") / "transformer" / PROGRAM).read_text(), "flux")
    program.constants = {"a.table": "float32", "file": "int32"}
    constants = {"a.table": np.arange(4, dtype=np.float32), "file": np.array(3, np.int32)}
    compiled = Compiled(program, constants, program.parameters, {"b": "a"})
    return Analysis(
        {"width": 8}, compiled, compiled.parameters, compiled.tied, "text", "note", ["careful"]
    )


def test_a_second_conversion_is_the_same_without_tracing(
    flux_checkpoint: Path, flux_bundle: Bundles, cache: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(conversion, "unpatched", lambda: True)
    convert(flux_checkpoint, tmp_path / "first", "4bit")
    assert len(list(cache.iterdir())) == 1

    code = """
import sys
from mlxconv.convert.conversion import convert
convert(sys.argv[1], sys.argv[2], "bf16")
print(sorted({"torch", "diffusers", "transformers"} & sys.modules.keys()))
"""
    second = tmp_path / "second"
    done = subprocess.run(
        [sys.executable, "-c", code, str(flux_checkpoint), str(second)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "[]\n", done.stderr
    expected = flux_bundle("bf16")
    for file in expected.rglob("*"):
        if file.is_file() and file.name not in ("mlxconv.json", "parity.json"):
            assert (second / file.relative_to(expected)).read_bytes() == file.read_bytes(), file


def test_what_is_read_is_what_was_written(analysis: Analysis, cache: Path) -> None:
    write_entry("k", analysis)
    found = read_entry("k")
    assert found is not None and found.compiled is not None and analysis.compiled is not None
    assert found.compiled.program == analysis.compiled.program
    assert found.parameters == analysis.parameters and found.tied == analysis.tied
    assert (found.config, found.derived, found.note) == ({"width": 8}, "text", "note")
    assert found.warnings == ["careful"]
    for name, value in analysis.compiled.constants.items():
        assert found.compiled.constants[name].dtype == value.dtype
        assert np.array_equal(found.compiled.constants[name], value)
    assert cache.stat().st_mode & 0o077 == 0
    assert read_entry("other") is None


def change(file: Path, edit: Any) -> None:
    """Edit the JSON text of an entry, its checksums in order."""
    with np.load(file) as arrays:
        parts = {name: arrays[name] for name in arrays.files}
    data = json.loads(parts["analysis"].tobytes())
    edit(data)
    parts["analysis"] = np.frombuffer(json.dumps(data).encode(), np.uint8)
    np.savez(file, **parts)


@pytest.mark.parametrize(
    "damage",
    [
        lambda f: f.write_bytes(f.read_bytes()[:-100]),
        lambda f: f.write_bytes(b""),
        lambda f: f.write_bytes(flipped(f.read_bytes())),
        lambda f: change(f, lambda d: d.update(program=d["program"].replace("linear", "system"))),
        lambda f: change(f, lambda d: d.update(parameters={"x": ["a", 1, 2]})),
        lambda f: change(f, lambda d: d.update(constants=["file"])),
        lambda f: change(f, lambda d: d.pop("config")),
    ],
    ids=["cut short", "empty", "a flipped bit", "an unknown op", "parameters", "constants", "keys"],
)
def test_a_damaged_entry_is_no_entry(analysis: Analysis, cache: Path, damage: Any) -> None:
    write_entry("k", analysis)
    damage(cache / "k.npz")
    assert read_entry("k") is None
    write_entry("k", analysis)
    assert read_entry("k") is not None


def flipped(data: bytes) -> bytes:
    """One bit of the first constant changed."""
    at = data.index(np.arange(4, dtype=np.float32).tobytes()) + 5
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_the_oldest_entries_go_first(
    analysis: Analysis, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, key in enumerate("abc"):
        write_entry(key, analysis)
        os.utime(cache / f"{key}.npz", (number, number))
    read_entry("a")  # used, so no longer the oldest
    monkeypatch.setattr(program_cache, "MAX_BYTES", 3 * (cache / "a.npz").stat().st_size)
    write_entry("d", analysis)
    assert sorted(file.stem for file in cache.iterdir()) == ["a", "c", "d"]


def test_processes_that_write_at_once_do_not_disturb_each_other(
    analysis: Analysis, cache: Path
) -> None:
    write_entry("k", analysis)
    threads = [threading.Thread(target=write_entry, args=("k", analysis)) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert all(read_entry("k") is not None for _ in range(10))
    for thread in threads:
        thread.join()
    assert [file.name for file in cache.iterdir()] == ["k.npz"]


def test_a_folder_that_cannot_be_written_costs_only_the_entry(
    flux_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MLXCONV_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(conversion, "unpatched", lambda: True)
    convert(flux_checkpoint, tmp_path / "out", "bf16")
    assert (tmp_path / "out").is_dir()


def test_other_facts_are_other_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    key = entry_key(config={"a": 1})
    assert key == entry_key(config={"a": 1}) != entry_key(config={"a": 2})
    monkeypatch.setattr(program_cache, "_source_digest", lambda: "another mlxconv")
    assert entry_key(config={"a": 1}) != key
    monkeypatch.setattr(program_cache, "versions", lambda: {"torch": "9"})
    assert entry_key(config={"a": 1}) != key


def test_an_editable_diffusers_is_not_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = tmp_path / "diffusers-9.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 9\n")
    origin = {"url": "file:///x", "dir_info": {"editable": True}}
    (found / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(tmp_path))
    assert entry_key() is None
    shutil.rmtree(found)
    assert entry_key() is not None


def test_a_process_that_can_have_patched_a_class_uses_no_cache(
    flux_checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    import torch  # noqa: F401

    assert not unpatched()
    convert(flux_checkpoint, tmp_path / "out", "bf16", dry_run=True)
    assert not cache.exists()


def test_a_class_of_the_user_is_not_cached(
    flux_checkpoint: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversion, "unpatched", lambda: True)
    monkeypatch.setattr(jobs, "read_entry", lambda key: pytest.fail("was looked up"))
    named = "diffusers.models.transformers.transformer_flux:FluxTransformer2DModel"
    convert(flux_checkpoint, tmp_path / "out", "bf16", model_class=named, weights_only=True)
    assert not cache.exists()
