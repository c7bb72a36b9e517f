"""What peers are lent: the holder's half of a read between instances."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from attrs import define, field, frozen

from kvferry.api import Answer, Grant, PeerAsk, PeerId, Refusal, Refused
from kvferry.control.grants import Lent
from kvferry.control.manager import CacheManager
from kvferry.control.matching import MatchCursor
from kvferry.control.orders import CancelOrder, OrderResult, StageOrder
from kvferry.control.outcomes import ChunkFacts, LeaseOutcome
from kvferry.control.staging import Stagings


@frozen(kw_only=True)
class ServingSettings:
    """``lease_seconds`` is how long a grant lasts, and ``longest_seconds`` how long with all its renewals.
    No more than ``most_leases`` are open at once, of all peers, nor more slots than ``share`` of those
    that there are. With ``staging_slots``, what is lent is copied into so many slots of the staging first,
    within ``staging_seconds``."""

    lease_seconds: float = 30.0
    longest_seconds: float = 300.0
    most_leases: int = 64
    share: float = 0.25
    staging_slots: int | None = None
    staging_seconds: float = 5.0


@define(eq=False)
class _Staging:
    """What is being copied for a peer."""

    peer: PeerId
    number: int
    lease: int
    chunks: tuple[ChunkFacts, ...]
    skipped_tokens: int
    tokens: int
    called_off: bool = False


@define(eq=False)
class _Peer:
    last: int = 0
    """Asks up to this number have come, or were done with before they came."""
    open: dict[int, Lent] = field(factory=dict)
    asking: set[int] = field(factory=set)
    """What is being looked up."""
    staging: dict[int, int] = field(factory=dict)
    """What is being copied, with the numbers of the orders."""
    seen: float = 0.0


class Serving:
    """Leases of peers on slots of the first tier, or of the staging. Under the manager's lock; no thread,
    socket or clock.

    A lease ends when the peer says that it is done, and by its time alone otherwise: a peer that cannot be
    heard may still be reading. Every message may come late, twice or never.

    With a staging, as much is lent as fits into it: a shorter prefix, never a wait. Slots of the first tier
    are lent to the copies alone, and are given back with their result. The lease of the peer is on what was
    copied, and begins then. ``next_order()`` gives numbers that no other order of the workers has.
    """

    def __init__(
        self,
        manager: CacheManager,
        settings: ServingSettings,
        next_order: Callable[[], int] | None = None,
    ) -> None:
        self.counts: Counter[str] = Counter()
        """Since the start: ``granted``, ``chunks``, ``renewed``, ``done``, ``expired``, ``staged`` chunks,
        chunks that were ``not staged``, and refusals by their values."""
        self._manager = manager
        self._settings = settings
        self._peers: dict[PeerId, _Peer] = {}
        self._due: list[tuple[float, PeerId, int]] = []
        self._slots = 0
        self._stagings: Stagings | None = None
        if settings.staging_slots is not None:
            assert next_order is not None, "workers cannot be told to copy"
            self._stagings = Stagings(settings.staging_slots, next_order)
        self._copies: dict[int, _Staging] = {}
        """By the numbers of their orders."""
        self._answers: list[tuple[PeerId, Answer]] = []

    @property
    def leases(self) -> int:
        """How many are open, or will be once what they are on is copied."""
        return sum(len(peer.open) + len(peer.staging) for peer in self._peers.values())

    @property
    def slots(self) -> int:
        """How many slots of the first tier are lent; twice what is lent twice."""
        return self._slots

    @property
    def copies(self) -> int:
        """How many are under way into the staging."""
        return len(self._copies)

    def ask(self, peer: PeerId, ask: PeerAsk, now: float) -> Asking:
        """Begin to answer. An ask that was granted and comes again has the same answer again, with the time
        that is left of it."""
        known = self._peers.setdefault(peer, _Peer())
        known.seen = now
        lent = known.open.get(ask.number)
        if lent is not None and lent.deadline > now:
            return Asking(self, peer, ask, answer=lent.grant(ask.number, now))
        if ask.number in known.asking or ask.number in known.staging:
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
            if lent.lease is not None:
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
        elif number in known.staging:
            self._call_off(known.staging.pop(number))
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
            if known.seen < silent and not (known.open or known.asking or known.staging):
                del self._peers[peer]

    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do next; infinity if never."""
        return self._due[0][0] if self._due else float("inf")

    # With a staging

    def take_orders(self) -> list[StageOrder | CancelOrder]:
        """What is to be sent to the workers, in this order."""
        return [] if self._stagings is None else self._stagings.take_orders()

    def take_answers(self) -> list[tuple[PeerId, Answer]]:
        """Answers to asks that had none at once."""
        answers, self._answers = self._answers, []
        return answers

    def report(self, result: OrderResult, now: float) -> None:
        """The end of an order, from all ranks. Orders that are not of here are passed over."""
        copy = self._copies.pop(result.id, None)
        if copy is None:
            return
        assert self._stagings is not None
        self._manager.finish_load(copy.lease)
        self._slots -= len(copy.chunks)
        slots = self._stagings.report(result)
        if copy.called_off:
            return
        known = self._peers[copy.peer]
        del known.staging[copy.number]
        self.counts["staged"] += len(slots)
        self.counts["not staged"] += len(copy.chunks) - len(slots)
        good = next(
            (at for at, chunk in enumerate(copy.chunks[: len(slots)]) if chunk.end <= now), len(slots)
        )
        self._stagings.give(slots[good:])
        if not good:
            self._answers.append((copy.peer, self._refuse(copy.number, Refusal.BUSY)))
            return
        chunks = copy.chunks[:good]
        whole = good == len(copy.chunks)
        # Only the last one may be no full chunk.
        tokens = copy.tokens if whole else copy.skipped_tokens + sum(chunk.tokens for chunk in chunks)
        grant = self._lend(copy.peer, copy.number, None, chunks, slots[:good], tokens, now)
        self._answers.append((copy.peer, grant))

    def workers_lost(self) -> None:
        """No worker is left, and so nothing that was copied. The manager was told before."""
        if self._stagings is None:
            return
        self._stagings.workers_lost()
        for copy in self._copies.values():
            self._slots -= len(copy.chunks)
            if not copy.called_off:
                self._answers.append((copy.peer, self._refuse(copy.number, Refusal.BUSY)))
        self._copies.clear()
        for known in self._peers.values():
            known.staging.clear()
            for number in list(known.open):
                self._end(known, number)

    def check(self) -> None:
        """Audit; for tests."""
        lent = [each for known in self._peers.values() for each in known.open.values()]
        copied = sum(len(copy.chunks) for copy in self._copies.values())
        in_tier = sum(len(each.slots) for each in lent if each.lease is not None)
        assert self._slots == in_tier + copied, "lent slots are miscounted"
        wanted = {order for known in self._peers.values() for order in known.staging.values()}
        assert wanted == {number for number, copy in self._copies.items() if not copy.called_off}
        if self._stagings is not None:
            assert self._stagings.under_way == len(self._copies), "a copy was forgotten"
            self._stagings.check([slot for each in lent if each.lease is None for slot in each.slots])

    # For Asking

    def decide(self, peer: PeerId, ask: PeerAsk, cursor: MatchCursor, now: float) -> Answer | None:
        """``None`` if the chunks have to be copied first."""
        match = cursor.match
        known = self._peers[peer]
        wanted = len(match.slots) - ask.skip
        if ask.number not in known.asking:
            return self._give_back(match.lease, ask.number, Refusal.ENDED)
        known.asking.discard(ask.number)
        if match.lease is None or wanted <= 0:
            return self._give_back(match.lease, ask.number, Refusal.NOTHING)
        room = self._room()
        if self._stagings is not None:
            wanted = room = min(wanted, room, self._stagings.free)
        if self.leases >= self._settings.most_leases or wanted > room or room <= 0:
            return self._give_back(match.lease, ask.number, Refusal.BUSY)
        chunks = tuple(self._manager.copying.leased(match.lease, ask.skip, ask.skip + wanted))
        if len(chunks) != wanted:  # something was dropped between two slices
            return self._give_back(match.lease, ask.number, Refusal.NOTHING)
        slots = match.slots[ask.skip : ask.skip + wanted]
        self._slots += wanted
        if self._stagings is None:
            self._manager.renew(match.lease, now, self._settings.lease_seconds)
            return self._lend(peer, ask.number, match.lease, chunks, slots, match.tokens, now)
        outcome = self._manager.begin_load(match.lease)
        assert outcome is LeaseOutcome.OK, outcome
        skipped = ask.skip * match.chunk_tokens
        whole = ask.skip + wanted == len(match.slots)
        order = self._stagings.begin(
            [chunk.tokens for chunk in chunks], slots, self._settings.staging_seconds
        )
        self._copies[order] = _Staging(
            peer,
            ask.number,
            match.lease,
            chunks,
            skipped,
            match.tokens if whole else skipped + wanted * match.chunk_tokens,
        )
        known.staging[ask.number] = order
        return None

    def _lend(
        self,
        peer: PeerId,
        number: int,
        lease: int | None,
        chunks: tuple[ChunkFacts, ...],
        slots: tuple[int, ...],
        tokens: int,
        now: float,
    ) -> Grant:
        deadline = now + self._settings.lease_seconds
        last_end = now + self._settings.longest_seconds
        lent = Lent(peer, lease, chunks, slots, tokens, deadline, last_end)
        self._peers[peer].open[number] = lent
        heapq.heappush(self._due, (deadline, peer, number))
        self.counts["granted"] += 1
        self.counts["chunks"] += len(chunks)
        return lent.grant(number, now)

    def _call_off(self, order: int) -> None:
        assert self._stagings is not None
        self._copies[order].called_off = True
        self._stagings.call_off(order)

    def _room(self) -> int:
        return int(self._manager.copying.usable * self._settings.share) - self._slots

    def _give_back(self, lease: int | None, number: int, reason: Refusal) -> Refused:
        if lease is not None:
            self._manager.release(lease)
        return self._refuse(number, reason)

    def _refuse(self, number: int, reason: Refusal) -> Refused:
        self.counts[reason.value] += 1
        return Refused(number, reason)

    def _find(self, peer: PeerId, number: int) -> Lent | None:
        known = self._peers.get(peer)
        return None if known is None else known.open.get(number)

    def _end(self, known: _Peer, number: int) -> None:
        lent = known.open.pop(number)
        if lent.lease is not None:
            self._slots -= len(lent.slots)
            self._manager.release(lent.lease)
        else:
            assert self._stagings is not None
            self._stagings.give(lent.slots)


class Asking:
    """An ask that is being looked up, slice by slice.

    Call :meth:`advance` under the manager's lock until it returns ``False``; :attr:`answer` is there then, or
    ``None`` if it comes once the chunks are copied, or if the same ask is being answered already.
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
        cursor = self._cursor
        if self.answer is not None or cursor is None:
            return False
        if cursor.advance(now):
            return True
        self._cursor = None
        self.answer = self._serving.decide(self._peer, self._ask, cursor, now)
        return False
