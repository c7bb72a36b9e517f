"""What the command line takes from its process; a test hands in its own."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import Distribution

from attrs import field, frozen


def _environment() -> Mapping[str, str]:
    return dict(os.environ)


def _columns() -> int | None:
    # Programs that read our output want one thing on one line, whatever the terminal behind them.
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _input() -> bytes:
    return sys.stdin.buffer.read()


@frozen(kw_only=True)
class Host:
    """Environment variables, the root of the file system to probe, the installed distributions, what
    stands on standard input, and the width of the terminal: ``None`` when the output goes to a file or
    a program."""

    environment: Mapping[str, str] = field(factory=_environment)
    root: str = "/"
    columns: int | None = field(factory=_columns)
    read_input: Callable[[], bytes] = _input
    distributions: Callable[[], Iterable[Distribution]] = importlib.metadata.distributions
