"""A backend with faults above it: what is told goes wrong, and the store stays right."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import pytest
from attrs import define, field

from kvferry.api import (
    Arena,
    ArenaOptions,
    BackendContext,
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    ItemResult,
    KVFerryError,
    ReadStatus,
    Region,
    Retry,
    Span,
    Ticket,
    WriteStatus,
)
from kvferry.testing.faults import (
    Crash,
    Delay,
    DoubleCompletion,
    Effect,
    Fail,
    Fault,
    FaultPlan,
    FlipBit,
    InjectedCrash,
    LoseCompletion,
    NoSpace,
    ReorderCompletion,
    Stall,
    TornWrite,
)
from kvferry.testing.faulty_backend import FaultyBackend
from kvferry.testing.keyed_backends import DictionaryBackend, DictionaryOptions, NullBackend

SIZE = 64
PATIENCE = 20.0


@define
class Rig:
    """A dictionary behind a faulty backend, a clock that stands still, and one buffer per chunk."""

    faults: list[Fault]
    now: float = 100.0
    inner: DictionaryBackend = field(factory=lambda: DictionaryBackend(DictionaryOptions(), 1 << 20))
    memory: ctypes.Array[ctypes.c_char] = field(factory=lambda: ctypes.create_string_buffer(SIZE * 100))
    backend: FaultyBackend = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.backend = FaultyBackend(self.inner, FaultPlan(self.faults), clock=lambda: self.now)

    def open(self) -> None:
        region = Region(name="m", address=ctypes.addressof(self.memory), length=len(self.memory))
        self.backend.open(
            BackendContext(
                name="t", rank=0, make_arena=no_arena, regions={"m": region}, clock=lambda: self.now
            )
        )

    def key(self, number: int) -> ChunkKey:
        return ChunkKey(bytes(32), number.to_bytes(32, "big"))

    def write(self, number: int) -> Ticket[WriteStatus]:
        span = Span("m", SIZE * number, SIZE)
        self.memory[span.offset : span.offset + SIZE] = bytes([number + 1]) * SIZE
        header = ChunkHeader(key=self.key(number), parent=None, depth=0, tokens=16, size=SIZE)
        return self.backend.write([(header, span)], self.now + 60)

    def read(self, number: int) -> tuple[Ticket[ReadStatus], Callable[[], bytes]]:
        at = SIZE * (number + 50)
        ticket = self.backend.read([(self.key(number), Span("m", at, SIZE))], self.now + 60)
        return ticket, lambda: bytes(self.memory[at : at + SIZE])

    def settle(self) -> None:
        """Everything that was submitted to the inner backend is done afterwards: it has one thread."""
        assert self.inner.delete([self.key(99)], self.now + 60).wait(PATIENCE)


def no_arena(name: str, capacity: int, options: ArenaOptions) -> Arena:
    raise AssertionError("not asked for")


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rig] = []

    def rig(*faults: Fault) -> Rig:
        made.append(Rig(list(faults)))
        made[-1].open()
        return made[-1]

    yield rig
    for each in made:
        each.inner.close(each.now + PATIENCE)


def status(ticket: Ticket[WriteStatus]) -> WriteStatus:
    assert ticket.wait(PATIENCE)
    return ticket.results[0].status


def test_without_faults_nothing_changes(make: Make) -> None:
    rig = make()
    assert status(rig.write(1)) is WriteStatus.STORED
    ticket, data = rig.read(1)
    assert ticket.wait(PATIENCE)
    assert ticket.results[0].status is ReadStatus.FOUND
    assert data() == b"\x02" * SIZE


def test_an_error_reaches_the_caller_and_not_the_store(make: Make) -> None:
    rig = make(Fault("write", Fail(ErrorKind.TIMEOUT, Retry.LATER), nth=2))
    assert status(rig.write(1)) is WriteStatus.STORED
    failed = rig.write(2)
    assert status(failed) is WriteStatus.FAILED
    error = failed.results[0].error
    assert error is not None
    assert (error.kind, error.retry) == (ErrorKind.TIMEOUT, Retry.LATER)
    rig.settle()
    assert set(rig.inner.records) == {rig.key(1)}


def test_no_space_is_told_as_such(make: Make) -> None:
    rig = make(Fault("write", NoSpace(), nth=1))
    assert status(rig.write(1)) is WriteStatus.NO_SPACE
    assert status(rig.write(1)) is WriteStatus.STORED


def test_a_delayed_completion_waits_for_its_time(make: Make) -> None:
    rig = make(Fault("write", Delay(5.0), nth=1))
    ticket = rig.write(1)
    rig.settle()
    assert rig.key(1) in rig.inner.records, "the work was done, only the telling waits"
    rig.now += 4.9
    assert rig.backend.poll() == 0
    assert not ticket.done
    rig.now += 0.1
    assert rig.backend.poll() == 1
    assert ticket.done


def test_delays_end_in_the_order_of_their_times(make: Make) -> None:
    rig = make(Fault("write", Delay(5.0), nth=1), Fault("write", Delay(1.0), nth=2))
    order: list[int] = []
    for number in (1, 2):
        rig.write(number).on_done(lambda _ticket, number=number: order.append(number))  # type: ignore[misc]
    rig.settle()
    rig.now += 10
    assert rig.backend.poll() == 2
    assert order == [2, 1]


def test_a_stalled_completion_waits_for_its_release(make: Make) -> None:
    rig = make(Fault("write", Stall(), nth=1))
    ticket = rig.write(1)
    rig.settle()
    rig.now += 1e9
    assert rig.backend.poll() == 0
    assert not ticket.done
    assert rig.backend.release() == 1
    assert status(ticket) is WriteStatus.STORED


def test_a_lost_completion_never_comes(make: Make) -> None:
    rig = make(Fault("write", LoseCompletion(), nth=1))
    ticket = rig.write(1)
    rig.settle()
    rig.backend.close(rig.now + PATIENCE)
    assert not ticket.done


def test_a_doubled_completion_is_counted_and_changes_nothing(make: Make) -> None:
    rig = make(Fault("write", DoubleCompletion(), nth=1))
    heard: list[Ticket[WriteStatus]] = []
    ticket = rig.write(1)
    ticket.on_done(heard.append)
    rig.settle()
    assert status(ticket) is WriteStatus.STORED
    assert ticket.completions == 2
    assert heard == [ticket]


def test_a_reordered_completion_comes_after_the_next(make: Make) -> None:
    rig = make(Fault("write", ReorderCompletion(), nth=1))
    order: list[int] = []
    for number in (1, 2, 3):
        rig.write(number).on_done(lambda _ticket, number=number: order.append(number))  # type: ignore[misc]
    rig.settle()
    assert order == [2, 1, 3]


def test_a_flipped_bit_reaches_the_reader_as_data(make: Make) -> None:
    rig = make(Fault("read", FlipBit(11), nth=1))
    assert status(rig.write(1)) is WriteStatus.STORED
    ticket, data = rig.read(1)
    assert ticket.wait(PATIENCE)
    assert ticket.results[0].status is ReadStatus.FOUND
    assert data() == b"\x02" + bytes([0x02 ^ 8]) + b"\x02" * (SIZE - 2)


def test_cancelling_goes_through() -> None:
    inner: Ticket[DeleteStatus] = Ticket(1)

    class Holding(NullBackend):
        def delete(self, keys: Sequence[ChunkKey], deadline: float) -> Ticket[DeleteStatus]:
            return inner

    outer = FaultyBackend(Holding(), FaultPlan()).delete([ChunkKey(bytes(32), bytes(32))], 0.0)
    assert not inner.cancelled
    outer.cancel()
    assert inner.cancelled
    inner.complete([ItemResult(DeleteStatus.ABSENT)])
    assert outer.results == inner.results


def test_closing_tells_what_was_held_back(make: Make) -> None:
    rig = make(
        Fault("write", Stall(), nth=1),
        Fault("write", Delay(1e6), nth=2),
        Fault("write", ReorderCompletion(), nth=3),
    )
    tickets = [rig.write(number) for number in (1, 2, 3)]
    rig.settle()
    assert [ticket.done for ticket in tickets] == [False, False, False]
    rig.backend.close(rig.now + PATIENCE)
    assert [ticket.done for ticket in tickets] == [True, True, True]


def test_a_crash_stops_the_caller_before_anything_happened(make: Make) -> None:
    rig = make(Fault("write", Crash(), nth=1))
    with pytest.raises(InjectedCrash):
        rig.write(1)
    rig.settle()
    assert rig.inner.records == {}


def test_opening_can_fail() -> None:
    rig = Rig([Fault("open", Fail(ErrorKind.CAPACITY))])
    with pytest.raises(KVFerryError) as caught:
        rig.open()
    assert caught.value.kind is ErrorKind.CAPACITY


@pytest.mark.parametrize(
    ("operation", "effect", "complaint"),
    [
        ("wirte", Stall(), "its operations are open, recover, probe, write"),
        ("write", TornWrite(3), "write can meet Fail, Delay"),
        ("open", Stall(), "open can meet Fail, Crash"),
    ],
)
def test_a_fault_that_could_never_happen_is_refused(operation: str, effect: Effect, complaint: str) -> None:
    with pytest.raises(KVFerryError) as caught:
        Rig([Fault(operation, effect)])
    assert complaint in caught.value.remedy
