"""What is read of a machine, on machines described by files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvferry.data.memory import (
    AvailableMemory,
    available_memory,
    memory_files_get_huge_pages,
    reserved_huge_pages,
)

GIB = 1 << 30


def describe(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {available // 1024} kB\n"}


def test_this_machine_has_memory() -> None:
    assert 0 < available_memory().size < sys.maxsize


def test_the_kernel_estimate_counts_without_control_groups(tmp_path: Path) -> None:
    describe(tmp_path, meminfo(7 * GIB))
    assert available_memory(tmp_path) == AvailableMemory(7 * GIB, "MemAvailable of /proc/meminfo")


def test_a_machine_that_tells_nothing_has_no_limit(tmp_path: Path) -> None:
    assert available_memory(tmp_path) == AvailableMemory(sys.maxsize, "no limit known")


def group(folder: str, limit: str, usage: int, inactive: int, version: int = 2) -> dict[str, str]:
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }[version]
    return {
        f"{folder}/{names[0]}": f"{limit}\n",
        f"{folder}/{names[1]}": f"{usage}\n",
        f"{folder}/memory.stat": f"anon 5\n{names[2]} {inactive}\n",
    }


def test_the_tightest_group_above_the_process_counts(tmp_path: Path) -> None:
    describe(
        tmp_path,
        {
            **meminfo(50 * GIB),
            "proc/self/cgroup": "0::/pods/one\n",
            **group("sys/fs/cgroup/pods/one", "max", 3 * GIB, 0),
            **group("sys/fs/cgroup/pods", str(10 * GIB), 7 * GIB, 2 * GIB),
        },
    )
    found = available_memory(tmp_path)
    assert found == AvailableMemory(5 * GIB, "control group limit /sys/fs/cgroup/pods/memory.max")


def test_inside_a_container_the_mount_itself_is_the_group(tmp_path: Path) -> None:
    describe(
        tmp_path,
        {
            **meminfo(50 * GIB),
            "proc/self/cgroup": "5:cpu:/x\n4:cpuset,memory:/docker/not-visible-here\n",
            **group("sys/fs/cgroup/memory", str(4 * GIB), 1 * GIB, 0, version=1),
        },
    )
    assert available_memory(tmp_path).size == 3 * GIB


def test_a_group_over_its_limit_has_no_room(tmp_path: Path) -> None:
    describe(tmp_path, {"proc/self/cgroup": "0::/\n", **group("sys/fs/cgroup", "100", 300, 50)})
    assert available_memory(tmp_path).size == 0


@pytest.mark.parametrize(("free", "spoken_for", "expected"), [(10, 3, 7 * 2048 * 1024), (2, 5, 0), (0, 0, 0)])
def test_reserved_huge_pages_that_nobody_else_was_promised(
    tmp_path: Path, free: int, spoken_for: int, expected: int
) -> None:
    text = f"HugePages_Free: {free}\nHugePages_Rsvd: {spoken_for}\nHugepagesize: 2048 kB\n"
    found = reserved_huge_pages(describe(tmp_path, {"proc/meminfo": text}))
    assert (found.page_bytes, found.free_bytes) == (2 << 20, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("always within_size [advise] never deny force\n", True),
        ("[always] within_size advise never deny force\n", True),
        ("always within_size advise [never] deny force\n", False),
        ("always within_size advise never [deny] force\n", False),
        ("", False),
        ("advise\n", False),
    ],
)
def test_whether_memory_files_get_huge_pages(tmp_path: Path, text: str, expected: bool) -> None:
    place = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
    assert memory_files_get_huge_pages(describe(tmp_path, {place: text})) is expected
    assert memory_files_get_huge_pages(tmp_path / "nothing") is False
