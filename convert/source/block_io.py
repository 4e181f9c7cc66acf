"""Large files through one page-aligned buffer, past the page cache where the system allows it.

Weights are read once and written once. Through the page cache that costs 1.6 CPU s/GB to read and
1.2 to write (ext4 on Linux, cold) and pushes out what others have cached; direct it costs 0.06 and
0.05. Linux: O_DIRECT; macOS: F_NOCACHE; where neither is taken, plain reads and writes.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

# Direct transfers take addresses, offsets and lengths in multiples of the device's block, which is
# 512 or 4096 bytes. A larger one answers EINVAL, and the transfer is made plainly.
BLOCK = 4096
_WRITTEN_AT_ONCE = 8 << 20


class BlockWriter:
    """A new file of a known size, gathered into one buffer and written in whole blocks.

    The ends of a run of bytes that fill no block go through the page cache, so a page is written
    either directly or through the cache, never both ways. Leaving the `with` block normally means
    that the bytes are on the disk; after an exception the file is closed as it is.
    """

    def __init__(self, path: Path, size: int, again: bool = False) -> None:
        """Create the file, `size` bytes of holes. Raises FileExistsError when it is there.

        `again`: it is there, and some of its bytes are written once more.
        """
        self.name = str(path)
        create = 0 if again else os.O_CREAT | os.O_EXCL
        self._plain = os.open(path, os.O_WRONLY | create, 0o666)
        os.ftruncate(self._plain, size)
        self._direct = _open_direct(path, os.O_WRONLY)
        self._buffer = memoryview(mmap.mmap(-1, _WRITTEN_AT_ONCE))
        # Where the buffer begins in the file, a multiple of BLOCK, and what of it is to be written.
        self._base = self._first = self._last = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.sync()
        finally:
            self._close_direct()
            os.close(self._plain)

    def seek(self, offset: int) -> None:
        """The next byte goes to `offset`."""
        if offset == self._base + self._last:
            return
        self._flush()
        self._first = self._last = offset % BLOCK
        self._base = offset - self._first

    def write(self, data: memoryview) -> None:
        """Append bytes (an unsigned 8-bit view); they are copied before this returns."""
        while len(data):
            taken = min(len(data), len(self._buffer) - self._last)
            self._buffer[self._last : self._last + taken] = data[:taken]
            self._last += taken
            data = data[taken:]
            if self._last == len(self._buffer):
                self._flush()

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        self._flush()
        os.fsync(self._plain)

    def _flush(self) -> None:
        """Write what the buffer holds; it begins anew where that ended."""
        first, last = self._first, self._last
        head = min(last, first + -first % BLOCK)
        tail = max(head, last - last % BLOCK)
        self._write_plain(first, head)
        self._write_plain(self._write_direct(head, tail), last)
        self._base += last
        self._first = self._last = self._base % BLOCK
        self._base -= self._first

    def _write_direct(self, first: int, last: int) -> int:
        """Where the blocks that could be written directly end."""
        while self._direct is not None and first < last and first % BLOCK == 0:
            try:
                first += os.pwrite(self._direct, self._buffer[first:last], self._base + first)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._close_direct()
        return first

    def _write_plain(self, first: int, last: int) -> None:
        while first < last:
            first += os.pwrite(self._plain, self._buffer[first:last], self._base + first)

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


class BlockReader:
    """A file that is read once, in pieces of one reused buffer."""

    def __init__(self, path: Path, size: int) -> None:
        """`size`: the largest piece. Raises OSError when the file cannot be opened."""
        self._size = size
        self._plain = os.open(path, os.O_RDONLY)
        self._direct = _open_direct(path, os.O_RDONLY)
        self._buffer = memoryview(mmap.mmap(-1, size + -size % BLOCK + BLOCK))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close_direct()
        os.close(self._plain)

    def pieces(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes `begin` to `end` of the file, `size` at a time; each is valid until the next.

        A piece is shorter where the file ends, and the last one is.
        """
        for at in range(begin, end, self._size):
            wanted = min(self._size, end - at)
            direct = not self._is_cached(at, at + wanted)
            skip = at % BLOCK if direct else 0
            # Whole blocks: what lies around the piece is read too.
            length = skip + wanted + -(skip + wanted) % BLOCK if direct else wanted
            found = self._fill(self._buffer[:length], at - skip, direct)
            yield self._buffer[skip : max(skip, min(found, skip + wanted))]

    def _fill(self, target: memoryview, offset: int, direct: bool) -> int:
        """Bytes read into `target`: fewer than it takes where the file ends."""
        done = 0
        while done < len(target):
            count = self._read(target[done:], offset + done, direct)
            if not count:
                break
            done += count
        return done

    def _read(self, target: memoryview, offset: int, direct: bool) -> int:
        if direct and self._direct is not None and offset % BLOCK == 0:
            try:
                return os.preadv(self._direct, [target], offset)
            except OSError as error:
                if error.errno not in _NOT_DIRECT:
                    raise
                self._close_direct()
        return os.preadv(self._plain, [target], offset)

    def _is_cached(self, begin: int, end: int) -> bool:
        """Whether the page cache seems to hold the bytes, by a look at three of them.

        From there they come ten times sooner than from the disk.
        """
        if not hasattr(os, "RWF_NOWAIT"):
            return False
        spots = (begin, (begin + end) // 2, max(begin, end - 1))
        try:
            return all(os.preadv(self._plain, [bytearray(1)], s, os.RWF_NOWAIT) for s in spots)
        except OSError:
            return False

    def _close_direct(self) -> None:
        if self._direct is not None:
            os.close(self._direct)
            self._direct = None


# What a file system answers that opens a file for direct transfers, and then does not take one.
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)


def _open_direct(path: Path, flags: int) -> int | None:
    """A descriptor that bypasses the page cache, or None where there is none."""
    try:
        if hasattr(os, "O_DIRECT"):
            return os.open(path, flags | os.O_DIRECT)
        if hasattr(fcntl, "F_NOCACHE"):
            descriptor = os.open(path, flags)
            fcntl.fcntl(descriptor, fcntl.F_NOCACHE, 1)
            return descriptor
    except OSError:
        return None
    return None
