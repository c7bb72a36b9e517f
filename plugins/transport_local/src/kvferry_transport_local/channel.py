"""The channel itself: everything that the contract names, over the parts beside it."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from kvferry.api import (
    ChannelContext,
    Connection,
    ErrorKind,
    KVFerryError,
    Region,
    RemoteOp,
    RemoteRegion,
    Retry,
    Ticket,
    TransferStatus,
)
from kvferry_transport_local.engine import Engine
from kvferry_transport_local.failures import closed
from kvferry_transport_local.link import Link
from kvferry_transport_local.moving import Movement, choose_movement
from kvferry_transport_local.options import LocalOptions
from kvferry_transport_local.probing import Prober, probe_with
from kvferry_transport_local.tracers import Tracers

_LOOK_SECONDS = 0.02
"""Between two looks at a clock that may be another than the system's."""
_TELLING_SECONDS = 1.0
"""What a ticket that has ended may take to tell so."""


class LocalConnection:
    """A :class:`kvferry.api.Connection`. Threads: any."""

    def __init__(self, channel: LocalChannel, link: Link) -> None:
        self._channel = channel
        self._link = link

    @property
    def alive(self) -> bool:
        return self._link.look() == ""

    def regions(self) -> Mapping[str, RemoteRegion]:
        return self._link.regions()

    def close(self) -> None:
        self._link.finish(closed("connection", self._link.where))

    def link_for(self, channel: LocalChannel) -> Link:
        """Raises :class:`KVFerryError` (``INTERNAL``) when another channel made it."""
        if channel is not self._channel:
            raise _foreign()
        return self._link


class LocalChannel:
    """A :class:`kvferry.api.Channel` between processes of one host. ``prober`` finds out whether a peer's
    memory can be read across processes; ``tracers`` tells Yama whom to let read ours; ``movement`` moves
    bytes. They are the system's own unless handed in."""

    def __init__(
        self,
        options: LocalOptions,
        *,
        prober: Prober | None = None,
        tracers: Tracers | None = None,
        movement: Movement | None = None,
    ) -> None:
        self._options = options
        self._movement = movement
        self._prober = prober
        self._tracers = tracers or Tracers(options.readers)
        self._engine: Engine | None = None
        self._lock = threading.Lock()
        self._open = False
        self._over = False

    # -- open and close ----------------------------------------------------------------------------

    def open(self, context: ChannelContext) -> None:
        if self._engine is not None:
            raise KVFerryError(
                "the channel was opened before",
                kind=ErrorKind.INTERNAL,
                where=self._engine.where,
                remedy="make a channel for every time that one is opened",
            )
        movement = self._movement or choose_movement().movement
        prober = self._prober or probe_with(movement)
        try:
            self._engine = Engine(context, self._options, movement, prober, self._tracers)
        except OSError as error:
            raise KVFerryError(
                "the system refuses what a channel needs",
                kind=ErrorKind.IO,
                where=f"channel {context.name}",
                why=str(error),
                remedy="raise the limit of open files (ulimit -n)",
                retry=Retry.AFTER_CHANGE,
            ) from error
        self._open = True

    def close(self, deadline: float) -> None:
        engine = self._engine
        with self._lock:
            self._open = False
            if engine is None or self._over:
                return
        if not engine.close(deadline):
            raise KVFerryError(
                "the channel did not end by the deadline",
                kind=ErrorKind.TIMEOUT,
                where=engine.where,
                why="a copy is under way",
                remedy="keep the memory, and close it again",
                retry=Retry.LATER,
            )
        self._over = True

    # -- memory ------------------------------------------------------------------------------------

    def register(self, region: Region) -> None:
        engine = self._opened()
        with engine.reception.notices:
            engine.reception.registered(engine.regions.register(region))

    def deregister(self, name: str) -> None:
        engine = self._engine
        if engine is None or self._over:
            return
        with engine.reception.notices:
            taken = engine.regions.take_back(name)
            if taken is None:
                return
            engine.reception.taken_back(taken)
        engine.active.revoke(taken, _TELLING_SECONDS)
        if not engine.regions.wait_until_empty(taken, engine.context.operation_seconds):
            raise KVFerryError(
                f"a copy into the region {name!r} does not end",
                kind=ErrorKind.TIMEOUT,
                where=engine.where,
                remedy="keep the memory until the channel is closed",
            )

    # -- peers -------------------------------------------------------------------------------------

    def export(self) -> bytes:
        return self._opened().meeting.export()

    def connect(self, peer: bytes, deadline: float) -> Connection:
        engine = self._opened()
        export = engine.meeting.read_export(peer)
        link = engine.meeting.call(export, deadline)
        engine.reception.call(link, engine.meeting.hello(export))
        engine.service.add(link)
        if not self._open:
            link.finish(closed("channel", engine.where))
        clock = engine.context.clock
        while not link.listed.wait(_LOOK_SECONDS) and clock() < deadline:
            pass
        if not link.listed.is_set():
            link.finish(_silent(link.where))
        if not link.alive:
            raise link.error()
        return LocalConnection(self, link)

    # -- bytes -------------------------------------------------------------------------------------

    def read(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._submit(connection, operations, deadline, reading=True)

    def write(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float
    ) -> Ticket[TransferStatus]:
        return self._submit(connection, operations, deadline, reading=False)

    def _submit(
        self, connection: Connection, operations: Sequence[RemoteOp], deadline: float, *, reading: bool
    ) -> Ticket[TransferStatus]:
        engine = self._opened()
        if not isinstance(connection, LocalConnection):
            raise _foreign()
        link = connection.link_for(self)
        return engine.submit(link, tuple(operations), deadline, reading)

    def _opened(self) -> Engine:
        if not self._open or self._engine is None:
            raise closed("channel", self._engine.where if self._engine is not None else "")
        return self._engine


def _foreign() -> KVFerryError:
    return KVFerryError(
        "the connection belongs to another channel",
        kind=ErrorKind.INTERNAL,
        remedy="use it with the channel that made it",
    )


def _silent(where: str) -> KVFerryError:
    return KVFerryError(
        "the peer did not answer by the deadline",
        kind=ErrorKind.TIMEOUT,
        where=where,
        remedy="look whether the peer's process is stopped",
        retry=Retry.LATER,
    )
