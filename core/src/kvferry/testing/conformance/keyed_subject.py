"""How the laws of keyed backends get at a backend, its store and its chunks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import define, field

from kvferry.api import Backend, ChunkHeader, ChunkKey, ErrorKind, KVFerryError
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.driver import Driver, digest, header_of, make_context, value_of
from kvferry.testing.conformance.guarded import GuardedMemory
from kvferry.testing.conformance.raw import RawStore
from kvferry.testing.conformance.subject import BackendSubject

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
        context = make_context(memory, {"namespace": self.namespace})
        driver = Driver(self.new_backend(), context, memory, self.patience)
        self.drivers.append(driver)
        return driver

    def open(self, **facts: Any) -> Driver:
        """Open a backend, and recover it if it is persistent. ``facts`` change its context."""
        driver = self.make()
        driver.context = make_context(driver.memory, {"namespace": self.namespace, **facts})
        driver.backend.open(driver.context)
        if "persistent" in self.claims:
            driver.recovered = list(driver.backend.recover())
        return driver

    def reopen(self, driver: Driver, **facts: Any) -> Driver:
        """Close one and open another over the same store."""
        driver.close()
        return self.open(**facts)

    def close_all(self) -> None:
        for driver in self.drivers:
            driver.close()


class KeyedSubject(BackendSubject, kit=True):
    """Fixtures of :class:`kvferry.testing.conformance.BackendConformance`."""

    @pytest.fixture
    def bench(self, plugins: LoadedPlugins, options: Any, claims: frozenset[str]) -> Iterator[Workbench]:
        """Whatever is opened through it is closed at the end of the test."""
        factory = plugins.factory("backend", self.backend)
        bench = Workbench(lambda: factory(options, self.capacity), claims, self.capacity, self.patience)
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
