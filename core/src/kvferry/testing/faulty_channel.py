"""Faults between core and a channel, to see how core takes them."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from attrs import define

from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    RemoteOp,
    Retry,
    Span,
    Ticket,
    TransferStatus,
)
from kvferry.testing.channels import ForwardingChannel, ForwardingConnection, NullChannel
from kvferry.testing.faults import (
    Crash,
    Delay,
    DoubleCompletion,
    Drop,
    Effect,
    Fail,
    FaultPlan,
    FaultPlayer,
    FlipBit,
    LateWrite,
    LoseCompletion,
    ReorderCompletion,
    Stall,
    check_applies,
    crash,
)

__all__ = ["APPLICABLE", "FaultyChannel", "ForwardingChannel", "NullChannel"]

_CALLED = (Fail, Crash)
_MOVED = (Fail, Delay, Stall, Drop, LoseCompletion, DoubleCompletion, ReorderCompletion, Crash)
APPLICABLE: dict[str, tuple[type, ...]] = {
    "open": _CALLED,
    "register": _CALLED,
    "connect": (*_CALLED, Delay),
    "read": (*_MOVED, FlipBit, LateWrite),
    "write": _MOVED,
    "close": _CALLED,
}
"""Which effects each operation can meet."""

_NEVER = float("inf")


@define(eq=False)
class _Held:
    """A call that has not begun."""

    due: float
    """Never, for what waits to be released or is dropped."""
    stalled: bool
    deadline: float
    connection: Connection
    begin: Callable[[], None]
    outer: Ticket[TransferStatus]

    def end(self, kind: ErrorKind, what: str) -> None:
        error = KVFerryError(what, kind=kind, where="fault plan", retry=Retry.LATER)
        self.outer.complete([ItemResult(TransferStatus.FAILED, error)] * self.outer.items)


class FaultyChannel(ForwardingChannel):
    """Forwards to ``inner``, except where the plan says otherwise.

    The subject of ``read`` and ``write`` is the peer's region of their first operation, that of
    ``register`` the region's name.

    Calls that are delayed, stalled or dropped have not begun, as on a slow network: delayed ones begin
    with :meth:`poll` at or after their time by ``clock``, stalled ones with :meth:`release`, dropped ones
    never, and each ends at its deadline, when it is cancelled or when its connection closes. What is
    reordered is told after the next completion. All of that keeps the contract, if the test polls; lost and
    doubled completions, turned bits and late writes break it. A late write into the spans of a read
    happens at the beginning of the next call, or with :meth:`poll`. A delayed ``connect`` waits with
    ``sleep``: the peer accepts slowly. Nothing is done by a thread of its own.

    ``max_registered_bytes`` is how much can be registered together, whatever ``inner`` allows. Threads: any,
    like the inner channel. Raises :class:`kvferry.api.KVFerryError` (``CONFIG``) for a plan that it cannot
    carry out.
    """

    def __init__(
        self,
        inner: Channel,
        plan: FaultPlan,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        max_registered_bytes: int | None = None,
    ) -> None:
        check_applies(plan, APPLICABLE, "FaultyChannel")
        super().__init__(inner)
        self.player = FaultPlayer(plan)
        self._clock = clock
        self._sleep = sleep
        self._limit = max_registered_bytes
        self._regions: dict[str, Region] = {}
        self._lock = threading.Lock()
        self._held: list[_Held] = []
        self._reordered: list[Callable[[], None]] = []
        self._late: list[list[Span]] = []

    # -- the contract ----------------------------------------------------------------------------

    def open(self, context: ChannelContext) -> None:
        self._call("open")
        super().open(context)

    def register(self, region: Region) -> None:
        self._call("register", region.name)
        with self._lock:
            used = sum(each.length for each in self._regions.values())
        if self._limit is not None and used + region.length > self._limit:
            raise KVFerryError(
                f"{region.length} bytes cannot be registered",
                kind=ErrorKind.CAPACITY,
                where="fault plan",
                why=f"{used} bytes of at most {self._limit} are registered",
                remedy="register less",
            )
        super().register(region)
        with self._lock:
            self._regions[region.name] = region

    def deregister(self, name: str) -> None:
        with self._lock:
            self._regions.pop(name, None)  # a late write must not reach memory that is given back
        super().deregister(name)

    def connect(self, peer: bytes, deadline: float) -> Connection:
        effect = self._call("connect")
        if isinstance(effect, Delay):
            self._sleep(min(effect.seconds, max(0.0, deadline - self._clock())))
            if self._clock() >= deadline:
                raise KVFerryError(
                    "the peer accepts slowly", kind=ErrorKind.TIMEOUT, where="fault plan", retry=Retry.LATER
                )
        return _FaultyConnection(super().connect(peer, deadline), self)

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        inner = self._behind(connection)
        return self._submit(
            "read", connection, operations, deadline, lambda: self.inner.read(inner, operations, deadline)
        )

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        inner = self._behind(connection)
        return self._submit(
            "write", connection, operations, deadline, lambda: self.inner.write(inner, operations, deadline)
        )

    def close(self, deadline: float) -> None:
        """Closes the inner channel. What is still held back ends first, so that only lost tickets stay
        open."""
        self._call("close")
        for held in self._taken(lambda _held: True):
            held.end(ErrorKind.CLOSED, "the channel was closed first")
        super().close(deadline)
        self._tell_reordered()
        self._write_late()
        with self._lock:
            self._regions.clear()

    # -- for the test ----------------------------------------------------------------------------

    def poll(self, now: float | None = None) -> None:
        """Begin what is due, end what is beyond its deadline, tell what is reordered, write late."""
        now = self._clock() if now is None else now
        for held in self._taken(lambda held: held.deadline <= now):
            held.end(ErrorKind.TIMEOUT, "the deadline is over")
        for held in sorted(self._taken(lambda held: held.due <= now), key=lambda held: held.due):
            held.begin()
        self._tell_reordered()
        self._write_late()

    def release(self) -> int:
        """Begin everything that stalls; how many calls that were."""
        stalled = self._taken(lambda held: held.stalled)
        for held in stalled:
            held.begin()
        return len(stalled)

    def closed(self, connection: Connection) -> None:
        """Called by a connection that is being closed."""
        for held in self._taken(lambda held: held.connection is connection):
            held.end(ErrorKind.CLOSED, "the connection was closed")

    # -- the work --------------------------------------------------------------------------------

    def _call(self, operation: str, subject: str = "") -> Effect | None:
        self._write_late()
        effect = self.player.meet(operation, subject)
        if isinstance(effect, Crash):
            crash(effect, operation)
        if isinstance(effect, Fail):
            raise _error(effect, operation)
        return effect

    def _behind(self, connection: Connection) -> Connection:
        """The inner channel's connection; another channel's as it is, for the inner one to refuse."""
        if isinstance(connection, _FaultyConnection) and connection.owner is self:
            return connection.inner
        return connection

    def _submit(
        self,
        verb: str,
        connection: Connection,
        operations: Sequence[RemoteOp],
        deadline: float,
        forward: Callable[[], Ticket[TransferStatus]],
    ) -> Ticket[TransferStatus]:
        self._write_late()
        effect = self.player.meet(verb, operations[0].region if operations else "")
        if isinstance(effect, Crash):
            crash(effect, verb)
        outer: Ticket[TransferStatus] = Ticket(len(operations))
        if isinstance(effect, Fail):
            outer.complete([ItemResult(TransferStatus.FAILED, _error(effect, verb))] * outer.items)
            return outer
        spans = [operation.local for operation in operations]

        def follow(inner: Ticket[TransferStatus]) -> None:
            outer.on_cancel(lambda _outer: inner.cancel())
            inner.on_done(lambda done: self._told(effect, outer, spans, done.results))

        def begin() -> None:
            try:
                follow(forward())
            except KVFerryError as error:
                outer.complete([ItemResult(TransferStatus.FAILED, error.with_traceback(None))] * outer.items)

        if isinstance(effect, Delay | Stall | Drop):
            due = self._clock() + effect.seconds if isinstance(effect, Delay) else _NEVER
            held = _Held(due, isinstance(effect, Stall), deadline, connection, begin, outer)
            with self._lock:
                self._held.append(held)
            outer.on_cancel(lambda _outer: self._cancel(held))
        else:
            follow(forward())  # what it raises is for the caller: nothing has begun
        return outer

    def _told(
        self,
        effect: Effect | None,
        outer: Ticket[TransferStatus],
        spans: list[Span],
        results: Sequence[ItemResult[TransferStatus]],
    ) -> None:
        def tell() -> None:
            outer.complete(results)

        if isinstance(effect, LoseCompletion):
            return
        if isinstance(effect, ReorderCompletion):
            with self._lock:
                self._reordered.append(tell)
            return
        if isinstance(effect, FlipBit):
            self._flip(spans, effect.bit)
        tell()
        if isinstance(effect, DoubleCompletion):
            with contextlib.suppress(KVFerryError):  # a ticket refuses it and counts it
                tell()
        if isinstance(effect, LateWrite):
            with self._lock:
                self._late.append(spans)
        self._tell_reordered()

    def _tell_reordered(self) -> None:
        with self._lock:
            reordered, self._reordered = self._reordered, []
        for tell in reordered:
            tell()

    def _write_late(self) -> None:
        with self._lock:
            late, self._late = self._late, []
        for spans in late:
            self._flip(spans, 0)

    def _flip(self, spans: Sequence[Span], bit: int) -> None:
        """Turn one bit of every span that has bytes and is still registered."""
        with self._lock:
            for span in spans:
                region = self._regions.get(span.region)
                if region is None or not 0 < span.length <= region.length - span.offset or span.offset < 0:
                    continue
                at = region.address + span.offset + bit // 8 % span.length
                ctypes.c_ubyte.from_address(at).value ^= 1 << bit % 8

    def _taken(self, wanted: Callable[[_Held], bool]) -> list[_Held]:
        """Held calls that are not held from now on, so that each begins or ends once."""
        with self._lock:
            taken = [held for held in self._held if wanted(held)]
            self._held = [held for held in self._held if held not in taken]
        return taken

    def _cancel(self, held: _Held) -> None:
        for each in self._taken(lambda other: other is held):
            each.end(ErrorKind.CANCELLED, "the call was cancelled")


class _FaultyConnection(ForwardingConnection):
    """Tells its channel when it is closed."""

    def __init__(self, inner: Connection, owner: FaultyChannel) -> None:
        super().__init__(inner)
        self.owner = owner

    def close(self) -> None:
        self.owner.closed(self)
        super().close()


def _error(effect: Fail, where: str) -> KVFerryError:
    return KVFerryError("a fault was injected", kind=effect.kind, where=where, retry=effect.retry)
