"""Sends a bundle's files, compares what arrived with what was sent, and only then says published.

A repository is whole when it has `mlxconv.json`. Where weights change that file is taken away with
the first commit and comes back with the last, so that a half-sent bundle is no bundle to anybody.
"""

from __future__ import annotations

import glob
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxconv.runtime.bundle import MANIFEST
from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.files import format_bytes
from mlxconv.runtime.hub.download import RemoteFile
from mlxconv.runtime.hub.errors import explain, is_transient

from ..source.source_card import CARD_FILE
from .listing import Listing, LocalFile
from .preflight import OUR_WEIGHTS, Destination, refuse_foreign

# Seconds before each further attempt, where servers or connections failed. The client has its own
# retries within each; these are for what it gives up on.
RETRY_PAUSES = (5.0, 30.0)
_LAST = frozenset({MANIFEST, CARD_FILE})  # of the last commit


@dataclass(frozen=True)
class State:
    """A repository at one commit, beside the files that are to be there."""

    commit: str
    there: frozenset[str]
    differing: tuple[str, ...]
    stale: tuple[str, ...]
    remote: Mapping[str, RemoteFile] = field(repr=False)

    @property
    def done(self) -> bool:
        """Whether every file is there, equal, and nothing of an earlier bundle is left."""
        return not self.differing and not self.stale


@dataclass
class Sent:
    """What an upload did: the state it ended in, and the files that it had to send."""

    state: State
    files: tuple[str, ...]
    deleted: tuple[str, ...]


def state_of(destination: Destination, listing: Listing) -> State:
    """Compare the head of the branch with the local files, by the checksums that the Hub lists."""
    from huggingface_hub.hf_api import RepoFile

    api, repo = destination.api, destination.repo
    commit = str(api.model_info(repo, revision=destination.revision).sha)
    remote = {}
    for entry in api.list_repo_tree(repo, recursive=True, revision=commit):
        if isinstance(entry, RepoFile):
            sha256 = entry.lfs.sha256 if entry.lfs else None
            remote[entry.path] = RemoteFile(entry.path, entry.size, sha256, entry.blob_id)
    there = {p for p, file in listing.files.items() if p in remote and _equal(file, remote[p])}
    differing = tuple(p for p in listing.files if p not in there)
    return State(commit, frozenset(there), differing, stale_paths(remote, listing), remote)


def _equal(file: LocalFile, remote: RemoteFile) -> bool:
    """Whether both have the same content, by SHA-256, or as a git blob where the Hub has that."""
    if remote.size != file.size:
        return False
    if remote.sha256 is not None:
        return remote.sha256 == file.sha256
    return remote.git_oid == file.git_sha1()


def stale_paths(remote: Mapping[str, Any], listing: Listing) -> tuple[str, ...]:
    """Files of an earlier bundle that this one does not have.

    They lie in folders that this bundle has too, or that hold weights by a bundle's names. What a
    user put beside them stays.
    """
    folders = {path.partition("/")[0] for path in listing.files if "/" in path}
    folders |= {path.partition("/")[0] for path in remote if OUR_WEIGHTS.fullmatch(path)}
    return tuple(
        sorted(
            path
            for path in remote
            if "/" in path and path.partition("/")[0] in folders and path not in listing.files
        )
    )


def send(
    destination: Destination, listing: Listing, title: str, say: Callable[[str], None]
) -> Sent:
    """Upload until the repository equals the bundle.

    MlxconvError when it cannot, and KeyboardInterrupt as it comes: both say what is committed.
    """
    first: State | None = None
    try:
        for pause in (*RETRY_PAUSES, None):
            try:
                state = state_of(destination, listing)
                first = first or state
                refuse_foreign(destination.repo, state.remote, listing.files)
                if not state.done:
                    _commit(destination, listing, state, title)
                    state = state_of(destination, listing)
                if state.done:
                    return Sent(state, first.differing, first.stale)
                reason = _differences(state)
            except Exception as error:
                if pause is None or not is_transient(error):
                    raise
                reason = str(explain(error, destination.repo, writing=True))
            if pause is None:
                raise MlxconvError(f"{destination.repo}: {reason}")
            say(f"{reason}; trying again in {pause:g} s")
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")
    except MlxconvError as error:
        raise MlxconvError(f"{error}; {_committed(destination, listing)}") from error
    except KeyboardInterrupt as error:
        message = f"interrupted; {destination.repo}: {_committed(destination, listing)}"
        raise KeyboardInterrupt(message) from error
    except Exception as error:
        text = explain(error, destination.repo, writing=True)
        if text is None:
            raise
        raise MlxconvError(f"{text}; {_committed(destination, listing)}") from error


def _commit(destination: Destination, listing: Listing, state: State, title: str) -> None:
    """One commit, or where weights change several, the manifest and the card in the last."""
    changed = set(state.differing)
    weights = any(path.endswith(".safetensors") for path in (*changed, *state.stale))
    stale = list(state.stale)
    if weights and changed - _LAST:
        gone = [*stale, *([MANIFEST] if MANIFEST in state.remote else [])]
        _upload(destination, listing, changed - _LAST, gone, f"{title}: files")
        changed, stale = set(_LAST), []
    _upload(destination, listing, changed, stale, title)


def _upload(
    destination: Destination, listing: Listing, paths: set[str], gone: list[str], title: str
) -> None:
    where: dict[str, Any] = {
        "repo_id": destination.repo,
        "revision": destination.revision,
        "commit_message": title,
    }
    delete = [glob.escape(path) for path in gone]
    if not paths:
        destination.api.delete_files(delete_patterns=delete, **where)
        return
    destination.api.upload_folder(
        folder_path=next(iter(listing.files.values())).root,
        allow_patterns=[glob.escape(path) for path in sorted(paths)],
        delete_patterns=delete or None,
        **where,
    )


def _differences(state: State) -> str:
    parts = []
    if state.differing:
        parts.append(f"what arrived is not what was sent: {', '.join(state.differing[:3])}")
    if state.stale:
        parts.append(f"still there: {', '.join(state.stale[:3])}")
    return "; ".join(parts)


def _committed(destination: Destination, listing: Listing) -> str:
    """What of the bundle the repository has now, and that the same command goes on from there."""
    again = "the same command continues, and sends only what is missing"
    try:
        state = state_of(destination, listing)
    except Exception as error:
        reason = explain(error, destination.repo) or type(error).__name__
        return f"what is committed cannot be asked now ({reason}); {again}"
    if state.done:
        return f"all files are there and equal, at commit {state.commit[:12]}; {again}"
    have = sum(listing.files[path].size for path in state.there)
    whole = "" if MANIFEST in state.remote else f", no {MANIFEST}, so it is no bundle yet"
    return (
        f"not published: {len(state.there)} of {len(listing.files)} files "
        f"({format_bytes(have)} of {format_bytes(listing.nbytes)}) are committed, at commit "
        f"{state.commit[:12]}{whole}; {again}"
    )
