"""How the laws of keyed backends get at a backend, its store and its chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import define, field

from kvferry.api import Backend, BackendContext, BackendSpec, ChunkHeader, ChunkKey, ErrorKind, KVFerryError
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.driver import Driver, digest, header_of, make_context, value_of
from kvferry.testing.conformance.raw import RawStore
from kvferry.testing.conformance.subject import BackendSubject
from kvferry.testing.guarded import GuardedMemory

Chunk = tuple[ChunkHeader, bytes]

_MEMORY_TIMES_CAPACITY = 6


@define
class Workbench:
    """Makes chunks and opens backends over one store.

    Keys are in a namespace that only this test knows, so a store that holds other things is as good as
    an empty one.
    """

    new_backend: Callable[[], Backend]
    claims: frozenset[str]
    capacity: int
    patience: float
    max_value_bytes: int | None = None
    """The limit that the spec claims; it reaches a backend in its context, as in core."""
    namespace: bytes = field(factory=lambda: digest(os.urandom(16)))
    drivers: list[Driver] = field(factory=list)

    @property
    def outlives(self) -> bool:
        """Whether what is stored is still there after the backend was closed."""
        return bool(self.claims & {"persistent", "shared"})

    def key(self, *name: object) -> ChunkKey:
        return ChunkKey(self.namespace, digest(*name))

    def chunk(self, number: int, size: int, edition: int = 0, **facts: Any) -> Chunk:
        """The chunk of a number: same number, same key."""
        key = self.key(number)
        return header_of(key, size, number, **facts), value_of(key, size, edition)

    def chunks(self, count: int, size: int, first: int = 0) -> list[Chunk]:
        return [self.chunk(number, size) for number in range(first, first + count)]

    def make(self) -> Driver:
        """A backend that is not open yet."""
        memory = GuardedMemory("memory", _MEMORY_TIMES_CAPACITY * self.capacity)
        context = self._context(memory)
        driver = Driver(self.new_backend(), context, memory, self.patience)
        self.drivers.append(driver)
        return driver

    def open(self, **facts: Any) -> Driver:
        """Open a backend, and recover it if it is persistent. ``facts`` change its context."""
        driver = self.make()
        driver.context = self._context(driver.memory, **facts)
        driver.backend.open(driver.context)
        if "persistent" in self.claims:
            try:
                driver.recovered = list(driver.backend.recover())
            except Exception as error:
                driver.close()  # or the next law finds the store in use, and says only that
                if isinstance(error, KVFerryError) and error.kind is ErrorKind.UNSUPPORTED:
                    raise AssertionError(
                        "the spec claims persistent, and the backend refuses to recover(): write  recover,  "
                        f"or do not claim it\n{error}"
                    ) from error
                raise
        return driver

    def open_beside(self, who: str, **facts: Any) -> Driver:
        """Open a backend that has to be welcome while another is open."""
        try:
            return self.open(**facts)
        except KVFerryError as error:
            raise AssertionError(
                f"{who} was refused while the first was open: they have to lie apart\n{error}"
            ) from error

    def reopen(self, driver: Driver, **facts: Any) -> Driver:
        """Close one and open another over the same store."""
        driver.close()
        try:
            return self.open(**facts)
        except KVFerryError as error:
            error.add_note(
                "The kit had closed the backend just before: is a lock or a descriptor left by close_store?"
            )
            raise

    def close_all(self) -> None:
        for driver in self.drivers:
            driver.close()

    def _context(self, memory: GuardedMemory, **facts: Any) -> BackendContext:
        own = {"namespace": self.namespace, "max_value_bytes": self.max_value_bytes}
        return make_context(memory, own | facts)


class KeyedSubject(BackendSubject, kit=True):
    """Fixtures of :class:`kvferry.testing.conformance.BackendConformance`."""

    @pytest.fixture
    def bench(
        self, plugins: LoadedPlugins, spec: BackendSpec, options: Any, claims: frozenset[str]
    ) -> Iterator[Workbench]:
        """Whatever is opened through it is closed at the end of the test."""
        factory = plugins.factory("backend", self.backend)
        bench = Workbench(
            lambda: factory(options, self.capacity),
            claims,
            self.capacity,
            self.patience,
            spec.capabilities.max_value_bytes,
        )
        yield bench
        bench.close_all()

    @pytest.fixture
    def driver(self, bench: Workbench) -> Driver:
        """One open backend."""
        return bench.open()

    @pytest.fixture
    def raw(self, options: Any) -> RawStore:
        """The side door to the store. An author must give it."""
        raise KVFerryError(
            "the suite has no side door to the store",
            kind=ErrorKind.CONFIG,
            where=type(self).__name__,
            remedy="write a fixture  raw  that gives a kvferry.testing.conformance.RawStore",
        )
