"""The side door to a store: reads and changes what lies in a store file by the page on its format alone."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

PAGE = 4096
SUPERBLOCK = 2 * PAGE
ENTRY = 1024
GROUP = 256
TABLE = GROUP * ENTRY

_SLOT_BYTES = struct.Struct("<32xQ")  # in the superblock
_HEAD_PAGES = struct.Struct("<6xH")
_SIZE = struct.Struct("<112xQ")
_MAGIC = b"KVFE"


class StoredChunks:
    """Every chunk below a folder as one record: its entry, then its value.

    An entry stands in the table and once more in front of the value. A record shows it once, and a
    change goes to both: what strikes one of them alone is healed, and has tests of its own.
    """

    live = True

    def __init__(self, root: Path) -> None:
        self.root = root

    def names(self) -> list[str]:
        return [f"{path.relative_to(self.root)}:{slot}" for path, slot in self._entries()]

    def read(self, name: str) -> bytes:
        path, slot = self._split(name)
        with open(path, "rb") as file:
            entry_at, slot_at = places(file.fileno(), slot)
            entry = os.pread(file.fileno(), ENTRY, entry_at)
            begin, size = self._value(entry, slot_at)
            return entry + os.pread(file.fileno(), size, begin)

    def write(self, name: str, data: bytes) -> None:
        path, slot = self._split(name)
        with open(path, "r+b", buffering=0) as file:
            entry_at, slot_at = places(file.fileno(), slot)
            begin, _ = self._value(os.pread(file.fileno(), ENTRY, entry_at), slot_at)
            was = self.read(name)
            # A place in a file cannot get shorter: what is cut off has become something else.
            data += bytes(byte ^ 0xFF for byte in was[len(data) :])
            for at in (entry_at, slot_at):
                os.pwrite(file.fileno(), data[:ENTRY], at)
            room = slot_at + slot_bytes(file.fileno()) - begin
            os.pwrite(file.fileno(), data[ENTRY:][:room], begin)

    def delete(self, name: str) -> None:
        path, slot = self._split(name)
        with open(path, "r+b", buffering=0) as file:
            for at in places(file.fileno(), slot):
                os.pwrite(file.fileno(), bytes(ENTRY), at)

    def used_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())

    def files(self) -> list[Path]:
        return sorted(self.root.rglob("store-*.kvf"))

    def _entries(self) -> Iterator[tuple[Path, int]]:
        for path in self.files():
            with open(path, "rb") as file:
                length = os.fstat(file.fileno()).st_size
                group = 0
                while (table := table_at(file.fileno(), group)) < length:
                    raw = os.pread(file.fileno(), TABLE, table)
                    for inside in range(GROUP):
                        if raw[inside * ENTRY :].startswith(_MAGIC):
                            yield path, group * GROUP + inside
                    group += 1

    def _split(self, name: str) -> tuple[Path, int]:
        path, _, slot = name.rpartition(":")
        return self.root / path, int(slot)

    def _value(self, entry: bytes, slot_at: int) -> tuple[int, int]:
        (pages,) = _HEAD_PAGES.unpack_from(entry)
        (size,) = _SIZE.unpack_from(entry)
        return slot_at + pages * PAGE, size


def slot_bytes(descriptor: int) -> int:
    (found,) = _SLOT_BYTES.unpack_from(os.pread(descriptor, PAGE, 0))
    return int(found)


def table_at(descriptor: int, group: int) -> int:
    return SUPERBLOCK + group * (TABLE + PAGE + GROUP * slot_bytes(descriptor))


def places(descriptor: int, slot: int) -> tuple[int, int]:
    """Where the entry of a slot and the slot itself lie."""
    group, inside = divmod(slot, GROUP)
    table = table_at(descriptor, group)
    return table + inside * ENTRY, table + TABLE + PAGE + inside * slot_bytes(descriptor)
