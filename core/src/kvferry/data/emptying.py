"""What takes chunks out of the landing buffers: into the engine's blocks, or into the first tier."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvferry.api import KVFerryError, Region
from kvferry.data.copy import SpanCopier
from kvferry.data.engine_side import SlotLayout
from kvferry.data.landing import Landed
from kvferry.data.mover import Mover
from kvferry.data.plans import GroupRows, Transfer

Empty = Callable[[Sequence[Landed]], Mapping[int, str]]


def into_blocks(mover: Mover, transfer: Transfer) -> Empty:
    """Scatter into the engine's blocks. The rows of ``transfer`` name chunks by their places; ``mover``
    copies out of the buffers."""

    def empty(landed: Sequence[Landed]) -> Mapping[int, str]:
        slots = {each.place: each.slot for each in landed}
        mover.filled(slots.values())
        result = mover.run_now(_rows_of(transfer, slots))
        places = {slot: place for place, slot in slots.items()}
        return {places[slot]: result.reason for slot in result.failed_slots}

    return empty


def into_slots(
    copier: SpanCopier,
    buffers: Region,
    arena: Region,
    layout: SlotLayout,
    lengths: Sequence[int],
    slots: Sequence[int],
    filled: Callable[[Sequence[int]], None],
) -> Empty:
    """Copy into slots of the first tier: of the chunk at place ``i`` so many bytes as ``lengths[i]`` to
    ``slots[i]``. ``filled`` is told of them."""

    whole = range(layout.slots_in(arena.length))

    def empty(landed: Sequence[Landed]) -> Mapping[int, str]:
        if any(slots[each.place] not in whole for each in landed):
            return dict.fromkeys((each.place for each in landed), "a slot that does not exist here")
        size = np.uint64(layout.total_bytes)
        sources = np.array([each.slot for each in landed], np.uint64) * size + np.uint64(buffers.address)
        targets = np.array([slots[each.place] for each in landed], np.uint64) * size
        try:
            copier.copy(
                targets + np.uint64(arena.address),
                sources,
                np.array([lengths[each.place] for each in landed], np.uint64),
            )
        except KVFerryError as error:
            return dict.fromkeys((each.place for each in landed), str(error))
        filled([slots[each.place] for each in landed])
        return {}

    return empty


def _rows_of(transfer: Transfer, slots: Mapping[int, int]) -> Transfer:
    """The rows of some chunks alone, which lie in these slots."""
    highest = max(slots)
    where = np.full(highest + 1, -1, "<i4")
    where[list(slots)] = list(slots.values())
    groups = []
    for rows in transfer.groups:
        places = rows.slot_column
        known = places <= highest
        known[known] = where[places[known]] >= 0
        groups.append(
            GroupRows(
                slots=where[places[known]].tobytes(),
                positions=rows.position_column[known].tobytes(),
                blocks=rows.block_column[known].tobytes(),
            )
        )
    return Transfer(transfer.id, transfer.request_id, transfer.direction, tuple(groups))
