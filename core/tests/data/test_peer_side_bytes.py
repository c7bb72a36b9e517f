"""What is pulled from a peer are its bytes, and not one byte beside them changes."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.tests.data.peer_sides import BLOCK_TOKENS, CHUNK_TOKENS, Rank, Want
from kvferry.control.grants import ARENA
from kvferry.control.orders import ItemFault
from kvferry.data.engine_side import SlotLayout
from kvferry.data.pulls import Reading, plan_pull
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.memory_channel import MemoryNetwork

SLOTS = 8

GROUPS = st.lists(
    st.builds(FakeGroup, layers=st.integers(1, 3), head_bytes=st.integers(1, 5), fused=st.booleans()),
    min_size=1,
    max_size=2,
)


@st.composite
def pulls(draw: st.DrawFn) -> list[Want]:
    """Chunks of whole blocks, with holes between the slots on both sides; ours are distinct."""
    targets = draw(st.lists(st.integers(0, SLOTS - 1), unique=True, max_size=SLOTS))
    tokens = st.integers(1, CHUNK_TOKENS // BLOCK_TOKENS).map(lambda blocks: blocks * BLOCK_TOKENS)
    return [(draw(tokens), draw(st.integers(0, SLOTS - 1)), target) for target in targets]


@settings(max_examples=40, deadline=None)
@given(
    groups=GROUPS,
    alignment=st.sampled_from([1, 64]),
    max_ops=st.sampled_from([None, 1, 3]),
    wanted=st.lists(pulls(), min_size=1, max_size=3),
)
def test_pulled_slots_have_the_peers_bytes_and_the_rest_stays(
    groups: list[FakeGroup], alignment: int, max_ops: int | None, wanted: list[list[Want]]
) -> None:
    network = MemoryNetwork()
    near, far = (
        Rank(network, name, groups, slots=SLOTS, alignment=alignment, max_ops=max_ops)
        for name in ("near", "far-away")
    )
    with ExitStack() as stack:
        stack.callback(near.stop)
        stack.callback(far.stop)
        far.open()
        near.open().meet(far)
        for number, each in enumerate(wanted):
            near.pull(number, far, each)
            assert near.ended(number) == {}
        near.check()
        far.check()


class _Nobody:
    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None: ...

    def filled(self, slots: Collection[int]) -> None: ...


NUMBERS = st.one_of(st.integers(-2, 9), st.sampled_from([-(1 << 63), (1 << 63) - 1]))


@given(
    rows=st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=8),
    bytes_per_block=st.integers(1, 5),
    ours=st.integers(0, 100),
    theirs=st.integers(0, 100),
)
def test_only_what_lies_inside_both_arenas_is_named_and_all_of_it_is(
    rows: list[Want], bytes_per_block: int, ours: int, theirs: int
) -> None:
    chunk = 4
    layout = SlotLayout(blocks_per_slot=(chunk,), block_bytes=(bytes_per_block,))
    tokens, sources, targets = (tuple(row[part] for row in rows) for part in range(3))
    reading = Reading(
        id=1,
        peer="far",
        epoch=b"",
        region="theirs",
        from_slots=sources,
        tokens=tokens,
        into=ARENA,
        slots=targets,
        deadline=1.0,
        listener=_Nobody(),
    )
    plan = plan_pull(reading, layout, chunk, ours, theirs)
    size = layout.total_bytes
    sound = [
        place
        for place, (count, source, target) in enumerate(rows)
        if 0 < count <= chunk and 0 <= source * size <= theirs - size and 0 <= target * size <= ours - size
    ]
    assert list(plan.places) == sound
    assert sorted([*plan.faults, *sound]) == list(range(len(rows)))
    assert set(plan.faults.values()) <= {ItemFault.FAILED}
    assert bool(plan.faults) == bool(plan.reason)
    for place, operation in zip(plan.places, plan.operations, strict=True):
        count, source, target = rows[place]
        assert operation.local == (ARENA, target * size, count * bytes_per_block)
        assert (operation.region, operation.offset) == ("theirs", source * size)


@pytest.mark.parametrize(
    "wrong", [(4, 99, 1), (4, -1, 1), (4, SLOTS, 1), (CHUNK_TOKENS + 1, 0, 1), (0, 0, 1)]
)
def test_a_slot_that_the_peer_does_not_have_fails_alone(wrong: Want) -> None:
    network = MemoryNetwork()
    near, far = Rank(network), Rank(network, "far-away")
    far.open()
    near.open().meet(far)
    near.pull(1, far, [(16, 2, 0), wrong, (8, 3, 2)])
    assert near.ended(1) == {1: ItemFault.FAILED}
    assert "memory that does not exist" in near.done_pulls[1][1]
    near.stop()
    far.stop()


def test_both_sides_pull_from_each_other_at_once() -> None:
    network = MemoryNetwork()
    near, far = Rank(network), Rank(network, "far-away")
    far.open()
    near.open().meet(far)
    far.meet(near)
    for number in range(20):
        near.pull(number, far, [(16, 0, 4), (12, 1, 5)])
        far.pull(number, near, [(16, 0, 4), (4, 1, 6)])
        assert near.ended(number) == far.ended(number) == {}
    assert near.side.statistics().read_bytes == 20 * 28 * near.slot_bytes // 16
    near.stop()
    far.stop()
