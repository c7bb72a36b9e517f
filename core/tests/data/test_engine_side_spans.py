"""Rows of transfers become the right addresses, whatever the engine's memory looks like."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import ErrorKind, KVFerryError, Region
from kvferry.data.bounds import CopyPlan, check_plan
from kvferry.data.copy import NumpyCopier
from kvferry.data.engine_side import EngineGroup, EngineSide, PagePlane
from kvferry.data.mapping import region_view
from kvferry.data.plans import Direction, GroupRows, Transfer
from kvferry.testing.fake_memory import FakeGroup, FakeMemory, TokenHistory

BLOCK_TOKENS = 4

GROUPS = st.one_of(
    st.builds(
        FakeGroup,
        layers=st.integers(1, 3),
        heads=st.integers(1, 3),
        head_bytes=st.integers(1, 5),
        fused=st.booleans(),
        gap=st.sampled_from([0, 1, 13]),
        block_tokens=st.sampled_from([None, None, 2, 8]),
    ),
    st.builds(
        FakeGroup,
        layers=st.integers(1, 3),
        heads=st.just(1),
        head_bytes=st.integers(1, 9),
        latent=st.just(True),
    ),
)
CHUNK = 8
Places = list[tuple[int, int]]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[FakeGroup], int, int, list[Places], list[list[int]]]:
    """Groups, tokens of a chunk, slots; per group places (slot, position), and a block for each."""
    groups = draw(st.lists(GROUPS, min_size=1, max_size=3))
    chunk, slots, blocks = CHUNK * draw(st.integers(1, 2)), draw(st.integers(1, 4)), 24
    places = []
    for group in groups:
        per_slot = chunk // (group.block_tokens or BLOCK_TOKENS)
        place = st.tuples(st.integers(0, slots - 1), st.integers(0, per_slot - 1))
        places.append(sorted(draw(st.lists(place, max_size=12, unique=True))))
    tables = [draw(st.permutations(range(blocks))).copy()[: len(each)] for each in places]
    return groups, chunk, slots, places, tables


def arena(size: int) -> Region:
    memory = np.zeros(size, np.uint8)
    return Region(name="arena", address=memory.ctypes.data, length=size, keep_alive=memory)


def transfer(direction: Direction, places: list[Places], tables: list[list[int]]) -> Transfer:
    rows = [
        GroupRows.of([slot for slot, _ in each], [position for _, position in each], table)
        for each, table in zip(places, tables, strict=True)
    ]
    return Transfer(1, "r", direction, tuple(rows))


def run(side: EngineSide, work: Transfer, region: Region) -> None:
    side.check(work, side.layout.slots_in(region.length))
    written = [region] if work.direction is Direction.SAVE else side.regions()
    for group, rows in enumerate(work.groups):
        spans = side.spans(work, region, group, slice(0, len(rows)))
        check_plan(CopyPlan(*spans), [region, *side.regions()], written=written)
        NumpyCopier().copy(*spans)


@settings(max_examples=120, deadline=None)
@given(layouts())
def test_what_was_gathered_is_scattered_into_other_blocks_unchanged(layout: Any) -> None:
    groups, chunk, slots, places, tables = layout
    memory = FakeMemory(groups, blocks=24, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), chunk)
    region = arena(slots * side.layout.total_bytes)
    truth = TokenHistory(range(12 * CHUNK), "")

    def states(group: int, row: int) -> Any:
        size = memory.shapes[group].block_tokens
        return truth.states(row * size, (row + 1) * size)

    for group, table in enumerate(tables):
        for row, block in enumerate(table):
            memory.write(group, block, 0, states(group, row))
    run(side, transfer(Direction.SAVE, places, tables), region)
    assert not memory.strays([()] * len(groups)), "a gather wrote into the engine's memory"
    for block in range(24):
        memory.poison(block)
    others = [[23 - block for block in table] for table in tables]
    run(side, transfer(Direction.LOAD, places, others), region)
    assert not memory.strays(others), "a scatter wrote beside its blocks"
    for group, table in enumerate(others):
        for row, block in enumerate(table):
            assert memory.right(group, block, states(group, row))


@settings(max_examples=60, deadline=None)
@given(layouts(), st.integers(1, 5))
def test_pieces_of_rows_make_the_same_spans_as_all_at_once(layout: Any, piece: int) -> None:
    groups, chunk, slots, places, tables = layout
    memory = FakeMemory(groups, blocks=24, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), chunk)
    region = arena(slots * side.layout.total_bytes)
    work = transfer(Direction.SAVE, places, tables)

    def spans(group: int, rows: slice) -> set[tuple[int, ...]]:
        columns = side.spans(work, region, group, rows)
        return set(zip(*(column.tolist() for column in columns), strict=True))

    for group, size in enumerate(side.layout.block_bytes):
        rows = len(places[group])
        whole = spans(group, slice(0, rows))
        parts: set[tuple[int, ...]] = set()
        for start in range(0, rows, piece):
            parts |= spans(group, slice(start, min(rows, start + piece)))
        assert parts == whole
        assert sum(length for _, _, length in whole) == rows * size


def test_slots_are_cut_group_after_group_and_block_after_block() -> None:
    """Other processes map the arena, so the layout is part of the contract."""
    groups = (FakeGroup(layers=2, heads=1, head_bytes=2), FakeGroup(layers=1, heads=1, head_bytes=1))
    memory = FakeMemory(groups, blocks=4, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), 2 * BLOCK_TOKENS)
    first, second = 2 * 4 * 4, 4 * 2
    assert side.layout.block_bytes == (first, second)
    assert side.layout.total_bytes == 2 * (first + second)
    region = arena(3 * side.layout.total_bytes)
    for block in range(4):
        for group in range(2):
            truth = TokenHistory([10 * group + block] * BLOCK_TOKENS, "")
            memory.write(group, block, 0, truth.states(0, BLOCK_TOKENS))
    run(side, transfer(Direction.SAVE, [[(2, 0), (2, 1)]] * 2, [[3, 1], [0, 2]]), region)
    bytes_ = region_view(region)
    slot = bytes_[2 * side.layout.total_bytes :].tobytes()
    planes = memory.engine_groups()
    expected = b""
    for group, table in enumerate(([3, 1], [0, 2])):
        for block in table:
            for plane in planes[group].planes:
                page = Region(
                    name="page",
                    address=plane.address + block * plane.stride,
                    length=plane.page_bytes,
                    keep_alive=memory,
                )
                expected += region_view(page).tobytes()
    assert slot == expected
    assert not bytes_[: 2 * side.layout.total_bytes].any()


@pytest.mark.parametrize(
    ("slots", "positions", "blocks"),
    [
        ([-1], [0], [[0]]),
        ([3], [0], [[0]]),
        ([0], [-1], [[0]]),
        ([0], [2], [[0]]),
        ([0], [0], [[-1]]),
        ([0], [0], [[24]]),
        ([0, 0], [0, 1], [[0, 24]]),
        ([0], [0], []),
        ([0], [0], [[0], [0]]),
    ],
)
def test_rows_that_name_nothing_are_refused(
    slots: list[int], positions: list[int], blocks: list[list[int]]
) -> None:
    memory = FakeMemory([FakeGroup()], blocks=24, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), 2 * BLOCK_TOKENS)
    with pytest.raises(KVFerryError) as caught:
        side.check(Transfer.of(1, "r", Direction.LOAD, slots, positions, blocks), 3)
    assert caught.value.kind is ErrorKind.PROTOCOL


def test_columns_of_different_length_make_no_transfer() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Transfer.of(1, "r", Direction.LOAD, [0, 1], [0], [[0, 1]])
    memory = FakeMemory([FakeGroup()], blocks=24, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), 2 * BLOCK_TOKENS)
    whole = Transfer.of(1, "r", Direction.LOAD, [0, 1], [0, 1], [[0, 1]])
    (rows,) = whole.groups
    torn = GroupRows(rows.slots, rows.positions[:4], rows.blocks)
    with pytest.raises(KVFerryError):
        side.check(Transfer(1, "r", Direction.LOAD, (torn,)), 3)


def test_an_empty_transfer_copies_nothing() -> None:
    memory = FakeMemory([FakeGroup()], blocks=24, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), 2 * BLOCK_TOKENS)
    run(side, Transfer.of(1, "r", Direction.LOAD, [], [], [[]]), arena(side.layout.total_bytes))
    assert not memory.strays([()])


def test_an_engine_that_does_not_fit_is_refused_with_a_remedy() -> None:
    plane = PagePlane(layer="0", address=4096, stride=64, page_bytes=64, blocks=4)
    four = EngineGroup(block_tokens=4, planes=(plane,))
    eight = EngineGroup(block_tokens=8, planes=(plane,))
    with pytest.raises(KVFerryError) as caught:
        EngineSide([four], 18)
    assert caught.value.kind is ErrorKind.COMPATIBILITY
    assert "multiple of 4" in caught.value.remedy
    with pytest.raises(KVFerryError) as caught:
        EngineSide([four, eight], 12)
    assert "multiple of 8" in caught.value.remedy
    for nothing in ([], [EngineGroup(block_tokens=4, planes=())]):
        with pytest.raises(KVFerryError):
            EngineSide(nothing, 16)
    with pytest.raises(ValueError, match="overlap"):
        PagePlane(layer="0", address=4096, stride=63, page_bytes=64, blocks=4)
