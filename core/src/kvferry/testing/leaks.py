"""What a test may leave behind: nothing.

Used through :mod:`kvferry.testing.plugin`; everything here also works without pytest.
"""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from attrs import field, frozen

from kvferry.control.manager import CacheManager

SETTLE_SECONDS = 3.0
"""How long deferred clean-up may take: a thread that was told to end, a socket that lingers."""

KINDS = ("threads", "descriptors", "memory", "slots")
"""What is guarded: threads of Python, file descriptors, shared memory and memory files, and leases,
reservations and slots of watched managers."""

_SHARED = ("/dev/shm/", "/memfd:")


@frozen
class Resources:
    """What the process holds, as key and description, by kind."""

    held: Mapping[str, Mapping[object, str]] = field(factory=dict)

    @classmethod
    def now(cls) -> Resources:
        return cls(
            {
                "threads": {
                    thread.ident: f"thread {thread.name}"
                    for thread in threading.enumerate()
                    if thread.ident is not None
                },
                "descriptors": dict(_descriptors()),
                "memory": dict(_memory()),
            }
        )

    def beyond(self, before: Resources, kinds: Collection[str]) -> list[str]:
        """What is held now and was not held before, in words."""
        return [
            text
            for kind, held in self.held.items()
            if kind in kinds
            for key, text in held.items()
            if before.held[kind].get(key) != text
        ]


class LeakGuard:
    """Compares what is held at the end of a test with what was held at its beginning.

    ``watch`` a manager to have its leases and slots looked at too.
    """

    def __init__(self, kinds: Collection[str] = KINDS) -> None:
        self._kinds = tuple(kinds)
        self._managers: list[CacheManager] = []
        self._before = Resources.now()

    def watch(self, manager: CacheManager) -> CacheManager:
        """At the end no lease, reservation or slot of this manager may be out."""
        self._managers.append(manager)
        return manager

    def leaks(
        self,
        settle_seconds: float = SETTLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> list[str]:
        """What was left behind, once deferred clean-up had ``settle_seconds``; empty for nothing."""
        found = self._found()
        if not found:
            return []
        gc.collect()  # what only waits for the garbage collector is gone soon enough
        deadline = clock() + settle_seconds
        while (found := self._found()) and clock() < deadline:
            sleep(0.01)
        return found

    def _found(self) -> list[str]:
        found = Resources.now().beyond(self._before, self._kinds)
        if "slots" in self._kinds:
            for number, manager in enumerate(self._managers, 1):
                found += [f"manager {number}: {text}" for text in _out(manager)]
        return found


def _out(manager: CacheManager) -> Iterator[str]:
    stats = manager.stats()
    for what in ("leases", "reservations", "leased", "reserved", "retiring", "quarantined"):
        count = getattr(stats, what)
        if count:
            yield f"{what} {count}"
    if stats.free + stats.resident != stats.capacity:
        yield f"{stats.free} free and {stats.resident} resident slots of {stats.capacity}"


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            target = os.readlink(f"/proc/self/fd/{name}")
            if target != f"/proc/{os.getpid()}/fd":
                yield int(name), f"descriptor {name} of {target}"


def _memory() -> Iterator[tuple[str, str]]:
    """Mapped shared memory, and segments that bear our name whoever maps them."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith(_SHARED):
            yield parts[0], f"mapping of {parts[5]} at {parts[0]}"
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            if "kvferry" in name:
                yield name, f"shared memory segment {name}"
