"""A channel over TCP."""

from __future__ import annotations

import enum
import logging
import secrets
import threading
from collections.abc import Callable, Sequence
from functools import partial

from kvferry.api import (
    ChannelContext,
    Connection,
    ErrorKind,
    KVFerryError,
    Region,
    RemoteOp,
    Retry,
    Ticket,
    TransferStatus,
)
from kvferry_transport_tcp.address import Address, parse_address
from kvferry_transport_tcp.connection import TCPConnection
from kvferry_transport_tcp.export import EPOCH_BYTES, Export
from kvferry_transport_tcp.faults import closed
from kvferry_transport_tcp.listener import Listener, listen_at
from kvferry_transport_tcp.options import TCPOptions
from kvferry_transport_tcp.own_address import own_address
from kvferry_transport_tcp.peer_clock import PeerClock
from kvferry_transport_tcp.reaching import Caller
from kvferry_transport_tcp.watch import Watch
from kvferry_transport_tcp.wire import CONNECTION_BYTES, WIRE_VERSION, Role

_log = logging.getLogger(__name__)


class _State(enum.Enum):
    NEW = "not open yet"
    OPEN = "open"
    CLOSING = "being closed"
    CLOSED = "closed"


class TCPChannel:
    """See :class:`kvferry.api.Channel`, and the page on the TCP channel for what goes over the wire.

    Threads of its own: one that lets peers in, one for deadlines, one for each connection that a peer opened,
    and for each :class:`TCPConnection` one that listens to the peer and one per lane. All bytes are moved in
    few long calls of the system, without the interpreter's lock.
    """

    def __init__(self, options: TCPOptions) -> None:
        self._options = options
        self._state = _State.NEW
        self._lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._connections: set[TCPConnection] = set()
        self._context: ChannelContext | None = None
        self._watch: Watch | None = None
        self._listener: Listener | None = None
        self._export = b""
        self._secret = b""

    # -- opening ---------------------------------------------------------------------------------

    def open(self, context: ChannelContext) -> None:
        if self._state is not _State.NEW:
            raise KVFerryError(
                "a channel is opened once",
                kind=ErrorKind.INTERNAL,
                where=context.name,
                why=f"it is {self._state.value}",
                remedy="make another one",
            )
        if len(context.epoch) != EPOCH_BYTES:
            raise KVFerryError(
                f"an epoch has {EPOCH_BYTES} bytes", kind=ErrorKind.INTERNAL, where=context.name
            )
        self._secret = self._find_secret(context)
        wanted = _of_rank(self._options.listen, context, "listen")
        advertised = (
            _of_rank(self._options.advertise, context, "advertise") if self._options.advertise else None
        )
        sock = listen_at(wanted)
        bound = Address(wanted.host, sock.getsockname()[1])
        told = _told_address(bound, advertised)
        self._context = context
        self._export = Export(
            version=WIRE_VERSION,
            address=told,
            instance=context.instance,
            rank=context.rank,
            epoch=context.epoch,
        ).to_bytes()
        self._watch = Watch(context.clock, f"kvferry-{context.name}-watch")
        self._watch.start()
        self._listener = Listener(
            sock,
            epoch=context.epoch,
            secret=self._secret,
            clock=context.clock,
            watch=self._watch,
            start=self._start,
        )
        self._state = _State.OPEN
        self._listener.open()
        _log.info("kvferry: channel %s listens at %s, and tells peers %s", context.name, bound, told)

    def _find_secret(self, context: ChannelContext) -> bytes:
        variable = self._options.secret_variable
        if not variable:
            return b""
        secret = context.variables.get(variable, "")
        if not secret:
            raise KVFerryError(
                f"the variable {variable} holds no secret",
                kind=ErrorKind.CONFIG,
                where="channel.secret_variable",
                why="it is empty" if variable in context.variables else "it is not set",
                remedy="set it to the same text for all peers, or remove the key",
                retry=Retry.AFTER_CHANGE,
            )
        return secret.encode(errors="surrogateescape")

    def _start(self, run: Callable[[], None], name: str) -> None:
        """Run this on a thread that :meth:`close` waits for."""

        def run_and_leave() -> None:
            try:
                run()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        where = self._context.name if self._context is not None else ""
        thread = threading.Thread(target=run_and_leave, name=f"kvferry-{where}-{name}", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    # -- regions ---------------------------------------------------------------------------------

    def register(self, region: Region) -> None:
        self._opened()[1].registry.add(region)

    def deregister(self, name: str) -> None:
        if self._state in (_State.NEW, _State.CLOSED):
            return  # nothing is registered
        registry = self._opened()[1].registry
        region = registry.withdraw(name)
        if region is None:
            return
        with self._lock:
            connections = tuple(self._connections)
        for connection in connections:
            connection.withdraw(region)
        registry.drain(region)

    def export(self) -> bytes:
        self._opened()
        return self._export

    # -- peers -----------------------------------------------------------------------------------

    def connect(self, peer: bytes, deadline: float) -> Connection:
        context, listener, watch = self._opened()
        export = Export.parse(peer)
        caller = Caller(
            export,
            context=context,
            secret=self._secret,
            connection=secrets.token_bytes(CONNECTION_BYTES),
        )
        peer_clock = PeerClock(context.clock)
        control = caller.call(Role.CONTROL, peer_clock, deadline)
        made = TCPConnection(
            peer=caller.peer,
            owner=self,
            control=control,
            reach=partial(caller.call, Role.LANE, peer_clock),
            registry=listener.registry,
            watch=watch,
            clock=context.clock,
            peer_clock=peer_clock,
            lanes=self._options.connections,
            start=self._start,
        )
        try:
            with caller.told(deadline):
                made.open(deadline)
            self._adopt(made)
        except BaseException:
            made.give_up()
            raise
        return made

    def _adopt(self, made: TCPConnection) -> None:
        with self._lock:
            if self._state is not _State.OPEN:
                raise self._closed()
            self._connections = {one for one in self._connections if one.alive} | {made}
            made.start()

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._mine(connection).submit(tuple(operations), deadline, writing=False)

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._mine(connection).submit(tuple(operations), deadline, writing=True)

    def _mine(self, connection: Connection) -> TCPConnection:
        self._opened()
        if not isinstance(connection, TCPConnection) or connection.owner is not self:
            raise KVFerryError(
                "this connection belongs to another channel",
                kind=ErrorKind.INTERNAL,
                remedy="use it with the channel that made it",
            )
        return connection

    # -- closing ---------------------------------------------------------------------------------

    def close(self, deadline: float) -> None:
        with self._lock:
            if self._state in (_State.NEW, _State.CLOSED):
                self._state = _State.CLOSED
                return
            context, listener, watch = self._parts()
            self._state = _State.CLOSING
            connections = tuple(self._connections)
        listener.close()
        for connection in connections:
            connection.end(closed("channel"))
        for name in listener.registry.names():
            listener.registry.withdraw(name)
        self._join(context, deadline, self._others)
        watch.close()
        self._join(context, deadline, lambda: [watch.thread] if watch.thread.is_alive() else [])
        with self._lock:
            self._connections.clear()
            self._state = _State.CLOSED

    def _join(
        self, context: ChannelContext, deadline: float, find: Callable[[], list[threading.Thread]]
    ) -> None:
        while others := find():
            left = deadline - context.clock()
            if left <= 0:
                raise KVFerryError(
                    f"{len(others)} threads of the TCP channel have not ended",
                    kind=ErrorKind.TIMEOUT,
                    where=context.name,
                    why=", ".join(sorted(thread.name for thread in others)),
                    remedy="leave their memory alone and close again later",
                    retry=Retry.LATER,
                )
            others[0].join(left)

    def _others(self) -> list[threading.Thread]:
        """Threads of the channel that still run, without the watch and the one that asks."""
        own = threading.current_thread()
        with self._lock:
            return [thread for thread in self._threads if thread is not own and thread.is_alive()]

    def _parts(self) -> tuple[ChannelContext, Listener, Watch]:
        if self._context is None or self._listener is None or self._watch is None:
            raise self._closed()
        return self._context, self._listener, self._watch

    def _opened(self) -> tuple[ChannelContext, Listener, Watch]:
        if self._state is not _State.OPEN:
            raise self._closed()
        return self._parts()

    def _closed(self) -> KVFerryError:
        return KVFerryError(
            f"the channel is {self._state.value}", kind=ErrorKind.CLOSED, remedy="open it first"
        )


def _told_address(bound: Address, advertised: Address | None) -> Address:
    if advertised is not None:
        return Address(advertised.host, advertised.port or bound.port)
    return Address(own_address(bound.host), bound.port) if bound.wildcard else bound


def _of_rank(texts: Sequence[str], context: ChannelContext, key: str) -> Address:
    """The address of this rank in a list with one for each, or with one for all."""
    if len(texts) == 1 and (context.world_size == 1 or not parse_address(texts[0]).port):
        return parse_address(texts[0])
    if context.rank >= len(texts):
        raise KVFerryError(
            f"{key} has {len(texts)} addresses for {context.world_size} ranks",
            kind=ErrorKind.CONFIG,
            where=f"channel.{key}",
            remedy="write one for each rank, or one with the port 0",
            retry=Retry.AFTER_CHANGE,
        )
    return parse_address(texts[context.rank])
