"""What to do when nobody reads the output any more."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from select import POLLERR, POLLOUT, poll
from typing import TextIO

CLOSED_PIPE = 141
"""As a shell shows a program that SIGPIPE ended."""


def quiet_when_closed(run: Callable[[], int]) -> int:
    """What ``run`` returns, with all its output written; :data:`CLOSED_PIPE`, and not a word, when the
    reader of the output has gone, as ``head`` does."""
    try:
        try:
            code = run()
        except SystemExit as leaving:
            # argparse prints its help and leaves; the interpreter would complain while it ends.
            sys.stdout.flush()
            # Newer releases (3.11.7, not yet 3.11.2) keep silent about text that they could not write.
            if not leaving.code and _closed():
                return CLOSED_PIPE
            raise
        sys.stdout.flush()
    except BrokenPipeError:
        if not _closed():
            # A connection that some command holds, and not the output.
            raise
        return CLOSED_PIPE
    return code


def _closed() -> bool:
    """Whether the output cannot be written; then nothing complains about what is left of it."""
    closed = [stream.fileno() for stream in (sys.stdout, sys.stderr) if _has_no_reader(stream)]
    for descriptor in closed:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, descriptor)
        os.close(nothing)
    return bool(closed)


def _has_no_reader(stream: TextIO) -> bool:
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        # A test, or a program that called main(), took its place.
        return False
    poller = poll()
    poller.register(descriptor, POLLOUT)
    return any(event & POLLERR for _, event in poller.poll(0))
