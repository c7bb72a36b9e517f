"""The control plane's state machine."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from kvferry.api import EvictionPolicy, QuotaPolicy
from kvferry.control.audit import audit
from kvferry.control.clearing import ClearCursor, QuotaCursor
from kvferry.control.columns import as_sequence
from kvferry.control.copying import Copying
from kvferry.control.deadlines import NEVER
from kvferry.control.entries import NOBODY, ROOT, State
from kvferry.control.events import CacheFact, EventLog
from kvferry.control.leases import LeaseTable, ReadLease, WriteLease
from kvferry.control.matching import MatchCursor, Readers, TailKeys
from kvferry.control.outcomes import (
    ChunkWrite,
    Completion,
    Expired,
    LeaseOutcome,
    Match,
    OwnerEnded,
    PinOutcome,
    PinView,
    Removed,
    Reservation,
    Stats,
    WorkersLost,
    WriteOutcome,
)
from kvferry.control.quotas import QuotaReport, Quotas
from kvferry.control.residency import Residency
from kvferry.control.writing import ChunkContent, Writers

SLICE_KEYS = 128
"""Keys that one slice of a match looks up: about 50 microseconds in the median."""


class CacheManager:
    """Which chunk is where, who may use it, and what goes when room is needed.

    It decides and moves no bytes. It has no thread, socket, clock or randomness: every call that
    needs the time is given ``now`` in monotonic seconds. Callers hold one lock around each call;
    no call waits. Digests are 32 bytes and belong to one namespace.

    A chunk is reserved, then written, then visible. It becomes visible only behind visible ones, and
    whatever is removed takes all behind it along. ``capacity`` is the number of slots the arena will
    have; none is used before :meth:`grow`. A read lease lasts ``lease_seconds``, a reservation
    ``write_seconds``, unless renewed.

    ``quotas`` is the policy once more if it keeps owners apart; ``slot_bytes`` then says what a slot
    costs an owner. No more than the share ``max_pinned`` of the capacity can be pinned. ``ttl`` is the
    time to live, in seconds, of chunks whose writer asks for none. ``events`` is how many facts are
    kept for :meth:`take_events`; 0 records nothing.
    """

    def __init__(
        self,
        *,
        capacity: int,
        chunk_tokens: int,
        block_tokens: int,
        policy: EvictionPolicy,
        lease_seconds: float,
        write_seconds: float,
        quotas: QuotaPolicy | None = None,
        slot_bytes: int = 1,
        max_pinned: float = 0.5,
        ttl: float | None = None,
        events: int = 0,
    ) -> None:
        if chunk_tokens % block_tokens:
            raise ValueError(f"{chunk_tokens} tokens are not whole blocks of {block_tokens}")
        self._ttl = ttl
        self._events = EventLog(capacity, events) if events else None
        self._residency = Residency(
            capacity,
            chunk_tokens,
            block_tokens,
            policy,
            quota_policy=quotas,
            max_pinned=int(capacity * max_pinned),
            events=self._events,
        )
        salts = self._residency.entries.salts
        self._quotas = None if quotas is None else Quotas(quotas, slot_bytes, salts)
        self._leases = LeaseTable()
        self._readers = Readers(self._residency, self._leases, lease_seconds)
        self._writers = Writers(self._residency, self._leases, write_seconds, self._quotas)
        self.copying = Copying(self._residency, self._leases)
        """What other tiers see of this one."""
        self._expired = 0
        self._ended = 0

    def grow(self, slots: int) -> None:
        """Slots below ``slots`` may be used from now on. Never shrinks; clipped to the capacity."""
        self._residency.tier.pool.grow(slots)

    # Reading

    def match(
        self,
        owner: str,
        keys: Sequence[bytes],
        tail_keys: TailKeys,
        now: float,
        limit_tokens: int,
    ) -> Match:
        """The longest prefix that can be restored, never more than ``limit_tokens``, under one lease.

        ``keys`` are the digests of full chunks from the head. ``tail_keys(index)`` gives digests and
        tokens of the beginnings of chunk ``index``, the longest first; it is asked once, for the
        first chunk that was not matched whole. Counts as a use of everything matched. For very long
        prompts under a lock, drive :meth:`match_in_slices` instead.
        """
        cursor = self.match_in_slices(owner, keys, tail_keys, limit_tokens)
        while cursor.advance(now):
            pass
        return cursor.match

    def match_in_slices(
        self,
        owner: str,
        keys: Sequence[bytes],
        tail_keys: TailKeys,
        limit_tokens: int,
        slice_keys: int = SLICE_KEYS,
        *,
        lease_seconds: float | None = None,
    ) -> MatchCursor:
        """A match that gives the caller the chance to let go of the lock between slices. Its lease lasts
        ``lease_seconds``, by default as long as any."""
        seconds = self._readers.lease_seconds if lease_seconds is None else lease_seconds
        return MatchCursor(self._readers, owner, keys, tail_keys, limit_tokens, slice_keys, seconds)

    def begin_load(self, lease: int) -> LeaseOutcome:
        """Workers are about to be told to read. The lease has no deadline from here on, and ends by
        :meth:`finish_load` or :meth:`worker_lost` alone. Load nothing unless the answer is ``OK``."""
        return self._readers.begin(lease)

    def finish_load(self, lease: int) -> LeaseOutcome:
        """No worker reads any more: the result has come, good or bad. Ends the lease."""
        return self._readers.finish(lease)

    def release(self, lease: int) -> LeaseOutcome:
        """Give a read lease back. ``DEFERRED`` while a load is in flight: its result ends it."""
        return self._readers.release(lease)

    def renew(self, lease: int, now: float, seconds: float | None = None) -> LeaseOutcome:
        """A full time from ``now`` on, for a read lease or a reservation, or these ``seconds``; never less
        than it has."""
        if seconds is None:
            write = isinstance(self._leases.write(lease), WriteLease)
            seconds = self._writers.write_seconds if write else self._readers.lease_seconds
        return self._leases.extend(lease, now + seconds)

    # Writing

    def reserve(
        self,
        owner: str,
        salt: str,
        writes: Sequence[ChunkWrite],
        now: float,
        *,
        model: str = "",
        ttl: float | None = None,
        content: ChunkContent | None = None,
    ) -> Reservation:
        """Slots for ``writes``, which come in chain order, evicting what is least useful.

        Nothing that the batch contains or stands on is evicted for it. Writes beyond the quota of
        ``salt`` are refused once all that it holds is in use. ``model`` is the adapter's name, empty
        for the served base model. With a ``ttl`` of seconds the chunks vanish after that time; those
        before them stay at least as long, and so do chunks that are there already. ``content(write)``
        is asked for each granted full chunk while events are recorded. Raises
        :class:`kvferry.api.KVFerryError` for writes that contradict the geometry, before any change.
        """
        seconds = self._ttl if ttl is None else ttl
        end = NEVER if seconds is None else now + seconds
        return self._writers.reserve(owner, salt, writes, now, model, end, content)

    @property
    def ttl(self) -> float | None:
        """The time to live of chunks whose writer asks for none."""
        return self._ttl

    def prolong(self, key: bytes, now: float, ttl: float | None = None) -> None:
        """Let the chunk ``key``, visible or on its way, and all before it stay as long as :meth:`reserve`
        with these arguments makes what its writes stand on stay.

        Nothing happens to a chunk that has ended. Costs about 0.3 microseconds per chunk that would end
        earlier: for a long chain under a lock, begin with a chunk near its head, and reserve when all
        of it will stay.
        """
        seconds = self._ttl if ttl is None else ttl
        residency = self._residency
        row = residency.entries.find_any(key)
        if seconds is not None and row != NOBODY and not residency.deadlines.has_ended(row, now):
            residency.prolong(row, now + seconds)

    def complete(self, reservation: int, succeeded: Collection[int]) -> Completion:
        """The result of all writes of a reservation: the items in ``succeeded`` hold their bytes, the
        others failed, and nobody writes any of them any more.

        Raises :class:`kvferry.api.KVFerryError` for items that were not granted.
        """
        return self._writers.complete(reservation, succeeded)

    def abort(self, reservation: int) -> Completion:
        """Give up writes that nobody was told to do. The slots are free at once."""
        return self._writers.complete(reservation, ())

    def abandon(self, reservation: int) -> LeaseOutcome:
        """Give up writes that may be under way. The slots stay out of use until the result."""
        lease = self._leases.write(reservation)
        if isinstance(lease, LeaseOutcome):
            return lease
        if lease.given_up:
            return LeaseOutcome.LATE
        self._writers.abandon(lease)
        return LeaseOutcome.OK

    # Ends

    def release_owner(self, owner: str, *, keep_writes: bool = False) -> OwnerEnded:
        """A request ended or a peer died. Its read leases end, those in flight with their result.

        Its reservations are abandoned; with ``keep_writes`` they go on and end by result or deadline,
        as when a request finished whose last chunks are still being saved.
        """
        released = deferred = quarantined = 0
        for lease in self._leases.of(owner):
            if isinstance(lease, ReadLease) and not lease.in_flight:
                self._readers.end(lease)
                released += 1
            elif isinstance(lease, WriteLease) and not keep_writes:
                self._writers.abandon(lease)
                quarantined += 1
            else:
                self._leases.disown(lease)
                deferred += 1
        return OwnerEnded(released, deferred, quarantined)

    def worker_lost(self) -> WorkersLost:
        """No worker of this instance is left: nobody reads or writes any slot, no result will come."""
        reads = writes = 0
        for lease in self._leases.all():
            if isinstance(lease, WriteLease):
                self._writers.complete(lease.number, ())
                writes += 1
            elif lease.in_flight:
                self._readers.end(lease)
                reads += 1
        return WorkersLost(reads, writes)

    def expire(self, now: float, limit: int | None = None) -> Expired:
        """End what ran past its deadline. Expired reservations keep their slots out of use until
        their result comes.

        With a ``limit`` it removes few chunks at once and leaves the rest to the next call, so that
        the caller can let go of a lock in between: :meth:`next_deadline` then has come already.
        Chunks whose time to live ended are not found, whether they were removed or not.
        """
        reads: list[int] = []
        writes: list[int] = []
        for lease in self._leases.take_due(now):
            if isinstance(lease, WriteLease):
                self._writers.abandon(lease)
                writes.append(lease.number)
            else:
                self._readers.end(lease)
                reads.append(lease.number)
        self._expired += len(reads) + len(writes)
        residency = self._residency
        ended = Removed(0, 0, 0)
        if residency.deadlines.next_time() <= now:
            ended = residency.end_due(now, limit)
            self._ended += ended.removed + ended.kept
        pins = residency.pins.end_due(now)
        residency.unpin(None if limit is None else 4 * limit)
        return Expired(tuple(reads), tuple(writes), tuple((pin.salt, pin.name) for pin in pins), ended)

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next; infinity if never."""
        residency = self._residency
        return min(self._leases.next_deadline(), residency.deadlines.next_time(), residency.pins.next_time())

    # Pins

    def pin(self, salt: str, name: str, key: bytes, seconds: float, now: float) -> PinOutcome:
        """Let the chunk ``key`` and all before it stay until ``seconds`` from now, or until the pin of
        this name ends, whichever is later.

        The chunk may be visible or on its way, a full one or a tail. Pins of one name add up, and
        pins of different names are independent. A pinned chunk is not evicted; cleared, dropped, or
        ended, it goes like any other. Costs about 0.4 microseconds per chunk that the pin did not
        cover yet: for a long chain under a lock, begin with a chunk near its head.
        """
        residency = self._residency
        entries, pins = residency.entries, residency.pins
        row = entries.find_any(key)
        if row == NOBODY:
            return PinOutcome.ABSENT
        full = pins.pinned >= pins.limit and not pins.count.view[row]
        pin = None if full else pins.open(salt, name, now + seconds)
        if pin is None:
            pins.refused += 1
            return PinOutcome.NO_ROOM
        path = []
        while row != ROOT and not pins.covers(pin, row):
            path.append(row)
            row = entries.parent.view[row]
        path.reverse()
        if not path:
            return PinOutcome.PINNED
        covered = pins.cover(pin, path, tail=not entries.is_full(path[-1]))
        return PinOutcome.PINNED if covered == len(path) else PinOutcome.NO_ROOM

    def covers(self, salt: str, name: str, key: bytes) -> bool:
        """Whether the pin of this name covers the chunk ``key``, and so all before it."""
        pins, row = self._residency.pins, self._residency.entries.find_any(key)
        pin = pins.find(salt, name)
        return pin is not None and row != NOBODY and pins.covers(pin, row)

    def extend_pin(self, name: str, seconds: float, now: float, salt: str | None = None) -> int:
        """Let the pins of this name, of one salt or of all, last ``seconds`` from now at the least; how
        many there are."""
        found = self._pins_named(name, salt)
        for pin_salt, _ in found:
            self._residency.pins.open(pin_salt, name, now + seconds)
        return len(found)

    def unpin(self, name: str, salt: str | None = None) -> int:
        """End the pins of this name, of one salt or of all; how many. Their chunks can be evicted once
        :meth:`expire` has run, unless another pin covers them."""
        found = self._pins_named(name, salt)
        for key in found:
            pin = self._residency.pins.find(*key)
            if pin is not None:
                self._residency.pins.end(pin)
        return len(found)

    def pins(self) -> tuple[PinView, ...]:
        """Every pin, in the order of their making. About a microsecond each."""
        pins = self._residency.pins
        return tuple(PinView(pin.salt, pin.name, pin.end, len(pin.rows)) for pin in pins)

    def _pins_named(self, name: str, salt: str | None) -> list[tuple[str, str]]:
        if salt is not None:
            return [(salt, name)] if self._residency.pins.find(salt, name) else []
        return [(pin.salt, pin.name) for pin in self._residency.pins if pin.name == name]

    # Quotas

    @property
    def has_quotas(self) -> bool:
        """Whether the policy keeps owners apart. If not, the other methods on quotas must not be
        called."""
        return self._quotas is not None

    def quota_report(self) -> QuotaReport:
        """What owners hold. Grows with the number of quotas, not of owners."""
        residency = self._residency
        return self._some_quotas.report(residency.entries.rows - residency.count[State.FREE])

    def set_quota(self, owner: str, quota: int | None) -> None:
        """Give ``owner`` (a salt) a quota of ``quota`` bytes of its own; ``None`` is without limit.

        A lower one counts from the owner's next reservation on; :meth:`enforce_quotas` makes it true.
        """
        self._some_quotas.set(owner, quota)

    def set_default_quota(self, quota: int | None) -> None:
        """Change what owners without a quota of their own may hold."""
        self._some_quotas.set_default(quota)

    def forget_quota(self, owner: str) -> bool:
        """Let the default apply to ``owner`` again; ``False`` if it had no quota of its own."""
        return self._some_quotas.forget(owner)

    def take_quotas_of(self, other: CacheManager) -> None:
        """Quotas of ``other``, which is of the same tier, apply here from now on, if there are any."""
        if self._quotas is not None:
            self._quotas.take(other._some_quotas)

    def enforce_quotas(self, owner: str | None = None) -> QuotaCursor:
        """Evict, slice by slice, what ``owner``, or every owner, holds beyond its quota."""
        return QuotaCursor(self._residency, self._some_quotas, owner)

    @property
    def _some_quotas(self) -> Quotas:
        assert self._quotas is not None, "the policy keeps no quotas"
        return self._quotas

    # Events

    def take_events(self, limit: int) -> list[CacheFact]:
        """The oldest facts that were not taken yet, up to ``limit``; none unless they are recorded."""
        return [] if self._events is None else self._events.take(limit)

    @property
    def events_behind(self) -> bool:
        """Whether some visible chunk was not told of, because facts were lost once."""
        events = self._events
        return events is not None and events.told_count < len(self._residency.entries.digests)

    def tell(self, keys: Sequence[bytes], start: int, content: Callable[[int], object]) -> int:
        """Tell of the visible chunks ``keys[start:]``, a part of one chain from its head, that were not
        told of yet. ``content(index)`` is what their writer would have said. How many were told of."""
        if self._events is None or start >= len(keys):
            return 0
        entries = self._residency.entries
        told = self._events.told.view
        before = ROOT if not start else entries.digests.find(keys[start - 1])
        if start and (before == NOBODY or not told[before]):
            return 0
        count = 0
        for index, row in enumerate(entries.chain(entries.digests.find_run(keys[start:]), before), start):
            if not told[row]:
                if not self._events.tell(int(row), self._residency.fact(int(row), content(index))):
                    break
                count += 1
        return count

    # Contents

    def touch(self, keys: Sequence[bytes]) -> int:
        """Count a use of the longest known beginning of ``keys``, a run of full chunks of one chain,
        and of everything before it. How many of ``keys`` were known."""
        entries = self._residency.entries
        rows = entries.digests.find_run(keys)
        if len(rows):
            rows = entries.chain(rows, entries.parent.view[int(rows[0])])
            before = np.array(entries.ancestors(int(rows[0])), np.int64)
            self._residency.tier.policy.touch(as_sequence(np.concatenate((before, rows))))
        return len(rows)

    def drop(self, keys: Iterable[bytes]) -> Removed:
        """Remove chunks whose bytes proved bad or cannot be read, with everything behind them.

        Digests of tails and of chunk beginnings are understood too. About 2 microseconds a chunk.
        """
        rows = [self._residency.entries.find(key) for key in keys]
        return self._residency.drop(row for row in rows if row != NOBODY)

    def evict(self, count: int) -> int:
        """Remove up to ``count`` chunks that nobody uses, tails first; how many were removed."""
        return self._residency.evict(count)

    def clear(
        self, salt: str | None = None, limit: int | None = None, *, model: str | None = None
    ) -> Removed:
        """Remove all chunks, or those of one salt, of one model (an adapter's name, empty for the base
        model), or of both; writes under way will not become visible.

        With a ``limit``, no more than that many, tails first: call it again, letting go of a lock in
        between, until nothing is removed or kept. For many chunks under a lock, drive
        :meth:`clear_in_slices` instead.
        """
        cursor = self.clear_in_slices(salt, model=model)
        chunks = self._residency.entries.rows + 1 if limit is None else limit
        gone = 0
        while gone < chunks and cursor.advance(chunks - gone):
            gone = cursor.removed.chunks - cursor.removed.doomed
        return cursor.removed

    def clear_in_slices(self, salt: str | None = None, *, model: str | None = None) -> ClearCursor:
        """A :meth:`clear` that gives the caller the chance to let go of the lock between slices."""
        return ClearCursor(self._residency, salt, model)

    def stats(self) -> Stats:
        residency = self._residency
        count = residency.count
        kinds = [isinstance(lease, ReadLease) for lease in self._leases.all()]
        outcomes = self._writers.outcomes
        return Stats(
            capacity=residency.tier.pool.usable,
            free=residency.tier.pool.free,
            resident=count[State.VISIBLE],
            retiring=count[State.RETIRING],
            reserved=count[State.RESERVED] + count[State.WRITTEN],
            quarantined=count[State.QUARANTINED],
            leased=residency.leased,
            leases=kinds.count(True),
            reservations=kinds.count(False),
            hits=self._readers.hits,
            misses=self._readers.misses,
            hit_tokens=self._readers.hit_tokens,
            evictions=residency.evictions,
            dropped=residency.dropped,
            granted=outcomes[WriteOutcome.GRANTED],
            already_resident=outcomes[WriteOutcome.RESIDENT],
            busy=outcomes[WriteOutcome.BUSY],
            no_room=outcomes[WriteOutcome.NO_ROOM],
            no_parent=outcomes[WriteOutcome.NO_PARENT],
            over_quota=outcomes[WriteOutcome.OVER_QUOTA],
            stored=residency.stored,
            aborted=residency.aborted,
            expired=self._expired,
            ended=self._ended,
            pins=len(residency.pins),
            pinned=residency.pins.pinned,
            pins_refused=residency.pins.refused,
        )

    def check(self) -> None:
        """Audit everything against everything; raises ``AssertionError``. For tests: slow."""
        audit(self._residency, self._leases)
