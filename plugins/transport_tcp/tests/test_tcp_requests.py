"""The side that owns the memory, seen from the wire: it trusts nothing that a peer says."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry_transport_tcp.wire import Header, Kind, PieceStatus, RemotePiece, encode_pieces
from plugins.transport_tcp.tests.tcp_sides import ARENA, BarePeer, Side, assert_serves, bare_peer, soon

LENGTH = 1 << 20
GOOD = RemotePiece(ARENA, 100, 50)
HUGE = (1 << 64) - 1
OUTSIDE = [
    RemotePiece(ARENA, LENGTH - 9, 10),
    RemotePiece(ARENA, LENGTH + 1, 0),
    RemotePiece(ARENA, HUGE, 1),
    RemotePiece(ARENA, HUGE - 4, 10),
    RemotePiece("elsewhere", 0, 10),
    RemotePiece("", 0, 0),
]
FIXTURES = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def far() -> Iterator[Side]:
    side = Side(LENGTH)
    yield side
    side.close()


@pytest.fixture
def near() -> Iterator[Side]:
    side = Side(LENGTH)
    yield side
    side.close()


@pytest.fixture
def peer(far: Side) -> Iterator[BarePeer]:
    with bare_peer(far) as peer:
        yield peer


@pytest.mark.parametrize("wrong", OUTSIDE, ids=str)
def test_a_read_outside_gives_no_byte_and_the_others_are_answered(
    far: Side, peer: BarePeer, wrong: RemotePiece
) -> None:
    peer.sock.sendall(peer.request(Kind.READ, [GOOD, wrong, GOOD]))
    header, body, data = peer.answer()
    assert header.kind is Kind.DATA
    assert list(body) == [PieceStatus.DONE, PieceStatus.OUTSIDE, PieceStatus.DONE]
    assert data == far.memory[100:150] * 2


@pytest.mark.parametrize("wrong", OUTSIDE, ids=str)
def test_a_write_outside_changes_no_byte_and_the_others_are_done(
    far: Side, peer: BarePeer, wrong: RemotePiece
) -> None:
    before = far.memory.raw
    data = os.urandom(50)
    peer.sock.sendall(peer.request(Kind.WRITE, [wrong, GOOD]) + b"!" * wrong.length + data)
    header, body, _ = peer.answer()
    assert header.kind is Kind.WRITTEN
    assert list(body) == [PieceStatus.OUTSIDE, PieceStatus.DONE]
    assert far.memory.raw == before[:100] + data + before[150:]


@pytest.mark.parametrize("kind", [Kind.READ, Kind.WRITE])
def test_a_request_whose_deadline_is_over_is_late(far: Side, peer: BarePeer, kind: Kind) -> None:
    before = far.memory.raw
    peer.sock.sendall(peer.request(kind, [GOOD], seconds=-1.0) + b"?" * 50 * (kind is Kind.WRITE))
    _, body, data = peer.answer()
    assert (list(body), data) == ([PieceStatus.LATE], b"")
    peer.receipt(1)
    peer.sock.sendall(peer.request(Kind.READ, [GOOD]))
    assert peer.answer()[2] == before[100:150]


def test_what_still_arrives_when_the_deadline_is_over_is_cut_off(far: Side, peer: BarePeer) -> None:
    """The first half is in place, and the second comes too late."""
    before = far.memory.raw
    peer.sock.sendall(peer.request(Kind.WRITE, [RemotePiece(ARENA, 0, 1000)], seconds=0.3) + b"w" * 500)
    assert soon(lambda: far.memory[:500] == b"w" * 500)
    assert peer.is_cut()
    with contextlib.suppress(OSError):
        peer.sock.sendall(b"w" * 500)
    assert far.memory.raw == b"w" * 500 + before[500:]


def test_a_write_that_is_cut_touches_nothing_else(near: Side, far: Side, peer: BarePeer) -> None:
    before = far.memory.raw
    peer.sock.sendall(peer.request(Kind.WRITE, [RemotePiece(ARENA, 10, 1000)]) + b"w" * 300)
    assert soon(lambda: far.memory[10:310] == b"w" * 300)
    peer.close()
    far.channel.deregister(ARENA)  # returns: nobody is inside any more
    assert far.memory.raw == before[:10] + b"w" * 300 + before[310:]


def test_a_request_may_come_in_any_two_parts(far: Side, peer: BarePeer) -> None:
    pieces = [GOOD, RemotePiece(ARENA, 0, 20)]
    data = os.urandom(70)
    length = len(peer.request(Kind.WRITE, pieces) + data)
    for split in range(length):
        data = os.urandom(70)
        frame = peer.request(Kind.WRITE, pieces) + data
        peer.sock.sendall(frame[:split])
        if split % 8 == 0:
            time.sleep(0.002)  # so that they are two for the other side too
        peer.sock.sendall(frame[split:])
        header, body, _ = peer.answer()
        peer.receipt(header.number)
        assert body == b""
        assert (far.memory[100:150], far.memory[:20]) == (data[:50], data[50:])


@FIXTURES
@given(garbage=st.binary(min_size=32, max_size=300), begins_well=st.booleans())
def test_garbage_on_a_lane_changes_nothing_and_ends_it_alone(
    near: Side, far: Side, garbage: bytes, begins_well: bool
) -> None:
    before = far.memory.raw
    with bare_peer(far) as stranger, bare_peer(far) as other:
        stranger.sock.sendall(b"KVFT\x01" * begins_well + b"\xff" + garbage)
        assert stranger.is_cut()
        other.sock.sendall(other.request(Kind.READ, [GOOD]))
        assert other.answer()[2] == before[100:150]
    assert far.memory.raw == before


@pytest.mark.parametrize(
    "frame",
    [
        Header(Kind.HELLO).to_bytes(),
        Header(Kind.DATA, number=1).to_bytes(),
        Header(Kind.RECEIPT, number=99).to_bytes(),
        Header(Kind.READ, 1, 1 << 30, 0, 1, 1).to_bytes(),
        Header(Kind.READ, 2, 18, 5, 1, 1).to_bytes() + bytes(18),
        Header(Kind.READ, 1, len(encode_pieces([GOOD])), 51, 1, 1).to_bytes() + encode_pieces([GOOD]),
    ],
    ids=["hello", "data", "receipt", "long body", "short body", "other sum"],
)
def test_a_frame_that_does_not_belong_there_ends_the_lane(
    near: Side, far: Side, peer: BarePeer, frame: bytes
) -> None:
    peer.sock.sendall(frame)
    assert peer.is_cut()
    assert_serves(near, far)


def test_a_peer_that_never_confirms_is_cut(far: Side, peer: BarePeer) -> None:
    for _ in range(16):
        peer.sock.sendall(peer.request(Kind.READ, [GOOD]))
        peer.answer()
    peer.sock.sendall(peer.request(Kind.READ, [GOOD]))
    assert peer.is_cut()


def test_a_region_stays_until_the_peer_has_its_bytes(far: Side, peer: BarePeer) -> None:
    """``deregister`` waits for the receipt, and whoever gives it stays connected."""
    peer.sock.sendall(peer.request(Kind.READ, [GOOD]))
    peer.answer()
    thread = threading.Thread(target=far.channel.deregister, args=(ARENA,))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive(), "it did not wait for the receipt"
    peer.receipt(1)
    thread.join()
    peer.sock.sendall(peer.request(Kind.READ, [GOOD]))
    assert list(peer.answer()[1]) == [PieceStatus.OUTSIDE]


def test_a_region_does_not_wait_for_ever(far: Side, peer: BarePeer) -> None:
    peer.sock.sendall(peer.request(Kind.READ, [GOOD]))
    peer.answer()
    far.channel.deregister(ARENA)  # without a receipt it has to cut
    assert peer.is_cut()


def test_the_end_of_the_control_connection_ends_its_lanes(far: Side, peer: BarePeer) -> None:
    peer.control.close()
    assert peer.is_cut()


def test_a_peer_that_speaks_on_its_control_connection_is_cut(near: Side, far: Side, peer: BarePeer) -> None:
    peer.control.sendall(b"?")
    assert peer.is_cut()
    assert_serves(near, far)
