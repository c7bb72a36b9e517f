"""File I/O through io_uring, by kvferry-native."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from kvferry_backend_ssd.block_io import FileCalls, Piece


class Ring(Protocol):
    """What is used of ``kvferry_native.IoUring``."""

    def run(
        self,
        write: bool,
        fd: int,
        offsets: Any,
        addresses: Any,
        lengths: Any,
        results: Any,
        depth: int,
    ) -> None: ...

    def close(self) -> None: ...


class UringIO(FileCalls):
    """A :class:`BlockIO` over one ring. Raises ``OSError`` where the kernel refuses to make it."""

    def __init__(self, depth: int) -> None:
        import kvferry_native

        self._depth = depth
        self._ring: Ring = kvferry_native.IoUring(depth)

    def read(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._run(False, fd, pieces)

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._run(True, fd, pieces)

    def close(self) -> None:
        self._ring.close()

    def _run(self, write: bool, fd: int, pieces: Sequence[Piece]) -> list[int]:
        if not pieces:
            return []
        numbers = [piece[:3] for piece in pieces]
        offsets, addresses, lengths = np.array(numbers, dtype=np.uint64).T.copy()
        results = np.zeros(len(pieces), dtype=np.int64)
        self._ring.run(write, fd, offsets, addresses, lengths, results, self._depth)
        found: list[int] = results.tolist()
        return found
