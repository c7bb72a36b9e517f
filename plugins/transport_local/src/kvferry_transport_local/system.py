"""What the system has to say about other processes: who they are, whether they live, whom they trust."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
from pathlib import Path

from attrs import frozen

_SET_PTRACER = 0x59616D61  # PR_SET_PTRACER: "Yama"
_ANY = ctypes.c_ulong(-1).value
_CREDENTIALS = struct.Struct("3i")
_NO_LONGER = select.POLLHUP | select.POLLRDHUP | select.POLLERR | select.POLLNVAL


@frozen
class Credentials:
    """Who is behind a Unix socket, told by the kernel. ``pid`` is 0 for a process that lives in another
    process namespace."""

    pid: int
    uid: int

    @classmethod
    def of(cls, end: socket.socket) -> Credentials:
        told = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        pid, uid, _ = _CREDENTIALS.unpack(told)
        return cls(pid, uid)


def ended(end: int, process: int) -> str:
    """Why the peer behind socket ``end`` and process descriptor ``process`` (or -1) is gone; empty while
    it lives. Does not wait. A peer that was killed while a child of it keeps the socket open is gone."""
    asked = select.poll()
    asked.register(end, select.POLLRDHUP)
    if process >= 0:
        asked.register(process, select.POLLIN)
    for found, event in asked.poll(0):
        if found == process:
            return "its process has ended"
        if event & _NO_LONGER:
            return "it closed the connection"
    return ""


def let_read(pid: int) -> bool:
    """Let process ``pid`` read the memory of this one where Yama forbids it by default; 0 takes that back,
    -1 lets everybody of this user. False where the system knows no such thing, which harms nothing."""
    call = ctypes.CDLL(None).prctl
    call.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong, ctypes.c_ulong)
    allowed: int = call(_SET_PTRACER, _ANY if pid < 0 else pid, 0, 0, 0)
    return allowed == 0


def boot_id(root: str = "/") -> str:
    """The same for all processes of a host between two of its starts; empty where it is not told."""
    with contextlib.suppress(OSError):
        return (Path(root) / "proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def place_in_file(address: int, length: int, fd: int) -> int | None:
    """From where on the memory file ``fd`` holds ``length`` bytes at ``address``; ``None`` where the memory
    is not a shared mapping of it as a whole, so that whoever maps the file would find other bytes."""
    found = os.fstat(fd)
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
    begin: int | None = None
    at, end = address, address + max(length, 1)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        low, high = (int(part, 16) for part in fields[0].split("-"))
        if high <= at or low > at:
            continue
        if fields[1][3] != "s" or fields[3] != device or int(fields[4]) != found.st_ino:
            return None
        offset = int(fields[2], 16) + at - low
        if begin is None:
            begin = offset
        elif offset != begin + at - address:
            return None
        at = high
        if at >= end:
            return begin
    return None
