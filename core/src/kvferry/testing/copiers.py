"""Copiers that fail, or take their time, as a test wants."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvferry.api import ErrorKind, KVFerryError, Region
from kvferry.data.bounds import AddressColumn
from kvferry.data.copy import SpanCopier
from kvferry.data.plans import Direction


class FaultyCopier:
    """Forwards to ``inner`` except where it is told to fail.

    Of the calls in one of ``directions``, those fail whose number (from 1) is in ``fail_calls``, and
    those that touch a slot in ``fail_slots``. Half of its spans are copied then, so what is left
    behind is torn. ``error`` makes the exception. Any thread; settings may change between calls.
    """

    name = "faulty"

    def __init__(self, inner: SpanCopier, arena: Callable[[], Region], slot_bytes: int) -> None:
        self._inner = inner
        self._arena = arena
        self._slot_bytes = slot_bytes
        self._lock = threading.Lock()
        self.calls = 0
        self.failed = 0
        self.fail_calls: set[int] = set()
        self.fail_slots: set[int] = set()
        self.directions: set[Direction] = set(Direction)
        self.error: Callable[[], Exception] = _broken

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        direction, slots = self._slots(destination, source)
        with self._lock:
            self.calls += direction in self.directions
            number = self.calls
        fails = number in self.fail_calls or slots & self.fail_slots
        if fails and direction in self.directions:
            half = len(length) // 2
            self._inner.copy(destination[:half], source[:half], length[:half])
            with self._lock:
                self.failed += 1
            raise self.error()
        self._inner.copy(destination, source, length)

    def _slots(self, destination: AddressColumn, source: AddressColumn) -> tuple[Direction, set[int]]:
        arena = self._arena()
        for direction, column in ((Direction.SAVE, destination), (Direction.LOAD, source)):
            addresses = [int(address) - arena.address for address in column.tolist()]
            if addresses and all(0 <= address < arena.length for address in addresses):
                return direction, {address // self._slot_bytes for address in addresses}
        raise AssertionError("a copy has no side in the arena")


class SlowCopier:
    """Waits before each copy: ``seconds``, and then until ``gate`` is set."""

    name = "slow"

    def __init__(self, inner: SpanCopier, seconds: float = 0.0) -> None:
        self._inner = inner
        self.seconds = seconds
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        """Set when a copy has begun."""

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        self.entered.set()
        if self.seconds:
            time.sleep(self.seconds)
        if not self.gate.wait(30.0):
            raise AssertionError("the test never opened the gate of its slow copier")
        self._inner.copy(destination, source, length)


def _broken() -> Exception:
    return KVFerryError("the copy failed", kind=ErrorKind.IO, where="a test's copier")
