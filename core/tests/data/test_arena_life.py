"""An arena from opening to closing: what it gives, what it refuses, and that it leaves nothing behind."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kvferry.api import ArenaOptions, ErrorKind, HugePages, KVFerryError, Retry
from kvferry.data.arena import SPARE_BYTES, STEP_BYTES, FirstTouch, MemoryFileArena, PageKind
from kvferry.data.mapping import create_region, region_view
from kvferry.data.memory import AvailableMemory
from kvferry.data.native import NativeStatus
from kvferry.data.touch import Populate, choose_populate, touch_pages

MIB = 1 << 20
DEADLINE = 60.0
PLENTY = AvailableMemory(1 << 50, "a test")
FROM_PYTHON = choose_populate(NativeStatus(None, "", "not for this test"))


def held() -> tuple[int, int, list[str]]:
    """Descriptors, kvferry mappings and threads of this process."""
    maps = Path("/proc/self/maps").read_text().count("kvferry:")
    return len(os.listdir("/proc/self/fd")), maps, sorted(t.name for t in threading.enumerate())


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    gc.collect()
    before = held()
    yield
    assert held() == before


class Gate:
    """A populate that stops before each piece until the test lets it pass."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.passes = threading.Semaphore(0)

    def __call__(self, address: int, length: int, allow_touch: bool) -> None:
        self.arrived.release()
        assert self.passes.acquire(timeout=DEADLINE)
        FROM_PYTHON(address, length, allow_touch)


def resident(region_address: int) -> int:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            inside = int(head.split("-")[0], 16) == region_address
        elif inside and head == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")


@pytest.mark.parametrize("populate", [None, FROM_PYTHON], ids=["chosen", "from python"])
@pytest.mark.parametrize("capacity", [1, 5000, 3 * MIB + 17, STEP_BYTES + MIB])
def test_all_bytes_become_ready_and_usable(capacity: int, populate: Populate | None) -> None:
    arena = MemoryFileArena("cpu", capacity, populate=populate)
    region = arena.open()
    try:
        assert (region.name, region.length) == ("cpu", capacity)
        assert region.address % os.sysconf("SC_PAGESIZE") == 0
        assert arena.wait(DEADLINE) is FirstTouch.DONE
        assert arena.ready_bytes() == capacity
        assert resident(region.address) >= capacity
        view = region_view(region)
        assert not view.any()
        view[:] = 7
        assert os.pread(region.fd, 1, capacity - 1) == b"\x07"
    finally:
        arena.close()


def test_ready_bytes_only_grow_and_progress_is_told() -> None:
    told: list[tuple[int, int]] = []
    capacity = 2 * STEP_BYTES + MIB
    gate = Gate()
    arena = MemoryFileArena(
        "cpu", capacity, populate=gate, on_progress=lambda ready, total: told.append((ready, total))
    )
    region = arena.open()
    seen = [arena.ready_bytes()]
    pieces = 0
    while seen[-1] < capacity:
        assert gate.arrived.acquire(timeout=DEADLINE)
        seen.append(arena.ready_bytes())
        assert resident(region.address) >= seen[-1], "ready before it was touched"
        gate.passes.release()
        pieces += 1
        if capacity - seen[-1] <= 2 * MIB:
            break
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    arena.close()
    assert seen == sorted(seen)
    assert len(set(seen)) == pieces, "every piece is told"
    assert told == [(STEP_BYTES, capacity), (2 * STEP_BYTES, capacity), (capacity, capacity)]


def test_a_progress_report_that_raises_does_not_stop_the_touch(caplog: pytest.LogCaptureFixture) -> None:
    def report(_ready: int, _total: int) -> None:
        raise LookupError("mine")

    arena = MemoryFileArena("cpu", 2 * STEP_BYTES, on_progress=report)
    arena.open()
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    arena.close()
    assert [record.exc_info is not None for record in caplog.records] == [True]


def test_closing_ends_the_first_touch_within_one_piece() -> None:
    gate = Gate()
    arena = MemoryFileArena("cpu", 4 * STEP_BYTES, populate=gate)
    arena.open()
    assert gate.arrived.acquire(timeout=DEADLINE)
    closer = threading.Thread(target=arena.close)
    closer.start()
    gate.passes.release()
    closer.join(DEADLINE)
    assert not closer.is_alive()
    assert arena.first_touch() is FirstTouch.STOPPED
    assert not gate.arrived.acquire(blocking=False)
    arena.close()


def test_close_before_open_and_twice_is_harmless() -> None:
    arena = MemoryFileArena("cpu", MIB)
    arena.close()
    other = MemoryFileArena("cpu", MIB)
    other.open()
    other.close()
    other.close()


def test_two_arenas_are_separate() -> None:
    first, second = MemoryFileArena("a", 3 * MIB), MemoryFileArena("b", 2 * MIB)
    left, right = region_view(first.open()), region_view(second.open())
    assert first.wait(DEADLINE) is second.wait(DEADLINE) is FirstTouch.DONE
    left[:] = 1
    right[:] = 2
    assert np.unique(left).tolist() == [1]
    first.close()
    assert np.unique(right).tolist() == [2]
    second.close()


def test_first_touch_keeps_bytes_that_were_written_early() -> None:
    gate = Gate()
    arena = MemoryFileArena("cpu", 4 * MIB, populate=gate)
    view = region_view(arena.open())
    view[:MIB] = 9
    gate.passes.release(2)
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    assert view[:MIB].min() == 9
    arena.close()


def test_touching_page_by_page_brings_them_all_and_keeps_bytes() -> None:
    with create_region("touched", 2 * MIB) as mapped:
        region = mapped.region
        view = region_view(region)
        view[os.sysconf("SC_PAGESIZE")] = 9  # the very byte that is touched
        assert resident(region.address) < 2 * MIB
        touch_pages(region.address + 1, 2 * MIB - 2)
        assert resident(region.address) == 2 * MIB
        assert view.sum() == 9


def test_a_capacity_above_the_free_memory_is_refused_with_both_numbers() -> None:
    arena = MemoryFileArena("cpu", 10 * MIB, available=lambda: AvailableMemory(9 * MIB, "a small box"))
    with pytest.raises(KVFerryError) as caught:
        arena.open()
    error = caught.value
    assert (error.kind, error.retry, error.where) == (ErrorKind.CAPACITY, Retry.LATER, "cpu")
    assert str(10 * MIB) in error.what
    assert str(9 * MIB) in error.what
    assert "a small box" in error.why
    arena.close()


def test_what_fits_with_the_spare_opens_and_one_byte_more_does_not() -> None:
    limit = SPARE_BYTES + MIB
    fits = MemoryFileArena("cpu", MIB, available=lambda: AvailableMemory(limit, "box"))
    fits.open()
    fits.close()
    with pytest.raises(KVFerryError, match=f"capacity of {MIB + 1} bytes"):
        MemoryFileArena("cpu", MIB + 1, available=lambda: AvailableMemory(limit, "box")).open()


@pytest.mark.parametrize("capacity", [0, -5])
def test_an_empty_arena_is_refused(capacity: int) -> None:
    with pytest.raises(KVFerryError) as caught:
        MemoryFileArena("cpu", capacity).open()
    assert caught.value.kind is ErrorKind.CONFIG


def test_a_mapping_that_the_system_refuses_is_told_with_its_number() -> None:
    size = 1 << 60  # no machine has so much address space
    with pytest.raises(KVFerryError) as caught:
        MemoryFileArena("cpu", size, available=lambda: AvailableMemory(1 << 62, "a test")).open()
    assert caught.value.kind is ErrorKind.CAPACITY
    assert str(size) in caught.value.what
    assert caught.value.why


def test_first_touch_waits_while_memory_is_short_and_goes_on_after(caplog: pytest.LogCaptureFixture) -> None:
    free = [PLENTY, PLENTY]  # for the opening and the first step
    short = AvailableMemory(SPARE_BYTES + STEP_BYTES - 1, "a full box")
    enough = threading.Event()

    def available() -> AvailableMemory:
        if free:
            return free.pop()
        return PLENTY if enough.is_set() else short

    arena = MemoryFileArena("cpu", 3 * STEP_BYTES, available=available, retry_seconds=0.01)
    arena.open()
    wait_until(lambda: arena.first_touch() is FirstTouch.WAITING)
    assert arena.ready_bytes() == STEP_BYTES
    assert arena.wait(0.05) is FirstTouch.WAITING, "it does not give up"
    assert arena.ready_bytes() == STEP_BYTES
    enough.set()
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    assert arena.ready_bytes() == 3 * STEP_BYTES
    arena.close()
    assert len(caplog.records) == 1, "one log line however long it waits"
    assert "a full box" in caplog.text


def test_closing_while_waiting_for_memory_is_prompt() -> None:
    answers = iter([PLENTY])
    arena = MemoryFileArena(
        "cpu",
        MIB,
        available=lambda: next(answers, AvailableMemory(0, "nothing left")),
        retry_seconds=10 * DEADLINE,
    )
    arena.open()
    wait_until(lambda: arena.first_touch() is FirstTouch.WAITING)
    closer = threading.Thread(target=arena.close)
    closer.start()
    closer.join(DEADLINE)
    assert not closer.is_alive()
    assert arena.first_touch() is FirstTouch.STOPPED


def test_a_page_that_the_system_refuses_ends_the_touch_and_keeps_what_is_ready(
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []

    def populate(address: int, length: int, allow_touch: bool) -> None:
        calls.append(address)
        if len(calls) == 3:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        FROM_PYTHON(address, length, allow_touch)

    arena = MemoryFileArena("cpu", STEP_BYTES, populate=populate)
    region = arena.open()
    assert arena.wait(DEADLINE) is FirstTouch.FAILED
    assert arena.ready_bytes() == 4 * MIB
    region_view(region)[: 4 * MIB] = 1
    arena.close()
    assert "Cannot allocate memory" in caplog.text


def test_a_system_without_the_populate_call_gets_its_pages_reserved_first() -> None:
    """What Linux before 5.14 does: the first answer is 'not supported', the touch comes after."""
    blocks: list[int] = []

    def old_system(address: int, length: int, allow_touch: bool) -> None:
        if not allow_touch:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        blocks.append(os.fstat(region.fd).st_blocks * 512)
        FROM_PYTHON(address, length, allow_touch)

    opened = threading.Event()

    def populate(address: int, length: int, allow_touch: bool) -> None:
        assert opened.wait(DEADLINE)
        old_system(address, length, allow_touch)

    arena = MemoryFileArena("cpu", 4 * MIB, populate=populate)
    region = arena.open()
    opened.set()
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    arena.close()
    assert blocks == [2 * MIB, 4 * MIB]


def test_huge_pages_that_are_required_and_missing_are_refused(tmp_path: Path) -> None:
    machine(tmp_path, shmem="always within_size advise [never] deny force", free_huge=0)
    options = ArenaOptions(huge_pages=HugePages.REQUIRE)
    with pytest.raises(KVFerryError) as caught:
        MemoryFileArena("cpu", 4 * MIB, options, root=tmp_path).open()
    assert caught.value.kind is ErrorKind.UNSUPPORTED
    assert "0 bytes of reserved huge pages" in caught.value.why


@pytest.mark.parametrize(
    ("wish", "shmem", "pages"),
    [
        (HugePages.AUTO, "always within_size [advise] never", PageKind.TRANSPARENT),
        (HugePages.REQUIRE, "[always] within_size advise never", PageKind.TRANSPARENT),
        (HugePages.NEVER, "[always] within_size advise never", PageKind.SMALL),
        (HugePages.AUTO, "always within_size advise [never]", PageKind.SMALL),
    ],
)
def test_transparent_huge_pages_are_asked_for_where_the_kernel_gives_them(
    tmp_path: Path, wish: HugePages, shmem: str, pages: PageKind
) -> None:
    machine(tmp_path, shmem=shmem, free_huge=0)
    arena = MemoryFileArena("cpu", 4 * MIB, ArenaOptions(huge_pages=wish), root=tmp_path)
    region = arena.open()
    assert arena.pages() is pages
    assert ("hg" in flags_of(region.address)) == (pages is PageKind.TRANSPARENT)
    assert "dd" in flags_of(region.address), "left out of core dumps"
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    arena.close()


def test_reserved_huge_pages_are_used_or_given_up_for_small_ones(tmp_path: Path) -> None:
    """The described machine has plenty; whether the real one has some decides what comes."""
    machine(tmp_path, shmem="always [never]", free_huge=1000)
    arena = MemoryFileArena("cpu", 3 * MIB + 5, root=tmp_path)
    region = arena.open()
    assert arena.pages() in (PageKind.RESERVED, PageKind.SMALL)
    assert region.length == 3 * MIB + 5
    assert arena.wait(DEADLINE) is FirstTouch.DONE
    arena.close()


def machine(root: Path, *, shmem: str, free_huge: int) -> None:
    (root / "proc").mkdir()
    (root / "proc/meminfo").write_text(
        f"MemAvailable: 99 kB\nHugePages_Free: {free_huge}\nHugePages_Rsvd: 0\nHugepagesize: 2048 kB\n"
    )
    folder = root / "sys/kernel/mm/transparent_hugepage"
    folder.mkdir(parents=True)
    (folder / "shmem_enabled").write_text(f"{shmem}\n")


def flags_of(address: int) -> list[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head, *rest = line.split()
        if "-" in head and not head.endswith(":"):
            inside = int(head.split("-")[0], 16) == address
        elif inside and head == "VmFlags:":
            return rest
    raise AssertionError("no such mapping")


def wait_until(condition: Callable[[], bool]) -> None:
    patience = threading.Event()
    for _ in range(int(DEADLINE / 0.005)):
        if condition():
            return
        patience.wait(0.005)
    raise AssertionError("it did not come to pass")
