"""Copies lists of spans between raw addresses: natively, or with NumPy where that is not installed.

Addresses are numbers, and a wrong one ends the process or, worse, does not. Whoever builds plans from
outside data checks them first: :func:`kvferry.data.bounds.check_plan`, or :class:`CheckedCopier`
around any copier.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import numpy as np

from kvferry.api import ErrorKind, KVFerryError, Region, Retry
from kvferry.data.bounds import AddressColumn, RegionBounds, check_columns
from kvferry.data.native import NativeModule, NativeStatus, find_native

CopierChoice = Literal["auto", "native", "numpy"]

_RELEASE_BYTES = 1 << 20
"""From this length on the NumPy copier lets go of the GIL for a span. Getting it back may take a whole
switch interval (5 ms) while another thread computes, so it would not pay for less."""


class SpanCopier(Protocol):
    """Copies ``length[i]`` bytes from address ``source[i]`` to address ``destination[i]``.

    The three are contiguous one-dimensional uint64 arrays of one size, which nobody changes until the
    call returns. No destination may overlap another destination or any source; zero lengths are
    allowed. Raises ``TypeError`` or ``ValueError`` for other arrays and for a span that wraps around
    the address space, before anything is copied. Blocks until all is copied; any thread may call,
    several at once.
    """

    name: str

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None: ...


class NullCopier:
    """Copies nothing: prices everything around the copies."""

    name = "null"

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        check_columns(destination, source, length)


class NativeCopier:
    """Copies in kvferry-native, without the GIL, on up to ``threads`` threads."""

    name = "native"

    def __init__(self, module: NativeModule, threads: int = 1) -> None:
        self._module = module
        self._threads = threads

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        self._module.copy_spans(destination, source, length, self._threads)


class NumpyCopier:
    """Copies span by span from Python, after NumPy joined those that touch on both sides.

    Holds the GIL except in spans of 1 MiB and more; between spans other threads get their turn at
    Python's switch interval, so a copy of many small spans delays them but does not shut them out.
    """

    name = "numpy"

    def __init__(self) -> None:
        self._hold = _memmove(ctypes.PyDLL(None))
        self._release = _memmove(ctypes.CDLL(None))

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        check_columns(destination, source, length)
        hold, release = self._hold, self._release
        joined = _join(destination, source, length)
        for target, origin, size in zip(*(column.tolist() for column in joined), strict=True):
            (release if size >= _RELEASE_BYTES else hold)(target, origin, size)


class CheckedCopier:
    """Refuses plans that leave the given regions, then hands them to ``inner``.

    With ``written``, destinations must lie in those regions, which need not be in ``regions``.
    """

    def __init__(
        self,
        inner: SpanCopier,
        regions: Sequence[Region],
        *,
        written: Sequence[Region] | None = None,
    ) -> None:
        self.name = f"checked {inner.name}"
        self._inner = inner
        self._readable = RegionBounds.of(regions)
        self._writable = self._readable if written is None else RegionBounds.of(written)

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        """Raises :class:`KVFerryError` of kind PROTOCOL as well; nothing was copied then."""
        check_columns(destination, source, length)
        self._writable.check("destination", destination, length)
        self._readable.check("source", source, length)
        self._inner.copy(destination, source, length)


class ChosenCopier(NamedTuple):
    """The copier of this process and one sentence on why it is that one."""

    copier: SpanCopier
    why: str


def choose_copier(
    prefer: CopierChoice = "auto", *, threads: int = 1, status: NativeStatus | None = None
) -> ChosenCopier:
    """Choose once per process. ``status`` tells what is known of kvferry-native; looked up if absent.

    Raises :class:`KVFerryError` when ``native`` is asked for and cannot be had.
    """
    if prefer == "numpy":
        return ChosenCopier(NumpyCopier(), "NumPy was asked for")
    found = find_native() if status is None else status
    if found.module is not None:
        return ChosenCopier(NativeCopier(found.module, threads), found.why)
    if prefer == "native":
        raise KVFerryError(
            "the native copy loops were asked for and cannot be used",
            kind=ErrorKind.UNSUPPORTED,
            why=found.why,
            remedy="pip install kvferry-native, or let kvferry choose",
            retry=Retry.AFTER_CHANGE,
        )
    return ChosenCopier(NumpyCopier(), found.why)


class _Memmove(Protocol):
    def __call__(self, destination: int, source: int, size: int, /) -> object: ...


def _memmove(library: ctypes.CDLL) -> _Memmove:
    function = library.memmove
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    function.restype = ctypes.c_void_p
    return function


def _join(
    destination: AddressColumn, source: AddressColumn, length: AddressColumn
) -> tuple[AddressColumn, AddressColumn, AddressColumn]:
    """The same copies with neighbours joined that lie end to end on both sides."""
    if len(length) < 2:
        return destination, source, length
    apart = (destination[:-1] + length[:-1] != destination[1:]) | (source[:-1] + length[:-1] != source[1:])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    return destination[first], source[first], np.add.reduceat(length, first)
