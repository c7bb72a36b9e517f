"""populate makes pages present and keeps what is in them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import pytest

import kvferry_native

SIZE = 4 << 20


def resident_bytes(address: int) -> int:
    """``Rss`` of the mapping that begins at ``address``."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            inside = int(head.split("-")[0], 16) == address
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


def test_populate_brings_all_pages_and_keeps_bytes() -> None:
    fd = os.memfd_create("populate")
    os.ftruncate(fd, SIZE)
    with mmap.mmap(fd, SIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory[5000] = 77
        assert resident_bytes(address) < SIZE
        kvferry_native.populate(address + 1, SIZE - 2)  # partly covered pages count
        assert resident_bytes(address) == SIZE
        assert memory[5000] == 77
        assert memory[SIZE - 1] == 0
    os.close(fd)


def test_populate_reports_memory_that_is_not_there() -> None:
    with pytest.raises(OSError, match=r"Cannot allocate memory|Bad address"):
        kvferry_native.populate(1 << 62, mmap.PAGESIZE)


def test_populate_of_nothing_and_of_a_wrapping_range() -> None:
    assert kvferry_native.populate(4096, 0)
    with pytest.raises(ValueError, match="wraps"):
        kvferry_native.populate(2**64 - 4096, 8192)


def test_advice_for_huge_pages_is_accepted_where_the_kernel_has_them() -> None:
    known = Path("/sys/kernel/mm/transparent_hugepage/enabled").exists()
    with mmap.mmap(-1, SIZE) as memory:
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        assert kvferry_native.advise_hugepages(address, SIZE) is known
    assert kvferry_native.advise_hugepages(4096, 10) is False  # not one whole page
    assert kvferry_native.advise_hugepages(1 << 62, 1 << 20) is False
