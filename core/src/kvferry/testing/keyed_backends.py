"""Keyed tiers for tests, and stand-ins for them."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

from attrs import define, frozen

from kvferry.api import (
    Backend,
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    ItemResult,
    KVFerryError,
    ProbeStatus,
    ReadStatus,
    Span,
    ThreadedBackend,
    Ticket,
    WriteStatus,
)


class NullBackend:
    """A store without room, in which nothing is ever found. Needs no opening."""

    def open(self, context: BackendContext) -> None:
        pass

    def recover(self) -> Iterable[ChunkHeader]:
        return ()

    def probe(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[ProbeStatus]:
        ticket: Ticket[ProbeStatus] = Ticket(len(keys))
        ticket.complete([ItemResult(ProbeStatus.ABSENT)] * len(keys))
        return ticket

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        ticket: Ticket[WriteStatus] = Ticket(len(batch))
        ticket.complete([ItemResult(WriteStatus.NO_SPACE)] * len(batch))
        return ticket

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        ticket: Ticket[ReadStatus] = Ticket(len(batch))
        ticket.complete([ItemResult(ReadStatus.MISS)] * len(batch))
        return ticket

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        ticket: Ticket[DeleteStatus] = Ticket(len(keys))
        ticket.complete([ItemResult(DeleteStatus.ABSENT)] * len(keys))
        return ticket

    def close(self, deadline: float) -> None:
        pass


class ForwardingBackend:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner

    def open(self, context: BackendContext) -> None:
        self.inner.open(context)

    def recover(self) -> Iterable[ChunkHeader]:
        return self.inner.recover()

    def probe(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[ProbeStatus]:
        return self.inner.probe(keys, deadline)

    def write(self, batch: Sequence[tuple[ChunkHeader, Span]], deadline: float) -> Ticket[WriteStatus]:
        return self.inner.write(batch, deadline)

    def read(self, batch: Sequence[tuple[ChunkKey, Span]], deadline: float) -> Ticket[ReadStatus]:
        return self.inner.read(batch, deadline)

    def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
        return self.inner.delete(keys, deadline)

    def close(self, deadline: float) -> None:
        self.inner.close(deadline)


@define
class Record:
    """What a :class:`DictionaryBackend` keeps of one chunk."""

    header: ChunkHeader
    value: bytes
    checksum: int


@frozen(kw_only=True)
class DictionaryOptions:
    """No keys of its own."""


class DictionaryBackend(ThreadedBackend):
    """Chunks in a dictionary, forgotten when it is closed. ``records`` may be looked at and damaged by
    a test; the values alone count against the capacity."""

    def __init__(self, options: DictionaryOptions, capacity: int) -> None:
        super().__init__()
        del options
        self._capacity = capacity
        self.records: dict[ChunkKey, Record] = {}

    def open_store(self, context: BackendContext) -> None:
        pass

    def close_store(self) -> None:
        self.records.clear()

    def used_bytes(self) -> int:
        return sum(len(record.value) for record in list(self.records.values()))

    def write_one(self, header: ChunkHeader, value: memoryview) -> WriteStatus:
        if header.key in self.records:
            return WriteStatus.EXISTS
        if header.size > self._capacity:
            raise KVFerryError(
                f"a value of {header.size} bytes is above the capacity of {self._capacity}",
                kind=ErrorKind.CAPACITY,
                remedy="give the tier more room",
            )
        if self.used_bytes() + header.size > self._capacity:
            return WriteStatus.NO_SPACE
        self.records[header.key] = Record(header, bytes(value), zlib.crc32(value))
        return WriteStatus.STORED

    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:
        record = self.records.get(key)
        if record is None:
            return ReadStatus.MISS
        good = record.header.key == key and zlib.crc32(record.value) == record.checksum
        if not good or len(record.value) != len(into):
            return ReadStatus.CORRUPT
        into[:] = record.value
        return ReadStatus.FOUND

    def delete_one(self, key: ChunkKey) -> DeleteStatus:
        found = self.records.pop(key, None)
        return DeleteStatus.ABSENT if found is None else DeleteStatus.DELETED


class ShelfBackend(DictionaryBackend):
    """Chunks in a dictionary of the caller's, which outlives the backend: what a persistent tier of one
    rank finds again when it is opened anew."""

    def __init__(self, shelf: dict[ChunkKey, Record], capacity: int) -> None:
        super().__init__(DictionaryOptions(), capacity)
        self.records = shelf

    def close_store(self) -> None:
        pass

    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:
        status = super().read_one(key, into)
        if key in self.records:
            self.records[key] = self.records.pop(key)  # the last one used comes last
        return status

    def recover(self) -> Iterable[ChunkHeader]:
        return [record.header for record in self.records.values()]
