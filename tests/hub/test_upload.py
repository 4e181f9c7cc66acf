"""`mlxconv upload` by the real client: what is published, and what happens when something fails."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlxconv.convert.publish.listing import list_bundle
from mlxconv.convert.source.hub import recorded_source
from mlxconv.runtime.bundle import open_bundle
from mlxconv.runtime.errors import MlxconvError

from .conftest import Env, hub_env
from .ready_bundle import SOURCE, make_bundle
from .repos import Commit
from .server import READ_TOKEN, TOKEN, Hub
from .uploading import finish, run, start

REPO = "tester/tiny-bf16"
SHARDS = 40_000  # bytes: two matrices of the ready bundle each
SEEDS = count(1)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of two shards, whose weights no test sent before: storage keeps what it has seen."""
    return make_bundle(tmp_path / "tiny-bf16", shard_bytes=SHARDS, seed=next(SEEDS))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    files = (p for p in sorted(folder.rglob("*")) if p.is_file())
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def published(hub: Hub, repo: str = REPO, branch: str = "main") -> dict[str, bytes]:
    """Every file at a branch's head, wherever it is stored, without the Hub's own."""
    found = hub.repos[repo]
    paths = found.at(branch).files.keys() - {".gitattributes"}
    return {path: hub.repos.contents(found, path, branch) for path in sorted(paths)}


# ---- what is published ---------------------------------------------------------------------------


def test_a_bundle_is_published_and_the_same_again_sends_nothing(
    hub: Hub, bundle: Path, tmp_path: Path, transport: str
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    first = json.loads(run("upload", bundle, REPO, "--json", env=env).out)
    assert published(hub) == contents(bundle)
    assert first["published"] and first["commit"] == hub.repos[REPO].head.oid
    assert sorted(first["changed"]) == sorted(contents(bundle))
    everything = b"".join(contents(bundle).values())
    assert TOKEN.encode() not in everything and str(tmp_path).encode() not in everything
    hub.log.clear()
    again = json.loads(run("upload", bundle, REPO, "--json", env=env).out)
    assert (again["commit"], again["changed"]) == (first["commit"], [])
    assert not [r for r in hub.requests() if r.side == "storage" or "/commit/" in r.path]


def test_the_manifest_and_the_card_come_last(hub: Hub, bundle: Path, env: Env) -> None:
    assert run("upload", bundle, REPO, env=env).code == 0
    _, files, whole = hub.repos[REPO].commits
    assert "transformer/model-00002-of-00002.safetensors" in files.files
    assert whole.files.keys() - files.files.keys() == {"mlxconv.json", "README.md"}


def test_the_card_names_source_and_licence(hub: Hub, bundle: Path, env: Env) -> None:
    assert run("upload", bundle, REPO, env=env).code == 0
    card = published(hub)["README.md"].decode()
    data = yaml.safe_load(card.split("---")[1])
    assert data["license"] == "apache-2.0"
    assert (data["library_name"], data["base_model"]) == ("mlx", SOURCE)
    assert data["base_model_relation"] == "quantized"
    assert "Not measured" in card


def test_a_dry_run_sends_nothing(hub: Hub, bundle: Path, env: Env) -> None:
    data = json.loads(run("upload", bundle, REPO, "--dry-run", "--json", env=env).out)
    assert not data["published"] and data["commit"] is None
    assert {f["path"]: f["bytes"] for f in data["files"]} == {
        path: len(data) for path, data in contents(bundle).items()
    }
    assert Path(data["card"]).is_file()
    assert {r.method for r in hub.requests()} == {"GET"}
    assert REPO not in hub.repos


@pytest.mark.parametrize("how", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_a_dry_run_without_network_does_what_needs_none(
    how: dict[str, str], bundle: Path, env: Env
) -> None:
    done = run("upload", bundle, REPO, "--dry-run", env={**env, **how})
    assert done.code == 0, done.err
    *files, card, total, unchecked = done.out.splitlines()
    assert len(files) == len(contents(bundle)) and any("model.safetensors" in f or "00002" in f
                                                       for f in files)  # fmt: skip
    assert Path(card.removeprefix("card: ")).read_text().count("apache-2.0")
    assert total.endswith(f"to {REPO}")  # and not "which would be created"
    assert unchecked.startswith(f"not checked: whether {REPO} exists and may be written to, ")
    data = json.loads(run("upload", bundle, REPO, "--dry-run", "--json", env={**env, **how}).out)
    assert data["not_checked"] and data["license"] == {"license": "apache-2.0"}
    bare = make_bundle(bundle.with_name("cardless"), source_card={})
    assert run("upload", bare, REPO, "--dry-run", env={**env, **how}).code == 1
    given = run("upload", bare, REPO, "--dry-run", "--license", "mit", env={**env, **how})
    assert given.code == 0 and "the source's card and terms" in given.out
    without = make_bundle(bundle.with_name("bare"), source_card={}, source="/a/folder")
    refused = run("upload", without, REPO, "--dry-run", env={**env, **how})
    assert refused.code == 1 and "give the licence it is under by --license ID" in refused.err


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_bundle_still_knows_its_source_after_an_upload(
    dry_run: bool, hub: Hub, tmp_path: Path, env: Env
) -> None:
    source = tmp_path / "checkpoint"
    source.mkdir()
    bundle = make_bundle(tmp_path / "local", source=str(source), revision=None)
    before = json.loads((bundle / "mlxconv.json").read_text(encoding="utf-8"))
    options = ["--base-model", "acme/base", *(["--dry-run"] if dry_run else [])]
    assert run("upload", bundle, REPO, *options, env=env).code == 0
    after = json.loads((bundle / "mlxconv.json").read_text(encoding="utf-8"))
    assert after == (before if dry_run else {**before, "base_model": "acme/base"})
    assert recorded_source(open_bundle(bundle)) == str(source)
    if not dry_run:
        sent = json.loads(hub.repos.contents(hub.repos[REPO], "mlxconv.json"))
        assert (sent["source"], sent["base_model"]) == ("checkpoint", "acme/base")
        assert json.loads(run("upload", bundle, REPO, "--json", env=env).out)["changed"] == []


def test_a_dry_run_lists_what_would_be_deleted(hub: Hub, bundle: Path, env: Env) -> None:
    assert run("upload", bundle, REPO, env=env).code == 0
    before = hub.repos[REPO].head
    one = make_bundle(bundle.with_name("one"), seed=next(SEEDS))
    shown = run("upload", one, REPO, "--dry-run", env=env)
    assert "delete  transformer/model-00001-of-00002.safetensors" in shown.out
    assert hub.repos[REPO].head == before


def test_stale_shards_go_and_a_users_own_files_stay(
    hub: Hub, bundle: Path, tmp_path: Path, transport: str
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    assert run("upload", bundle, REPO, env=env).code == 0
    (tmp_path / "own" / "images").mkdir(parents=True)
    (tmp_path / "own" / "images" / "cat.txt").write_text("mine")
    hub.repos.add(hub.repos[REPO], tmp_path / "own")
    one = make_bundle(tmp_path / "one", seed=next(SEEDS))
    data = json.loads(run("upload", one, REPO, "--json", env=env).out)
    assert sorted(data["deleted"]) == [
        f"transformer/model-0000{i}-of-00002.safetensors" for i in (1, 2)
    ]
    assert published(hub) == {**contents(one), "images/cat.txt": b"mine"}


def test_a_file_that_is_no_longer_in_the_bundle_goes(hub: Hub, bundle: Path, env: Env) -> None:
    extra = bundle / "scheduler" / "extra[1].json"
    extra.write_text("{}")
    assert run("upload", bundle, REPO, env=env).code == 0
    extra.unlink()
    assert run("upload", bundle, REPO, env=env).code == 0
    assert published(hub) == contents(bundle)


def test_junk_is_left_out_and_listed(hub: Hub, bundle: Path, env: Env) -> None:
    junk = {".DS_Store", "transformer/old.safetensors", "scheduler/__pycache__/a.pyc", "notes/a.md",
            "scheduler/.hidden", "scheduler/b.part"}  # fmt: skip
    for name in junk:
        (bundle / name).parent.mkdir(exist_ok=True)
        (bundle / name).write_text("junk")
    (bundle / "elsewhere").symlink_to(bundle.parent)
    data = json.loads(run("upload", bundle, REPO, "--json", env=env).out)
    assert set(data["left_out"]) == junk | {"elsewhere"}
    text = run("upload", bundle, REPO, "--dry-run", env=env).out
    assert "left out  notes/a.md: no part of the bundle" in text
    assert "left out  scheduler/b.part: hidden or unfinished" in text
    assert not junk & published(hub).keys()


def test_another_branch_leaves_main_alone(hub: Hub, bundle: Path, env: Env) -> None:
    done = run("upload", bundle, REPO, "--revision", "4bit", env=env)
    assert f"{REPO}/tree/4bit" in done.out
    assert published(hub, branch="4bit") == contents(bundle)
    assert published(hub) == {}


def test_a_private_repository_is_private(hub: Hub, bundle: Path, env: Env) -> None:
    assert run("upload", bundle, REPO, "--private", env=env).code == 0
    assert hub.repos[REPO].private


def test_a_users_own_card_stays(hub: Hub, bundle: Path, env: Env) -> None:
    own = "---\nlicense: apache-2.0\n---\n# Mine\n"
    (bundle / "README.md").write_text(own)
    assert run("upload", bundle, REPO, env=env).code == 0
    assert published(hub)["README.md"].decode() == own


# ---- refused before anything is sent -------------------------------------------------------------


def _cut_shard(bundle: Path) -> None:
    file = bundle / "transformer" / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


def _flip_bit(bundle: Path) -> None:
    file = bundle / "transformer" / "model-00002-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def _lose_shard(bundle: Path) -> None:
    (bundle / "transformer" / "model-00001-of-00002.safetensors").unlink()


def _link_out(bundle: Path) -> None:
    file = bundle / "transformer" / "model-00001-of-00002.safetensors"
    moved = file.rename(bundle.parent / "elsewhere.safetensors")
    file.symlink_to(moved)


def _link_folder(bundle: Path) -> None:
    moved = (bundle / "scheduler").rename(bundle.parent / "scheduler")
    (bundle / "scheduler").symlink_to(moved)


def _write_token(bundle: Path) -> None:
    (bundle / "scheduler" / "notes.txt").write_text(f"login {TOKEN}")


def _write_token_in_yaml(bundle: Path) -> None:
    (bundle / "scheduler" / "settings.yaml").write_text(f"token: {TOKEN}")


def _write_token_across_pieces(bundle: Path) -> None:
    before = "x" * ((4 << 20) - len(TOKEN) // 2)
    (bundle / "scheduler" / "notes.txt").write_text(before + TOKEN)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (_write_token_in_yaml, "settings.yaml: holds your Hub token"),
        (_write_token_across_pieces, "notes.txt: holds your Hub token"),
        (_cut_shard, r"model-00002-of-00002\.safetensors: header describes .* the file has"),
        (_flip_bit, "its bytes are not those written"),
        (_lose_shard, r"model-00001-of-00002\.safetensors: cannot be read"),
        (_link_out, r"model-00001-of-00002\.safetensors: is a symbolic link"),
        (_link_folder, "scheduler: is a symbolic link"),
        (_write_token, "holds your Hub token"),
    ],
)
def test_a_spoiled_bundle_is_refused(
    spoil: Callable[[Path], None], told: str, bundle: Path
) -> None:
    spoil(bundle)
    with pytest.raises(MlxconvError, match=told):
        list_bundle(open_bundle(bundle), TOKEN)


def test_nothing_of_a_spoiled_bundle_is_sent(hub: Hub, bundle: Path, env: Env) -> None:
    _flip_bit(bundle)
    done = run("upload", bundle, REPO, env=env)
    assert done.code == 1 and "its bytes are not those written" in done.error
    assert not hub.requests("POST", "preupload|/commit/")


def _remove_licence(bundle: Path) -> None:
    data = json.loads((bundle / "mlxconv.json").read_text())
    (bundle / "mlxconv.json").write_text(json.dumps({**data, "source_card": {}, "revision": None}))


@pytest.mark.parametrize(
    ("token", "repo", "told"),
    [
        (None, REPO, "you are not logged in"),
        ("hf_wrong_token_0123456789", REPO, "does not accept the token"),
        (READ_TOKEN, REPO, "only reads"),
        (TOKEN, "somebody/model", 'rights to create or change models of "somebody"'),
    ],
)
def test_who_may_not_write_is_told_at_once(
    token: str | None, repo: str, told: str, hub: Hub, bundle: Path, tmp_path: Path
) -> None:
    done = run("upload", bundle, repo, env=hub_env(hub, tmp_path / "hf", token=token))
    assert done.code == 1 and told in done.error
    assert not hub.requests("POST", "preupload")


def test_a_public_repository_does_not_become_private(hub: Hub, bundle: Path, env: Env) -> None:
    hub.repos.create(REPO)
    done = run("upload", bundle, REPO, "--private", env=env)
    assert done.code == 1 and "exists and is public" in done.error


def test_a_repository_of_other_weights_is_refused(
    hub: Hub, bundle: Path, tmp_path: Path, env: Env
) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "diffusion_pytorch_model.safetensors").write_text("theirs")
    hub.repos.seed(REPO, tmp_path / "other")
    done = run("upload", bundle, REPO, env=env)
    assert done.code == 1 and "holds other weights" in done.error
    assert list(published(hub)) == ["diffusion_pytorch_model.safetensors"]


def test_a_licence_that_the_hub_does_not_know_is_refused_first(
    hub: Hub, bundle: Path, env: Env
) -> None:
    _remove_licence(bundle)
    done = run("upload", bundle, REPO, "--license", "My Own", env=env)
    assert done.code == 1 and "does not take the licence 'My Own'" in done.error
    assert REPO not in hub.repos


# ---- failures of servers and connections ---------------------------------------------------------

COMMIT = rf"/api/models/{REPO}/commit/"
DATA = {"http": ("PUT", "/put/"), "xet": ("POST", "/v1/xorbs/")}


@pytest.mark.parametrize(
    ("where", "action", "details"),
    [
        ("data", "status", {"status": 503, "nth": 1}),
        ("data", "reset", {"after": 9_000, "nth": 1}),
        ("data", "drop", {"after": 9_000, "nth": 1}),
        ("commit", "status", {"status": 503, "nth": 1}),
        ("commit", "drop", {"after": 50, "nth": 2}),
    ],
)
def test_one_failure_is_got_over(
    where: str, action: Any, details: dict[str, Any],
    hub: Hub, bundle: Path, tmp_path: Path, transport: str,
) -> None:  # fmt: skip
    fault = hub.fail(*(DATA[transport] if where == "data" else ("POST", COMMIT)), action, **details)
    done = run("upload", bundle, REPO, env=hub_env(hub, tmp_path / "hf", transport=transport))
    assert done.code == 0, done.err
    assert fault.seen > 1
    assert published(hub) == contents(bundle)


def test_a_lost_answer_to_a_commit_is_got_over(
    hub: Hub, bundle: Path, tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, lost = hub.repos.commit, []

    def lose_first(*arguments: Any) -> Commit:
        made = commit(*arguments)
        if len(lost) < 2:  # the repository's first commit, by `create`, is answered
            lost.append(made)
            if len(lost) == 2:
                raise ConnectionResetError
        return made

    monkeypatch.setattr(hub.repos, "commit", lose_first)
    done = run("upload", bundle, REPO, env=hub_env(hub, tmp_path / "hf", transport=transport))
    assert done.code == 0, done.err
    assert len(lost) == 2
    assert published(hub) == contents(bundle)


@pytest.mark.parametrize(
    ("transport", "where", "details", "told"),
    [
        ("http", "data", {"status": 500}, "the Hub fails with HTTP 500"),
        ("http", "data", {"status": 403}, "the Hub refuses this token"),
        ("xet", "data", {"status": 500}, "the Xet transfer failed"),
        ("xet", "data", {"status": 403}, "the Xet transfer failed"),
        ("http", "commit", {"status": 500}, "the Hub fails with HTTP 500"),
        ("xet", "commit", {"status": 500}, "the Hub fails with HTTP 500"),
        ("http", "commit", {"status": 404, "code": "RepoNotFound"}, "no such repository"),
        ("http", "commit", {"status": 409}, "HTTP 409"),
        ("http", "commit", {"status": 412}, "changed by someone else"),
    ],
    indirect=["transport"],
)
def test_what_fails_always_is_not_published(
    transport: str, where: str, details: dict[str, Any], told: str,
    hub: Hub, bundle: Path, tmp_path: Path,
) -> None:  # fmt: skip
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    hub.fail(*(DATA[transport] if where == "data" else ("POST", COMMIT)), "status", **details)
    done = run("upload", bundle, REPO, env=env)
    assert done.code == 1 and told in done.error
    assert "not published: 0 of 11 files" in done.error
    assert "the same command continues" in done.error
    assert published(hub) == {}


def test_a_half_sent_bundle_is_no_bundle_and_only_the_rest_is_sent(
    hub: Hub, bundle: Path, tmp_path: Path, transport: str
) -> None:
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    hub.fail("POST", COMMIT, nth=tuple(range(2, 60)))
    done = run("upload", bundle, REPO, env=env)
    assert "not published: 9 of 11 files" in done.error
    assert "no mlxconv.json, so it is no bundle yet" in done.error
    hub.reset()
    again = json.loads(run("upload", bundle, REPO, "--json", env=env).out)
    assert sorted(again["changed"]) == ["README.md", "mlxconv.json"]
    assert not hub.requests(*DATA[transport])
    assert published(hub) == contents(bundle)


def test_while_weights_change_there_is_no_manifest(hub: Hub, bundle: Path, env: Env) -> None:
    assert run("upload", bundle, REPO, env=env).code == 0
    other = make_bundle(bundle.with_name("other"), seed=next(SEEDS))
    hub.fail("POST", COMMIT, nth=tuple(range(2, 60)))
    assert run("upload", other, REPO, env=env).code == 1
    assert "mlxconv.json" not in published(hub)


def test_a_dead_xet_store_is_told_and_http_is_the_way_out(
    hub: Hub, bundle: Path, tmp_path: Path
) -> None:
    hub.xet.alive = False
    done = run("upload", bundle, REPO, env=hub_env(hub, tmp_path / "hf"))
    assert done.code == 1 and "HF_HUB_DISABLE_XET=1" in done.error
    assert "0 of 11 files" in done.error
    env = hub_env(hub, tmp_path / "hf", transport="http")
    assert run("upload", bundle, REPO, env=env).code == 0


def test_bytes_that_arrive_changed_are_not_called_published(
    hub: Hub, bundle: Path, tmp_path: Path, env: Env, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repos.commit
    wrong = hub.repos.regular(b"{}")

    def spoil(repo: Any, files: Any, *rest: Any) -> Commit:
        name = "scheduler/scheduler_config.json"
        return commit(repo, {**files, name: wrong} if name in files else files, *rest)

    monkeypatch.setattr(hub.repos, "commit", spoil)
    done = run("upload", bundle, REPO, env=env)
    assert done.code == 1
    assert "what arrived is not what was sent: scheduler/scheduler_config.json" in done.error


def test_a_hub_that_is_down(bundle: Path, hub: Hub, env: Env) -> None:
    done = run("upload", bundle, REPO, env={**env, "HF_ENDPOINT": "http://127.0.0.1:9"})
    assert done.code == 1 and "cannot reach http://127.0.0.1:9" in done.error


def test_offline(bundle: Path, hub: Hub, env: Env) -> None:
    done = run("upload", bundle, REPO, env={**env, "HF_HUB_OFFLINE": "1"})
    assert done.code == 1 and "HF_HUB_OFFLINE=1" in done.error
    assert not hub.log


def _begun(hub: Hub, transport: str, count: int) -> None:
    """Until `count` requests with data were answered."""
    method, path = DATA[transport]
    hub.wait_for(method, path, seconds=60)
    while len([r for r in hub.requests(method, path) if r.status == 200]) < count:
        hub.released.wait(0.02)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Eight shards of a megabyte."""
    return make_bundle(
        tmp_path / "large", tensors=8, width=512, shard_bytes=1_100_000, seed=next(SEEDS)
    )


def test_after_a_kill_whole_files_are_not_sent_again(hub: Hub, large: Path, tmp_path: Path) -> None:
    env = hub_env(hub, tmp_path / "hf", transport="http")
    hub.fail("PUT", "/put/", "delay", nth=tuple(range(5, 60)), seconds=600)
    process = start("upload", large, REPO, env=env)
    _begun(hub, "http", 4)
    process.kill()
    process.communicate()
    assert published(hub) == {}
    hub.reset()
    assert run("upload", large, REPO, env=env).code == 0
    assert published(hub) == contents(large)
    assert len(hub.requests("PUT", "/put/")) == 4


def test_after_a_kill_by_xet_the_same_command_completes(hub: Hub, large: Path, env: Env) -> None:
    hub.fail("POST", COMMIT, "delay", seconds=600)
    process = start("upload", large, REPO, env=env)
    hub.wait_for("POST", COMMIT, seconds=60)
    process.kill()
    process.communicate()
    hub.reset()
    assert run("upload", large, REPO, env=env).code == 0
    assert published(hub) == contents(large)


def test_ctrl_c_says_what_is_committed(
    hub: Hub, bundle: Path, tmp_path: Path, transport: str
) -> None:
    hub.fail(*DATA[transport], "delay", seconds=3)
    env = hub_env(hub, tmp_path / "hf", transport=transport)
    process = start("upload", bundle, REPO, env=env)
    hub.wait_for(*DATA[transport], seconds=60)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130
    assert f"interrupted; {REPO}: not published: 0 of 11 files" in done.err
    assert published(hub) == {}


def test_json_shows_no_progress_bars(env: Env) -> None:
    """Also on a terminal, and though the client was imported to read the repository's name."""
    code = """
from mlxconv import cli, parameters
from huggingface_hub.utils import are_progress_bars_disabled
parameters.REPOSITORY.convert("me/x", None, None)
names = "private license_id license_name license_link base_model".split()
cli._publish_options("me/x", dict.fromkeys(names), True)
print(are_progress_bars_disabled())
"""
    env = {name: value for name, value in env.items() if name != "HF_HUB_DISABLE_PROGRESS_BARS"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_upload_needs_no_torch(hub: Hub, bundle: Path, env: Env, tmp_path: Path) -> None:
    for name in ("torch", "diffusers", "transformers"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('not installed here')")
    path = f"{tmp_path}{os.pathsep}{env.get('PYTHONPATH', '')}"
    assert run("upload", bundle, REPO, env={**env, "PYTHONPATH": path}).code == 0
