"""A tier over core's own arena."""

from __future__ import annotations

from kvferry.api import Arena, ArenaOptions, BackendContext, Region
from zoo_heavy.options import Options


class Backend:
    def __init__(self, options: Options, capacity: int) -> None:
        self._capacity = capacity
        self._arena: Arena | None = None

    def open(self, context: BackendContext) -> Region:
        self._arena = context.make_arena(context.name, self._capacity, ArenaOptions())
        return self._arena.open()

    def ready_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.ready_bytes()

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
