"""The tree that all sources are read into: plain values that still know where they stand."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable
from typing import TypeAlias

from attrs import evolve, field, frozen

from kvferry.api import ErrorKind, KVFerryError, Retry

ConfigPath: TypeAlias = tuple[str, ...]
"""Keys from the top; items of a list count as ``"0"``, ``"1"`` and so on."""

OVERRIDES = "kv_connector_extra_config"
VARIABLE_PREFIX = "KVFERRY__"


class Source(enum.IntEnum):
    """Where a value can come from; a later member wins over an earlier one."""

    DEFAULT = 0
    FILE = 1
    ENVIRONMENT = 2
    OVERRIDE = 3


@frozen(order=True)
class Place:
    """One spot in one source. ``line`` and ``column`` count from 1; 0 means the whole source."""

    source: Source
    name: str = ""
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        if self.source is Source.FILE:
            name = printable(self.name)
            return f"{name}:{self.line}:{self.column}" if self.line else name
        if self.source is Source.ENVIRONMENT:
            return f"env {printable(self.name)}"
        return OVERRIDES if self.source is Source.OVERRIDE else "default"


DEFAULT = Place(Source.DEFAULT)


class Broken(enum.Enum):
    """Stands for a value that could not be read. Its fault is reported already: stay silent."""

    BROKEN = "broken"


Value: TypeAlias = "bool | int | float | str | tuple[Node, ...] | dict[str, Node] | Broken | None"


@frozen(eq=False)
class Node:
    """A value, where it stands, and where its key stands."""

    value: Value
    place: Place
    key_place: Place
    path: ConfigPath = ()
    """Set by :func:`locate` once all sources are merged."""
    quoted: bool = False
    written: str | None = None
    """The letters of a value that stands alone outside a file: what it is if text is wanted."""
    complete: bool = True
    """False for a mapping some of whose keys could not be read: then nothing is called missing."""
    secret: bool = False
    """True below a field that is secret: no message may quote the value."""

    def find(self, key: str) -> Node | None:
        """The child at ``key``; letter case is ignored when nothing matches exactly."""
        if not isinstance(self.value, dict):
            return None
        if key in self.value:
            return self.value[key]
        folded = key.casefold()
        return next((node for name, node in self.value.items() if name.casefold() == folded), None)


def locate(node: Node, path: ConfigPath = ()) -> Node:
    """A copy in which every node knows its path."""
    value = node.value
    if isinstance(value, dict):
        value = {key: locate(child, (*path, key)) for key, child in value.items()}
    elif isinstance(value, tuple):
        value = tuple(locate(child, (*path, str(i))) for i, child in enumerate(value))
    return evolve(node, value=value, path=path)


def hidden(node: Node) -> Node:
    """A copy that no message quotes, at any depth."""
    value = node.value
    if isinstance(value, dict):
        value = {key: hidden(child) for key, child in value.items()}
    elif isinstance(value, tuple):
        value = tuple(hidden(child) for child in value)
    return evolve(node, value=value, secret=True)


@frozen
class Fault:
    """An error and the place by which it is sorted."""

    place: Place
    error: KVFerryError = field(eq=False)


def fault(
    place: Place,
    path: ConfigPath,
    what: str,
    *,
    why: str = "",
    remedy: str = "",
    kind: ErrorKind = ErrorKind.CONFIG,
) -> Fault:
    """A fault whose sentence starts with the path, if there is one."""
    return Fault(
        place,
        KVFerryError(
            f"{dotted(path)}: {what}" if path else what,
            kind=kind,
            where=str(place),
            why=why,
            remedy=remedy,
            retry=Retry.AFTER_CHANGE,
        ),
    )


def in_order(faults: Iterable[Fault]) -> tuple[KVFerryError, ...]:
    """Errors source by source, each file from top to bottom."""
    return tuple(item.error for item in sorted(faults, key=lambda item: item.place))


def dotted(path: ConfigPath) -> str:
    """The path as a message shows it; unusual keys are quoted."""
    return ".".join(part if _PLAIN_KEY.fullmatch(part) else brief(part) for part in path)


def printable(name: str) -> str:
    """A name of a file or variable, escaped where a terminal could not show it."""
    return name if name.isprintable() else repr(name)


def brief(text: str) -> str:
    """Text in quotes, on one line, cut to a readable length."""
    return repr(text if len(text) <= 60 else text[:57] + "...")


def describe(node: Node) -> str:
    """What stands there, in words, for use after ``expected ..., not``."""
    value = node.value
    if node.secret and not isinstance(value, (tuple, dict)):
        return "this hidden value"
    match value:
        case None:
            return "nothing (null)"
        case bool():
            return f"the truth value {str(value).lower()}"
        case int() | float():
            return f"the number {value}"
        case str():
            return f"the text {brief(value)}"
        case tuple():
            return "a list"
        case _:
            return "a mapping"


_PLAIN_KEY = re.compile(r"[\w-]{1,60}")
