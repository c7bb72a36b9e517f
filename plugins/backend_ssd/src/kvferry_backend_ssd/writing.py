"""One chunk on its way to the disk: what goes where, before its entry is written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from attrs import define, field

from kvferry.api import ChunkHeader, ErrorKind, KVFerryError
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose
from kvferry_backend_ssd.bounce import Bounce, value_pieces
from kvferry_backend_ssd.entry import HEADER_ROOM, Entry, checksum, head_bytes
from kvferry_backend_ssd.faults import short_write
from kvferry_backend_ssd.index import Place
from kvferry_backend_ssd.jobs import Item
from kvferry_backend_ssd.layout import GROUP_SLOTS, PAGE, round_up
from kvferry_backend_ssd.store import PAD, Store
from kvferry_backend_ssd.table import Table

BOUNCE_BYTES = 8 << 20
NOT_WRITTEN = "a chunk could not be stored"


@define(eq=False)
class Writing:
    """A chunk with a place of its own that nobody else can find yet."""

    item: Item
    header: ChunkHeader
    encoded: bytes
    view: memoryview
    address: int
    slot: int
    slots: int
    sequence: int
    error: OSError | KVFerryError | None = None
    """Why it cannot be stored. What was told first stands."""
    entered: bool = False
    """Whether its entry may be in the table."""
    entry: Entry = field(init=False)

    @property
    def head_bytes(self) -> int:
        return head_bytes(len(self.encoded))

    @property
    def padding(self) -> bytes:
        return PAD * (-self.header.size % PAGE)

    @property
    def place(self) -> Place:
        entry = self.entry
        return Place(entry.slot, entry.slots, entry.head_pages, entry.size, entry.checksum)

    def refuse(self, error: OSError | KVFerryError) -> None:
        """From any thread."""
        if self.error is None:
            self.error = error

    def describe(self, checksum: bytes, settled: int) -> Entry:
        self.entry = Entry(
            self.slot,
            self.slots,
            self.sequence,
            settled,
            self.header.key,
            self.header.size,
            checksum,
            self.head_bytes // PAGE,
            len(self.encoded),
            self.encoded[:HEADER_ROOM],
        )
        return self.entry


def encode(header: ChunkHeader) -> bytes:
    """The header's bytes. Raises :class:`KVFerryError` for numbers that no header can hold."""
    try:
        return header.to_bytes()
    except (struct.error, ValueError) as error:
        raise KVFerryError(
            "the header of a chunk cannot be stored", kind=ErrorKind.INTERNAL, why=str(error)
        ) from error


def slots_for(header: ChunkHeader, encoded: bytes, store: Store) -> int:
    """How many slots in a row a chunk takes. Raises :class:`KVFerryError` (``CAPACITY``) for a chunk that
    no row can hold."""
    need = head_bytes(len(encoded)) + round_up(header.size)
    count = -(-need // store.file.layout.slot_bytes)
    most = min(GROUP_SLOTS, store.file.slots)
    if count <= most:
        return count
    raise KVFerryError(
        f"a value of {header.size} bytes is larger than any row of slots",
        kind=ErrorKind.CAPACITY,
        where=store.file.path,
        why=f"at most {most} slots of {store.file.layout.slot_bytes} bytes lie in a row",
        remedy="use smaller chunks, or raise the tier's capacity or the key  slot",
    )


class Outgoing:
    """Pieces that go to the file together, some of them through ``bounce``, which is free for them. One
    thread at a time."""

    def __init__(self, store: Store, io: BlockIO, bounce: Bounce) -> None:
        self._store = store
        self._io = io
        self._bounce = bounce
        self._waiting: list[tuple[Writing, Piece]] = []
        bounce.reset()

    def straight(self, writing: Writing, piece: Piece) -> None:
        self._waiting.append((writing, piece))

    def through(self, writing: Writing, piece: Piece, content: bytes | memoryview) -> None:
        if self._bounce.free < piece.length:
            self.go()
        view, address = self._bounce.take(piece.length)
        view[:] = content
        self._waiting.append((writing, piece._replace(address=address)))

    def go(self, also: Sequence[Piece] = ()) -> list[int]:
        """Write what waits and ``also``, whose results are returned; those of the others stand with their
        writings."""
        waiting, self._waiting = self._waiting, []
        pieces = [piece for _, piece in waiting]
        results = self._io.write(self._store.file.fd, [*pieces, *also])
        for (writing, piece), result in zip(waiting, results, strict=False):
            if result != piece.length:
                writing.refuse(short_write(result))
        self._bounce.reset()
        return results[len(waiting) :]


class Values:
    """Writes values. Threads: one at a time."""

    def __init__(self, store: Store, io: BlockIO) -> None:
        self._store = store
        self._io = io
        self._bounce = Bounce(BOUNCE_BYTES)

    def write(self, writings: Sequence[Writing]) -> None:
        outgoing = Outgoing(self._store, self._io, self._bounce)
        for writing in writings:
            for at, piece, direct in self._pieces(writing):
                if direct:
                    outgoing.straight(writing, piece)
                else:
                    inside = writing.view[at : at + piece.length]
                    content = inside if len(inside) == piece.length else bytes(inside) + writing.padding
                    outgoing.through(writing, piece, content)
        outgoing.go()

    def _pieces(self, writing: Writing) -> Iterable[tuple[int, Piece, bool]]:
        begin = self._store.file.layout.slot_at(writing.slot) + writing.head_bytes
        return value_pieces(begin, writing.address, writing.header.size, self._store.file.direct)


class Entries:
    """Computes checksums, and writes heads and entries. Threads: one at a time."""

    def __init__(self, store: Store, table: Table, io: BlockIO) -> None:
        self._store = store
        self._table = table
        self._io = io
        self._bounce = Bounce(BOUNCE_BYTES)

    def write(self, writings: Sequence[Writing], settled: int) -> None:
        """Each of them gets an entry, which says that what is below ``settled`` needs no look at a
        restart."""
        outgoing = Outgoing(self._store, self._io, self._bounce)
        entries = {}
        for writing in writings:
            entry = writing.describe(checksum(writing.view, writing.padding), settled)
            entries[writing.slot] = entry.to_bytes(self._store.tag)
            length = writing.head_bytes
            head = entries[writing.slot] + writing.encoded[HEADER_ROOM:]
            piece = Piece(self._store.file.layout.slot_at(writing.slot), 0, length, Purpose.HEAD)
            outgoing.through(writing, piece, head.ljust(length, b"\x00"))
        for writing in writings:
            writing.entered = True
        # Heads go with the table's pages: behind the values in a disk's queue, a second trip costs most.
        failed = self._table.put(entries, self._io, outgoing.go)
        for writing in writings:
            if writing.slot in failed:
                writing.refuse(failed[writing.slot])
