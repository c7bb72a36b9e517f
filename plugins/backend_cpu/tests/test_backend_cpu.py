"""The CPU backend: described lightly, opened through whatever arena core hands it."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path

import pytest
from attrs import define, field
from packaging.specifiers import SpecifierSet

from kvferry.api import (
    API_VERSION,
    ENTRY_POINT_GROUP,
    ArenaOptions,
    BackendCapabilities,
    BackendContext,
    ErrorKind,
    HostEnvironment,
    HugePages,
    KVFerryError,
    Region,
)
from kvferry.testing.light_imports import measure_import
from kvferry.testing.rules import rule_faults, run_examples
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


def test_the_installed_entry_point_leads_to_the_manifest() -> None:
    (point,) = (p for p in entry_points(group=ENTRY_POINT_GROUP) if p.name == plugin.MANIFEST.name)
    assert point.value == "kvferry_backend_cpu.plugin"
    assert point.load() is plugin
    assert SpecifierSet(plugin.MANIFEST.api).contains(API_VERSION)


def test_the_spec_names_what_exists_and_claims_what_the_backend_does() -> None:
    (spec,) = plugin.kvferry_backends()
    assert spec.name == "cpu"
    assert spec.capabilities == BackendCapabilities(addressable=True, servable_to_peers=True)
    assert spec.factory == f"{CPUBackend.__module__}:{CPUBackend.__name__}"
    assert spec.options == f"{CPUOptions.__module__}:{CPUOptions.__name__}"


def test_the_entry_module_is_light_and_leaves_the_backend_alone() -> None:
    cost = measure_import("kvferry_backend_cpu.plugin", runs=3)
    assert cost.light, cost
    assert "kvferry_backend_cpu.backend" not in cost.modules
    assert not any(name.startswith(("kvferry.data", "kvferry.runtime")) for name in cost.modules)


def test_rules_are_sound_and_their_examples_come_out_as_said() -> None:
    rules = tuple(plugin.kvferry_rules())
    assert rule_faults(rules, plugin.MANIFEST.rule_prefix) == ()
    assert [problem for rule in rules for problem in run_examples(rule)] == []


def facts(root: Path, meminfo: str | None) -> dict[str, object]:
    if meminfo is not None:
        (root / "proc").mkdir()
        (root / "proc/meminfo").write_text(meminfo)
    found = plugin.kvferry_facts(HostEnvironment(root=str(root)))
    return {fact.path: fact.value for fact in found}


def test_facts_of_a_described_machine(tmp_path: Path) -> None:
    text = "MemAvailable: 2048 kB\nHugePages_Free: 10\nHugePages_Rsvd: 4\nHugepagesize: 2048 kB\n"
    assert facts(tmp_path, text) == {
        "backend_cpu.memory_available_bytes": 2 << 20,
        "backend_cpu.reserved_huge_page_bytes": 12 << 20,
    }


@pytest.mark.parametrize("text", [None, "", "MemTotal: 5 kB\nnonsense\nMemAvailable: much\n"])
def test_what_cannot_be_read_is_left_out(tmp_path: Path, text: str | None) -> None:
    assert facts(tmp_path, text) == {}
