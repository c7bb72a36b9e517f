"""What the laws of stagings leave open: whose turn it is, what a broken copy does, how bytes are copied."""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from collections.abc import Iterator
from types import ModuleType

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import ErrorKind, KVFerryError, Region, Span, StageCopy, StagingContext
from kvferry.data.arena import MemoryFileArena
from kvferry_host_staging.batch import Batch
from kvferry_host_staging.moving import Copies, NativeMovement, SystemMovement, choose_movement
from kvferry_host_staging.options import HostStagingOptions
from kvferry_host_staging.staging import BYTES_AT_ONCE, HostStaging

LONG = 20.0
LENGTH = 4 * BYTES_AT_ONCE


@define(eq=False)
class Watched:
    """Copies nothing, and waits to be let through each time."""

    name: str = "watched"
    calls: list[Copies] = field(factory=list)
    passes: threading.Semaphore = field(factory=lambda: threading.Semaphore(0))
    error: Exception | None = None

    def copy(self, copies: Copies, threads: int) -> None:
        self.calls.append(copies)
        assert self.passes.acquire(timeout=LONG)
        if self.error is not None:
            raise self.error


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.fixture
def staging(watched: Watched) -> Iterator[HostStaging]:
    # Its pages are never touched, so it takes no memory.
    class Untouched(MemoryFileArena):
        def ready_bytes(self) -> int:
            return LENGTH

    staging = HostStaging(HostStagingOptions(), LENGTH, movement=watched)
    source = Region(name="source", address=1 << 40, length=LENGTH)
    staging.open(
        StagingContext(
            name="staging",
            make_arena=lambda name, capacity, options: Untouched(
                name, capacity, options, populate=lambda *_: True
            ),
            regions={"source": source},
        )
    )
    yield staging
    watched.passes.release(1000)
    staging.close(time.monotonic() + LONG)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), max_size=8),
    bad=st.sets(st.integers(0, 7)),
    most=st.integers(1, 50),
    stops=st.integers(0, 8),
)
def test_a_batch_that_is_cut_anywhere_is_copied_from_its_beginning(
    lengths: list[int], bad: set[int], most: int, stops: int
) -> None:
    source, target = random.Random(0).randbytes(400), bytearray(400)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    copies = [StageCopy(Span("s", at, length), at) for at, length in zip(starts, lengths, strict=True)]

    def locate(copy: StageCopy) -> tuple[int, int]:
        if copies.index(copy) in bad:
            raise KVFerryError("bad", kind=ErrorKind.PROTOCOL)
        return copy.offset, copy.source.offset

    batch = Batch(copies, 0.0, locate)
    for _ in range(stops):
        if batch.over:
            break
        taken = batch.take(most)
        assert sum(taken.length) <= most
        for to, from_, length in zip(*taken, strict=True):
            target[to : to + length] = source[from_ : from_ + length]
        batch.advance()
    batch.fail_rest(KVFerryError("stopped", kind=ErrorKind.CANCELLED))
    assert batch.over
    batch.complete()
    kinds = [result.error and result.error.kind for result in batch.ticket.results]
    cut = kinds.index(ErrorKind.CANCELLED) if ErrorKind.CANCELLED in kinds else len(kinds)
    assert set(kinds[cut:]) <= {ErrorKind.CANCELLED}
    for number, (copy, kind) in enumerate(zip(copies, kinds, strict=True)):
        if kind is None:
            span = slice(copy.offset, copy.offset + copy.source.length)
            assert target[span] == source[span]
        elif number < cut:
            assert copies.index(copy) in bad
            assert kind is ErrorKind.PROTOCOL
    if stops * most >= sum(lengths) + len(lengths) * most:
        assert cut == len(kinds), "there was time for all of it"


def whole() -> list[StageCopy]:
    return [StageCopy(Span("source", 0, LENGTH), 0)]


def test_a_small_batch_need_not_wait_for_a_large_one(staging: HostStaging, watched: Watched) -> None:
    large = staging.stage(whole(), time.monotonic() + LONG)
    small = staging.stage([StageCopy(Span("source", 8, 8), 8)], time.monotonic() + LONG)
    watched.passes.release(2)
    assert small.wait(LONG)
    assert not large.done
    watched.passes.release(LENGTH // BYTES_AT_ONCE)
    assert large.wait(LONG)
    lengths = [sum(copies.length) for copies in watched.calls]
    assert lengths == [BYTES_AT_ONCE, 8, *[BYTES_AT_ONCE] * (LENGTH // BYTES_AT_ONCE - 1)]
    large_ones = [copies for copies in watched.calls if copies.length != [8]]
    assert [copies.to[0] - large_ones[0].to[0] for copies in large_ones] == list(
        range(0, LENGTH, BYTES_AT_ONCE)
    )
    assert [copies.source[0] - (1 << 40) for copies in watched.calls if copies.length != [8]] == list(
        range(0, LENGTH, BYTES_AT_ONCE)
    )


def test_a_copy_that_breaks_ends_its_batch_and_no_other(staging: HostStaging, watched: Watched) -> None:
    watched.error = OSError("broken")
    watched.passes.release(1)
    copies = [StageCopy(Span("source", at, 8), at) for at in (0, 8)]
    ticket = staging.stage(copies, time.monotonic() + LONG)
    assert ticket.wait(LONG)
    for result in ticket.results:
        assert result.error is not None
        assert result.error.kind is ErrorKind.INTERNAL
        assert "broken" in str(result.error)
    watched.error = None
    watched.passes.release(1)
    later = staging.stage([StageCopy(Span("source", 0, 8), 0)], time.monotonic() + LONG)
    assert later.wait(LONG)
    assert later.results[0].error is None


@pytest.mark.parametrize("number", [0, 65])
def test_a_number_of_threads_that_makes_no_sense_is_refused(number: int) -> None:
    with pytest.raises(ValueError, match=r"is above 64|is below 1"):
        HostStagingOptions(threads=number)


@pytest.mark.parametrize("threads", [1, 3])
def test_both_ways_to_copy_give_the_same(threads: int) -> None:
    chosen = choose_movement().movement
    for movement in {type(each): each for each in (chosen, SystemMovement())}.values():
        source = ctypes.create_string_buffer(bytes(range(256)) * 64, 256 * 64)
        target = ctypes.create_string_buffer(b"\x5a" * len(source), len(source))
        to, from_ = ctypes.addressof(target), ctypes.addressof(source)
        movement.copy(Copies([to + 1, to + 5000], [from_ + 100, from_], [4096, 1]), threads)
        expected = bytearray(b"\x5a" * len(source))
        expected[1:4097] = source.raw[100:4196]
        expected[5000] = source.raw[0]
        assert target.raw == bytes(expected)


def test_it_is_told_why_kvferry_native_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvferry_native", None)
    assert isinstance(choose_movement().movement, SystemMovement)
    other = ModuleType("kvferry_native")
    other.__version__ = "9.9"  # type: ignore[attr-defined]
    other.ABI = 99  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvferry_native", other)
    chosen = choose_movement()
    assert isinstance(chosen.movement, SystemMovement)
    assert chosen.why == "kvferry-native 9.9 has interface 99, not 2"
    other.ABI = 2  # type: ignore[attr-defined]
    assert isinstance(choose_movement().movement, NativeMovement)
