"""What instances of a fleet consist of: chunks, processes that stand still or die, memory that changes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

from attrs import define, field

from kvferry.control.outcomes import ChunkWrite
from tests.simulation.events import EventLoop

CHUNK, BLOCK = 8, 4
"""Tokens."""
GARBAGE = b"garbage"


def key(text: str, depth: int) -> bytes:
    """The digest of a whole chunk of a text."""
    return hashlib.sha256(f"{text}/{depth}".encode()).digest()


def half(text: str, depth: int) -> bytes:
    """That of the beginning of a chunk."""
    return hashlib.sha256(f"{text}/{depth}/half".encode()).digest()


def chunks_of(text: str, count: int, *, tail: bool) -> list[ChunkWrite]:
    """The first ``count`` chunks, as they are offered to a manager; then the beginning of the next one."""
    parents = [None, *(key(text, depth) for depth in range(count))]
    made = [
        ChunkWrite(key(text, depth), parents[depth], depth, CHUNK, ((half(text, depth), BLOCK),))
        for depth in range(count)
    ]
    if tail:
        made.append(ChunkWrite(half(text, count), parents[count], count, BLOCK))
    return made


def cell(digest: bytes, rank: int, weights: int) -> bytes:
    """The bytes of a chunk: each rank has its own, and other weights compute others."""
    return digest + bytes((rank, weights % 256))


@define(eq=False)
class Memory:
    """The slots of one rank. ``changes`` counts how often each was written."""

    cells: list[bytes]
    changes: list[int]

    @classmethod
    def of(cls, slots: int) -> Memory:
        return cls([GARBAGE] * slots, [0] * slots)

    def write(self, slot: int, content: bytes) -> None:
        self.cells[slot] = content
        self.changes[slot] += 1


@define(eq=False)
class Process:
    """Does what comes to it, unless it is dead. What comes while it stands still it does later."""

    loop: EventLoop
    alive: bool = True
    stands: bool = False
    stops: int = 0
    """How often it was made to stand still."""
    _waiting: list[tuple[str, Callable[[], object]]] = field(factory=list)

    def after(self, seconds: float, kind: str, action: Callable[[], object]) -> None:
        """Let it do something in ``seconds``."""
        self.loop.after(seconds, kind, lambda: self.do(kind, action))

    def do(self, kind: str, action: Callable[[], object]) -> None:
        """Do it now, or when it goes on, or never."""
        if self.alive and self.stands:
            self._waiting.append((kind, action))
        elif self.alive:
            action()

    def stop(self) -> None:
        self.stands = True
        self.stops += 1

    def go_on(self) -> None:
        self.stands = False
        waiting, self._waiting = self._waiting, []
        for place, (kind, action) in enumerate(waiting):
            self.after(1e-6 * place, kind, action)

    def kill(self) -> None:
        self.alive = False
        self._waiting.clear()
