"""What huggingface_hub raises, as one line that says what to do.

Its failures have no common base: HTTP errors of the Hub, errors of httpx (1.x) or httpx2 (2.x),
built-in ConnectionError and RuntimeError out of hf_xet, RuntimeError around a failed upload,
ValueError for names and model cards, and OSError of the disk. Checked with 1.32 and 2.4.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..errors import MlxconvError

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FULL_TEXT = re.compile(r"No space left on device|Disk quota exceeded|os error (28|122)\b")
_XET_TEXT = re.compile(r"(?i)\bxet|reconstruction|\bcas\b|task error|data processing|network error")
_NOBODY = ("ConnectError", "ConnectTimeout", "ProxyError", "UnsupportedProtocol")
_AGAIN = "run the same command again: files that are complete are kept"
_LOGIN = "log in with `hf auth login` or set HF_TOKEN"
_WITHOUT_XET = "HF_HUB_DISABLE_XET=1 goes another way"


class Unreachable(MlxconvError):
    """Nobody answers: no network, or HF_HUB_OFFLINE=1."""


@contextmanager
def hub_errors(repo: str, revision: str | None = None, *, writing: bool = False) -> Iterator[None]:
    """Around calls of huggingface_hub about one repository: its failures become MlxconvError.

    `writing`: the calls change the repository, so that a refusal is about the right to do so.
    Anything that is neither the Hub's, the network's nor the disk's goes through unchanged.
    """
    try:
        yield
    except MlxconvError:
        raise
    except Exception as error:
        text = explain(error, repo, revision, writing=writing)
        if text is None:
            raise
        raise (Unreachable if _is_unreachable(error) else MlxconvError)(text) from error


def explain(
    error: BaseException, repo: str, revision: str | None = None, *, writing: bool = False
) -> str | None:
    """One line for a failure of huggingface_hub; None for what is none of its failures."""
    text = _Explainer(repo, revision, writing).of(error)
    return None if text is None else _plain(text)


def is_transient(error: BaseException) -> bool:
    """Whether the same call may succeed later: servers, connections and Xet, not refusals."""
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled) or is_disk_full(error):
        return False
    if isinstance(error, errors.HfHubHTTPError):
        return _status(error) in (408, 429) or _status(error) >= 500
    if isinstance(error, http_error() | ConnectionError):
        return not re.search(r"\b40[0134]\b", str(error))
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return is_transient(error.__cause__)
    return isinstance(error, RuntimeError) and _is_xet(error)


def _is_unreachable(error: BaseException) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled) or type(error).__name__ in _NOBODY:
        return True
    return error.__cause__ is not None and _is_unreachable(error.__cause__)


def is_disk_full(error: BaseException) -> bool:
    """Whether this disk is full or over quota; hf_xet says so only in words."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    return isinstance(error, RuntimeError | OSError) and bool(_FULL_TEXT.search(str(error)))


@dataclass(frozen=True)
class _Explainer:
    repo: str
    revision: str | None
    writing: bool

    @property
    def page(self) -> str:
        from huggingface_hub import constants

        return f"{constants.ENDPOINT}/{self.repo}"

    def of(self, error: BaseException) -> str | None:
        """The line for one error, looking into what wraps another."""
        from huggingface_hub import errors

        if is_disk_full(error):
            return f"{self.repo}: the disk is full; make room and {_AGAIN}"
        if isinstance(error, errors.OfflineModeIsEnabled):
            return self._offline()
        if isinstance(error, errors.LocalTokenNotFoundError):
            return f"{self.repo}: you are not logged in to the Hub; {_LOGIN}"
        if isinstance(error, errors.LocalEntryNotFoundError | errors.DryRunError):
            return self._not_cached(error)
        if isinstance(error, errors.HfHubHTTPError):
            return self._answered(error)
        if isinstance(error, errors.HFValidationError):
            return f"{self.repo}: not a repository id, expected NAMESPACE/NAME; {error}"
        if isinstance(error, http_error()):
            return self._broken(error)
        return self._other(error)

    # ---- no answer

    def _offline(self) -> str:
        return (
            f"{self.repo}{self._at()}: is not whole in the local cache, and HF_HUB_OFFLINE=1 "
            "forbids to download it; unset it, or download once while online"
        )

    def _not_cached(self, error: BaseException) -> str:
        """The client fell back to its cache and did not find all there; the cause says why."""
        cause = error.__cause__
        told = None if cause is None else self.of(cause)
        if told is not None:
            return told
        return f"{self.repo}{self._at()}: is not whole in the local cache; {_first(error)}"

    def _broken(self, error: BaseException) -> str:
        kind = type(error).__name__
        if kind in _NOBODY:
            from huggingface_hub import constants

            return (
                f"{self.repo}: cannot reach {constants.ENDPOINT} ({_first(error) or kind}); check "
                "the connection, a proxy, HF_ENDPOINT; what is in the cache works offline"
            )
        return f"{self.repo}: the connection broke ({kind}: {_first(error)}); {_AGAIN}"

    # ---- the Hub answers

    def _answered(self, error: Any) -> str:
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return self._gated(error)
        if isinstance(error, errors.RepositoryNotFoundError):
            return self._no_repository(error)
        if isinstance(error, errors.DisabledRepoError):
            return f"{self.repo}: was disabled on the Hub; see {self.page}"
        if isinstance(error, errors.RevisionNotFoundError):
            return (
                f"{self.repo}: has no revision {self.revision or 'main'!r}, neither branch, tag "
                f"nor commit; see {self.page}/commits"
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            path = str(error.response.url).partition("/resolve/")[2].partition("/")[2]
            return f"{self.repo}{self._at()}: has no file {path}; see {self.page}/tree/main"
        return self._status_text(error, _status(error))

    def _gated(self, error: Any) -> str:
        steps = f"accept its terms at {self.page}"
        if _status(error) == 401:
            return f"{self.repo}: is gated: {steps}, then {_LOGIN}"
        return (
            f"{self.repo}: is gated and this account has no access: {steps} (and let the token "
            "read gated repositories)"
        )

    def _no_repository(self, error: Any) -> str:
        if _status(error) == 401:
            return (
                f"{self.repo}: no such repository on the Hub, or a private one and you are "
                f"not logged in; check the name, or {_LOGIN}"
            )
        return (
            f"{self.repo}: no such repository on the Hub, or a private one that this account's "
            f"token does not see; check {self.page}"
        )

    def _status_text(self, error: Any, status: int) -> str:
        said = error.server_message or ""
        if status == 401:
            return (
                f"{self.repo}: the Hub does not accept the token ({said or 'HTTP 401'}); "
                f"{_LOGIN} with a valid one"
            )
        if status == 403:
            wanted = "a token with write access to it" if self.writing else "one that may read it"
            return f"{self.repo}: the Hub refuses this token ({said or 'HTTP 403'}); use {wanted}"
        if status == 412:
            return f"{self.repo}: was changed by someone else meanwhile; {_AGAIN}"
        if status == 429:
            after = error.response.headers.get("Retry-After")
            wait = f"wait {after} s" if after else "wait some minutes"
            return f"{self.repo}: the Hub limits this account's requests; {wait}, then {_AGAIN}"
        if status >= 500:
            return (
                f"{self.repo}: the Hub fails with HTTP {status} ({said or 'no reason given'}); "
                f"wait, then {_AGAIN}"
            )
        return f"{self.repo}: the Hub refuses the request (HTTP {status}: {said or _first(error)})"

    # ---- the rest

    def _other(self, error: BaseException) -> str | None:
        if isinstance(error, RuntimeError) and error.__cause__ is not None:
            inner = self.of(error.__cause__)  # "Error while uploading 'x' to the Hub."
            return None if inner is None else f"{inner} ({_first(error)})"
        if isinstance(error, ConnectionError) or (
            isinstance(error, RuntimeError) and _is_xet(error)
        ):
            return (
                f"{self.repo}: the Xet transfer failed ({_first(error)}); {_AGAIN}; {_WITHOUT_XET}"
            )
        if isinstance(error, OSError):
            where = f"{error.filename}: " if error.filename else ""
            return f"{self.repo}: {where}{error.strerror or _first(error)}"
        if isinstance(error, ValueError) and type(error).__name__ == "JSONDecodeError":
            return f"{self.repo}: {self.page} answers with no JSON; is there a proxy in between?"
        if isinstance(error, ValueError) and "metadata" in str(error):
            return f"{self.repo}: the Hub refuses the model card: {' '.join(str(error).split())}"
        if type(error).__name__ in ("RevisionResolutionError", "XetDownloadError"):
            told = error.__cause__ and self.of(error.__cause__)
            return told or f"{self.repo}{self._at()}: {_first(error)}"
        return None

    def _at(self) -> str:
        return f" at {self.revision}" if self.revision else ""


def http_error() -> type[Exception]:
    """What all failures of requests and answers derive from: of httpx on 1.x, of httpx2 on 2.x."""
    from huggingface_hub import errors

    return errors.HTTPError


def _status(error: Any) -> int:
    return int(error.response.status_code)


def _is_xet(error: BaseException) -> bool:
    """hf_xet's failures are RuntimeErrors of these texts."""
    return bool(_XET_TEXT.search(str(error)))


def _first(error: BaseException) -> str:
    """The first line of an error's text, not too long."""
    line = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return line if len(line) <= 160 else f"{line[:157]}..."


def _plain(text: str) -> str:
    """One line without secrets: tokens, and what signs an address."""
    from huggingface_hub import get_token

    token = get_token()
    if token:
        text = text.replace(token, "***")
    text = re.sub(r"\bhf_\w{8,}", "hf_***", text)
    text = re.sub(r"(https?://[^\s?)]+)\?[^\s)]*", r"\1", text)
    return " ".join(text.split())
