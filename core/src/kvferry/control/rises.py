"""Chunks on their way up from a lower tier, for requests that wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from attrs import define, field

from kvferry.control.brought import Brought
from kvferry.control.consignment import Consignment
from kvferry.control.deadlines import NEVER
from kvferry.control.manager import CacheManager
from kvferry.control.orders import OrderResult
from kvferry.control.outcomes import WriteOutcome
from kvferry.control.segments import Origin, Segment

RAISED_AT_ONCE = 4
"""Chunks that are reserved in the first tier under one hold of the lock."""
ENDED_AT_ONCE = 4
"""Rises that one hold of the lock brings to their end."""


@define(eq=False, kw_only=True)
class _Fetch(Consignment):
    """An order to fetch."""

    segment: Segment


@define(eq=False)
class Rise:
    """One prefix on its way up. Ends when everything of it has come, or cannot come.

    While it is ``open_ended`` somebody looks for what comes behind its segments.
    """

    id: int
    salt: str
    waiters: set[str]
    segments: deque[Segment]
    held: list[Segment]
    """Every segment that it ever had: to be released at its end."""
    names: tuple[bytes, ...]
    """Full chunks of it that other requests may wait for, too."""
    deadline: float
    open_ended: bool = False
    building: _Fetch | None = None
    under_way: dict[int, _Fetch] = field(factory=dict)
    awaited: set[bytes] = field(factory=set)
    """Chunks that somebody else is writing into the first tier."""
    cancelled: bool = False

    @property
    def waits_to_send(self) -> bool:
        return bool(self.segments or self.building or self.awaited or self.open_ended)


class Rises:
    """All prefixes on their way up. Under the manager's lock. ``on_granted`` is told of every slot of the
    first tier that will be filled.

    No more is on its way from a tier than its settings allow; what waits for its turn goes in the
    order of arrival, its head first.
    """

    def __init__(
        self,
        first: CacheManager,
        next_id: Callable[[], int],
        on_granted: Callable[[int], None] = lambda _slot: None,
    ) -> None:
        self.brought = Brought()
        self.on_abandoned: Callable[[int], None] = lambda _rise: None
        """Told of an open-ended rise of which nothing will come: nobody need look any further for it."""
        self._first = first
        self._on_granted = on_granted
        self._next_id = next_id
        self._last = 0
        self._open: dict[int, Rise] = {}
        self._unsent: dict[int, Rise] = {}
        """Those of them that have something to send for still, or wait for others' writes."""
        self._names: dict[bytes, Rise] = {}
        self._orders: dict[int, Rise] = {}
        self._results: deque[tuple[Rise, OrderResult]] = deque()
        """Of orders that ended, and whose chunks are not all visible yet."""
        self._deadline = NEVER
        self.expired = 0
        """Rises that were given up because their time was over."""
        self.late = 0
        """Requests whose time to wait was over before all that they waited for had come."""
        self.shared = 0
        """Requests that found what they need on its way already."""

    def __len__(self) -> int:
        return len(self._open)

    def goes_on(self, number: int) -> bool:
        """Whether something may still come of the rise."""
        rise = self._open.get(number)
        return rise is not None and not rise.cancelled

    def join(self, digest: bytes, request: str) -> int:
        """Wait for the rise that brings this full chunk; its number, or 0 if there is none."""
        rise = self._names.get(digest)
        if rise is None or rise.cancelled:
            return 0
        rise.waiters.add(request)
        self.shared += 1
        return rise.id

    def start(
        self,
        request: str,
        salt: str,
        segments: Sequence[Segment],
        names: Sequence[bytes],
        deadline: float,
        *,
        open_ended: bool = False,
    ) -> int:
        """Begin to bring these up; the segments are the rise's from here on. Its number. If it is
        ``open_ended`` it waits for :meth:`extend`."""
        self._last += 1
        rise = Rise(
            self._last,
            salt,
            {request},
            deque(segments),
            list(segments),
            tuple(name for name in names if name not in self._names),
            deadline,
            open_ended,
        )
        self._open[rise.id] = self._unsent[rise.id] = rise
        self._names.update(dict.fromkeys(rise.names, rise))
        self._deadline = min(self._deadline, deadline)
        return rise.id

    def extend(self, number: int, segment: Segment | None) -> None:
        """What was looked for behind a rise was found, or was not. A segment that it has no use for any more
        is released at once."""
        rise = self._open.get(number)
        if rise is None or not rise.open_ended:
            if segment is not None:
                segment.release()
            return
        rise.open_ended = False
        if segment is not None:
            rise.segments.append(segment)
            rise.held.append(segment)
        self._end_if_done(rise)

    def leave(self, request: str, *, late: bool = False) -> None:
        """The request waits no longer, or not as ``late`` as this. A rise that nobody waits for stops."""
        self.late += late
        for rise in list(self._open.values()):
            if request in rise.waiters:
                rise.waiters.discard(request)
                if not rise.waiters:
                    self._cancel(rise)

    def advance(self, now: float) -> bool:
        """Send for some chunks of some rise; whether there is more to send for now."""
        full: set[int] = set()
        ended = 0
        for rise in list(self._unsent.values()):
            if rise.building is None and rise.segments and id(rise.segments[0].origin) in full:
                continue
            if self._advance(rise, now):
                return True
            if not rise.waits_to_send:
                self._unsent.pop(rise.id, None)
                ended += 1
                if ended == ENDED_AT_ONCE:
                    return True
            elif rise.segments:
                full.add(id(rise.segments[0].origin))
        return False

    def report(self, result: OrderResult) -> bool:
        """The end of an order to fetch, for :meth:`settle`; ``False`` if it is none of these."""
        rise = self._orders.pop(result.id, None)
        if rise is None:
            return False
        self._results.append((rise, result))
        return True

    def settle(self, now: float) -> bool:
        """Let some chunks that have come be found; whether there were any."""
        if not self._results:
            return False
        rise, result = self._results[0]
        fetch = rise.under_way[result.id]
        if fetch.complete_one(result.faults):
            return True
        self._results.popleft()
        del rise.under_way[result.id]
        came = [chunk for place, chunk in enumerate(fetch.chunks) if place not in result.faults]
        self.brought.note(came, fetch.segment.source)
        fetch.segment.fetched(fetch.chunks, result, now)
        if result.faults:
            self._stop(rise)
        self._end_if_done(rise)
        return True

    def expire(self, now: float) -> None:
        """Give up what has taken too long."""
        if now < self._deadline:
            return
        for rise in list(self._open.values()):
            if rise.deadline <= now and not rise.cancelled:
                self.expired += 1
                self.late += len(rise.waiters)
                for origin in _origins(rise.under_way.values()):
                    origin.failed_once(f"chunks have not come within {origin.settings.load_deadline:g} s")
                self._cancel(rise)
        waiting = [rise.deadline for rise in self._open.values() if not rise.cancelled]
        self._deadline = min(waiting, default=NEVER)

    def next_deadline(self) -> float:
        return self._deadline

    def stop_all(self) -> None:
        """Send for nothing more. What is under way still comes."""
        for rise in list(self._open.values()):
            self._cancel(rise)

    def workers_lost(self) -> None:
        """No result comes any more, and the first tier knows it."""
        for rise in list(self._open.values()):
            rise.under_way.clear()
            rise.building = None
            rise.segments.clear()
            rise.awaited.clear()
            rise.open_ended = False
            self._end_if_done(rise)
        self._unsent.clear()
        self._orders.clear()
        self._results.clear()

    # One rise

    def _advance(self, rise: Rise, now: float) -> bool:
        rise.awaited = {digest for digest in rise.awaited if self._first.copying.pending(digest)}
        while rise.segments and rise.segments[0].at >= rise.segments[0].stop:
            rise.segments.popleft()
        if not rise.segments:
            self._send(rise, now)
            self._end_if_done(rise)
            return False
        segment = rise.segments[0]
        if not segment.stands(now):
            self._stop(rise)
            self._end_if_done(rise)
            return False
        if rise.building is not None and rise.building.segment is not segment:
            self._send(rise, now)
        origin = segment.origin
        room = origin.settings.chunks_in_flight - origin.fetching
        count = min(RAISED_AT_ONCE, room, segment.stop - segment.at)
        if count <= 0:
            self._send(rise, now)
            return False
        before = segment.at
        self._raise_some(rise, segment, count, now)
        full = rise.building is not None and len(rise.building.chunks) >= origin.settings.chunks_per_order
        if full or not rise.segments:
            self._send(rise, now)
        self._end_if_done(rise)
        return bool(rise.segments) and segment.at > before

    def _raise_some(self, rise: Rise, segment: Segment, count: int, now: float) -> None:
        chunks = segment.facts(count)
        if not chunks or chunks[0].end <= now:
            self._send(rise, now)
            self._stop(rise)
            return
        head = chunks[0]
        alike = list(takewhile(lambda each: (each.model, each.end) == (head.model, head.end), chunks))
        answer = self._first.reserve(
            f"rise {rise.id}",
            rise.salt,
            [chunk.write for chunk in alike],
            now,
            model=head.model,
            ttl=None if head.end == NEVER else head.end - now,
        )
        building = rise.building = rise.building or _Fetch(into=self._first, segment=segment)
        answers = list(zip(alike, answer.items, strict=True))
        granted = building.add(answer, ((chunk, given.slot) for chunk, given in answers))
        for _, slot in granted:
            self._on_granted(slot)
        segment.origin.fetching += len(granted)
        refused = len(chunks) < count  # something went meanwhile
        for chunk, given in answers:
            if given.outcome is WriteOutcome.BUSY:
                rise.awaited.add(chunk.digest)
            elif given.outcome not in (WriteOutcome.GRANTED, WriteOutcome.RESIDENT):
                refused = True
        segment.at += len(alike)
        if refused:
            self._send(rise, now)
            self._stop(rise)

    def _send(self, rise: Rise, now: float) -> None:
        fetch, rise.building = rise.building, None
        if fetch is None or not fetch.chunks:
            return
        number = self._next_id()
        rise.under_way[number] = fetch
        self._orders[number] = rise
        segment = fetch.segment
        segment.origin.orders.append(segment.order(number, fetch.chunks, fetch.slots, now))

    def _stop(self, rise: Rise) -> None:
        """Send for nothing more, and look for nothing more."""
        rise.segments.clear()
        if rise.open_ended:
            rise.open_ended = False
            self.on_abandoned(rise.id)
        fetch, rise.building = rise.building, None
        if fetch is not None:
            fetch.segment.origin.fetching -= len(fetch.chunks)
            fetch.abort()

    def _cancel(self, rise: Rise) -> None:
        if rise.cancelled:
            return
        rise.cancelled = True
        self._stop(rise)
        for number, fetch in rise.under_way.items():
            fetch.segment.origin.orders.append(fetch.segment.cancel(number))
        rise.awaited.clear()
        self._end_if_done(rise)

    def _end_if_done(self, rise: Rise) -> None:
        if rise.waits_to_send or rise.under_way or rise.id not in self._open:
            return
        del self._open[rise.id]
        self._unsent.pop(rise.id, None)
        for name in rise.names:
            if self._names.get(name) is rise:
                del self._names[name]
        for segment in rise.held:
            segment.release()


def _origins(fetches: Iterable[_Fetch]) -> Iterable[Origin]:
    """Each once."""
    return {id(fetch.segment.origin): fetch.segment.origin for fetch in fetches}.values()
