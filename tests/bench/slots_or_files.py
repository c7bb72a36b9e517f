"""Is a chunk better kept in a slot of one large file, or in a file of its own?

    python -m tests.bench.slots_or_files [--folder DIR] [--total 512MiB]

Both ways move the same bytes with direct I/O, eight chunks in flight, and flush before a group of eight
counts as written: the slots with two flushes (values, entries), the files with a flush and a rename each,
all at once in eight threads, and one flush of the folder. The slots also sum what they write and read, the
files do not. Reads are cold: nothing went through the page cache. Each figure is the best of three rounds;
the second column of writes is of slots that are used again, or of files in the place of deleted ones.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import mmap
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen
from rich.console import Console
from rich.table import Table

from kvferry.api import BackendContext, ChunkHeader, ChunkKey, Region, Span
from kvferry.api.units import parse_size
from kvferry.testing.backends import NullArena
from kvferry_backend_ssd.backend import SSDBackend
from kvferry_backend_ssd.options import SSDOptions

MIB = 1 << 20
IN_FLIGHT = 8
ROUNDS = 3
WAIT_SECONDS = 120.0


@frozen
class Subject:
    """One way to keep chunks. Each call handles the chunks of these numbers, at most ``IN_FLIGHT``."""

    name: str
    write: Callable[[list[int]], None]
    read: Callable[[list[int]], None]
    delete: Callable[[list[int]], None]
    close: Callable[[], None]


class Memory:
    """``IN_FLIGHT`` chunks of random bytes at page boundaries."""

    def __init__(self, size: int) -> None:
        length = IN_FLIGHT * size
        self._map = mmap.mmap(-1, length)
        self._map[:] = os.urandom(MIB) * (length // MIB)
        window = (ctypes.c_ubyte * length).from_buffer(self._map)
        self.region = Region(name="m", address=ctypes.addressof(window), length=length, keep_alive=window)


def slots(folder: Path, size: int, count: int, memory: Memory) -> Subject:
    backend = SSDBackend(SSDOptions(path=str(folder)), count * (size + 8192) + 4 * MIB)
    context = BackendContext(
        name="bench",
        rank=0,
        make_arena=lambda *_: NullArena(),
        regions={"m": memory.region},
        max_value_bytes=size,
    )
    backend.open(context)
    keys = [ChunkKey(bytes(32), hashlib.sha256(b"%d" % number).digest()) for number in range(count)]

    def finish(ticket: object) -> None:
        assert ticket.wait(WAIT_SECONDS)  # type: ignore[attr-defined]
        assert all(result.error is None for result in ticket.results)  # type: ignore[attr-defined]

    def spans(numbers: list[int]) -> Iterable[Span]:
        return (Span("m", number % IN_FLIGHT * size, size) for number in numbers)

    def until() -> float:
        return time.monotonic() + WAIT_SECONDS

    def header(number: int) -> ChunkHeader:
        return ChunkHeader(key=keys[number], parent=None, depth=0, tokens=256, size=size)

    return Subject(
        "slots in one file",
        lambda numbers: finish(
            backend.write([*zip(map(header, numbers), spans(numbers), strict=True)], until())
        ),
        lambda numbers: finish(
            backend.read([*zip((keys[number] for number in numbers), spans(numbers), strict=True)], until())
        ),
        lambda numbers: finish(backend.delete([keys[number] for number in numbers], until())),
        lambda: backend.close(until()),
    )


def files(folder: Path, size: int, count: int, memory: Memory) -> Subject:
    """Each chunk in a thread of its own: a temporary name, a flush, a rename. The folder is flushed once
    for a group."""
    threads = ThreadPoolExecutor(IN_FLIGHT)
    directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

    def path(number: int) -> str:
        return str(folder / hashlib.sha256(b"%d" % number).hexdigest())

    def view(number: int) -> memoryview:
        address = memory.region.address + number % IN_FLIGHT * size
        return memoryview((ctypes.c_ubyte * size).from_address(address))

    def write_one(number: int) -> None:
        new = path(number) + ".new"
        descriptor = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
        assert os.pwritev(descriptor, [view(number)], 0) == size
        os.fdatasync(descriptor)
        os.close(descriptor)
        os.rename(new, path(number))

    def read_one(number: int) -> None:
        descriptor = os.open(path(number), os.O_RDONLY | os.O_DIRECT)
        assert os.preadv(descriptor, [view(number)], 0) == size
        os.close(descriptor)

    def write(numbers: list[int]) -> None:
        list(threads.map(write_one, numbers))
        os.fsync(directory)

    def read(numbers: list[int]) -> None:
        list(threads.map(read_one, numbers))

    def delete(numbers: list[int]) -> None:
        list(threads.map(lambda number: os.unlink(path(number)), numbers))
        os.fsync(directory)

    def close() -> None:
        threads.shutdown()
        os.close(directory)

    return Subject("a file for each chunk", write, read, delete, close)


def measure(make: Callable[..., Subject], root: Path, size: int, total: int) -> tuple[str, list[float]]:
    """First writes, later writes and reads in MiB/s, and deletions for each second."""
    count = total // size
    groups = [list(range(at, min(at + IN_FLIGHT, count))) for at in range(0, count, IN_FLIGHT)]
    best = [0.0] * 4
    for _ in range(ROUNDS):
        folder = Path(tempfile.mkdtemp(dir=root))
        subject = make(folder, size, count, Memory(size))
        try:
            first = _timed(subject.write, groups)
            read = _timed(subject.read, groups)
            delete = _timed(subject.delete, groups)
            later = _timed(subject.write, groups)
        finally:
            subject.close()
            shutil.rmtree(folder)
        rates = [total / MIB / first, total / MIB / later, total / MIB / read, count / delete]
        best = [max(pair) for pair in zip(best, rates, strict=True)]
    return subject.name, best


def _timed(call: Callable[[list[int]], None], groups: list[list[int]]) -> float:
    begun = time.perf_counter()
    for group in groups:
        call(group)
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--total", type=parse_size, default=512 * MIB)
    arguments = parser.parse_args()
    table = Table(
        "chunk", "way", "first writes MiB/s", "later writes MiB/s", "cold reads MiB/s", "deletions/s"
    )
    for size in (MIB, 8 * MIB):
        for make in (slots, files):
            name, rates = measure(make, arguments.folder, size, arguments.total)
            table.add_row(f"{size // MIB} MiB", name, *(f"{rate:,.0f}" for rate in rates))
    Console().print(table)


if __name__ == "__main__":
    main()
