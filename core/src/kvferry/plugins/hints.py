"""Nearest-name hints."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that a typing slip most likely meant, or ``None``."""
    found = difflib.get_close_matches(name, sorted(set(names) - {name}), 1, cutoff=0.6)
    return found[0] if found else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``did you mean 'x'?`` or nothing."""
    close = closest(name, names)
    return f"did you mean {close!r}?" if close else ""


def one_of(names: Iterable[str]) -> str:
    """The names as a list for a sentence; ``none`` when there are none."""
    return ", ".join(sorted(set(names))) or "none"
