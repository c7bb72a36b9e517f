"""What two sides say to each other: lengths first, so that nothing longer is taken than was announced."""

import os
import socket
import struct

from kvferry.api import ErrorKind, KVFerryError

MAGIC = b"acme1"
EXPORT = struct.Struct("<5s16sI")  # magic, epoch, rank: all of one length, so that nothing hides behind it
ASK = struct.Struct("<HqQ")  # bytes of the region's name, offset, length
ANSWER = struct.Struct("<BQ")  # 0 and the bytes that follow, or 1 and nothing
LARGEST_LIST = 1 << 20
_CREDENTIALS = struct.Struct("3i")


def name_of(prefix: str, epoch: bytes, rank: int) -> str:
    """An abstract name: it has no file, and goes with its last socket."""
    return f"\0{prefix}-{epoch.hex()}-{rank}"


def demand_same_user(sock: socket.socket) -> None:
    """Everybody on the host can connect to an abstract name."""
    found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise KVFerryError(
            "the peer is of another user", kind=ErrorKind.COMPATIBILITY, why=f"its user is {user}"
        )


def receive(sock: socket.socket, length: int, waited=lambda: None) -> bytearray:
    """Exactly so many bytes. ``waited`` is called whenever the socket's time is over, and may raise. Raises
    ``OSError`` when the other side has gone."""
    data = bytearray(length)
    view, at = memoryview(data), 0
    while at < length:
        try:
            count = sock.recv_into(view[at:])
        except TimeoutError:
            waited()
            continue
        if count == 0:
            raise ConnectionError("the peer has gone")
        at += count
    return data
