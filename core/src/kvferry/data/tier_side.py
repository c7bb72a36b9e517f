"""One lower tier of one rank: carries out orders over a backend that reads and writes by key."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from attrs import define, field

from kvferry.api import (
    Backend,
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    KVFerryError,
    ReadStatus,
    Region,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.control.orders import ItemFault
from kvferry.data.arena import MemoryFileArena
from kvferry.data.engine_side import EngineSide
from kvferry.data.item_faults import fault_of, faults_of
from kvferry.data.meter import Meter, TierStatistics
from kvferry.data.priorities import leave_the_engines_core, stand_behind_the_engine
from kvferry.data.wire import (
    Cancel,
    Chunk,
    CloseTier,
    DeleteChunks,
    FetchChunks,
    OpenTier,
    StoreChunks,
    TierOrder,
)

_log = logging.getLogger(__name__)

CHUNKS_PER_MESSAGE = 2000
"""Chunks of one message that tells what a tier holds: below a megabyte as a rule."""
CLOSE_SECONDS = 10.0
"""Between two attempts to close a backend that has not ended its work."""

_READ_FAULTS = {ReadStatus.MISS: ItemFault.GONE, ReadStatus.CORRUPT: ItemFault.CORRUPT}


class TierListener(Protocol):
    """What becomes of a tier's orders. Called from any thread; must not block."""

    def content(
        self, tier: str, opening: int, chunks: Sequence[Chunk], foreign: Sequence[bytes], last: bool
    ) -> None:
        """A part of what the tier held when it was opened."""
        ...

    def closed(self, tier: str, opening: int, reason: str) -> None:
        """The tier is not open, and nothing of it is under way."""
        ...

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        """An order ended: exactly once each."""
        ...

    def filled(self, slots: Collection[int]) -> None:
        """These slots of the first tier hold chunks that were fetched. Called before :meth:`done`."""
        ...


@define(eq=False)
class _Opening:
    number: int
    backend: Backend
    context: BackendContext
    namespace: bytes
    deleting: int = 0
    """Deletions under way: what is written needs the room that they give back."""
    writes: deque[StoreChunks] = field(factory=deque)
    """Waiting for deletions."""
    tickets: dict[int, Ticket[Any]] = field(factory=dict)
    """Of fetches and writes under way, by order."""
    closing: bool = False


class TierSide:
    """Carries out what the control plane orders. Decides nothing.

    ``make_backend()`` makes a new, closed backend for every opening. ``most`` is the largest value that it
    claims to take, if it claims a limit. Slots are those of the first tier's arena, cut as ``engine`` says
    for chunks of ``chunk_tokens``.

    Threads: :meth:`take` from one thread, and it does not block; opening, recovering and closing happen on
    a thread of the tier's own. Everything else from any.
    """

    def __init__(
        self,
        name: str,
        make_backend: Callable[[], Backend],
        engine: EngineSide,
        chunk_tokens: int,
        *,
        rank: int,
        world_size: int,
        most: int | None = None,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._name = name
        self._make_backend = make_backend
        self._rank = rank
        self._world_size = world_size
        self._most = most
        self._shard = engine.shard(rank, world_size)
        self._layout = engine.layout
        self._started: tuple[Region, TierListener] | None = None
        self._lock = threading.Lock()
        self._opening: _Opening | None = None
        self._written, self._read = Meter(), Meter()
        self._jobs: queue.SimpleQueue[OpenTier | CloseTier | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self._name

    def statistics(self) -> TierStatistics:
        """What went through it since the start. Any thread."""
        with self._lock:
            return TierStatistics(
                written_bytes=self._written.bytes,
                write_seconds=self._written.seconds,
                read_bytes=self._read.bytes,
                read_seconds=self._read.seconds,
            )

    def start(self, region: Region, listener: TierListener) -> None:
        """Be ready for orders; nothing is opened yet."""
        self._started = region, listener
        self._thread = threading.Thread(target=self._run, name=f"kvferry-tier-{self._name}", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Close the backend. Idempotent. Whether nothing touches the region any more."""
        if self._thread is None:
            return True
        self._stopping.set()
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def take(self, order: TierOrder) -> None:
        """Begin to carry out an order."""
        if isinstance(order, OpenTier | CloseTier):
            self._jobs.put(order)
        elif isinstance(order, Cancel):
            opening = self._opening
            ticket = opening.tickets.get(order.id) if opening is not None else None
            if ticket is not None:
                ticket.cancel()
        else:
            self._begin(order)

    # Opening and closing, on the tier's own thread

    def _run(self) -> None:
        leave_the_engines_core()
        stand_behind_the_engine()
        while not self._stopping.is_set():
            job = self._jobs.get()
            if isinstance(job, OpenTier):
                self._open(job)
            elif isinstance(job, CloseTier):
                self._close(job.opening)
        self._close(None)

    def _open(self, order: OpenTier) -> None:
        backend = None
        try:
            context = self._context(order)
            backend = self._make_backend()
            backend.open(context)
            own, foreign = self._recovered(backend, order.namespace, context)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, the tier is told of as closed
            fault = (
                error
                if isinstance(error, KVFerryError)
                else KVFerryError(
                    f"the backend of tier {self._name} cannot be opened",
                    kind=ErrorKind.INTERNAL,
                    why=repr(error),
                )
            )
            _log.debug("kvferry: tier %s is not open: %s", self._name, fault)
            if backend is not None:
                _closed(backend, order, self._name)
            self._listener.closed(self._name, order.opening, str(fault))
            return
        with self._lock:
            self._opening = _Opening(order.opening, backend, context, order.namespace)
        # The scheduler tells of all ranks together, once the tier is in use.
        _log.debug("kvferry: tier %s is open on rank %d with %d chunks", self._name, context.rank, len(own))
        for start in range(0, max(1, len(own), len(foreign)), CHUNKS_PER_MESSAGE):
            part = slice(start, start + CHUNKS_PER_MESSAGE)
            last = start + CHUNKS_PER_MESSAGE >= max(len(own), len(foreign))
            self._listener.content(self._name, order.opening, own[part], foreign[part], last)

    def _recovered(
        self, backend: Backend, namespace: bytes, context: BackendContext
    ) -> tuple[list[Chunk], list[bytes]]:
        try:
            headers: Iterable[ChunkHeader] = backend.recover()
        except KVFerryError as error:
            if error.kind is ErrorKind.UNSUPPORTED:
                return [], []
            raise
        own: list[Chunk] = []
        foreign: list[bytes] = []
        for header in headers:
            if header.key.namespace == namespace and header.size == self._bytes_of(header.tokens):
                own.append(_chunk(header))
            else:
                foreign.append(header.key.to_bytes())
        return own, foreign

    def _close(self, number: int | None) -> None:
        with self._lock:
            opening = self._opening
            waiting: list[StoreChunks] = []
            if opening is not None and number in (None, opening.number):
                opening.closing = True
                waiting, opening.writes = list(opening.writes), deque()
        if opening is None or not opening.closing:
            if number is not None:
                self._listener.closed(self._name, number, "")
            return
        for order in waiting:
            self._fail(order.id, len(order.chunks), ItemFault.CANCELLED, "the tier is being closed")
        while True:
            try:
                opening.backend.close(opening.context.clock() + CLOSE_SECONDS)
                break
            except KVFerryError as error:
                _log.warning("kvferry: tier %s does not end: %s", self._name, error)
                if error.kind is not ErrorKind.TIMEOUT:
                    break
        with self._lock:
            self._opening = None
        self._listener.closed(self._name, opening.number, "")

    # Orders

    def _begin(self, order: StoreChunks | FetchChunks | DeleteChunks) -> None:
        items = len(order.chunks if isinstance(order, StoreChunks) else order.digests)
        with self._lock:
            opening = self._opening
        if opening is None or opening.number != order.opening or opening.closing:
            self._fail(order.id, items, ItemFault.CANCELLED, "the tier is not open")
            return
        match order:
            case FetchChunks():
                self._fetch(opening, order)
            case DeleteChunks():
                with self._lock:
                    opening.deleting += 1
                self._delete(opening, order, order.digests)
            case StoreChunks():
                with self._lock:
                    closing = opening.closing
                    if not closing:
                        opening.writes.append(order)
                        opening.deleting += bool(order.evicted)
                if closing:
                    self._fail(order.id, items, ItemFault.CANCELLED, "the tier is being closed")
                elif order.evicted:
                    self._delete(opening, order, order.evicted)
                else:
                    self._write_waiting(opening)

    def _fetch(self, opening: _Opening, order: FetchChunks) -> None:
        batch = [
            (ChunkKey(opening.namespace, digest), self._span(slot, tokens))
            for digest, tokens, slot in zip(order.digests, order.tokens, order.slots, strict=True)
        ]

        def done(ticket: Ticket[ReadStatus]) -> None:
            faults, reason = faults_of(ticket.results, ReadStatus.FOUND, _READ_FAULTS)
            good = [slot for place, slot in enumerate(order.slots) if place not in faults]
            if good:
                self._listener.filled(good)
            self._end(opening, order.id, faults, reason)

        self._submit(
            opening,
            order,
            self._read,
            batch,
            lambda at: opening.backend.read(batch, at),
            ReadStatus.FOUND,
            done,
        )

    def _delete(self, opening: _Opening, order: DeleteChunks | StoreChunks, digests: Sequence[bytes]) -> None:
        """Delete for an order, which was counted in ``opening.deleting``. What is to be stored after a
        deletion that failed is not: there may be no room, or something else under its key."""
        keys = [_key(opening.namespace, digest) for digest in digests]

        def done(faults: dict[int, ItemFault], reason: str) -> None:
            if faults:
                # The scheduler hears of it, and tells of the tier as a whole.
                _log.debug(
                    "kvferry: tier %s: %d chunks were not deleted: %s", self._name, len(faults), reason
                )
            spoilt = False
            with self._lock:
                opening.deleting -= 1
                if faults and isinstance(order, StoreChunks) and order in opening.writes:
                    opening.writes.remove(order)
                    spoilt = True
            if isinstance(order, DeleteChunks):
                self._listener.done(order.id, faults, reason)
            elif spoilt:
                self._fail(order.id, len(order.chunks), next(iter(faults.values())), reason)
            self._write_waiting(opening)

        def told(ticket: Ticket[DeleteStatus]) -> None:
            done(*faults_of(ticket.results, DeleteStatus.DELETED, {DeleteStatus.ABSENT: None}))

        try:
            ticket = opening.backend.delete(keys, opening.context.clock() + order.seconds)
        except Exception as error:  # noqa: BLE001 - an order ends whatever a backend does
            done(dict.fromkeys(range(len(keys)), fault_of(error)), str(error))
            return
        ticket.on_done(told)

    def _write_waiting(self, opening: _Opening) -> None:
        while True:
            with self._lock:
                if opening.deleting or not opening.writes:
                    return
                order = opening.writes.popleft()
            self._write(opening, order)

    def _write(self, opening: _Opening, order: StoreChunks) -> None:
        batch = [
            (self._header(opening.namespace, chunk), self._span(slot, chunk.tokens))
            for chunk, slot in zip(order.chunks, order.slots, strict=True)
        ]

        def done(ticket: Ticket[WriteStatus]) -> None:
            mapping = {WriteStatus.EXISTS: None, WriteStatus.NO_SPACE: ItemFault.NO_SPACE}
            faults, reason = faults_of(ticket.results, WriteStatus.STORED, mapping)
            self._end(opening, order.id, faults, reason)

        self._submit(
            *(opening, order, self._written, batch),
            lambda at: opening.backend.write(batch, at),
            WriteStatus.STORED,
            done,
        )

    def _submit(
        self,
        opening: _Opening,
        order: StoreChunks | FetchChunks,
        meter: Meter,
        batch: Sequence[tuple[object, Span]],
        begin: Callable[[float], Ticket[Any]],
        good: object,
        done: Callable[[Ticket[Any]], None],
    ) -> None:
        clock = opening.context.clock

        def ended(ticket: Ticket[Any]) -> None:
            pairs = zip(batch, ticket.results, strict=True)
            moved = sum(span.length for (_, span), result in pairs if result.status is good)
            with self._lock:
                meter.end(clock(), moved)
            done(ticket)

        with self._lock:
            meter.begin(clock())
        try:
            ticket = begin(clock() + order.seconds)
        except Exception as error:  # noqa: BLE001 - an order ends whatever a backend does
            with self._lock:
                meter.end(clock(), 0)
            self._fail(order.id, len(batch), fault_of(error), str(error))
            return
        opening.tickets[order.id] = ticket
        ticket.on_done(ended)

    def _end(self, opening: _Opening, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        opening.tickets.pop(order, None)
        self._listener.done(order, faults, reason)

    def _fail(self, order: int, items: int, fault: ItemFault, reason: str) -> None:
        self._listener.done(order, dict.fromkeys(range(items), fault), reason)

    # Memory

    @property
    def _region(self) -> Region:
        assert self._started is not None, "start() was not called"
        return self._started[0]

    @property
    def _listener(self) -> TierListener:
        assert self._started is not None, "start() was not called"
        return self._started[1]

    def _context(self, order: OpenTier) -> BackendContext:
        """What core knows of a backend."""
        slot_bytes = self._layout.total_bytes
        return BackendContext(
            name=self._name,
            rank=self._rank,
            make_arena=MemoryFileArena,
            world_size=self._world_size,
            instance=order.instance,
            namespace=order.namespace,
            shard=self._shard,
            regions={self._region.name: self._region},
            max_value_bytes=slot_bytes if self._most is None else min(self._most, slot_bytes),
            max_header_bytes=order.header_bytes,
        )

    def _bytes_of(self, tokens: int) -> int:
        return self._layout.value_bytes(tokens, self._chunk_tokens)

    def _span(self, slot: int, tokens: int) -> Span:
        return Span(self._region.name, slot * self._layout.total_bytes, self._bytes_of(tokens))

    def _header(self, namespace: bytes, chunk: Chunk) -> ChunkHeader:
        return ChunkHeader(
            key=ChunkKey(namespace, chunk.digest),
            parent=chunk.parent,
            depth=chunk.depth,
            tokens=chunk.tokens,
            size=self._bytes_of(chunk.tokens),
            owner=chunk.owner,
            model=chunk.model,
            aliases=chunk.aliases,
            expires=chunk.expires,
        )


def _chunk(header: ChunkHeader) -> Chunk:
    return Chunk(
        header.key.digest,
        header.parent,
        header.depth,
        header.tokens,
        header.owner,
        header.model,
        header.aliases,
        header.expires,
    )


def _key(namespace: bytes, digest: bytes) -> ChunkKey:
    """A digest of ours, or the full key of somebody else's chunk."""
    return ChunkKey(namespace, digest) if len(digest) == len(namespace) else ChunkKey.from_bytes(digest)


def _closed(backend: Backend, order: OpenTier, name: str) -> None:
    try:
        backend.close(float("inf"))
    except Exception as error:  # noqa: BLE001 - it was not open
        _log.debug("kvferry: tier %s: %s", name, error)
