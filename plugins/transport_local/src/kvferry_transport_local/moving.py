"""The two ways in which bytes move: copies within our address space, and reads out of another's."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

NATIVE_ABI = 2
"""The version of kvferry-native's interface that this was written against."""


class Copies(NamedTuple):
    """Where bytes go, where they are, and how many: one entry each per copy."""

    to: Sequence[int]
    source: Sequence[int]
    length: Sequence[int]


class Movement(Protocol):
    """Moves bytes without the interpreter's lock. Threads: any, at the same time."""

    name: str

    def copy(self, copies: Copies) -> None:
        """Within our address space."""
        ...

    def read(self, pid: int, copies: Copies) -> list[int]:
        """Out of the memory of process ``pid``; for each the number of bytes, or ``-errno``."""
        ...


class NativeMovement:
    """By kvferry-native: one call for many copies."""

    name = "native"

    def __init__(self, module: Any) -> None:
        self._module = module

    def copy(self, copies: Copies) -> None:
        to, source, length = np.array(copies, np.uint64)
        self._module.copy_spans(to, source, length, 1)

    def read(self, pid: int, copies: Copies) -> list[int]:
        to, source, length = np.array(copies, np.uint64)
        results = np.zeros(len(copies.to), np.int64)
        self._module.process_read(pid, to, source, length, results)
        found: list[int] = results.tolist()
        return found


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


class SystemMovement:
    """By the C library alone: one call for each copy."""

    name = "the C library"

    def __init__(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        self._move = library.memmove
        self._move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._move.restype = ctypes.c_void_p
        self._read = getattr(library, "process_vm_readv", None)
        if self._read is not None:
            pointer, count = ctypes.POINTER(_Vector), ctypes.c_ulong
            self._read.argtypes = (ctypes.c_int, pointer, count, pointer, count, count)
            self._read.restype = ctypes.c_ssize_t

    def copy(self, copies: Copies) -> None:
        for to, source, length in zip(*copies, strict=True):
            self._move(to, source, length)

    def read(self, pid: int, copies: Copies) -> list[int]:
        return [self._one(pid, *each) for each in zip(*copies, strict=True)]

    def _one(self, pid: int, to: int, source: int, length: int) -> int:
        if self._read is None:
            return -errno.ENOSYS
        done = 0
        while done < length:
            here, there = _Vector(to + done, length - done), _Vector(source + done, length - done)
            moved: int = self._read(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
            if moved < 0:
                return -ctypes.get_errno()
            if moved == 0:
                return -errno.EFAULT
            done += moved
        return length


class Chosen(NamedTuple):
    """A movement, and one sentence without a full stop on why it is that one."""

    movement: Movement
    why: str


def choose_movement() -> Chosen:
    """Native where kvferry-native is installed and fits."""
    try:
        import kvferry_native
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "kvferry_native"
        return Chosen(
            SystemMovement(),
            "kvferry-native is not installed" if missing else f"kvferry-native is broken: {error}",
        )
    version = f"kvferry-native {kvferry_native.__version__}"
    if kvferry_native.ABI != NATIVE_ABI:
        return Chosen(SystemMovement(), f"{version} has interface {kvferry_native.ABI}, not {NATIVE_ABI}")
    if not hasattr(kvferry_native, "process_read"):
        return Chosen(SystemMovement(), f"{version} is older than the reads across processes")
    return Chosen(NativeMovement(kvferry_native), f"{version} is installed")
