"""The mover's promises: order, exact outcomes, and that nothing waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from kvferry.api import Region
from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.mapping import MappedRegion, create_region
from kvferry.data.mover import Mover
from kvferry.data.plans import Direction, Transfer, TransferResult
from kvferry.testing.copiers import FaultyCopier, SlowCopier
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.fake_memory import FakeGroup, FakeMemory, TokenHistory

BLOCK_TOKENS, PER_SLOT, SLOTS = 4, 4, 8
SAVE, LOAD = Direction.SAVE, Direction.LOAD


class Bench:
    """A mover between an engine's memory of 64 blocks and an arena of 8 slots."""

    def __init__(self, mapped: MappedRegion, memory: FakeMemory, side: EngineSide) -> None:
        self.arena = mapped.region
        self.memory = memory
        self.side = side
        self.results: list[tuple[Transfer, TransferResult]] = []
        self._next = 0

    def slots(self, direction: Direction, request: str, *slots: int, base: int = 0) -> Transfer:
        """Whole slots; slot ``s`` belongs to blocks ``base + 4 s`` and the three after it."""
        rows = [(slot, position) for slot in slots for position in range(PER_SLOT)]
        self._next += 1
        return Transfer.of(
            self._next,
            request,
            direction,
            [slot for slot, _ in rows],
            [position for _, position in rows],
            [[base + slot * PER_SLOT + position for slot, position in rows]],
        )

    def fill(self, block: int) -> None:
        states = TokenHistory([block] * BLOCK_TOKENS, "").states(0, BLOCK_TOKENS)
        self.memory.write(0, block, 0, states)

    def holds(self, block: int, content: int) -> bool:
        states = TokenHistory([content] * BLOCK_TOKENS, "").states(0, BLOCK_TOKENS)
        return self.memory.right(0, block, states)

    def order(self) -> list[str]:
        return [transfer.request_id for transfer, _ in self.results]

    def failed(self, request: str) -> list[tuple[int, ...]]:
        return [result.failed_slots for transfer, result in self.results if transfer.request_id == request]


Make = Callable[["Bench"], SpanCopier]


@contextmanager
def bench(
    make_copier: Make = lambda _: NumpyCopier(), *, piece_rows: int = 1000, verify: bool = False
) -> Iterator[tuple[Bench, Mover]]:
    memory = FakeMemory([FakeGroup()], blocks=64, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), PER_SLOT * BLOCK_TOKENS)
    with create_region("arena", SLOTS * side.layout.total_bytes) as mapped:
        made = Bench(mapped, memory, side)
        for block in range(32):
            made.fill(block)
        mover = Mover(
            side,
            mapped.region,
            make_copier(made),
            lambda transfer, result: made.results.append((transfer, result)),
            verify=verify,
            piece_bytes=piece_rows * side.layout.block_bytes[0],
        )
        mover.open()
        try:
            yield made, mover
        finally:
            assert mover.close(10.0)


def idle(mover: Mover, *requests: str) -> None:
    pending = lambda: any(mover.pending(r, d) for r in requests for d in Direction)  # noqa: E731
    wait_until(lambda: not pending(), 10.0, "transfers without an end")


@contextmanager
def held(copier: SlowCopier) -> Iterator[None]:
    """Copies stop while inside. On entry none has begun."""
    copier.entered.clear()
    copier.gate.clear()
    try:
        yield
    finally:
        copier.gate.set()


def test_what_is_saved_comes_back_somewhere_else() -> None:
    with bench(piece_rows=3) as (made, mover):
        mover.submit([made.slots(SAVE, "a", 0, 1, 2)])
        idle(mover, "a")
        mover.submit([made.slots(LOAD, "b", 2, 0, base=32)])
        idle(mover, "b")
        for slot in (0, 2):
            for position in range(PER_SLOT):
                block = slot * PER_SLOT + position
                assert made.holds(32 + block, block)
        assert [result.failed_slots for _, result in made.results] == [(), ()]
        bytes_ = 4 * made.side.layout.block_bytes[0]
        assert mover.statistics().saved_bytes == 3 * bytes_
        assert mover.statistics().loaded_bytes == 2 * bytes_


def test_loads_go_before_saves_and_between_their_pieces() -> None:
    slow = SlowCopier(NumpyCopier())
    with bench(lambda _: slow, piece_rows=4) as (made, mover):
        with held(slow):
            mover.submit([made.slots(SAVE, "save", 0, 1, 2), made.slots(SAVE, "later", 3)])
            assert slow.entered.wait(10.0)  # the first piece of the first save
            mover.submit([made.slots(LOAD, "load", 5)])
        idle(mover, "save", "later", "load")
        assert made.order() == ["load", "save", "later"]


def test_urgent_saves_go_before_everything() -> None:
    slow = SlowCopier(NumpyCopier())
    with bench(lambda _: slow, piece_rows=4) as (made, mover):
        finished: list[bool] = []
        with held(slow):
            mover.submit([made.slots(SAVE, "first", 0, 1), made.slots(SAVE, "urgent", 2)])
            assert slow.entered.wait(10.0)
            mover.submit([made.slots(LOAD, "load", 5)])
            flush = threading.Thread(target=lambda: finished.append(mover.finish_saves(["urgent"], 10.0)))
            flush.start()
            wait_until(lambda: bool(mover._urgent), 10.0, "no flush")
            assert not finished, "the flush returned while a save still reads the blocks"
        flush.join()
        assert finished == [True]
        idle(mover, "first", "load")
        assert made.order()[0] == "urgent"
        assert made.failed("urgent") == [()]


def test_a_flush_drops_what_does_not_end_in_time_but_never_half_a_copy() -> None:
    """After it returns nobody reads the blocks, and what was dropped is reported as failed."""
    slow = SlowCopier(NumpyCopier())
    with bench(lambda _: slow, piece_rows=4) as (made, mover):
        answers: list[bool] = []
        with held(slow):
            mover.submit([made.slots(SAVE, "slow", 0, 1, 2), made.slots(SAVE, "other", 3)])
            assert slow.entered.wait(10.0)
            flush = threading.Thread(target=lambda: answers.append(mover.finish_saves(["slow"], 0.02)))
            flush.start()
            flush.join(0.3)
            assert flush.is_alive(), "it left a copy alone that still reads the blocks"
        flush.join()
        for block in range(12):
            made.memory.poison(block)
        assert answers == [False]
        assert mover.pending("slow", SAVE) == 0
        assert made.failed("slow") == [(0, 1, 2)]
        idle(mover, "other")
        assert made.failed("other") == [()]


def test_a_flush_of_requests_without_saves_returns_at_once() -> None:
    slow = SlowCopier(NumpyCopier())
    with bench(lambda _: slow) as (made, mover):
        with held(slow):
            mover.submit([made.slots(SAVE, "other", 0), made.slots(LOAD, "load", 1)])
            assert mover.finish_saves(["load", "unknown"], 10.0)
        idle(mover, "other", "load")


@pytest.mark.parametrize("piece_rows", [1, 3, 1000])
@pytest.mark.parametrize("bad", [{0}, {2}, {1, 3}, {0, 1, 2, 3}])
@pytest.mark.parametrize("now", [False, True])
def test_exactly_the_failed_slots_are_named(piece_rows: int, bad: set[int], now: bool) -> None:
    faulty: list[FaultyCopier] = []

    def make(made: Bench) -> SpanCopier:
        faulty.append(FaultyCopier(NumpyCopier(), lambda: made.arena, made.side.layout.total_bytes))
        faulty[0].fail_slots = bad
        return faulty[0]

    with bench(make, piece_rows=piece_rows) as (made, mover):
        work = made.slots(SAVE, "a", 3, 1, 0, 2)
        if now:
            result = mover.run_now(work)
            assert not made.results
        else:
            mover.submit([work])
            idle(mover, "a")
            result = made.results[0][1]
        assert result.id == work.id
        assert result.failed_slots == tuple(sorted(bad))
        assert "copy failed" in result.reason
        assert mover.statistics().failed_transfers == 1
        faulty[0].fail_slots = set()
        good = [slot for slot in range(4) if slot not in bad]
        mover.submit([made.slots(LOAD, "b", *good, base=32)])
        idle(mover, "b")
        assert all(made.holds(32 + b, b) for slot in good for b in range(4 * slot, 4 * slot + 4))


@pytest.mark.parametrize("now", [False, True])
def test_an_unexpected_error_fails_one_transfer_and_no_other(now: bool) -> None:
    def make(made: Bench) -> SpanCopier:
        faulty = FaultyCopier(NumpyCopier(), lambda: made.arena, made.side.layout.total_bytes)
        faulty.fail_calls = {2}
        faulty.error = lambda: ZeroDivisionError("a bug")
        return faulty

    with bench(make, piece_rows=4) as (made, mover):
        work = made.slots(SAVE, "bad", 0, 1, 2)
        if now:
            result = mover.run_now(work)
        else:
            mover.submit([work])
            idle(mover, "bad")
            result = made.results[0][1]
        assert result.failed_slots == (0, 1, 2)
        mover.submit([made.slots(SAVE, "good", 3)])
        idle(mover, "good")
        assert made.failed("good") == [()]


def test_a_plan_that_names_no_memory_is_a_failure_not_a_crash() -> None:
    with bench() as (made, mover):
        mover.submit([Transfer.of(9, "bad", LOAD, [-1, -1], [0, 1], [[40, 41]])])
        idle(mover, "bad")
        assert made.failed("bad") == [(-1,)]
        assert not made.memory.strays([()])


def test_results_that_cannot_be_told_do_not_stop_the_mover(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = FakeMemory([FakeGroup()], blocks=64, block_tokens=BLOCK_TOKENS)
    side = EngineSide(memory.engine_groups(), PER_SLOT * BLOCK_TOKENS)
    with create_region("arena", SLOTS * side.layout.total_bytes) as mapped:
        made = Bench(mapped, memory, side)

        def refuse(transfer: Transfer, result: TransferResult) -> None:
            raise OSError("nobody listens")

        mover = Mover(side, mapped.region, NumpyCopier(), refuse)
        mover.open()
        mover.submit([made.slots(SAVE, "a", 0), made.slots(SAVE, "b", 1)])
        idle(mover, "a", "b")
        assert mover.finish_saves(["a", "b"], 1.0)
        assert mover.close(10.0)
    assert "could not be told" in caplog.text


def test_closing_reports_what_will_not_be_done() -> None:
    slow = SlowCopier(NumpyCopier())
    with bench(lambda _: slow, piece_rows=4) as (made, mover):
        with held(slow):
            mover.submit([made.slots(SAVE, "a", 0, 1), made.slots(LOAD, "b", 2)])
            assert slow.entered.wait(10.0)
            assert not mover.close(0.02), "a copy under way cannot have ended"
            mover.submit([made.slots(SAVE, "late", 3)])
        assert mover.close(10.0)
        assert made.failed("late") == [(3,)]
        assert sorted(made.order()) == ["a", "b", "late"]
        assert all(result.failed_slots for _, result in made.results)


def test_waiting_for_an_end_ends_with_the_next_one() -> None:
    slow = SlowCopier(NumpyCopier())
    with bench(lambda _: slow) as (made, mover):
        assert mover.wait_for_end((), 10.0), "nothing is pending"
        with held(slow):
            mover.submit([made.slots(SAVE, "a", 0)])
            assert mover.wait_for_end(("b",), 10.0), "nothing that is asked for is pending"
            assert not mover.wait_for_end(("a",), 0.02)
            mover.submit([made.slots(LOAD, "c", 1)])
            assert not mover.wait_for_end((), 0.02)
        assert mover.wait_for_end(("a",), 10.0)
        idle(mover, "a", "c")


def test_bytes_that_changed_in_the_tier_are_noticed_when_asked_for() -> None:
    with bench(verify=True) as (made, mover):
        mover.submit([made.slots(SAVE, "a", 0, 1)])
        idle(mover, "a")
        _flip(made.arena, made.side.layout.total_bytes + 5)
        mover.submit([made.slots(LOAD, "b", 0, 1, base=32)])
        idle(mover, "b")
        assert made.failed("b") == [(1,)]
        assert mover.statistics().mismatched_blocks == 1
        # A slot that nobody has filled here has no bytes to be compared with.
        mover.submit([made.slots(LOAD, "c", 7, base=32)])
        idle(mover, "c")
        assert made.failed("c") == [(7,)]


def _flip(region: Region, offset: int) -> None:
    from kvferry.data.mapping import region_view

    region_view(region)[offset] ^= 0xFF
