"""Lists of operations of any length, for channels whose calls take only so many."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    Region,
    RemoteOp,
    Ticket,
    TransferStatus,
)

_Results = Sequence[ItemResult[TransferStatus]]


class SplitChannel:
    """A :class:`kvferry.api.Channel` that hands every call on to ``inner``, which is never given more than
    ``max_ops`` operations at once: longer lists become several of its calls.

    The caller sees one ticket all the same. It has the results in the order of the list, is completed when
    the last of the calls has ended, and cancelling it cancels all of them. When ``inner`` refuses a call
    after others have begun, because it was closed in between for example, the operations of that call and
    of those behind it fail with what it raised.

    Threads: as ``inner``. Raises :class:`ValueError` unless ``max_ops`` is at least 1.
    """

    def __init__(self, inner: Channel, max_ops: int) -> None:
        if max_ops < 1:
            raise ValueError(f"a call takes at least one operation, not {max_ops}")
        self._inner = inner
        self._max_ops = max_ops

    def open(self, context: ChannelContext) -> None:
        self._inner.open(context)

    def register(self, region: Region) -> None:
        self._inner.register(region)

    def deregister(self, name: str) -> None:
        self._inner.deregister(name)

    def export(self) -> bytes:
        return self._inner.export()

    def connect(self, peer: bytes, deadline: float) -> Connection:
        return self._inner.connect(peer, deadline)

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        if len(operations) <= self._max_ops:
            return self._inner.read(connection, operations, deadline)
        return self._split(lambda part: self._inner.read(connection, part, deadline), operations)

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        if len(operations) <= self._max_ops:
            return self._inner.write(connection, operations, deadline)
        return self._split(lambda part: self._inner.write(connection, part, deadline), operations)

    def close(self, deadline: float) -> None:
        self._inner.close(deadline)

    def _split(
        self,
        call: Callable[[Sequence[RemoteOp]], Ticket[TransferStatus]],
        operations: Sequence[RemoteOp],
    ) -> Ticket[TransferStatus]:
        starts = range(0, len(operations), self._max_ops)
        parts = [operations[start : start + self._max_ops] for start in starts]
        tickets = [call(parts[0])]  # what this one raises is for the caller: nothing has begun
        refused: KVFerryError | None = None
        for part in parts[1:]:
            try:
                tickets.append(call(part))
            except KVFerryError as error:
                refused = error.with_traceback(None)
                break
            except Exception as error:  # noqa: BLE001 - what has begun needs its ticket
                refused = KVFerryError(
                    "the channel failed",
                    kind=ErrorKind.INTERNAL,
                    why=repr(error),
                    remedy="report it to the author of the channel",
                )
                break
        rest = parts[len(tickets) :]
        failed = [ItemResult(TransferStatus.FAILED, refused)] * sum(map(len, rest)) if refused else []
        return _joined(tickets, failed)


def splitting(channel: Channel, max_ops: int | None) -> Channel:
    """``channel`` as core uses it: behind a :class:`SplitChannel` where its spec claims ``max_ops``."""
    return channel if max_ops is None else SplitChannel(channel, max_ops)


def _joined(tickets: Sequence[Ticket[TransferStatus]], behind: _Results) -> Ticket[TransferStatus]:
    """One ticket for all of these, and for ``behind``, whose results are known."""
    joined: Ticket[TransferStatus] = Ticket(sum(ticket.items for ticket in tickets) + len(behind))
    left = len(tickets)
    lock = threading.Lock()

    def ended(_ticket: Ticket[TransferStatus]) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left:
                return
        joined.complete([result for ticket in tickets for result in ticket.results] + list(behind))

    def cancelled(_ticket: Ticket[TransferStatus]) -> None:
        for ticket in tickets:
            ticket.cancel()

    joined.on_cancel(cancelled)
    for ticket in tickets:
        ticket.on_done(ended)
    return joined
