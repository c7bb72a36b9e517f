"""What a power cut leaves of one file: its changes are recorded, and every image that may be left is built.

For a store that writes in place. Hand it the file through an object that says each change to a
:class:`BlockLog`, let it work, and look at :meth:`BlockLog.cuts`: for every moment, what the disk may
hold. :mod:`kvferry.testing.faulty_files` does the same for whole files, their names included.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from attrs import define, field, frozen

SECTOR = 512
"""What a disk writes wholly or not at all. Larger writes may be torn between any two sectors."""


@frozen
class Write:
    """``data`` at ``offset``."""

    offset: int
    data: bytes


@frozen
class Resize:
    """The file becomes ``length`` bytes long: what is cut off is lost, what is new is zero."""

    length: int


Change = Write | Resize


@define(eq=False)
class _Step:
    """A change or a flush, with the numbers of the events at its beginning and its end. The end is infinite
    while nobody knows what it did: it goes on, or it failed."""

    what: Change | None
    begun: int
    ended: float = math.inf


class BlockLog:
    """The changes of one file from ``content`` on, all of which is durable. Threads: any.

    Every change and every flush is told around the call that does it::

        with log.changing(Write(offset, data)):
            os.pwrite(descriptor, data, offset)
        with log.flushing():
            os.fdatasync(descriptor)

    A flush makes durable what had ended when it began. A block that raises was a call that failed: a
    change may or may not have happened then, and a flush has done nothing.
    """

    def __init__(self, content: bytes = b"") -> None:
        self._content = content
        self._steps: list[_Step] = []
        self._marks: list[tuple[int, object]] = []
        self._events = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """How many events there were: beginnings, ends and marks."""
        return self._events

    @contextmanager
    def changing(self, *changes: Change) -> Iterator[None]:
        """One call that makes several changes, in no order among themselves."""
        with self._lock:
            number = self._event()
            steps = [_Step(change, number) for change in changes]
            self._steps += steps
        yield
        self._end(steps)

    @contextmanager
    def flushing(self) -> Iterator[None]:
        with self._lock:
            step = _Step(None, self._event())
            self._steps.append(step)
        yield
        self._end([step])

    def mark(self, what: object) -> None:
        """Remember that something happened now: what was promised to somebody, most of all."""
        with self._lock:
            self._marks.append((self._event(), what))

    def cut(self, events: int) -> PowerCut:
        """The power fails after so many events."""
        with self._lock:
            begun = [step for step in self._steps if step.begun < events]
            marks = tuple(what for number, what in self._marks if number < events)
        flushes = [step.begun for step in begun if step.what is None and step.ended < events]
        covered = max(flushes, default=-1)
        changes = [(step.what, step.ended < covered) for step in begun if step.what is not None]
        return PowerCut(self._content, changes, marks)

    def cuts(self) -> Iterator[PowerCut]:
        """One after the other, for every moment from the beginning to the end."""
        for events in range(len(self) + 1):
            yield self.cut(events)

    def _event(self) -> int:
        self._events += 1
        return self._events - 1

    def _end(self, steps: Sequence[_Step]) -> None:
        with self._lock:
            number = self._event()
            for step in steps:
                step.ended = number


@define(eq=False)
class PowerCut:
    """What may be left at one moment.

    Each sector holds what is durable there, or what any later write put there: writes that were not
    flushed get lost, overtake each other, and are torn. The length is chosen in the same way.

    ``marks`` are those set before.
    """

    _content: bytes
    _changes: Sequence[tuple[Change, bool]]
    """In the order of their beginning, each with whether it is durable."""
    marks: tuple[object, ...]
    pending: tuple[Change, ...] = field(init=False)
    """What is not durable."""
    _sectors: dict[int, list[bytes]] = field(factory=dict)
    """What each sector may hold, by number; what is durable comes first."""
    _late: dict[int, list[bytes]] = field(factory=dict)
    """What was not durable of that: it may come after a durable write that began later."""
    _lengths: list[int] = field(init=False)
    _longest: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.pending = tuple(change for change, durable in self._changes if not durable)
        durable_length = now = self._longest = len(self._content)
        late: list[int] = []
        for change, durable in self._changes:
            if isinstance(change, Resize):
                end = length = change.length
                self._put(Write(end, bytes(max(0, self._longest - end))), durable)
            else:
                end = change.offset + len(change.data)
                length = max(now, end)
                self._put(change, durable)
            if durable:
                durable_length = end if isinstance(change, Resize) else max(durable_length, end)
            elif length != now:
                late.append(length)
            now = length
            self._longest = max(self._longest, length)
        self._lengths = list(dict.fromkeys([durable_length, *late]))

    @property
    def choices(self) -> tuple[int, ...]:
        """How many different contents each undecided sector may have, and how many lengths there are."""
        open_sectors = [len(found) for _, found in self._undecided()]
        lengths = len(self._lengths)
        return (*open_sectors, lengths) if lengths > 1 else tuple(open_sectors)

    @property
    def count(self) -> int:
        """How many images may be left."""
        return math.prod(self.choices)

    def image(self, pick: Callable[[int], int]) -> bytes:
        """One image. ``pick(n)`` chooses from ``n`` contents of a sector, or lengths: 0 is what is durable,
        then come the others in the order of their writes."""
        chosen = {sector: found[pick(len(found))] for sector, found in self._undecided()}
        number = pick(len(self._lengths)) if len(self._lengths) > 1 else 0
        return self._build(chosen, self._lengths[number])

    def images(self) -> Iterator[bytes]:
        """Every image, each once. Look at :attr:`count` first."""
        for picks in itertools.product(*(range(number) for number in self.choices)):
            yield self.image(_in_turn(picks))

    def image_of(self, kept: Sequence[int]) -> bytes:
        """The image in which these of the pending changes happened, whole and in this order, and no
        others."""
        content = bytearray(self._build({}, self._lengths[0]))
        for number in kept:
            change = self.pending[number]
            if isinstance(change, Resize):
                del content[change.length :]
                content += bytes(change.length - len(content))
            else:
                end = change.offset + len(change.data)
                content += bytes(max(0, end - len(content)))
                content[change.offset : end] = change.data
        return bytes(content)

    def whole_images(self) -> Iterator[bytes]:
        """Every image in which no write is torn, each once: any of the pending changes, in their order."""
        seen: set[bytes] = set()
        numbers = range(len(self.pending))
        for kept in itertools.product((False, True), repeat=len(numbers)):
            image = self.image_of([number for number in numbers if kept[number]])
            if image not in seen:
                seen.add(image)
                yield image

    def _undecided(self) -> Iterator[tuple[int, list[bytes]]]:
        for sector, found in self._sectors.items():
            different = list(dict.fromkeys(found))
            if len(different) > 1:
                yield sector, different

    def _put(self, write: Write, durable: bool) -> None:
        end = write.offset + len(write.data)
        for sector in range(write.offset // SECTOR, -(-end // SECTOR)):
            begin = sector * SECTOR
            first, last = max(begin, write.offset), min(begin + SECTOR, end)
            part = write.data[first - write.offset : last - write.offset]
            before = self._sectors.setdefault(sector, [self._original(sector)])
            whole = last - first == SECTOR
            under = before[:1] if whole else before
            after = [old[: first - begin] + part + old[last - begin :] for old in under]
            late = self._late.setdefault(sector, [])
            if durable:
                self._sectors[sector] = [*after, *late]
            else:
                late += after
                self._sectors[sector] = [*before, *after]

    def _original(self, sector: int) -> bytes:
        return self._content[sector * SECTOR : (sector + 1) * SECTOR].ljust(SECTOR, b"\x00")

    def _build(self, chosen: dict[int, bytes], length: int) -> bytes:
        content = bytearray(self._content.ljust(self._longest, b"\x00"))
        for sector, found in self._sectors.items():
            at = sector * SECTOR
            content[at : at + SECTOR] = chosen.get(sector, found[0])
        return bytes(content[:length].ljust(length, b"\x00"))


def _in_turn(picks: Sequence[int]) -> Callable[[int], int]:
    coming = iter(picks)
    return lambda _: next(coming)
