"""Log lines that strangers can cause, at a rate that fills no disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

EVERY_SECONDS = 10.0


class RareLog:
    """Passes on one line in ``EVERY_SECONDS``, with the number of those that were left out. Any thread."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._next: float | None = None
        self._left_out = 0

    def warning(self, text: str, *arguments: object) -> None:
        now = self._clock()
        with self._lock:
            if self._next is not None and now < self._next:
                self._left_out += 1
                return
            self._next = now + EVERY_SECONDS
            left_out, self._left_out = self._left_out, 0
        if left_out:
            text, arguments = text + " (%d such lines were left out)", (*arguments, left_out)
        self._log.warning(text, *arguments)
