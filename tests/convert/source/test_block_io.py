"""Files are the same whichever way their blocks are written and read: direct, plain, or both."""

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxconv.convert.source import block_io
from mlxconv.convert.source.block_io import BLOCK, BlockReader, BlockWriter

SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 5 * BLOCK + 123)


def some_bytes(count: int) -> bytes:
    return np.random.default_rng(count).bytes(count)


@pytest.fixture(autouse=True)
def two_blocks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_io, "_WRITTEN_AT_ONCE", 2 * BLOCK)


def no_direct_file(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(block_io, "_open_direct", lambda path, flags: None)


def no_direct_transfer(patch: pytest.MonkeyPatch) -> None:
    """As file systems do that take O_DIRECT when the file is opened, and only then look at it."""
    direct: set[int] = set()

    def opened(path: Path, flags: int) -> int:
        direct.add(descriptor := os.open(path, flags))
        return descriptor

    def refusing(call: Any) -> Any:
        def transfer(descriptor: int, *arguments: Any) -> int:
            if descriptor in direct:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            count: int = call(descriptor, *arguments)
            return count

        return transfer

    patch.setattr(block_io, "_open_direct", opened)
    patch.setattr("os.pwrite", refusing(os.pwrite))
    patch.setattr("os.preadv", refusing(os.preadv))


def short_transfers(patch: pytest.MonkeyPatch) -> None:
    pwrite, preadv = os.pwrite, os.preadv
    patch.setattr("os.pwrite", lambda file, data, at: pwrite(file, data[:BLOCK], at))
    patch.setattr("os.preadv", lambda file, to, at, *_: preadv(file, [to[0][:BLOCK]], at))


def nothing_cached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockReader, "_is_cached", lambda self, begin, end: False)


every_way = pytest.mark.parametrize(
    "way", [no_direct_file, no_direct_transfer, short_transfers, nothing_cached]
)


@every_way
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("step", [777, BLOCK, 1 << 20])
def test_what_is_written_in_order_is_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any, size: int, step: int
) -> None:
    way(monkeypatch)
    data = memoryview(some_bytes(size))
    with BlockWriter(tmp_path / "x", size) as file:
        for start in range(0, size, step):
            file.write(data[start : start + step])
    assert (tmp_path / "x").read_bytes() == data


@every_way
def test_runs_that_share_blocks_do_not_harm_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    """Runs of every length about the block's, in a random order."""
    way(monkeypatch)
    lengths = [1, BLOCK - 1, 10, 3 * BLOCK, 5, BLOCK + 1, 7 * BLOCK + 3, 2, 100, BLOCK]
    ends = np.cumsum(lengths)
    data = memoryview(some_bytes(int(ends[-1])))
    with BlockWriter(tmp_path / "x", len(data)) as file:
        for run in np.random.default_rng(0).permutation(len(lengths)):
            begin, end = int(ends[run]) - lengths[run], int(ends[run])
            file.seek(begin)
            file.write(data[begin:end])
    assert (tmp_path / "x").read_bytes() == data


def test_bytes_never_written_are_zero_and_the_size_is_exact(tmp_path: Path) -> None:
    with BlockWriter(tmp_path / "x", BLOCK + 7) as file:
        file.seek(3)
        file.write(memoryview(b"abc"))
    assert (tmp_path / "x").read_bytes() == bytes(3) + b"abc" + bytes(BLOCK + 1)


def test_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    with pytest.raises(FileExistsError):
        BlockWriter(tmp_path / "x", 3)
    assert (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_descriptors_are_closed_when_the_work_fails(
    tmp_path: Path, error: type[BaseException]
) -> None:
    opened = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(error), BlockWriter(tmp_path / "x", 10):
        raise error
    assert len(list(Path("/dev/fd").iterdir())) == opened


def test_a_full_disk_is_found_at_the_latest_when_the_file_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"), BlockWriter(tmp_path / "x", 1) as file:
        file.write(memoryview(b"a"))


@every_way
@pytest.mark.parametrize("begin", [0, 8, BLOCK - 1, BLOCK, BLOCK + 5])
@pytest.mark.parametrize("size", [7 * BLOCK, BLOCK, 1000, 3])
def test_pieces_are_the_bytes_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any, begin: int, size: int
) -> None:
    way(monkeypatch)
    data = some_bytes(3 * BLOCK + 50)
    (tmp_path / "x").write_bytes(data)
    with BlockReader(tmp_path / "x", size) as file:
        for end in (begin, begin + 1, 2 * BLOCK, len(data) - 3, len(data)):
            pieces = [bytes(piece) for piece in file.pieces(begin, end)]
            assert b"".join(pieces) == data[begin:end]
            assert all(len(piece) == size for piece in pieces[:-1])


@every_way
def test_pieces_are_short_where_the_file_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: Any
) -> None:
    way(monkeypatch)
    (tmp_path / "x").write_bytes(some_bytes(BLOCK + 10))
    with BlockReader(tmp_path / "x", 5000) as file:
        assert [len(piece) for piece in file.pieces(10, 3 * BLOCK)] == [BLOCK, 0, 0]
