"""A tier whose slots are plain CPU memory."""

from __future__ import annotations

from kvferry.api import Arena, ArenaOptions, BackendContext, Region
from kvferry_backend_cpu.options import CPUOptions


class CPUBackend:
    """One arena of ``capacity`` bytes. See :class:`kvferry.api.AddressableBackend`.

    What the arena is made of and how it is touched is for the context's ``make_arena`` to know.
    """

    def __init__(self, options: CPUOptions, capacity: int) -> None:
        self._options = options
        self._capacity = capacity
        self._arena: Arena | None = None

    def open(self, context: BackendContext) -> Region:
        options = ArenaOptions(huge_pages=self._options.huge_pages)
        arena = context.make_arena(context.name, self._capacity, options)
        region = arena.open()
        self._arena = arena
        return region

    def ready_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.ready_bytes()

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
