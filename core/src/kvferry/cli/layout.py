"""Lines for a terminal of a given width; without a width, nothing is broken."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

_LABEL = re.compile(r"  (?:when|require|fact|missing|broken|waiver|fix|source|why|note) +")
_NARROWEST = 24
"""A column of words narrower than this reads worse than a line that the terminal breaks."""


def rows(table: Sequence[Sequence[str]], columns: int | None) -> list[str]:
    """Aligned rows with two spaces between columns; the last column is broken below itself."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)][:-1]
    lines = []
    for row in table:
        head = "".join(f"{cell:<{width}}  " for cell, width in zip(row, widths, strict=False))
        lines += labelled(head, row[-1], columns)
    return lines


def labelled(head: str, text: str, columns: int | None) -> list[str]:
    """``text`` behind ``head``, broken below itself."""
    room = None if columns is None else max(columns - len(head), _NARROWEST)
    parts = [text] if room is None else textwrap.wrap(text, room, break_on_hyphens=False) or [""]
    indent = " " * len(head)
    return [((head if not index else indent) + part).rstrip() for index, part in enumerate(parts)]


def wrapped(text: str, columns: int | None) -> str:
    """A report or an error at the width of a terminal: what follows a label is broken below itself, a
    headline a little to the right. Without a width nothing is broken."""
    if columns is None:
        return text
    return "\n".join(line for long in text.split("\n") for line in _broken(long, columns))


def _broken(line: str, columns: int) -> list[str]:
    if len(line) <= columns:
        return [line]
    label = _LABEL.match(line)
    indent = len(label[0]) if label is not None else 2
    # Paths and commands stay in one piece, to be copied.
    return textwrap.wrap(
        line,
        max(columns, indent + _NARROWEST),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def bullets(lines: Iterable[str], indent: int = 2) -> list[str]:
    """Lines moved to the right."""
    return [" " * indent + line for line in lines]
