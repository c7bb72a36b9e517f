"""The side that owns the memory: answers requests of peers, each connection on a thread of its own."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Protocol

from kvferry_transport_tcp.handshake import MICROSECONDS, stamp
from kvferry_transport_tcp.registry import Registered, Registry
from kvferry_transport_tcp.sockets import Clock, Cuttable, Ended, receive_into, send_all
from kvferry_transport_tcp.watch import Watch
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    Header,
    Hello,
    Kind,
    PieceStatus,
    RemotePiece,
    WireError,
    decode_header,
    decode_pieces,
)

_MOST_UNCONFIRMED = 16
"""Answers of one connection that nobody confirmed. Ours confirms each before the one after the next."""
_SCRATCH_BYTES = 64 << 10
_SLICE_BYTES = 1 << 20
"""What a write may put into place behind its deadline at the very most."""


class Served(Protocol):
    """One connection of a peer, after its opening."""

    def run(self) -> None:
        """Serve until one side ends. Raises ``OSError`` and :class:`WireError`."""
        ...

    def cut(self) -> None: ...


class ServedControl:
    """Tells a peer of our regions. Whatever comes from there but an end is a defect."""

    def __init__(self, line: Cuttable, hello: Hello) -> None:
        self.line = line
        self.sock = line.sock
        self.hello = hello

    def tell(self, frames: bytes) -> None:
        """Send, or cut the connection: a peer that does not read must not keep anybody waiting."""
        try:
            sent = self.sock.send(frames, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            sent = -1
        if sent != len(frames):
            self.cut()

    def run(self) -> None:
        with contextlib.suppress(Ended):
            receive_into(self.sock, [memoryview(bytearray(1))])
            raise WireError("a peer spoke where it has to listen")

    def cut(self) -> None:
        self.line.cut()


class ServedLane:
    """Answers reads and writes. Bounds and deadlines are looked at here, whatever the peer believes."""

    def __init__(self, line: Cuttable, hello: Hello, registry: Registry, watch: Watch, clock: Clock) -> None:
        self.line = line
        self.sock = line.sock
        self.hello = hello
        self._registry = registry
        self._watch = watch
        self._clock = clock
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._body = memoryview(bytearray())
        self._entered: dict[int, list[Registered | None]] = {}
        """What each answer that is not confirmed yet holds, by its number."""
        self.over = threading.Event()
        """Set when nothing of this lane can touch memory any more."""

    def cut(self) -> None:
        self.line.cut()

    def run(self) -> None:
        try:
            with contextlib.suppress(Ended):
                while True:
                    receive_into(self.sock, [self._header])
                    self._answer(decode_header(self._header))
        finally:
            # Nothing is received any more, so nothing can touch what is let go of here.
            for entered in self._entered.values():
                self._registry.leave(self, entered)
            self._entered.clear()
            self.over.set()

    def _answer(self, header: Header) -> None:
        if header.kind is Kind.RECEIPT:
            entered = self._entered.pop(header.number, None)
            if entered is None:
                raise WireError(f"nothing with the number {header.number} waits for a receipt")
            self._registry.leave(self, entered)
            return
        if header.kind not in (Kind.READ, Kind.WRITE):
            raise WireError(f"{header.kind.name} came where requests come")
        if len(self._entered) >= _MOST_UNCONFIRMED or header.number in self._entered:
            raise WireError("receipts are missing")
        pieces = decode_pieces(header, self._receive_body(header.body))
        deadline = header.time / MICROSECONDS
        in_time = self._clock() < deadline
        entered = self._registry.enter(self, pieces) if in_time else [None] * len(pieces)
        self._entered[header.number] = entered
        watched = self._watch.add(deadline, self.cut) if in_time else None
        try:
            if header.kind is Kind.READ:
                self._send(header, pieces, entered, in_time)
            else:
                self._receive(header, pieces, entered, in_time, deadline)
        finally:
            self._watch.forget(watched)

    def _receive_body(self, length: int) -> memoryview:
        if length > len(self._body):
            self._body = memoryview(bytearray(length))
        body = self._body[:length]
        receive_into(self.sock, [body])
        return body

    def _send(
        self,
        header: Header,
        pieces: list[RemotePiece],
        entered: list[Registered | None],
        in_time: bool,
    ) -> None:
        data = [
            region.view[piece.offset : piece.offset + piece.length]
            for piece, region in zip(pieces, entered, strict=True)
            if region is not None
        ]
        body = _statuses(entered, in_time)
        answer = Header(
            Kind.DATA,
            pieces=len(pieces),
            body=len(body),
            data=sum(len(view) for view in data),
            number=header.number,
            time=stamp(self._clock),
        )
        send_all(self.sock, [answer.to_bytes() + body, *data])

    def _receive(
        self,
        header: Header,
        pieces: list[RemotePiece],
        entered: list[Registered | None],
        in_time: bool,
        deadline: float,
    ) -> None:
        views: list[memoryview] = []
        for piece, region in zip(pieces, entered, strict=True):
            if region is not None:
                views.append(region.view[piece.offset : piece.offset + piece.length])
                continue
            # What may not be written comes all the same, and has to be got out of the way.
            self._receive_by(views, deadline)
            views = []
            self._throw_away(piece.length)
        self._receive_by(views, deadline)
        body = _statuses(entered, in_time)
        answer = Header(Kind.WRITTEN, len(pieces), len(body), number=header.number, time=stamp(self._clock))
        send_all(self.sock, [answer.to_bytes() + body])

    def _receive_by(self, views: list[memoryview], deadline: float) -> None:
        """Fill ``views``. The watch cuts the socket at the deadline; it may come late to it where another
        thread keeps the interpreter, and for that the time is looked at in between."""
        for some in _slices(views):
            if self._clock() >= deadline:
                raise Ended("the deadline of a write is over")
            receive_into(self.sock, some)

    def _throw_away(self, length: int) -> None:
        scratch = memoryview(bytearray(min(length, _SCRATCH_BYTES)))
        while length:
            receive_into(self.sock, [scratch[:length]])
            length -= min(length, len(scratch))


def _slices(views: list[memoryview]) -> Iterator[list[memoryview]]:
    """The same bytes in lists of at most ``_SLICE_BYTES``."""
    some: list[memoryview] = []
    room = _SLICE_BYTES
    for view in views:
        while len(view) > room:
            yield [*some, view[:room]]
            view, some, room = view[room:], [], _SLICE_BYTES
        some.append(view)
        room -= len(view)
    if some:
        yield some


def _statuses(entered: list[Registered | None], in_time: bool) -> bytes:
    """The body of an answer: a byte for each piece, or nothing where all went well."""
    if None not in entered:
        return b""
    if not in_time:
        return bytes([PieceStatus.LATE]) * len(entered)
    return bytes(PieceStatus.OUTSIDE if region is None else PieceStatus.DONE for region in entered)
