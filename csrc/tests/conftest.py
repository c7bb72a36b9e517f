"""What several tests of the native module do."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

LetsOthersRun = Callable[[Callable[[], object]], bool]


@pytest.fixture
def lets_others_run() -> LetsOthersRun:
    """Tells whether a call lets go of the GIL."""

    def found(call: Callable[[], object]) -> bool:
        turns = 0
        stop = threading.Event()

        def count() -> None:
            nonlocal turns
            while not stop.is_set():
                turns += 1
                time.sleep(0)

        counter = threading.Thread(target=count)
        interval = sys.getswitchinterval()
        counter.start()
        try:
            # Python itself now never takes the GIL from this thread: only a call that lets go of it lets
            # the counter move between the two readings.
            sys.setswitchinterval(60)
            for _ in range(50):
                before = turns
                call()
                if turns > before:
                    return True
            return False
        finally:
            sys.setswitchinterval(interval)
            stop.set()
            counter.join()

    return found
