"""Everything that can refuse an upload, asked before an hour is spent on a conversion."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxconv.runtime.bundle import MANIFEST
from mlxconv.runtime.errors import ArgumentError, MlxconvError
from mlxconv.runtime.hub.errors import hub_errors
from mlxconv.runtime.program.program import PROGRAM_FILE

from .licence import Licence
from .redaction import current_token

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# Names that a bundle has weights by; other weights in a repository are somebody's own.
OUR_WEIGHTS = re.compile(r"[^/]+/(model(-\d{5}-of-\d{5})?|constants)\.safetensors")
_WEIGHTS = re.compile(r".*\.(safetensors|bin|ckpt|pt|pth|gguf|onnx|npz|h5|msgpack)")


@dataclass(frozen=True)
class Destination:
    """A repository that may be written to. `revision` is the branch."""

    repo: str
    revision: str
    private: bool
    api: HfApi

    @property
    def url(self) -> str:
        """Its page."""
        branch = "" if self.revision == "main" else f"/tree/{self.revision}"
        return f"{_endpoint()}/{self.repo}{branch}"


def check_repo_id(repo: str) -> str:
    """The client's rules for names, with a namespace; returns `repo`. No request is made."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ArgumentError(f"{repo}: cannot be a repository's name: {error}") from error
    if "/" not in repo:
        raise ArgumentError(
            f"{repo}: cannot be a repository's name: expected NAMESPACE/NAME, such as "
            "me/FLUX.1-schnell-4bit"
        )
    return repo


def connect(repo: str) -> HfApi:
    """A client that is logged in; MlxconvError when nobody is, or the token only reads."""
    from huggingface_hub import HfApi

    check_repo_id(repo)
    if current_token() is None:
        raise MlxconvError(
            f"{repo}: you are not logged in to the Hub; log in with `hf auth login` or set "
            "HF_TOKEN, with a token that may write"
        )
    api = HfApi(library_name="mlxconv")
    with hub_errors(repo, writing=True):
        user = api.whoami()
    _check_role(repo, user)
    return api


def _check_role(repo: str, user: dict[str, Any]) -> None:
    token = (user.get("auth") or {}).get("accessToken") or {}
    if token.get("role") == "read":
        raise MlxconvError(
            f"{repo}: the token of {user.get('name')} only reads; use one with write access (new "
            "ones: https://huggingface.co/settings/tokens)"
        )


def prepare(
    repo: str, *, private: bool = False, revision: str | None = None, licence: Licence | None = None
) -> Destination:
    """Create the repository if need be, and check that it may be written to, for real.

    MlxconvError when the token, the name, the namespace, the licence's id, the visibility of what
    is there, or what it already holds stands against an upload.
    """
    api = connect(repo)
    if licence is not None:
        _check_metadata(repo, licence)
    with hub_errors(repo, revision, writing=True):
        api.create_repo(repo, private=private or None, exist_ok=True)
        api.auth_check(repo, write=True)
        if revision not in (None, "main"):
            api.create_branch(repo, branch=revision, exist_ok=True)
        branch = revision or "main"
        found = api.model_info(repo, revision=branch)
    if private and not found.private:
        raise MlxconvError(
            f"{repo}: exists and is public; leave --private out, make it private in its settings, "
            "or take another name"
        )
    refuse_foreign(repo, [s.rfilename for s in found.siblings or []])
    return Destination(repo, branch, bool(found.private), api)


def look(repo: str, revision: str | None = None) -> Destination | None:
    """The repository as it is, for a dry run; None where there is none. Nothing is changed."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    check_repo_id(repo)
    api, branch = HfApi(library_name="mlxconv"), revision or "main"
    with hub_errors(repo, revision):
        try:
            found = api.model_info(repo, revision=branch)
        except (RepositoryNotFoundError, RevisionNotFoundError):
            return None
    refuse_foreign(repo, [s.rfilename for s in found.siblings or []])
    return Destination(repo, branch, bool(found.private), api)


def refuse_foreign(repo: str, paths: Collection[str], ours: Collection[str] = ()) -> None:
    """MlxconvError when a repository that holds no bundle has weights: they are not ours to mix.

    `ours` are the paths of the bundle that goes there, which may be committed in part.
    """
    if any(path == MANIFEST or path.endswith(f"/{PROGRAM_FILE}") for path in paths):
        return
    foreign = [
        p for p in paths if _WEIGHTS.fullmatch(p) and not OUR_WEIGHTS.fullmatch(p) and p not in ours
    ]
    if foreign:
        raise MlxconvError(
            f"{repo}: holds other weights ({', '.join(sorted(foreign)[:3])}), and a bundle beside "
            "them would be neither; take a new repository"
        )


def _check_metadata(repo: str, licence: Licence) -> None:
    """Ask the Hub whether it takes the licence's id, which it would refuse after the conversion.

    Not by `ModelCard.validate`, which in 1.x asks huggingface.co whatever HF_ENDPOINT says.
    """
    from huggingface_hub import ModelCardData
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    front = ModelCardData(**licence.metadata()).to_yaml()
    content = {"repoType": "model", "content": f"---\n{front}\n---\n"}
    with hub_errors(repo):
        answer = get_session().post(
            f"{_endpoint()}/api/validate-yaml", json=content, headers=build_hf_headers()
        )
        if answer.status_code == 400:
            said = [str(error["message"]) for error in answer.json()["errors"]]
            raise MlxconvError(
                f"{repo}: the Hub does not take the licence {licence.label!r}: {'; '.join(said)}"
            )
        hf_raise_for_status(answer)


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
