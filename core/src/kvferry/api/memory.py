"""Memory that a plan may name."""

from __future__ import annotations

import enum
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


class AddressableBackend(Protocol):
    """A tier whose slots are plain memory: it gives one region, and core allocates in it.

    Threads: ``open`` and ``close`` are called once each, from the data plane's owner thread;
    ``ready_bytes`` from any thread.
    """

    def open(self, name: str) -> Region:
        """Map ``capacity`` bytes. Raises :class:`kvferry.api.KVFerryError` when the system refuses.

        The pages need not be touched yet.
        """
        ...

    def ready_bytes(self) -> int:
        """How many bytes from the start may be used. Grows while pages are first touched in the
        background; equals the region's length in the end."""
        ...

    def close(self) -> None:
        """Unmap. Idempotent. The caller guarantees that no plan names the region any more."""
        ...
