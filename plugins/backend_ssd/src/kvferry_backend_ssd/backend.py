"""A tier in a folder on a local disk."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from kvferry.api import (
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    KVFerryError,
    ProbeStatus,
    ReadStatus,
    Retry,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.api.tickets import Status
from kvferry_backend_ssd.block_io import BlockIO, BlockIOFactory
from kvferry_backend_ssd.choice import choose_io
from kvferry_backend_ssd.committing import Committing
from kvferry_backend_ssd.folder import SetFolder
from kvferry_backend_ssd.intake import Intake
from kvferry_backend_ssd.jobs import Job, Queue
from kvferry_backend_ssd.layout import round_up
from kvferry_backend_ssd.names import store_file, store_tag
from kvferry_backend_ssd.options import SSDOptions
from kvferry_backend_ssd.owner import OWNER_BYTES
from kvferry_backend_ssd.reading import ReadLane
from kvferry_backend_ssd.recovery import recover
from kvferry_backend_ssd.store import Counters, Store
from kvferry_backend_ssd.store_file import StoreFile
from kvferry_backend_ssd.storing import WriteLane
from kvferry_backend_ssd.superblock import Superblock
from kvferry_backend_ssd.table import Table

_log = logging.getLogger(__name__)

READ_LANES = 4
WRITE_LANES = 2
"""While one lane computes checksums or waits for its last bytes, the others keep the disk busy."""


class _State(enum.Enum):
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


class SSDBackend:
    """Chunks in the slots of one large file. See :class:`kvferry.api.Backend`, and the page on the
    format for what lies where.

    ``make_io`` makes the objects through which every byte goes, one for each lane; by default what the
    options choose. Threads of its own: ``WRITE_LANES`` that write values and delete, each with one that
    computes checksums and writes entries, and ``READ_LANES`` that read.
    """

    def __init__(self, options: SSDOptions, capacity: int, make_io: BlockIOFactory | None = None) -> None:
        self._options = options
        self._capacity = capacity
        self._make_io = make_io
        self._state = _State.NEW
        self._store: Store | None = None
        self._folder: SetFolder | None = None
        self._io: BlockIO | None = None
        """The one of ``open`` and ``recover``."""
        self._writes: Queue | None = None
        self._reads: Queue | None = None
        self._threads: list[threading.Thread] = []

    # -- opening ---------------------------------------------------------------------------------

    def open(self, context: BackendContext) -> None:
        if self._state is not _State.NEW:
            raise KVFerryError(
                "a backend is opened once",
                kind=ErrorKind.INTERNAL,
                where=context.name,
                why=f"it is {self._state.value}",
                remedy="make another one",
            )
        if self._make_io is None:
            chosen, make_io = choose_io(self._options.io, context.name)
            reached = chosen.value
        else:
            make_io, reached = self._make_io, "I/O of its own"
        slot_bytes = round_up(context.max_value_bytes or self._options.slot) + context.max_header_bytes
        name = store_file(context.shard, slot_bytes)
        tag = store_tag(context.instance, context.rank, context.shard, slot_bytes)
        folder = SetFolder(self._options.path, context)
        folder.open(name, context.operation_seconds / 2)
        file = StoreFile(folder, name, Superblock(slot_bytes, tag), self._capacity - OWNER_BYTES)
        made: list[BlockIO] = []
        try:
            made.extend(make_io(self._options.queue_depth) for _ in range(1 + 2 * WRITE_LANES + READ_LANES))
            file.open(made[0], self._options.direct)
        except BaseException:
            for io in made:
                io.close()
            folder.close()
            raise
        self._start(Store(file, tag, context), made)
        self._folder = folder
        self._state = _State.OPEN
        _log.info(
            "kvferry: tier %s has room for %d slots of %d bytes in %s, with %s %s the page cache",
            context.name,
            file.slots,
            slot_bytes,
            file.path,
            reached,
            "past" if file.direct else "through",
        )

    def _start(self, store: Store, made: Sequence[BlockIO]) -> None:
        clock = store.context.clock
        self._store, self._io = store, made[0]
        self._writes, self._reads = Queue(clock), Queue(clock)
        intake, table = Intake(store, self._writes), Table(store)
        commits = Committing(store, intake, table)
        lanes = {}
        ios = iter(made[1:])
        for number in range(WRITE_LANES):
            lane = WriteLane(store, self._writes, intake, commits, table, next(ios), next(ios))
            lanes[f"write-{number}"] = lane.run
        for number, io in enumerate(ios):
            lanes[f"read-{number}"] = ReadLane(store, self._reads, io).run
        for name, run in lanes.items():
            name = f"kvferry-{store.context.name}-{name}"
            thread = threading.Thread(target=run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def recover(self) -> Iterator[ChunkHeader]:
        """See :meth:`kvferry.api.Backend.recover`: the chunk that was used longest ago comes first."""
        store = self._opened()
        assert self._io is not None
        return recover(store, self._io)

    @property
    def direct(self) -> bool:
        """Whether bytes go past the page cache."""
        return self._opened().file.direct

    @property
    def counters(self) -> Counters:
        return self._opened().counters

    # -- work ------------------------------------------------------------------------------------

    def probe(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[ProbeStatus]:
        raise KVFerryError(
            "this backend has no probe()",
            kind=ErrorKind.UNSUPPORTED,
            why="its spec does not claim to be shared",
            remedy="look at the capabilities first",
        )

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        return self._submit(self._writes, batch, WriteStatus.FAILED, deadline)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        return self._submit(self._reads, batch, ReadStatus.FAILED, deadline)

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        return self._submit(self._writes, keys, DeleteStatus.FAILED, deadline)

    def _submit(
        self, queue: Queue | None, items: Sequence[Any], failed: Status, deadline: float
    ) -> Ticket[Status]:
        kept = tuple(items)
        ticket: Ticket[Status] = Ticket(len(kept))
        if queue is None or not queue.put(Job(ticket, failed, deadline), kept):
            raise self._closed()
        return ticket

    # -- closing ---------------------------------------------------------------------------------

    def close(self, deadline: float) -> None:
        if self._state in (_State.NEW, _State.CLOSED):
            self._state = _State.CLOSED
            return
        self._state = _State.CLOSING
        store = self._opened()
        for queue in (self._writes, self._reads):
            if queue is not None:
                queue.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - store.context.clock()))
        alive = sum(thread.is_alive() for thread in self._threads)
        if alive:
            raise KVFerryError(
                f"{alive} lanes of the SSD backend still wait for the disk",
                kind=ErrorKind.TIMEOUT,
                where=store.file.path,
                remedy="leave their memory alone and close again later",
                retry=Retry.LATER,
            )
        if self._io is not None:
            self._io.close()
        store.file.close()
        if self._folder is not None:
            self._folder.close()
        self._state = _State.CLOSED

    def _opened(self) -> Store:
        if self._store is None or self._state is _State.CLOSED:
            raise self._closed()
        return self._store

    def _closed(self) -> KVFerryError:
        return KVFerryError(
            f"the backend is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
        )
