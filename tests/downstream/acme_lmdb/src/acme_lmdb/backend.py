"""A tier in an LMDB environment."""

import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import lmdb

from acme_lmdb.options import LmdbOptions
from acme_lmdb.record import pack, read_header, read_value
from kvferry.api import (
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    KVFerryError,
    ReadStatus,
    Retry,
    ThreadedBackend,
    WriteStatus,
)

ROOM_FOR_PAGES = 64 << 20  # the map is larger than what we count, because LMDB's own pages are in it


class LmdbBackend(ThreadedBackend):
    """One environment per rank and shard; one record per chunk, under the chunk's key."""

    def __init__(self, options: LmdbOptions, capacity: int) -> None:
        super().__init__()
        self._options = options
        self._capacity = capacity
        self._used = 0
        self._lock = -1

    def open_store(self, context: BackendContext) -> None:
        name = f"{context.instance}-{context.rank}".encode() + context.shard
        folder = Path(self._options.path) / hashlib.sha256(name).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(folder / "owner", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = 2 * self._capacity + ROOM_FOR_PAGES
            self._environment = lmdb.open(str(folder), map_size=size, lock=False)
        except (OSError, lmdb.Error) as error:
            os.close(self._lock)
            raise KVFerryError(
                "the LMDB environment cannot be opened",
                kind=ErrorKind.IO,
                where=str(folder),
                why=str(error),
                remedy="end the process that uses it, or choose another path",
                retry=Retry.LATER,
            ) from error
        with self._environment.begin() as reading:
            self._used = sum(len(key) + len(record) for key, record in reading.cursor())

    def close_store(self) -> None:
        self._environment.close()
        os.close(self._lock)

    def recover(self) -> Iterator[ChunkHeader]:
        damaged = []
        with self._environment.begin(buffers=True) as reading:
            for name, record in reading.cursor():
                header = read_header(record)
                if header is None or header.key.to_bytes() != name:
                    damaged.append((bytes(name), len(record)))
                else:
                    yield header
        with self._environment.begin(write=True) as writing:
            for name, length in damaged:
                writing.delete(name)
                self._used -= len(name) + length

    def write_one(self, header: ChunkHeader, value: memoryview) -> WriteStatus:
        name, record = header.key.to_bytes(), pack(header, value)
        with self._environment.begin(write=True) as writing:
            if writing.get(name) is not None:
                return WriteStatus.EXISTS
            if self._used + len(name) + len(record) > self._capacity:
                return WriteStatus.NO_SPACE
            writing.put(name, record)
        self._used += len(name) + len(record)
        return WriteStatus.STORED

    def read_one(self, key: ChunkKey, into: memoryview) -> ReadStatus:
        with self._environment.begin(buffers=True) as reading:
            record = reading.get(key.to_bytes())
            if record is None:
                return ReadStatus.MISS
            value = read_value(record, key)
            if value is None or len(value) != len(into):
                return ReadStatus.CORRUPT
            into[:] = value
        return ReadStatus.FOUND

    def delete_one(self, key: ChunkKey) -> DeleteStatus:
        name = key.to_bytes()
        with self._environment.begin(write=True) as writing:
            record = writing.pop(name)
        if record is None:
            return DeleteStatus.ABSENT
        self._used -= len(name) + len(record)
        return DeleteStatus.DELETED
