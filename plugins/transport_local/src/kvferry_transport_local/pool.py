"""The threads that copy. Work takes turns, so a large batch does not shut out a small one."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

Step = Callable[[], None]


class Work:
    """Steps that may run at the same time, in any thread. They catch what they raise."""

    def __init__(self, steps: list[Step]) -> None:
        self._steps = deque(steps)

    def take(self) -> Step | None:
        """The next step. Called under the pool's lock."""
        return self._steps.popleft() if self._steps else None

    @property
    def more(self) -> bool:
        return bool(self._steps)


class Pool:
    """``threads`` threads. Threads: ``put`` from any; the rest from one."""

    def __init__(self, threads: int, name: str) -> None:
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._run, name=f"kvferry-{name}-copy-{number}", daemon=True)
            for number in range(threads)
        ]

    def open(self) -> None:
        for thread in self._threads:
            thread.start()

    def put(self, work: Work) -> None:
        """Without effect after ``close``."""
        with self._changed:
            if not self._closed and work.more:
                self._waiting.append(work)
                self._changed.notify()

    def close(self, seconds: float) -> bool:
        """No step begins any more; whether those under way ended in so many seconds."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()
        end = time.monotonic() + seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (step := self._next()) is not None:
            step()

    def _next(self) -> Step | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return None
                work = self._waiting.popleft()
                step = work.take()
                if work.more:
                    self._waiting.append(work)
                    self._changed.notify()
                if step is not None:
                    return step
