"""The values of the backend contract: tickets, results, headers and views."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from kvferry.api import (
    Arena,
    ArenaOptions,
    BackendContext,
    ChunkHeader,
    ChunkKey,
    ErrorKind,
    ItemResult,
    KVFerryError,
    MemoryKind,
    ReadStatus,
    Region,
    Span,
    Ticket,
    WriteStatus,
)

DIGESTS = st.binary(min_size=32, max_size=32)
COUNTS = st.integers(1, 2**32 - 1)
FAILURE = KVFerryError("no", kind=ErrorKind.IO)


@st.composite
def headers(draw: st.DrawFn) -> ChunkHeader:
    depth = draw(st.integers(0, 2**32 - 1))
    return ChunkHeader(
        key=ChunkKey(draw(DIGESTS), draw(DIGESTS)),
        parent=draw(DIGESTS) if depth else None,
        depth=depth,
        tokens=draw(COUNTS),
        size=draw(st.integers(1, 2**63)),
        owner=draw(st.text(st.characters(), max_size=20)),
        model=draw(st.text(st.characters(), max_size=20)),
        aliases=tuple(draw(st.lists(st.tuples(DIGESTS, COUNTS), max_size=4))),
    )


def stored(count: int) -> Sequence[ItemResult[WriteStatus]]:
    return [ItemResult(WriteStatus.STORED)] * count


@given(header=headers(), behind=st.binary(max_size=50))
def test_a_header_comes_back_with_every_fact(header: ChunkHeader, behind: bytes) -> None:
    raw = header.to_bytes()
    assert ChunkHeader.from_bytes(raw + behind) == (header, len(raw))
    assert ChunkHeader.from_bytes(memoryview(raw + behind)) == (header, len(raw))


@given(header=headers(), other=headers())
def test_different_headers_have_different_bytes(header: ChunkHeader, other: ChunkHeader) -> None:
    assert (header == other) == (header.to_bytes() == other.to_bytes())


@given(header=headers(), data=st.data())
def test_a_damaged_header_is_refused(header: ChunkHeader, data: st.DataObject) -> None:
    raw = bytearray(header.to_bytes())
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    raw[bit // 8] ^= 1 << bit % 8
    with pytest.raises(KVFerryError) as caught:
        ChunkHeader.from_bytes(bytes(raw))
    assert caught.value.kind is ErrorKind.INTEGRITY


@given(raw=st.binary(max_size=300), header=headers(), keep=st.floats(0, 0.999))
def test_no_bytes_but_a_header_s_are_a_header(raw: bytes, header: ChunkHeader, keep: float) -> None:
    whole = header.to_bytes()
    for attempt in (raw, whole[:16] + raw, whole[: int(len(whole) * keep)]):
        with pytest.raises(KVFerryError) as caught:
            ChunkHeader.from_bytes(attempt)
        assert caught.value.kind is ErrorKind.INTEGRITY


@pytest.mark.parametrize(
    "changes",
    [
        {"key": ChunkKey(b"short", bytes(32))},
        {"parent": b"short"},
        {"parent": None},
        {"depth": 0},
        {"size": 0},
        {"tokens": 0},
        {"aliases": ((b"short", 16),)},
    ],
    ids=str,
)
def test_a_header_that_no_chunk_can_have_is_refused(changes: dict[str, object]) -> None:
    good = ChunkHeader(key=ChunkKey(bytes(32), bytes(32)), parent=bytes(32), depth=1, tokens=16, size=10)
    with pytest.raises(ValueError):
        evolve(good, **changes)


def test_a_result_has_an_error_exactly_when_it_failed() -> None:
    assert ItemResult(ReadStatus.FAILED, FAILURE).error is FAILURE
    with pytest.raises(ValueError, match="without an error"):
        ItemResult(ReadStatus.FAILED)
    with pytest.raises(ValueError, match="with an error"):
        ItemResult(ReadStatus.MISS, FAILURE)


def test_a_ticket_has_no_results_before_its_end() -> None:
    ticket: Ticket[WriteStatus] = Ticket(2)
    assert not ticket.done
    assert not ticket.wait(0.0)
    with pytest.raises(KVFerryError, match="no results yet"):
        _ = ticket.results
    ticket.complete(stored(2))
    assert ticket.done
    assert ticket.wait(0.0)
    assert ticket.results == tuple(stored(2))


def test_a_ticket_ends_once_and_the_first_word_stands() -> None:
    ticket: Ticket[WriteStatus] = Ticket(1)
    heard: list[Ticket[WriteStatus]] = []
    ticket.on_done(heard.append)
    ticket.complete(stored(1))
    with pytest.raises(KVFerryError, match="exactly once") as caught:
        ticket.complete([ItemResult(WriteStatus.NO_SPACE)])
    assert caught.value.kind is ErrorKind.INTERNAL
    assert ticket.results == tuple(stored(1))
    assert heard == [ticket]
    assert ticket.completions == 2


def test_a_ticket_takes_one_result_per_item() -> None:
    ticket: Ticket[WriteStatus] = Ticket(2)
    with pytest.raises(KVFerryError, match="one result per item"):
        ticket.complete(stored(1))
    assert not ticket.done
    ticket.complete(stored(2))


def test_whoever_listens_late_hears_at_once() -> None:
    ticket: Ticket[WriteStatus] = Ticket(0)
    ticket.complete([])
    heard: list[Ticket[WriteStatus]] = []
    ticket.on_done(heard.append)
    assert heard == [ticket]


def test_a_listener_that_raises_hurts_nobody(caplog: pytest.LogCaptureFixture) -> None:
    ticket: Ticket[WriteStatus] = Ticket(1)
    heard: list[Ticket[WriteStatus]] = []

    def broken(_ticket: Ticket[WriteStatus]) -> None:
        raise RuntimeError("deaf")

    ticket.on_done(broken)
    ticket.on_done(heard.append)
    ticket.complete(stored(1))
    assert heard == [ticket]
    assert "a listener of a ticket raised" in caplog.text


def test_cancelling_is_a_wish_that_is_told_once() -> None:
    ticket: Ticket[WriteStatus] = Ticket(1)
    heard: list[str] = []
    ticket.on_cancel(lambda _ticket: heard.append("before"))
    ticket.cancel()
    ticket.cancel()
    ticket.on_cancel(lambda _ticket: heard.append("after"))
    assert heard == ["before", "after"]
    assert ticket.cancelled
    assert not ticket.done


def test_a_ticket_that_is_done_cannot_be_cancelled() -> None:
    ticket: Ticket[WriteStatus] = Ticket(1)
    heard: list[str] = []
    ticket.on_cancel(lambda _ticket: heard.append("no"))
    ticket.complete(stored(1))
    ticket.cancel()
    ticket.on_cancel(lambda _ticket: heard.append("no"))
    assert heard == []
    assert not ticket.cancelled


def test_many_threads_complete_a_ticket_once() -> None:
    for _ in range(50):
        ticket: Ticket[WriteStatus] = Ticket(1)
        heard: list[Ticket[WriteStatus]] = []
        refused: list[KVFerryError] = []
        barrier = threading.Barrier(4)

        def race(ticket: Ticket[WriteStatus] = ticket, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            ticket.on_done(heard.append)  # noqa: B023 - joined below, in the same round
            try:
                ticket.complete(stored(1))
            except KVFerryError as error:
                refused.append(error)  # noqa: B023

        threads = [threading.Thread(target=race) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3
        assert heard == [ticket] * 4


def context(memory: object, region: Region) -> BackendContext:
    def no_arena(name: str, capacity: int, options: ArenaOptions) -> Arena:
        raise AssertionError("not asked for")

    return BackendContext(name="t", rank=0, make_arena=no_arena, regions={region.name: region})


def test_a_view_is_the_memory_itself() -> None:
    memory = ctypes.create_string_buffer(100)
    here = context(memory, Region(name="m", address=ctypes.addressof(memory), length=100))
    view = here.view(Span("m", 10, 4))
    view[:] = b"four"
    assert memory.raw[9:15] == b"\0four\0"
    memory[10] = b"F"
    assert bytes(view) == b"Four"


def test_a_view_keeps_the_memory() -> None:
    memory = ctypes.create_string_buffer(b"still there", 11)
    region = Region(name="m", address=ctypes.addressof(memory), length=11, keep_alive=memory)
    view = context(memory, region).view(Span("m", 0, 5))
    del memory, region
    assert bytes(view) == b"still"


@pytest.mark.parametrize(
    ("span", "why"),
    [
        (Span("other", 0, 1), "there is no region 'other'"),
        (Span("m", -1, 1), "has 100 bytes"),
        (Span("m", 0, 101), "has 100 bytes"),
        (Span("m", 100, 1), "has 100 bytes"),
        (Span("m", 5, -1), "has 100 bytes"),
    ],
)
def test_a_span_outside_its_region_has_no_view(span: Span, why: str) -> None:
    memory = ctypes.create_string_buffer(100)
    here = context(memory, Region(name="m", address=ctypes.addressof(memory), length=100))
    with pytest.raises(KVFerryError) as caught:
        here.view(span)
    assert why in caught.value.why


def test_memory_of_a_device_has_no_view() -> None:
    here = context(None, Region(name="m", address=4096, length=100, kind=MemoryKind.DEVICE))
    with pytest.raises(KVFerryError) as caught:
        here.view(Span("m", 0, 1))
    assert "memory of a device" in caught.value.why
