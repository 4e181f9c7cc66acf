"""The storage host's LFS side: whole objects by their SHA-256, at addresses signed for a while."""

from __future__ import annotations

import hashlib
import re
import secrets
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from .server import Handler, Refused, Route

if TYPE_CHECKING:
    from collections.abc import Callable


class Blobs:
    """Contents of files, each a file of its own under its identifier."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.signature = secrets.token_hex(8)
        root.mkdir(parents=True, exist_ok=True)

    def __contains__(self, oid: str) -> bool:
        return (self.root / oid).is_file()

    def size(self, oid: str) -> int:
        """In bytes."""
        return (self.root / oid).stat().st_size

    def put(self, oid: str, data: bytes) -> None:
        """Store; seen whole or not at all."""
        partial = self.root / f"{oid}.{secrets.token_hex(4)}"
        partial.write_bytes(data)
        partial.replace(self.root / oid)

    def put_file(self, oid: str, file: Path) -> None:
        """Store a copy of a file."""
        shutil.copyfile(file, self.root / oid)

    def get(self, oid: str) -> bytes:
        """The whole."""
        return (self.root / oid).read_bytes()

    def reader(self, oid: str) -> Callable[[int, int], bytes]:
        """A function that gives bytes `begin` to `end`."""
        path = self.root / oid

        def read(begin: int, end: int) -> bytes:
            with path.open("rb") as stream:
                stream.seek(begin)
                return stream.read(end - begin)

        return read

    def signed(self, address: str) -> str:
        """The address with the signature that the storage host asks for."""
        return f"{address}?X-Signature={self.signature}"

    def expire(self) -> None:
        """All addresses handed out so far are refused from now on."""
        self.signature = secrets.token_hex(8)


def check_signature(handler: Handler) -> None:
    """403, as object stores answer, unless the address is signed."""
    if handler.query.get("X-Signature") != [handler.hub.blobs.signature]:
        raise Refused(403, "AccessDenied: Request has expired")


def _put(handler: Handler, oid: str, part: str | None) -> None:
    check_signature(handler)
    data = handler.body()
    digest = hashlib.sha256(data).hexdigest()
    if part is None and digest != oid:
        raise Refused(400, "XAmzContentSHA256Mismatch")
    handler.hub.blobs.put(oid if part is None else f"{oid}.part{part}", data)
    handler.reply(200, None, {"ETag": f'"{digest[:32]}"'})


def _get(handler: Handler, oid: str) -> None:
    check_signature(handler)
    blobs = handler.hub.blobs
    if oid in blobs:
        handler.send(blobs.size(oid), blobs.reader(oid), {"ETag": f'"{oid}"'})
        return
    data = handler.hub.xet.contents(oid)  # a Xet file, fetched without Xet
    if data is None:
        raise Refused(404, "NoSuchKey")
    handler.send(len(data), lambda begin, end: data[begin:end], {"ETag": f'"{oid}"'})


def storage_routes() -> list[Route]:
    """Put and get."""
    return [
        ("PUT", re.compile(r"/put/(\w+)(?:/(\d+))?"), _put),
        ("GET|HEAD", re.compile(r"/get/(\w+)"), _get),
    ]
