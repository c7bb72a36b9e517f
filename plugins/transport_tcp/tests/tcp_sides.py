"""Channels with memory of their own, and a peer that is no channel but a bare socket."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from attrs import evolve

from kvferry.api import (
    ChannelContext,
    Connection,
    ErrorKind,
    KVFerryError,
    Region,
    RemoteOp,
    Span,
    Ticket,
    TransferStatus,
)
from kvferry_transport_tcp.address import Address
from kvferry_transport_tcp.channel import TCPChannel
from kvferry_transport_tcp.export import Export
from kvferry_transport_tcp.handshake import Side as HandshakeSide
from kvferry_transport_tcp.handshake import introduce
from kvferry_transport_tcp.options import TCPOptions
from kvferry_transport_tcp.sockets import Ended, receive_by
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    NONCE_BYTES,
    Header,
    Hello,
    Kind,
    RemotePiece,
    Role,
    decode_header,
    encode_pieces,
)

ARENA = "arena"
PATIENCE = 20.0
"""Seconds after which something that should end is taken for hanging."""


class Memory:
    """Bytes at a fixed address, looked at by copies."""

    def __init__(self, length: int) -> None:
        self._buffer = ctypes.create_string_buffer(os.urandom(length), length)
        self.region = Region(
            name=ARENA, address=ctypes.addressof(self._buffer), length=length, keep_alive=self._buffer
        )

    @property
    def raw(self) -> bytes:
        return self._buffer.raw

    def __getitem__(self, at: slice) -> bytes:
        return bytes(memoryview(self._buffer)[at])


class Side:
    """An open channel that has registered one region."""

    def __init__(self, length: int = 1 << 20, *, rank: int = 0, **options: Any) -> None:
        self.memory = Memory(length)
        self.channel = TCPChannel(TCPOptions(**options))
        self.context = ChannelContext(
            name="tcp",
            instance="test",
            epoch=os.urandom(16),
            rank=rank,
            world_size=rank + 1,
            variables={"SECRET": "swordfish", "OTHER": "herring"},
        )
        self.channel.open(self.context)
        self.channel.register(self.memory.region)

    @property
    def address(self) -> tuple[str, int]:
        address = Export.parse(self.channel.export()).address
        return address.host, address.port

    def through(self, address: tuple[str, int]) -> bytes:
        """What it exports, with another address."""
        return evolve(Export.parse(self.channel.export()), address=Address(*address)).to_bytes()

    def connect(self, exported: bytes) -> Connection:
        return self.channel.connect(exported, deadline())

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], seconds: float = PATIENCE
    ) -> Ticket[TransferStatus]:
        return self.channel.read(connection, operations, deadline(seconds))

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], seconds: float = PATIENCE
    ) -> Ticket[TransferStatus]:
        return self.channel.write(connection, operations, deadline(seconds))

    def close(self) -> None:
        self.channel.close(deadline())


def deadline(seconds: float = PATIENCE) -> float:
    return time.monotonic() + seconds


def whole(length: int, offset: int = 0) -> RemoteOp:
    """The same bytes on both sides."""
    return RemoteOp(Span(ARENA, offset, length), ARENA, offset)


def outcome(ticket: Ticket[TransferStatus]) -> list[ErrorKind | None]:
    """The kinds of what failed, ``None`` for what did not."""
    assert ticket.wait(PATIENCE), "a ticket does not end"
    return [result.error.kind if result.error else None for result in ticket.results]


@contextmanager
def sides(*, length: int = 1 << 20, **options: Any) -> Iterator[tuple[Side, Side]]:
    """Two channels with the same options, closed in the end."""
    near, far = Side(length, **options), Side(length, **options)
    try:
        yield near, far
    finally:
        near.close()
        far.close()


def assert_serves(near: Side, far: Side, exported: bytes | None = None) -> None:
    """A new connection works."""
    connection = near.connect(exported or far.channel.export())
    assert outcome(near.read(connection, [whole(1000)])) == [None]
    assert near.memory[:1000] == far.memory[:1000]
    connection.close()


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds within the patience."""
    end = deadline()
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


class BarePeer:
    """A connection to ``far`` that does exactly what a test wants: its control connection and one lane."""

    def __init__(self, far: Side, secret: bytes = b"") -> None:
        self._far = far
        self._secret = secret
        self._connection = os.urandom(16)
        self.control, _ = self.open(Role.CONTROL)
        self._hear_regions()
        self.sock, welcome = self.open(Role.LANE)
        self._ahead = welcome.time / 1e6 - time.monotonic()
        self._number = 0

    def hello(self, role: Role, **other: Any) -> Hello:
        hello = Hello(
            role=role,
            secret=bool(self._secret),
            nonce=os.urandom(NONCE_BYTES),
            connection=self._connection,
            wanted_epoch=self._far.context.epoch,
            epoch=bytes(16),
            rank=0,
            instance="bare",
        )
        return evolve(hello, **other)

    def _hear_regions(self) -> None:
        """Up to the end of the list: before, a lane may come too early."""
        while True:
            header = decode_header(receive_by(self.control, HEADER_BYTES, deadline(), time.monotonic))
            receive_by(self.control, header.body, deadline(), time.monotonic)
            if header.kind is Kind.TIME:
                return

    def open(self, role: Role, **other: Any) -> tuple[socket.socket, Header]:
        """One more socket. Raises like :func:`introduce`."""
        sock = socket.create_connection(self._far.address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        side = HandshakeSide(clock=time.monotonic, deadline=deadline(), secret=self._secret)
        try:
            return sock, introduce(sock, self.hello(role, **other), side)
        except BaseException:
            sock.close()
            raise

    def request(self, kind: Kind, pieces: Sequence[RemotePiece], seconds: float = PATIENCE) -> bytes:
        """A request as it goes over the wire, without data."""
        self._number += 1
        body = encode_pieces(pieces)
        time_there = int((time.monotonic() + seconds + self._ahead) * 1e6)
        header = Header(
            kind, len(pieces), len(body), sum(piece.length for piece in pieces), self._number, time_there
        )
        return header.to_bytes() + body

    def answer(self) -> tuple[Header, bytes, bytes]:
        """The next answer: header, body and data."""
        header = decode_header(receive_by(self.sock, HEADER_BYTES, deadline(), time.monotonic))
        body = receive_by(self.sock, header.body, deadline(), time.monotonic)
        return header, body, receive_by(self.sock, header.data, deadline(), time.monotonic)

    def receipt(self, number: int) -> None:
        self.sock.sendall(Header(Kind.RECEIPT, number=number).to_bytes())

    def is_cut(self) -> bool:
        """Whether the other side ends the lane. Waits for it."""
        return ends(self.sock)

    def close(self) -> None:
        self.sock.close()
        self.control.close()


def ends(sock: socket.socket) -> bool:
    """Whether the other side ends this, after whatever it still has to say."""
    try:
        while True:
            receive_by(sock, 1, deadline(), time.monotonic)
    except (Ended, ConnectionError):
        return True
    except TimeoutError:
        return False


@contextmanager
def bare_peer(far: Side, secret: bytes = b"") -> Iterator[BarePeer]:
    peer = BarePeer(far, secret)
    try:
        yield peer
    finally:
        peer.close()


def kind_of(call: Callable[[], object]) -> ErrorKind:
    """The kind of the error that the call raises."""
    with pytest.raises(KVFerryError) as caught:
        call()
    assert caught.value.remedy, "an error without a remedy"
    return caught.value.kind
