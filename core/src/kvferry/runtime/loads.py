"""Loads of requests: what was matched or lent becomes rows for the workers, and what became of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attrs import frozen

from kvferry.control.hierarchy import Hierarchy
from kvferry.control.manager import CacheManager
from kvferry.control.orders import ItemFault, OrderResult
from kvferry.control.outcomes import LeaseOutcome
from kvferry.data.plans import PeerLoad, Transfer
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.grain import Grain
from kvferry.runtime.in_flight import Ended, InFlightLoad, InFlightPeerLoad, InFlightTransfers
from kvferry.runtime.offers import load, matched_digest
from kvferry.runtime.requests import LoadState, RequestState
from kvferry.runtime.waits import Waits

NO_SLOT = -1
"""Never a slot: a plan that names it is refused by the worker and reported as failed."""


@frozen
class PlannedLoads:
    """Of one step, see :class:`kvferry.data.plans.StepPlan`."""

    in_front: tuple[Transfer, ...]
    beside: tuple[Transfer, ...]
    from_peers: tuple[PeerLoad, ...]


class Loads:
    """Plans loads of one scheduler's requests out of the first tier and out of peers' memory.

    ``lock`` guards the manager, ``in_flight`` and what ``count(**added)`` adds to. ``on_change`` is called
    under it when chunks have gone that a request may have matched. With ``keep`` what comes from a peer is
    saved here, too. ``hierarchy`` is ``None`` where there is the first tier alone.

    Threads: :meth:`ended` on the service's, under the lock; the rest on the scheduler's, without it.
    """

    def __init__(
        self,
        manager: CacheManager,
        lock: FairLock,
        grain: Grain,
        in_flight: InFlightTransfers,
        waits: Waits,
        hierarchy: Hierarchy | None,
        *,
        keep: bool,
        count: Callable[..., None],
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._manager = manager
        self._lock = lock
        self._grain = grain
        self._in_flight = in_flight
        self._waits = waits
        self._hierarchy = hierarchy
        self._keep = keep
        self._count = count
        self._on_change = on_change
        self._clock = clock
        self._in_front: list[Transfer] = []
        self._beside: list[Transfer] = []
        self._from_peers: list[PeerLoad] = []

    @property
    def planned(self) -> bool:
        """Whether some were planned since :meth:`take`."""
        return bool(self._in_front or self._beside or self._from_peers)

    def take(self) -> PlannedLoads:
        """What was planned since the last time."""
        planned = PlannedLoads(tuple(self._in_front), tuple(self._beside), tuple(self._from_peers))
        self._in_front, self._beside, self._from_peers = [], [], []
        return planned

    def plan(self, state: RequestState, external_tokens: int, blocks: Sequence[Sequence[int]]) -> None:
        """Load so many tokens behind those that the engine has, into these blocks, of what was matched and
        lent. What of that is not needed is given back."""
        chunk = self._grain.chunk
        end = state.local_tokens + external_tokens
        border = end
        if state.loan is not None:
            # What the first tier has comes from there, in whole chunks.
            border = max(state.local_tokens, max(state.loan.first, state.matched_tokens // chunk) * chunk)
        with self._lock:
            self._count(hit_tokens=external_tokens)
        if border > state.local_tokens:
            self._plan_tier_load(state, range(state.local_tokens, min(border, end)), blocks)
        else:
            self.give_back(state)
        if border < end:
            self._plan_peer_load(state, range(border, end), blocks)
        else:
            self.drop_loan(state)
        state.load = LoadState.LOADING
        # What was restored needs no saving, if it came from here; a load that fails sets this back.
        saved = border if self._keep else end
        state.next_chunk = max(state.next_chunk, min(saved, end) // chunk)

    def _plan_tier_load(self, state: RequestState, tokens: range, blocks: Sequence[Sequence[int]]) -> None:
        grain = self._grain
        chunks = range(tokens.start // grain.chunk, (tokens.stop - 1) // grain.chunk + 1)
        digests = {chunk: matched_digest(state, chunk, grain) for chunk in chunks}
        with self._lock:
            held = self._manager.begin_load(state.lease) is LeaseOutcome.OK
        # Without the lease nothing is read: the load fails as a whole, and proves no chunk bad.
        slots = state.matched_slots if held else (NO_SLOT,) * len(state.matched_slots)
        transfer = load(self._in_flight.next_id(), state, tokens, slots, blocks, grain)
        flight = InFlightLoad(
            state=state,
            lease=state.lease,
            tokens=len(tokens),
            # Backwards, so that the earliest chunk stands for a slot that is none.
            chunks={slots[chunk]: chunk for chunk in reversed(chunks)},
            digests={slots[chunk]: digests[chunk] for chunk in chunks} if held else {},
        )
        with self._lock:
            self._in_flight.add(transfer.id, flight)
        if self._hierarchy is not None:
            self._waits.loaded(state, tokens.stop, digests, grain.chunk, self._hierarchy.rises.brought)
        state.lease = 0
        (self._beside if state.load_beside else self._in_front).append(transfer)

    def _plan_peer_load(self, state: RequestState, tokens: range, blocks: Sequence[Sequence[int]]) -> None:
        grain, loan = self._grain, state.loan
        assert loan is not None, "nothing was lent"
        chunks = range(tokens.start // grain.chunk, (tokens.stop - 1) // grain.chunk + 1)
        facts = loan.chunks[chunks.start - loan.first : chunks.stop - loan.first]
        places = [NO_SLOT] * chunks.start + list(range(len(chunks)))
        transfer = load(self._in_flight.next_id(), state, tokens, places, blocks, grain)
        flight = InFlightPeerLoad(state=state, loan=loan, tokens=len(tokens), first=chunks.start, facts=facts)
        with self._lock:
            self._in_flight.add(transfer.id, flight)
            loan.peer.fetching += len(facts)
            until = loan.until()  # what has run out is found out by the workers, and recomputed
        self._waits.borrowed(len(tokens))
        state.loan = None
        self._from_peers.append(
            PeerLoad(
                transfer=transfer,
                peer=loan.peer.id.instance,
                epoch=loan.peer.id.epoch,
                region=loan.region,
                slots=tuple(loan.slots[chunk.digest] for chunk in facts),
                tokens=tuple(chunk.tokens for chunk in facts),
                deadline=until,
                seconds=loan.peer.settings.load_deadline,
            )
        )

    def end_of_loan(self, state: RequestState, local_tokens: int, limit: int) -> int:
        """The end of what a peer lends the request, behind what is here; 0 if nothing of use is lent."""
        borrowing = None if self._hierarchy is None else self._hierarchy.borrowing
        if borrowing is None or (state.loan is None and not borrowing.keeps(state.id)):
            return 0
        with self._lock:
            if state.loan is None:
                state.loan = borrowing.take_kept(state.id)
            if state.loan is None:
                return 0
            here = max(local_tokens, state.matched_tokens)
            end = min(state.loan.tokens, limit)
            if end > here >= state.loan.first * self._grain.chunk and state.loan.stands(self._clock()):
                return end
        self.drop_loan(state)
        return 0

    def drop_loan(self, state: RequestState) -> None:
        """The request takes nothing of what a peer lends it."""
        borrowing = None if self._hierarchy is None else self._hierarchy.borrowing
        if borrowing is None or (state.loan is None and not borrowing.keeps(state.id)):
            return
        with self._lock:
            borrowing.drop(state.id)
            if state.loan is not None:
                state.loan.release()
                state.loan = None

    def ended(self, flight: InFlightLoad | InFlightPeerLoad, ended: Ended) -> None:
        """What all ranks made of a load."""
        if isinstance(flight, InFlightPeerLoad):
            self._peer_load_ended(flight, ended)
        else:
            self._tier_load_ended(flight, ended)

    def _tier_load_ended(self, flight: InFlightLoad, ended: Ended) -> None:
        self._manager.finish_load(flight.lease)
        bad = [chunk for slot, chunk in flight.chunks.items() if slot in ended.failed_slots]
        if not bad:
            self._count(loaded_tokens=flight.tokens)
            return
        self._count(failed_loads=1)
        self._manager.drop(flight.digests[slot] for slot in ended.failed_slots if slot in flight.digests)
        # Whoever matched these chunks, and has not begun to load them, matches again.
        self._on_change()
        flight.state.next_chunk = min(flight.state.next_chunk, *bad)

    def _peer_load_ended(self, flight: InFlightPeerLoad, ended: Ended) -> None:
        bad = dict.fromkeys(sorted(ended.failed_slots), ItemFault.FAILED)
        flight.loan.fetched(flight.facts, OrderResult(0, bad, ended.reason), self._clock())
        flight.loan.release()
        if not bad:
            self._count(loaded_tokens=flight.tokens)
            return
        self._count(failed_loads=1)
        flight.state.next_chunk = min(flight.state.next_chunk, flight.first + min(bad))

    def give_back(self, state: RequestState) -> None:
        """The request does without what was matched in the first tier."""
        if state.load is not LoadState.MATCHED:
            return
        with self._lock:
            self._manager.release(state.lease)
        state.lease = 0
        state.load = LoadState.NONE
        state.matched_slots = ()
        state.matched_tokens = 0
