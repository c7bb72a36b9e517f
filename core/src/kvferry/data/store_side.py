"""The tier's memory of one rank: opens the backend and knows how many slots may be used.

StoreSide knows no engine and no keys, so that it can live in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.api import (
    AddressableBackend,
    ArenaOptions,
    BackendContext,
    ErrorKind,
    KVFerryError,
    Region,
)
from kvferry.data.arena import MemoryFileArena


class SlotStore(Protocol):
    """Slots of one rank, in this process or mapped from another's: what a worker needs of a tier."""

    slots: int

    def open(self, on_ready: Callable[[], None]) -> Region: ...

    def ready_slots(self) -> int: ...

    def close(self) -> None: ...


class StoreSide:
    """One addressable tier. ``slot_bytes`` is the size of a slot over all KV cache groups.

    Threads: ``open`` and ``close`` from one thread, the rest from any.
    """

    def __init__(self, tier: str, backend: AddressableBackend, slot_bytes: int, rank: int) -> None:
        self._tier = tier
        self._backend = backend
        self._slot_bytes = slot_bytes
        self._rank = rank
        self.slots = 0
        """Whole slots in the region; 0 until :meth:`open`."""

    def open(self, on_ready: Callable[[], None]) -> Region:
        """Open the backend. ``on_ready()`` is called from another thread whenever more is ready.

        Raises :class:`KVFerryError` when the system refuses or not even one slot fits.
        """

        def make_arena(name: str, capacity: int, options: ArenaOptions) -> MemoryFileArena:
            return MemoryFileArena(name, capacity, options, on_progress=lambda _ready, _total: on_ready())

        region = self._backend.open(BackendContext(name=self._tier, rank=self._rank, make_arena=make_arena))
        self.slots = region.length // self._slot_bytes
        if self.slots == 0:
            self._backend.close()
            raise KVFerryError(
                f"tier {self._tier} holds {region.length} bytes, less than one chunk of "
                f"{self._slot_bytes} bytes",
                kind=ErrorKind.CAPACITY,
                where=f"tiers.{self._tier}.capacity",
                remedy=f"give it at least {self._slot_bytes} bytes, or make chunk_tokens smaller",
            )
        return region

    def ready_slots(self) -> int:
        """Slots from the start that may be used now. Never falls."""
        return min(self.slots, self._backend.ready_bytes() // self._slot_bytes)

    def close(self) -> None:
        """Give the memory back. The caller guarantees that nothing copies any more. Idempotent."""
        self._backend.close()
