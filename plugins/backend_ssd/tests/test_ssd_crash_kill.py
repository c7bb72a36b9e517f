"""``kill -9`` at every step that a store takes on its file, and what the next process finds."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
from attrs import define, field

from kvferry.api import DeleteStatus, WriteStatus
from kvferry_backend_ssd.block_io import BlockIO, ForwardingIO, Piece, Purpose
from kvferry_backend_ssd.options import IOPath
from plugins.backend_ssd.tests.ssd_crash import Promises, Rig, check, key
from plugins.backend_ssd.tests.ssd_raw import ENTRY, StoredChunks, places
from plugins.backend_ssd.tests.ssd_recording import Step, Tell, carry_out

FIRST: Sequence[Step] = (
    ("store", [0, 1]),
    ("store", [2]),
    ("read", [1]),
    ("delete", [1]),
    ("store", [3]),
    ("store", [4]),  # it is full
    ("delete", [0, 2]),
    ("begin store", [5]),
    ("begin store", [6]),
    ("begin delete", [3]),
    ("wait", []),
    ("read", [4, 6]),
)
SECOND: Sequence[Step] = (
    ("read", [5]),
    ("delete", [4]),
    ("begin store", [7]),
    ("begin delete", [5]),
    ("begin store", [8]),
    ("wait", []),
    ("read", [7]),
)
NUMBERS = range(9)


@define
class Executioner:
    """Ends this very process when the moment of this name comes for the ``nth`` time. Threads: any."""

    name: str
    nth: int
    _met: int = 0
    _lock: threading.Lock = field(factory=threading.Lock)

    def step(self, name: str) -> None:
        if name != self.name:
            return
        with self._lock:
            self._met += 1
            if self._met == self.nth:
                os.kill(os.getpid(), signal.SIGKILL)
                signal.pause()


class MortalIO(ForwardingIO):
    """Tells the executioner before and behind everything. Pieces are moved one by one."""

    def __init__(self, inner: BlockIO, executioner: Executioner) -> None:
        super().__init__(inner)
        self._step = executioner.step

    def read(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._each(self.inner.read, "read", fd, pieces)

    def write(self, fd: int, pieces: Sequence[Piece]) -> list[int]:
        return self._each(self.inner.write, "write", fd, pieces)

    def flush(self, fd: int) -> None:
        self._around("flush", lambda: self.inner.flush(fd))

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._around("allocate", lambda: self.inner.allocate(fd, offset, length))

    def truncate(self, fd: int, length: int) -> None:
        self._around("truncate", lambda: self.inner.truncate(fd, length))

    def close(self) -> None:
        self._around("close", self.inner.close)

    def _each(
        self,
        call: Callable[[int, Sequence[Piece]], list[int]],
        name: str,
        fd: int,
        pieces: Sequence[Piece],
    ) -> list[int]:
        results = []
        for piece in pieces:
            self._step(f"before {name} of {piece.purpose.value}")
            results += call(fd, [piece])
            self._step(f"behind {name} of {piece.purpose.value}")
        return results

    def _around(self, name: str, call: Callable[[], None]) -> None:
        self._step(f"before {name}")
        call()
        self._step(f"behind {name}")


def live(rig: Rig, tell: Tell) -> None:
    """Two openings, with some damage between them that the second has to mend."""
    driver = rig.open()
    carry_out(driver, FIRST, tell)
    driver.close()
    damage(rig.path, 6)
    driver = rig.open()
    carry_out(driver, SECOND, tell)
    driver.close()


def damage(path: Path, number: int) -> None:
    """Flip a bit in the table's entry of a chunk."""
    stored = StoredChunks(path)
    (name,) = [name for name in stored.names() if key(number).digest in stored.read(name)[:ENTRY]]
    with open(path / name.rpartition(":")[0], "r+b", buffering=0) as file:
        at = places(file.fileno(), int(name.rpartition(":")[2]))[0] + 300
        (byte,) = os.pread(file.fileno(), 1, at)
        os.pwrite(file.fileno(), bytes([byte ^ 1]), at)


def die_at(rig: Rig, name: str, nth: int) -> tuple[bool, Promises]:
    """Live in a child and kill it then: whether it came to that, and what had been promised."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # no thread of ours runs that could hold a lock
        child = os.fork()
    if child == 0:
        os.close(reader)
        _child(rig, Executioner(name, nth), writer)
    os.close(writer)
    with open(reader, "rb") as report:
        lines = report.read().decode().splitlines()
    _, code = os.waitpid(child, 0)
    promises, other = Promises(), []
    for line in lines:
        what, _, about = line.partition(" ")
        if what == "begin":
            promises.begin(int(about))
        elif what in WriteStatus.__members__ or what in DeleteStatus.__members__:
            outcome = WriteStatus.__members__.get(what) or DeleteStatus[what]
            promises.hear(int(about), outcome)
        else:
            other.append(line)
    assert not other, "\n".join(other)
    return os.WIFSIGNALED(code), promises


def _child(rig: Rig, executioner: Executioner, writer: int) -> NoReturn:
    """Must not run anything that belongs to the parent's test."""
    code = 1
    try:
        report = open(writer, "wb", buffering=0)  # noqa: SIM115 - until the end, whichever that is

        def tell(number: int, status: WriteStatus | DeleteStatus | None) -> None:
            report.write(f"{'begin' if status is None else status.name} {number}\n".encode())

        live(rig.over(lambda io: MortalIO(io, executioner)), tell)
        code = 0
    except BaseException:  # noqa: BLE001 - told to the parent
        os.write(writer, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(code)
    raise AssertionError("never reached")


CHANGES = (*(f"write of {purpose.value}" for purpose in Purpose), "flush", "allocate", "truncate")
READS = (*(f"read of {purpose}" for purpose in ("superblock", "table", "head", "value")), "close")
MOMENTS = [
    *(f"{when} {change}" for change in CHANGES for when in ("before", "behind")),
    *(f"before {read}" for read in READS),
]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_process_killed_there_loses_nothing_acknowledged(
    quick_folder: Path, io_path: IOPath, moment: str
) -> None:
    """The first such moment of its life, then the second, and so on until none is left."""
    rig = Rig(path=quick_folder / "store", io=io_path, slots=4)
    for nth in itertools.count(1):
        died, promises = die_at(rig, moment, nth)
        if not died:
            break
        try:
            check(rig, promises, NUMBERS)
        except BaseException as error:
            error.add_note(f"killed {moment} number {nth}, with {promises}")
            raise
        shutil.rmtree(rig.path)
    assert nth > 1, "there is no such moment"
