"""Facts about a machine that only exists in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.api import Fact, HostEnvironment
from kvferry.data.memory import available_memory
from kvferry.data.native import find_native
from kvferry.plugins.hostfacts import host_facts
from kvferry.plugins.nativefacts import FINDER as FINDER_OF_CORE
from kvferry.plugins.nativefacts import native_facts
from kvferry.testing.fake_distributions import importable

HUGE_PAGES = "sys/kernel/mm/transparent_hugepage/shmem_enabled"


def machine(root: Path, files: dict[str, str]) -> dict[str, Fact]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return {fact.path: fact for fact in host_facts(HostEnvironment(root=str(root)))}


def test_memory_is_what_the_machine_has_or_the_container_may_use(tmp_path: Path) -> None:
    meminfo = "MemFree:  5 kB\nMemTotal:       32768000 kB\n"
    facts = machine(tmp_path, {"proc/meminfo": meminfo, "sys/fs/cgroup/memory.max": "max\n"})
    assert facts["host.memory_bytes"].value == 32768000 * 1024
    assert facts["host.memory_bytes"].origin == "probe /proc/meminfo"
    facts = machine(tmp_path, {"sys/fs/cgroup/memory.max": "1073741824\n"})
    assert facts["host.memory_bytes"].value == 1 << 30
    assert "memory.max" in facts["host.memory_bytes"].origin
    facts = machine(tmp_path, {"sys/fs/cgroup/memory.max": str(1 << 60)})
    assert facts["host.memory_bytes"].value == 32768000 * 1024


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("always within_size advise [never] deny force\n", "never"),
        ("always [within_size] advise never\n", "within_size"),
    ],
)
def test_the_huge_page_setting_is_the_word_in_brackets(tmp_path: Path, text: str, value: str) -> None:
    assert machine(tmp_path, {HUGE_PAGES: text})["host.huge_pages_shmem"].value == value


def test_what_cannot_be_read_is_left_out_and_never_guessed(tmp_path: Path) -> None:
    facts = machine(tmp_path, {"proc/meminfo": "MemTotal: lots\n", HUGE_PAGES: "garbage"})
    assert "host.memory_bytes" not in facts
    assert "host.huge_pages_shmem" not in facts
    assert "host.shm_free_bytes" not in facts
    assert "host.memory_available_bytes" not in facts
    assert "host.huge_pages_reserved_bytes" not in facts
    assert facts["host.cpus"].value >= 1


def test_free_memory_is_the_figure_by_which_a_tier_is_refused(tmp_path: Path) -> None:
    facts = machine(tmp_path, {"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable:  2048 kB\n"})
    assert facts["host.memory_available_bytes"].value == available_memory(tmp_path).size == 2 << 20
    assert facts["host.memory_available_bytes"].origin == "probe MemAvailable of /proc/meminfo"
    # A container has less room than the kernel's estimate says.
    group = {
        "proc/self/cgroup": "0::/box\n",
        "sys/fs/cgroup/box/memory.max": "1048576\n",
        "sys/fs/cgroup/box/memory.current": "524288\n",
    }
    facts = machine(tmp_path, group)
    assert facts["host.memory_available_bytes"].value == available_memory(tmp_path).size == 1 << 19
    assert "control group" in facts["host.memory_available_bytes"].origin


def test_reserved_huge_pages_are_those_that_nobody_has_spoken_for(tmp_path: Path) -> None:
    text = "HugePages_Free: 10\nHugePages_Rsvd: 4\nHugepagesize: 2048 kB\n"
    facts = machine(tmp_path, {"proc/meminfo": text})
    assert facts["host.huge_pages_reserved_bytes"].value == 12 << 20
    assert "host.memory_bytes" not in facts


def native(finder: str) -> dict[str, object]:
    return {fact.path: fact.value for fact in native_facts(finder)}


FINDER = """
from types import SimpleNamespace

def good():
    return SimpleNamespace(module=1, version="7.1", why="kvferry-native 7.1 is installed")

def other_interface():
    return SimpleNamespace(module=None, version="7.1", why="has interface 3, not 1")

def absent():
    return SimpleNamespace(module=None, version="", why="kvferry-native is not installed")

def crash():
    raise OSError("GLIBC_2.99 not found")
"""


def test_native_code_is_found_missing_or_broken_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "zoo_finder.py").write_text(FINDER)
    with importable(tmp_path):
        good = native("zoo_finder:good")
        other = native("zoo_finder:other_interface")
        absent = native("zoo_finder:absent")
        crash = native("zoo_finder:crash")
    assert (good["native.available"], good["native.version"]) == (True, "7.1")
    assert (other["native.available"], other["native.version"]) == (False, "7.1")
    assert other["native.why"] == "has interface 3, not 1"
    assert absent == {
        "native.available": False,
        "native.why": "kvferry-native is not installed",
    }
    assert crash["native.available"] is False
    assert "GLIBC_2.99 not found" in str(crash["native.why"])


def test_the_fact_is_the_data_planes_own_decision() -> None:
    status = find_native()
    facts = native(FINDER_OF_CORE)
    assert facts["native.available"] is (status.module is not None)
    assert facts["native.why"] == status.why
