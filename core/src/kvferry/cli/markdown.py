"""The little Markdown that the reference pages need."""

from __future__ import annotations

from collections.abc import Sequence

WRITTEN = "<!-- Written by 'kvferry docs'. Change the code that it describes, then write it again. -->"


def code(text: str) -> str:
    """Text as code; empty stays empty."""
    return f"`{text}`" if text else ""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A table with a blank line behind it; nothing without rows."""
    if not rows:
        return []
    lines = [head, ["---"] * len(head), *([_cell(cell) for cell in row] for row in rows)]
    return [*("| " + " | ".join(line) + " |" for line in lines), ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def block(language: str, lines: Sequence[str]) -> list[str]:
    """A fenced block with a blank line behind it."""
    return [f"```{language}", *lines, "```", ""]


def page(title: str, lines: Sequence[str]) -> str:
    """A whole page, with exactly one line break at its end."""
    return "\n".join([f"# {title}", "", WRITTEN, "", *lines]).rstrip("\n") + "\n"
