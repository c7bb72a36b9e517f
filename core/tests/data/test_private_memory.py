"""Private arenas: all of the memory is there when they are open, and goes when they are closed."""

from __future__ import annotations

import errno

import pytest

from kvferry.api import ErrorKind, KVFerryError
from kvferry.data.mapping import region_view
from kvferry.data.private_memory import HUGE_PAGE_BYTES, PrivateArena

MIB = 1 << 20


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


@pytest.mark.parametrize("capacity", [1, 4097, HUGE_PAGE_BYTES, 9 * MIB + 5])
def test_every_byte_can_be_written_and_the_region_begins_where_a_huge_page_may(capacity: int) -> None:
    arena = PrivateArena("landing", capacity)
    assert arena.ready_bytes() == 0
    region = arena.open()
    assert (region.name, region.length) == ("landing", capacity)
    assert region.address % HUGE_PAGE_BYTES == 0
    assert arena.ready_bytes() == capacity
    view = region_view(region)
    assert not view.any()
    view[:] = 7
    assert int(view.sum()) == 7 * capacity
    del view, region
    arena.close()
    arena.close()


def test_the_memory_is_there_at_once_and_goes_with_the_arena() -> None:
    before = resident()
    arena = PrivateArena("landing", 64 * MIB)
    region = arena.open()
    assert resident() - before >= 60 * MIB
    del region
    arena.close()
    assert resident() - before < 30 * MIB


def test_what_the_system_refuses_is_one_clear_error() -> None:
    with pytest.raises(KVFerryError) as caught:
        PrivateArena("landing", 1 << 60).open()
    assert caught.value.kind is ErrorKind.CAPACITY
    assert f"errno {errno.ENOMEM}" in str(caught.value)
    assert "p2p.buffer" in str(caught.value)
