"""Whether this process may read the memory of a peer: found out by doing it."""

from __future__ import annotations

import ctypes
import errno
import secrets
from collections.abc import Callable

from kvferry_transport_local.failures import errno_text
from kvferry_transport_local.moving import Copies, Movement

PROBE_BYTES = 16

Prober = Callable[[int, int, bytes], str]
"""Asked with a process, an address in it and the bytes that lie there; why they cannot be read, or empty."""

_FORBIDDEN = (
    "; Yama (sysctl kernel.yama.ptrace_scope), a sandbox, or a peer that may not be dumped forbids it, and "
    "with several peers Yama wants the option  readers: any"
)


class Probe:
    """Random bytes of ours that a peer reads to try."""

    def __init__(self) -> None:
        self.token = secrets.token_bytes(PROBE_BYTES)
        self._memory = ctypes.create_string_buffer(self.token, PROBE_BYTES)
        self.address = ctypes.addressof(self._memory)


def probe_with(movement: Movement) -> Prober:
    def probe(pid: int, address: int, token: bytes) -> str:
        if pid <= 0:
            return "its process cannot be seen from here, as in another process namespace"
        memory = ctypes.create_string_buffer(PROBE_BYTES)
        (moved,) = movement.read(pid, Copies([ctypes.addressof(memory)], [address], [PROBE_BYTES]))
        if moved < 0:
            remedy = _FORBIDDEN if -moved in (errno.EPERM, errno.EACCES) else ""
            return f"the system answers {errno_text(-moved)}{remedy}"
        if memory.raw != token:
            return "what was read is not what the peer has there"
        return ""

    return probe
