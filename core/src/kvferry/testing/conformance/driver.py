"""One keyed backend, driven the way core drives it, with a watch on everything it must not do."""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from kvferry.api import (
    Backend,
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ItemResult,
    ProbeStatus,
    ReadStatus,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.api.memory import ArenaOptions
from kvferry.data.arena import MemoryFileArena
from kvferry.testing.guarded import GuardedMemory


def digest(*parts: object) -> bytes:
    """32 bytes that depend on the parts alone."""
    return hashlib.sha256(repr(parts).encode()).digest()


def value_of(key: ChunkKey, size: int, edition: int = 0) -> bytes:
    """``size`` bytes that belong to no other key or edition."""
    return hashlib.shake_128(key.to_bytes() + bytes([edition])).digest(size)


def header_of(key: ChunkKey, size: int, number: int = 0, **facts: Any) -> ChunkHeader:
    """A header with something in every field; ``number`` is the depth."""
    return evolve(
        ChunkHeader(
            key=key,
            parent=digest("parent", number) if number else None,
            depth=number,
            tokens=16 * (1 + number % 16),
            size=size,
            owner=f"salt-{number % 3}" if number % 3 else "",
            model="conformance/model",
            aliases=((digest("alias", number), 16),) if number % 2 else (),
        ),
        **facts,
    )


def told(*results: ItemResult[Any]) -> str:
    """Results in words; of a failure all that its error says, and where in the backend it was raised."""
    if len(results) > 1:
        failed = [result for result in results if result.error is not None]
        statuses = ", ".join(str(result.status) for result in results)
        return "\n".join([statuses, *({told(each): None for each in failed})])
    (result,) = results
    error = result.error
    if error is None:
        return str(result.status)
    lines = [f"{result.status}: {error}"]
    raised = error.__cause__ or (error if error.__traceback__ else None)
    if raised is not None:
        lines += ["raised by the backend:", *traceback.format_exception(raised)]
    return "\n".join(line.rstrip() for line in lines)


def expect_status(result: ItemResult[Any], *allowed: Any) -> None:
    """The status of one result is one of these."""
    assert result.status in allowed, f"expected {' or '.join(map(str, allowed))}, got {told(result)}"


@frozen
class Found:
    """What a read gave: its result, and the bytes if they count."""

    result: ItemResult[ReadStatus]
    data: bytes | None

    @property
    def status(self) -> ReadStatus:
        return self.result.status


@define
class Driver:
    """An open backend. Everything goes through tickets that are waited for and counted.

    ``patience`` is in seconds: a ticket that does not end by then fails the law.
    """

    backend: Backend
    context: BackendContext
    memory: GuardedMemory
    patience: float
    recovered: list[ChunkHeader] = field(factory=list)
    tickets: list[Ticket[Any]] = field(factory=list)
    calls: Counter[int] = field(factory=Counter)
    """How often the listener of each ticket was called, by the ticket's place in ``tickets``."""
    _lock: threading.Lock = field(factory=threading.Lock)

    def deadline(self) -> float:
        return self.context.clock() + self.patience

    # -- submitting ------------------------------------------------------------------------------

    def submit_write(
        self, chunks: Sequence[tuple[ChunkHeader, bytes]], deadline: float | None = None
    ) -> tuple[Ticket[WriteStatus], list[Span]]:
        spans = [self.memory.take(value) for _, value in chunks]
        batch = [(header, span) for (header, _), span in zip(chunks, spans, strict=True)]
        ticket = self.backend.write(batch, self.deadline() if deadline is None else deadline)
        return self._watch(ticket), spans

    def submit_read(
        self, wanted: Sequence[tuple[ChunkKey, int]], deadline: float | None = None
    ) -> tuple[Ticket[ReadStatus], list[Span]]:
        spans = [self.memory.reserve(size) for _, size in wanted]
        batch = [(key, span) for (key, _), span in zip(wanted, spans, strict=True)]
        ticket = self.backend.read(batch, self.deadline() if deadline is None else deadline)
        return self._watch(ticket), spans

    def submit_delete(self, keys: Sequence[ChunkKey], deadline: float | None = None) -> Ticket[DeleteStatus]:
        return self._watch(self.backend.delete(keys, self.deadline() if deadline is None else deadline))

    def submit_probe(self, keys: Sequence[ChunkKey], deadline: float | None = None) -> Ticket[ProbeStatus]:
        return self._watch(self.backend.probe(keys, self.deadline() if deadline is None else deadline))

    def _watch(self, ticket: Ticket[Any]) -> Ticket[Any]:
        with self._lock:
            number = len(self.tickets)
            self.tickets.append(ticket)
        ticket.on_done(lambda _ticket: self.calls.update([number]))
        return ticket

    def finish(self, ticket: Ticket[Any], spans: Sequence[Span] = (), scribble: bool = False) -> None:
        """Wait for a ticket. From then on its spans must stay as they are."""
        assert ticket.wait(self.patience), f"a ticket of {ticket.items} items never ended"
        assert len(ticket.results) == ticket.items
        for span in spans:
            self.memory.settle(span, scribble)

    # -- one after the other ---------------------------------------------------------------------

    def write(
        self, chunks: Sequence[tuple[ChunkHeader, bytes]], deadline: float | None = None
    ) -> list[ItemResult[WriteStatus]]:
        """Write, wait, and use the spans for something else at once."""
        ticket, spans = self.submit_write(chunks, deadline)
        self.finish(ticket, spans, scribble=True)
        return list(ticket.results)

    def store(self, chunks: Sequence[tuple[ChunkHeader, bytes]]) -> None:
        """Write what must be stored."""
        results = self.write(chunks)
        statuses = [result.status for result in results]
        assert statuses == [WriteStatus.STORED] * len(chunks), told(*results)

    def read(self, wanted: Sequence[tuple[ChunkKey, int]], deadline: float | None = None) -> list[Found]:
        ticket, spans = self.submit_read(wanted, deadline)
        self.finish(ticket, spans)
        return [
            Found(result, self.memory.bytes_of(span) if result.status is ReadStatus.FOUND else None)
            for result, span in zip(ticket.results, spans, strict=True)
        ]

    def read_one(self, key: ChunkKey, size: int) -> Found:
        return self.read([(key, size)])[0]

    def expect(self, chunks: Sequence[tuple[ChunkHeader, bytes]]) -> None:
        """Read what must be there."""
        found = self.read([(header.key, header.size) for header, _ in chunks])
        for (header, value), each in zip(chunks, found, strict=True):
            assert each.status is ReadStatus.FOUND, f"{header.size} bytes: {told(each.result)}"
            assert each.data == value, f"other bytes than were stored, for {header.size} bytes"

    def expect_missing(self, wanted: Sequence[tuple[ChunkKey, int]]) -> None:
        results = [each.result for each in self.read(wanted)]
        statuses = [result.status for result in results]
        assert statuses == [ReadStatus.MISS] * len(wanted), told(*results)

    def expect_no_data(self, key: ChunkKey, size: int, about: str = "") -> None:
        """Read what must be neither data nor a failure."""
        result = self.read_one(key, size).result
        right = result.status in (ReadStatus.MISS, ReadStatus.CORRUPT)
        assert right, f"expected MISS or CORRUPT{about}, got {told(result)}"

    def delete(self, keys: Sequence[ChunkKey]) -> list[DeleteStatus]:
        """Delete what can be deleted: a failure is none of the answers."""
        ticket = self.submit_delete(keys)
        self.finish(ticket)
        return self._answers(ticket, DeleteStatus.FAILED)

    def probe(self, keys: Sequence[ChunkKey]) -> list[ProbeStatus]:
        """Ask for what can be told: a failure is none of the answers."""
        ticket = self.submit_probe(keys)
        self.finish(ticket)
        return self._answers(ticket, ProbeStatus.FAILED)

    def _answers(self, ticket: Ticket[Any], failed: Any) -> list[Any]:
        statuses = [result.status for result in ticket.results]
        assert failed not in statuses, told(*ticket.results)
        return statuses

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        self.backend.close(self.deadline())

    def trespasses(self) -> list[str]:
        """What the backend did and must not have done, in words."""
        found = self.memory.trespasses()
        for number, ticket in enumerate(self.tickets):
            if ticket.completions != 1 or self.calls[number] != 1:
                found.append(
                    f"ticket {number} of {ticket.items} items was completed {ticket.completions} times, "
                    f"and its listener called {self.calls[number]} times"
                )
        return found


def make_context(memory: GuardedMemory, facts: Mapping[str, Any]) -> BackendContext:
    """A context as core would hand it out."""
    base = BackendContext(
        name="tier",
        rank=0,
        make_arena=_make_arena,
        world_size=1,
        instance="conformance",
        shard=digest("shard", 0),
        regions={memory.name: memory.region},
        clock=time.monotonic,
    )
    return evolve(base, **facts)


def _make_arena(name: str, capacity: int, options: ArenaOptions) -> MemoryFileArena:
    return MemoryFileArena(name, capacity, options)


def in_threads(count: int, work: Any) -> None:
    """Run ``work(number)`` in that many threads at once; what one raises is raised here."""
    raised: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run(number: int) -> None:
        try:
            barrier.wait()
            work(number)
        except BaseException as error:  # noqa: BLE001 - told to the test below
            raised.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]
