"""The Xet store (CAS) as hf_xet 1.8 uses it: chunks in xorbs, and files as ranges of xorbs.

Files that are seeded get a made-up hash and xorbs that are made when they are asked for: the
client checks neither against the contents. Uploaded ones are kept as they came. A client that is
to be read back without Xet has to send chunks uncompressed: `HF_XET_DATA_XORB_COMPRESSION_POLICY`.
"""

from __future__ import annotations

import hashlib
import re
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .server import Handler, Refused, Route
from .storage import check_signature

if TYPE_CHECKING:
    from .server import Hub

_CHUNK = 64 << 10
_XORB = 8 << 20
_HEADER = 8  # version u8, packed length u24, compression u8, raw length u24


@dataclass(frozen=True)
class Term:
    """A file's bytes, one run: chunks `first` to `end` of a xorb, `size` bytes unpacked."""

    xorb: str
    size: int
    first: int
    end: int


@dataclass(frozen=True)
class Xorb:
    """A xorb's chunks, packed: their bytes on demand, their number, their length in all."""

    length: int
    chunks: int
    read: Callable[[int, int], bytes]


def printed_hash(raw: bytes) -> str:
    """A Xet hash as text: four little-endian 64-bit numbers in hexadecimal."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


class Xet:
    """All files and xorbs of a hub. `alive` False: the address handed out is of a dead server."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.alive = True
        self._files: dict[str, list[Term]] = {}
        self._by_sha256: dict[str, str] = {}
        self._xorbs: dict[str, Xorb] = {}

    @property
    def url(self) -> str:
        """Where the store is said to be."""
        return self.hub.storage_url if self.alive else "http://localhost:9"

    def hash_of(self, sha256: str) -> str | None:
        """The Xet hash of contents that the store has."""
        return self._by_sha256.get(sha256)

    def terms(self, file_hash: str) -> list[Term]:
        """The runs a file is made of."""
        if file_hash not in self._files:
            raise Refused(404, "unknown file")
        return self._files[file_hash]

    def xorb(self, name: str) -> Xorb:
        """A xorb by its hash."""
        if name not in self._xorbs:
            raise Refused(404, "unknown xorb")
        return self._xorbs[name]

    def register(self, sha256: str, size: int) -> str:
        """Offer a blob of the hub by Xet; its Xet hash."""
        name = hashlib.sha256(b"xet" + bytes.fromhex(sha256)).hexdigest()
        terms = []
        for start in range(0, size, _XORB):
            stop = min(start + _XORB, size)
            xorb = hashlib.sha256(f"{sha256} {start}".encode()).hexdigest()
            count = -(-(stop - start) // _CHUNK)
            length = stop - start + _HEADER * count
            self._xorbs[xorb] = Xorb(length, count, self._packed(sha256, start, stop))
            terms.append(Term(xorb, stop - start, 0, count))
        self._files[name], self._by_sha256[sha256] = terms, name
        return name

    def _packed(self, sha256: str, start: int, stop: int) -> Callable[[int, int], bytes]:
        """Reads of the xorb that holds bytes `start` to `stop` of a blob, uncompressed."""
        raw = self.hub.blobs.reader(sha256)
        stride = _HEADER + _CHUNK

        def read(begin: int, end: int) -> bytes:
            first, last = begin // stride, -(-end // stride)
            packed = bytearray()
            for at in range(start + first * _CHUNK, min(stop, start + last * _CHUNK), _CHUNK):
                data = raw(at, min(at + _CHUNK, stop))
                length = len(data).to_bytes(3, "little")
                packed += b"\0" + length + b"\0" + length + data
            return bytes(packed[begin - first * stride : end - first * stride])

        return read

    # ---- uploads

    def add_xorb(self, name: str, data: bytes) -> bool:
        """Keep an uploaded xorb; whether it is new. What follows its chunks is not needed."""
        if name in self._xorbs:
            return False
        length, count = _extent(data)
        self._xorbs[name] = Xorb(length, count, lambda begin, end: data[begin:end])
        return True

    def add_shard(self, data: bytes) -> None:
        """Learn the files that an uploaded shard describes; 400 where a xorb is not there."""
        for file_hash, sha256, terms in _shard_files(data):
            if missing := [term for term in terms if term.xorb not in self._xorbs]:
                raise Refused(400, f"shard names xorb {missing[0].xorb}, which was not uploaded")
            self._files[file_hash] = terms
            if sha256 is not None:
                self._by_sha256[sha256] = file_hash

    def contents(self, sha256: str) -> bytes | None:
        """An uploaded file's bytes, put together again; None where the store has no such file."""
        name = self._by_sha256.get(sha256)
        if name is None:
            return None
        data = b"".join(self._unpacked(term) for term in self._files[name])
        assert hashlib.sha256(data).hexdigest() == sha256, "the Xet store holds other bytes"
        return data

    def _unpacked(self, term: Term) -> bytes:
        xorb = self._xorbs[term.xorb]
        packed = xorb.read(0, xorb.length)
        at, parts = 0, []
        for _ in range(xorb.chunks):
            length = int.from_bytes(packed[at + 1 : at + 4], "little")
            assert packed[at + 4] == 0, "a compressed chunk: set the policy named above"
            parts.append(packed[at + _HEADER : at + _HEADER + length])
            at += _HEADER + length
        return b"".join(parts[term.first : term.end])


def _extent(data: bytes) -> tuple[int, int]:
    """How many bytes the chunks of a xorb take, and their number; a footer may follow."""
    at = count = 0
    while at + _HEADER <= len(data) and data[at] == 0 and data[at : at + 7] != b"XETBLOB":
        at += _HEADER + int.from_bytes(data[at + 1 : at + 4], "little")
        count += 1
    if at > len(data):
        raise Refused(400, "xorb is cut short")
    return at, count


def _shard_files(data: bytes) -> list[tuple[str, str | None, list[Term]]]:
    """(file hash, SHA-256, runs) of the file section of a shard ("MDB shard", 48-byte records).

    A file: a header (hash, flags u32, count u32), a record a run (xorb, flags, size, first, end),
    with flag 31 as many records of verification, with flag 30 one with the SHA-256.
    """
    at, found = 48, []
    while data[at : at + 32] != b"\xff" * 32:
        flags, count = struct.unpack_from("<II", data, at + 32)
        file_hash = printed_hash(data[at : at + 32])
        at += 48
        terms, sha256 = [], None
        for _ in range(count):
            _, size, first, end = struct.unpack_from("<4I", data, at + 32)
            terms.append(Term(printed_hash(data[at : at + 32]), size, first, end))
            at += 48
        if flags >> 31 & 1:
            at += 48 * count
        if flags >> 30 & 1:
            sha256 = printed_hash(data[at : at + 32])
            at += 48
        found.append((file_hash, sha256, terms))
    return found


# ---- requests


def _token(handler: Handler, repo_id: str, kind: str, revision: str) -> None:
    """A token for the store alone: the user's own never goes there."""
    repos, xet = handler.hub.repos, handler.hub.xet
    repo = (repos.writable if kind == "write" else repos.readable)(handler, repo_id)
    repo.at(revision)
    expires, token = int(time.time()) + 3600, f"xet-{kind}"
    headers = {
        "X-Xet-Cas-Url": xet.url,
        "X-Xet-Access-Token": token,
        "X-Xet-Token-Expiration": str(expires),
    }
    answer = {"casUrl": xet.url, "accessToken": token, "exp": expires}
    handler.reply(200, answer, headers)


def _check(handler: Handler, *kinds: str) -> None:
    if handler.headers.get("Authorization") not in [f"Bearer xet-{kind}" for kind in kinds]:
        raise Refused(401, "no valid Xet token")


def _put_xorb(handler: Handler, name: str) -> None:
    _check(handler, "write")
    handler.reply(200, {"was_inserted": handler.hub.xet.add_xorb(name, handler.body())})


def _put_shard(handler: Handler) -> None:
    _check(handler, "write")
    handler.hub.xet.add_shard(handler.body())
    handler.reply(200, {"result": 1})


def _reconstruction(handler: Handler, file_hash: str) -> None:
    """Which xorb ranges make the asked range of a file, and where to fetch them."""
    _check(handler, "read", "write")
    hub = handler.hub
    terms = hub.xet.terms(file_hash)
    low, high = 0, sum(term.size for term in terms)
    span = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range", ""))
    if span:
        low, high = int(span[1]), min(int(span[2]) + 1, high)
        if low >= high:
            raise Refused(416, "the range begins after the end")
    needed, skipped, at = [], 0, 0
    for term in terms:
        if at < high and at + term.size > low:
            skipped = skipped if needed else low - at
            needed.append(term)
        at += term.size
    info = {}
    for name in {term.xorb for term in needed}:
        xorb = hub.xet.xorb(name)
        info[name] = [
            {
                "range": {"start": 0, "end": xorb.chunks},
                "url": hub.blobs.signed(f"{hub.storage_url}/xorb/{name}"),
                "url_range": {"start": 0, "end": xorb.length - 1},
            }
        ]
    listed = [
        {
            "hash": term.xorb,
            "unpacked_length": term.size,
            "range": {"start": term.first, "end": term.end},
        }
        for term in needed
    ]
    answer = {"offset_into_first_range": skipped, "terms": listed, "fetch_info": info}
    handler.reply(200, answer)


def _get_xorb(handler: Handler, name: str) -> None:
    check_signature(handler)
    xorb = handler.hub.xet.xorb(name)
    handler.send(xorb.length, xorb.read, {})


def xet_hub_routes() -> list[Route]:
    """Tokens, which the hub gives."""
    pattern = r"/api/models/([^/]+/[^/]+)/xet-(read|write)-token/([^/]+)"
    return [("GET", re.compile(pattern), _token)]


def xet_storage_routes() -> list[Route]:
    """The store itself. Routes that are not here (deduplication, grants) may answer 404."""
    routes = [
        ("POST", r"/v1/xorbs/default/(\w+)", _put_xorb),
        ("POST", r"/v1/shards", _put_shard),
        ("GET", r"/v1/reconstructions/(\w+)", _reconstruction),
        ("GET", r"/xorb/(\w+)", _get_xorb),
    ]
    return [(methods, re.compile(pattern), answer) for methods, pattern, answer in routes]
