"""What a restart finds: the table, and where that is damaged, the slots themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import xxhash

from kvferry.api import ChunkHeader, KVFerryError
from kvferry_backend_ssd.block_io import BlockIO, Piece, Purpose, cut
from kvferry_backend_ssd.bounce import Bounce
from kvferry_backend_ssd.entry import (
    EMPTY,
    HEADER_AT,
    HEADER_ROOM,
    ROWS,
    Flags,
    Rows,
    head_bytes,
    plausible,
    read_header,
    read_rows,
)
from kvferry_backend_ssd.faults import fault, os_error
from kvferry_backend_ssd.layout import (
    ENTRY_BYTES,
    GROUP_SLOTS,
    PAGE,
    TABLE_BYTES,
    USES_BYTES,
    round_up,
)
from kvferry_backend_ssd.store import NO_FLOOR, Store
from kvferry_backend_ssd.table import Table

_log = logging.getLogger(__name__)

_WAVE_BYTES = 8 << 20
_EMPTY_TABLE = bytes(TABLE_BYTES)
_USES_LIMIT = 1 << 62
"""Larger numbers of uses are damage: nobody uses chunks so often."""
_FACT_NAMES = [name for name in ROWS.names or () if name not in ("header", "own_checksum", "tag")]
_FACTS = np.dtype([(name, *(ROWS[name].subdtype or (ROWS[name],))) for name in _FACT_NAMES])
"""What is kept of an entry while the others are read."""


def load_once(store: Store, io: BlockIO) -> None:
    """Fill the index, unless it was done. Raises :class:`KVFerryError` when the file cannot be read."""
    with store.load_lock:
        if not store.loaded:
            _load(store, _Scan(store, io, with_headers=False))
            _mend(store, io)
            store.loaded = True


def recover(store: Store, io: BlockIO) -> Iterator[ChunkHeader]:
    """Fill the index, and give the header of each chunk, the one used longest ago first. Headers that
    turn out damaged are left out, and their room is free again."""
    with store.load_lock:
        scan = _Scan(store, io, with_headers=True)
        slots = _load(store, scan)
        _mend(store, io)
        store.loaded = True
    used = store.index.used
    slots.sort(key=used.__getitem__, reverse=True)
    return _headers(store, slots, scan.headers)


def _headers(store: Store, slots: list[int], raws: dict[int, bytes]) -> Iterator[ChunkHeader]:
    """Of the slots from the last to the first; both arguments are used up on the way."""
    while slots:
        slot = slots.pop()
        header = read_header(raws.pop(slot))
        if header is not None and store.index.holds(slot, header.key, header.size):
            yield header
        else:
            store.forget(slot)


def _load(store: Store, scan: _Scan) -> list[int]:
    """What is in the file goes into the index; the first slot of every chunk."""
    scan.tables()
    scan.suspects()
    rows = scan.rows()
    layout = store.file.layout
    good = plausible(rows, layout.slot_bytes)
    scan.repairs |= dict.fromkeys(rows["slot"][~good].tolist(), EMPTY)
    rows = _whole(store, scan, rows[good])
    # The newest first: of two entries that cannot both be true, the older one is a remnant.
    rows = rows[np.argsort(rows["sequence"], kind="stable")[::-1]]
    used = np.maximum(rows["sequence"], scan.uses[rows["slot"]])
    kept: list[int] = []
    with store.lock:
        store.empty()
        index, space = store.index, store.space
        index.fill(rows, used)
        covered = store.file.covered
        for slot, slots in zip(rows["slot"].tolist(), rows["slots"].tolist(), strict=True):
            if slot + slots > covered or not space.claim(slot, slots):
                scan.repairs[slot] = EMPTY
            elif index.link(slot):
                kept.append(slot)
            else:
                space.give_back(slot, slots)
                scan.repairs[slot] = EMPTY
        store.tick = max(store.tick, int(used.max(initial=0)) + 1)
        store.repairs = scan.repairs
        counters = store.counters
        counters.recovered, counters.healed = len(kept), scan.healed
        counters.dropped = sum(entry == EMPTY for entry in scan.repairs.values())
    scan.read_long_headers(kept)
    return kept


def _whole(store: Store, scan: _Scan, rows: Rows) -> Rows:
    """Without the entries whose values did not become durable with them: those of the groups that were
    under way, of which the newest entries say where they began."""
    # Above those of the lost ones, too: where two entries cannot both be true, the newer one is.
    store.tick = max(store.tick, int(rows["sequence"].max(initial=0)) + 1)
    fresh = np.flatnonzero(rows["sequence"] >= rows["settled"].max(initial=0))
    lost = fresh[scan.without_value(rows[fresh])]
    scan.repairs |= dict.fromkeys(rows["slot"][lost].tolist(), EMPTY)
    store.floor = int(rows["sequence"][lost].min(initial=NO_FLOOR))
    kept: Rows = np.delete(rows, lost)
    return kept


def _mend(store: Store, io: BlockIO) -> None:
    """Give the table what it should have, before slots that it has wrong are used again or the file grows
    under entries that were cut off; and then a damaged superblock. Where that fails, the next start has to
    find it out once more."""
    if not store.file.damaged and not store.repairs:
        return
    try:
        Table(store).put({}, io)
        if store.repairs:
            return
        io.flush(store.file.fd)
        store.floor = NO_FLOOR
        if store.file.damaged:
            store.file.mend(io)
    except OSError as error:
        told = fault(error, "a damaged store could not be mended", store.file.path)
        _log.warning("kvferry: %s", told)


class _Scan:
    """Collects every entry that can be read."""

    def __init__(self, store: Store, io: BlockIO, with_headers: bool) -> None:
        self.uses = np.zeros(store.file.slots, dtype=np.uint64)
        self.repairs: dict[int, bytes] = {}
        """What the table should have, by slot."""
        self.healed = 0
        self.headers: dict[int, bytes] = {}
        """Encoded headers by slot."""
        self._long: dict[int, int] = {}
        """How long those are that do not fit into an entry."""
        self._with_headers = with_headers
        self._store = store
        self._io = io
        self._suspects: dict[int, int | None] = {}
        """Slots to look into, and the sequence of the entry that the table lost, if that much is known: a
        torn entry must not bring back the chunk that was in its slot before."""
        self._rows: list[Rows] = []

    def rows(self) -> Rows:
        """All entries that were found, without their headers."""
        if not self._rows:
            return np.zeros(0, dtype=_FACTS)
        return np.concatenate(self._rows)

    def tables(self) -> None:
        """Read every table and its uses. A slot whose entry is damaged is suspect, and so are all of a
        table that cannot be read; after a damaged superblock, all without an entry."""
        covered = self._store.file.covered
        groups = -(-covered // GROUP_SLOTS)
        layout = self._store.file.layout
        wanted = [(layout.table_at(group), TABLE_BYTES + USES_BYTES) for group in range(groups)]
        for group, raw in enumerate(_read(self._store, self._io, wanted, Purpose.TABLE)):
            first = group * GROUP_SLOTS
            count = min(GROUP_SLOTS, covered - first)
            if len(raw) < TABLE_BYTES + USES_BYTES:
                self._suspects |= dict.fromkeys(range(first, first + count))
                continue
            uses = np.frombuffer(raw, dtype="<u8", count=count, offset=TABLE_BYTES)
            self.uses[first : first + count] = np.where(uses < _USES_LIMIT, uses, 0)
            self._read_entries(raw[: count * ENTRY_BYTES], first)
            self._drop_entries(raw[count * ENTRY_BYTES : TABLE_BYTES], first + count)

    def _drop_entries(self, raw: bytes, first: int) -> None:
        """Of slots behind the end of the file, or beyond the capacity: they would come back with it."""
        marked = np.frombuffer(raw, dtype=np.uint64).reshape(-1, ENTRY_BYTES // 8).any(axis=1)
        self.repairs |= dict.fromkeys((np.flatnonzero(marked) + first).tolist(), EMPTY)

    def _read_entries(self, raw: bytes, first: int) -> None:
        everything = self._store.file.damaged
        if not everything and raw == _EMPTY_TABLE[: len(raw)]:
            return
        rows, whole = read_rows(raw, first, self._store.tag)
        self._keep(raw, rows, whole, first)
        words = np.frombuffer(raw, dtype=np.uint64).reshape(len(rows), -1)
        marked = words.any(axis=1)
        self.repairs |= dict.fromkeys((np.flatnonzero(marked & ~whole) + first).tolist(), EMPTY)
        if everything:
            self._suspects |= dict.fromkeys((np.flatnonzero(~whole) + first).tolist())
            return
        damaged = np.flatnonzero(marked & ~whole)
        told = rows["sequence"][damaged].tolist()
        self._suspects |= zip((damaged + first).tolist(), told, strict=True)

    def _keep(self, raw: bytes, rows: Rows, whole: Flags, first: int) -> None:
        self._rows.append(rows[whole][_FACT_NAMES].astype(_FACTS))
        if not self._with_headers:
            return
        lengths = rows["header_bytes"].tolist()
        for number in np.flatnonzero(whole).tolist():
            begin = number * ENTRY_BYTES + HEADER_AT
            length = lengths[number]
            self.headers[first + number] = raw[begin : begin + min(length, HEADER_ROOM)]
            if length > HEADER_ROOM:
                self._long[first + number] = length

    def suspects(self) -> None:
        """Every slot begins with a copy of its entry: look there for what the table has lost."""
        layout = self._store.file.layout
        wanted = [(layout.slot_at(slot), PAGE) for slot in self._suspects]
        heads = _read(self._store, self._io, wanted, Purpose.HEAD)
        for (slot, told), head in zip(self._suspects.items(), heads, strict=True):
            raw = head[:ENTRY_BYTES]
            if len(raw) < ENTRY_BYTES:
                continue
            rows, whole = read_rows(raw, slot, self._store.tag)
            if whole[0] and told in (None, int(rows["sequence"][0])):
                self._keep(raw, rows, whole, slot)
                self.repairs[slot] = raw
                self.healed += 1

    def without_value(self, rows: Rows) -> list[int]:
        """Numbers of those rows whose values are not what they say. A value that cannot be read now is left
        to those who want it later."""
        layout = self._store.file.layout
        parts: list[tuple[int, Piece]] = []
        for number, row in enumerate(rows):
            begin = layout.slot_at(int(row["slot"])) + int(row["head_pages"]) * PAGE
            parts += [(number, piece) for piece in cut(begin, 0, round_up(int(row["size"])))]
        states = [xxhash.xxh3_128() for _ in range(len(rows))]
        unread = set()
        wanted = [(piece.offset, piece.length) for _, piece in parts]
        try:
            found = _read(self._store, self._io, wanted, Purpose.VALUE)
            for (number, piece), part in zip(parts, found, strict=True):
                states[number].update(part)
                if len(part) < piece.length:
                    unread.add(number)
        except KVFerryError:
            return []
        return [
            number
            for number, (state, row) in enumerate(zip(states, rows, strict=True))
            if number not in unread and state.digest() != row["checksum"].tobytes()
        ]

    def read_long_headers(self, slots: Iterable[int]) -> None:
        """Fetch what of long headers stands in the slots alone. What cannot be read is left out."""
        long = [slot for slot in slots if slot in self._long]
        layout = self._store.file.layout
        wanted = [(layout.slot_at(slot), head_bytes(self._long[slot])) for slot in long]
        heads = _read(self._store, self._io, wanted, Purpose.HEAD)
        for slot, head in zip(long, heads, strict=True):
            rest = self._long[slot] - HEADER_ROOM
            self.headers[slot] += head[ENTRY_BYTES : ENTRY_BYTES + rest]


def _read(
    store: Store,
    io: BlockIO,
    wanted: Sequence[tuple[int, int]],
    purpose: Purpose,
) -> Iterator[bytes]:
    """The bytes of each stretch of the file, in whole pages; fewer where the file ends or fails.

    Raises :class:`KVFerryError` at the end when the disk gave nothing at all.
    """
    bounce = Bounce(_WAVE_BYTES)
    failures: list[int] = []
    for first, last in _waves(wanted, bounce.length):
        bounce.reset()
        views, pieces = [], []
        for offset, length in wanted[first:last]:
            view, address = bounce.take(length)
            views.append(view)
            pieces.append(Piece(offset, address, length, purpose))
        results = io.read(store.file.fd, pieces)
        for view, result in zip(views, results, strict=True):
            if result < 0:
                failures.append(result)
            yield bytes(view[: max(0, result)])
    if failures and len(failures) == len(wanted):
        raise fault(os_error(failures[0]), "the store of the tier cannot be read", store.file.path)


def _waves(wanted: Sequence[tuple[int, int]], room: int) -> Iterator[tuple[int, int]]:
    """Beginnings and ends of runs of stretches that fit into so much memory."""
    first, taken = 0, 0
    for number, (_, length) in enumerate(wanted):
        if taken + length > room:
            yield first, number
            first, taken = number, 0
        taken += length
    if first < len(wanted):
        yield first, len(wanted)
