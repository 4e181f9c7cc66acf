"""Bundles on the Hub: opened by id, looked at by headers, fetched by component."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..conftest import Bundles
from .conftest import hub_env, run
from .server import Hub
from .tiny_repos import weights, write_json

LOAD = """
import sys
import mlxconv
from mlxconv.runtime.errors import MlxconvError
try:
    component = mlxconv.load_component(sys.argv[1], *sys.argv[2:])
except MlxconvError as error:
    sys.exit(f"error: {error}")
assert "torch" not in sys.modules
print(component.path)
"""


def fetched(hub: Hub) -> set[str]:
    """Files that were asked for whole, in either way."""
    files = {file.xet: path for path, file in hub.repos["acme/made"].head.files.items()}
    by_xet = {files.get(r.path.rpartition("/")[2], "") for r in hub.requests("GET", "/v1/recon")}
    whole = [r for r in hub.requests("GET", "/resolve/") if "range" not in r.headers]
    return by_xet | {r.path.partition("/resolve/")[2].partition("/")[2] for r in whole}


def test_a_component_by_the_id_of_its_bundle(
    hub: Hub, flux_bundle: Bundles, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(flux_bundle("4bit"), tmp_path / "made"))
    hub.repos.seed("acme/made", bundle, xet=True)
    env = hub_env(hub, tmp_path / "hf")
    here = run("inspect", bundle, "--json", env=env)
    there = run("inspect", "acme/made", "--json", env=env)
    assert there.code == 0, there.err
    found, expected = json.loads(there.out), json.loads(here.out)
    assert found["kind"] == "bundle" and found["components"] == expected["components"]
    assert found["revision"] == hub.repos["acme/made"].head.oid
    assert not {path for path in fetched(hub) if path.endswith(".safetensors")}

    # A second component, larger than what is used of the bundle, and never read.
    weights(bundle / "vae/model.safetensors", "w", size=300)
    manifest = json.loads((bundle / "mlxconv.json").read_text(encoding="utf-8"))
    write_json(bundle / "mlxconv.json", {**manifest, "components": {
        **manifest["components"], "vae": {"class": "AutoencoderKL"},
    }})  # fmt: skip
    hub.repos.add(hub.repos["acme/made"], bundle, xet=True)
    hub.reset()
    done = run("acme/made", "transformer", env=env, program=LOAD)
    assert done.code == 0, done.err
    assert "transformer/model.safetensors" in fetched(hub)
    assert "vae/model.safetensors" not in fetched(hub)
    assert Path(done.out.strip()).is_relative_to(tmp_path / "hf")
    offline = run("acme/made", "transformer", env={**env, "HF_HUB_OFFLINE": "1"}, program=LOAD)
    assert offline.out == done.out
    lost = run("acme/made", "vae", env={**env, "HF_HUB_OFFLINE": "1"}, program=LOAD)
    assert "acme/made: is not whole in the local cache" in lost.err, lost.err
    assert "which component? It has" in run("acme/made", env=env, program=LOAD).err
    beside = run("verify", flux_bundle("fp32"), "--against", "acme/made", "--json", env=env)
    (row,) = json.loads(beside.out)["tiers"]
    assert 1e-3 < row["rel_l2"] < 0.5 and row["note"] == "not judged"
    wrong = run("convert", "acme/made", "-o", tmp_path / "out", "--dry-run", env=env)
    assert "acme/made: is an mlxconv bundle, already converted" in wrong.error
