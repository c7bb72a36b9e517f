"""What a pull comes to: which bytes of a peer's arena go where, and what cannot be named at all."""

from __future__ import annotations

from attrs import field, frozen

from kvferry.api import RemoteOp, Span
from kvferry.control.orders import ItemFault
from kvferry.data.engine_side import SlotLayout
from kvferry.data.wire import PullChunks

ARENA = "arena"
"""The name under which each rank registers its first tier."""


@frozen(kw_only=True)
class PullPlan:
    """``operations[i]`` reads the chunk at ``places[i]`` of the order. The rest is in ``faults``."""

    operations: tuple[RemoteOp, ...] = ()
    places: tuple[int, ...] = ()
    faults: dict[int, ItemFault] = field(factory=dict)
    reason: str = ""
    """Why the first of ``faults``."""


def plan_pull(order: PullChunks, layout: SlotLayout, chunk_tokens: int, ours: int, theirs: int) -> PullPlan:
    """Cut an order into one operation per chunk, between arenas of so many bytes, ours and the peer's.

    The peer named its slots and the sizes of its chunks: what does not lie inside both arenas, or would
    reach beyond its slot, is not read. One operation per chunk, also where slots are neighbours: chunks fail
    one by one, so what had arrived before a deadline is of use.
    """
    operations: list[RemoteOp] = []
    places: list[int] = []
    faults: dict[int, ItemFault] = {}
    reason = ""
    columns = zip(order.tokens, order.from_slots, order.slots, strict=True)
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
        span = Span(ARENA, target * layout.total_bytes, length)
        operations.append(RemoteOp(span, ARENA, source * layout.total_bytes))
        places.append(place)
    return PullPlan(operations=tuple(operations), places=tuple(places), faults=faults, reason=reason)
