"""The C library's memcpy, as the baseline of what else moves bytes within one host."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

from tests.bench.turns import Run

Copy = tuple[int, int, int]
"""Address to copy to, address of the source, bytes."""


def memcpy(copies: Sequence[Copy], threads: int) -> Run:
    """One call for each copy, without the interpreter's lock, shared out among so many threads."""
    move = ctypes.CDLL(None).memmove
    move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)

    def share(mine: Sequence[Copy]) -> None:
        for to, source, length in mine:
            move(to, source, length)

    def run_once() -> None:
        helpers = [
            threading.Thread(target=share, args=(copies[number::threads],)) for number in range(1, threads)
        ]
        for helper in helpers:
            helper.start()
        share(copies[0::threads])
        for helper in helpers:
            helper.join()

    return run_once
