"""The lanes that read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from attrs import define

from kvferry.api import ChunkKey, KVFerryError, ReadStatus, Span
from kvferry_backend_ssd.block_io import BlockIO, Piece
from kvferry_backend_ssd.bounce import Bounce, value_pieces
from kvferry_backend_ssd.entry import checksum
from kvferry_backend_ssd.faults import fault, os_error, told_as
from kvferry_backend_ssd.index import Place
from kvferry_backend_ssd.jobs import Item, Queue
from kvferry_backend_ssd.recovery import load_once
from kvferry_backend_ssd.store import Store

WAVE_BYTES = 16 << 20
"""What one lane takes on at once. A disk is fastest with some 64 MiB under way, and several lanes with less
each do not pause together to compute checksums (``tests/bench/disk.py``)."""
BOUNCE_BYTES = 4 << 20
_ATTEMPTS = 2


@define(eq=False)
class _Reading:
    """One value on its way into memory."""

    item: Item
    key: ChunkKey
    place: Place
    view: memoryview
    address: int
    padding: bytes = b""
    """What was behind the value, in its last page."""
    error: OSError | None = None
    short: bool = False


class _Stretch(NamedTuple):
    reading: _Reading
    at: int
    """Offset in the value."""
    piece: Piece
    through: memoryview | None
    """Where it goes first, if not right into its span."""


class ReadLane:
    """Reads whatever waits in ``queue``, several chunks at once, until the queue is closed."""

    def __init__(self, store: Store, queue: Queue, io: BlockIO) -> None:
        self._store = store
        self._queue = queue
        self._io = io
        self._bounce = Bounce(BOUNCE_BYTES)

    def run(self) -> None:
        try:
            while self._queue.wait():
                wave = self._take()
                if wave:
                    self._serve_or_fail(wave)
        finally:
            self._io.close()

    def _take(self) -> list[Item]:
        wave: list[Item] = []
        length = 0
        while length < WAVE_BYTES and (item := self._queue.take()) is not None:
            wave.append(item)
            length += item.what[1].length
        self._queue.share()
        return wave

    def _serve_or_fail(self, wave: Sequence[Item]) -> None:
        """A defect of ours fails what it touches, and leaves the lane alive."""
        left = {(id(item.job), item.number): item for item in wave}
        try:
            load_once(self._store, self._io)
            self._serve(wave, left)
        except Exception as error:  # noqa: BLE001 - the lane lives on, and nobody waits for ever
            told = told_as(error, "reading")
            for item in left.values():
                item.fail(told)

    def _serve(self, wave: Sequence[Item], left: dict[tuple[int, int], Item]) -> None:
        gone = self._store.file.gone()
        if gone is not None:
            raise gone
        again: Sequence[Item] = wave
        for attempt in range(_ATTEMPTS):
            begun = [reading for item in again if (reading := self._begin(item, left)) is not None]
            with self._store.file.reading(self._where(reading.place) for reading in begun):
                self._move(begun)
            again = [each.item for each in begun if not self._end(each, left, attempt == _ATTEMPTS - 1)]

    def _begin(self, item: Item, left: dict[tuple[int, int], Item]) -> _Reading | None:
        """Look up one chunk; what needs no I/O is answered."""
        key: ChunkKey = item.what[0]
        span: Span = item.what[1]
        with self._store.lock:
            place = self._store.index.find(key)
            damaged = place is not None and self._store.space.is_quarantined(place.slot)
        if place is None or place.size != span.length or damaged:
            self._tell(item, left, ReadStatus.CORRUPT if damaged else ReadStatus.MISS)
            return None
        try:
            view = self._store.context.view(span)
        except KVFerryError as error:
            self._tell(item, left, error)
            return None
        address = self._store.context.regions[span.region].address + span.offset
        return _Reading(item, key, place, view, address)

    def _tell(self, item: Item, left: dict[tuple[int, int], Item], answer: ReadStatus | KVFerryError) -> None:
        del left[id(item.job), item.number]
        if isinstance(answer, KVFerryError):
            item.fail(answer)
        else:
            item.finish(answer)

    def _move(self, readings: Iterable[_Reading]) -> None:
        """Run the I/O of all, as often as the bounce buffer is full."""
        self._bounce.reset()
        waiting: list[_Stretch] = []
        for reading in readings:
            for at, piece, direct in self._pieces(reading):
                through: memoryview | None = None
                if not direct:
                    if self._bounce.free < piece.length:
                        self._run(waiting)
                        waiting = []
                    through, address = self._bounce.take(piece.length)
                    piece = piece._replace(address=address)
                waiting.append(_Stretch(reading, at, piece, through))
        self._run(waiting)

    def _pieces(self, reading: _Reading) -> Iterable[tuple[int, Piece, bool]]:
        begin, size = self._where(reading.place)
        return value_pieces(begin, reading.address, size, self._store.file.direct)

    def _where(self, place: Place) -> tuple[int, int]:
        """Offset and length of a value in the file."""
        return self._store.file.layout.slot_at(place.slot) + place.head_bytes, place.size

    def _run(self, stretches: Sequence[_Stretch]) -> None:
        results = self._io.read(self._store.file.fd, [each.piece for each in stretches])
        for (reading, at, piece, through), result in zip(stretches, results, strict=True):
            if result < 0:
                reading.error = os_error(result)
            elif result < piece.length:
                reading.short = True
            elif through is not None:
                inside = min(piece.length, reading.place.size - at)
                reading.view[at : at + inside] = through[:inside]
                if inside < piece.length:
                    reading.padding = bytes(through[inside:])
        self._bounce.reset()

    def _end(self, reading: _Reading, left: dict[tuple[int, int], Item], last: bool) -> bool:
        """Tell what became of one; false when it is worth a second attempt."""
        store, item, place = self._store, reading.item, reading.place
        if reading.error is not None:
            self._tell(item, left, fault(reading.error, "a chunk could not be read", store.file.path))
            return True
        if not reading.short and checksum(reading.view, reading.padding) == place.checksum:
            store.touch(reading.key, place)
            self._tell(item, left, ReadStatus.FOUND)
            return True
        if not last:  # the slot may have been given to another chunk meanwhile
            return False
        there = store.condemn(reading.key, place)
        self._tell(item, left, ReadStatus.CORRUPT if there else ReadStatus.MISS)
        return True
