"""A peer in a process of its own, driven over its standard streams: one JSON object per line, each way.

Imports little, because it is started often. Run as ``python -m kvferry.testing.channel_child
package.module:make``, by :class:`kvferry.testing.conformance.channel_process.PeerProcess`.
"""

from __future__ import annotations

import base64
import importlib
import json
import os
import sys
import threading
import time
import traceback
from typing import Any

from kvferry.api import Channel, ChannelContext, Connection, KVFerryError, RemoteOp, Span
from kvferry.testing.guarded import MEMORY, GuardedMemory, side_memory

_NUMBER = 15
"""That of a side; those of the other process begin with 0."""


def make_subject(path: str) -> Channel:
    """Call the function at an import path ``package.module:name``."""
    module, _, name = path.partition(":")
    channel: Channel = getattr(importlib.import_module(module), name)()
    return channel


class _Peer:
    """What the other process can ask for: every public method, by name, with JSON for arguments."""

    def __init__(self, subject: str) -> None:
        self._channel = make_subject(subject)
        self._memory: GuardedMemory | None = None
        self._connections: list[Connection] = []

    # -- the channel -----------------------------------------------------------------------------

    def open(self, instance: str, epoch: str, length: int) -> str:
        """Open the channel and register its memory; gives what it exports."""
        memory = self._memory = side_memory(length, _NUMBER)
        context = ChannelContext(
            name="peer", instance=instance, epoch=bytes.fromhex(epoch), variables=dict(os.environ)
        )
        self._channel.open(context)
        self._channel.register(memory.region)
        return _text(self._channel.export())

    def connect(self, peer: str, seconds: float) -> int:
        """Gives the connection's number."""
        self._connections.append(self._channel.connect(_data(peer), time.monotonic() + seconds))
        return len(self._connections) - 1

    def move(self, verb: str, number: int, local: list[int], offset: int, seconds: float) -> str:
        """One operation; gives its status, or the kind of its failure."""
        call = self._channel.read if verb == "read" else self._channel.write
        operation = RemoteOp(Span(MEMORY, *local), MEMORY, offset)
        ticket = call(self._connections[number], [operation], time.monotonic() + seconds)
        if not ticket.wait(seconds * 2):
            return "never ended"
        (result,) = ticket.results
        return result.status.name if result.error is None else result.error.kind.name

    def move_for_ever(self, verb: str, number: int, local: list[int], offset: int, seconds: float) -> None:
        """Go on with this in the background, until the process ends."""
        threading.Thread(
            target=self._for_ever, args=(verb, number, local, offset, seconds), daemon=True
        ).start()

    def _for_ever(self, *arguments: Any) -> None:
        while self.move(*arguments) == "DONE":
            pass

    def close(self, seconds: float) -> None:
        self._channel.close(time.monotonic() + seconds)

    # -- its memory ------------------------------------------------------------------------------

    def take(self, data: str) -> Span:
        return self._opened().take(_data(data))

    def reserve(self, length: int) -> Span:
        return self._opened().reserve(length)

    def bytes_of(self, span: list[Any]) -> str:
        return _text(self._opened().bytes_of(Span(*span)))

    def settle(self, span: list[Any], scribble: bool) -> None:
        self._opened().settle(Span(*span), scribble)

    def trespasses(self) -> list[str]:
        return self._opened().trespasses()

    def _opened(self) -> GuardedMemory:
        assert self._memory is not None, "open comes first"
        return self._memory


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _data(text: str) -> bytes:
    return base64.b64decode(text)


def main(subject: str) -> None:
    """Serve until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a plugin prints is no answer
    peer = _Peer(subject)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = {"answer": getattr(peer, asked["call"])(*asked["arguments"])}
        except KVFerryError as error:
            answer = {"kind": error.kind.name, "text": str(error)}
        except Exception:  # noqa: BLE001 - told to the test
            answer = {"text": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(sys.argv[1])
