"""A movement that a test can hold, before it copies or after."""

from __future__ import annotations

import threading
from collections.abc import Callable

from attrs import define, field

from kvferry_transport_local.moving import Copies, Movement, SystemMovement

SECONDS = 20.0


@define(eq=False)
class HeldMovement:
    """Calls ``behind`` after every copy, with the number of copies so far; and waits for ``go`` in front of
    each one once ``hold`` was called."""

    name: str = "held"
    fails_with: int = 0
    """An errno that every read ends with, instead of what was moved."""
    behind: Callable[[int], None] = lambda _: None
    inner: Movement = field(factory=SystemMovement)
    moved: int = 0
    arrived: threading.Event = field(factory=threading.Event)
    go: threading.Event = field(factory=threading.Event)

    def __attrs_post_init__(self) -> None:
        self.go.set()

    def hold(self) -> None:
        self.arrived.clear()
        self.go.clear()

    def copy(self, copies: Copies) -> None:
        self._wait()
        self.inner.copy(copies)
        self._moved()

    def read(self, pid: int, copies: Copies) -> list[int]:
        self._wait()
        found = self.inner.read(pid, copies)
        self._moved()
        return [-self.fails_with] * len(found) if self.fails_with else found

    def _wait(self) -> None:
        self.arrived.set()
        assert self.go.wait(SECONDS)

    def _moved(self) -> None:
        self.moved += 1
        self.behind(self.moved)
