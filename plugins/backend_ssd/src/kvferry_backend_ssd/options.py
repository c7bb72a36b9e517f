"""Keys of a tier that uses the SSD backend."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable
from typing import Any

from attrs import Attribute, field, frozen

from kvferry.api import ByteSize, format_size

LARGEST_DEPTH = 1024
SMALLEST_SLOT = 4096


class IOPath(enum.Enum):
    """How bytes get to the disk and back. Either gives the same results."""

    AUTO = "auto"
    """``io_uring`` where the kernel lets us use it, ``threads`` elsewhere."""
    IO_URING = "io_uring"
    THREADS = "threads"


class _Unusable(ValueError):
    """What a validator says of a value; the report shows ``remedy`` as its fix."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


def _path(_self: object, _attribute: Attribute[str], value: str) -> None:
    if not value.strip():
        raise _Unusable("names no folder", "name one, such as /var/cache/kvferry")
    if "\x00" in value:
        raise _Unusable("holds a zero character, which no folder's name can", "remove it")
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        raise _Unusable("holds half a character, which no folder's name can", "remove it") from None
    if not value.startswith("/"):
        # Every start must find the same folder, and each engine may run somewhere else.
        asks_shell = value.startswith("~") or "$" in value
        why = "; '~' and variables are not replaced" if asks_shell else ""
        raise _Unusable("must be a whole path", f"begin it with '/', such as /var/cache/kvferry{why}")


def _between(least: int, most: int | None, write: Callable[[int], str] = str) -> Any:
    def check(_self: object, _attribute: Attribute[int], value: int) -> None:
        if value < least:
            raise _Unusable(f"is below {write(least)}", f"write {write(least)} or more, or remove the key")
        if most is not None and value > most:
            raise _Unusable(f"is above {write(most)}", f"write {write(most)} or less, or remove the key")

    return check


@frozen(kw_only=True)
class SSDOptions:
    """Own keys in the tier's section; the capacity is core's."""

    path: str = field(
        validator=_path,
        metadata={"doc": "a folder on a local disk; each rank of each instance has one of its own below"},
    )
    direct: bool = field(
        default=True,
        metadata={"doc": "read and write past the system's page cache, where the file system lets us"},
    )
    io: IOPath = field(
        default=IOPath.AUTO,
        metadata={
            "doc": "io_uring: the kernel's own queue; threads: blocking calls in threads; auto: io_uring "
            "where the kernel lets us use it"
        },
    )
    queue_depth: int = field(
        default=32,
        validator=_between(1, LARGEST_DEPTH),
        metadata={"doc": "how many reads or writes one lane keeps under way at once"},
    )
    slot: ByteSize = field(
        default=ByteSize(1 << 20),
        validator=_between(SMALLEST_SLOT, None, format_size),
        metadata={"doc": "room for a value in one slot, where the engine does not say how large chunks are"},
    )
