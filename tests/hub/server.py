"""A Hugging Face Hub on 127.0.0.1 for tests, which the real huggingface_hub client talks to.

Two origins, as on the real one: the hub, and a storage host that must never see the user's token.
They differ in host name (127.0.0.1 and localhost), which every client version tells apart. Both
log every request and can be told to fail: see `Hub.fail`. `repos.py` has the hub's answers,
`storage.py` those of LFS storage, `xet.py` those of the Xet store.

What is modelled is what huggingface_hub 1.32 to 2.x asks for while mlxconv works: model
repositories with branches and commits, access rights, uploads by LFS (one part or many) and by
Xet, downloads by both, signed addresses. Not modelled: datasets and spaces, pull requests, rate
limits, global deduplication, TLS.
"""

from __future__ import annotations

import json
import re
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_writer_secret"  # of "tester", who may write in the organization below too
READ_TOKEN = "hf_reader_secret"  # of "reader", whose token only reads
ORGANIZATION = "mlx-community"

Action = Literal["status", "drop", "reset", "stall", "corrupt", "delay"]


class Refused(Exception):
    """An answer that is an error. `code` is the Hub's X-Error-Code, which the client reads."""

    def __init__(
        self, status: int, message: str, code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status, self.message, self.code = status, message, code
        self.headers = dict(headers or {})


@dataclass
class Fault:
    """What goes wrong with the requests that match; see `Hub.fail`."""

    method: str
    path: re.Pattern[str]
    action: Action
    nth: frozenset[int] | None
    status: int = 503
    code: str | None = None
    message: str = "injected"
    headers: Mapping[str, str] = field(default_factory=dict)
    after: int = 0
    seconds: float = 0.0
    seen: int = 0

    def strikes(self, method: str, path: str) -> bool:
        """Whether it is this request's turn."""
        if method != self.method or not self.path.search(path):
            return False
        self.seen += 1
        return self.nth is None or self.seen in self.nth


@dataclass
class Request:
    """One request as it came, names of headers in lower case.

    `sent` counts bytes of the answer's body, `received` those of its own.
    """

    side: Literal["hub", "storage"]
    method: str
    path: str
    headers: dict[str, str]
    status: int | str | None = None
    sent: int = 0
    received: int = 0
    fault: str | None = None

    def __str__(self) -> str:
        span = self.headers.get("range", "")
        return f"{self.side} {self.method} {self.path} {span} -> {self.status}"


@dataclass(frozen=True)
class User:
    """Who a token belongs to, and whether it may write."""

    name: str
    organizations: tuple[str, ...] = ()
    writes: bool = True


class Handler(BaseHTTPRequestHandler):
    """One connection; subclasses are bound to a hub and a side by `Hub`."""

    protocol_version = "HTTP/1.1"
    hub: Hub
    side: Literal["hub", "storage"]

    request_log: Request
    fault: Fault | None
    user: User | None
    query: dict[str, list[str]]
    _body: bytes | None

    def log_message(self, *args: Any) -> None:
        """Nothing on stderr: `Hub.log` has it all."""

    def _answer(self) -> None:
        self._body, self.fault, self.user = None, None, None
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        headers = {name.lower(): value for name, value in self.headers.items()}
        self.request_log = Request(self.side, self.command, self.path, headers)
        with self.hub.lock:
            self.hub.log.append(self.request_log)
            self.fault = self.hub.next_fault(self.command, self.path)
        try:
            if self._struck():
                return
            for methods, pattern, answer in self.hub.routes[self.side]:
                found = pattern.fullmatch(parts.path)
                if found and self.command in methods.split("|"):
                    if self.side == "hub":
                        self.user = self._authenticated()
                    answer(self, *(g and unquote(g) for g in found.groups()))
                    return
            raise Refused(404, f"no route for {self.command} {self.path}")
        except Refused as error:
            headers = {"X-Error-Message": error.message, **error.headers}
            if error.code:
                headers["X-Error-Code"] = error.code
            self.reply(error.status, {"error": error.message}, headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        except Exception:
            self.hub.bugs.append(traceback.format_exc())
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _answer

    def _struck(self) -> bool:
        """Do what the fault says before an answer; True when there is to be none."""
        if self.fault is None:
            return False
        self.request_log.fault = self.fault.action
        cut = self.fault.action in ("drop", "reset")
        if cut and not (self.command == "GET" and self.fault.after):
            self._take(self.fault.after)
            self.hang_up(reset=self.fault.action == "reset")
            return True
        if self.fault.action == "delay":
            time.sleep(self.fault.seconds)
        if self.fault.action == "status":
            raise Refused(
                self.fault.status, self.fault.message, self.fault.code, self.fault.headers
            )
        return False

    def _authenticated(self) -> User | None:
        given = self.headers.get("Authorization")
        if given is None:
            return None
        user = self.hub.users.get(given.removeprefix("Bearer "))
        if user is None:
            raise Refused(401, "Invalid credentials in Authorization header")
        return user

    # ---- requests

    def body(self) -> bytes:
        """The request's body, read once."""
        if self._body is None:
            self._body = self._take(int(self.headers.get("Content-Length") or 0))
        return self._body

    def _take(self, count: int) -> bytes:
        data = self.rfile.read(count)
        self.request_log.received += len(data)
        if len(data) < count:
            raise ConnectionResetError("the client went away")
        return data

    def json(self) -> Any:
        """The request's body as JSON."""
        return json.loads(self.body())

    # ---- answers

    def reply(
        self, status: int, data: Any = None, headers: Mapping[str, str] | None = None
    ) -> None:
        """A JSON answer (None: no body). The request is read to its end, so keep-alive works."""
        if self.command in ("POST", "PUT", "DELETE"):
            self.body()
        content = b"" if data is None else json.dumps(data).encode()
        found = {"Content-Type": "application/json", "Content-Length": str(len(content))}
        self._start(status, {**found, **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def send(self, size: int, read: Callable[[int, int], bytes], headers: dict[str, str]) -> None:
        """`size` bytes, or the asked range of them; `read(begin, end)` gives the bytes."""
        begin, end, status = 0, size, 200
        span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if span:
            begin, status = int(span[1]), 206
            end = min(int(span[2]) + 1 if span[2] else size, size)
            if begin >= size:
                raise Refused(416, "the range begins after the end")
            headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{size}"}
        found = {"Content-Type": "application/octet-stream", "Content-Length": str(end - begin)}
        self._start(status, {**found, "Accept-Ranges": "bytes", **headers})
        if self.command != "HEAD":
            self._pour(begin, end, read)

    def _pour(self, begin: int, end: int, read: Callable[[int, int], bytes]) -> None:
        fault = self.fault
        short = fault is not None and fault.action in ("drop", "reset", "stall")
        stop = min(end, begin + fault.after) if fault and short else end
        for at in range(begin, stop, 1 << 20):
            piece = read(at, min(at + (1 << 20), stop))
            if fault and fault.action == "corrupt" and at == begin:
                broken = bytearray(piece)
                broken[min(fault.after, len(broken) - 1)] ^= 0xFF
                piece = bytes(broken)
            self.wfile.write(piece)
            self.request_log.sent += len(piece)
        if stop < end:
            self.wfile.flush()
            if fault and fault.action == "stall":
                self.hub.released.wait(fault.seconds or 60)
            self.hang_up(reset=fault is not None and fault.action == "reset")

    def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.request_log.status = status
        self.send_response(status)
        for name, value in {**headers, "X-Request-Id": f"test-{id(self.request_log)}"}.items():
            self.send_header(name, value)
        self.end_headers()

    def hang_up(self, reset: bool) -> None:
        """Close the connection, with a TCP reset or in an orderly way."""
        self.close_connection, self.request_log.status = True, "RST" if reset else "FIN"
        with suppress(OSError):  # the client may have gone first
            if reset:
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            else:
                self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()


Route = tuple[str, re.Pattern[str], Callable[..., None]]


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that hang up are what these tests are about."""


class Hub:
    """Both origins, their repositories and files, the log of requests and the faults to come.

    `root` is where file contents are kept. `part_size`: larger LFS files go up in parts of it.
    `page_size`: entries a page of a file listing.
    """

    def __init__(self, root: Path, part_size: int = 16 << 20, page_size: int = 1000) -> None:
        from .repos import Repos, hub_routes
        from .storage import Blobs, storage_routes
        from .xet import Xet, xet_hub_routes, xet_storage_routes

        self.part_size, self.page_size = part_size, page_size
        self.users = {
            TOKEN: User("tester", (ORGANIZATION,)),
            READ_TOKEN: User("reader", writes=False),
        }
        self.lock = threading.RLock()
        self.log: list[Request] = []
        self.bugs: list[str] = []  # tracebacks of the hub's own mistakes
        self._faults: list[Fault] = []
        self.released = threading.Event()  # ends every "stall"
        self.blobs = Blobs(root)
        self.repos = Repos(self)
        self.xet = Xet(self)
        self.routes: dict[str, list[Route]] = {
            "hub": [*xet_hub_routes(), *hub_routes()],
            "storage": [*xet_storage_routes(), *storage_routes()],
        }
        self._listeners = [self._listener("hub"), self._listener("storage")]
        self.url = f"http://127.0.0.1:{self._listeners[0].server_port}"
        self.storage_url = f"http://localhost:{self._listeners[1].server_port}"

    def _listener(self, side: Literal["hub", "storage"]) -> _Listener:
        bound = type(f"{side.title()}Handler", (Handler,), {"hub": self, "side": side})
        return _Listener(("127.0.0.1", 0), bound)

    def __enter__(self) -> Self:
        for listener in self._listeners:
            threading.Thread(target=listener.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.released.set()
        for listener in self._listeners:
            listener.shutdown()
            listener.server_close()

    # ---- faults

    def fail(
        self, method: str, path: str, action: Action = "status", *,
        nth: int | tuple[int, ...] | None = None, **details: Any,
    ) -> Fault:  # fmt: skip
        """From now on requests whose path (query included) has a match of regex `path` fail.

        nth: only these matches, counted from 1 (None: all). action:
        "status": answer `status` (503), with `code` (X-Error-Code), `message`, `headers`;
        "drop", "reset": hang up (TCP FIN, RST) after `after` bytes of the body, of the answer to a
        GET and of the request otherwise; "stall": the same, but wait in silence before, at most
        `seconds` (60); "corrupt": flip byte `after` of the answer; "delay": answer after `seconds`.
        """
        chosen = None if nth is None else frozenset([nth] if isinstance(nth, int) else nth)
        fault = Fault(method, re.compile(path), action, chosen, **details)
        self._faults.append(fault)
        return fault

    def next_fault(self, method: str, path: str) -> Fault | None:
        """The first fault whose turn it is."""
        return next((f for f in self._faults if f.strikes(method, path)), None)

    def reset(self) -> None:
        """No faults, an empty log, the Xet store alive; repositories stay."""
        with self.lock:
            self._faults.clear()
            self.log.clear()
        self.released.set()
        self.released = threading.Event()
        self.xet.alive = True

    # ---- the log

    def requests(self, method: str = "", path: str = "") -> list[Request]:
        """The requests so far of this method whose path has a match of this regex."""
        with self.lock:
            return [
                r for r in self.log
                if (not method or r.method == method) and re.search(path, r.path)
            ]  # fmt: skip

    def storage_bytes(self) -> int:
        """Bytes that went through the storage host, either way."""
        return sum(r.sent + r.received for r in self.requests() if r.side == "storage")

    def leaks(self) -> list[Request]:
        """Requests to the storage host that carry a user's token, in any header or the address."""
        found = []
        for request in self.requests():
            text = f"{request.path} {request.headers}"
            if request.side == "storage" and any(token in text for token in self.users):
                found.append(request)
        return found

    def wait_for(self, method: str, path: str, sent: int = 0, seconds: float = 60) -> Request:
        """The first such request, once it is there and `sent` bytes of its answer went out."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            for request in self.requests(method, path):
                if request.sent >= sent:
                    return request
            time.sleep(0.01)
        raise TimeoutError(f"no {method} {path} with {sent} bytes sent in {seconds} s")
