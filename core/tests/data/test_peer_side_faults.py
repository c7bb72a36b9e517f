"""What goes wrong on the way to a peer costs its own chunks: nothing hangs, nothing is told twice, and no
slot is touched after its pull has ended."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from attrs import define, evolve, field

from core.tests.data.peer_sides import LONG, Rank, Want
from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ErrorKind,
    Region,
    RemoteOp,
    Ticket,
    TransferStatus,
)
from kvferry.control.grants import ARENA
from kvferry.control.orders import ItemFault
from kvferry.data.pulls import Reading
from kvferry.data.wire import CloseChannel, MeetPeer, OpenChannel
from kvferry.testing.channels import ForwardingChannel, ForwardingConnection
from kvferry.testing.fake_instance import wait_until
from kvferry.testing.faults import (
    Delay,
    DoubleCompletion,
    Drop,
    Fail,
    Fault,
    FaultPlan,
    LateWrite,
    LoseCompletion,
    Stall,
)
from kvferry.testing.memory_channel import MemoryNetwork

WANTED: list[Want] = [(16, 5, 1), (12, 2, 4), (4, 7, 6)]
SHORT = 0.02


@define
class Pair:
    """A rank, met with a peer unless ``meet`` says otherwise; both are stopped at the end."""

    network: MemoryNetwork = field(factory=MemoryNetwork)
    ranks: list[Rank] = field(factory=list)

    def rank(self, name: str, *faults: Fault, **options: object) -> Rank:
        self.ranks.append(Rank(self.network, name, plan=FaultPlan(faults), **options))  # type: ignore[arg-type]
        return self.ranks[-1]

    def met(self, *faults: Fault, **options: object) -> tuple[Rank, Rank]:
        near, far = self.rank("near", *faults, **options), self.rank("far-away")
        far.open()
        near.open().meet(far)
        return near, far


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    for rank in made.ranks:
        rank.stop()


def held(rank: Rank) -> bool:
    """Whether the first fault of the plan came to pass: a call of the channel waits for the test."""
    return bool(rank.channels[-1].player.fired)


# -- faults of the channel ---------------------------------------------------------------------------


def test_a_delayed_read_arrives(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Delay(0.0)))
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    assert near.under_way() == {1}
    near.channels[-1].poll()
    assert near.ended(1) == {}


def test_a_dropped_read_times_out_and_the_next_arrives(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Drop(), 1))
    near.pull(1, far, WANTED, SHORT)
    wait_until(lambda: near.channels[-1].poll() or 1 in near.done_pulls, LONG, "an end")
    assert near.settled_faults(1) == {ItemFault.TIMEOUT}
    near.pull(2, far, WANTED)
    assert near.ended(2) == {}


def test_a_read_that_is_told_of_twice_ends_once(pair: Pair) -> None:
    near, far = pair.met(Fault("read", DoubleCompletion()))
    for number in range(5):
        near.pull(number, far, WANTED)
        assert near.ended(number) == {}


def test_a_read_that_nobody_hears_of_ends_when_the_channel_is_closed(pair: Pair) -> None:
    near, far = pair.met(Fault("read", LoseCompletion(), 1))
    near.pull(1, far, WANTED)
    near.pull(2, far, [(16, 0, 0)])
    assert near.ended(2) == {}
    near.cancel(1)
    assert near.under_way() == {1}, "its slots may still be written to"
    near.close()
    assert near.settled_faults(1) == {ItemFault.CANCELLED}


class Tardy(ForwardingChannel):
    """Tells of reads when the test does."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.tickets: list[tuple[Ticket[TransferStatus], Ticket[TransferStatus]]] = []
        self.closed = threading.Event()

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        outer: Ticket[TransferStatus] = Ticket(len(operations))
        self.tickets.append((outer, super().read(connection, operations, deadline)))
        return outer

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self.closed.set()

    def read_to_the_end(self, number: int) -> bool:
        return self.tickets[number][1].done

    def tell(self, number: int) -> None:
        outer, inner = self.tickets[number]
        outer.complete(inner.results)


def test_what_a_channel_tells_after_it_was_closed_is_not_told_again(pair: Pair) -> None:
    channels: list[Tardy] = []

    def tardy(channel: Channel) -> Channel:
        channels.append(Tardy(channel))
        return channels[-1]

    near, far = pair.met(wrap=tardy)
    near.pull(1, far, WANTED)
    wait_until(lambda: bool(channels[0].tickets) and channels[0].read_to_the_end(0), LONG, "a read")
    near.close()
    assert near.settled_faults(1) == {ItemFault.CANCELLED}
    channels[0].tell(0)
    near.check()


def test_a_channel_is_told_of_as_closed_after_all_its_pulls(pair: Pair) -> None:
    channels: list[Tardy] = []
    telling = threading.Event()

    def tardy(channel: Channel) -> Channel:
        channels.append(Tardy(channel))
        return channels[-1]

    def wait_for_the_closing() -> None:
        telling.set()
        assert channels[0].closed.wait(LONG)
        time.sleep(SHORT)  # for whoever does not wait to be ahead

    near, far = pair.met(wrap=tardy, before_filled=wait_for_the_closing)
    near.pull(1, far, WANTED)
    wait_until(lambda: bool(channels[0].tickets) and channels[0].read_to_the_end(0), LONG, "a read")
    teller = threading.Thread(target=channels[0].tell, args=(0,))
    teller.start()
    assert telling.wait(LONG)
    near.close()
    teller.join()
    assert near.ended(1) == {}


def test_a_write_after_the_end_would_be_seen(pair: Pair) -> None:
    """The yardstick of all other tests: a channel that breaks its contract is noticed."""
    near, far = pair.met(Fault("read", LateWrite(), 1))
    near.pull(1, far, WANTED)
    assert near.ended(1) == {}
    near.check()
    near.channels[-1].poll()
    with pytest.raises(AssertionError, match="3 bytes are wrong, from byte 0 of slot 1 on"):
        near.check()
    near.pull(2, far, WANTED)
    assert near.ended(2) == {}


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        (ErrorKind.IO, ItemFault.FAILED),
        (ErrorKind.PROTOCOL, ItemFault.FAILED),
        (ErrorKind.TIMEOUT, ItemFault.TIMEOUT),
        (ErrorKind.CLOSED, ItemFault.CANCELLED),
    ],
)
def test_a_read_fails_as_the_channel_says(pair: Pair, kind: ErrorKind, fault: ItemFault) -> None:
    near, far = pair.met(Fault("read", Fail(kind), 1))
    near.pull(1, far, WANTED)
    assert near.settled_faults(1) == {fault}
    near.pull(2, far, WANTED)
    assert near.ended(2) == {}


def test_faults_are_told_of_the_right_chunks(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Fail(ErrorKind.TIMEOUT), 1))
    near.pull(1, far, [(16, 99, 1), *WANTED[1:]])
    assert near.ended(1) == {0: ItemFault.FAILED, 1: ItemFault.TIMEOUT, 2: ItemFault.TIMEOUT}


# -- connecting --------------------------------------------------------------------------------------


def test_pulls_share_one_slow_connect(pair: Pair) -> None:
    accepted = threading.Event()
    near, far = pair.met(Fault("connect", Delay(LONG)), sleep=lambda _seconds: accepted.wait(LONG) and None)
    for number in range(4):
        near.pull(number, far, [(16, number, number)])
    assert near.under_way() == {0, 1, 2, 3}
    accepted.set()
    for number in range(4):
        assert near.ended(number) == {}
    assert len(near.channels[-1].player.fired) == 1


def test_a_peer_that_accepts_slowly_holds_up_nobody_else(pair: Pair) -> None:
    accepted = threading.Event()
    near, far = pair.met(
        Fault("connect", Delay(LONG), 1), sleep=lambda _seconds: accepted.wait(LONG) and None
    )
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a connect")
    other = pair.rank("another-one").open()
    near.meet(other)
    near.pull(2, other, [(16, 0, 0)])
    assert near.ended(2) == {}
    assert near.under_way() == {1}
    accepted.set()
    assert near.ended(1) == {}


def test_a_pull_without_time_reads_nothing(pair: Pair) -> None:
    near, far = pair.met()
    near.pull(1, far, WANTED)
    assert near.ended(1) == {}
    before = near.bytes
    near.pull(2, far, [(16, 0, 0)], 0.0)
    assert near.settled_faults(2) == {ItemFault.TIMEOUT}
    assert near.bytes == before


def test_a_pull_waits_for_a_connect_until_its_deadline_alone(pair: Pair) -> None:
    accepted = threading.Event()
    near, far = pair.met(Fault("connect", Delay(LONG)), sleep=lambda _seconds: accepted.wait(LONG) and None)
    near.pull(1, far, WANTED)
    near.pull(2, far, [(4, 0, 0)], SHORT)
    assert near.settled_faults(2) == {ItemFault.TIMEOUT}
    near.cancel(1)
    assert near.settled_faults(1) == {ItemFault.CANCELLED}
    near.pull(3, far, WANTED)
    accepted.set()
    assert near.ended(3) == {}


def test_a_connect_that_fails_is_tried_again_after_a_pause(pair: Pair) -> None:
    near, far = pair.met(Fault("connect", Fail(), 1), Fault("connect", Fail(), 2), retry_seconds=SHORT)

    def failed(number: int) -> bool:
        near.pull(number, far, WANTED)
        return bool(near.ended(number))

    failures = 0
    while failed(failures):
        failures += 1
    assert failures >= 1
    assert len(near.channels[-1].player.fired) == 2
    assert all(near.settled_faults(number) == {ItemFault.FAILED} for number in range(failures))


def test_until_the_pause_is_over_nobody_connects_and_pulls_fail_at_once(pair: Pair) -> None:
    near, far = pair.met(Fault("connect", Fail()), retry_seconds=1e6)
    near.pull(0, far, WANTED)
    near.ended(0)
    for number in range(1, 50):
        near.pull(number, far, WANTED)
        assert number in near.done_pulls
        assert near.settled_faults(number) == {ItemFault.FAILED}
        assert near.done_pulls[number][1] == near.done_pulls[0][1]
    assert len(near.channels[-1].player.fired) == 1
    near.forget(far)
    near.meet(far)
    wait_until(lambda: len(near.channels[-1].player.fired) == 2, LONG, "a connect: it was met anew")


# -- cancelling --------------------------------------------------------------------------------------


def test_a_cancelled_read_ends_when_the_channel_lets_go(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Stall()))
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    near.cancel(1)
    assert near.settled_faults(1) == {ItemFault.CANCELLED}
    near.channels[-1].release()


class Interrupted(ForwardingChannel):
    """Something happens while a read is being submitted."""

    def __init__(self, inner: Channel, happens: Callable[[], None]) -> None:
        super().__init__(inner)
        self._happens = happens

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        ticket = super().read(connection, operations, deadline)
        self._happens()
        return ticket


def test_a_pull_that_is_cancelled_while_it_is_submitted_ends(pair: Pair) -> None:
    near, far = pair.met(
        Fault("read", Stall()), wrap=lambda channel: Interrupted(channel, lambda: near.cancel(1))
    )
    near.pull(1, far, WANTED)
    assert near.settled_faults(1) == {ItemFault.CANCELLED}


def test_cancelling_what_has_ended_or_never_was_does_nothing(pair: Pair) -> None:
    near, far = pair.met()
    near.pull(1, far, WANTED)
    assert near.ended(1) == {}
    near.cancel(1)
    near.cancel(77)
    near.pull(2, far, WANTED)
    assert near.ended(2) == {}


# -- peers that go and come back ---------------------------------------------------------------------


def test_a_peer_that_is_not_known_has_nothing(pair: Pair) -> None:
    near, far = pair.rank("near").open(), pair.rank("far-away").open()
    near.pull(1, far, WANTED)
    assert 1 in near.done_pulls
    assert near.settled_faults(1) == {ItemFault.GONE}


def test_a_forgotten_peer_has_nothing_and_what_was_under_way_fails(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Stall(), 1))
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    near.forget(far)
    assert near.settled_faults(1) == {ItemFault.GONE}
    near.pull(2, far, WANTED)
    assert near.settled_faults(2) == {ItemFault.GONE}
    near.channels[-1].release()
    near.meet(far)
    near.pull(3, far, WANTED)
    assert near.ended(3) == {}


def test_forgetting_another_epoch_changes_nothing(pair: Pair) -> None:
    near, far = pair.met()
    epoch, far.epoch = far.epoch, os.urandom(16)
    near.forget(far)
    far.epoch = epoch
    near.pull(1, far, WANTED)
    assert near.ended(1) == {}


@pytest.mark.parametrize("connected", [True, False])
def test_a_peer_that_is_gone_fails_pulls(pair: Pair, connected: bool) -> None:
    near, far = pair.rank("near", retry_seconds=SHORT).open(), pair.rank("far-away").open()
    if connected:
        near.meet(far)
        near.pull(0, far, WANTED)
        assert near.ended(0) == {}
    far.close()
    near.meet(far)
    for number in range(1, 4):
        near.pull(number, far, WANTED)
        assert near.settled_faults(number) == {ItemFault.FAILED}


def test_a_peer_that_goes_during_a_read_fails_it(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Stall(), 1))
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    far.close()
    near.channels[-1].release()
    assert near.settled_faults(1) == {ItemFault.FAILED}


def test_after_a_restart_of_the_peer_only_its_new_epoch_counts(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Stall(), 2))
    near.pull(1, far, WANTED)
    assert near.ended(1) == {}
    near.pull(2, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    successor = pair.rank("far-away").open()
    far.close()
    near.meet(successor)
    assert near.settled_faults(2) == {ItemFault.GONE}
    near.pull(3, far, WANTED)
    assert near.settled_faults(3) == {ItemFault.GONE}
    near.pull(4, successor, WANTED)
    assert near.ended(4) == {}


class Cut(ForwardingConnection):
    """The network breaks it."""

    cut = False

    @property
    def alive(self) -> bool:
        return not self.cut and super().alive


class Cutting(ForwardingChannel):
    """Its connections can be cut; the peer lives on."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner)
        self.made: list[Cut] = []

    def connect(self, peer: bytes, deadline: float) -> Connection:
        self.made.append(Cut(super().connect(peer, deadline)))
        return self.made[-1]

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        assert isinstance(connection, Cut)
        return super().read(connection.inner, operations, deadline)


def test_a_connection_that_was_cut_is_closed_and_made_anew(pair: Pair) -> None:
    channels: list[Cutting] = []

    def cutting(channel: Channel) -> Channel:
        channels.append(Cutting(channel))
        return channels[-1]

    near, far = pair.met(wrap=cutting)
    near.pull(1, far, WANTED)
    assert near.ended(1) == {}
    channels[0].made[0].cut = True
    near.pull(2, far, WANTED)
    near.pull(3, far, WANTED)
    assert near.ended(2) == near.ended(3) == {}
    assert len(channels[0].made) == 2
    wait_until(lambda: not channels[0].made[0].inner.alive, LONG, "a connection that is left open")


def test_a_connection_to_a_peer_that_was_forgotten_meanwhile_is_closed(pair: Pair) -> None:
    channels: list[Cutting] = []
    accepted = threading.Event()

    def cutting(channel: Channel) -> Channel:
        channels.append(Cutting(channel))
        return channels[-1]

    near, far = pair.met(
        Fault("connect", Delay(LONG), 1),
        sleep=lambda _seconds: accepted.wait(LONG) and None,
        wrap=cutting,
    )
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a connect")
    near.forget(far)
    assert near.settled_faults(1) == {ItemFault.GONE}
    near.meet(far)
    near.pull(2, far, WANTED)
    assert near.ended(2) == {}
    accepted.set()
    made = channels[0].made
    wait_until(lambda: len(made) == 2 and not made[1].alive, LONG, "a connection that is left open")
    assert made[0].alive
    near.pull(3, far, WANTED)
    assert near.ended(3) == {}


def test_an_export_that_nobody_made_fails_pulls_and_nothing_else(pair: Pair) -> None:
    near, far = pair.rank("near").open(), pair.rank("far-away").open()
    near.side.take(MeetPeer("far-away", far.epoch, b"nonsense"))
    near.pull(1, far, WANTED)
    assert near.settled_faults(1) == {ItemFault.FAILED}
    near.meet(far)
    near.pull(2, far, WANTED)
    assert near.ended(2) == {}


# -- opening and closing -----------------------------------------------------------------------------


def test_closing_ends_what_is_read_and_what_waits(pair: Pair) -> None:
    accepted = threading.Event()
    near, far = pair.met(
        Fault("read", Stall()),
        Fault("connect", Delay(LONG), 2),
        sleep=lambda _seconds: accepted.wait(LONG) and None,
    )
    other = pair.rank("another-one").open()
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    near.meet(other)
    near.pull(2, other, [(16, 0, 0)])
    near.close()
    assert near.settled_faults(1) == near.settled_faults(2) == {ItemFault.CANCELLED}
    accepted.set()
    near.pull(3, far, WANTED)
    assert near.settled_faults(3) == {ItemFault.CANCELLED}


@pytest.mark.parametrize("operation", ["open", "register"])
def test_a_channel_that_does_not_open_is_told_of_and_can_be_opened_later(pair: Pair, operation: str) -> None:
    near = pair.rank("near", Fault(operation, Fail(ErrorKind.CAPACITY)))
    near.side.take(OpenChannel("near", os.urandom(16)))
    wait_until(lambda: bool(near.closed), LONG, "an answer")
    assert "a fault was injected" in near.closed[0][1]
    assert near.opened == []
    near.plan = FaultPlan()
    near.open()


def test_another_epoch_closes_the_one_before(pair: Pair) -> None:
    near, far = pair.met(Fault("read", Stall()))
    near.pull(1, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read")
    before = near.epoch
    near.open()
    assert near.closed == [(before, "")]
    assert near.settled_faults(1) == {ItemFault.CANCELLED}
    near.side.take(CloseChannel(before))
    wait_until(lambda: len(near.closed) == 2, LONG, "an answer")
    assert near.closed[1] == (before, "")
    near.meet(far)
    near.pull(2, far, WANTED)
    wait_until(lambda: held(near), LONG, "a read: the new one stays open")
    near.channels[-1].release()
    assert near.ended(2) == {}


def test_a_channel_that_fails_to_close_is_asked_again(pair: Pair) -> None:
    near, _far = pair.met(Fault("close", Fail(), 1), Fault("close", Fail(ErrorKind.TIMEOUT), 2))
    near.close()
    assert [fault.nth for fault in near.channels[-1].player.fired] == [1, 2]
    assert not near.channels[-1].inner.is_open  # type: ignore[attr-defined]


class Stuck(ForwardingChannel):
    """Does not close until the test lets it."""

    def __init__(self, inner: Channel, free: threading.Event) -> None:
        super().__init__(inner)
        self._free = free

    def close(self, deadline: float) -> None:
        assert self._free.wait(LONG)
        super().close(deadline)


def test_stopping_says_whether_the_memory_may_be_given_back(pair: Pair) -> None:
    free = threading.Event()
    near, _far = pair.met(wrap=lambda channel: Stuck(channel, free))
    assert not near.side.stop(SHORT)
    free.set()
    assert near.side.stop(LONG)


def test_what_waits_for_a_connect_does_not_wait_for_a_channel_to_close(pair: Pair) -> None:
    free, accepted = threading.Event(), threading.Event()
    near, far = pair.met(
        Fault("connect", Delay(LONG)),
        sleep=lambda _seconds: accepted.wait(LONG) and None,
        wrap=lambda channel: Stuck(channel, free),
    )
    near.pull(1, far, WANTED)
    near.side.take(CloseChannel(near.epoch))
    assert near.settled_faults(1) == {ItemFault.CANCELLED}
    near.pull(2, far, WANTED)
    assert near.settled_faults(2) == {ItemFault.CANCELLED}
    assert near.closed == []
    free.set()
    accepted.set()


def test_it_can_be_stopped_before_it_is_started_or_opened(pair: Pair) -> None:
    assert pair.rank("near").side.stop(LONG)


@define(eq=False)
class Watched(ForwardingChannel):
    """Remembers what it was opened with."""

    inner: Channel
    contexts: list[ChannelContext] = field(factory=list)
    regions: list[Region] = field(factory=list)

    def open(self, context: ChannelContext) -> None:
        self.contexts.append(context)
        super().open(context)

    def register(self, region: Region) -> None:
        self.regions.append(region)
        super().register(region)


def test_the_channel_hears_who_it_is_and_gets_the_whole_arena(pair: Pair) -> None:
    made: list[Watched] = []

    def watch(channel: Channel) -> Channel:
        made.append(Watched(channel))
        return made[-1]

    near = pair.rank("near", wrap=watch, rank=2, world_size=4).open()
    (context,), (region,) = made[0].contexts, made[0].regions
    assert (context.name, context.instance, context.epoch) == ("memory", "near", near.epoch)
    assert (context.rank, context.world_size) == (2, 4)
    assert region == evolve(near.region, name=region.name)


def test_what_comes_before_the_word_of_its_peer_waits_for_it(pair: Pair) -> None:
    near, far = pair.rank("near"), pair.rank("far-away")
    far.open()
    near.open()
    early = EarlyRead(near, far)
    early.begin(1)
    near.meet(far)
    assert early.ended(1) == {}
    near.forget(far)
    early.begin(2)
    assert set(early.ended(2).values()) == {ItemFault.GONE}, "that peer is gone, and not to come"
    near.meet(far)
    early.begin(3)
    assert early.ended(3) == {}


@pytest.mark.parametrize("how", ["deadline", "forgotten", "closed"])
def test_what_waits_for_a_peer_that_never_comes_ends(pair: Pair, how: str) -> None:
    near, far = pair.rank("near"), pair.rank("far-away")
    far.open()
    near.open()
    early = EarlyRead(near, far)
    early.begin(1, SHORT if how == "deadline" else LONG)
    if how == "forgotten":
        near.forget(far)
    elif how == "closed":
        near.close()
    fault = {"deadline": ItemFault.TIMEOUT, "forgotten": ItemFault.GONE, "closed": ItemFault.CANCELLED}[how]
    assert set(early.ended(1).values()) == {fault}


class EarlyRead:
    """Loads that come by another way than orders."""

    def __init__(self, near: Rank, far: Rank) -> None:
        self._near, self._far = near, far

    def begin(self, number: int, seconds: float = LONG) -> None:
        near, far = self._near, self._far
        near.expect(number, far, WANTED)
        near.side._begin_reading(
            Reading(
                id=number,
                peer=far.name,
                epoch=far.epoch,
                region=ARENA,
                from_slots=tuple(source for _, source, _ in WANTED),
                tokens=tuple(tokens for tokens, _, _ in WANTED),
                into=ARENA,
                slots=tuple(target for _, _, target in WANTED),
                deadline=time.monotonic() + seconds,
                listener=near,
                may_be_early=True,
            )
        )

    def ended(self, number: int) -> dict[int, ItemFault]:
        return self._near.ended(number)
