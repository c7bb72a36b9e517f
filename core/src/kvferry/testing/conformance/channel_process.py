"""The tests' end of a peer in a process of its own."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

from attrs import define

from kvferry.api import ErrorKind, KVFerryError, Span

_PROGRAM = "kvferry.testing.channel_child"


class PeerProcess:
    """A child that runs :mod:`kvferry.testing.channel_child`. Threads: one.

    ``subject`` is the import path of a function that makes its channel; ``patience`` is in seconds.
    """

    def __init__(self, subject: str, patience: float) -> None:
        self.patience = patience
        self.memory = _PeerMemory(self)
        self.exported = b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, subject],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, instance: str, epoch: bytes, length: int) -> bytes:
        """Open the peer's channel and register memory of this length; gives what it exports."""
        self.exported = base64.b64decode(self.ask("open", instance, epoch.hex(), length))
        return self.exported

    def connect(self, export: bytes) -> int:
        """Let it connect to whoever exported this; gives a number for the connection."""
        return int(self.ask("connect", base64.b64encode(export).decode(), self.patience))

    def move(self, verb: str, connection: int, local: Span, offset: int) -> str:
        """Let it do one operation with our region of the same name; its status, or its failure's kind."""
        return str(self.ask("move", verb, connection, local[1:], offset, self.patience))

    def move_for_ever(self, verb: str, connection: int, local: Span, offset: int) -> None:
        """Let it go on with one operation, over and over."""
        self.ask("move_for_ever", verb, connection, local[1:], offset, self.patience)

    def ask(self, call: str, *arguments: Any) -> Any:
        """Call a method of the peer. Raises :class:`KVFerryError` as the peer's channel did."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"call": call, "arguments": arguments}).encode() + b"\n")
        stdin.flush()
        ready, _, _ = select.select([stdout], [], [], self.patience)
        assert ready, f"the peer's process did not answer {call}"
        line = stdout.readline()
        assert line, f"the peer's process ended at {call}; its standard error says why"
        told = json.loads(line)
        if "kind" in told:
            raise KVFerryError(f"the peer's {call} raised: {told['text']}", kind=ErrorKind[told["kind"]])
        assert "answer" in told, f"the peer's {call} raised:\n{told['text']}"
        return told["answer"]

    def kill(self) -> None:
        """SIGKILL. When this returns the process is gone."""
        self._process.kill()
        self._reap()

    def stop(self) -> None:
        """SIGSTOP. When this returns none of its threads runs."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """Close its channel, and end the process. Idempotent, also after :meth:`kill`."""
        if self._process.returncode is not None:
            return
        try:
            self.go_on()
            self.ask("close", self.patience)
        finally:
            self._process.kill()
            self._reap()

    def _reap(self) -> None:
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


@define
class _PeerMemory:
    """The memory of the other process, as :class:`kvferry.testing.guarded.GuardedMemory`."""

    _peer: PeerProcess

    def take(self, data: bytes) -> Span:
        return Span(*self._peer.ask("take", base64.b64encode(data).decode()))

    def reserve(self, length: int) -> Span:
        return Span(*self._peer.ask("reserve", length))

    def bytes_of(self, span: Span) -> bytes:
        return base64.b64decode(self._peer.ask("bytes_of", span))

    def settle(self, span: Span, scribble: bool = False) -> None:
        self._peer.ask("settle", span, scribble)

    def trespasses(self) -> list[str]:
        return [str(text) for text in self._peer.ask("trespasses")]


def soon(what: Any, seconds: float) -> bool:
    """Whether ``what()`` becomes true within so many seconds."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
