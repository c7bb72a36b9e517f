"""A process with a local channel, driven over its standard streams: one JSON object per line, each way.

Run as ``python -m plugins.transport_local.tests.local_peer``.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import numpy as np

from kvferry.api import Connection, KVFerryError
from plugins.transport_local.tests.local_bench import End, submit, whole

_SET_DUMPABLE = 4
_CAPABILITIES_VERSION = 0x20080522


class Peer:
    """What the other process can ask for: every public method, by name."""

    def __init__(self) -> None:
        self._end: End | None = None
        self._connections: list[Connection] = []

    def give_up_rights(self) -> None:
        """What root may do beyond others."""
        library = ctypes.CDLL(None, use_errno=True)
        header = (ctypes.c_uint32 * 2)(_CAPABILITIES_VERSION, 0)
        if library.capset(header, (ctypes.c_uint32 * 6)()) != 0:
            raise OSError(ctypes.get_errno(), "capset")

    def become(self, user: int) -> None:
        os.setresuid(user, user, user)

    def set_dumpable(self, dumpable: int) -> None:
        assert ctypes.CDLL(None).prctl(_SET_DUMPABLE, dumpable, 0, 0, 0) == 0

    def open(self, memory_file: bool, byte: int) -> str:
        self._end = End.open(memory_file=memory_file)
        self._end.bytes[:] = byte
        return self._end.channel.export().hex()

    def connect(self, export: str) -> int:
        assert self._end is not None
        found = self._end.channel.connect(bytes.fromhex(export), time.monotonic() + 20)
        self._connections.append(found)
        return len(self._connections) - 1

    def move(self, verb: str, connection: int, length: int) -> list[str]:
        """``["DONE"]``, or the failure's kind and its text."""
        assert self._end is not None
        ticket = submit(verb, self._end, self._connections[connection], whole(length))
        assert ticket.wait(20)
        error = ticket.results[0].error
        return ["DONE"] if error is None else [error.kind.name, str(error)]

    def values(self) -> list[int]:
        """Which bytes there are in its memory."""
        assert self._end is not None
        found: list[int] = np.unique(self._end.bytes).tolist()
        return found

    def leave_a_child(self) -> int:
        """A process that keeps all our descriptors and sleeps."""
        pid = os.fork()
        if pid == 0:
            time.sleep(60)
            os._exit(0)
        return pid

    def close(self) -> None:
        if self._end is not None:
            self._end.close()


def main() -> None:
    peer = Peer()
    for line in sys.stdin:
        asked = json.loads(line)
        told: dict[str, Any]
        try:
            told = {"answer": getattr(peer, asked["call"])(*asked["arguments"])}
        except KVFerryError as error:
            told = {"kind": error.kind.name, "text": str(error)}
        except Exception as error:  # noqa: BLE001 - told to the test
            told = {"text": repr(error)}
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
