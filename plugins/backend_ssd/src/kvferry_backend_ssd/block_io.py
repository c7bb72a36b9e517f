"""The one way bytes travel between memory and a store file."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

LARGEST_PIECE = 1 << 20
"""Longer reads and writes are cut, so that one large chunk keeps a disk as busy as many small ones."""


class Purpose(enum.Enum):
    """What a piece of the file is. Nothing depends on it but what an observer wants to know."""

    SUPERBLOCK = "superblock"
    TABLE = "table"
    USES = "uses"
    HEAD = "head"
    VALUE = "value"


class Piece(NamedTuple):
    """``length`` bytes at ``offset`` of the file, and at ``address`` of memory."""

    offset: int
    address: int
    length: int
    purpose: Purpose


class BlockIO(Protocol):
    """Reads and writes many pieces at once. Serves one thread at a time.

    Results are as many as pieces, in their order: the bytes that were moved, or ``-errno``. Fewer bytes
    than the piece has mean the end of the file. None of ``read`` and ``write`` raises for a piece that
    failed; the other calls raise ``OSError``. Nothing touches the memory after the call.

    Everything that changes a store file goes through here, in program order for each file: only what a
    ``flush`` covered is durable. An object that records the calls sees all that a power cut could tear.
    """

    def read(self, fd: int, pieces: Sequence[Piece]) -> list[int]: ...

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]: ...

    def flush(self, fd: int) -> None:
        """What was written before is durable when this returns."""
        ...

    def allocate(self, fd: int, offset: int, length: int) -> None:
        """Reserve room on the disk, and make the file as long as ``offset + length`` at the least."""
        ...

    def truncate(self, fd: int, length: int) -> None: ...

    def close(self) -> None:
        """Give back threads and descriptors. Idempotent."""
        ...


BlockIOFactory = Callable[[int], BlockIO]
"""Makes one for a thread of the backend, with a queue of the given depth."""


class FileCalls:
    """The calls that both kinds of :class:`BlockIO` have in common."""

    def flush(self, fd: int) -> None:
        os.fdatasync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)


class ForwardingIO:
    """Hands every call on to ``inner``. To derive from: for tracing, delays, faults."""

    def __init__(self, inner: BlockIO) -> None:
        self.inner = inner

    def read(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self.inner.read(fd, pieces)

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self.inner.write(fd, pieces)

    def flush(self, fd: int) -> None:
        self.inner.flush(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self.inner.allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self.inner.truncate(fd, length)

    def close(self) -> None:
        self.inner.close()


def cut(offset: int, address: int, length: int) -> list[Piece]:
    """A stretch of a value, of any length, as pieces."""
    return [
        Piece(offset + at, address + at, min(LARGEST_PIECE, length - at), Purpose.VALUE)
        for at in range(0, length, LARGEST_PIECE)
    ]
