"""Lines for a terminal of a given width; without a width, nothing is broken."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

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


def bullets(lines: Iterable[str], indent: int = 2) -> list[str]:
    """Lines moved to the right."""
    return [" " * indent + line for line in lines]
