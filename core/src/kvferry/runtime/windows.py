"""Groups with a window: what of a chunk is there, how far a hit may reach, and what is being read.

The engine gives blocks back in the middle of a request, once the window has left them behind, and
hands them to others at once. So a chunk may be complete when its first blocks are gone, and a save
may still read blocks that are about to be overwritten.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.runtime.grain import NULL_BLOCK, Grain
from kvferry.runtime.requests import RequestState

Missing = tuple[int, ...]
"""Per group, how many blocks at a chunk's beginning were not there to be stored."""


def first_kept(state: RequestState, grain: Grain) -> tuple[int, ...]:
    """Per group, the first block of a request that the engine has certainly not given back."""
    found = []
    for group, table in zip(grain.groups, state.blocks, strict=True):
        first = group.first_needed(state.settled)
        if group.window is not None:
            while first < len(table) and table[first] == NULL_BLOCK:
                first += 1
        found.append(first)
    return tuple(found)


def missing_of(chunk: int, kept: Sequence[int], grain: Grain) -> Missing:
    """What of a chunk is not there to be stored."""
    return tuple(
        min(max(0, first - chunk * grain.chunk // group.block_tokens), grain.chunk // group.block_tokens)
        for first, group in zip(kept, grain.groups, strict=True)
    )


def restorable(chunk: int, end: int, missing: Missing, grain: Grain) -> bool:
    """Whether a request that goes on at token ``end``, inside or at the end of a chunk, finds what it
    needs of this chunk."""
    for group, gone in zip(grain.groups, missing, strict=True):
        begin = chunk * grain.chunk // group.block_tokens
        needed = group.first_needed(end)
        if gone and needed < end // group.block_tokens and max(needed, begin) < begin + gone:
            return False
    return True


class StoredWindows:
    """What is missing in the chunks of a tier, by slot. Chunks that are whole cost nothing.

    Not thread-safe: it belongs to the thread that reserves slots and matches chunks. What a slot held
    before is forgotten when it is granted again.
    """

    def __init__(self, grain: Grain) -> None:
        self._grain = grain
        self._missing: dict[int, Missing] = {}

    def granted(self, slot: int, missing: Missing) -> None:
        """A chunk with these blocks missing is about to be written into the slot."""
        if any(missing):
            self._missing[slot] = missing
        else:
            self._missing.pop(slot, None)

    def whole(self, slot: int) -> bool:
        """Whether nothing is missing in a slot. Any thread: it is one look into a dictionary."""
        return slot not in self._missing

    def reach(self, slots: Sequence[int], tokens: int, local: int) -> int:
        """The longest hit, in tokens, within the ``tokens`` that ``slots`` hold, one a chunk.

        ``local`` tokens are the engine's own already, so nothing before them is needed. A hit is only
        as long as all its windows are there: where bytes are missing, it ends at an earlier chunk.
        """
        grain = self._grain
        end = tokens
        while self._missing and end > local:
            gaps = [self._gap(slots, end, local, index) for index in range(len(grain.groups))]
            shorter = [begin for begin in gaps if begin is not None]
            if not shorter:
                break
            end = min(shorter)
        return end if end > local else 0

    def _gap(self, slots: Sequence[int], end: int, local: int, index: int) -> int | None:
        """Where the last chunk begins that lacks something a hit of ``end`` tokens needs, if any."""
        group, chunk_tokens = self._grain.groups[index], self._grain.chunk
        if group.window is None:
            return None
        needed = max(local, group.first_needed(end) * group.block_tokens)
        if needed >= end:
            return None
        for chunk in range((end - 1) // chunk_tokens, needed // chunk_tokens - 1, -1):
            missing = self._missing.get(slots[chunk])
            gone = 0 if missing is None else missing[index] * group.block_tokens
            begin = chunk * chunk_tokens
            if gone and needed < begin + gone:
                return begin
        return None


class WindowReads:
    """Blocks of groups with a window that saves under way may be reading.

    A save counts from the step after the one that planned it: the blocks of its own step are the
    request's. Not thread-safe.
    """

    def __init__(self) -> None:
        self._reading: dict[int, tuple[str, frozenset[int]]] = {}
        self._planned: dict[int, tuple[str, frozenset[int]]] = {}
        self._taken: set[int] = set()

    def begin(self, transfer_id: int, request_id: str, blocks: Iterable[int]) -> None:
        """A save was planned that reads these blocks."""
        read = frozenset(blocks)
        if read:
            self._planned[transfer_id] = (request_id, read)

    def end(self, transfer_id: int) -> None:
        """Nobody reads for this save any more."""
        self._reading.pop(transfer_id, None)
        self._planned.pop(transfer_id, None)

    def take(self, tables: Iterable[Iterable[int]]) -> None:
        """The engine hands these blocks out; the coming step may overwrite them."""
        for table in tables:
            self._taken.update(table)

    def overtaken(self) -> list[str]:
        """Requests with a save that reads a block taken since the last call: they must be flushed.

        Called once per step, after all its saves were planned.
        """
        found = {name for name, blocks in self._reading.values() if not blocks.isdisjoint(self._taken)}
        self._taken.clear()
        self._reading.update(self._planned)
        self._planned.clear()
        return sorted(found)
