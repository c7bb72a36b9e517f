"""Nearest-name hints: for slips of the hand, not for names of other things."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHORT = 3
"""In words of this length every letter is the name: ``npu`` is no misspelt ``cpu``, nor ``lfu`` ``lru``."""


def closest(name: str, names: Iterable[str]) -> str | None:
    """The name that a typing slip most likely meant, or ``None``.

    Letter case and the sign between words count for nothing. Beyond that words are compared one by one,
    so that a long common part does not make up for a short word that is another one.
    """
    others = sorted(set(names) - {name})
    same = [other for other in others if _joined(other) == _joined(name)]
    if same:
        return same[0]
    near = [(distance, other) for other in others if (distance := _distance(name, other)) is not None]
    return min(near)[1] if near else None


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """``did you mean 'x'?`` or nothing."""
    close = closest(name, names)
    return f"did you mean {close!r}?" if close else ""


def one_of(names: Iterable[str]) -> str:
    """The names as a list for a sentence; ``none`` when there are none."""
    return ", ".join(sorted(set(names))) or "none"


def _words(name: str) -> list[str]:
    return re.split(r"[\W_]+", name.casefold())


def _joined(name: str) -> str:
    return "".join(_words(name))


def _distance(name: str, other: str) -> int | None:
    """How many slips apart, or None where more than the words' lengths allow."""
    words, others = _words(name), _words(other)
    if len(words) != len(others):
        words, others = [_joined(name)], [_joined(other)]
    found = [_slips(*pair) for pair in zip(words, others, strict=True)]
    return None if None in found else sum(each or 0 for each in found)


def _slips(one: str, other: str) -> int | None:
    length = min(len(one), len(other))
    limit = 1 if length <= 5 else 2
    if abs(len(one) - len(other)) > limit or length > 64:
        return None
    if length <= 5 and one[:1] != other[:1]:
        return None
    distance = _edits(one, other)
    if len(one) == len(other) <= _SHORT and distance and sorted(one) != sorted(other):
        return None
    return distance if distance <= limit else None


def _edits(one: str, other: str) -> int:
    """Letters put in, left out, changed, or two neighbours swapped, until the words are the same."""
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        row = [i]
        for j, there in enumerate(other, 1):
            best = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (letter != there))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == there:
                best = min(best, before[j - 2] + 1)
            row.append(best)
        before, last = last, row
    return last[-1]
