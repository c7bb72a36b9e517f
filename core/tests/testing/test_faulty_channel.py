"""A channel with faults above it: what a slow network may do keeps the contract, and what breaks it does so
as the plan says."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest
from attrs import define, field

from kvferry.api import (
    ChannelContext,
    Connection,
    ErrorKind,
    KVFerryError,
    Region,
    RemoteOp,
    Retry,
    Span,
    Ticket,
    TransferStatus,
)
from kvferry.testing.channels import ForwardingConnection
from kvferry.testing.faults import (
    Crash,
    Delay,
    DoubleCompletion,
    Drop,
    Effect,
    Fail,
    Fault,
    FaultPlan,
    FlipBit,
    InjectedCrash,
    LateWrite,
    LoseCompletion,
    NoSpace,
    ReorderCompletion,
    Stall,
)
from kvferry.testing.faulty_channel import FaultyChannel
from kvferry.testing.memory_channel import MemoryChannel, make_memory_channels

BYTES = 4096
PATIENCE = 20.0


@define(eq=False)
class Rig:
    """A faulty channel, a sound peer, and a clock that stands still. Operation ``n`` has the byte ``n``."""

    faults: list[Fault]
    limit: int | None = None
    now: float = 100.0
    slept: list[float] = field(factory=list)
    channel: FaultyChannel = field(init=False)
    peer: MemoryChannel = field(init=False)
    connection: Connection = field(init=False)
    ours: ctypes.Array[ctypes.c_char] = field(factory=lambda: ctypes.create_string_buffer(BYTES))
    theirs: ctypes.Array[ctypes.c_char] = field(factory=lambda: ctypes.create_string_buffer(BYTES))

    def __attrs_post_init__(self) -> None:
        make = make_memory_channels()
        self.channel = FaultyChannel(
            make(), FaultPlan(self.faults), lambda: self.now, self._sleep, max_registered_bytes=self.limit
        )
        self.peer = make()

    def open(self) -> None:
        for number, channel in enumerate((self.channel, self.peer)):
            channel.open(
                ChannelContext(
                    name="c", instance=str(number), epoch=bytes([number]) * 16, clock=lambda: self.now
                )
            )
        self.channel.register(region("ours", self.ours))
        self.peer.register(region("theirs", self.theirs))
        self.theirs[:] = bytes(number // 8 % 256 for number in range(BYTES))
        self.connection = self.channel.connect(self.peer.export(), self.now + 60)

    def read(self, number: int) -> Ticket[TransferStatus]:
        operation = RemoteOp(Span("ours", 8 * number, 8), "theirs", 8 * number)
        return self.channel.read(self.connection, [operation], self.now + 60)

    def read_well(self, number: int) -> None:
        assert status(self.read(number)) is TransferStatus.DONE
        assert self.arrived(number) == bytes([number]) * 8

    def arrived(self, number: int) -> bytes:
        return bytes(self.ours[8 * number : 8 * number + 8])

    def settle(self) -> None:
        """What was submitted before is done and told: the inner channel has one thread."""
        assert isinstance(self.connection, ForwardingConnection)
        assert self.channel.inner.read(self.connection.inner, [], self.now + 60).wait(PATIENCE)

    def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def region(name: str, memory: ctypes.Array[ctypes.c_char]) -> Region:
    return Region(name=name, address=ctypes.addressof(memory), length=len(memory), keep_alive=memory)


Make = Callable[..., Rig]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Rig] = []

    def rig(*faults: Fault, limit: int | None = None) -> Rig:
        made.append(Rig(list(faults), limit))
        made[-1].open()
        return made[-1]

    yield rig
    for each in made:
        each.channel.inner.close(each.now + PATIENCE)
        each.peer.close(each.now + PATIENCE)


def status(ticket: Ticket[TransferStatus]) -> TransferStatus:
    assert ticket.wait(PATIENCE)
    return ticket.results[0].status


def kind(ticket: Ticket[TransferStatus]) -> ErrorKind:
    assert ticket.wait(PATIENCE)
    error = ticket.results[0].error
    assert error is not None
    return error.kind


def test_without_faults_nothing_changes(make: Make) -> None:
    rig = make()
    rig.read_well(1)
    assert rig.connection.alive
    assert rig.connection.regions()["theirs"].length == BYTES
    rig.peer.close(rig.now + PATIENCE)
    assert not rig.connection.alive


def test_an_error_reaches_the_caller_and_moves_nothing(make: Make) -> None:
    rig = make(Fault("read", Fail(ErrorKind.IO, Retry.LATER), nth=2))
    rig.read_well(1)
    assert kind(rig.read(2)) is ErrorKind.IO
    assert rig.arrived(2) == bytes(8)
    rig.read_well(3)


def test_a_delayed_call_begins_when_its_time_has_come(make: Make) -> None:
    rig = make(Fault("read", Delay(5.0), nth=1))
    ticket = rig.read(1)
    rig.now += 4.9
    rig.channel.poll()
    assert not ticket.done
    assert rig.arrived(1) == bytes(8)
    rig.now += 0.2
    rig.channel.poll()
    assert status(ticket) is TransferStatus.DONE
    assert rig.arrived(1) == b"\x01" * 8


def test_a_stalled_call_begins_when_it_is_released(make: Make) -> None:
    rig = make(Fault("read", Stall()))
    tickets = [rig.read(1), rig.read(2)]
    rig.channel.poll()
    assert not any(ticket.done for ticket in tickets)
    assert rig.channel.release() == 2
    assert [status(ticket) for ticket in tickets] == [TransferStatus.DONE] * 2


@pytest.mark.parametrize("effect", [Delay(1e6), Stall(), Drop()])
def test_what_is_held_back_ends_at_its_deadline(make: Make, effect: Effect) -> None:
    rig = make(Fault("read", effect, nth=1))
    ticket = rig.read(1)
    rig.now += 59
    rig.channel.poll()
    assert not ticket.done
    rig.now += 1
    rig.channel.poll()
    assert kind(ticket) is ErrorKind.TIMEOUT
    rig.channel.release()
    assert rig.arrived(1) == bytes(8)
    assert ticket.completions == 1


@pytest.mark.parametrize("effect", [Delay(1.0), Stall(), Drop()])
def test_what_is_held_back_can_be_cancelled(make: Make, effect: Effect) -> None:
    rig = make(Fault("read", effect, nth=1))
    ticket = rig.read(1)
    ticket.cancel()
    assert kind(ticket) is ErrorKind.CANCELLED
    rig.now += 100
    rig.channel.poll()
    assert ticket.completions == 1


def test_what_is_held_back_ends_with_its_connection(make: Make) -> None:
    rig = make(Fault("read", Drop(), nth=1), Fault("read", Drop(), nth=2))
    first = rig.read(1)
    old, rig.connection = rig.connection, rig.channel.connect(rig.peer.export(), rig.now + 60)
    second = rig.read(2)
    old.close()
    assert kind(first) is ErrorKind.CLOSED
    assert not second.done
    rig.channel.close(rig.now + PATIENCE)
    assert kind(second) is ErrorKind.CLOSED


def test_a_lost_completion_never_comes_although_the_bytes_do(make: Make) -> None:
    rig = make(Fault("read", LoseCompletion(), nth=1))
    lost = rig.read(1)
    rig.read_well(2)
    rig.now += 100
    rig.channel.poll()
    assert not lost.done
    assert rig.arrived(1) == b"\x01" * 8


def test_a_doubled_completion_is_counted_by_the_ticket(make: Make) -> None:
    rig = make(Fault("read", DoubleCompletion(), nth=1))
    ticket = rig.read(1)
    assert status(ticket) is TransferStatus.DONE
    rig.settle()
    assert ticket.completions == 2


def test_a_reordered_completion_comes_after_the_next(make: Make) -> None:
    rig = make(Fault("read", ReorderCompletion(), nth=1))
    first = rig.read(1)
    rig.settle()
    assert not first.done
    rig.read_well(2)
    assert status(first) is TransferStatus.DONE
    assert first.completions == 1


def test_a_flipped_bit_is_in_the_bytes_that_are_told_as_done(make: Make) -> None:
    rig = make(Fault("read", FlipBit(10), nth=1))
    assert status(rig.read(1)) is TransferStatus.DONE
    assert rig.arrived(1) == b"\x01\x05" + b"\x01" * 6


def test_a_late_write_comes_with_the_next_call(make: Make) -> None:
    rig = make(Fault("read", LateWrite(), nth=1))
    assert status(rig.read(1)) is TransferStatus.DONE
    rig.settle()
    assert rig.arrived(1) == b"\x01" * 8
    rig.read_well(2)
    assert rig.arrived(1) == b"\x00" + b"\x01" * 7


def test_memory_that_was_taken_back_is_not_even_written_late(make: Make) -> None:
    rig = make(Fault("read", LateWrite(), nth=1))
    ticket = rig.read(1)
    assert status(ticket) is TransferStatus.DONE
    rig.settle()
    rig.channel.deregister("ours")
    rig.channel.poll()
    assert rig.arrived(1) == b"\x01" * 8


def test_a_peer_that_accepts_slowly_costs_time_and_no_more_than_the_deadline(make: Make) -> None:
    rig = make(Fault("connect", Delay(3.0), nth=2), Fault("connect", Delay(30.0), nth=3))
    rig.channel.connect(rig.peer.export(), rig.now + 10)
    with pytest.raises(KVFerryError) as caught:
        rig.channel.connect(rig.peer.export(), rig.now + 10)
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert rig.slept == [3.0, 10.0]


def test_a_short_limit_is_told_with_its_number(make: Make) -> None:
    rig = make(limit=BYTES + 100)
    more = ctypes.create_string_buffer(101)
    with pytest.raises(KVFerryError) as caught:
        rig.channel.register(region("more", more))
    assert caught.value.kind is ErrorKind.CAPACITY
    assert str(BYTES + 100) in str(caught.value)
    rig.channel.deregister("ours")
    rig.channel.register(region("more", more))


@pytest.mark.parametrize("operation", ["register", "connect", "read", "close"])
def test_a_crash_goes_through_everything(make: Make, operation: str) -> None:
    rig = make()
    rig.channel = FaultyChannel(rig.channel.inner, FaultPlan([Fault(operation, Crash())]))
    calls: dict[str, Callable[[], object]] = {
        "register": lambda: rig.channel.register(region("more", rig.ours)),
        "connect": lambda: rig.channel.connect(rig.peer.export(), 0.0),
        "read": lambda: rig.read(1),
        "close": lambda: rig.channel.close(0.0),
    }
    with pytest.raises(InjectedCrash, match=operation):
        calls[operation]()


def test_a_connection_of_another_channel_is_refused_by_the_inner_one(make: Make) -> None:
    rig, other = make(), make()
    rig.connection = other.connection
    with pytest.raises(KVFerryError) as caught:
        rig.read(1)
    assert caught.value.kind is ErrorKind.INTERNAL


def test_faults_it_cannot_do_are_refused() -> None:
    with pytest.raises(KVFerryError, match="FaultyChannel cannot do NoSpace to 'write'"):
        FaultyChannel(MemoryChannel.__new__(MemoryChannel), FaultPlan([Fault("write", NoSpace())]))
