"""What a request has to offer to the tier, and the rows that save what was taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.control.outcomes import ChunkWrite
from kvferry.data.plans import Direction, GroupRows, Transfer
from kvferry.runtime.grain import NULL_BLOCK, Grain, GroupShape
from kvferry.runtime.in_flight import Granted
from kvferry.runtime.requests import RequestState
from kvferry.runtime.windows import first_kept, missing_of, restorable

Restorable = Callable[[int, int], bool]
"""Whether a hit that ends inside a chunk (its number, tokens) finds what it needs of that chunk."""


def offers(state: RequestState, valid: int, tail_limit: int, grain: Grain) -> list[ChunkWrite]:
    """Chunks within the first ``valid`` tokens that were not offered yet, in chain order, and a tail
    that ends at the last whole block within ``tail_limit`` tokens.

    The chain must cover ``valid`` tokens. Where a window's blocks are gone already, a chunk is offered
    without the hits that would need them.
    """
    fits = _everything if not grain.windows else _within_windows(state, grain)
    full = min(valid // grain.chunk, len(state.chain.keys))
    writes = [_whole(state, index, grain, fits) for index in range(state.next_chunk, full)]
    blocks = (min(valid, tail_limit) - full * grain.chunk) // grain.block
    if blocks > 0 and full * grain.chunk + blocks * grain.block > state.saved_tail:
        writes += _tail(state, full, blocks * grain.block, grain, fits)
    return writes


def save(transfer_id: int, state: RequestState, granted: Sequence[Granted], grain: Grain) -> Transfer:
    """The rows that copy the granted chunks out of the request's blocks, as far as they are there."""
    return Transfer(
        transfer_id,
        state.id,
        Direction.SAVE,
        tuple(
            _save_rows(granted, group, grain, number, table)
            for number, (group, table) in enumerate(zip(grain.groups, state.blocks, strict=True))
        ),
    )


def _save_rows(
    granted: Sequence[Granted], group: GroupShape, grain: Grain, number: int, table: Sequence[int]
) -> GroupRows:
    slots: list[int] = []
    positions: list[int] = []
    rows: list[int] = []
    for chunk in granted:
        gone = chunk.missing[number] if chunk.missing else 0
        blocks = chunk.tokens // group.block_tokens
        first = chunk.chunk * grain.chunk // group.block_tokens
        slots += [chunk.slot] * (blocks - gone)
        positions += range(gone, blocks)
        rows += range(first + gone, first + blocks)
    return GroupRows.of(slots, positions, [table[row] for row in rows])


def window_blocks(transfer: Transfer, grain: Grain) -> list[int]:
    """The blocks of groups with a window that a transfer names."""
    return [
        block
        for group, rows in zip(grain.groups, transfer.groups, strict=True)
        if group.window is not None
        for block in rows.block_column.tolist()
    ]


def load(
    transfer_id: int,
    state: RequestState,
    tokens: range,
    slots: Sequence[int],
    blocks: Sequence[Sequence[int]],
    grain: Grain,
) -> Transfer:
    """The rows that copy matched chunks into the engine's blocks of ``tokens``, counted from the start
    of the request. ``slots`` holds one slot per matched chunk from the start. Of a group with a window
    only what the tokens behind them attend to is copied."""
    return Transfer(
        transfer_id,
        state.id,
        Direction.LOAD,
        tuple(
            _load_rows(group, tokens, slots, table, grain.chunk // group.block_tokens)
            for group, table in zip(grain.groups, blocks, strict=True)
        ),
    )


def _load_rows(
    group: GroupShape, tokens: range, slots: Sequence[int], table: Sequence[int], per_chunk: int
) -> GroupRows:
    first = max(tokens.start // group.block_tokens, group.first_needed(tokens.stop))
    rows: Sequence[int] = range(first, tokens.stop // group.block_tokens)
    if group.window is not None:
        rows = [row for row in rows if table[row] != NULL_BLOCK]
    return GroupRows.of(
        [slots[row // per_chunk] for row in rows],
        [row % per_chunk for row in rows],
        [table[row] for row in rows],
    )


def matched_digest(state: RequestState, chunk: int, grain: Grain) -> bytes:
    """The digest under which a matched chunk was found: its own, or that of its beginning."""
    if chunk < state.matched_tokens // grain.chunk:
        return state.chain.keys[chunk]
    held = state.matched_tokens - chunk * grain.chunk
    tails = state.chain.tail_keys(chunk, grain.block)
    return next(digest for digest, tokens in tails if tokens == held)


def _everything(chunk: int, tokens: int) -> bool:
    return True


def _within_windows(state: RequestState, grain: Grain) -> Restorable:
    kept = first_kept(state, grain)

    def fits(chunk: int, tokens: int) -> bool:
        end = chunk * grain.chunk + tokens
        return restorable(chunk, end, missing_of(chunk, kept, grain), grain)

    return fits


def _whole(state: RequestState, index: int, grain: Grain, fits: Restorable) -> ChunkWrite:
    return ChunkWrite(
        digest=state.chain.keys[index],
        parent=state.chain.keys[index - 1] if index else None,
        depth=index,
        tokens=grain.chunk,
        aliases=tuple(pair for pair in state.chain.tail_keys(index, grain.block) if fits(index, pair[1])),
    )


def _tail(state: RequestState, index: int, tokens: int, grain: Grain, fits: Restorable) -> list[ChunkWrite]:
    """The tail, or nothing when no hit could end within it."""
    tails = [pair for pair in state.chain.tail_keys(index, grain.block) if pair[1] <= tokens]
    tails = [pair for pair in tails if fits(index, pair[1])]
    if not tails:
        return []
    (digest, held), *aliases = tails
    write = ChunkWrite(
        digest=digest,
        parent=state.chain.keys[index - 1] if index else None,
        depth=index,
        tokens=held,
        aliases=tuple(aliases),
    )
    return [write]
