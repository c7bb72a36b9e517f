"""Buffers that reads of peers pass through: one is emptied while the other is read into."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

from attrs import define, field, frozen

from kvferry.control.orders import ItemFault
from kvferry.data.priorities import leave_the_engines_core
from kvferry.data.pulls import LANDING, Reading

_log = logging.getLogger(__name__)

PARTS = 2
"""With four nothing went faster, and what was read was more often out of the processor's caches again."""
BATCH_BYTES = 8 << 20
"""Read at once, where a part holds more: what comes first is not emptied before all of it has come."""
BATCHES_AT_LEAST = 8
"""A passage of fewer bytes is cut into so many batches all the same, or nothing of it would overlap."""


@frozen
class Landed:
    """The chunk at ``place`` of a passage lies in a slot of the buffers."""

    place: int
    slot: int


@frozen(kw_only=True)
class Passage:
    """Chunks of a peer that pass through the buffers, in their order.

    ``peer``, ``epoch``, ``region``, ``from_slots``, ``tokens``, ``deadline`` and ``may_be_early`` as in
    :class:`kvferry.data.pulls.Reading`. ``empty`` takes some of them out of the buffers and says of which
    places it could not, and why. ``ended`` is called once, with all that failed. Where one chunk fails,
    nothing more is read. Both are called from the landing's thread.
    """

    id: int
    peer: str
    epoch: bytes
    region: str
    from_slots: tuple[int, ...]
    tokens: tuple[int, ...]
    deadline: float
    empty: Callable[[Sequence[Landed]], Mapping[int, str]]
    ended: Callable[[dict[int, ItemFault], str], None]
    may_be_early: bool = False


@define(eq=False)
class _Journey:
    """A passage under way."""

    passage: Passage
    per_batch: int
    next: int = 0
    under_way: int = 0
    """Batches."""
    faults: dict[int, ItemFault] = field(factory=dict)
    reason: str = ""
    stopped: bool = False

    def fail(self, places: Collection[int], fault: ItemFault, reason: str) -> None:
        self.faults.update(dict.fromkeys(places, fault))
        self.reason = self.reason or reason
        self.stopped = True


@define(eq=False)
class _Batch:
    """Neighbours of a journey in one part of the buffers. Hears of the end of its reading."""

    journey: _Journey
    places: range
    number: int = 0
    first_slot: int = 0
    faults: dict[int, ItemFault] = field(factory=dict)
    reason: str = ""
    over: threading.Event = field(factory=threading.Event)

    def filled(self, slots: Collection[int]) -> None:
        pass

    def done(self, _number: int, faults: dict[int, ItemFault], reason: str) -> None:
        self.faults, self.reason = faults, reason
        self.over.set()


class Landing:
    """``slots`` slots of one region, two at the least, in parts that take turns.

    ``read`` begins a reading, and its listener hears of its end whatever happens, at the latest soon after
    its deadline; ``cancel(number)`` ends one early. While one part is emptied, the other is read into.
    Passages go in the order in which they came.

    Threads: :meth:`submit`, :meth:`cancel` and :meth:`stop` from any; a thread of its own does the rest.
    """

    def __init__(
        self, slots: int, slot_bytes: int, read: Callable[[Reading], None], cancel: Callable[[int], None]
    ) -> None:
        self._parts = min(PARTS, slots)
        self._part = slots // self._parts
        self._most = max(1, min(self._part, BATCH_BYTES // slot_bytes))
        self._read = read
        self._cancel = cancel
        self._changed = threading.Condition()
        self._waiting: deque[_Journey] = deque()
        self._reading: list[_Batch] = []
        self._numbers = 0
        self._open = 0
        """Passages that have not ended."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin. Called once."""
        self._thread = threading.Thread(target=self._run, name="kvferry-landing", daemon=True)
        self._thread.start()

    def submit(self, passage: Passage) -> None:
        """Have it brought. It ends at once after :meth:`stop`."""
        count = len(passage.from_slots)
        journey = _Journey(passage, max(1, min(self._most, -(-count // BATCHES_AT_LEAST))))
        if not count:
            passage.ended({}, "")
            return
        with self._changed:
            stopping = self._stopping
            if not stopping:
                self._open += 1
                self._waiting.append(journey)
                self._changed.notify_all()
        if stopping:
            passage.ended(dict.fromkeys(range(count), ItemFault.CANCELLED), "the channel is being closed")

    def cancel(self, number: int) -> None:
        """Read no more for the passage of this id. It ends soon."""
        with self._changed:
            journeys = {id(each): each for each in self._waiting}
            journeys |= {id(batch.journey): batch.journey for batch in self._reading}
            for journey in journeys.values():
                if journey.passage.id == number:
                    journey.stopped = True
                    journey.reason = journey.reason or "the load was cancelled"
            numbers = [batch.number for batch in self._reading if batch.journey.passage.id == number]
        for each in numbers:
            self._cancel(each)

    def settle(self) -> None:
        """Wait until nothing is under way: soon, while every reading fails."""
        with self._changed:
            while self._open:
                self._changed.wait()

    def stop(self, seconds: float) -> bool:
        """Bring nothing more. Idempotent. Whether nothing touches the buffers any more."""
        with self._changed:
            self._stopping = True
            for journey in self._waiting:
                journey.stopped = True
                journey.reason = journey.reason or "the channel is being closed"
            self._changed.notify_all()
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    # The thread

    def _run(self) -> None:
        leave_the_engines_core()
        reading: deque[_Batch] = deque()
        part = 0
        while True:
            while len(reading) < self._parts:
                following = self._next(wait=not reading)
                if following is None:
                    break
                self._begin(following, part * self._part)
                part = (part + 1) % self._parts
                reading.append(following)
            if not reading:
                return
            self._land(reading.popleft())

    def _next(self, *, wait: bool) -> _Batch | None:
        """What is to be read next; ``None`` if there is nothing now, or ever again."""
        while True:
            ended: _Journey | None = None
            with self._changed:
                while wait and not self._waiting and not self._stopping:
                    self._changed.wait()
                if not self._waiting:
                    return None
                journey = self._waiting[0]
                count = len(journey.passage.from_slots)
                if not journey.stopped:
                    places = range(journey.next, min(count, journey.next + journey.per_batch))
                    journey.next = places.stop
                    if journey.next == count:
                        self._waiting.popleft()
                    journey.under_way += 1
                    self._numbers -= 1
                    batch = _Batch(journey, places, self._numbers)
                    self._reading.append(batch)
                    return batch
                self._waiting.popleft()
                self._leave_out(journey)
                if not journey.under_way:
                    ended = journey
            if ended is not None:
                self._end(ended)

    def _begin(self, batch: _Batch, first_slot: int) -> None:
        passage, places = batch.journey.passage, batch.places
        batch.first_slot = first_slot
        self._read(
            Reading(
                id=batch.number,
                peer=passage.peer,
                epoch=passage.epoch,
                region=passage.region,
                from_slots=passage.from_slots[places.start : places.stop],
                tokens=passage.tokens[places.start : places.stop],
                into=LANDING,
                slots=tuple(range(first_slot, first_slot + len(places))),
                deadline=passage.deadline,
                listener=batch,
                may_be_early=passage.may_be_early,
            )
        )

    def _land(self, batch: _Batch) -> None:
        """Wait for what was read, and empty it."""
        batch.over.wait()
        journey, places = batch.journey, batch.places
        landed = [
            Landed(place, batch.first_slot + number)
            for number, place in enumerate(places)
            if number not in batch.faults
        ]
        failed: Mapping[int, str] = {}
        if landed:
            try:
                failed = journey.passage.empty(landed)
            except Exception as error:  # noqa: BLE001 - the passage ends all the same
                failed = dict.fromkeys((each.place for each in landed), repr(error))
        with self._changed:
            self._reading.remove(batch)
            for number, fault in batch.faults.items():
                journey.fail((places[number],), fault, batch.reason)
            for place, why in failed.items():
                journey.fail((place,), ItemFault.FAILED, why)
            journey.under_way -= 1
            if journey.stopped and journey in self._waiting:
                self._waiting.remove(journey)
                self._leave_out(journey)
            ended = not journey.under_way and journey not in self._waiting
        if ended:
            self._end(journey)

    def _leave_out(self, journey: _Journey) -> None:
        """What was not begun is not read any more. Under the lock."""
        rest = range(journey.next, len(journey.passage.from_slots))
        journey.next = rest.stop
        journey.fail(rest, ItemFault.CANCELLED, "a chunk before it could not be read")

    def _end(self, journey: _Journey) -> None:
        try:
            journey.passage.ended(journey.faults, journey.reason if journey.faults else "")
        except Exception:  # noqa: BLE001 - those behind it are brought all the same
            _log.exception("kvferry: the end of a load out of a peer could not be told")
        with self._changed:
            self._open -= 1
            self._changed.notify_all()
