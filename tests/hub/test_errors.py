"""Failures of huggingface_hub, made by hand, as the line that a user reads."""

from __future__ import annotations

import errno
import json
from importlib import import_module
from typing import Any

import pytest

from mlxconv.runtime.errors import MlxconvError
from mlxconv.runtime.hub.errors import explain, http_error, hub_errors, is_disk_full, is_transient

HTTPX: Any = import_module(http_error().__module__.partition(".")[0])
REPO = "acme/flux"


def answered(status: int, said: str = "", **headers: str) -> Exception:
    """The client's error for an answer of the Hub."""
    from huggingface_hub.errors import HfHubHTTPError

    request = HTTPX.Request("GET", "https://huggingface.co/api/models/acme/flux?sig=abc")
    response = HTTPX.Response(status, request=request, headers=headers)
    return HfHubHTTPError(f"{status} Error", response=response, server_message=said)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


NO_ROOM = OSError(errno.ENOSPC, "No space left on device")
CASES = {
    "401": (answered(401), "does not accept the token (HTTP 401); log in", False),
    "403": (answered(403, "not yours"), "refuses this token (not yours); use a token with write",
            False),
    "412": (answered(412), "was changed by someone else meanwhile; run the same", False),
    "413": (answered(413, "too big"), "refuses the request (HTTP 413: too big)", False),
    "429": (answered(429, **{"Retry-After": "30"}), "limits this account's requests; wait 30 s",
            True),
    "500": (answered(500, "oops"), "fails with HTTP 500 (oops); wait, then run the same", True),
    "upload": (caused(RuntimeError("Error while uploading 'a' to the Hub."), answered(503)),
               "fails with HTTP 503 (no reason given)", True),
    "xet": (RuntimeError("Task error: File reconstruction error: CAS Client Error"),
            "the Xet transfer failed (Task error", True),
    "xet token": (ConnectionError("Network error: ... 403 Forbidden"), "HF_HUB_DISABLE_XET=1",
                  False),
    "full": (NO_ROOM, "the disk is full; make room", False),
    "full, by Xet": (RuntimeError("Task error: IO Error: No space left on device (os error 28)"),
                     "the disk is full; make room", False),
    "reset": (HTTPX.ReadError("reset by peer"), "the connection broke (ReadError: reset by", True),
    "nobody": (HTTPX.ConnectError("refused"), "cannot reach http", True),
    "cut": (HTTPX.RemoteProtocolError("peer closed"), "the connection broke (RemoteProt", True),
    "card": (ValueError("Invalid metadata in README.md.\n- Error: \"license\" must be one of"),
             "refuses the model card: Invalid metadata in README.md. - Error:", False),
    "html": (json.JSONDecodeError("Expecting value", "<html>", 0), "is there a proxy", False),
    "denied": (PermissionError(errno.EACCES, "Permission denied", "/cache/x"),
               "/cache/x: Permission denied", False),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_a_failure_is_one_line_that_says_what_to_do(name: str) -> None:
    error, expected, transient = CASES[name]
    text = explain(error, REPO, "main", writing=True)
    assert text is not None and expected in text, text
    assert text.startswith(f"{REPO}: ") and "\n" not in text
    assert is_transient(error) is transient
    assert is_disk_full(error) is name.startswith("full")


def test_offline_is_found_inside_what_wraps_it() -> None:
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    error = caused(LocalEntryNotFoundError("not cached"), OfflineModeIsEnabled("offline"))
    text = explain(error, REPO)
    assert text is not None and "HF_HUB_OFFLINE=1 forbids to download it" in text
    assert not is_transient(OfflineModeIsEnabled("offline"))


def test_secrets_are_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret-without-prefix")
    said = "bad s3cret-without-prefix and hf_abcdefghijk at https://x.co/a?X-Signature=1234 now"
    text = explain(answered(500, said), REPO)
    assert text is not None and "bad *** and hf_*** at https://x.co/a now" in text


def test_what_is_nobodys_failure_goes_through() -> None:
    with pytest.raises(KeyError), hub_errors(REPO):
        raise KeyError("a bug")
    with pytest.raises(ValueError, match="another"), hub_errors(REPO):
        raise ValueError("another bug")
    with pytest.raises(MlxconvError, match=r"^mine$"), hub_errors(REPO):
        raise MlxconvError("mine")
    with pytest.raises(MlxconvError, match="HTTP 502") as caught, hub_errors(REPO):
        raise answered(502)
    assert caught.value.__cause__ is not None
