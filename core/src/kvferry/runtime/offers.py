"""What a request has to offer to the tier, and the rows that save what was taken."""

from __future__ import annotations

from collections.abc import Sequence

from attrs import frozen

from kvferry.control.outcomes import ChunkWrite
from kvferry.data.plans import Direction, Transfer
from kvferry.runtime.in_flight import Granted
from kvferry.runtime.requests import RequestState


@frozen
class Grain:
    """Tokens of a block and of a chunk."""

    block: int
    chunk: int

    @property
    def blocks_per_chunk(self) -> int:
        return self.chunk // self.block


def offers(state: RequestState, valid: int, tail_limit: int, grain: Grain) -> list[ChunkWrite]:
    """Chunks within the first ``valid`` tokens that were not offered yet, in chain order, and a tail
    that ends at the last whole block within ``tail_limit`` tokens.

    The chain must cover ``valid`` tokens.
    """
    full = min(valid // grain.chunk, len(state.chain.keys))
    writes = [_whole(state, index, grain) for index in range(state.next_chunk, full)]
    blocks = (min(valid, tail_limit) - full * grain.chunk) // grain.block
    if blocks > 0 and full * grain.chunk + blocks * grain.block > state.saved_tail:
        writes.append(_tail(state, full, blocks * grain.block, grain))
    return writes


def save(transfer_id: int, state: RequestState, granted: Sequence[Granted], grain: Grain) -> Transfer:
    """The rows that copy the granted chunks out of the request's blocks."""
    slots: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for chunk in granted:
        blocks = chunk.tokens // grain.block
        first = chunk.chunk * grain.blocks_per_chunk
        slots += [chunk.slot] * blocks
        positions += range(blocks)
        rows += range(first, first + blocks)
    return Transfer.of(
        transfer_id,
        state.id,
        Direction.SAVE,
        slots,
        positions,
        [[table[row] for row in rows] for table in state.blocks],
    )


def load(
    transfer_id: int,
    state: RequestState,
    rows: range,
    slots: Sequence[int],
    blocks: Sequence[Sequence[int]],
    grain: Grain,
) -> Transfer:
    """The rows that copy matched chunks into the engine's blocks ``rows``, counted from the start of
    the request. ``slots`` holds one slot per matched chunk from the start."""
    per_chunk = grain.blocks_per_chunk
    return Transfer.of(
        transfer_id,
        state.id,
        Direction.LOAD,
        [slots[row // per_chunk] for row in rows],
        [row % per_chunk for row in rows],
        [[table[row] for row in rows] for table in blocks],
    )


def matched_digest(state: RequestState, chunk: int, grain: Grain) -> bytes:
    """The digest under which a matched chunk was found: its own, or that of its beginning."""
    if chunk < state.matched_tokens // grain.chunk:
        return state.chain.keys[chunk]
    held = state.matched_tokens - chunk * grain.chunk
    tails = state.chain.tail_keys(chunk, grain.block)
    return next(digest for digest, tokens in tails if tokens == held)


def _whole(state: RequestState, index: int, grain: Grain) -> ChunkWrite:
    return ChunkWrite(
        digest=state.chain.keys[index],
        parent=state.chain.keys[index - 1] if index else None,
        depth=index,
        tokens=grain.chunk,
        aliases=tuple(state.chain.tail_keys(index, grain.block)),
    )


def _tail(state: RequestState, index: int, tokens: int, grain: Grain) -> ChunkWrite:
    tails = [pair for pair in state.chain.tail_keys(index, grain.block) if pair[1] <= tokens]
    (digest, held), *aliases = tails
    return ChunkWrite(
        digest=digest,
        parent=state.chain.keys[index - 1] if index else None,
        depth=index,
        tokens=held,
        aliases=tuple(aliases),
    )
