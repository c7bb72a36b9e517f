"""Reads ``corpus.txt``: inputs of the configuration layer with the text that a user gets to read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import define, field

CORPUS = Path(__file__).with_name("corpus.txt")


@define(kw_only=True)
class Case:
    """One input and what comes of it: ``faults``, each as printed, or ``values`` by path.

    ``file`` is None where the case has none.
    """

    name: str
    file: bytes | None = None
    variables: Mapping[str, str] = field(factory=dict)
    overrides: Mapping[str, Any] = field(factory=dict)
    faults: list[str] = field(factory=list)
    values: list[str] = field(factory=list)


def read_corpus(text: str) -> list[Case]:
    """All cases of a text in the format that its head explains. A line "## ..." is a heading."""
    lines = [line for line in text.split("\n") if not line.startswith("## ")]
    _, *parts = "\n".join(lines).split("\n### ")
    return [_case(part) for part in parts]


def _case(part: str) -> Case:
    head, *lines = part.rstrip("\n").split("\n")
    case = Case(name=head)
    # The first block is the file, unless the case begins with another one.
    for block, content in _blocks(lines):
        kind, _, form = block.partition(" ")
        match kind:
            case "file":
                case.file = _bytes(content, form)
            case "variables":
                pairs = [line.partition("=") for line in content]
                case.variables = {name: _text(value, form) for name, _, value in pairs}
            case "overrides":
                case.overrides = json.loads("\n".join(content))
            case "faults":
                case.faults = "\n".join(content).replace("\n  ", "\0").split("\n")
                case.faults = [fault.replace("\0", "\n  ") for fault in case.faults]
            case "values":
                case.values = content
            case _:
                raise ValueError(f"{head}: unknown block {block!r}")
    if not case.faults and not case.values:
        raise ValueError(f"{head}: it expects nothing")
    return case


def _blocks(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    marks = [at for at, line in enumerate(lines) if line.startswith("--- ")]
    if not marks or marks[0] > 0 or lines[0] in ("--- faults", "--- values"):
        yield "file", lines[: marks[0] if marks else None]
    for at, end in zip(marks, [*marks[1:], len(lines)], strict=True):
        yield lines[at].removeprefix("--- "), lines[at + 1 : end]


def _bytes(lines: list[str], form: str) -> bytes:
    if form == "escaped":
        return "\n".join(lines).encode("latin-1").decode("unicode_escape").encode("latin-1")
    if form:
        return lines[0].encode() * int(form.removeprefix("repeated "))
    return "".join(f"{line}\n" for line in lines).encode()


def _text(value: str, form: str) -> str:
    return value.encode("latin-1").decode("unicode_escape") if form == "escaped" else value
