"""How two sides find out that they mean each other, and prove that they know one secret.

Four frames: ``HELLO`` and ``CHALLENGE`` carry a nonce of each side, ``PROOF`` and ``WELCOME`` an
HMAC-SHA256 over both of these frames as they were sent, under the secret and with a word for the side that
made it. So neither can be used again, nor sent back to whoever made it, and nothing in the first two can be
changed on the way.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable

from attrs import frozen

from kvferry_transport_tcp.sockets import Clock, receive_by, send_by
from kvferry_transport_tcp.wire import (
    HEADER_BYTES,
    MAX_NAME_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    WIRE_VERSION,
    Header,
    Hello,
    Kind,
    Refusal,
    WireError,
    decode_header,
    version_of,
)

CLIENT = b"kvferry tcp: who connects\0"
SERVER = b"kvferry tcp: who listens\0"
MICROSECONDS = 1_000_000


class Refused(Exception):
    """One side does not want the connection."""

    def __init__(self, reason: Refusal) -> None:
        super().__init__(reason.name)
        self.reason = reason


@frozen(kw_only=True)
class Side:
    """What both sides of an opening need."""

    clock: Clock
    deadline: float
    secret: bytes
    """Empty where none is set."""


def proof(secret: bytes, side: bytes, hello: bytes, challenge: bytes) -> bytes:
    """What only somebody can know who knows the secret; without a secret it proves nothing."""
    transcript = len(hello).to_bytes(4, "little") + hello + challenge
    return hmac.digest(secret, side + transcript, "sha256")


def introduce(sock: socket.socket, hello: Hello, side: Side) -> Header:
    """Open a connection from the side that made it. Returns the welcome, which has the peer's time.

    Raises :class:`Refused`, :class:`WireError`, ``TimeoutError`` and other ``OSError``.
    """
    body = hello.to_bytes()
    first = Header(Kind.HELLO, body=len(body)).to_bytes() + body
    send_by(sock, first, side.deadline, side.clock)
    header, nonce, challenge = _receive(sock, Kind.CHALLENGE, side)
    if bool(header.pieces) != hello.secret:
        raise Refused(Refusal.NO_SECRET_HERE if header.pieces else Refusal.NO_SECRET_THERE)
    if len(nonce) != NONCE_BYTES:
        raise WireError("a challenge without a nonce")
    ours = proof(side.secret, CLIENT, first, challenge)
    send_by(sock, Header(Kind.PROOF, body=len(ours)).to_bytes() + ours, side.deadline, side.clock)
    welcome, theirs, _ = _receive(sock, Kind.WELCOME, side)
    if not hmac.compare_digest(theirs, proof(side.secret, SERVER, first, challenge)):
        raise Refused(Refusal.WRONG_SECRET)
    return welcome


def examine(
    sock: socket.socket, side: Side, nonce: bytes, accept: Callable[[Hello], Refusal | None]
) -> Hello:
    """Open a connection on the side that listens: whoever is there has proved the secret when this returns.
    The caller says who is welcome, and then sends :func:`welcome` with what comes back.

    Raises :class:`Refused` after the peer was told, :class:`WireError`, ``TimeoutError`` and other
    ``OSError``.
    """
    _header, body, first = _receive(sock, Kind.HELLO, side)
    hello = Hello.parse(body)
    if hello.secret != bool(side.secret):
        _refuse(sock, side, Refusal.NO_SECRET_HERE if side.secret else Refusal.NO_SECRET_THERE)
    challenge = Header(Kind.CHALLENGE, pieces=int(bool(side.secret)), body=len(nonce)).to_bytes() + nonce
    send_by(sock, challenge, side.deadline, side.clock)
    _, theirs, _ = _receive(sock, Kind.PROOF, side)
    if not hmac.compare_digest(theirs, proof(side.secret, CLIENT, first, challenge)):
        _refuse(sock, side, Refusal.WRONG_SECRET)
    reason = accept(hello)
    if reason is not None:
        _refuse(sock, side, reason)
    ours = proof(side.secret, SERVER, first, challenge)
    send_by(
        sock,
        Header(Kind.WELCOME, body=PROOF_BYTES, time=stamp(side.clock)).to_bytes() + ours,
        side.deadline,
        side.clock,
    )
    return hello


def stamp(clock: Clock) -> int:
    """This moment, as frames carry it."""
    return int(clock() * MICROSECONDS)


def refusal(reason: Refusal) -> bytes:
    """The frame that tells a peer."""
    return Header(Kind.REFUSED, pieces=reason).to_bytes()


def _refuse(sock: socket.socket, side: Side, reason: Refusal) -> None:
    send_by(sock, refusal(reason), side.deadline, side.clock)
    raise Refused(reason)


def _receive(sock: socket.socket, kind: Kind, side: Side) -> tuple[Header, bytes, bytes]:
    """The next frame, which has to be of this kind: header, body, and both as they came."""
    head = receive_by(sock, HEADER_BYTES, side.deadline, side.clock)
    header = decode_header(head, any_version=True)
    version = version_of(head)
    if header.kind is Kind.REFUSED:
        receive_by(sock, min(header.body, MAX_NAME_BYTES), side.deadline, side.clock)
        try:
            raise Refused(Refusal(header.pieces))
        except ValueError:
            raise WireError(f"it refuses for the reason {header.pieces}, which there is not") from None
    if version != WIRE_VERSION:
        if kind is Kind.HELLO:
            _refuse(sock, side, Refusal.VERSION)
        raise Refused(Refusal.VERSION)
    if header.kind is not kind:
        raise WireError(f"{header.kind.name} came in place of {kind.name}")
    body = receive_by(sock, header.body, side.deadline, side.clock)
    return header, body, head + body
