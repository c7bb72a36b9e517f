"""Networks that delay, stand still, tear apart, damage and cut: every ticket ends in time, and truly."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kvferry.api import Connection, ErrorKind, RemoteOp, Span, TransferStatus
from kvferry.testing.tcp_proxy import Direction, TCPProxy
from kvferry_transport_tcp.wire import HEADER_BYTES
from plugins.transport_tcp.tests.tcp_sides import ARENA, Side, kind_of, outcome, sides, soon, whole

LENGTH = 4 << 20


@pytest.fixture
def pair() -> Iterator[tuple[Side, Side]]:
    with sides(length=LENGTH, connections=2) as (near, far):
        yield near, far


@pytest.fixture
def near(pair: tuple[Side, Side]) -> Side:
    return pair[0]


@pytest.fixture
def far(pair: tuple[Side, Side]) -> Side:
    return pair[1]


@pytest.fixture
def proxy(far: Side) -> Iterator[TCPProxy]:
    with TCPProxy(far.address) as proxy:
        yield proxy


@pytest.fixture
def connection(near: Side, far: Side, proxy: TCPProxy) -> Connection:
    return near.connect(far.through(proxy.address))


def test_bytes_arrive_through_a_network_that_tears_everything_apart(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection
) -> None:
    proxy.to_target.piece_bytes = proxy.from_target.piece_bytes = 1
    operations = [whole(n, 1000 * n) for n in range(20)]
    assert outcome(near.read(connection, operations)) == [None] * 20
    for n in range(20):
        assert near.memory[1000 * n : 1001 * n] == far.memory[1000 * n : 1001 * n]
    assert outcome(near.write(connection, [whole(500, 50_000)])) == [None]
    assert near.memory[50_000:50_500] == far.memory[50_000:50_500]


def test_bytes_arrive_through_a_slow_network(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection
) -> None:
    proxy.to_target.delay_seconds = proxy.from_target.delay_seconds = 0.01
    assert outcome(near.read(connection, [whole(LENGTH // 2)])) == [None]
    assert outcome(near.write(connection, [whole(LENGTH // 2, LENGTH // 2)])) == [None]
    assert near.memory.raw == far.memory.raw


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_network_that_stands_still_costs_the_deadline_and_nothing_comes_later(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection, verb: str
) -> None:
    proxy.hold()
    call = near.read if verb == "read" else near.write
    ticket = call(connection, [whole(LENGTH // 2)], 0.3)
    assert outcome(ticket) == [ErrorKind.TIMEOUT]
    ours, theirs = near.memory.raw, far.memory.raw
    proxy.hold(held=False)
    assert outcome(call(connection, [whole(1000, LENGTH - 1000)])) == [None]
    assert near.memory[: LENGTH // 2] == ours[: LENGTH // 2]
    assert far.memory[: LENGTH // 2] == theirs[: LENGTH // 2]


def test_a_write_that_the_network_delivers_too_late_is_not_done(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection
) -> None:
    """Its deadline does not move with it: the owner knows the moment, and not a time from its arrival."""
    before = far.memory.raw
    proxy.to_target.delay_seconds = 0.5
    passed = proxy.passed[Direction.TO_TARGET]
    assert outcome(near.write(connection, [whole(1000)], 0.4)) == [ErrorKind.TIMEOUT]
    assert soon(lambda: proxy.passed[Direction.TO_TARGET] >= passed + 1000)
    proxy.to_target.delay_seconds = 0.0
    time.sleep(0.05)  # the owner has the request, and would obey it
    assert outcome(near.write(connection, [whole(10, LENGTH - 10)])) == [None]
    assert far.memory[: LENGTH - 10] == before[: LENGTH - 10]


@pytest.mark.parametrize("verb", ["read", "write"])
def test_a_cancelled_operation_ends_and_the_lane_is_used_again(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection, verb: str
) -> None:
    proxy.hold()
    call = near.read if verb == "read" else near.write
    ticket = call(connection, [whole(LENGTH // 2)])
    ticket.cancel()
    assert outcome(ticket) == [ErrorKind.CANCELLED]
    ours = near.memory.raw
    proxy.hold(held=False)
    assert outcome(near.read(connection, [whole(1000, LENGTH - 1000)])) == [None]
    assert near.memory[: LENGTH - 1000] == ours[: LENGTH - 1000]


def test_reads_beside_one_that_is_cancelled_are_done_all_the_same(
    near: Side, proxy: TCPProxy, far: Side, connection: Connection
) -> None:
    proxy.hold()
    before = proxy.received[Direction.TO_TARGET]
    tickets = [near.read(connection, [whole(50_000, 50_000 * n)]) for n in range(12)]
    # Each lane has asked for one of them at least, and very soon for a second.
    assert soon(lambda: proxy.received[Direction.TO_TARGET] > before + 3 * HEADER_BYTES)
    time.sleep(0.05)
    # One of each lane at the most: so there is a read beside it.
    cancelled = {0, 7}
    for number in cancelled:
        tickets[number].cancel()
    proxy.hold(held=False)
    for number, ticket in enumerate(tickets):
        (kind,) = outcome(ticket)
        assert kind in ((ErrorKind.CANCELLED, None) if number in cancelled else (None,))
        if kind is None:
            at = slice(50_000 * number, 50_000 * (number + 1))
            assert near.memory[at] == far.memory[at]


@pytest.mark.parametrize("verb", ["read", "write"])
@pytest.mark.parametrize("after", [0, 10, 32, 60, 5000, 300_000])
def test_a_connection_that_is_cut_fails_what_is_under_way(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection, verb: str, after: int
) -> None:
    """At every stage of a frame: what is done has its bytes, and what is not fails as ``IO``."""
    faults = proxy.from_target if verb == "read" else proxy.to_target
    faults.cut_after = after
    call = near.read if verb == "read" else near.write
    operations = [whole(100_000, 100_000 * n) for n in range(20)]
    ticket = call(connection, operations)
    kinds = outcome(ticket)
    assert set(kinds) <= {None, ErrorKind.IO}
    assert ErrorKind.IO in kinds
    for operation, kind in zip(operations, kinds, strict=True):
        if kind is None:
            at = slice(operation.offset, operation.offset + 100_000)
            assert near.memory[at] == far.memory[at]


def test_a_peer_that_the_network_takes_away_is_not_alive(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection
) -> None:
    proxy.cut()
    assert soon(lambda: not connection.alive)
    assert outcome(near.read(connection, [whole(10)])) == [ErrorKind.IO]
    again = near.connect(far.through(proxy.address))
    assert outcome(near.read(again, [whole(10)])) == [None]


@pytest.mark.parametrize("after", [0, 4, 5, 6, 7, 8, 11, 12, 15, 16, 23])
def test_a_damaged_header_is_noticed(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection, after: int
) -> None:
    proxy.from_target.damaged_after = after
    before = near.memory.raw
    (kind,) = outcome(near.read(connection, [whole(1000)], 1.0))
    assert kind in (ErrorKind.PROTOCOL, ErrorKind.IO, ErrorKind.TIMEOUT)
    assert near.memory[1000:] == before[1000:]
    assert outcome(near.read(connection, [whole(1000)])) == [None]


def test_connecting_ends_at_the_deadline_where_nobody_answers(near: Side, far: Side, proxy: TCPProxy) -> None:
    proxy.hold()
    exported = far.through(proxy.address)
    assert kind_of(lambda: near.channel.connect(exported, near.context.clock() + 0.2)) is ErrorKind.TIMEOUT


def test_connecting_fails_where_the_opening_is_cut_at_any_byte(
    near: Side, far: Side, proxy: TCPProxy
) -> None:
    exported = far.through(proxy.address)
    for after in range(0, 128, 7):
        proxy.from_target.cut_after = after
        assert kind_of(lambda: near.connect(exported)) is ErrorKind.IO
    proxy.from_target.cut_after = None
    assert outcome(near.read(near.connect(exported), [whole(10)])) == [None]


def test_one_large_operation_goes_over_all_connections(
    near: Side, far: Side, proxy: TCPProxy, connection: Connection
) -> None:
    assert proxy.accepted == 3  # a control connection and two lanes
    heard: set[int] = set()
    proxy.on_bytes = lambda number, direction: heard.add(number)
    assert outcome(near.read(connection, [whole(LENGTH)])) == [None]
    assert near.memory.raw == far.memory.raw
    assert heard >= {1, 2}


def test_many_operations_of_every_length_arrive(near: Side, far: Side, connection: Connection) -> None:
    lengths = [(7919 * n) % 5000 for n in range(2500)]
    offsets = [sum(lengths[:n]) % (LENGTH - 5000) for n in range(2500)]
    used: set[int] = set()
    operations = []
    for length, offset in zip(lengths, offsets, strict=True):
        if not used.isdisjoint(range(offset, offset + length)):
            continue
        used.update(range(offset, offset + length))
        operations.append(RemoteOp(Span(ARENA, offset, length), ARENA, LENGTH - offset - length))
    ticket = near.read(connection, operations)
    assert set(outcome(ticket)) == {None}
    assert all(result.status is TransferStatus.DONE for result in ticket.results)
    for local, _, offset in operations:
        assert (
            near.memory[local.offset : local.offset + local.length]
            == (far.memory[offset : offset + local.length])
        )


def test_several_threads_may_use_one_connection(near: Side, far: Side, connection: Connection) -> None:
    tickets = []
    for number in range(40):
        call = near.read if number % 2 else near.write
        tickets.append(call(connection, [whole(90_000, 100_000 * number)]))
    assert {kind for ticket in tickets for kind in outcome(ticket)} == {None}
    for number in range(40):
        at = slice(100_000 * number, 100_000 * number + 90_000)
        assert near.memory[at] == far.memory[at]
