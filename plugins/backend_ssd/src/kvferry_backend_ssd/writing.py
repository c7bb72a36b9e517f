"""One chunk on its way to the disk: what goes where, before its entry is written."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, wait

from attrs import define, field

from kvferry.api import ChunkHeader, ErrorKind, KVFerryError
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose, cut
from kvferry_backend_ssd.bounce import Bounce, is_aligned
from kvferry_backend_ssd.entry import HEADER_ROOM, Entry, checksum, head_bytes
from kvferry_backend_ssd.faults import short_write
from kvferry_backend_ssd.index import Place
from kvferry_backend_ssd.jobs import Item
from kvferry_backend_ssd.layout import GROUP_SLOTS, PAGE, round_up
from kvferry_backend_ssd.store import PAD, Store

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
    error: OSError | None = None
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


class DataPhase:
    """Writes values and heads. Nothing can be found by them: that is for the table to say.

    Threads: one at a time. ``beside`` runs checksums while values are written.
    """

    def __init__(self, store: Store, io: BlockIO, beside: Executor) -> None:
        self._store = store
        self._io = io
        self._beside = beside
        self._bounce = Bounce(BOUNCE_BYTES)
        self._waiting: list[tuple[Writing, Piece]] = []

    def run(self, writings: Sequence[Writing], settled: int) -> None:
        """Afterwards each has its ``entry``, which says that what is below ``settled`` needs no look at a
        restart, or an ``error``."""
        if not writings:
            return
        summing = self._beside.submit(_checksums, writings)
        try:
            self._write_values(writings)
        finally:
            wait([summing])  # nobody looks at the memory of a write that has ended
        self._write_heads(writings, summing.result(), settled)

    def _write_values(self, writings: Sequence[Writing]) -> None:
        for writing in writings:
            for at, piece, direct in self._values(writing):
                if direct:
                    self._waiting.append((writing, piece))
                else:
                    inside = writing.view[at : at + piece.length]
                    content = inside if len(inside) == piece.length else bytes(inside) + writing.padding
                    self._through(writing, piece, content, Purpose.VALUE)
        self._hand_over(Purpose.VALUE)

    def _write_heads(self, writings: Sequence[Writing], checksums: Sequence[bytes], settled: int) -> None:
        for writing, its_checksum in zip(writings, checksums, strict=True):
            entry = writing.describe(its_checksum, settled)
            head = entry.to_bytes(self._store.tag) + writing.encoded[HEADER_ROOM:]
            length = writing.head_bytes
            piece = Piece(self._store.file.layout.slot_at(writing.slot), 0, length)
            self._through(writing, piece, head.ljust(length, b"\x00"), Purpose.HEAD)
        self._hand_over(Purpose.HEAD)

    def _values(self, writing: Writing) -> Iterable[tuple[int, Piece, bool]]:
        """Offset in the value, piece, and whether it goes right out of the span: whole pages do, unless
        direct I/O finds the span at an odd address."""
        begin = self._store.file.layout.slot_at(writing.slot) + writing.head_bytes
        straight = is_aligned(writing.address) or not self._store.file.direct
        whole = writing.header.size // PAGE * PAGE
        for piece in cut(begin, writing.address, whole):
            yield piece.offset - begin, piece, straight
        if whole < writing.header.size:
            yield whole, Piece(begin + whole, 0, PAGE), False

    def _through(self, writing: Writing, piece: Piece, content: bytes | memoryview, purpose: Purpose) -> None:
        if self._bounce.free < piece.length:
            self._hand_over(purpose)
        view, address = self._bounce.take(piece.length)
        view[:] = content
        self._waiting.append((writing, piece._replace(address=address)))

    def _hand_over(self, purpose: Purpose) -> None:
        """Write what waits, and use the bounce buffer again."""
        waiting, self._waiting = self._waiting, []
        results = self._io.write(self._store.file.fd, [piece for _, piece in waiting], purpose)
        for (writing, piece), result in zip(waiting, results, strict=True):
            if result != piece.length and writing.error is None:
                writing.error = short_write(result)
        self._bounce.reset()


def _checksums(writings: Sequence[Writing]) -> list[bytes]:
    return [checksum(writing.view, writing.padding) for writing in writings]
