"""The first page of a store file, and the one behind it, which says the same."""

from __future__ import annotations

import enum
import struct

import xxhash
from attrs import frozen

from kvferry_backend_ssd.layout import ENTRY_BYTES, FORMAT_VERSION, GROUP_SLOTS, PAGE

_MAGIC = b"kvferry-store\x00\x00\x00"
_FIXED = struct.Struct("<16sIIIIQ16s")  # magic, version, page, entry, slots of a group, slot, tag
_CHECKSUM = struct.Struct("<Q")


class Verdict(enum.Enum):
    """What a page that should be a superblock is."""

    OURS = "ours"
    OTHER = "other"
    """Whole, and of another format or another store."""
    DAMAGED = "damaged"


@frozen
class Superblock:
    """Which store this is, and how it is laid out. ``tag`` names instance, rank and shard."""

    slot_bytes: int
    tag: bytes

    def to_page(self) -> bytes:
        raw = _FIXED.pack(_MAGIC, FORMAT_VERSION, PAGE, ENTRY_BYTES, GROUP_SLOTS, self.slot_bytes, self.tag)
        return (raw + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(raw))).ljust(PAGE, b"\x00")

    def judge(self, page: bytes) -> Verdict:
        """Compare what lies in the file with what should."""
        if page == self.to_page():
            return Verdict.OURS
        if len(page) < _FIXED.size + _CHECKSUM.size:
            return Verdict.DAMAGED
        (checksum,) = _CHECKSUM.unpack_from(page, _FIXED.size)
        whole = page.startswith(_MAGIC) and xxhash.xxh3_64_intdigest(page[: _FIXED.size]) == checksum
        if not whole:
            return Verdict.DAMAGED
        return Verdict.OURS if page[: _FIXED.size] == self.to_page()[: _FIXED.size] else Verdict.OTHER
