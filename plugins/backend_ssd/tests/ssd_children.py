"""Work in child processes that share nothing with the test but what they were forked with."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

from attrs import define

SECONDS = 60.0
"""After so long a silent child is a failed test."""


@define
class Child:
    """A process that was forked, and the two pipes between it and the test."""

    pid: int
    _said: int
    _tell: int

    def line(self) -> str:
        """The next line that it said; empty when it has ended."""
        found = b""
        deadline = time.monotonic() + SECONDS
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([self._said], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the child said {found!r} and went silent"
            more = os.read(self._said, 1)
            if not more:
                break
            found += more
        return found.decode().rstrip("\n")

    def let_go_on(self) -> None:
        """What it waits for in :func:`wait_for_parent` has come."""
        os.write(self._tell, b"\n")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self) -> int:
        """Kill it if it lives, and give the status that it ended with."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._said)
        os.close(self._tell)
        return status


@contextlib.contextmanager
def child(work: Callable[[Callable[[str], None], Callable[[], None]], None]) -> Iterator[Child]:
    """Run ``work(say, wait_for_parent)`` in a child. Whatever it raises is said, line by line."""
    said, say = os.pipe()
    heard, tell = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no thread of ours runs that could hold a lock
        pid = os.fork()
    if pid == 0:
        os.close(said)
        os.close(tell)
        _run(work, say, heard)
    os.close(say)
    os.close(heard)
    made = Child(pid, said, tell)
    try:
        yield made
    finally:
        made.end()


def _run(work: Callable[[Callable[[str], None], Callable[[], None]], None], say: int, heard: int) -> NoReturn:
    """Must not run anything that belongs to the parent's test."""
    code = 1
    try:
        work(lambda text: _say(say, text), lambda: _hear(heard))
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent
        _say(say, traceback.format_exc())
    finally:
        os._exit(code)
    raise AssertionError("never reached")


def _say(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode(errors="replace") + b"\n")


def _hear(descriptor: int) -> None:
    os.read(descriptor, 1)
