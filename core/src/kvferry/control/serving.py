"""What peers are lent of the first tier: the holder's half of a read between instances."""

from __future__ import annotations

import heapq
from collections import Counter

from attrs import define, field, frozen

from kvferry.api import Answer, Grant, LentChunk, PeerAsk, PeerId, Refusal, Refused
from kvferry.control.manager import CacheManager
from kvferry.control.matching import MatchCursor
from kvferry.control.outcomes import ChunkFacts


@frozen(kw_only=True)
class ServingSettings:
    """``lease_seconds`` is how long a grant lasts, and ``longest_seconds`` how long with all its renewals.
    No more than ``most_leases`` are open at once, of all peers, nor more slots than ``share`` of those
    that there are."""

    lease_seconds: float = 30.0
    longest_seconds: float = 300.0
    most_leases: int = 64
    share: float = 0.25


@define(eq=False)
class _Lent:
    peer: PeerId
    lease: int
    """The manager's number."""
    chunks: tuple[ChunkFacts, ...]
    slots: tuple[int, ...]
    tokens: int
    deadline: float
    last_end: float
    """It is not renewed beyond this time."""


@define(eq=False)
class _Peer:
    last: int = 0
    """Asks up to this number have come, or were done with before they came."""
    open: dict[int, _Lent] = field(factory=dict)
    asking: set[int] = field(factory=set)
    """What is being looked up."""
    seen: float = 0.0


class Serving:
    """Leases of peers on slots of the first tier. Under the manager's lock; no thread, socket or clock.

    A lease ends when the peer says that it is done, and by its time alone otherwise: a peer that cannot be
    heard may still be reading. Every message may come late, twice or never.
    """

    def __init__(self, manager: CacheManager, settings: ServingSettings) -> None:
        self.counts: Counter[str] = Counter()
        """Since the start: ``granted``, ``chunks``, ``renewed``, ``done``, ``expired``, and refusals by their
        values."""
        self._manager = manager
        self._settings = settings
        self._peers: dict[PeerId, _Peer] = {}
        self._due: list[tuple[float, PeerId, int]] = []
        self._slots = 0

    @property
    def leases(self) -> int:
        """How many are open."""
        return sum(len(peer.open) for peer in self._peers.values())

    @property
    def slots(self) -> int:
        """How many slots are lent; twice what is lent twice."""
        return self._slots

    def ask(self, peer: PeerId, ask: PeerAsk, now: float) -> Asking:
        """Begin to answer. An ask that was granted and comes again has the same answer again, with the time
        that is left of it."""
        known = self._peers.setdefault(peer, _Peer())
        known.seen = now
        lent = known.open.get(ask.number)
        if lent is not None and lent.deadline > now:
            return Asking(self, peer, ask, answer=_grant(ask.number, lent, now))
        if ask.number in known.asking:
            return Asking(self, peer, ask)
        if ask.number <= known.last:
            return Asking(self, peer, ask, answer=self._refuse(ask.number, Refusal.ENDED))
        known.last = ask.number
        if self.leases >= self._settings.most_leases or self._room() <= 0:
            return Asking(self, peer, ask, answer=self._refuse(ask.number, Refusal.BUSY))
        owner = f"peer {peer.instance} {peer.epoch.hex()} {ask.number}"
        cursor = self._manager.match_in_slices(
            owner,
            ask.keys,
            lambda index: ask.tails if index == len(ask.keys) else (),
            ask.limit_tokens,
            lease_seconds=self._settings.lease_seconds,
        )
        known.asking.add(ask.number)
        return Asking(self, peer, ask, cursor)

    def renew(self, peer: PeerId, number: int, now: float) -> float:
        """Let a grant last its time from now on once more; the seconds that it lasts, 0 if it has ended."""
        lent = self._find(peer, number)
        if lent is None or lent.deadline <= now:
            return 0.0
        deadline = min(now + self._settings.lease_seconds, lent.last_end)
        if deadline > lent.deadline:
            lent.deadline = deadline
            self._manager.renew(lent.lease, now, deadline - now)
            self.counts["renewed"] += 1
        return lent.deadline - now

    def done(self, peer: PeerId, number: int, now: float) -> None:
        """The peer reads no more. Also for an ask that was refused, never came, or comes later."""
        known = self._peers.setdefault(peer, _Peer())
        known.seen = now
        known.last = max(known.last, number)
        known.asking.discard(number)
        if number in known.open:
            self._end(known, number)
            self.counts["done"] += 1

    def expire(self, now: float) -> None:
        """End grants whose time is over, and forget peers that were not heard of for long."""
        while self._due and self._due[0][0] <= now:
            _, peer, number = heapq.heappop(self._due)
            lent = self._find(peer, number)
            if lent is None:
                continue
            if lent.deadline > now:
                heapq.heappush(self._due, (lent.deadline, peer, number))
                continue
            self._end(self._peers[peer], number)
            self.counts["expired"] += 1
        # Whoever comes back after so long has nothing on its way that could be taken for something new.
        silent = now - 2 * self._settings.longest_seconds
        for peer, known in list(self._peers.items()):
            if known.seen < silent and not known.open and not known.asking:
                del self._peers[peer]

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next; infinity if never."""
        return self._due[0][0] if self._due else float("inf")

    def check(self) -> None:
        """Audit; for tests."""
        lent = [each for known in self._peers.values() for each in known.open.values()]
        assert self._slots == sum(len(each.slots) for each in lent), "lent slots are miscounted"

    # For Asking

    def decide(self, peer: PeerId, ask: PeerAsk, cursor: MatchCursor, now: float) -> Answer:
        match = cursor.match
        known = self._peers[peer]
        wanted = len(match.slots) - ask.skip
        if ask.number not in known.asking:
            return self._give_back(match.lease, ask.number, Refusal.ENDED)
        known.asking.discard(ask.number)
        if match.lease is None or wanted <= 0:
            return self._give_back(match.lease, ask.number, Refusal.NOTHING)
        if self.leases >= self._settings.most_leases or wanted > self._room():
            return self._give_back(match.lease, ask.number, Refusal.BUSY)
        chunks = self._manager.copying.leased(match.lease, ask.skip, len(match.slots))
        if len(chunks) != wanted:  # something was dropped between two slices
            return self._give_back(match.lease, ask.number, Refusal.NOTHING)
        deadline = now + self._settings.lease_seconds
        self._manager.renew(match.lease, now, self._settings.lease_seconds)
        lent = _Lent(
            peer,
            match.lease,
            tuple(chunks),
            match.slots[ask.skip :],
            match.tokens,
            deadline,
            now + self._settings.longest_seconds,
        )
        known.open[ask.number] = lent
        heapq.heappush(self._due, (deadline, peer, ask.number))
        self._slots += wanted
        self.counts["granted"] += 1
        self.counts["chunks"] += wanted
        return _grant(ask.number, lent, now)

    def _room(self) -> int:
        return int(self._manager.copying.usable * self._settings.share) - self._slots

    def _give_back(self, lease: int | None, number: int, reason: Refusal) -> Refused:
        if lease is not None:
            self._manager.release(lease)
        return self._refuse(number, reason)

    def _refuse(self, number: int, reason: Refusal) -> Refused:
        self.counts[reason.value] += 1
        return Refused(number, reason)

    def _find(self, peer: PeerId, number: int) -> _Lent | None:
        known = self._peers.get(peer)
        return None if known is None else known.open.get(number)

    def _end(self, known: _Peer, number: int) -> None:
        lent = known.open.pop(number)
        self._slots -= len(lent.slots)
        self._manager.release(lent.lease)


class Asking:
    """An ask that is being looked up, slice by slice.

    Call :meth:`advance` under the manager's lock until it returns ``False``; :attr:`answer` is there then,
    or ``None`` if the same ask is being looked up already, and is answered once.
    """

    def __init__(
        self,
        serving: Serving,
        peer: PeerId,
        ask: PeerAsk,
        cursor: MatchCursor | None = None,
        answer: Answer | None = None,
    ) -> None:
        self.answer = answer
        self._serving = serving
        self._peer = peer
        self._ask = ask
        self._cursor = cursor

    def advance(self, now: float) -> bool:
        if self.answer is not None or self._cursor is None:
            return False
        if self._cursor.advance(now):
            return True
        self.answer = self._serving.decide(self._peer, self._ask, self._cursor, now)
        return False


def _grant(number: int, lent: _Lent, now: float) -> Grant:
    return Grant(
        number=number,
        chunks=tuple(_told(chunk, now) for chunk in lent.chunks),
        slots=lent.slots,
        tokens=lent.tokens,
        seconds=lent.deadline - now,
    )


def _told(chunk: ChunkFacts, now: float) -> LentChunk:
    return LentChunk(
        digest=chunk.digest,
        parent=chunk.parent,
        depth=chunk.depth,
        tokens=chunk.tokens,
        aliases=chunk.aliases,
        model=chunk.model,
        seconds=max(0.0, chunk.end - now),
    )
