"""Writes YAML of which every place is known."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen


@frozen(kw_only=True)
class Document:
    """Text in block style, one value on a line, and ``line:column`` of each value and of each key, those
    of sections included, by dotted path."""

    text: str
    values: Mapping[str, str]
    keys: Mapping[str, str]


def document(written: Mapping[str, str]) -> Document:
    """A document with these values by dotted path, as they are to be written."""
    lines: list[str] = []
    values: dict[str, str] = {}
    keys: dict[str, str] = {}
    opened: list[str] = []
    for path in sorted(written):
        *parents, key = path.split(".")
        common = 0
        while common < min(len(parents), len(opened)) and parents[common] == opened[common]:
            common += 1
        for depth in range(common, len(parents)):
            lines.append("  " * depth + f"{parents[depth]}:")
            keys[".".join(parents[: depth + 1])] = f"{len(lines)}:{2 * depth + 1}"
        opened = parents
        indent = 2 * len(parents)
        lines.append(" " * indent + f"{key}: {written[path]}")
        keys[path] = f"{len(lines)}:{indent + 1}"
        values[path] = f"{len(lines)}:{indent + len(key) + 3}"
    return Document(text="\n".join(lines) + "\n", values=values, keys=keys)
