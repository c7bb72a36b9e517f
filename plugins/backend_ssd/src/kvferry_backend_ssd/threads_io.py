"""File I/O in threads: blocking calls, driven by aiofiles on an event loop of its own."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import aiofiles.os

from kvferry_backend_ssd.block_io import FileCalls, Piece

_Move = Callable[..., Awaitable[int]]


class ThreadsIO(FileCalls):
    """A :class:`BlockIO` with as many threads as its queue is deep, and one for the event loop.

    The loop has a thread of its own, because whoever opens a backend may be running in a loop itself.
    """

    def __init__(self, depth: int, name: str = "kvferry-ssd") -> None:
        self._workers = ThreadPoolExecutor(max_workers=depth, thread_name_prefix=f"{name}-io")
        self._loop = asyncio.new_event_loop()
        self._read: _Move = aiofiles.os.wrap(os.preadv)
        self._write: _Move = aiofiles.os.wrap(os.pwritev)
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"{name}-loop", daemon=True)
        self._thread.start()

    def read(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._all(self._read, fd, pieces)

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._all(self._write, fd, pieces)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._workers.shutdown(wait=True)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _all(self, move: _Move, fd: int, pieces: Sequence[Piece]) -> list[int]:
        if not pieces:
            return []
        return asyncio.run_coroutine_threadsafe(self._gather(move, fd, pieces), self._loop).result()

    async def _gather(self, move: _Move, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return await asyncio.gather(*(self._one(move, fd, piece) for piece in pieces))

    async def _one(self, move: _Move, fd: int, piece: Piece) -> int:
        memory = memoryview((ctypes.c_ubyte * piece.length).from_address(piece.address)).cast("B")
        done = 0
        while done < piece.length:
            try:
                moved = await move(fd, [memory[done:]], piece.offset + done, executor=self._workers)
            except OSError as error:
                return -(error.errno or errno.EIO)
            if moved == 0:
                break
            done += moved
        return done
