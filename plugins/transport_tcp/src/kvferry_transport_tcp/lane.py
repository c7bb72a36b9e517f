"""One TCP connection that carries bytes between us and a peer, with the thread that drives it."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections import deque
from typing import Protocol

from kvferry.api import KVFerryError
from kvferry_transport_tcp.faults import closed, error_text, garbled, lost
from kvferry_transport_tcp.jobs import Frame
from kvferry_transport_tcp.sockets import Cuttable, receive_into, send_all
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    Header,
    Kind,
    PieceStatus,
    WireError,
    decode_header,
    decode_statuses,
    encode_pieces,
)

_log = logging.getLogger(__name__)

WINDOW = 2
"""Reads that are asked for before the first is answered, so that the peer never waits for the next."""


class Desk(Protocol):
    """Where a lane gets its work, and tells what came of it: the connection."""

    peer: str

    def take(self, lane: Lane) -> Frame | None:
        """The next frame for a lane. Waits for one if the lane has none, and then ``None`` is the end.

        Raises :class:`KVFerryError` when the lane's socket was cut while there was nothing on it."""
        ...

    def reach(self, lane: Lane, frame: Frame) -> socket.socket:
        """A fresh socket to the peer, which ``lane`` drops when it is told to from the first moment on."""
        ...

    def wire_deadline(self, frame: Frame) -> int:
        """The frame's deadline on the peer's clock, in microseconds."""
        ...

    def landed(self, lane: Lane, statuses: list[PieceStatus], time: int) -> None:
        """The oldest frame of the lane was answered at this time of the peer's clock."""
        ...

    def drop(self, lane: Lane, error: KVFerryError) -> None:
        """Close the lane's socket. Nothing that it had can touch memory here any more, and its frames have
        failed with this error."""
        ...


class Lane:
    """Asks for frames, one after the other, and receives straight into memory.

    ``flying``, ``sock`` and ``doomed`` are touched under the desk's lock, ``flying`` by the lane's own thread
    alone. ``run`` is for a thread of its own.
    """

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._header = memoryview(bytearray(HEADER_BYTES))
        self._numbers = 0
        self.flying: deque[Frame] = deque()
        self.sock: Cuttable | None = None
        self.doomed = False

    def doom(self) -> None:
        """What the lane has must not arrive any more. Under the desk's lock."""
        self.doomed = True
        if self.sock is not None:
            self.sock.cut()

    def run(self) -> None:
        sock = None if self.sock is None else self.sock.sock
        while True:
            try:
                frame = self._desk.take(self)
                if frame is None and not self.flying:
                    break
                if frame is not None:
                    if sock is None:
                        sock = self._desk.reach(self, frame)
                    self._ask(sock, frame)
                    continue
                assert sock is not None  # something flies
                self._receive(sock)
                continue
            except KVFerryError as error:
                told = error
            except WireError as error:
                told = garbled(self._desk.peer, str(error))
            except OSError as error:
                told = lost(self._desk.peer, error_text(error))
            except Exception as error:  # noqa: BLE001 - a defect must not leave tickets without an end
                _log.exception("kvferry: a connection of the TCP channel failed")
                told = lost(self._desk.peer, repr(error))
            self._desk.drop(self, told)
            sock = None
        self._desk.drop(self, closed("connection"))

    def _ask(self, sock: socket.socket, frame: Frame) -> None:
        self._numbers += 1
        frame.number = self._numbers
        body = encode_pieces([piece.remote for piece in frame.pieces])
        header = Header(
            Kind.WRITE if frame.job.writing else Kind.READ,
            pieces=len(frame.pieces),
            body=len(body),
            data=sum(piece.remote.length for piece in frame.pieces),
            number=frame.number,
            time=self._desk.wire_deadline(frame),
        )
        data = [piece.view for piece in frame.pieces] if frame.job.writing else []
        send_all(sock, [header.to_bytes() + body, *data])

    def _receive(self, sock: socket.socket) -> None:
        frame = self.flying[0]
        receive_into(sock, [self._header])
        header = decode_header(self._header)
        wanted = Kind.WRITTEN if frame.job.writing else Kind.DATA
        if header.kind is not wanted or header.number != frame.number:
            raise WireError(
                f"{header.kind.name} {header.number} came in place of {wanted.name} {frame.number}"
            )
        if header.pieces != len(frame.pieces):
            raise WireError(f"{header.pieces} results answer {len(frame.pieces)} pieces")
        body = memoryview(bytearray(header.body))
        receive_into(sock, [body])
        statuses = decode_statuses(len(frame.pieces), body)
        if not frame.job.writing:
            self._receive_data(sock, frame, header, statuses)
        self._desk.landed(self, statuses, header.time)
        with contextlib.suppress(OSError):  # the next call finds out
            send_all(sock, [Header(Kind.RECEIPT, number=frame.number).to_bytes()])

    def _receive_data(
        self, sock: socket.socket, frame: Frame, header: Header, statuses: list[PieceStatus]
    ) -> None:
        come = [
            piece for piece, status in zip(frame.pieces, statuses, strict=True) if status is PieceStatus.DONE
        ]
        if sum(piece.remote.length for piece in come) != header.data:
            raise WireError(f"{header.data} bytes are not what was asked for")
        receive_into(sock, [piece.view for piece in come])
