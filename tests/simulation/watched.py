"""The real cache manager under the eyes of a model that predicts every answer about leases."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from attrs import define

from kvferry.control.copying import Copying
from kvferry.control.entries import State
from kvferry.control.manager import SLICE_KEYS
from kvferry.control.matching import MatchCursor, TailKeys
from kvferry.control.outcomes import (
    ChunkWrite,
    Completion,
    Expired,
    LeaseOutcome,
    Lent,
    Match,
    OwnerEnded,
    PinOutcome,
    Removed,
    Reservation,
    WorkersLost,
    WriteOutcome,
)
from tests.simulation.coverage import Coverage
from tests.simulation.events import require
from tests.simulation.quotas import QuotaManager
from tests.simulation.truth import BLOCK, CHUNK
from tests.simulation.wishes import NEVER, LifeTimes, PinModel

Holds = Callable[[int, Sequence[int]], str]
"""What is wrong with a slot that should begin with these blocks on every rank; empty if nothing."""


@define(eq=False)
class Read:
    """A read lease as it must be."""

    owner: str
    deadline: float
    opened: float
    slots: tuple[int, ...] = ()
    in_flight: bool = False
    owned: bool = True


@define(eq=False)
class Write:
    """A reservation as it must be."""

    owner: str
    deadline: float
    opened: float
    slots: dict[int, int]
    given_up: bool = False
    owned: bool = True


class WatchedManager(QuotaManager):
    """Predicts the outcome of each call on leases from the calls before it, and checks every slot that
    is handed out: nobody may be at it, and what is found must be right on every rank.

    ``holds`` and ``busy`` look into the memory of the ranks, ``right`` gives the blocks of a digest. Private
    names have two underscores, so that none is ever one of the manager's own.
    """

    def __init__(
        self,
        coverage: Coverage,
        *,
        right: Callable[[bytes], tuple[int, ...]],
        holds: Holds,
        busy: Callable[[int], bool],
        clock: Callable[[], float],
        lease_seconds: float,
        write_seconds: float,
        **more: Any,
    ) -> None:
        super().__init__(lease_seconds=lease_seconds, write_seconds=write_seconds, **more)
        self.coverage = coverage
        self.reads: dict[int, Read] = {}
        self.writes: dict[int, Write] = {}
        self.ended: deque[int] = deque(maxlen=50)
        self.answers: Counter[WriteOutcome] = Counter()
        self.__right = right
        self.__holds = holds
        self.__busy = busy
        self.__clock = clock
        self.__lease_seconds = lease_seconds
        self.__write_seconds = write_seconds
        self.lives = LifeTimes()
        self.pinned = PinModel(coverage)
        self.evicting = False
        """Whether a call is under way that may evict, and remove chunks for no other reason."""
        self.slots_read: Counter[int] = Counter()
        """How many read leases each slot is under."""
        self.copying = WatchedCopying(self)

    # -- reading ----------------------------------------------------------------------------------

    def match_in_slices(
        self,
        owner: str,
        keys: Sequence[bytes],
        tail_keys: TailKeys,
        limit_tokens: int,
        slice_keys: int = SLICE_KEYS,
    ) -> WatchedCursor:  # type: ignore[override]
        return WatchedCursor(self, owner, keys, tail_keys, limit_tokens, slice_keys)

    def open_cursor(
        self, owner: str, keys: Sequence[bytes], tails: TailKeys, limit: int, slice_keys: int
    ) -> MatchCursor:
        return super().match_in_slices(owner, keys, tails, limit, slice_keys)

    def read_grew(self, number: int, owner: str, now: float, slots: tuple[int, ...]) -> None:
        """A match leased more, or began to."""
        read = self.reads.get(number)
        if read is None:
            require(number not in self.ended, "leases end once", f"lease {number} came back")
            read = Read(owner, now + self.__lease_seconds, self.__clock())
            self.reads[number] = read
            self.coverage.lease("read: opened")
        self.slots_read.update(slots[len(read.slots) :])
        read.slots = slots

    def lent(self, owner: str, lent: Lent) -> None:
        """Chunks are being copied elsewhere: only their result ends it."""
        read = Read(owner, NEVER, self.__clock(), lent.slots, in_flight=True)
        self.reads[lent.lease] = read
        self.slots_read.update(lent.slots)
        self.coverage.lease("read: lent")

    def matched(self, match: Match, keys: Sequence[bytes], tails: dict[int, bytes], limit: int) -> None:
        """A match is complete: what it found must be what was asked for, on every rank."""
        require(match.tokens <= max(limit, 0), "a hit leaves a token to compute", f"{match.tokens} > {limit}")
        require(match.tokens % BLOCK == 0, "a hit ends at a block", f"{match.tokens} tokens")
        require((match.lease is None) == (match.tokens == 0), "a hit is leased", str(match))
        for chunk, (slot, tokens) in enumerate(match.pieces):
            digest = keys[chunk] if tokens == CHUNK else tails[tokens]
            wrong = self.__holds(slot, self.__right(digest)[: tokens // BLOCK])
            require(not wrong, "hits can be restored by every rank", f"chunk {chunk} was found: {wrong}")

    def begin_load(self, lease: int) -> LeaseOutcome:
        read = self.reads.get(lease)
        expected = LeaseOutcome.OK if read else self.__why_not(lease)
        if read:
            read.in_flight = True
            self.coverage.lease("read: load begun")
        return self.__same(expected, super().begin_load(lease), f"begin_load({lease})")

    def finish_load(self, lease: int) -> LeaseOutcome:
        read = self.reads.get(lease)
        expected = LeaseOutcome.OK if read else self.__why_not(lease)
        if read:
            self.__read_ended(lease, "read: load finished")
        return self.__same(expected, super().finish_load(lease), f"finish_load({lease})")

    def release(self, lease: int) -> LeaseOutcome:
        read = self.reads.get(lease)
        expected = self.__why_not(lease)
        if read and read.in_flight:
            expected = LeaseOutcome.DEFERRED
            self.coverage.lease("read: release deferred")
        elif read:
            expected = LeaseOutcome.OK
            self.__read_ended(lease, "read: released")
        return self.__same(expected, super().release(lease), f"release({lease})")

    def renew(self, lease: int, now: float) -> LeaseOutcome:
        read, write = self.reads.get(lease), self.writes.get(lease)
        expected = LeaseOutcome.OK
        if read:
            read.deadline = max(read.deadline, now + self.__lease_seconds)
            self.coverage.lease("read: renewed")
        elif write and write.given_up:
            expected = LeaseOutcome.LATE
            self.coverage.lease("write: renewed too late")
        elif write:
            write.deadline = max(write.deadline, now + self.__write_seconds)
            self.coverage.lease("write: renewed")
        else:
            expected = self.__why_not(lease)
        return self.__same(expected, super().renew(lease, now), f"renew({lease})")

    def __read_ended(self, number: int, how: str) -> None:
        read = self.reads.pop(number)
        self.slots_read.subtract(read.slots)
        self.ended.append(number)
        self.coverage.lease(how)

    # -- writing ----------------------------------------------------------------------------------

    def reserve(
        self, owner: str, salt: str, writes: Sequence[ChunkWrite], now: float, **more: Any
    ) -> Reservation:
        self.evicting = True
        answer = super().reserve(owner, salt, writes, now, **more)
        self.evicting = False
        ttl = more.get("ttl")
        self.lives.wished(writes, answer.items, NEVER if ttl is None else now + ttl)
        granted: dict[int, int] = {}
        taken = {slot for write in self.writes.values() for slot in write.slots.values()}
        for item, (outcome, slot) in enumerate(answer.items):
            self.answers[outcome] += 1
            if outcome is WriteOutcome.GRANTED:
                self.__check_grant(slot, taken)
                taken.add(slot)
                granted[item] = slot
            elif outcome is WriteOutcome.RESIDENT:
                row = self._residency.entries.find(writes[item].digest)
                require(row >= 0, "a batch keeps what it stands on", f"item {item} was evicted for others")
        require((answer.id is None) == (not granted), "a reservation grants something", str(answer))
        if answer.id is not None:
            deadline = now + self.__write_seconds
            self.writes[answer.id] = Write(owner, deadline, self.__clock(), granted)
            self.coverage.lease("write: opened")
        return answer

    def __check_grant(self, slot: int, taken: Collection[int]) -> None:
        name = "a slot in use is not handed out"
        usable = self._residency.tier.pool.usable
        require(0 <= slot < usable, name, f"slot {slot} of {usable}")
        require(slot not in taken, name, f"slot {slot} is being written for another reservation")
        require(self.slots_read[slot] <= 0, name, f"slot {slot} is under a read lease")
        require(not self.__busy(slot), name, f"a worker may still write slot {slot}")

    def complete(self, reservation: int, succeeded: Collection[int]) -> Completion:
        write = self.writes.get(reservation)
        if write is None:
            return self.__ended(super().complete(reservation, succeeded), reservation)
        self.__write_ended(reservation, self.__how(write, succeeded))
        completion = super().complete(reservation, succeeded)
        expected = LeaseOutcome.LATE if write.given_up else LeaseOutcome.OK
        self.__same(expected, completion.outcome, f"complete({reservation})")
        require(not (write.given_up and completion.visible), "late results are not taken", str(completion))
        return completion

    def __how(self, write: Write, succeeded: Collection[int]) -> str:
        if write.given_up:
            return "write: result came late"
        if not succeeded:
            return "write: failed"
        return "write: completed" if len(succeeded) == len(write.slots) else "write: completed in part"

    def abort(self, reservation: int) -> Completion:
        write = self.writes.get(reservation)
        if write is None:
            return self.__ended(super().abort(reservation), reservation)
        self.__write_ended(reservation, "write: aborted")
        return super().abort(reservation)

    def abandon(self, reservation: int) -> LeaseOutcome:
        write = self.writes.get(reservation)
        expected = self.__why_not(reservation)
        if write:
            expected = LeaseOutcome.LATE if write.given_up else LeaseOutcome.OK
            self.__give_up(write, "write: abandoned")
        return self.__same(expected, super().abandon(reservation), f"abandon({reservation})")

    def __give_up(self, write: Write, how: str) -> None:
        if not write.given_up:
            self.coverage.lease(how)
        write.given_up, write.owned = True, False

    def __write_ended(self, number: int, how: str) -> None:
        del self.writes[number]
        self.ended.append(number)
        self.coverage.lease(how)

    def __ended(self, completion: Completion, number: int) -> Completion:
        self.__same(self.__why_not(number), completion.outcome, f"complete({number})")
        return completion

    # -- ends -------------------------------------------------------------------------------------

    def release_owner(self, owner: str, *, keep_writes: bool = False) -> OwnerEnded:
        released = deferred = quarantined = 0
        for number, read in list(self.reads.items()):
            if read.owner == owner and read.owned:
                read.owned = False
                deferred += read.in_flight
                released += not read.in_flight
                if read.in_flight:
                    self.coverage.lease("read: owner ended during the load")
                else:
                    self.__read_ended(number, "read: owner ended")
        for write in self.writes.values():
            if write.owner == owner and write.owned:
                write.owned = False
                deferred += keep_writes
                quarantined += not keep_writes
                if keep_writes:
                    self.coverage.lease("write: kept beyond its owner")
                else:
                    self.__give_up(write, "write: owner ended")
        answer = super().release_owner(owner, keep_writes=keep_writes)
        expected = OwnerEnded(released, deferred, quarantined)
        require(answer == expected, "every lease ends", f"{answer} where {expected} was due")
        return answer

    def worker_lost(self) -> WorkersLost:
        reads = [number for number, read in self.reads.items() if read.in_flight]
        writes = list(self.writes)
        for number in reads:
            self.__read_ended(number, "read: worker lost")
        for number in writes:
            self.__write_ended(number, "write: worker lost")
        answer = super().worker_lost()
        expected = WorkersLost(len(reads), len(writes))
        require(answer == expected, "every lease ends", f"{answer} where {expected} was due")
        return answer

    def expire(self, now: float, limit: int | None = None) -> Expired:
        reads = {n for n, read in self.reads.items() if read.deadline <= now and not read.in_flight}
        writes = {n for n, write in self.writes.items() if write.deadline <= now and not write.given_up}
        for number in sorted(reads):
            self.__read_ended(number, "read: expired")
        for number in sorted(writes):
            self.__give_up(self.writes[number], "write: expired")
        answer = super().expire(now, limit)
        same = set(answer.leases) == reads and set(answer.reservations) == writes
        require(same, "every lease ends at its deadline", f"{answer} where {reads}, {writes} were due")
        self.pinned.ended(answer.pins, now)
        if answer.ended.chunks:
            self.coverage.wish("chunks: ended")
        return answer

    # -- wishes -----------------------------------------------------------------------------------

    def pin(self, salt: str, name: str, key: bytes, seconds: float, now: float) -> PinOutcome:
        row = self._residency.entries.find_any(key)
        answer = super().pin(salt, name, key, seconds, now)
        self.pinned.answered(salt, name, row, now + seconds, answer, self._residency)
        return answer

    def extend_pin(self, name: str, seconds: float, now: float, salt: str | None = None) -> int:
        self.pinned.extended(name, now + seconds)
        return super().extend_pin(name, seconds, now, salt)

    def unpin(self, name: str, salt: str | None = None) -> int:
        self.pinned.unpinned(name)
        return super().unpin(name, salt)

    # -- contents ---------------------------------------------------------------------------------

    def evict(self, count: int) -> int:
        self.evicting = True
        evicted = super().evict(count)
        self.evicting = False
        return evicted

    def drop(self, keys: Iterable[bytes]) -> Removed:
        keys = list(keys)
        answer = super().drop(keys)
        entries = self._residency.entries
        left = [key for key in keys if entries.digests.find(key) >= 0]
        require(not left, "what was dropped is found no more", f"{len(left)} chunks")
        return answer

    def clear(self, salt: str | None = None, limit: int | None = None, **more: Any) -> Removed:
        answer = super().clear(salt, limit, **more)
        if limit is None and not more:
            entries = self._residency.entries
            left = (entries.state.array >= State.RESERVED) & (entries.state.array <= State.VISIBLE)
            if salt is not None:
                left &= entries.salt.array == entries.salts.find(salt)
            require(not left.any(), "what was cleared comes no more", f"{int(left.sum())} chunks are left")
        return answer

    # -- helpers ----------------------------------------------------------------------------------

    def __why_not(self, number: int) -> LeaseOutcome:
        live = number in self.reads or number in self.writes
        known = 0 < number <= self._leases._last
        return LeaseOutcome.ENDED if known and not live else LeaseOutcome.UNKNOWN

    def __same(self, expected: LeaseOutcome, answer: LeaseOutcome, call: str) -> LeaseOutcome:
        require(answer is expected, "leases answer truly", f"{call}: {answer} instead of {expected}")
        if answer in (LeaseOutcome.ENDED, LeaseOutcome.UNKNOWN):
            self.coverage.lease(f"asked about: {answer.value}")
        return answer


class WatchedCopying(Copying):
    """Tells the model of what is lent."""

    def __init__(self, manager: WatchedManager) -> None:
        super().__init__(manager._residency, manager._leases)
        self._manager = manager

    def lend(self, owner: str, digests: Sequence[bytes]) -> Lent | None:
        lent = super().lend(owner, digests)
        if lent is not None:
            self._manager.lent(owner, lent)
        return lent

    def set_aside(self, owner: str, count: int) -> Lent | None:
        self._manager.evicting = True
        lent = super().set_aside(owner, count)
        self._manager.evicting = False
        if lent is not None:
            self._manager.coverage.lease("read: set aside")
            self._manager.lent(owner, lent)
        return lent


class WatchedCursor:
    """A match in slices, whose lease the model follows from the first slice on."""

    def __init__(
        self,
        manager: WatchedManager,
        owner: str,
        keys: Sequence[bytes],
        tail_keys: TailKeys,
        limit: int,
        slice_keys: int,
    ) -> None:
        self._manager = manager
        self._owner = owner
        self._keys = keys
        self._limit = limit
        self._tails: dict[int, bytes] = {}

        def tails(chunk: int) -> Sequence[tuple[bytes, int]]:
            pairs = tail_keys(chunk)
            self._tails = {tokens: digest for digest, tokens in pairs}
            return pairs

        self._inner = manager.open_cursor(owner, keys, tails, limit, slice_keys)
        self._number = 0
        self._found = 0

    @property
    def match(self) -> Match:
        return self._inner.match

    def advance(self, now: float) -> bool:
        more = self._inner.advance(now)
        lease = self._inner._lease
        manager = self._manager
        if lease is not None and (not self._number or lease.number in manager.reads):
            self._number = lease.number
            for row in lease.rows[self._found :].tolist():
                end = manager.lives.end(manager._residency.entries.digests.digest(row))
                require(end > now, "chunks are not found after their time", f"row {row} ended at {end}")
            self._found = len(lease.rows)
            slots = manager._residency.tier.slot.array[lease.rows].tolist()
            manager.read_grew(lease.number, self._owner, now, tuple(slots))
        if not more:
            manager.matched(self._inner.match, self._keys, self._tails, self._limit)
        return more
