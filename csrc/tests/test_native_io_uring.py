"""IoUring does what os.pread and os.pwrite do, many at once; whatever goes wrong stays with its item."""

from __future__ import annotations

import errno
import gc
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from mmap import MAP_ANONYMOUS, MAP_SHARED, mmap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvferry_native

REFUSAL = kvferry_native.io_uring_refusal()
pytestmark = pytest.mark.skipif(bool(REFUSAL), reason=REFUSAL)

SECTOR = 4096
POISON = 0xA5
Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


def pages(size: int) -> Bytes:
    """Memory that begins at a page, as direct I/O wants it."""
    return np.frombuffer(mmap(-1, max(size, 1), MAP_SHARED | MAP_ANONYMOUS), np.uint8)[:size]


def move(
    ring: kvferry_native.IoUring,
    fd: int,
    items: Sequence[tuple[int, int, int]],
    *,
    write: bool = False,
    depth: int = 8,
) -> list[int]:
    """Run items ``(offset in file, address, length)``."""
    columns = np.array(items, np.uint64).reshape(-1, 3).T.copy()
    results = np.full(len(items), 12345, np.int64)
    ring.run(write, fd, columns[0], columns[1], columns[2], results, depth)
    return [int(result) for result in results]


@pytest.fixture
def ring() -> Iterator[kvferry_native.IoUring]:
    ring = kvferry_native.IoUring(8)
    yield ring
    ring.close()


@pytest.fixture(scope="module")
def rings() -> Iterator[dict[int, kvferry_native.IoUring]]:
    """Rings by their number of entries. Two entries and many items: the queue is always full."""
    rings = {entries: kvferry_native.IoUring(entries) for entries in (1, 2, 16)}
    yield rings
    for ring in rings.values():
        ring.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ring")


def takes_direct(folder: Path) -> bool:
    try:
        os.close(os.open(folder / "direct", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        return False
    return True


@st.composite
def plans(draw: st.DrawFn, unit: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]], int, int]:
    """Writes ``(gap, length)`` one behind the other, reads ``(offset, length)`` anywhere, a seed for the
    order of the writes, and bytes that the file is longer than them."""
    length = st.sampled_from([0, 1, 7, 64, 200] if unit > 1 else [0, 1, 511, 4096, 70_000, 500_000])
    writes = draw(st.lists(st.tuples(st.integers(0, 3), length), max_size=24))
    end = sum(gap + length for gap, length in writes) + 9
    reads = draw(st.lists(st.tuples(st.integers(0, end), length), max_size=24))
    return (
        [(gap * unit, length * unit) for gap, length in writes],
        [(offset * unit, length * unit) for offset, length in reads],
        draw(st.integers(0, 2**16)),
        draw(st.integers(0, 5000)),
    )


@pytest.mark.parametrize("direct", [False, True], ids=["buffered", "direct"])
@settings(max_examples=60, deadline=None)
@given(data=st.data(), entries=st.sampled_from([1, 2, 16]), depth=st.integers(1, 40))
def test_does_what_pread_and_pwrite_do(
    rings: dict[int, kvferry_native.IoUring],
    folder: Path,
    direct: bool,
    data: st.DataObject,
    entries: int,
    depth: int,
) -> None:
    if direct and not takes_direct(folder):
        pytest.skip("this file system has no direct I/O")
    writes, reads, seed, extra = data.draw(plans(SECTOR if direct else 1))
    random = np.random.default_rng(seed)
    ring = rings[entries]
    flags = os.O_CREAT | os.O_RDWR | os.O_TRUNC
    plain = os.open(folder / "plain", flags)
    tested = os.open(folder / "tested", flags | (os.O_DIRECT if direct else 0))
    try:
        source = pages(sum(length for _, length in writes))
        source[:] = random.integers(0, 256, len(source), np.uint8)
        items, at, offset = [], 0, 0
        for gap, length in writes:
            offset += gap
            items.append((offset, source.ctypes.data + at, length))
            os.pwrite(plain, source[at : at + length], offset)
            at, offset = at + length, offset + length
        items = [items[index] for index in random.permutation(len(items))]
        assert move(ring, tested, items, write=True, depth=depth) == [length for _, _, length in items]
        os.fsync(tested)  # the size may be unwritten still; what follows looks at bytes
        assert (folder / "tested").read_bytes() == (folder / "plain").read_bytes()

        for fd in (plain, tested):
            os.ftruncate(fd, offset + extra)  # mostly in the middle of a sector
        target = pages(sum(length for _, length in reads))
        target[:] = POISON
        expected = target.copy()
        items, outcomes, at = [], [], 0
        for offset, length in reads:
            there = os.pread(plain, length, offset)
            expected[at : at + len(there)] = np.frombuffer(there, np.uint8)
            items.append((offset, target.ctypes.data + at, length))
            outcomes.append(len(there))
            at += length
        assert move(ring, tested, items, depth=depth) == outcomes
        if direct:  # behind the end of a file the kernel may clear what an item covers
            for (_, address, length), there_is in zip(items, outcomes, strict=True):
                begin = address - target.ctypes.data
                expected[begin + there_is : begin + length] = target[begin + there_is : begin + length]
        assert np.array_equal(target, expected)
    finally:
        os.close(plain)
        os.close(tested)


def test_a_length_beyond_four_gigabytes_reads_what_is_there(
    ring: kvferry_native.IoUring, tmp_path: Path
) -> None:
    (tmp_path / "small").write_bytes(b"small")
    target = pages(SECTOR)
    fd = os.open(tmp_path / "small", os.O_RDONLY)
    try:
        assert move(ring, fd, [(1, target.ctypes.data, 5 << 30)]) == [4]
    finally:
        os.close(fd)
    assert bytes(target[:5]) == b"mall\0"


def test_nothing_to_do_is_done(ring: kvferry_native.IoUring) -> None:
    assert move(ring, -1, []) == []


def test_a_file_that_cannot_be_used_fails_every_item(ring: kvferry_native.IoUring, tmp_path: Path) -> None:
    memory = pages(SECTOR)
    items = [(0, memory.ctypes.data, 10), (SECTOR, memory.ctypes.data, 0), (5, memory.ctypes.data, 100)]
    closed = os.open(tmp_path, os.O_RDONLY)
    os.close(closed)
    for fd in (-1, closed):
        assert move(ring, fd, items) == [-errno.EBADF] * 3
    folder = os.open(tmp_path, os.O_RDONLY)
    reading, writing = os.pipe()
    try:
        assert move(ring, folder, items[:1]) == [-errno.EISDIR]
        # Nothing is in the pipe: to ask it would take for ever.
        assert move(ring, reading, items) == [-errno.ESPIPE] * 3
    finally:
        for fd in (folder, reading, writing):
            os.close(fd)


def test_the_way_a_file_was_opened_counts(ring: kvferry_native.IoUring, tmp_path: Path) -> None:
    memory = pages(SECTOR)
    read_only = os.open(tmp_path / "file", os.O_CREAT | os.O_RDONLY)
    write_only = os.open(tmp_path / "file", os.O_WRONLY)
    try:
        assert move(ring, read_only, [(0, memory.ctypes.data, 10)], write=True) == [-errno.EBADF]
        assert move(ring, write_only, [(0, memory.ctypes.data, 10)] * 2, write=True) == [10, 10]
        assert move(ring, write_only, [(0, memory.ctypes.data, 10)]) == [-errno.EBADF]
        assert move(ring, read_only, [(0, memory.ctypes.data, 20)]) == [10]
    finally:
        os.close(read_only)
        os.close(write_only)


def test_a_bad_item_does_not_touch_its_neighbours(ring: kvferry_native.IoUring, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(256)) * 64)
    target = pages(3 * SECTOR)
    here = target.ctypes.data
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    try:
        results = move(
            ring,
            fd,
            [
                (0, here, SECTOR),
                (0, 64, SECTOR),  # nothing is mapped there
                (2**64 - 1, here, 1),  # means "where the file stands" to the kernel
                (2**63 - 1, here, 1),
                (2**63 - 2, here, 1),
                (1, here + SECTOR, SECTOR),
            ],
            depth=3,
        )
    finally:
        os.close(fd)
    assert results == [SECTOR, -errno.EFAULT, -errno.EINVAL, -errno.EINVAL, 0, SECTOR]
    assert bytes(target[: 2 * SECTOR]) == bytes(range(256)) * 16 + (bytes(range(256)) * 17)[1 : SECTOR + 1]


def test_direct_io_refuses_what_is_not_aligned(ring: kvferry_native.IoUring, folder: Path) -> None:
    if not takes_direct(folder):
        pytest.skip("this file system has no direct I/O")
    memory = pages(2 * SECTOR)
    fd = os.open(folder / "aligned", os.O_CREAT | os.O_RDWR | os.O_DIRECT)
    try:
        items = [(0, memory.ctypes.data, SECTOR), (SECTOR, memory.ctypes.data, 100)]
        assert move(ring, fd, items, write=True) == [SECTOR, -errno.EINVAL]
    finally:
        os.close(fd)


def test_a_write_that_hits_a_limit_fails_as_a_whole(ring: kvferry_native.IoUring, tmp_path: Path) -> None:
    limit = 1 << 30
    memory = pages(8 * SECTOR)
    fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        items = [
            (limit - SECTOR, memory.ctypes.data, 2 * SECTOR),
            (limit, memory.ctypes.data, 1),
            (0, memory.ctypes.data, SECTOR),
        ]
        # The first is half done when the limit comes.
        assert move(ring, fd, items, write=True) == [-errno.EFBIG, -errno.EFBIG, SECTOR]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        os.close(fd)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this machine has no /dev/full")
def test_a_full_device_says_so(ring: kvferry_native.IoUring) -> None:
    memory = pages(SECTOR)
    fd = os.open("/dev/full", os.O_RDWR)
    try:
        assert move(ring, fd, [(0, memory.ctypes.data, 10)] * 20, write=True) == [-errno.ENOSPC] * 20
        assert move(ring, fd, [(0, memory.ctypes.data, 10)] * 20) == [10] * 20
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("columns", "depth", "error", "text"),
    [
        ((words(1, 2), words(1), words(0), np.zeros(1, np.int64)), 1, ValueError, "addresses must have as"),
        ((words(1), words(1), words(0, 1), np.zeros(1, np.int64)), 1, ValueError, "lengths must have as"),
        ((words(1), words(1), words(0), np.zeros(2, np.int64)), 1, ValueError, "results must have as"),
        ((words(1), words(1), words(0), np.zeros(1, np.uint64)), 1, TypeError, "results must hold int64"),
        ((np.zeros(1, np.int64), words(1), words(0), np.zeros(1, np.int64)), 1, TypeError, "offsets must"),
        ((words(1), words(1), words(0), bytes(8)), 1, BufferError, "writable"),
        ((words(1), words(1), words(0), np.zeros(1, np.int64)), 0, ValueError, "depth"),
    ],
)
def test_refuses_what_is_malformed(
    ring: kvferry_native.IoUring,
    columns: tuple[Words, Words, Words, NDArray[np.int64]],
    depth: int,
    error: type[Exception],
    text: str,
) -> None:
    with pytest.raises(error, match=text):
        ring.run(False, 0, *columns, depth)


def test_a_ring_that_cannot_be_had_is_an_error() -> None:
    with pytest.raises(ValueError, match="entries"):
        kvferry_native.IoUring(0)
    with pytest.raises(OSError, match="io_uring") as caught:
        kvferry_native.IoUring(1 << 20)
    assert caught.value.errno == errno.EINVAL


def test_a_closed_ring_is_refused_and_closing_again_is_harmless() -> None:
    ring = kvferry_native.IoUring(4)
    ring.close()
    ring.close()
    with pytest.raises(ValueError, match="closed"):
        move(ring, 0, [])


def test_rings_of_their_own_serve_many_threads(tmp_path: Path) -> None:
    size, chunk, failures = 4 << 20, 64 << 10, []

    def work(number: int) -> None:
        random = np.random.default_rng(number)
        content, back = pages(size), pages(size)
        content[:] = random.integers(0, 256, size, np.uint8)
        ring = kvferry_native.IoUring(4)
        fd = os.open(tmp_path / str(number), os.O_CREAT | os.O_RDWR)
        for _ in range(5):
            back[:] = 0
            order = [int(i) * chunk for i in random.permutation(size // chunk)]
            written = move(ring, fd, [(i, content.ctypes.data + i, chunk) for i in order], write=True)
            read = move(ring, fd, [(i, back.ctypes.data + i, chunk) for i in order])
            if {*written, *read} != {chunk} or not np.array_equal(content, back):
                failures.append(number)
        os.close(fd)
        ring.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_second_thread_in_one_ring_gets_an_error_and_disturbs_nothing(
    ring: kvferry_native.IoUring, tmp_path: Path
) -> None:
    content = np.random.default_rng(1).integers(0, 256, 2 << 20, np.uint8)
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    refused, wrong = threading.Event(), []
    deadline = time.monotonic() + 60

    def work() -> None:
        target = pages(len(content))
        items = [(i, target.ctypes.data + i, 4096) for i in range(0, len(content), 4096)]
        while not refused.is_set() and time.monotonic() < deadline:
            target[:] = 0
            try:
                results = move(ring, fd, items)
            except OSError as error:
                if error.errno != errno.EBUSY or "another thread" not in str(error) or target.any():
                    wrong.append(str(error))
                refused.set()
            else:
                if set(results) != {4096} or not np.array_equal(target, content):
                    wrong.append("bytes")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.close(fd)
    assert refused.is_set()
    assert not wrong


def test_closing_waits_for_a_run(tmp_path: Path) -> None:
    content = np.random.default_rng(2).integers(0, 256, 8 << 20, np.uint8)
    (tmp_path / "file").write_bytes(content)
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    target = pages(len(content))
    items = [(i, target.ctypes.data + i, 4096) for i in range(0, len(content), 4096)]
    for _ in range(10):
        ring = kvferry_native.IoUring(2)
        target[:] = 0
        outcomes: list[list[int] | str] = []

        def work(ring: kvferry_native.IoUring, outcomes: list[list[int] | str]) -> None:
            try:
                outcomes.append(move(ring, fd, items))
            except ValueError as error:
                outcomes.append(str(error))

        thread = threading.Thread(target=work, args=(ring, outcomes))
        thread.start()
        ring.close()
        complete = np.array_equal(target, content)
        thread.join()
        assert outcomes == [[4096] * len(items)] if complete else outcomes == ["this ring is closed"]
    os.close(fd)


def test_other_threads_run_during_a_run(
    ring: kvferry_native.IoUring, tmp_path: Path, lets_others_run: Callable[[Callable[[], object]], bool]
) -> None:
    (tmp_path / "file").write_bytes(bytes(64 << 20))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    target = pages(64 << 20)
    columns = words(0), words(target.ctypes.data), words(64 << 20), np.zeros(1, np.int64)
    try:
        assert lets_others_run(lambda: ring.run(False, fd, *columns, 1))
    finally:
        os.close(fd)


def tasks_and_files() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def test_rings_leave_no_descriptors_and_no_threads(tmp_path: Path) -> None:
    gc.collect()
    before = tasks_and_files()
    target = pages(1 << 20)
    for number in range(20):
        ring = kvferry_native.IoUring(8)
        fd = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
        assert move(ring, fd, [(0, target.ctypes.data, 1 << 20)] * 8, write=True) == [1 << 20] * 8
        os.close(fd)
        if number % 2:
            ring.close()
        del ring
        assert kvferry_native.io_uring_refusal() == ""
    deadline = time.monotonic() + 30  # the kernel ends its helper threads a moment after the ring
    while tasks_and_files() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert tasks_and_files() == before


def run_apart(script: str) -> str:
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORK = """
import os, numpy as np, kvferry_native
def read(ring):
    target, results = np.zeros(10, np.uint8), np.zeros(1, np.int64)
    one = lambda value: np.array([value], np.uint64)
    fd = os.open("/dev/zero", os.O_RDONLY)
    ring.run(False, fd, one(0), one(target.ctypes.data), one(10), results, 1)
    os.close(fd)
    return int(results[0])
ring = kvferry_native.IoUring(2)
reading, writing = os.pipe()
child = os.fork()
if child == 0:
    try:
        read(ring)
    except OSError as error:
        ring.close()
        ring.close()
        own = read(kvferry_native.IoUring(2))
        os.write(writing, f"{error.errno} {own}".encode())
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print(os.read(reading, 100).decode(), read(ring))
"""


def test_a_child_of_fork_must_open_its_own() -> None:
    assert run_apart(FORK).split() == [str(errno.EOWNERDEAD), "10", "10"]


# A filter that answers EPERM to one system call, as the profiles of containers do for io_uring.
SANDBOX = """
import ctypes, errno, os, struct, numpy as np, kvferry_native
def forbid(number):
    libc = ctypes.CDLL(None, use_errno=True)
    program = b"".join(struct.pack("HBBI", *row) for row in [
        (0x20, 0, 0, 0),                 # load the number of the call
        (0x15, 0, 1, number),            # another one: skip a row
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),
    ])
    memory = ctypes.create_string_buffer(program)
    table = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", 4, ctypes.addressof(memory)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, table, 0, 0) != 0:
        print("no filter")
        raise SystemExit
"""

FORBID_SETUP = """
forbid(425)
print(kvferry_native.io_uring_refusal())
try:
    kvferry_native.IoUring(2)
except PermissionError as error:
    print(error.errno)
"""

FORBID_ENTER = """
ring = kvferry_native.IoUring(2)
forbid(426)
print(kvferry_native.io_uring_refusal())
columns = np.ones((3, 5), np.uint64)
results = np.zeros(5, np.int64)
with open("/dev/zero") as file:
    ring.run(False, file.fileno(), columns[0], columns[1], columns[2], results, 4)
print(results.tolist())
ring.close()
"""


def test_a_sandbox_is_noticed_and_named() -> None:
    lines = run_apart(SANDBOX + FORBID_SETUP).splitlines()
    if lines == ["no filter"]:
        pytest.skip("this machine lets nobody filter system calls")
    assert lines[0].startswith("the kernel gives no io_uring: EPERM (Operation not permitted); ")
    assert "kernel.io_uring_disabled" in lines[0]
    assert lines[1:] == [str(errno.EPERM)]


def test_a_sandbox_that_gives_a_ring_and_no_use_of_it_is_noticed_too() -> None:
    lines = run_apart(SANDBOX + FORBID_ENTER).splitlines()
    if lines == ["no filter"]:
        pytest.skip("this machine lets nobody filter system calls")
    assert lines[0].startswith("the kernel's io_uring moves no bytes: EPERM")
    assert lines[1:] == [str([-errno.EPERM] * 5)]
