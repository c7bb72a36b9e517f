"""The contract of a backend that reads and writes by key: disks, shared stores, anything remote."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvferry.api.chunk_header import ChunkHeader
from kvferry.api.keys import ChunkKey
from kvferry.api.memory import BackendContext, Span
from kvferry.api.tickets import DeleteStatus, ProbeStatus, ReadStatus, Ticket, WriteStatus


class Backend(Protocol):
    """A tier that keeps chunks by key. See :class:`kvferry.api.AddressableBackend` for the other kind.

    The factory of the spec is called as ``factory(options, capacity)``: an instance of the spec's
    options class, and how many bytes the tier may take, headers included. The capacity is never
    exceeded, not even while something is being written. A backend evicts nothing by itself: when it
    is full it says so, and the manager decides what goes.

    **Submitting.** ``probe``, ``write``, ``read`` and ``delete`` take a batch and return a ticket
    without waiting for the store. Every item has a result of its own, so one that fails leaves the
    others alone. A ticket is completed exactly once, from any thread; no order is promised between
    tickets under way at the same time, but what a completed ticket says holds for everything
    submitted later. ``deadline`` is a time of the context's clock: what has not begun by then fails
    with the kind ``TIMEOUT``, and what has begun ends soon after. Before ``open`` and after ``close``
    they raise :class:`kvferry.api.KVFerryError` of kind ``CLOSED``.

    **Bytes.** The spans of a batch belong to the backend until its ticket is done; it then never
    touches them again. It writes nowhere but into the spans of a read. A read that says ``FOUND`` has
    the very bytes that were written under the very key, namespace and shard included; whatever else
    it comes across in its store, it says ``MISS`` or ``CORRUPT``. ``FAILED`` is for a store that could
    not be asked.

    **Identity.** A chunk is found by its key on a backend with the same ``shard``; a rank of another
    shard never finds it. Backends of several ranks are opened with the same options and keep apart
    what is theirs. Of a persistent backend that is not shared, a second one for the same instance and
    rank is refused while the first is open.

    Threads: ``open``, ``recover`` and ``close`` from one; the rest from any, at the same time.
    A backend that derives from :class:`kvferry.api.ThreadedBackend` gets most of this for nothing.
    """

    def open(self, context: BackendContext) -> None:
        """Make the store ready: called once, may block up to ``context.operation_seconds``.

        Raises :class:`kvferry.api.KVFerryError` when the store cannot be used; nothing is left open
        then.
        """
        ...

    def recover(self) -> Iterable[ChunkHeader]:
        """The header of every chunk that can be found, each once: those that were used longest ago first,
        as far as the store knows.

        For persistent backends; called after ``open`` and before the first batch, may block. Half
        written chunks and those with a damaged header are left out, and what they took is free again;
        values need not be looked at. Chunks of other namespaces are in: it is the caller who knows
        what they are worth. Raises
        :class:`kvferry.api.KVFerryError` of kind ``UNSUPPORTED`` where ``persistent`` is not claimed.
        """
        ...

    def probe(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[ProbeStatus]:
        """Which of these chunks are there, whoever wrote them.

        For shared backends. Raises :class:`kvferry.api.KVFerryError` of kind ``UNSUPPORTED`` where
        ``shared`` is not claimed.
        """
        ...

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        """Store the bytes of each span under its header's key, and the header with them.

        A span is as long as the header says. Before a chunk is stored completely it is not found by
        anyone, also after a crash. A key that is there already is ``EXISTS`` and is left as it is. A
        value above the context's ``max_value_bytes`` fails with the kind ``CAPACITY``.
        """
        ...

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        """Read each value into its span.

        A span of another length than the value is ``MISS`` or ``CORRUPT``, as if the chunk were
        another; it is never ``FOUND`` and no failure. The value stays until it is deleted.
        """
        ...

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        """Remove chunks, also damaged ones, and give back the room they took."""
        ...

    def close(self, deadline: float) -> None:
        """End everything. Idempotent; ``open`` need not have been called.

        Batches that have not begun fail with the kind ``CLOSED``. When it returns, every ticket is
        done, and neither threads nor descriptors are left. Raises
        :class:`kvferry.api.KVFerryError` of kind ``TIMEOUT`` if something is still under way at the
        deadline: the tickets of that are not done, their spans are not free, and it can be called
        again.
        """
        ...
