"""Groups with a window: what is stored, how far a hit reaches, and who reads what is given back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.plans import Direction
from kvferry.runtime.grain import Grain, GroupShape
from kvferry.runtime.windows import StoredWindows, WindowReads
from kvferry.testing.backends import MemoryBackend
from kvferry.testing.copiers import FaultyCopier, SlowCopier
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, open_fake_instance
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.fake_requests import FakeRequest

BLOCK = 4
CHUNK = 16
FULL = FakeGroup(layers=1)
WINDOW = FakeGroup(layers=1, window=9)


@pytest.fixture
def open_windows(folder: Path, leak_guard: Any) -> Iterator[Any]:
    """``open_windows(*groups, ...)`` opens an instance without a prefix cache of its own."""
    with ExitStack() as stack:

        def open_(
            *groups: FakeGroup, make_copier: Any = None, slots: int = 64, **engine: Any
        ) -> FakeInstance:
            settings = InstanceSettings(
                engine=EngineSettings(**{"prefix_cache": False, "block_tokens": BLOCK, **engine}),
                groups=groups,
                slots=slots,
            )
            more = {} if make_copier is None else {"make_copier": make_copier}
            return stack.enter_context(open_fake_instance(folder, settings, watch=leak_guard.watch, **more))

        yield open_


def serve(instance: FakeInstance, tokens: range, new_tokens: int = 1) -> FakeRequest:
    """Run one request to its end, and wait until everything is stored. Every byte is checked."""
    request = instance.engine.add(tokens, new_tokens=new_tokens)
    instance.engine.run()
    instance.settle()
    return request


def hit(request: FakeRequest) -> int:
    return sum(request.hits)


def test_only_the_window_is_copied_into_the_engine(open_windows: Any) -> None:
    instance = open_windows(FULL, WINDOW)
    serve(instance, range(5 * CHUNK))
    before = instance.workers[0].statistics().loaded_bytes
    assert hit(serve(instance, range(5 * CHUNK))) == 5 * CHUNK - BLOCK
    loaded = instance.workers[0].statistics().loaded_bytes - before
    full, windowed = (group.block_bytes for group in instance.memories[0].engine_groups())
    # The token that is computed next attends to eight tokens before it: two blocks.
    assert loaded == (5 * CHUNK // BLOCK - 1) * full + 2 * windowed


@pytest.mark.parametrize("length", range(CHUNK + 1, 4 * CHUNK, 3))
def test_a_prompt_that_was_computed_in_one_step_is_found_wherever_another_leaves_it(
    open_windows: Any, length: int
) -> None:
    instance = open_windows(FULL, WINDOW)
    serve(instance, range(4 * CHUNK))
    request = serve(instance, range(length))
    assert hit(request) == (length - 1) // BLOCK * BLOCK


def test_a_hit_ends_before_bytes_that_the_window_left_behind_unsaved(open_windows: Any) -> None:
    """Steps of six tokens: when a chunk is complete, the window has left its first block."""
    instance = open_windows(FULL, WINDOW, step_tokens=6)
    serve(instance, range(3 * CHUNK))
    inside = [hit(serve(instance, range(length))) for length in range(CHUNK + 1, 2 * CHUNK + 1, BLOCK)]
    assert inside[0] == CHUNK
    assert set(inside) <= {CHUNK, *range(CHUNK + BLOCK, 2 * CHUNK, BLOCK)}
    assert CHUNK in inside[1:], "nothing was missing, so nothing was tested"


def test_the_end_of_a_prompt_is_found_though_its_answer_completed_the_chunk(open_windows: Any) -> None:
    """The chunk that the answer completed lacks what the prompt's end needs; the tail has it."""
    instance = open_windows(FULL, WINDOW)
    tokens = range(2 * CHUNK + 2 * BLOCK + 1)
    serve(instance, tokens, new_tokens=2 * CHUNK)
    assert hit(serve(instance, tokens)) == 2 * CHUNK + 2 * BLOCK


@pytest.mark.parametrize("window", [9, 12])
@pytest.mark.parametrize("answer", range(1, 2 * CHUNK, 3))
def test_a_next_turn_goes_on_behind_an_answer(open_windows: Any, answer: int, window: int) -> None:
    instance = open_windows(FULL, FakeGroup(window=window))
    first = serve(instance, range(2 * CHUNK + 3), new_tokens=answer)
    again = instance.engine.add([*first.tokens, *range(900, 910)])
    instance.engine.run()
    instance.settle()
    computed = len(first.tokens) - 1
    end = computed // BLOCK * BLOCK
    shape = instance.memories[0].shapes[1]
    if shape.first_needed(computed) > max(shape.first_needed(end), end // CHUNK * CHUNK // BLOCK):
        # The window moved on within the last, unfinished block, and has left one block too many.
        end = end // CHUNK * CHUNK
    assert hit(again) == end


def slow(copiers: list[SlowCopier], seconds: float = 0.0) -> Any:
    def make_copier(rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
        del rank, backend, slot_bytes
        copiers.append(SlowCopier(NumpyCopier(), seconds))
        return copiers[-1]

    return make_copier


def test_blocks_that_are_handed_out_again_at_once_are_saved_before(open_windows: Any) -> None:
    """The request's own next step takes what its window has just left behind."""
    instance = open_windows(FULL, WINDOW, make_copier=slow([], 0.01), step_tokens=CHUNK, reuse_at_once=True)
    serve(instance, range(4 * CHUNK), new_tokens=4)
    assert instance.scheduler.statistics()[0].failed_saves == 0
    for end in (CHUNK, 2 * CHUNK, 3 * CHUNK):
        assert hit(serve(instance, range(end + 1))) == end


def test_a_save_is_hurried_before_another_connector_loads_into_its_blocks(open_windows: Any) -> None:
    copiers: list[SlowCopier] = []
    instance = open_windows(FULL, WINDOW, make_copier=slow(copiers), step_tokens=CHUNK)
    engine, scheduler = instance.engine, instance.scheduler
    copiers[0].gate.clear()
    request = engine.add(range(4 * CHUNK))
    engine.step()
    held = list(request.blocks[1])
    engine.step()
    left = [block for block, now in zip(held, request.blocks[1], strict=False) if not now]
    assert left, "the window has left nothing behind"
    scheduler.allocated("a stranger", 0, [[], request.blocks[0]])
    assert scheduler.step_plan(()).flush == ()
    scheduler.allocated("a stranger", 0, [[], left[:1]])
    assert scheduler.step_plan(()).flush == (request.id,)
    copiers[0].gate.set()
    engine.run()
    instance.settle()


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,), (FULL, FULL, WINDOW, FULL, WINDOW)])
@pytest.mark.parametrize("chunk", range(4))
def test_a_failed_load_of_several_groups_is_computed_again(
    open_windows: Any, groups: tuple[FakeGroup, ...], chunk: int
) -> None:
    copiers: list[FaultyCopier] = []

    def make_copier(rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
        copiers.append(FaultyCopier(NumpyCopier(), backend.opened, slot_bytes))
        return copiers[-1]

    instance = open_windows(*groups, make_copier=make_copier)
    serve(instance, range(4 * CHUNK + 1))
    copiers[0].directions = {Direction.LOAD}
    copiers[0].fail_slots = {chunk}
    request = serve(instance, range(4 * CHUNK + 1))
    needed = chunk == 3 if groups == (WINDOW,) else True
    assert instance.engine.failures == needed
    copiers[0].fail_slots = set()
    assert request.complete
    # The engine may have gone on before the scheduler's half heard of the failure.
    serve(instance, range(4 * CHUNK + 1))
    assert hit(serve(instance, range(4 * CHUNK + 1))) == 4 * CHUNK


SHAPES = st.lists(
    st.builds(GroupShape, st.sampled_from([2, 4]), st.one_of(st.none(), st.integers(1, 40))),
    min_size=1,
    max_size=3,
)


@st.composite
def stored(draw: st.DrawFn) -> tuple[Grain, list[tuple[int, ...]], int, int]:
    """A grain, what is missing per chunk, tokens matched, and tokens of the engine's own."""
    grain = Grain.of(CHUNK, draw(SHAPES))
    chunks = draw(st.integers(1, 5))
    lacks = st.tuples(
        *(
            st.integers(0, CHUNK // group.block_tokens) if group.window is not None else st.just(0)
            for group in grain.groups
        )
    )
    missing = [draw(st.one_of(st.just((0,) * len(grain.groups)), lacks)) for _ in range(chunks)]
    tokens = draw(st.integers(1, chunks * CHUNK // grain.block)) * grain.block
    local = draw(st.integers(0, tokens // grain.block)) * grain.block
    return grain, missing, tokens, local


@given(stored())
def test_a_hit_is_the_longest_whose_windows_are_there(case: Any) -> None:
    grain, missing, tokens, local = case
    windows = StoredWindows(grain)
    slots = [7 + 3 * chunk for chunk in range(len(missing))]
    for slot in slots:
        windows.granted(slot, (99,) * len(grain.groups))  # what was there before counts no more
    for slot, gone in zip(slots, missing, strict=True):
        windows.granted(slot, gone)

    def whole(end: int) -> bool:
        for number, group in enumerate(grain.groups):
            first = max(group.first_needed(end), local // group.block_tokens)
            for index in range(first, end // group.block_tokens):
                chunk, place = divmod(index, CHUNK // group.block_tokens)
                if place < missing[chunk][number]:
                    return False
        return True

    ends = [end for end in range(local + grain.block, tokens + 1, grain.block) if whole(end)]
    held = slots[: -(-tokens // CHUNK)]
    assert windows.reach(held, tokens, local) == max(ends, default=0)


def test_only_a_save_whose_blocks_were_handed_out_is_hurried() -> None:
    reads = WindowReads()
    reads.begin(1, "old", [3, 4])
    assert reads.overtaken() == []
    reads.begin(2, "new", [5])
    reads.take([[5, 9], [4]])
    assert reads.overtaken() == ["old"], "blocks of the step's own save are its request's"
    reads.take([[5, 8]])
    assert reads.overtaken() == ["new"]
    reads.take([[7]])
    assert reads.overtaken() == []
    reads.end(1)
    reads.end(2)
    reads.take([[3, 4, 5]])
    assert reads.overtaken() == []
