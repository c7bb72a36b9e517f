"""A small store, what was promised of it, and whether an opening keeps all of that."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from kvferry.api import ChunkHeader, ChunkKey, DeleteStatus, ReadStatus, WriteStatus
from kvferry.testing.conformance.driver import Driver, digest, header_of, make_context, value_of
from kvferry.testing.guarded import GuardedMemory
from kvferry_backend_ssd.backend import SSDBackend
from kvferry_backend_ssd.block_io import BlockIO, BlockIOFactory
from kvferry_backend_ssd.choice import choose_io
from kvferry_backend_ssd.layout import Layout
from kvferry_backend_ssd.options import IOPath, SSDOptions
from kvferry_backend_ssd.owner import OWNER_BYTES

Chunk = tuple[ChunkHeader, bytes]
Wrap = Callable[[BlockIO], BlockIO]

HEADER_BYTES = 4096
VALUE_BYTES = 4096
SLOT_BYTES = HEADER_BYTES + VALUE_BYTES
PATIENCE = 30.0
_MEMORY_BYTES = 1 << 22
_NAMESPACE = digest("crash")
_MANY_ALIASES = tuple((digest("alias", number), 1 + number) for number in range(120))


def chunk(number: int) -> Chunk:
    """The chunk of a number. Some fill their last page, some do not."""
    size = VALUE_BYTES - 1000 * (number % 3)
    key = ChunkKey(_NAMESPACE, digest(number))
    facts = {"aliases": _MANY_ALIASES} if width(number) > 1 else {}
    return header_of(key, size, number, **facts), value_of(key, size)


def width(number: int) -> int:
    """How many slots a chunk takes: a header that does not fit into its page makes it two."""
    return 2 if number % 10 == 9 and number < 100 else 1


def chunks(numbers: Iterable[int]) -> list[Chunk]:
    return [chunk(number) for number in numbers]


def key(number: int) -> ChunkKey:
    return chunk(number)[0].key


@frozen(kw_only=True)
class Rig:
    """Opens the real backend over a folder, for a store of a few slots."""

    path: Path
    io: IOPath
    slots: int = 4
    wrap: Wrap | None = None
    """Put around each object that does I/O."""
    facts: Mapping[str, Any] = field(factory=dict)
    """What the context has otherwise."""

    @property
    def capacity(self) -> int:
        return OWNER_BYTES + Layout(SLOT_BYTES).bytes_for(self.slots)

    @property
    def store(self) -> Path:
        """The one store file."""
        (found,) = self.path.glob("*/store-*.kvf")
        return found

    def over(self, wrap: Wrap) -> Rig:
        return evolve(self, wrap=wrap)

    def make(self) -> Driver:
        """A backend that is not open yet."""
        make_io: BlockIOFactory | None = None
        if self.wrap is not None:
            real, wrap = choose_io(self.io, "tier")[1], self.wrap
            make_io = lambda depth: wrap(real(depth))  # noqa: E731
        options = SSDOptions(path=str(self.path), io=self.io, queue_depth=4)
        memory = GuardedMemory("memory", _MEMORY_BYTES)
        context = make_context(
            memory, {"max_value_bytes": VALUE_BYTES, "max_header_bytes": HEADER_BYTES, **self.facts}
        )
        return Driver(SSDBackend(options, self.capacity, make_io), context, memory, PATIENCE)

    def open(self) -> Driver:
        """Open one and recover it."""
        driver = self.make()
        driver.backend.open(driver.context)
        try:
            driver.recovered = list(driver.backend.recover())
        except BaseException:
            driver.close()
            raise
        return driver


@define
class Promises:
    """What was told to whoever stored and deleted chunks, by their numbers."""

    stored: set[int] = field(factory=set)
    deleted: set[int] = field(factory=set)
    """Told to be gone. What is in neither may be there or not."""
    _under_way: Counter[int] = field(factory=Counter)
    _mixed: set[int] = field(factory=set)
    """Asked for twice at the same time, in no order: it may end either way."""

    def begin(self, number: int) -> None:
        """Something is asked for that may change whether this chunk is there."""
        self.stored.discard(number)
        self.deleted.discard(number)
        self._under_way[number] += 1
        if self._under_way[number] > 1:
            self._mixed.add(number)

    def hear(self, number: int, status: WriteStatus | DeleteStatus) -> None:
        """One result."""
        self._under_way[number] -= 1
        if self._under_way[number]:
            return
        if number in self._mixed:
            self._mixed.discard(number)
        elif status in (WriteStatus.STORED, WriteStatus.EXISTS):
            self.stored.add(number)
        elif status is not DeleteStatus.FAILED:
            self.deleted.add(number)


def check(rig: Rig, promises: Promises, known: Iterable[int], *, refill: bool = True) -> set[int]:
    """Open the store, see whether every promise is kept, and give the numbers of the chunks in it.

    What is listed is there with its bytes and its header, once each; nothing else is. With ``refill``,
    exactly as many chunks of one slot go in as slots are left, and the next opening has them all.
    """
    known = list(known)
    by_key = {key(number): number for number in known}
    driver = rig.open()
    try:
        numbers = [by_key.get(header.key, -1) for header in driver.recovered]
        listed = set(numbers)
        assert -1 not in listed, "a chunk came back that was never written"
        assert len(listed) == len(numbers), f"a chunk came back twice: {numbers}"
        for number, header in zip(numbers, driver.recovered, strict=True):
            assert header == chunk(number)[0], f"the header of chunk {number} is another"
        assert promises.stored <= listed, f"lost: {promises.stored - listed}"
        assert not promises.deleted & listed, f"back: {promises.deleted & listed}"
        driver.expect(chunks(sorted(listed)))
        driver.expect_missing(
            [(key(number), chunk(number)[0].size) for number in known if number not in listed]
        )
        if refill:
            _refill(driver, rig.slots, sorted(listed))
    finally:
        driver.close()
    assert driver.trespasses() == []
    if refill:
        again = rig.open()
        again.close()
        assert len(again.recovered) == len(listed) + rig.slots - _taken(listed)
    return listed


def _taken(numbers: Iterable[int]) -> int:
    """Slots that these chunks take."""
    return sum(map(width, numbers))


def _refill(driver: Driver, slots: int, listed: list[int]) -> None:
    more = chunks(range(1000, 1000 + slots - _taken(listed)))
    if more:
        driver.store(more)
    (result,) = driver.write([chunk(999)])
    assert result.status is WriteStatus.NO_SPACE, "there was more room than slots"
    driver.expect([*chunks(listed), *more])


def content(address: int, length: int) -> bytes:
    """Bytes of memory as they are now."""
    return ctypes.string_at(address, length)


def statuses(driver: Driver, numbers: Iterable[int]) -> list[ReadStatus]:
    """What reading each gives. ``FOUND`` with other bytes than were stored is a failed test."""
    wanted = chunks(numbers)
    found = driver.read([(header.key, header.size) for header, _ in wanted])
    for (_, value), each in zip(wanted, found, strict=True):
        assert each.data in (None, value), "other bytes than were stored"
    return [each.status for each in found]
