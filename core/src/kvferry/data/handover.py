"""Passes the descriptor of a memory file to another process over a Unix socket."""

from __future__ import annotations

import os
import socket
import struct

from kvferry.api import ErrorKind, KVFerryError

_LENGTH = struct.Struct("<I")
_DESCRIPTOR = struct.Struct("i")
_ROOM = socket.CMSG_SPACE(8 * _DESCRIPTOR.size)  # more than one, so that a wrong count can be told


def send_fd(connection: socket.socket, fd: int, message: bytes) -> None:
    """Send one descriptor with a message that says what it is. The sender keeps its own descriptor.

    ``connection`` is a Unix stream socket; blocks as its timeout says.
    """
    frame = _LENGTH.pack(len(message)) + message
    sent = socket.send_fds(connection, [frame], [fd])
    connection.sendall(frame[sent:])


def recv_fd(connection: socket.socket, *, limit: int = 1 << 16) -> tuple[bytes, int]:
    """The message and the descriptor of one :func:`send_fd`; the descriptor is the caller's to close.

    Raises :class:`KVFerryError` of kind PROTOCOL for anything but exactly one descriptor with a
    message of at most ``limit`` bytes; no descriptor stays open then. Blocks as the socket's timeout
    says.
    """
    fds: list[int] = []
    try:
        message = _receive_frame(connection, fds, limit)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds[0]


def _receive_frame(connection: socket.socket, fds: list[int], limit: int) -> bytes:
    # Descriptors arrive with the first byte. They must not be inherited by programs that this process
    # starts; socket.recv_fds does not pass its flags on in Python 3.11, so it cannot ask for that.
    head, ancillary, flags, _ = connection.recvmsg(_LENGTH.size, _ROOM, socket.MSG_CMSG_CLOEXEC)
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(data) - len(data) % _DESCRIPTOR.size
            fds.extend(fd for (fd,) in _DESCRIPTOR.iter_unpack(data[:whole]))
    if flags & socket.MSG_CTRUNC:
        raise _unexpected("descriptors were lost; is the limit on open files reached?")
    head += _receive(connection, _LENGTH.size - len(head))
    if len(fds) != 1:
        raise _unexpected(f"{len(fds)} descriptors came where one should")
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        raise _unexpected(f"the message has {length} bytes, more than {limit}")
    return _receive(connection, length)


def _receive(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise _unexpected("the connection ended in the middle of a message")
        parts += part
    return parts


def _unexpected(why: str) -> KVFerryError:
    return KVFerryError(
        "no descriptor could be received", kind=ErrorKind.PROTOCOL, where="local socket", why=why
    )
