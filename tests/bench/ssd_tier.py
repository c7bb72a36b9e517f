"""The SSD backend as the benches drive it: so many chunks under way at once."""

from __future__ import annotations

import ctypes
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from kvferry.api import (
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ReadStatus,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.data.arena import MemoryFileArena

PAGE = 4096
CHUNK_TOKENS = 256
PROMPT_CHUNKS = 64
NAMESPACE = bytes(32)
SECONDS = 300.0
REGION = "bench"
ARENA_BYTES = 2 << 30
"""A tier in memory has gigabytes. The first pages that a process gets are single ones, scattered over the
machine, with which direct I/O is up to half as fast; the end of a large arena is as most of a tier."""


def digest(number: int, tokens: int = CHUNK_TOKENS) -> bytes:
    return hashlib.blake2b(b"%d/%d" % (number, tokens), digest_size=32).digest()


def header(number: int, size: int) -> ChunkHeader:
    """Of a chunk with one further name, in a prompt of ``PROMPT_CHUNKS``."""
    depth = number % PROMPT_CHUNKS
    return ChunkHeader(
        key=ChunkKey(NAMESPACE, digest(number)),
        parent=digest(number - 1) if depth else None,
        depth=depth,
        tokens=CHUNK_TOKENS,
        size=size,
        aliases=((digest(number, CHUNK_TOKENS // 2), CHUNK_TOKENS // 2),),
    )


def capacity_for(chunks: int, chunk_bytes: int) -> int:
    """Enough for so many and a few more, with what the format needs beside them."""
    return (chunks + 8) * (chunk_bytes + PAGE + 1040) + (1 << 20)


class SSDTier:
    """An open backend of ``chunks`` chunks in ``folder``, and memory for ``window`` of them.

    ``before`` bytes of memory lie in front of that. The memory holds random bytes, and the number of its
    chunk at the beginning of each. Times are seconds from the first submission to the last completion.
    """

    def __init__(
        self,
        folder: Path,
        chunk_bytes: int,
        chunks: int,
        window: int,
        *,
        direct: bool = True,
        depth: int = 32,
        before: int = ARENA_BYTES,
    ) -> None:
        # Here because whoever lacks the plugin still has the other rows.
        from kvferry_backend_ssd.backend import SSDBackend
        from kvferry_backend_ssd.options import SSDOptions

        self.chunk_bytes, self.chunks, self.window = chunk_bytes, chunks, window
        self._before = before
        options = SSDOptions(path=str(folder), direct=direct, queue_depth=depth)
        self._backend = SSDBackend(options, capacity_for(chunks, chunk_bytes))
        self._arena = MemoryFileArena(REGION, before + chunk_bytes * window)

    def __enter__(self) -> Self:
        region = self._arena.open()
        self._arena.wait(SECONDS)
        used = self.chunk_bytes * self.window
        memory = (ctypes.c_ubyte * used).from_address(region.address + self._before)
        self._memory = np.frombuffer(memory, np.uint8)
        self._memory[:] = np.random.default_rng(1).integers(0, 256, used, np.uint8)
        context = BackendContext(
            name=REGION,
            rank=0,
            make_arena=lambda name, length, _options: MemoryFileArena(name, length),
            instance="bench",
            namespace=NAMESPACE,
            shard=bytes(32),
            regions={REGION: region},
            operation_seconds=SECONDS,
            max_value_bytes=self.chunk_bytes,
        )
        self._backend.open(context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._backend.close(time.monotonic() + SECONDS)
        del self._memory
        self._arena.close()

    @property
    def direct(self) -> bool:
        return self._backend.direct

    def recover(self) -> list[ChunkHeader]:
        return list(self._backend.recover())

    def write(self) -> float:
        """Store all chunks; each counts from the moment when it would survive a power cut."""
        headers = self._headers(range(self.chunks))

        def submit(number: int, place: int) -> Ticket[Any]:
            self._stamps()[place] = number
            item = (headers[number], self._span(place))
            return self._backend.write([item], time.monotonic() + SECONDS)

        return self._slide(submit, WriteStatus.STORED)

    def read(self) -> float:
        """Load all chunks; of each it is looked at whether it is the right one."""
        self._stamps()[:] = self.chunks
        keys = [each.key for each in self._headers(range(self.chunks))]

        def submit(number: int, place: int) -> Ticket[Any]:
            return self._backend.read([(keys[number], self._span(place))], time.monotonic() + SECONDS)

        return self._slide(submit, ReadStatus.FOUND)

    def clear(self) -> None:
        keys = [each.key for each in self._headers(range(self.chunks))]
        self._finish(self._backend.delete(keys, time.monotonic() + SECONDS), DeleteStatus.DELETED)

    def batch(self, numbers: Sequence[int], *, write: bool) -> float:
        """One batch of at most ``window`` chunks."""
        deadline = time.monotonic() + SECONDS
        headers = self._headers(numbers)
        spans = [self._span(place) for place in range(len(numbers))]
        if write:
            self._stamps()[: len(numbers)] = numbers
        began = time.perf_counter()
        ticket: Ticket[Any]
        if write:
            ticket = self._backend.write(list(zip(headers, spans, strict=True)), deadline)
        else:
            ticket = self._backend.read(
                [(each.key, span) for each, span in zip(headers, spans, strict=True)], deadline
            )
        self._finish(ticket, WriteStatus.STORED if write else ReadStatus.FOUND)
        return time.perf_counter() - began

    def _slide(self, submit: Callable[[int, int], Ticket[Any]], good: Any) -> float:
        """Keep ``window`` chunks under way, as a disk's queue of that depth does: the next one begins when
        any of them ends."""
        ended: SimpleQueue[tuple[int, int, Ticket[Any] | None]] = SimpleQueue()
        for place in range(self.window):
            ended.put((place, 0, None))
        stamps = self._stamps()
        began = time.perf_counter()
        for number in range(self.chunks + self.window):
            place, last, ticket = ended.get(timeout=SECONDS)
            if ticket is not None:
                self._finish(ticket, good)
                if stamps[place] != last:
                    raise RuntimeError(f"chunk {last} came with the bytes of another")
            if number < self.chunks:
                ticket = submit(number, place)
                ticket.on_done(lambda done, at=place, which=number: ended.put((at, which, done)))
        return time.perf_counter() - began

    def _headers(self, numbers: Sequence[int]) -> list[ChunkHeader]:
        return [header(number, self.chunk_bytes) for number in numbers]

    def _span(self, place: int) -> Span:
        return Span(REGION, self._before + place * self.chunk_bytes, self.chunk_bytes)

    def _stamps(self) -> NDArray[np.uint64]:
        """First eight bytes of every place in memory: the number of the chunk that is there."""
        stamps: NDArray[np.uint64] = self._memory.view(np.uint64)[:: self.chunk_bytes // 8]
        return stamps

    def _finish(self, ticket: Ticket[Any], good: Any) -> None:
        if not ticket.wait(SECONDS):
            raise RuntimeError("the backend does not answer")
        for result in ticket.results:
            if result.status is not good:
                raise RuntimeError(f"{result.status}: {result.error}")
