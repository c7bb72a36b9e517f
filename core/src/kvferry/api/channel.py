"""The contract of a channel: moves spans between the memories of two data planes, one-sided."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from attrs import field, frozen

from kvferry.api.memory import MemoryKind, Region, Span
from kvferry.api.tickets import Ticket, TransferStatus

MAX_EXPORT_BYTES = 65536
"""What :meth:`Channel.export` gives may be as long."""


class RemoteOp(NamedTuple):
    """``local.length`` bytes between a span of ours and the peer's region named ``region``, from ``offset``
    on. Whether they come or go says the call that takes it."""

    local: Span
    region: str
    offset: int


@frozen(kw_only=True)
class RemoteRegion:
    """A region that a peer has registered."""

    name: str
    length: int
    """Bytes."""
    kind: MemoryKind = MemoryKind.HOST


@frozen(kw_only=True)
class ChannelContext:
    """What core hands a channel when it opens."""

    name: str
    """The channel's name in the configuration."""
    instance: str
    """Which instance this is; stays the same over restarts."""
    epoch: bytes
    """16 random bytes, new at every start. What a peer learned of an earlier epoch is void."""
    rank: int = 0
    """The worker's rank in its instance, from 0."""
    world_size: int = 1
    """How many ranks the instance has."""
    clock: Callable[[], float] = time.monotonic
    """Deadlines are times of this clock, in seconds."""
    operation_seconds: float = 10.0
    """How long something may take for which the contract gives no deadline, for example to listen."""
    variables: Mapping[str, str] = field(factory=dict)
    """The environment, for options that name a variable instead of holding a secret."""


class Connection(Protocol):
    """The way to one peer, from :meth:`Channel.connect`. Threads: any."""

    @property
    def alive(self) -> bool:
        """False once the peer, as it was when this was made, is known to be gone. It never comes back: its
        successor is another epoch, and another connection."""
        ...

    def regions(self) -> Mapping[str, RemoteRegion]:
        """The regions that the peer had registered, as far as is known here."""
        ...

    def close(self) -> None:
        """Give the connection up: operations under way end as ``FAILED``, at once. Idempotent."""
        ...


class Channel(Protocol):
    """Moves bytes between registered memory here and registered memory of a peer, which does nothing
    for it.

    The factory of the spec is called as ``factory(options)``, with an instance of the spec's options class.

    **Peers.** Each side registers regions and exports who it is; core carries what was exported to the peer,
    together with the hello by which both have agreed, and the peer connects to it. Either side may connect;
    a connection serves the side that made it. What was exported names the ``epoch``: a connection to an
    earlier one is refused, and one that was made ends when the peer does. Operations then fail, and never
    touch what has come in its place.

    **Submitting.** ``read`` and ``write`` take operations and return a ticket without waiting for the peer.
    Each operation has a result of its own, so one that fails leaves the others alone. No order is promised
    between operations. An operation of length 0 is done, if both sides of it lie inside their regions. A
    ticket is completed exactly once, from any thread, and at the latest soon after ``deadline``, a time of
    the context's clock: what is not done by then fails with the kind ``TIMEOUT``; of what comes with a
    deadline that has passed no byte moves. After :meth:`kvferry.api.Ticket.cancel` it ends soon, with the
    kind ``CANCELLED`` for what is not done.

    **Bytes.** Of a read that is ``DONE`` the bytes lie in the local span; of a write, in the peer's memory,
    and the peer's own threads find them there. Nothing but the named bytes is written on either side. Once a
    ticket has ended, nothing touches its local spans any more, whatever became of it: not a late answer, nor
    a peer that was slow. The peer's span of a write that failed may be written in part, until the connection
    is closed or ``deadline`` is over, whichever is first: a lease ends later than the deadlines under it.
    The bytes of a read may be those of several moments if somebody writes to them meanwhile: leases
    prevent it.

    **Bounds.** An operation outside of a registered region, on either side, fails with the kind
    ``PROTOCOL``, and no byte moves. The side that owns the memory checks it again; it never trusts a peer.

    **Failing.** A peer that is gone or does not answer fails operations with the kind ``IO``, a closed
    connection or channel with ``CLOSED``; nothing waits beyond its deadline.

    Threads: ``open`` and ``close`` from one; the rest from any, at the same time. Before ``open`` and after
    ``close`` the rest raise :class:`kvferry.api.KVFerryError` of kind ``CLOSED``.
    """

    def open(self, context: ChannelContext) -> None:
        """Get ready to be connected to; may block up to ``context.operation_seconds``.

        Raises :class:`kvferry.api.KVFerryError` when that is impossible, and nothing is left open then; of
        kind ``INTERNAL`` the second time.
        """
        ...

    def register(self, region: Region) -> None:
        """Let peers, and operations of ours, name this memory. A connection made later sees it; one that
        there is sees it too, unless the channel claims ``register_before_connect``.

        Raises :class:`kvferry.api.KVFerryError`: ``CAPACITY`` beyond ``max_registered_bytes`` or a limit of
        the system, with the number; ``UNSUPPORTED`` for a kind of memory that is not claimed; ``INTERNAL``
        for a name that is registered already. Nothing is registered then.
        """
        ...

    def deregister(self, name: str) -> None:
        """Take a region back. When this returns nothing touches it any more, and what ends as ``DONE`` later,
        here or at a peer, had its bytes in place before. Operations that name it fail with the kind
        ``PROTOCOL``. A name that is not registered is no error."""
        ...

    def export(self) -> bytes:
        """Who this is, for a peer's ``connect``: at most ``MAX_EXPORT_BYTES``, without secrets. Stays valid
        until the channel closes."""
        ...

    def connect(self, peer: bytes, deadline: float) -> Connection:
        """The way to who exported ``peer``. Blocks until it is there, up to the deadline. Several to one peer
        are independent of each other.

        Raises :class:`kvferry.api.KVFerryError`: ``PROTOCOL`` for bytes that no channel of this kind and
        version exported, or a peer of another epoch; ``IO`` when nobody is there; ``TIMEOUT``;
        ``COMPATIBILITY`` when the peer refuses, with its reason.
        """
        ...

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        """Bring bytes of the peer into local spans. At most ``max_ops`` operations, which core sees to.

        Raises :class:`kvferry.api.KVFerryError` (``INTERNAL``) for a connection of another channel.
        """
        ...

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        """Bring bytes of local spans into the peer's memory; else as :meth:`read`."""
        ...

    def close(self, deadline: float) -> None:
        """End everything: connections, operations (``CLOSED``), listeners, threads. All regions are
        deregistered. Idempotent.

        Raises :class:`kvferry.api.KVFerryError` of kind ``TIMEOUT`` when something is not over by the
        deadline; the memory has to stay then, and ``close`` may be called again.
        """
        ...
