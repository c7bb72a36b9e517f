"""Memory that a plan may name."""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from attrs import field, frozen

from kvferry.api.errors import ErrorKind, KVFerryError


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
    world_size: int = 1
    """How many ranks the instance has."""
    instance: str = ""
    """Which instance this is; stays the same over restarts."""
    namespace: bytes = b""
    """First half of the keys of this instance. A store may hold chunks of others."""
    shard: bytes = b""
    """What a rank's bytes depend on beside the key: a digest of its :class:`ShardLayout`. The same
    key means other bytes on a rank of another shard."""
    regions: Mapping[str, Region] = field(factory=dict)
    """The memory that spans may name. Regions may be added while the backend is open."""
    clock: Callable[[], float] = time.monotonic
    """Deadlines are times of this clock, in seconds."""
    operation_seconds: float = 10.0
    """How long something may take for which the contract gives no deadline, for example to connect."""
    max_value_bytes: int | None = None
    """The largest value that comes. A backend refuses what is larger; ``None`` is no limit."""
    max_header_bytes: int = 4096
    """How large an encoded :class:`ChunkHeader` may get, a multiple of 4096; longer ones may be refused."""

    def view(self, span: Span) -> memoryview:
        """The bytes of ``span``, writable, without a copy. Any thread.

        Raises :class:`kvferry.api.KVFerryError` (``INTERNAL``) for a span outside its region and for
        memory that is not the host's.
        """
        region = self.regions.get(span.region)
        why = ""
        if region is None:
            why = f"there is no region {span.region!r}"
        elif region.kind is not MemoryKind.HOST:
            why = f"the region {span.region!r} is memory of a device"
        elif span.offset < 0 or span.length < 0 or span.offset + span.length > region.length:
            why = f"the region {span.region!r} has {region.length} bytes"
        if region is None or why:
            raise KVFerryError(f"{span} cannot be looked at", kind=ErrorKind.INTERNAL, why=why)
        block = (ctypes.c_ubyte * span.length).from_address(region.address + span.offset)
        block.keep_alive = region.keep_alive  # type: ignore[attr-defined]  # as long as the view
        return memoryview(block).cast("B")


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
