"""The two ways in which bytes are copied."""

from __future__ import annotations

import ctypes
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
    """Copies without the interpreter's lock. When a call returns the bytes are in place for everybody."""

    name: str

    def copy(self, copies: Copies, threads: int) -> None:
        """On up to so many threads."""
        ...


class NativeMovement:
    """By kvferry-native: one call for many copies, on several threads."""

    name = "native"

    def __init__(self, module: Any) -> None:
        self._module = module

    def copy(self, copies: Copies, threads: int) -> None:
        to, source, length = np.array(copies, np.uint64)
        self._module.copy_spans(to, source, length, threads)


class SystemMovement:
    """By the C library alone: one call for each copy, on the caller's thread."""

    name = "the C library"

    def __init__(self) -> None:
        self._move = ctypes.CDLL(None).memmove
        self._move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
        self._move.restype = ctypes.c_void_p

    def copy(self, copies: Copies, threads: int) -> None:
        del threads
        for to, source, length in zip(*copies, strict=True):
            self._move(to, source, length)


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
    return Chosen(NativeMovement(kvferry_native), f"{version} is installed")
