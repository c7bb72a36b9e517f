"""Memory that a plan may name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import NamedTuple, Protocol

from attrs import frozen


class MemoryKind(enum.Enum):
    HOST = "host"
    DEVICE = "device"


@frozen(kw_only=True)
class Region:
    """``length`` bytes at ``address`` in this process.

    ``keep_alive`` is whatever owns the memory; while the region lives, so does the memory. ``fd`` is
    the descriptor of the memory file behind it, or -1; it can be passed over a local socket and
    mapped elsewhere.
    """

    name: str
    address: int
    length: int
    kind: MemoryKind = MemoryKind.HOST
    fd: int = -1
    keep_alive: object = None


class Span(NamedTuple):
    """``length`` bytes at ``offset`` of the region named ``region``."""

    region: str
    offset: int
    length: int


class HugePages(enum.Enum):
    """What an arena does about huge pages."""

    AUTO = "auto"
    """Take what the system gives."""
    REQUIRE = "require"
    """Refuse to open without them."""
    NEVER = "never"


@frozen(kw_only=True)
class ArenaOptions:
    """How the memory of an arena should be."""

    huge_pages: HugePages = HugePages.AUTO


class Arena(Protocol):
    """One region of memory of our own. Built closed; ``open`` has the effects.

    Threads: ``open`` and ``close`` are called once each, from one thread; ``ready_bytes`` from any.
    """

    def open(self) -> Region:
        """Map the memory. Raises :class:`kvferry.api.KVFerryError` when the system refuses."""
        ...

    def ready_bytes(self) -> int:
        """How many bytes from the start may be used. Never falls while the arena is open."""
        ...

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        ...


ArenaFactory = Callable[[str, int, ArenaOptions], Arena]
"""Makes a closed arena from the region's name, its length in bytes and options. What kind of memory
comes is the device's choice: a memory file unless a device brings its own."""


@frozen(kw_only=True)
class BackendContext:
    """What core hands a backend when it opens."""

    name: str
    """The tier's name in the configuration; the region must bear it."""
    rank: int
    """The worker's rank in its instance, from 0."""
    make_arena: ArenaFactory


class AddressableBackend(Protocol):
    """A tier whose slots are plain memory: it gives one region, and core allocates in it.

    The factory of the spec is called as ``factory(options, capacity)``: an instance of the spec's
    options class, and the tier's capacity in bytes, which is core's key and no option.

    Threads: ``open`` and ``close`` are called once each, from the data plane's owner thread;
    ``ready_bytes`` from any thread.
    """

    def open(self, context: BackendContext) -> Region:
        """Map ``capacity`` bytes as a region named ``context.name``.

        Raises :class:`kvferry.api.KVFerryError` when the system refuses. The pages need not be
        touched yet.
        """
        ...

    def ready_bytes(self) -> int:
        """How many bytes from the start may be used. Grows while pages are first touched in the
        background; equals the region's length in the end."""
        ...

    def close(self) -> None:
        """Unmap. Idempotent. The caller guarantees that no plan names the region any more."""
        ...
