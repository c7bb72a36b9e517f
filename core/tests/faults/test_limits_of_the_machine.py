"""Memory that the system will not give: in pieces where it can be, else refused with the limit's name."""

from __future__ import annotations

import errno
import subprocess
import sys

import pytest

from kvferry.api import ArenaOptions, HugePages
from kvferry.data.arena import FirstTouch, MemoryFileArena
from kvferry.data.memory import AvailableMemory
from kvferry.data.native import find_native
from kvferry.data.store_side import StoreSide
from kvferry.data.touch import choose_populate
from kvferry.testing.backends import MemoryBackend, MemoryOptions
from kvferry.testing.fake_instance import wait_until

MIB = 1 << 20
PLENTY = AvailableMemory(1 << 40, "a test")
SMALL = ArenaOptions(huge_pages=HugePages.NEVER)

OPENS = """
import resource, sys
from kvferry.api import ArenaOptions, HugePages, KVFerryError
from kvferry.data.arena import MemoryFileArena
from kvferry.data.memory import AvailableMemory
size = int(sys.argv[3])
PLENTY = AvailableMemory(1 << 40, "a test")
limit = getattr(resource, sys.argv[1])
resource.setrlimit(limit, (int(sys.argv[2]),) * 2)
arena = MemoryFileArena("cpu", size, ArenaOptions(huge_pages=HugePages.NEVER), available=lambda: PLENTY)
try:
    arena.open()
except KVFerryError as error:
    print("refused", error.kind.value, error)
else:
    print(arena.wait(60.0).value, arena.ready_bytes())
    arena.close()
"""


def open_under(limit: str, value: int, size: int) -> str:
    """What an arena of ``size`` bytes comes to in a process with this limit."""
    run = subprocess.run(
        [sys.executable, "-c", OPENS, limit, str(value), str(size)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return run.stdout.strip()


def test_no_call_asks_the_system_for_more_than_a_piece_of_a_huge_arena() -> None:
    """One call over everything fails above a driver's limit (LMCache-Ascend#242)."""
    asked: list[int] = []
    populate = choose_populate(find_native())

    def stingy(address: int, length: int, allow_touch: bool) -> object:
        asked.append(length)
        if length > 2 * MIB:
            raise OSError(errno.ENOMEM, "too much in one call")
        return populate(address, length, allow_touch)

    arena = MemoryFileArena("cpu", 40 * MIB + 4096, SMALL, available=lambda: PLENTY, populate=stingy)
    arena.open()
    assert arena.wait(60.0) is FirstTouch.DONE
    assert (arena.ready_bytes(), sum(asked)) == (40 * MIB + 4096,) * 2
    arena.close()


@pytest.mark.parametrize("calls", [0, 1, 7])
def test_a_system_that_gives_only_some_calls_leaves_a_tier_of_what_it_gave(calls: int) -> None:
    populate = choose_populate(find_native())
    count = 0

    def tired(address: int, length: int, allow_touch: bool) -> object:
        nonlocal count
        count += 1
        if count > calls:
            raise OSError(errno.ENOMEM, "no more")
        return populate(address, length, allow_touch)

    def make_arena(name: str, capacity: int, options: ArenaOptions) -> MemoryFileArena:
        return MemoryFileArena(name, capacity, options, available=lambda: PLENTY, populate=tired)

    arena = make_arena("cpu", 20 * MIB, SMALL)
    arena.open()
    assert arena.wait(60.0) is FirstTouch.FAILED
    assert arena.ready_bytes() == calls * 2 * MIB
    arena.close()


def test_a_small_limit_on_locked_memory_hinders_nobody_who_locks_none() -> None:
    assert open_under("RLIMIT_MEMLOCK", 64 << 10, 8 * MIB) == f"done {8 * MIB}"


@pytest.mark.parametrize(
    ("limit", "value", "words"),
    [
        ("RLIMIT_AS", 1 << 30, "address space of this process is limited to 1073741824 bytes"),
        ("RLIMIT_FSIZE", 1 << 20, "File too large"),
        ("RLIMIT_NOFILE", 4, "ulimit -n"),
    ],
)
def test_a_limit_of_the_process_is_named_with_the_size_and_a_remedy(
    limit: str, value: int, words: str
) -> None:
    size = 2 << 30 if limit == "RLIMIT_AS" else 8 * MIB
    told = open_under(limit, value, size)
    assert told.startswith("refused capacity")
    assert words in told
    assert str(size) in told


@pytest.mark.parametrize(("extra", "slots"), [(0, 5), (1, 5), (99, 5), (100, 6)])
def test_a_capacity_that_is_no_whole_number_of_slots_is_rounded_down(extra: int, slots: int) -> None:
    """A size that is no multiple of a page must not trip an assertion (LMCache#1909)."""
    store = StoreSide("memory", MemoryBackend(MemoryOptions(), 500 + extra), 100, 0)
    region = store.open(lambda: None)
    assert store.slots == slots <= region.length // 100
    wait_until(lambda: store.ready_slots() == slots, 10.0, "slots that never became ready")
    store.close()
