"""A controller in a process or on a thread of its own, and instances that are connected to it."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Self

from attrs import define, field

from kvferry_sharing_p2p.controller.server import ControllerServer
from kvferry_sharing_p2p.directory.answers import DirectoryOptions, Found
from kvferry_sharing_p2p.directory.desk import Desk
from kvferry_sharing_p2p.directory.publisher import Identity, PublisherOptions, PublisherState
from kvferry_sharing_p2p.directory.state import Directory
from kvferry_sharing_p2p.network.client import DirectoryClient
from kvferry_sharing_p2p.network.endpoint import Endpoint, parse_url
from kvferry_sharing_p2p.network.finds import Unanswered
from kvferry_sharing_p2p.network.reach import Reach
from kvferry_sharing_p2p.network.secret import SharedSecret

PATIENCE = 60.0
"""Seconds after which something that should happen is taken for never happening."""
SPACE = b"\x01" * 32
ANY_PORT = Endpoint("127.0.0.1", 0)
SECRET = SharedSecret(b"a secret of more than sixteen bytes")
OTHER_SECRET = SharedSecret(b"another secret of more than sixteen")
COMMAND = (sys.executable, "-m", "kvferry.cli.main", "controller")
QUICK = PublisherOptions(batch_seconds=0.0, resend_seconds=0.2, hello_seconds=0.2, part_keys=16)


def prompt(number: int, chunks: int = 8) -> list[bytes]:
    """The digests of one prompt."""
    return [bytes([number, depth]) * 16 for depth in range(chunks)]


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, f"it never came to this: {what}"
        time.sleep(0.01)


class ControllerProcess:
    """``kvferry controller`` as a user runs it. A context manager, which leaves no process behind."""

    def __init__(self, *options: str, port: int = 0, environment: dict[str, str] | None = None) -> None:
        self._words = [*COMMAND, "--listen", f"tcp://127.0.0.1:{port}", "--http", "127.0.0.1:0"]
        self._words += ["--heartbeat", "200ms", "--limit", "5s", *options]
        self._environment = {**os.environ, **(environment or {})}

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._words, stdout=subprocess.PIPE, text=True, env=self._environment
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        self.told = self._process.stdout.readline() if ready else ""
        assert self.told.startswith("controller ready at "), self.told
        self.endpoint = parse_url(self.told.split()[3].rstrip(","))
        self.page = self.told.split()[-1].removesuffix("/status")
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def signal(self, kind: signal.Signals) -> None:
        self._process.send_signal(kind)

    def ended(self) -> int:
        """Its exit code."""
        return self._process.wait(PATIENCE)


@contextlib.contextmanager
def serving(
    secret: SharedSecret | None = None, listen: Endpoint = ANY_PORT, heartbeat_seconds: float = 0.2
) -> Iterator[Endpoint]:
    """A controller on a thread of this process; where it is."""
    failed: list[bool] = []
    options = DirectoryOptions(heartbeat_seconds=heartbeat_seconds, limit_seconds=5.0 + 2 * heartbeat_seconds)
    server = ControllerServer(
        Desk(Directory(options, os.urandom(16), 0.0)),
        listen,
        secret,
        clock=time.monotonic,
        on_failed=lambda: failed.append(True),
    )
    endpoint = server.open()
    try:
        yield endpoint
    finally:
        server.close()
    assert not failed


@define(eq=False)
class Instance:
    """What an instance can serve, and its connection to the directory."""

    name: str
    endpoint: Endpoint
    secret: SharedSecret | None = None
    options: PublisherOptions = QUICK
    silent_seconds: float = 5.0
    rows: list[bytes] = field(factory=list)
    client: DirectoryClient = field(init=False)

    def __attrs_post_init__(self) -> None:
        identity = Identity(
            instance=self.name,
            epoch=os.urandom(16),
            namespace=SPACE,
            ranks=1,
            address=f"address of {self.name}".encode(),
        )
        self.client = DirectoryClient(
            self.endpoint,
            self.secret,
            identity,
            self,
            self.options,
            clock=time.monotonic,
            random=os.urandom,
            silent_seconds=self.silent_seconds,
        )

    def __enter__(self) -> Self:
        self.client.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close(time.monotonic() + PATIENCE)

    def walk(self, cursor: int, limit: int) -> tuple[bytes, int | None]:
        end = cursor + limit
        return b"".join(self.rows[cursor:end]), end if end < len(self.rows) else None

    def store(self, digests: list[bytes]) -> None:
        self.rows += digests
        self.client.added(digests)

    def evict(self, digests: list[bytes]) -> None:
        self.rows = [digest for digest in self.rows if digest not in digests]
        self.client.removed(digests)

    def is_current(self) -> bool:
        status = self.client.status()
        return status.reach is Reach.CONNECTED and status.publisher.state is PublisherState.CURRENT

    def settle(self) -> None:
        until(self.is_current, f"{self.name} has told everything")

    def find(self, digests: list[bytes], seconds: float = PATIENCE, limit: int = 8) -> Found | Unanswered:
        answers: queue.SimpleQueue[Found | Unanswered] = queue.SimpleQueue()
        deadline = time.monotonic() + seconds
        self.client.find(SPACE, b"".join(digests), limit, deadline, answers.put)
        return answers.get(timeout=seconds + PATIENCE)

    def holders(self, digests: list[bytes]) -> dict[str, int]:
        """Chunks by instance; nothing without an answer."""
        found = self.find(digests)
        return {each.instance: each.chunks for each in found.holders} if isinstance(found, Found) else {}

    def sees(self, digests: list[bytes], holders: dict[str, int]) -> None:
        until(lambda: self.holders(digests) == holders, f"{self.name} finds {holders}")
