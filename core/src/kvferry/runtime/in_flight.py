"""Transfers that workers were told to run, until every rank has reported."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from kvferry.control.loans import Loan
from kvferry.control.outcomes import ChunkFacts
from kvferry.data.plans import TransferResult
from kvferry.runtime.requests import RequestState


@frozen
class Granted:
    """One chunk of a save: item of its reservation, slot, index in its chain, tokens.

    ``missing`` blocks at its beginning are not there to be saved, per group; empty means all are.
    """

    item: int
    slot: int
    chunk: int
    tokens: int
    missing: tuple[int, ...] = ()


@frozen(kw_only=True)
class InFlightSave:
    """``state`` is the request as it was then: another one may bear the same id when results come."""

    state: RequestState
    reservation: int
    granted: tuple[Granted, ...]


@frozen(kw_only=True)
class InFlightLoad:
    """``chunks`` and ``digests`` say per slot which chunk of the chain it holds; slots without a
    digest were never read. ``state`` as for a save."""

    state: RequestState
    lease: int
    tokens: int
    chunks: Mapping[int, int]
    digests: Mapping[int, bytes]


@frozen(kw_only=True)
class InFlightPeerLoad:
    """A load out of a peer's memory. Its places are those of ``facts``; ``first`` is the number of the chunk
    at the first of them. ``state`` as for a save."""

    state: RequestState
    loan: Loan
    tokens: int
    first: int
    facts: tuple[ChunkFacts, ...]


InFlight = InFlightSave | InFlightLoad | InFlightPeerLoad


@frozen
class Ended:
    """What all ranks together made of a transfer: a slot failed if it failed on any rank."""

    flight: InFlight
    failed_slots: frozenset[int]
    reason: str


@frozen
class _Open:
    flight: InFlight
    waiting: set[int]
    failed_slots: set[int] = field(factory=set)
    reasons: list[str] = field(factory=list)


class InFlightTransfers:
    """Open transfers by id. Ids are never used twice. Not thread-safe."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._last = 0
        self._open: dict[int, _Open] = {}

    def next_id(self) -> int:
        self._last += 1
        return self._last

    def add(self, transfer_id: int, flight: InFlight) -> None:
        self._open[transfer_id] = _Open(flight, set(range(self._world_size)))

    def report(self, rank: int, result: TransferResult) -> Ended | None:
        """Note one rank's result. The outcome once all have reported; a repeated or unknown result
        changes nothing."""
        transfer = self._open.get(result.id)
        if transfer is None or rank not in transfer.waiting:
            return None
        transfer.waiting.discard(rank)
        transfer.failed_slots.update(result.failed_slots)
        if result.reason:
            transfer.reasons.append(f"rank {rank}: {result.reason}")
        if transfer.waiting:
            return None
        del self._open[result.id]
        return Ended(
            transfer.flight,
            frozenset(transfer.failed_slots),
            transfer.reasons[0] if transfer.reasons else "",
        )
