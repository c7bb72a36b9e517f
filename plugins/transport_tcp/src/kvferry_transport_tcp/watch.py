"""One thread that acts when deadlines are over."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

_LONGEST_SLEEP_SECONDS = 60.0


class Watch:
    """Calls what it was given once its time is there, unless it was forgotten before.

    Actions run on its own thread, outside of its lock; they must not block. Threads: ``add`` and
    ``forget`` from any; ``start``, ``close`` and ``join`` from one.
    """

    def __init__(self, clock: Callable[[], float], name: str) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._entries: dict[object, tuple[float, Callable[[], None]]] = {}
        self._wakes = float("inf")
        self._closed = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def add(self, deadline: float, action: Callable[[], None]) -> object:
        """Have ``action`` called at ``deadline``. What comes back names it for :meth:`forget`."""
        name = object()
        with self._changed:
            self._entries[name] = (deadline, action)
            if deadline < self._wakes:
                self._changed.notify()
        return name

    def forget(self, name: object) -> None:
        """The action is not called any more, unless it is being called right now. Idempotent."""
        with self._changed:
            self._entries.pop(name, None)

    def close(self) -> None:
        """Let the thread end, without calling what is left."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def _run(self) -> None:
        while (due := self._wait()) is not None:
            for action in due:
                try:
                    action()
                except Exception:  # noqa: BLE001 - a defect in one action must not stop the others
                    _log.exception("kvferry: an action at a deadline failed")

    def _wait(self) -> list[Callable[[], None]] | None:
        with self._changed:
            while not self._closed:
                now = self._clock()
                due = [name for name, (deadline, _) in self._entries.items() if deadline <= now]
                if due:
                    return [self._entries.pop(name)[1] for name in due]
                first = min((deadline for deadline, _ in self._entries.values()), default=float("inf"))
                self._wakes = first
                self._changed.wait(min(first - now, _LONGEST_SLEEP_SECONDS))
                self._wakes = float("-inf")
        return None
