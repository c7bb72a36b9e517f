"""Tiers of plain memory for tests, and stand-ins for them."""

from __future__ import annotations

from attrs import frozen

from kvferry.api import AddressableBackend, Arena, ArenaOptions, BackendContext, HugePages, Region


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


class NullAddressableBackend:
    """A tier without room: its region has no bytes."""

    def open(self, context: BackendContext) -> Region:
        return Region(name=context.name, address=0, length=0)

    def ready_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class ForwardingAddressableBackend:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: AddressableBackend) -> None:
        self.inner = inner

    def open(self, context: BackendContext) -> Region:
        return self.inner.open(context)

    def ready_bytes(self) -> int:
        return self.inner.ready_bytes()

    def close(self) -> None:
        self.inner.close()


class NullArena:
    """Memory without bytes."""

    def __init__(self, name: str = "null") -> None:
        self._name = name

    def open(self) -> Region:
        return Region(name=self._name, address=0, length=0)

    def ready_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


class ForwardingArena:
    """Passes every call on to ``inner``. Override what a test wants to see or to change."""

    def __init__(self, inner: Arena) -> None:
        self.inner = inner

    def open(self) -> Region:
        return self.inner.open()

    def ready_bytes(self) -> int:
        return self.inner.ready_bytes()

    def close(self) -> None:
        self.inner.close()
