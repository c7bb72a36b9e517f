"""The control plane's state machine."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from kvferry.api import EvictionPolicy
from kvferry.control.audit import audit
from kvferry.control.columns import as_sequence
from kvferry.control.entries import NOBODY, State
from kvferry.control.leases import LeaseTable, ReadLease, WriteLease
from kvferry.control.matching import MatchCursor, Readers, TailKeys
from kvferry.control.outcomes import (
    ChunkWrite,
    Completion,
    Expired,
    LeaseOutcome,
    Match,
    OwnerEnded,
    Removed,
    Reservation,
    Stats,
    WorkersLost,
    WriteOutcome,
)
from kvferry.control.residency import Residency
from kvferry.control.writing import Writers

SLICE_KEYS = 128
"""Keys that one slice of a match looks up: 65 to 100 microseconds where it was measured."""


class CacheManager:
    """Which chunk is where, who may use it, and what goes when room is needed.

    It decides and moves no bytes. It has no thread, socket, clock or randomness: every call that
    needs the time is given ``now`` in monotonic seconds. Callers hold one lock around each call;
    no call waits. Digests are 32 bytes and belong to one namespace.

    A chunk is reserved, then written, then visible. It becomes visible only behind visible ones, and
    whatever is removed takes all behind it along. ``capacity`` is the number of slots the arena will
    have; none is used before :meth:`grow`. A read lease lasts ``lease_seconds``, a reservation
    ``write_seconds``, unless renewed.
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
    ) -> None:
        if chunk_tokens % block_tokens:
            raise ValueError(f"{chunk_tokens} tokens are not whole blocks of {block_tokens}")
        self._residency = Residency(capacity, chunk_tokens, block_tokens, policy)
        self._leases = LeaseTable()
        self._readers = Readers(self._residency, self._leases, lease_seconds)
        self._writers = Writers(self._residency, self._leases, write_seconds)
        self._expired = 0

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
    ) -> MatchCursor:
        """A match that gives the caller the chance to let go of the lock between slices."""
        return MatchCursor(self._readers, owner, keys, tail_keys, limit_tokens, slice_keys)

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

    def renew(self, lease: int, now: float) -> LeaseOutcome:
        """A full time from ``now`` on, for a read lease or a reservation."""
        write = isinstance(self._leases.write(lease), WriteLease)
        seconds = self._writers.write_seconds if write else self._readers.lease_seconds
        return self._leases.extend(lease, now + seconds)

    # Writing

    def reserve(self, owner: str, salt: str, writes: Sequence[ChunkWrite], now: float) -> Reservation:
        """Slots for ``writes``, which come in chain order, evicting what is least useful.

        Nothing that the batch contains or stands on is evicted for it. Raises
        :class:`kvferry.api.KVFerryError` for writes that contradict the geometry, before any change.
        """
        return self._writers.reserve(owner, salt, writes, now)

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

    def expire(self, now: float) -> Expired:
        """End what ran past its deadline. Expired reservations keep their slots out of use until
        their result comes."""
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
        return Expired(tuple(reads), tuple(writes))

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next; infinity if never."""
        return self._leases.next_deadline()

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

    def clear(self, salt: str | None = None, limit: int | None = None) -> Removed:
        """Remove all chunks, or those of one cache salt; writes under way will not become visible.

        With ``limit`` at most so many chunks go, deepest first; call again, with the lock let go in
        between, until nothing is removed or kept. Looks at the whole table each time.
        """
        entries = self._residency.entries
        states = entries.state.array
        chosen = (states >= State.RESERVED) & (states <= State.VISIBLE)
        if salt is not None:
            chosen &= entries.salt.array == entries.salts.find(salt)
        rows = np.flatnonzero(chosen)
        pending = rows[states[rows] != State.VISIBLE]
        rows = rows[states[rows] == State.VISIBLE]
        order = np.argsort(-entries.depth.array[rows], kind="stable")
        going = np.concatenate((pending, rows[order][:limit]))
        return self._residency.drop(going.tolist())

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
            stored=residency.stored,
            aborted=residency.aborted,
            expired=self._expired,
        )

    def check(self) -> None:
        """Audit everything against everything; raises ``AssertionError``. For tests: slow."""
        audit(self._residency, self._leases)
