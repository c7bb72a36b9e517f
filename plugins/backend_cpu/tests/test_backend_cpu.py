"""The CPU backend: opened through whatever arena core hands it."""

from __future__ import annotations

import pytest
from attrs import define, field

from kvferry.api import (
    ArenaOptions,
    BackendCapabilities,
    BackendContext,
    ErrorKind,
    HugePages,
    KVFerryError,
    Region,
)
from kvferry_backend_cpu import plugin
from kvferry_backend_cpu.backend import CPUBackend
from kvferry_backend_cpu.options import CPUOptions


@define
class RecordingArena:
    """An arena that only remembers what was asked of it."""

    name: str
    capacity: int
    options: ArenaOptions
    ready: int = 0
    calls: list[str] = field(factory=list)
    refuses: bool = False

    def open(self) -> Region:
        self.calls.append("open")
        if self.refuses:
            raise KVFerryError("no memory", kind=ErrorKind.CAPACITY)
        return Region(name=self.name, address=4096, length=self.capacity)

    def ready_bytes(self) -> int:
        return self.ready

    def close(self) -> None:
        self.calls.append("close")


@define
class Workshop:
    """Makes recording arenas."""

    refuses: bool = False
    made: list[RecordingArena] = field(factory=list)

    def context(self, name: str = "fast") -> BackendContext:
        return BackendContext(name=name, rank=1, make_arena=self.make)

    def make(self, name: str, capacity: int, options: ArenaOptions) -> RecordingArena:
        self.made.append(RecordingArena(name, capacity, options, refuses=self.refuses))
        return self.made[-1]


@pytest.mark.parametrize("wish", list(HugePages))
def test_one_arena_of_the_tier_s_name_capacity_and_options(wish: HugePages) -> None:
    workshop = Workshop()
    backend = CPUBackend(CPUOptions(huge_pages=wish), 12345)
    assert workshop.made == [], "the constructor keeps values only"
    assert backend.open(workshop.context()) == Region(name="fast", address=4096, length=12345)
    (arena,) = workshop.made
    assert (arena.name, arena.capacity) == ("fast", 12345)
    assert arena.options == ArenaOptions(huge_pages=wish)


def test_ready_bytes_are_the_arena_s() -> None:
    workshop = Workshop()
    backend = CPUBackend(CPUOptions(), 100)
    assert backend.ready_bytes() == 0
    backend.open(workshop.context())
    workshop.made[0].ready = 70
    assert backend.ready_bytes() == 70


def test_closing_is_idempotent_and_needs_no_opening() -> None:
    workshop = Workshop()
    backend = CPUBackend(CPUOptions(), 100)
    backend.close()
    backend.open(workshop.context())
    backend.close()
    backend.close()
    assert workshop.made[0].calls == ["open", "close"]


def test_a_refused_arena_is_passed_on_and_leaves_nothing_open() -> None:
    workshop = Workshop(refuses=True)
    backend = CPUBackend(CPUOptions(), 100)
    with pytest.raises(KVFerryError, match="no memory"):
        backend.open(workshop.context())
    assert backend.ready_bytes() == 0
    backend.close()
    assert workshop.made[0].calls == ["open"]


def test_the_spec_names_what_exists_and_claims_what_the_backend_does() -> None:
    (spec,) = plugin.kvferry_backends()
    assert spec.name == "cpu"
    assert spec.capabilities == BackendCapabilities(addressable=True, servable_to_peers=True)
    assert spec.factory == f"{CPUBackend.__module__}:{CPUBackend.__name__}"
    assert spec.options == f"{CPUOptions.__module__}:{CPUOptions.__name__}"
