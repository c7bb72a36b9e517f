"""How connections open: who is let in, and that nobody who is not can keep the others out."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.api import ErrorKind
from kvferry_transport_tcp import listener
from kvferry_transport_tcp.export import Export
from kvferry_transport_tcp.handshake import CLIENT, Refused, examine, introduce, proof
from kvferry_transport_tcp.handshake import Side as HandshakeSide
from kvferry_transport_tcp.listener import MOST_OPENINGS
from kvferry_transport_tcp.sockets import receive_by
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    WIRE_VERSION,
    Header,
    Hello,
    Kind,
    Refusal,
    Role,
    WireError,
    decode_header,
)
from plugins.transport_tcp.tests.tcp_sides import (
    PATIENCE,
    Side,
    assert_serves,
    bare_peer,
    deadline,
    ends,
    kind_of,
    outcome,
    sides,
    whole,
)


@pytest.fixture
def far() -> Iterator[Side]:
    side = Side()
    yield side
    side.close()


@pytest.fixture
def near() -> Iterator[Side]:
    side = Side()
    yield side
    side.close()


def first_frame(far: Side) -> bytes:
    hello = Hello(
        role=Role.CONTROL,
        secret=False,
        nonce=bytes(32),
        connection=os.urandom(16),
        wanted_epoch=far.context.epoch,
        epoch=bytes(16),
        rank=0,
        instance="raw",
    ).to_bytes()
    return Header(Kind.HELLO, body=len(hello)).to_bytes() + hello


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(min_size=1, max_size=200), begins_well=st.booleans())
def test_garbage_ends_its_own_connection_alone(
    near: Side, far: Side, garbage: bytes, begins_well: bool
) -> None:
    with socket.create_connection(far.address) as sock:
        sock.sendall(b"KVFT" * begins_well + garbage)
        sock.shutdown(socket.SHUT_WR)
        assert ends(sock)
    assert_serves(near, far)


@pytest.mark.parametrize("version", [0, WIRE_VERSION + 1, 255])
def test_another_wire_version_is_refused_with_its_reason(far: Side, version: int) -> None:
    frame = bytearray(first_frame(far))
    frame[4] = version
    with socket.create_connection(far.address) as sock:
        sock.sendall(frame)
        answer = decode_header(receive_by(sock, HEADER_BYTES, deadline(), time.monotonic))
        assert (answer.kind, answer.pieces) == (Kind.REFUSED, Refusal.VERSION)
        assert ends(sock)


def test_an_export_of_another_wire_version_is_refused(near: Side, far: Side) -> None:
    export = evolve(Export.parse(far.channel.export()), version=WIRE_VERSION + 1)
    assert kind_of(lambda: near.connect(export.to_bytes())) is ErrorKind.PROTOCOL


def test_a_peer_of_another_epoch_is_refused(near: Side, far: Side) -> None:
    export = evolve(Export.parse(far.channel.export()), epoch=os.urandom(16))
    assert kind_of(lambda: near.connect(export.to_bytes())) is ErrorKind.PROTOCOL


def test_half_a_hello_keeps_nobody_waiting(near: Side, far: Side) -> None:
    frame = first_frame(far)
    halves = [socket.create_connection(far.address) for _ in range(8)]
    for number, sock in enumerate(halves):
        sock.sendall(frame[: number * len(frame) // 8])
    assert_serves(near, far)  # one after the other, they would take longer than its patience
    for sock in halves:
        sock.close()


def test_of_too_many_openings_the_oldest_goes(near: Side, far: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "OPENING_SECONDS", 10 * PATIENCE)  # nobody goes for being slow
    silent = [socket.create_connection(far.address) for _ in range(MOST_OPENINGS + 20)]
    assert_serves(near, far)
    for sock in silent[:20]:
        assert ends(sock)
    silent[-1].setblocking(False)
    with pytest.raises(BlockingIOError):  # it is still waited for
        silent[-1].recv(1)
    for sock in silent:
        sock.close()


def test_a_hello_may_come_in_any_pieces(far: Side) -> None:
    frame = first_frame(far)
    for split in range(len(frame)):
        with socket.create_connection(far.address) as sock:
            sock.sendall(frame[:split])
            if split % 10 == 0:
                time.sleep(0.002)  # so that they are two for the other side too
            sock.sendall(frame[split:])
            answer = decode_header(receive_by(sock, HEADER_BYTES, deadline(), time.monotonic))
            assert answer.kind is Kind.CHALLENGE


def test_a_lane_of_no_connection_is_refused(far: Side) -> None:
    with bare_peer(far) as peer:
        with pytest.raises(Refused) as caught:
            peer.open(Role.LANE, connection=os.urandom(16))
        assert caught.value.reason is Refusal.UNKNOWN_CONNECTION
        with pytest.raises(Refused) as caught:
            peer.open(Role.CONTROL)
        assert caught.value.reason is Refusal.UNKNOWN_CONNECTION


# -- secrets -------------------------------------------------------------------------------------------


def test_those_who_know_the_secret_are_let_in() -> None:
    with sides(secret_variable="SECRET") as (near, far):
        assert_serves(near, far)


@pytest.mark.parametrize(("here", "there"), [("SECRET", "OTHER"), ("SECRET", ""), ("", "SECRET")])
def test_who_does_not_know_the_secret_is_refused(here: str, there: str) -> None:
    near, far = Side(secret_variable=here), Side(secret_variable=there)
    try:
        assert kind_of(lambda: near.connect(far.channel.export())) is ErrorKind.COMPATIBILITY
        assert kind_of(lambda: far.connect(near.channel.export())) is ErrorKind.COMPATIBILITY
    finally:
        near.close()
        far.close()


def test_an_export_holds_no_secret() -> None:
    with sides(secret_variable="SECRET") as (near, _):
        assert b"swordfish" not in near.channel.export()


def test_a_proof_that_was_overheard_is_of_no_use() -> None:
    """The same hello and the same proof once more meet another challenge."""
    far = Side(secret_variable="SECRET")
    try:
        frame, proved = _overhear(far)
        with socket.create_connection(far.address) as sock:
            sock.sendall(frame)
            receive_by(sock, HEADER_BYTES + 32, deadline(), time.monotonic)
            sock.sendall(proved)
            answer = decode_header(receive_by(sock, HEADER_BYTES, deadline(), time.monotonic))
            assert (answer.kind, answer.pieces) == (Kind.REFUSED, Refusal.WRONG_SECRET)
            assert ends(sock)
    finally:
        far.close()


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    """Somebody who knows no secret listens, and answers with the proof that he has just got."""
    one, other = socket.socketpair()
    side = HandshakeSide(clock=time.monotonic, deadline=deadline(), secret=b"swordfish")
    hello = Hello(
        role=Role.CONTROL,
        secret=True,
        nonce=bytes(32),
        connection=bytes(16),
        wanted_epoch=bytes(16),
        epoch=bytes(16),
        rank=0,
        instance="",
    )
    with one, other:
        other.sendall(Header(Kind.CHALLENGE, pieces=1, body=32).to_bytes() + bytes(32))
        echo = Header(Kind.WELCOME, body=32).to_bytes()

        def answer() -> None:
            receive_by(other, HEADER_BYTES + len(hello.to_bytes()), deadline(), time.monotonic)
            proved = receive_by(other, HEADER_BYTES + 32, deadline(), time.monotonic)
            other.sendall(echo + proved[HEADER_BYTES:])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Refused) as caught:
            introduce(one, hello, side)
        thread.join()
        assert caught.value.reason is Refusal.WRONG_SECRET


@pytest.mark.parametrize("place", [5, 6, 40, 41, 75, 91, 107])
def test_a_hello_that_is_changed_on_the_way_is_refused(place: int) -> None:
    """The proof is about what was sent, and not about what has come."""
    one, other = socket.socketpair()
    side = HandshakeSide(clock=time.monotonic, deadline=deadline(), secret=b"swordfish")
    body = Hello(
        role=Role.CONTROL,
        secret=True,
        nonce=bytes(32),
        connection=bytes(16),
        wanted_epoch=bytes(16),
        epoch=bytes(16),
        rank=0,
        instance="x",
    ).to_bytes()
    frame = Header(Kind.HELLO, body=len(body)).to_bytes() + body
    changed = bytearray(frame)
    changed[place] ^= 2
    with one, other:
        nonce = os.urandom(32)
        challenge = Header(Kind.CHALLENGE, pieces=1, body=32).to_bytes() + nonce
        proved = proof(b"swordfish", CLIENT, frame, challenge)
        one.sendall(changed + Header(Kind.PROOF, body=32).to_bytes() + proved)
        with pytest.raises((Refused, WireError)):
            examine(other, side, nonce, lambda hello: None)


def _overhear(far: Side) -> tuple[bytes, bytes]:
    """The two frames that somebody who knows the secret sends."""
    sent: list[bytes] = []
    sock = socket.create_connection(far.address)

    class Wire:
        """The socket, with an ear."""

        def settimeout(self, seconds: float) -> None:
            sock.settimeout(seconds)

        def sendall(self, data: bytes) -> None:
            sent.append(bytes(data))
            sock.sendall(data)

        def recv_into(self, view: memoryview) -> int:
            return sock.recv_into(view)

    hello = Hello.parse(first_frame(far)[HEADER_BYTES:])
    side = HandshakeSide(clock=time.monotonic, deadline=deadline(), secret=b"swordfish")
    with sock:
        introduce(Wire(), evolve(hello, secret=True), side)  # type: ignore[arg-type]
    first, proved = sent
    return first, proved


def test_operations_still_work_after_all_of_this_over_ipv6() -> None:
    if not _has_ipv6():
        pytest.skip("this machine has no IPv6")
    with sides(listen=["[::1]:0"], secret_variable="SECRET", connections=1) as (near, far):
        connection = near.connect(far.channel.export())
        assert outcome(near.read(connection, [whole(500_000)])) == [None]
        assert outcome(near.write(connection, [whole(500_000, 500_000)])) == [None]
        assert near.memory[:1_000_000] == far.memory[:1_000_000]


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True
