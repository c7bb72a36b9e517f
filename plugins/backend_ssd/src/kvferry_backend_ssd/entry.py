"""One entry of the table: what must be known of a chunk to find and to check it."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import xxhash
from attrs import frozen
from numpy.typing import NDArray

from kvferry.api import ChunkHeader, ChunkKey, KVFerryError
from kvferry_backend_ssd.layout import ENTRY_BYTES, GROUP_SLOTS, LARGEST_SLOT, PAGE, round_up

TAG_BYTES = 16
SUM_BYTES = 16
_MAGIC = b"KVFE"
_VERSION = 2
# magic, version, pages before the value, slot, slots, sequence, settled, tag, key, size, sum, length of the
# header
_FIXED = struct.Struct("<4sHHIIQQ16s64sQ16sI")
_CHECKSUM = struct.Struct("<Q")
ROWS = np.dtype(
    [
        ("magic", "S4"),
        ("version", "<u2"),
        ("head_pages", "<u2"),
        ("slot", "<u4"),
        ("slots", "<u4"),
        ("sequence", "<u8"),
        ("settled", "<u8"),
        ("tag", "u1", (TAG_BYTES,)),
        ("namespace", "u1", (32,)),
        ("digest", "u1", (32,)),
        ("size", "<u8"),
        ("checksum", "u1", (SUM_BYTES,)),
        ("header_bytes", "<u4"),
        ("header", "u1", (ENTRY_BYTES - _FIXED.size - _CHECKSUM.size,)),
        ("own_checksum", "<u8"),
    ]
)
"""The same, for looking at many entries at once."""
HEADER_AT = _FIXED.size
HEADER_ROOM = ENTRY_BYTES - _FIXED.size - _CHECKSUM.size
"""Bytes of an encoded header that fit into an entry. What is behind stands in the slot alone."""
EMPTY = bytes(ENTRY_BYTES)

Rows = np.ndarray[Any, np.dtype[np.void]]
Flags = NDArray[np.bool_]


@frozen
class Entry:
    """``slots`` slots from ``slot`` on hold the chunk ``key``.

    ``head_pages`` pages come before the value there; ``checksum`` is that of the value and what pads it
    to whole pages. ``sequence`` grows with every entry that is written; those below ``settled`` were
    durable with their values before this one was written, or had been taken out again. ``header`` is as
    much of the encoded header as fits, of ``header_bytes`` bytes in all.
    """

    slot: int
    slots: int
    sequence: int
    settled: int
    key: ChunkKey
    size: int
    checksum: bytes
    head_pages: int
    header_bytes: int
    header: bytes

    def to_bytes(self, tag: bytes) -> bytes:
        """``ENTRY_BYTES`` bytes that end with a checksum of themselves. ``tag`` names the store."""
        fixed = _FIXED.pack(
            _MAGIC,
            _VERSION,
            self.head_pages,
            self.slot,
            self.slots,
            self.sequence,
            self.settled,
            tag,
            self.key.to_bytes(),
            self.size,
            self.checksum,
            self.header_bytes,
        )
        raw = fixed + self.header.ljust(HEADER_ROOM, b"\x00")
        return raw + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw))


def head_bytes(header_bytes: int) -> int:
    """What comes before the value in a slot: the entry, the rest of the header, padding."""
    return round_up(ENTRY_BYTES + max(0, header_bytes - HEADER_ROOM))


def read_rows(raw: bytes, first: int, tag: bytes) -> tuple[Rows, Flags]:
    """The entries of slots from ``first`` on: ``raw`` as rows, and which of them are whole and in place.

    A row of zeros is no entry and not whole.
    """
    rows: Rows = np.frombuffer(raw, dtype=ROWS)
    whole: Flags = (
        (rows["magic"] == _MAGIC)
        & (rows["version"] == _VERSION)
        & (rows["slot"] == np.arange(first, first + len(rows)))
        & (rows["tag"] == np.frombuffer(tag, dtype=np.uint8)).all(axis=1)
    )
    view, body = memoryview(raw), ENTRY_BYTES - _CHECKSUM.size
    told = rows["own_checksum"].tolist()
    for number in np.flatnonzero(whole).tolist():
        at = number * ENTRY_BYTES
        whole[number] = xxhash.xxh3_64_intdigest(view[at : at + body]) == told[number]
    return rows, whole


def plausible(rows: Rows, slot_bytes: int) -> Flags:
    """Of which entries the numbers can be true."""
    beyond = np.maximum(0, rows["header_bytes"].astype(np.int64) - HEADER_ROOM)
    pages = rows["head_pages"].astype(np.int64)
    size = rows["size"].astype(np.int64)
    need = pages * PAGE + -(-size // PAGE) * PAGE
    found: Flags = (
        (size > 0)
        & (size < LARGEST_SLOT)
        & (pages == -(-(ENTRY_BYTES + beyond) // PAGE))
        & (rows["slots"] > 0)
        & (rows["slots"] <= GROUP_SLOTS)
        & (need <= rows["slots"].astype(np.int64) * slot_bytes)
    )
    return found


def read_header(raw: bytes) -> ChunkHeader | None:
    """The header that ``raw`` is; ``None`` if it is damaged."""
    try:
        header, end = ChunkHeader.from_bytes(raw)
    except KVFerryError:
        return None
    return header if end == len(raw) else None


def checksum(value: memoryview, padding: bytes) -> bytes:
    """Of a value and what pads it to whole pages. Large parts do not hold the interpreter's lock."""
    state = xxhash.xxh3_128(value)
    state.update(padding)
    return state.digest()
