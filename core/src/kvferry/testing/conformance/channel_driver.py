"""Open channels, driven the way core drives them, with a watch on everything they must not do."""

from __future__ import annotations

import ctypes
import hashlib
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from attrs import define, field, frozen

from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    RemoteOp,
    Span,
    Ticket,
    TransferStatus,
)
from kvferry.testing.guarded import GuardedMemory

_PERIOD = 65_537
"""A prime number, so that no page and no piece of a common size looks like another."""
_FENCE = 0x3C
"""Between the spans of memory that is registered later; no other side has it."""

Results = Sequence[ItemResult[TransferStatus]]


def told(results: Results) -> str:
    """Results in words; of failures all that their errors say, and where in the channel they were raised."""
    lines = [", ".join(result.status.name for result in results) or "no operations"]
    for error in {str(each.error): each.error for each in results if each.error is not None}.values():
        lines.append(f"{error.kind}: {error}")
        raised = error.__cause__ or (error if error.__traceback__ else None)
        if raised is not None:
            lines += ["raised by the channel:", *traceback.format_exception(raised)]
    return "\n".join(line.rstrip() for line in lines)


def expect_failed(result: ItemResult[TransferStatus], *kinds: ErrorKind) -> None:
    """The operation failed, with one of these kinds."""
    error = result.error
    named = " or ".join(kind.name for kind in kinds)
    assert error is not None, f"expected a failure of kind {named}, got DONE"
    assert error.kind in kinds, f"expected a failure of kind {named}, got {told([result])}"


def expect_raised(error: KVFerryError, what: str, *kinds: ErrorKind) -> None:
    """What was raised is of one of these kinds."""
    named = " or ".join(kind.name for kind in kinds)
    assert error.kind in kinds, f"{what} has to raise the kind {named}, not {error.kind.name}: {error}"


@frozen
class Move:
    """One operation, the spans on both of its sides, and the bytes that it moves."""

    operation: RemoteOp
    local: Span
    remote: Span
    data: bytes


@define(eq=False)
class Side:
    """A channel and its memory. ``patience`` is in seconds: what does not end by then fails the law."""

    channel: Channel
    context: ChannelContext
    memory: GuardedMemory
    patience: float
    memories: list[GuardedMemory] = field(factory=list)
    """Others that were registered later."""
    tickets: list[Ticket[TransferStatus]] = field(factory=list)
    calls: Counter[int] = field(factory=Counter)
    """How often the listener of each ticket was called, by the ticket's place in ``tickets``."""
    _lock: threading.Lock = field(factory=threading.Lock)

    def deadline(self, seconds: float | None = None) -> float:
        return self.context.clock() + (self.patience if seconds is None else seconds)

    def register(self, name: str, length: int) -> GuardedMemory:
        """Register new memory."""
        memory = GuardedMemory(name, length, fence=_FENCE)
        self.channel.register(memory.region)
        self.memories.append(memory)
        return memory

    def connect(self, peer: Side) -> Connection:
        return self.channel.connect(peer.channel.export(), self.deadline())

    def submit(
        self, verb: str, connection: Connection, operations: Sequence[RemoteOp], deadline: float | None = None
    ) -> Ticket[TransferStatus]:
        """Call ``read`` or ``write``, and watch the ticket."""
        call = self.channel.read if verb == "read" else self.channel.write
        ticket = call(connection, operations, self.deadline() if deadline is None else deadline)
        assert ticket.items == len(operations), f"{ticket.items} results for {len(operations)} operations"
        with self._lock:
            number = len(self.tickets)
            self.tickets.append(ticket)
        ticket.on_done(lambda _ticket: self.calls.update([number]))
        return ticket

    def close(self) -> None:
        self.channel.close(self.deadline())

    def trespasses(self) -> list[str]:
        """What was done and must not have been, in words."""
        found = [text for memory in (self.memory, *self.memories) for text in memory.trespasses()]
        for number, ticket in enumerate(self.tickets):
            if ticket.completions != 1 or self.calls[number] != 1:
                found.append(
                    f"ticket {number} of {ticket.items} operations was completed {ticket.completions} times, "
                    f"and its listener called {self.calls[number]} times"
                )
        return found


class LentMemory(Protocol):
    """What :class:`GuardedMemory` can do, wherever it lies."""

    def take(self, data: bytes) -> Span: ...
    def reserve(self, length: int) -> Span: ...
    def bytes_of(self, span: Span) -> bytes: ...
    def settle(self, span: Span, scribble: bool = False) -> None: ...


@define(eq=False)
class Lane:
    """A connection of ``near`` to whoever has the memory ``theirs``, and operations over it. Threads: any."""

    near: Side
    theirs: LentMemory
    connection: Connection
    gone: bool = False
    """Whether the peer is dead, and its memory with it."""

    # -- operations ------------------------------------------------------------------------------

    def reading(self, data: bytes) -> Move:
        """An operation that is to bring ``data``, which lies in the peer's memory."""
        remote, local = self.theirs.take(data), self.near.memory.reserve(len(data))
        return Move(RemoteOp(local, remote.region, remote.offset), local, remote, data)

    def writing(self, data: bytes) -> Move:
        """An operation that is to take ``data`` from our memory."""
        remote, local = self.theirs.reserve(len(data)), self.near.memory.take(data)
        return Move(RemoteOp(local, remote.region, remote.offset), local, remote, data)

    def moves(self, verb: str, contents: Sequence[bytes]) -> list[Move]:
        make = self.reading if verb == "read" else self.writing
        return [make(data) for data in contents]

    def submit(
        self, verb: str, moves: Sequence[Move], deadline: float | None = None
    ) -> Ticket[TransferStatus]:
        return self.near.submit(verb, self.connection, [move.operation for move in moves], deadline)

    # -- their end -------------------------------------------------------------------------------

    def wait(self, ticket: Ticket[TransferStatus]) -> Results:
        assert ticket.wait(self.near.patience), f"a ticket of {ticket.items} operations never ended"
        assert len(ticket.results) == ticket.items
        return ticket.results

    def settle(self, verb: str, move: Move, result: ItemResult[TransferStatus]) -> None:
        """The ticket has ended: the local span must stay from now on, and of what is done the bytes must
        be in place. The sources are used for something else at once."""
        done = result.status is TransferStatus.DONE
        if done and not (self.gone and verb == "write"):
            arrived = (
                self.near.memory.bytes_of(move.local) if verb == "read" else self.theirs.bytes_of(move.remote)
            )
            assert arrived == move.data, (
                f"a {verb} of {len(move.data)} bytes is DONE, and other bytes lie at its destination"
            )
        # Bytes of a failed read mean nothing, and nobody writes there any more either.
        self.near.memory.settle(move.local, scribble=verb == "write" or not done)
        if self.gone:
            return
        if verb == "read":
            self.theirs.settle(move.remote, scribble=True)
        elif done:  # of a failed one the peer's span may be written until the connection is closed
            self.theirs.settle(move.remote)

    def finish(self, verb: str, ticket: Ticket[TransferStatus], moves: Sequence[Move]) -> Results:
        """Wait for a ticket, and settle what it was about."""
        results = self.wait(ticket)
        for move, result in zip(moves, results, strict=True):
            self.settle(verb, move, result)
        return results

    def attempt(self, verb: str, contents: Sequence[bytes], deadline: float | None = None) -> Results:
        """Move these bytes, and see what becomes of it."""
        moves = self.moves(verb, contents)
        return self.finish(verb, self.submit(verb, moves, deadline), moves)

    def expect(self, verb: str, contents: Sequence[bytes]) -> None:
        """Move what must arrive."""
        results = self.attempt(verb, contents)
        assert all(result.status is TransferStatus.DONE for result in results), f"{verb}: {told(results)}"

    def finish_done(self, verb: str, ticket: Ticket[TransferStatus], moves: Sequence[Move]) -> None:
        """Wait for what must arrive."""
        results = self.finish(verb, ticket, moves)
        assert all(result.status is TransferStatus.DONE for result in results), f"{verb}: {told(results)}"

    def expect_all_failed(self, verb: str, contents: Sequence[bytes], *kinds: ErrorKind) -> None:
        """Move what must not arrive."""
        for result in self.attempt(verb, contents):
            expect_failed(result, *kinds)


@define(eq=False)
class Way(Lane):
    """A lane to a side of this process."""

    far: Side = field(kw_only=True)

    @classmethod
    def between(cls, near: Side, far: Side, connection: Connection) -> Way:
        return cls(near, far.memory, connection, far=far)


def poke(memory: GuardedMemory, offset: int, data: bytes) -> None:
    """Put bytes somewhere, fences and all."""
    ctypes.memmove(memory.region.address + offset, data, len(data))


def pattern(length: int, *of: object) -> bytes:
    """Bytes that depend on the arguments alone, and are the same again only after ``_PERIOD`` bytes."""
    block = hashlib.shake_128(repr((length, of)).encode()).digest(min(length, _PERIOD))
    return (block * (length // _PERIOD + 1))[:length]
