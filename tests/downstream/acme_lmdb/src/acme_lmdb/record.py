"""How a chunk lies in the store: its header, a checksum of its value, the value."""

import struct
import zlib

from kvferry.api import ChunkHeader, ChunkKey, KVFerryError

CHECKSUM = struct.Struct("<I")


def pack(header: ChunkHeader, value: memoryview) -> bytes:
    return header.to_bytes() + CHECKSUM.pack(zlib.crc32(value)) + value


def read_header(record: memoryview) -> ChunkHeader | None:
    """The header of a record that is as long as it says; ``None`` for anything else."""
    try:
        header, end = ChunkHeader.from_bytes(record)
    except KVFerryError:
        return None
    return header if len(record) == end + CHECKSUM.size + header.size else None


def read_value(record: memoryview, key: ChunkKey) -> memoryview | None:
    """The value of a whole record of this very key; ``None`` for anything else."""
    header = read_header(record)
    if header is None or header.key != key:
        return None
    value = record[-header.size :]
    (checksum,) = CHECKSUM.unpack_from(record, len(record) - header.size - CHECKSUM.size)
    return value if zlib.crc32(value) == checksum else None
