"""What clients and operators wish of chunks: pins, times to live, and to be told what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import define, field

from kvferry.control.entries import ROOT, State
from kvferry.control.events import ClearedFact, StoredFact
from kvferry.control.outcomes import ChunkWrite, PinOutcome, WriteAnswer, WriteOutcome
from kvferry.control.residency import Residency
from tests.simulation.coverage import Coverage
from tests.simulation.events import require

NEVER = float("inf")


class LifeTimes:
    """When chunks end, from what their writers said: a chunk lives as long as the longest wish for it, or
    for what is behind it."""

    def __init__(self) -> None:
        self._ends: dict[bytes, float] = {}
        self._writes: dict[bytes, ChunkWrite] = {}

    def wished(self, writes: Sequence[ChunkWrite], answers: Sequence[WriteAnswer], end: float) -> None:
        for write, answer in zip(writes, answers, strict=True):
            if answer.outcome is WriteOutcome.GRANTED:
                self._writes[write.digest] = write
                self._ends[write.digest] = end
            elif answer.outcome not in (WriteOutcome.RESIDENT, WriteOutcome.BUSY):
                continue
            self._ends[write.digest] = max(end, self._ends.get(write.digest, 0.0))
            before = write.parent
            while before is not None:
                self._ends[before] = max(end, self._ends[before])
                before = self._writes[before].parent

    def end(self, digest: bytes) -> float:
        """No chunk of this digest may be found from then on. A chunk that took the place of its own
        beginning lives as long as that would have."""
        write = self._writes[digest]
        beginnings = (self._ends.get(alias, 0.0) for alias, _ in write.aliases)
        return max(self._ends[digest], *beginnings, 0.0)


@define(eq=False)
class _Pin:
    end: float
    digests: set[bytes] = field(factory=set)


class PinModel:
    """What is pinned, by what callers were told."""

    def __init__(self, coverage: Coverage) -> None:
        self._pins: dict[tuple[str, str], _Pin] = {}
        self._coverage = coverage

    def answered(
        self, salt: str, name: str, row: int, end: float, outcome: PinOutcome, residency: Residency
    ) -> None:
        """``row`` is the chunk that was named; all before it is covered with it."""
        self._coverage.wish(f"pin: {outcome.value}")
        if outcome is not PinOutcome.PINNED:
            return
        pin = self._pins.setdefault((salt, name), _Pin(end))
        pin.end = max(pin.end, end)
        while row != ROOT:
            pin.digests.add(residency.entries.digests.digest(row))
            row = residency.entries.parent.view[row]

    def extended(self, name: str, end: float) -> None:
        for (_, known), pin in self._pins.items():
            if known == name:
                pin.end = max(pin.end, end)

    def ended(self, names: Iterable[tuple[str, str]], now: float) -> None:
        """Pins whose end was told."""
        for name in names:
            pin = self._pins.pop(name, None)
            require(pin is None or pin.end <= now, "a pin lasts until its end", f"{name} ended at {now}")
            self._coverage.wish("pin: came to its end")

    def unpinned(self, name: str) -> None:
        self._pins = {key: pin for key, pin in self._pins.items() if key[1] != name}
        self._coverage.wish("pin: taken back")

    def leaves(self, digest: bytes, now: float, *, evicted: bool) -> None:
        """A chunk goes."""
        for name, pin in self._pins.items():
            if digest in pin.digests:
                require(not evicted or pin.end <= now, "pinned chunks are not evicted", f"pin {name}")
                pin.digests.discard(digest)


class Listener:
    """Keeps an index of what it is told of, as a router does; sometimes it does not listen for long."""

    def __init__(self, coverage: Coverage) -> None:
        self.known: set[bytes] = set()
        self._coverage = coverage

    def listen(self, take: Callable[[int], list[object]], limit: int) -> None:
        for fact in take(limit):
            if isinstance(fact, ClearedFact):
                self._coverage.wish("told: lost count")
                self.known.clear()
            elif isinstance(fact, StoredFact):
                self._coverage.wish("told: stored")
                fits = fact.parent is None if not fact.depth else fact.parent in self.known
                require(fits, "facts come with true parents", f"depth {fact.depth}")
                self.known.add(fact.digest)
            else:
                self._coverage.wish("told: removed")
                require(fact.digest in self.known, "facts tell of what is known", "removed twice")
                self.known.remove(fact.digest)

    def check(self, residency: Residency) -> None:
        """After it has heard everything: what it knows can be found."""
        events = residency.events
        assert events is not None
        entries = residency.entries
        told = {entries.digests.digest(row) for row in range(entries.rows) if events.told.view[row]}
        require(self.known == told, "listeners know what is there", f"{len(self.known ^ told)} chunks differ")


GOING = (State.FREE, State.RETIRING, State.QUARANTINED)
