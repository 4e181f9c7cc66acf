"""The test hub itself, by the real client: what goes up comes down, and faults strike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from .conftest import hub_env
from .server import Hub

_ROUND_TRIP = """
import json, sys
from huggingface_hub import HfApi, snapshot_download
api, folder = HfApi(), sys.argv[1]
found = {"name": api.whoami()["name"]}
api.create_repo("tester/round", exist_ok=True, private=True)
api.auth_check("tester/round")
found["commit"] = api.upload_folder(repo_id="tester/round", folder_path=folder).oid
found["again"] = api.upload_folder(repo_id="tester/round", folder_path=folder).oid
found["path"] = snapshot_download("tester/round")
found["wrong"] = len(api.verify_repo_checksums("tester/round").mismatches)
print(json.dumps(found))
"""


def test_a_folder_goes_up_and_comes_down(hub: Hub, tmp_path: Path, transport: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    weights = os.urandom(300_000)
    (folder / "model.safetensors").write_bytes(weights)
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    command = [sys.executable, "-c", _ROUND_TRIP, str(folder)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["name"] == "tester" and found["wrong"] == 0
    assert found["again"] == found["commit"]  # unchanged: nothing was committed
    assert (Path(found["path"]) / "model.safetensors").read_bytes() == weights
    repo = hub.repos["tester/round"]
    assert hub.repos.contents(repo, "model.safetensors") == weights
    used = bool(hub.requests("POST", "/v1/xorbs/"))
    assert used == (transport == "xet") and bool(hub.requests("PUT", "/put/")) != used
