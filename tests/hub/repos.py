"""The hub's side: repositories, who may see and change them, and the requests about them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import yaml

from .server import Handler, Refused, Route

if TYPE_CHECKING:
    from .server import Hub

_LFS_SUFFIXES = re.compile(
    r".*\.(safetensors|bin|gguf|npz|npy|pt|pth|ckpt|zip|msgpack|onnx|h5|png)|(.*/)?tokenizer\.json"
)
_LFS_BYTES = 10_000_000  # larger files are LFS whatever they are called
_LICENCES = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n"


@dataclass(frozen=True)
class RepoFile:
    """A file of a commit. `lfs`: its SHA-256 when it is in storage, not in git; `xet`: its hash."""

    oid: str
    size: int
    lfs: str | None = None
    xet: str | None = None


@dataclass(frozen=True)
class Commit:
    """A commit: the whole tree, by path."""

    oid: str
    title: str
    files: dict[str, RepoFile]
    date: str


@dataclass
class Repo:
    """A model repository. `granted`: who may read the files of a gated one."""

    id: str
    private: bool = False
    gated: str | bool = False
    granted: set[str] = field(default_factory=set)
    branches: dict[str, str] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)

    def at(self, revision: str) -> Commit:
        """The commit of a branch, or of a whole or abbreviated commit hash."""
        oid = self.branches.get(revision, revision)
        for commit in self.commits:
            if commit.oid == oid or (len(oid) >= 7 and commit.oid.startswith(oid)):
                return commit
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    @property
    def head(self) -> Commit:
        """The newest commit of `main`."""
        return self.at("main")


def git_oid(data: bytes) -> str:
    """The hash that git gives a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _pointer_oid(sha256: str, size: int) -> str:
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n"
    return git_oid(text.encode())


class Repos:
    """All repositories of a hub, by id."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self._repos: dict[str, Repo] = {}
        self.renamed: dict[str, str] = {}

    def __getitem__(self, repo_id: str) -> Repo:
        return self._repos[repo_id]

    def __contains__(self, repo_id: str) -> bool:
        return repo_id in self._repos

    def ids(self) -> set[str]:
        """All there are."""
        return set(self._repos)

    def keep(self, ids: set[str]) -> None:
        """Delete all other repositories."""
        self._repos = {name: repo for name, repo in self._repos.items() if name in ids}

    def create(self, repo_id: str, **rights: Any) -> Repo:
        """A new repository with one commit; `rights`: private, gated, granted."""
        repo = self._repos[repo_id] = Repo(repo_id, **rights)
        self.commit(repo, {".gitattributes": self.regular(_ATTRIBUTES)}, "initial commit")
        return repo

    def seed(self, repo_id: str, folder: Path, *, xet: bool = False, **rights: Any) -> Repo:
        """Publish a folder without the client; `xet`: large files are in the Xet store too."""
        repo = self.create(repo_id, **rights)
        self.add(repo, folder, xet=xet)
        return repo

    def add(self, repo: Repo, folder: Path, *, xet: bool = False, branch: str = "main") -> Commit:
        """A commit with a folder's files on top of what the branch holds."""
        files = dict(repo.at(branch).files)
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            files[name] = self._stored(name, path, xet)
        return self.commit(repo, files, "seed", branch)

    def _stored(self, name: str, path: Path, xet: bool) -> RepoFile:
        size = path.stat().st_size
        if not _is_large(name, size):
            return self.regular(path.read_bytes())
        with path.open("rb") as stream:
            sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        self.hub.blobs.put_file(sha256, path)
        found = RepoFile(_pointer_oid(sha256, size), size, sha256)
        return replace(found, xet=self.hub.xet.register(sha256, size)) if xet else found

    def regular(self, data: bytes) -> RepoFile:
        """A small file, kept in git."""
        oid = git_oid(data)
        self.hub.blobs.put(oid, data)
        return RepoFile(oid, len(data))

    def commit(
        self, repo: Repo, files: dict[str, RepoFile], title: str, branch: str = "main"
    ) -> Commit:
        """Make `files` the tree of a branch."""
        with self.hub.lock:
            seed = f"{repo.id} {title} {len(repo.commits)} {sorted(files)}"
            date = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())
            commit = Commit(hashlib.sha1(seed.encode()).hexdigest(), title, files, date)
            repo.commits.append(commit)
            repo.branches[branch] = commit.oid
            return commit

    def contents(self, repo: Repo, path: str, branch: str = "main") -> bytes:
        """What a file of a repository holds, wherever it is stored; KeyError if it is not there."""
        file = repo.at(branch).files[path]
        if file.lfs is None:
            return self.hub.blobs.get(file.oid)
        if file.lfs in self.hub.blobs:
            return self.hub.blobs.get(file.lfs)
        data = self.hub.xet.contents(file.lfs)
        assert data is not None
        return data

    # ---- rights

    def seen(self, handler: Handler, repo_id: str) -> Repo:
        """The repository, if this user may know of it: 401 to strangers, 404 to others."""
        if repo_id in self.renamed:
            there = handler.path.replace(repo_id, self.renamed[repo_id], 1)
            raise Refused(307, "moved", headers={"Location": there})
        repo, user = self._repos.get(repo_id), handler.user
        owner = user is not None and _owns(user.name, user.organizations, repo_id)
        if repo is None or (repo.private and not owner):
            status = 401 if user is None else 404
            words = "Invalid username or password." if user is None else "Repository not found"
            raise Refused(status, words, "RepoNotFound")
        return repo

    def readable(self, handler: Handler, repo_id: str) -> Repo:
        """The repository, if this user may read its files."""
        repo, user = self.seen(handler, repo_id), handler.user
        allowed = user is not None and (
            user.name in repo.granted or _owns(user.name, user.organizations, repo_id)
        )
        if repo.gated and not allowed:
            raise Refused(
                403 if user else 401,
                f"Access to model {repo_id} is restricted and you are not in the authorized list. "
                f"Visit https://huggingface.co/{repo_id} to ask for access.",
                "GatedRepo",
            )
        return repo

    def writable(self, handler: Handler, repo_id: str) -> Repo:
        """The repository, if this user may change it."""
        repo = self.seen(handler, repo_id)
        may_write(handler, repo_id.partition("/")[0])
        return repo


def _owns(name: str, organizations: tuple[str, ...], repo_id: str) -> bool:
    return repo_id.partition("/")[0] in (name, *organizations)


def may_write(handler: Handler, namespace: str) -> None:
    """401 to strangers, 403 to those without the right to write in the namespace."""
    user = handler.user
    if user is None:
        raise Refused(401, "Invalid username or password.")
    if not user.writes or namespace not in (user.name, *user.organizations):
        raise Refused(
            403, f'You don\'t have the rights to create or change models of "{namespace}"'
        )


def _is_large(name: str, size: int) -> bool:
    return size > _LFS_BYTES or bool(_LFS_SUFFIXES.fullmatch(name))


def card_data(text: str) -> dict[str, Any]:
    """The YAML at the top of a model card; {} where there is none."""
    found = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
    data = yaml.safe_load(found[1]) if found else None
    return data if isinstance(data, dict) else {}


# ---- about users and repositories


def _whoami(handler: Handler) -> None:
    user = handler.user
    if user is None:
        raise Refused(401, "Invalid username or password.")
    role = "write" if user.writes else "read"
    orgs = [{"type": "org", "name": name} for name in user.organizations]
    token = {"type": "access_token", "accessToken": {"displayName": "test", "role": role}}
    handler.reply(200, {"type": "user", "name": user.name, "orgs": orgs, "auth": token})


def _create(handler: Handler) -> None:
    asked = handler.json()
    namespace = asked.get("organization") or (handler.user and handler.user.name) or ""
    may_write(handler, namespace)
    repo_id = f"{namespace}/{asked['name']}"
    found = {"url": f"{handler.hub.url}/{repo_id}", "name": repo_id, "id": repo_id}
    repos = handler.hub.repos
    if repo_id in repos:
        handler.reply(409, {"error": "You already created this model repo", **found})
        return
    repos.create(repo_id, private=asked.get("visibility") == "private" or asked.get("private"))
    handler.reply(200, found)


def _settings(handler: Handler, repo_id: str) -> None:
    repo, asked = handler.hub.repos.writable(handler, repo_id), handler.json()
    if "visibility" in asked or "private" in asked:
        repo.private = asked.get("visibility") == "private" or bool(asked.get("private"))
    repo.gated = asked.get("gated", repo.gated)
    handler.reply(200, {"private": repo.private, "gated": repo.gated})


def _auth_check(handler: Handler, repo_id: str, write: str | None) -> None:
    handler.hub.repos.readable(handler, repo_id)
    if write:
        handler.hub.repos.writable(handler, repo_id)
    handler.reply(200, {})


def _info(handler: Handler, repo_id: str, revision: str | None) -> None:
    hub = handler.hub
    repo = hub.repos.seen(handler, repo_id)
    commit = repo.at(revision or "main")
    card = commit.files.get("README.md")
    data = card_data(hub.blobs.get(card.oid).decode()) if card and card.lfs is None else {}
    blobs = "blobs" in handler.query
    answer = {
        "id": repo_id,
        "author": repo_id.partition("/")[0],
        "sha": commit.oid,
        "lastModified": commit.date,
        "private": repo.private,
        "gated": repo.gated,
        "disabled": False,
        "downloads": 0,
        "tags": data.get("tags", []),
        "siblings": [
            {"rfilename": path, **(_blob(file) if blobs else {})}
            for path, file in sorted(commit.files.items())
        ],
    }
    if data:
        answer["cardData"] = data
    handler.reply(200, answer)


def _blob(file: RepoFile) -> dict[str, Any]:
    found: dict[str, Any] = {"size": file.size, "blobId": file.oid}
    if file.lfs:
        found["lfs"] = {"sha256": file.lfs, "size": file.size, "pointerSize": 134}
    return found


def _entry(path: str, file: RepoFile) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "file", "path": path, "size": file.size, "oid": file.oid}
    if file.lfs:
        found["lfs"] = {"oid": file.lfs, "size": file.size, "pointerSize": 134}
    if file.xet:
        found["xetHash"] = file.xet
    return found


def _tree(handler: Handler, repo_id: str, revision: str, folder: str | None) -> None:
    """The files of a revision, in pages: `Link: <...>; rel="next"` names the next one."""
    hub = handler.hub
    files = hub.repos.seen(handler, repo_id).at(revision).files
    prefix = f"{folder}/" if folder else ""
    listed = [_entry(p, f) for p, f in sorted(files.items()) if p.startswith(prefix)]
    start = int(handler.query.get("cursor", ["0"])[0])
    stop = start + hub.page_size
    here = handler.path.partition("?")[0]
    more = f'<{hub.url}{here}?recursive=true&cursor={stop}>; rel="next"'
    handler.reply(200, listed[start:stop], {"Link": more} if stop < len(listed) else {})


def _paths_info(handler: Handler, repo_id: str, revision: str) -> None:
    files = handler.hub.repos.seen(handler, repo_id).at(revision).files
    asked = parse_qs(handler.body().decode())["paths"]  # a form
    handler.reply(200, [_entry(path, files[path]) for path in asked if path in files])


def _branch(handler: Handler, repo_id: str, branch: str) -> None:
    repo = handler.hub.repos.writable(handler, repo_id)
    if branch in repo.branches:
        raise Refused(409, f"Reference already exists: {branch}")
    start = (handler.json() if handler.body() else {}).get("startingPoint", "main")
    repo.branches[branch] = repo.at(start).oid
    handler.reply(200, {})


def _refs(handler: Handler, repo_id: str) -> None:
    repo = handler.hub.repos.seen(handler, repo_id)
    branches = [
        {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}
        for name, oid in repo.branches.items()
    ]
    handler.reply(200, {"branches": branches, "tags": [], "converts": []})


# ---- uploads


def _validate_yaml(handler: Handler) -> None:
    """The client reads this answer as JSON whatever its status."""
    text = handler.json()["content"]
    errors, warnings = [], []
    try:
        licence = card_data(text).get("license")
        if licence is not None and not _LICENCES.fullmatch(str(licence)):
            errors.append({"message": f'"license" must be one of [...], not {licence!r}'})
    except yaml.YAMLError as error:
        errors.append({"message": f"Invalid YAML: {str(error).splitlines()[0]}"})
    if not text.startswith("---"):
        warnings.append({"message": "empty or missing yaml metadata in repo card"})
    handler.reply(400 if errors else 200, {"errors": errors, "warnings": warnings})


def _preupload(handler: Handler, repo_id: str, revision: str) -> None:
    """Which files go to storage; `oid` tells the client what is there already."""
    files = handler.hub.repos.writable(handler, repo_id).at(revision).files
    answers = []
    for asked in handler.json()["files"]:
        mode = "lfs" if _is_large(asked["path"], asked["size"]) else "regular"
        answer = {"path": asked["path"], "uploadMode": mode, "shouldIgnore": False}
        old = files.get(asked["path"])
        answers.append({**answer, "oid": old.lfs or old.oid} if old else answer)
    handler.reply(200, {"files": answers})


def _lfs_batch(handler: Handler, repo_id: str) -> None:
    """Where each object is to be put; nowhere, where storage has it already."""
    hub = handler.hub
    hub.repos.writable(handler, repo_id)
    asked = handler.json()
    answers = []
    for item in asked["objects"]:
        oid, size, answer = item["oid"], item["size"], dict(item)
        if oid not in hub.blobs:
            upload: dict[str, Any] = {"href": hub.blobs.signed(f"{hub.storage_url}/put/{oid}")}
            if size > hub.part_size and "multipart" in asked["transfers"]:
                count = -(-size // hub.part_size)
                parts = {
                    f"{n:05d}": hub.blobs.signed(f"{hub.storage_url}/put/{oid}/{n}")
                    for n in range(1, count + 1)
                }
                upload = {
                    "href": f"{hub.url}/_lfs/complete/{oid}",
                    "header": {"chunk_size": str(hub.part_size), **parts},
                }
            answer["actions"] = {
                "upload": upload,
                "verify": {"href": f"{hub.url}/_lfs/verify"},
            }
        answers.append(answer)
    handler.reply(200, {"transfer": "basic", "objects": answers})


def _lfs_complete(handler: Handler, oid: str) -> None:
    blobs = handler.hub.blobs
    names = [f"{oid}.part{part['partNumber']}" for part in handler.json()["parts"]]
    if missing := [name for name in names if name not in blobs]:
        raise Refused(400, f"InvalidPart: {missing[0]}")
    data = b"".join(blobs.get(name) for name in names)
    if hashlib.sha256(data).hexdigest() != oid:
        raise Refused(400, "the assembled object has another SHA-256")
    blobs.put(oid, data)
    handler.reply(200, {"success": True})


def _lfs_verify(handler: Handler) -> None:
    asked, blobs = handler.json(), handler.hub.blobs
    if asked["oid"] not in blobs or blobs.size(asked["oid"]) != asked["size"]:
        raise Refused(404, "Object not found")
    handler.reply(200, {})


def _commit(handler: Handler, repo_id: str, revision: str) -> None:
    """A commit, one JSON object a line: a header, then what is added and deleted."""
    hub = handler.hub
    repo = hub.repos.writable(handler, repo_id)
    head = repo.at(revision)
    files, title = dict(head.files), ""
    for line in map(json.loads, handler.body().splitlines()):
        value = line["value"]
        if line["key"] == "header":
            title = value["summary"]
            parent = value.get("parentCommit")
            if parent and not head.oid.startswith(parent):
                raise Refused(412, "A commit has happened since. Please refresh and try again.")
        elif line["key"] == "file":
            files[value["path"]] = hub.repos.regular(base64.b64decode(value["content"]))
        elif line["key"] == "lfsFile":
            files[value["path"]] = _uploaded(hub, value)
        elif line["key"] == "deletedFile":
            files.pop(value["path"], None)
        elif line["key"] == "deletedFolder":
            folder = value["path"].rstrip("/") + "/"
            files = {path: file for path, file in files.items() if not path.startswith(folder)}
        else:
            raise Refused(400, f"not modelled: {line['key']}")
    made = hub.repos.commit(repo, files, title, revision)
    address = f"{hub.url}/{repo_id}/commit/{made.oid}"
    handler.reply(200, {"success": True, "commitOid": made.oid, "commitUrl": address})


def _uploaded(hub: Hub, value: dict[str, Any]) -> RepoFile:
    """400 unless the object's bytes have reached storage or the Xet store."""
    oid, size = value["oid"], value["size"]
    xet = hub.xet.hash_of(oid)
    if oid not in hub.blobs and xet is None:
        raise Refused(400, f"LFS pointer to a file that does not exist: {value['path']}")
    return RepoFile(_pointer_oid(oid, size), size, oid, xet)


# ---- downloads


def _resolve(handler: Handler, repo_id: str, revision: str, path: str) -> None:
    """A file: small ones at once, large ones by a redirect to a signed address of storage."""
    hub = handler.hub
    commit = hub.repos.readable(handler, repo_id).at(revision)
    headers = {"X-Repo-Commit": commit.oid}
    file = commit.files.get(path)
    if file is None:
        raise Refused(404, "Entry not found", "EntryNotFound", headers)
    if file.lfs is None:
        headers["ETag"] = f'"{file.oid}"'
        handler.send(file.size, hub.blobs.reader(file.oid), headers)
        return
    headers["X-Linked-Size"] = str(file.size)
    headers["X-Linked-Etag"] = f'"{file.lfs}"'
    headers["Location"] = hub.blobs.signed(f"{hub.storage_url}/get/{file.lfs}")
    if file.xet:
        headers["X-Xet-Hash"] = file.xet
        route = f"{hub.url}/api/models/{repo_id}/xet-read-token/{commit.oid}"
        headers["X-Xet-Refresh-Route"] = route
    handler.reply(302, None, headers)


def hub_routes() -> list[Route]:
    """Every request about users, repositories and files."""
    repo = r"/api/models/([^/]+/[^/]+)"
    routes = [
        ("GET", r"/api/whoami-v2", _whoami),
        ("POST", r"/api/repos/create", _create),
        ("POST", r"/api/validate-yaml", _validate_yaml),
        ("POST", r"/_lfs/complete/(\w+)", _lfs_complete),
        ("POST", r"/_lfs/verify", _lfs_verify),
        ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", _lfs_batch),
        ("PUT", rf"{repo}/settings", _settings),
        ("GET", rf"{repo}/auth-check(/write)?", _auth_check),
        ("GET", rf"{repo}/refs", _refs),
        ("POST", rf"{repo}/branch/([^/]+)", _branch),
        ("POST", rf"{repo}/preupload/([^/]+)", _preupload),
        ("POST", rf"{repo}/commit/([^/]+)", _commit),
        ("POST", rf"{repo}/paths-info/([^/]+)", _paths_info),
        ("GET", rf"{repo}/tree/([^/]+)(?:/(.+))?", _tree),
        ("GET", rf"{repo}(?:/revision/([^/]+))?", _info),
        ("GET|HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", _resolve),
    ]
    return [(methods, re.compile(pattern), answer) for methods, pattern, answer in routes]
