"""A tier for tests: host memory, nothing else."""

from __future__ import annotations

from attrs import frozen

from kvferry.api import Arena, ArenaOptions, BackendContext, HugePages, Region


@frozen(kw_only=True)
class MemoryOptions:
    """No keys of its own."""


class MemoryBackend:
    """One arena of small pages. ``region`` is what was opened last."""

    def __init__(self, options: MemoryOptions, capacity: int) -> None:
        del options
        self._capacity = capacity
        self._arena: Arena | None = None
        self.region: Region | None = None

    def open(self, context: BackendContext) -> Region:
        options = ArenaOptions(huge_pages=HugePages.NEVER)
        self._arena = context.make_arena(context.name, self._capacity, options)
        self.region = self._arena.open()
        return self.region

    def opened(self) -> Region:
        """The open region."""
        assert self.region is not None
        return self.region

    def ready_bytes(self) -> int:
        return 0 if self._arena is None else self._arena.ready_bytes()

    def close(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = self.region = None
