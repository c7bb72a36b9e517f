"""Where our threads may run, and before whom."""

from __future__ import annotations

import contextlib
import os
import threading

STEPS_BEHIND = 19
"""How many steps of niceness a thread that serves a lower tier stands behind the engine's (nice(2))."""


def allowed_cores() -> set[int]:
    """The cores that some thread of this process may run on."""
    cores: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        # It may have ended meanwhile.
        with contextlib.suppress(OSError):
            cores |= os.sched_getaffinity(int(thread))
    return cores


def leave_the_engines_core() -> None:
    """Let the calling thread, and those that it starts, run wherever a thread of this process may.

    Engines bind their main thread to one core (vLLM's CPU workers do), and a new thread inherits that: all
    of ours would wait for the forward pass, on that core. The limits of the process stay: nobody of it gets
    a core that none of its threads had.
    """
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, allowed_cores())


def stand_behind_the_engine() -> None:
    """Let everybody else go first, as far as there are not enough cores for all.

    For the calling thread and those that it starts, which read, check and write what waits anyhow. A request
    that waits for an SSD can wait a little longer; without this, every decoding request beside it would.
    """
    thread = threading.get_native_id()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + STEPS_BEHIND)
