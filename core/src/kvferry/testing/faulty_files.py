"""Faults between a plugin and the disk, and what is left of a disk after the power failed."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

from attrs import define

from kvferry.testing.faults import (
    Crash,
    Delay,
    Effect,
    Fail,
    FaultPlan,
    FaultPlayer,
    FlipBit,
    NoSpace,
    ShortWrite,
    Stall,
    TornWrite,
    check_applies,
    crash,
)

_ANY = (Fail, Delay, Stall, NoSpace, Crash)
APPLICABLE: dict[str, tuple[type, ...]] = {
    "open": _ANY,
    "read": (*_ANY, FlipBit),
    "write": (*_ANY, FlipBit, TornWrite, ShortWrite),
    "fsync": _ANY,
    "rename": _ANY,
    "unlink": _ANY,
    "listdir": _ANY,
}
"""Which effects each operation can meet."""

_PAGE = 4096

STALL_SECONDS = 60.0
"""After so long a stalled call ends with an error, so that a test never hangs."""

Path_ = str | os.PathLike[str]


@define(eq=False)
class _File:
    """One file, whatever it is called. The numbers that the system gives to files are used again."""

    certain: bytes = b""
    """What is on the disk since the last ``fsync``."""


class FaultyFiles:
    """The part of the module ``os`` that a store needs, over the real folder ``root``.

    A plugin that takes its file functions from an object, ``os`` by default, can be handed this one.
    Paths are those below ``root``; the subject of a fault is the path relative to it. File descriptors
    are real, so what is not here may be done with ``os`` itself, but is not seen.

    It keeps account of what is on the disk for certain: a file's bytes since its last ``fsync``, and a
    folder's names since the last ``fsync`` of the folder. :meth:`power_failure` leaves that. Folders
    themselves are durable at once.

    ``sleep`` serves delays. Threads: any.
    """

    O_RDONLY, O_WRONLY, O_RDWR = os.O_RDONLY, os.O_WRONLY, os.O_RDWR
    O_CREAT, O_EXCL, O_TRUNC = os.O_CREAT, os.O_EXCL, os.O_TRUNC
    O_DIRECTORY, O_CLOEXEC = os.O_DIRECTORY, os.O_CLOEXEC

    def __init__(
        self, root: Path, plan: FaultPlan | None = None, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        plan = plan or FaultPlan()
        check_applies(plan, APPLICABLE, "FaultyFiles")
        self.root = root
        self.player = FaultPlayer(plan)
        self._sleep = sleep
        self._files: dict[int, _File] = {}
        self._names: dict[str, dict[str, _File]] = {}
        """By folder, as of the last ``fsync`` of the folder."""
        self._open: dict[int, str] = {}
        self._released = threading.Event()
        self._lock = threading.RLock()

    # -- what a plugin calls ---------------------------------------------------------------------

    def open(self, path: Path_, flags: int, mode: int = 0o666) -> int:
        self._meet("open", path)
        with self._lock:
            new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            descriptor = os.open(path, flags, mode)
            self._open[descriptor] = os.fspath(path)
            if new:  # its number may have been another's before
                self._files[os.fstat(descriptor).st_ino] = _File()
        return descriptor

    def read(self, descriptor: int, length: int) -> bytes:
        effect = self._meet("read", self._open[descriptor])
        return _damaged(os.read(descriptor, length), effect)

    def pread(self, descriptor: int, length: int, offset: int) -> bytes:
        effect = self._meet("read", self._open[descriptor])
        return _damaged(os.pread(descriptor, length, offset), effect)

    def write(self, descriptor: int, data: bytes | memoryview) -> int:
        effect = self._meet("write", self._open[descriptor])
        return self._written(effect, bytes(data), lambda part: os.write(descriptor, part))

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        effect = self._meet("write", self._open[descriptor])
        return self._written(effect, bytes(data), lambda part: os.pwrite(descriptor, part, offset))

    def fsync(self, descriptor: int) -> None:
        path = self._open[descriptor]
        self._meet("fsync", path)
        os.fsync(descriptor)
        with self._lock:
            if os.path.isdir(path):
                self._names[self._inside(path)] = self._listing(path)
            else:
                self._file(os.fstat(descriptor).st_ino).certain = _content(descriptor)

    fdatasync = fsync

    def ftruncate(self, descriptor: int, length: int) -> None:
        self._written(self._meet("write", self._open[descriptor]), b"", lambda _: 0)
        os.ftruncate(descriptor, length)

    def fstat(self, descriptor: int) -> os.stat_result:
        return os.fstat(descriptor)

    def stat(self, path: Path_) -> os.stat_result:
        return os.stat(path)

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        os.close(descriptor)

    def rename(self, source: Path_, target: Path_) -> None:
        self._meet("rename", source)
        os.rename(source, target)

    replace = rename

    def unlink(self, path: Path_) -> None:
        self._meet("unlink", path)
        os.unlink(path)

    def listdir(self, path: Path_) -> list[str]:
        self._meet("listdir", path)
        return os.listdir(path)

    def mkdir(self, path: Path_, mode: int = 0o777) -> None:
        os.mkdir(path, mode)

    def makedirs(self, path: Path_, mode: int = 0o777, exist_ok: bool = False) -> None:
        os.makedirs(path, mode, exist_ok)

    # -- for the test ----------------------------------------------------------------------------

    def release(self) -> None:
        """Let everything that stalls go on, now and later."""
        self._released.set()

    def power_failure(self, chance: random.Random | None = None) -> None:
        """Leave in ``root`` what a power failure would: what is durable for certain, and of the rest
        nothing, or whatever part ``chance`` draws. Open descriptors are closed.

        Afterwards this object stands for the machine after its restart: all that is there is durable.
        """
        with self._lock:
            for descriptor in list(self._open):
                self.close(descriptor)
            folders = sorted(str(path) for path in [self.root, *self.root.rglob("*")] if path.is_dir())
            left = {folder: self._left(folder, chance) for folder in folders}
            for folder in folders:
                for entry in Path(folder).iterdir():
                    if not entry.is_dir():
                        entry.unlink()
                for name, data in left[folder].items():
                    (Path(folder) / name).write_bytes(data)
            self._files.clear()
            self._names.clear()
            for folder in folders:
                self._names[self._inside(folder)] = listing = self._listing(folder)
                for name, file in listing.items():
                    file.certain = (Path(folder) / name).read_bytes()

    def clear(self) -> None:
        """Remove everything below ``root``."""
        shutil.rmtree(self.root)
        self.root.mkdir()

    # -- the work --------------------------------------------------------------------------------

    def _left(self, folder: str, chance: random.Random | None) -> dict[str, bytes]:
        """What is in a folder after the failure: names and bytes."""
        certain, now = self._names.get(self._inside(folder), {}), self._listing(folder)
        left = {}
        for name in sorted({*certain, *now}):
            choices = [certain.get(name), now.get(name)]
            left[name] = choices[0] if chance is None else chance.choice(choices)
        current = {id(file): (Path(folder) / name).read_bytes() for name, file in now.items()}
        return {
            name: _bytes_left(file.certain, current.get(id(file), file.certain), chance)
            for name, file in left.items()
            if file is not None
        }

    def _listing(self, folder: Path_) -> dict[str, _File]:
        return {e.name: self._file(e.inode()) for e in os.scandir(folder) if not e.is_dir()}

    def _file(self, number: int) -> _File:
        return self._files.setdefault(number, _File())

    def _meet(self, operation: str, path: Path_) -> Effect | None:
        effect = self.player.meet(operation, self._inside(path))
        if isinstance(effect, Crash):
            crash(effect, f"{operation} {self._inside(path)}")
        if isinstance(effect, Delay):
            self._sleep(effect.seconds)
        if isinstance(effect, Stall) and not self._released.wait(STALL_SECONDS):
            raise OSError(errno.ETIMEDOUT, "nobody released a stalled call", os.fspath(path))
        if isinstance(effect, Fail):
            raise OSError(effect.errno, f"injected: {os.strerror(effect.errno)}", os.fspath(path))
        if isinstance(effect, NoSpace):
            raise OSError(errno.ENOSPC, f"injected: {os.strerror(errno.ENOSPC)}", os.fspath(path))
        return effect

    def _written(self, effect: Effect | None, data: bytes, write: Callable[[bytes], int]) -> int:
        if isinstance(effect, TornWrite):
            write(data[: effect.keep])
            raise OSError(errno.EIO, "injected: the write was torn")
        if isinstance(effect, ShortWrite):
            return write(data[: max(1, effect.keep)])
        return write(_damaged(data, effect))

    def _inside(self, path: Path_) -> str:
        return os.path.relpath(path, self.root)


def _damaged(data: bytes, effect: Effect | None) -> bytes:
    if not isinstance(effect, FlipBit) or not data:
        return data
    at = effect.bit // 8 % len(data)
    return data[:at] + bytes([data[at] ^ 1 << effect.bit % 8]) + data[at + 1 :]


def _bytes_left(certain: bytes, now: bytes, chance: random.Random | None) -> bytes:
    """Pages of unsynced data reach the disk in any order: some of the new bytes, holes between them."""
    if chance is None or now == certain:
        return certain
    kept = bytearray(certain.ljust(len(now), b"\x00"))
    for at in range(0, len(now), _PAGE):
        if chance.random() < 0.5:
            kept[at : at + _PAGE] = now[at : at + _PAGE]
    sizes = sorted((len(certain), len(now)))
    return bytes(kept[: chance.randint(*sizes)])


def _content(descriptor: int) -> bytes:
    """All bytes of an open file, also of one that is open for writing alone."""
    path = f"/proc/self/fd/{descriptor}"
    with open(path, "rb") as reader:
        return reader.read()
