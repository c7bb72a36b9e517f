"""Buffered reads go through huge pages of the page cache, and are the same bytes and errors as without."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import ReadStatus
from kvferry_backend_ssd.huge_reads import LARGEST_HUGE_PAGE, HugeReads, find_huge_page
from kvferry_backend_ssd.options import IOPath
from plugins.backend_ssd.tests.ssd_bench import MIB, workbench
from plugins.backend_ssd.tests.ssd_raw import StoredChunks

PAGE = mmap.PAGESIZE
HUGE = 2 * MIB
LENGTH = 12 * MIB


def cached(fd: int, length: int) -> np.ndarray:
    """Which pages of the file are in the page cache."""
    library = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(fd, length, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE) as mapping:
        found = (ctypes.c_ubyte * (length // PAGE))()
        window = (ctypes.c_ubyte * length).from_buffer(mapping)
        address = ctypes.c_void_p(ctypes.addressof(window))
        assert library.mincore(address, ctypes.c_size_t(length), found) == 0
        del window
    return np.frombuffer(bytes(found), np.uint8) & 1 == 1


def drop(fd: int) -> None:
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture(scope="module")
def disk_file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    path = tmp_path_factory.mktemp("huge") / "file"
    path.write_bytes(np.random.default_rng(7).bytes(LENGTH))
    fd = os.open(path, os.O_RDWR)
    drop(fd)
    if cached(fd, LENGTH).any():
        pytest.skip("the file system of the temporary folder keeps its pages in memory")
    yield fd
    os.close(fd)


@pytest.fixture(scope="module")
def reads(disk_file: int) -> Iterator[HugeReads]:
    made = HugeReads(disk_file, LENGTH, HUGE)
    assert made.works
    with made.around([(0, HUGE)]):
        filled = cached(disk_file, LENGTH)[: HUGE // PAGE].all()
    if not filled:
        pytest.skip("this kernel cannot fill the page cache on request (Linux 5.14 can)")
    yield made
    made.close()


@settings(max_examples=25, deadline=None)
@given(stretch=st.tuples(st.integers(0, LENGTH // PAGE - 1), st.integers(1, LENGTH // PAGE)))
def test_the_whole_huge_pages_of_a_stretch_and_nothing_else_are_there_while_it_is_read(
    disk_file: int, reads: HugeReads, stretch: tuple[int, int]
) -> None:
    begin = stretch[0] * PAGE
    length = min(stretch[1] * PAGE, LENGTH - begin)
    drop(disk_file)
    with reads.around([(begin, length)]):
        there = cached(disk_file, LENGTH).reshape(-1, HUGE // PAGE)
    inside = [begin <= at and at + HUGE <= begin + length for at in range(0, LENGTH, HUGE)]
    assert there.all(axis=1).tolist() == inside
    assert there.any(axis=1).tolist() == inside
    assert not cached(disk_file, LENGTH).any()


def test_what_was_read_is_no_memory_of_the_process_afterwards(disk_file: int, reads: HugeReads) -> None:
    def resident() -> int:
        text = Path("/proc/self/status").read_text()
        return int(text.split("RssFile:")[1].split()[0]) * 1024

    before = resident()
    with reads.around([(0, LENGTH)]):
        assert resident() - before >= LENGTH // 2
    assert resident() - before < HUGE


def test_bytes_that_are_not_on_the_disk_yet_stay(disk_file: int, reads: HugeReads) -> None:
    news = os.urandom(HUGE)
    os.pwrite(disk_file, news, HUGE)
    with reads.around([(0, LENGTH)]):
        pass
    assert os.pread(disk_file, HUGE, HUGE) == news


def test_a_file_that_was_cut_off_or_is_not_that_long_yet_is_no_signal(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * PAGE)
    fd = os.open(path, os.O_RDWR)
    reads = HugeReads(fd, LENGTH, HUGE)
    with reads.around([(0, LENGTH)]):
        assert os.pread(fd, 2, PAGE - 1) == b"x"
    os.ftruncate(fd, LENGTH)
    with reads.around([(0, LENGTH)]):
        assert os.pread(fd, 1, LENGTH - 1) == b"\0"
    reads.close()
    reads.close()
    os.close(fd)


@pytest.mark.parametrize("huge_page", [0, 2 * LARGEST_HUGE_PAGE, 512 * MIB])
def test_a_kernel_without_huge_pages_of_a_useful_size_reads_as_ever(disk_file: int, huge_page: int) -> None:
    drop(disk_file)
    reads = HugeReads(disk_file, LENGTH, huge_page)
    with reads.around([(0, LENGTH)]):
        assert not cached(disk_file, LENGTH).any()
    assert not reads.works


def test_a_file_that_cannot_be_mapped_is_read_as_ever() -> None:
    reader, writer = os.pipe()
    reads = HugeReads(reader, LENGTH, HUGE)
    assert not reads.works
    with reads.around([(0, LENGTH)]):
        os.write(writer, b"x")
    assert os.read(reader, 1) == b"x"
    reads.close()
    os.close(reader)
    os.close(writer)


def test_the_size_of_a_huge_page_comes_from_the_kernel(tmp_path: Path) -> None:
    fact = tmp_path / "hpage_pmd_size"
    assert find_huge_page(fact) == 0
    fact.write_text("2097152\n")
    assert find_huge_page(fact) == HUGE
    fact.write_text("none\n")
    assert find_huge_page(fact) == 0


def test_large_values_come_back_through_the_cache_and_a_damaged_one_does_not(
    tmp_path: Path, io_path: IOPath
) -> None:
    size = 6 * MIB + 123
    bench = workbench(tmp_path, 64 * MIB, slot=size, direct=False, io=io_path)
    driver = bench.open()
    chunks = bench.chunks(8, size)
    driver.store(chunks)
    driver.close()
    for file in tmp_path.rglob("*"):
        if file.is_file():
            with file.open("rb+") as opened:
                drop(opened.fileno())
    again = bench.open()
    again.expect(chunks)
    raw = StoredChunks(tmp_path)
    name = raw.names()[0]
    value = bytearray(raw.read(name))
    value[3 * MIB] ^= 1
    raw.write(name, bytes(value))
    found = [again.read_one(header.key, size).status for header, _ in chunks]
    assert Counter(found) == {ReadStatus.CORRUPT: 1, ReadStatus.FOUND: 7}
    bench.close_all()
