"""What a pull comes to: which bytes of a peer's memory go where, and what cannot be named at all."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from attrs import field, frozen

from kvferry.api import RemoteOp, Span
from kvferry.control.orders import ItemFault
from kvferry.data.engine_side import SlotLayout

LANDING = "landing"
"""The name under which each rank registers the buffers that reads pass through."""


class PullListener(Protocol):
    """What becomes of pulls. Called from any thread; must not block."""

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        """A pull ended: exactly once each. Nothing touches its slots any more."""
        ...

    def filled(self, slots: Collection[int]) -> None:
        """These slots of ours hold chunks that were read. Called before :meth:`done`."""
        ...


@frozen(kw_only=True)
class Reading:
    """Chunks of so many ``tokens`` to be read out of slots of a peer, in its region ``region``, into slots of
    our region ``into``, by a time of the channel's clock. ``listener`` hears of its end under ``id``, a
    number that no other reading under way has."""

    id: int
    peer: str
    epoch: bytes
    region: str
    from_slots: tuple[int, ...]
    tokens: tuple[int, ...]
    into: str
    slots: tuple[int, ...]
    deadline: float
    listener: PullListener
    may_be_early: bool = False
    """It came by another way than the word of its peer, for which it waits then."""


@frozen(kw_only=True)
class PullPlan:
    """``operations[i]`` reads the chunk at ``places[i]`` of the reading. The rest is in ``faults``."""

    operations: tuple[RemoteOp, ...] = ()
    places: tuple[int, ...] = ()
    faults: dict[int, ItemFault] = field(factory=dict)
    reason: str = ""
    """Why the first of ``faults``."""


def plan_pull(reading: Reading, layout: SlotLayout, chunk_tokens: int, ours: int, theirs: int) -> PullPlan:
    """Cut it into one operation per chunk, between regions of so many bytes, ours and the peer's.

    The peer named its slots and the sizes of its chunks: what does not lie inside both regions, or would
    reach beyond its slot, is not read. One operation per chunk, also where slots are neighbours: chunks fail
    one by one, so what had arrived before a deadline is of use.
    """
    operations: list[RemoteOp] = []
    places: list[int] = []
    faults: dict[int, ItemFault] = {}
    reason = ""
    columns = zip(reading.tokens, reading.from_slots, reading.slots, strict=True)
    for place, (tokens, source, target) in enumerate(columns):
        why = ""
        if not 0 < tokens <= chunk_tokens:
            why = f"a chunk of {tokens} tokens, where {chunk_tokens} are the most"
        elif not 0 <= source < layout.slots_in(theirs):
            why = f"slot {source} of {layout.slots_in(theirs)} slots of the peer"
        elif not 0 <= target < layout.slots_in(ours):
            why = f"slot {target} of {layout.slots_in(ours)} slots here"
        if why:
            faults[place] = ItemFault.FAILED
            reason = reason or f"the pull names memory that does not exist: {why}"
            continue
        length = layout.value_bytes(tokens, chunk_tokens)
        span = Span(reading.into, target * layout.total_bytes, length)
        operations.append(RemoteOp(span, reading.region, source * layout.total_bytes))
        places.append(place)
    return PullPlan(operations=tuple(operations), places=tuple(places), faults=faults, reason=reason)
