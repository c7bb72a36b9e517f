"""What every backend in plain memory promises."""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from attrs import frozen

from kvferry.api import (
    AddressableBackend,
    ArenaOptions,
    BackendContext,
    ErrorKind,
    KVFerryError,
    Region,
)
from kvferry.data.arena import MemoryFileArena
from kvferry.plugins import LoadedPlugins
from kvferry.testing.conformance.subject import BackendSubject
from kvferry.testing.leaks import LeakGuard

_STRIDE = 64 << 10


@frozen
class OpenMemory:
    """A backend and the region that it gave."""

    backend: AddressableBackend
    region: Region


class AddressableBackendConformance(BackendSubject, kit=True):
    """For a backend that claims ``addressable``. ``plugin`` and ``backend`` are all it needs, if the
    options have defaults."""

    @pytest.fixture
    def make(self, plugins: LoadedPlugins, options: Any) -> Iterator[Callable[[], AddressableBackend]]:
        """Makes backends that are closed at the end of the test."""
        factory = plugins.factory("backend", self.backend)
        made: list[AddressableBackend] = []

        def make() -> AddressableBackend:
            made.append(factory(options, self.capacity))
            return made[-1]

        yield make
        for backend in made:
            backend.close()

    @pytest.fixture
    def memory(self, make: Callable[[], AddressableBackend]) -> OpenMemory:
        """One open backend, ready to its last byte."""
        backend = make()
        region = backend.open(_context("tier", 0))
        self._wait_until_ready(backend, region)
        return OpenMemory(backend, region)

    def test_the_spec_claims_addressable(self, claims: frozenset[str]) -> None:
        """The spec says which kind of backend this is."""
        assert "addressable" in claims

    def test_the_region_has_the_tier_s_name_and_capacity(
        self, make: Callable[[], AddressableBackend]
    ) -> None:
        """What ``open`` gives is called like the tier, and is exactly as long as was asked for."""
        region = make().open(_context("some-tier", 0))
        assert region.name == "some-tier"
        assert region.length == self.capacity

    def test_ready_bytes_grow_to_the_whole(self, make: Callable[[], AddressableBackend]) -> None:
        """They never fall, never pass the end, and reach it."""
        backend = make()
        assert backend.ready_bytes() == 0, "nothing is ready before open"
        region = backend.open(_context("tier", 0))
        seen = self._wait_until_ready(backend, region)
        assert seen == sorted(seen), "ready_bytes fell"
        assert max(seen) == region.length

    def test_memory_keeps_what_is_written(self, memory: OpenMemory) -> None:
        """Every part can be written, and holds its own bytes to the last."""
        region = memory.region
        offsets = [*range(0, region.length - 8, _STRIDE), region.length - 8]
        for number, offset in enumerate(offsets):
            ctypes.memmove(region.address + offset, number.to_bytes(8, "little"), 8)
        found = [int.from_bytes(ctypes.string_at(region.address + at, 8), "little") for at in offsets]
        assert found == list(range(len(offsets)))

    def test_a_descriptor_leads_to_the_same_memory(self, memory: OpenMemory) -> None:
        """Whoever maps the region's memory file elsewhere sees the same bytes. Regions without a
        descriptor say so with -1."""
        region = memory.region
        assert region.fd >= -1
        if region.fd >= 0:
            ctypes.memmove(region.address + 4096, b"through one door", 16)
            with mmap.mmap(region.fd, region.length) as elsewhere:
                assert elsewhere[4096 : 4096 + 16] == b"through one door"

    def test_two_tiers_do_not_overlap(self, make: Callable[[], AddressableBackend]) -> None:
        """Tiers and ranks of one process have memory of their own."""
        first = make().open(_context("one", 0))
        second = make().open(_context("two", 1))
        apart = first.address + first.length <= second.address
        assert apart or second.address + second.length <= first.address

    def test_closing_twice_is_the_same_as_once(self, memory: OpenMemory) -> None:
        """``close`` is idempotent."""
        memory.backend.close()
        memory.backend.close()

    def test_what_was_never_open_can_be_closed(self, make: Callable[[], AddressableBackend]) -> None:
        """``close`` needs no ``open``."""
        make().close()

    def test_closing_gives_everything_back(self, make: Callable[[], AddressableBackend]) -> None:
        """No thread, descriptor or memory is left, also when the memory was not all ready yet."""
        guard = LeakGuard()
        backend = make()
        backend.open(_context("tier", 0))
        backend.close()
        assert guard.leaks() == []

    def test_a_refusal_is_passed_on(self, make: Callable[[], AddressableBackend]) -> None:
        """The memory comes from the context's ``make_arena``; when that refuses, ``open`` raises what
        it was told and leaves nothing open."""

        def refuse(name: str, capacity: int, options: ArenaOptions) -> _RefusingArena:
            return _RefusingArena()

        backend, guard = make(), LeakGuard()
        with pytest.raises(KVFerryError) as caught:
            backend.open(BackendContext(name="tier", rank=0, make_arena=refuse))
        assert caught.value.kind is ErrorKind.CAPACITY
        assert backend.ready_bytes() == 0
        backend.close()
        assert guard.leaks() == []

    def _wait_until_ready(self, backend: AddressableBackend, region: Region) -> list[int]:
        seen = [backend.ready_bytes()]
        deadline = time.monotonic() + self.patience
        while seen[-1] < region.length:
            assert time.monotonic() < deadline, f"{seen[-1]} of {region.length} bytes are ready"
            time.sleep(0.001)
            seen.append(backend.ready_bytes())
        return seen


class _RefusingArena:
    """Memory that is not to be had."""

    def open(self) -> Region:
        raise KVFerryError("there is no memory", kind=ErrorKind.CAPACITY, where="conformance suite")

    def ready_bytes(self) -> int:
        return 0

    def close(self) -> None:
        pass


def _make_arena(name: str, capacity: int, options: ArenaOptions) -> MemoryFileArena:
    return MemoryFileArena(name, capacity, options)


def _context(name: str, rank: int) -> BackendContext:
    return BackendContext(name=name, rank=rank, make_arena=_make_arena)
