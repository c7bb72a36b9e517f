"""The staging of one rank: copies what peers are lent out of the first tier, while a channel is open."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from attrs import define

from kvferry.api import (
    ErrorKind,
    KVFerryError,
    Region,
    Span,
    StageCopy,
    Staging,
    StagingContext,
    Ticket,
    TransferStatus,
)
from kvferry.control.grants import STAGING
from kvferry.control.orders import ItemFault
from kvferry.data.arena import MemoryFileArena
from kvferry.data.engine_side import EngineSide
from kvferry.data.item_faults import fault_of, faults_of
from kvferry.data.wire import StageChunks

_log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
"""How long one attempt to close a staging may take."""
AGAIN_SECONDS = 0.1
"""Between two attempts, where the first raised anything but that its time was over."""


class StageListener(Protocol):
    """What becomes of orders. Called from any thread; must not block."""

    def done(self, order: int, faults: dict[int, ItemFault], reason: str) -> None:
        """An order ended: exactly once each. Nothing touches its slots any more."""
        ...


@define(eq=False)
class _UnderWay:
    order: StageChunks
    ticket: Ticket[TransferStatus] | None = None
    cancelled: bool = False
    ended: bool = False
    """Somebody is about to tell the listener, or has done so."""


class StagingSide:
    """Carries out what the control plane orders. Decides nothing.

    ``make_staging()`` makes a new, closed staging for every opening. Its slots are cut like those of the
    first tier, as ``engine`` says for chunks of ``chunk_tokens``.

    Threads: :meth:`open` and :meth:`close` from one, and they may block; :meth:`stage` and :meth:`cancel`
    from one, perhaps another, and they do not.
    """

    def __init__(
        self,
        make_staging: Callable[[], Staging],
        engine: EngineSide,
        chunk_tokens: int,
        *,
        rank: int,
        world_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_staging = make_staging
        self._layout = engine.layout
        self._chunk_tokens = chunk_tokens
        self._rank = rank
        self._world_size = world_size
        self._clock = clock
        self._started: tuple[Region, StageListener] | None = None
        self._staging: Staging | None = None
        self._changed = threading.Condition()
        """Guards what follows. Nobody else's code is called under it."""
        self._takes = False
        self._orders: dict[int, _UnderWay] = {}
        """What has not been told of to the end."""

    def start(self, region: Region, listener: StageListener) -> None:
        """Be ready to be opened. ``region`` is the first tier's arena."""
        self._started = region, listener

    def open(self) -> Region:
        """The memory that peers may read, ready for orders. Raises :class:`KVFerryError`, or whatever else a
        staging raises; nothing is open then."""
        region, _ = self._known
        staging = self._make_staging()
        staged = staging.open(
            StagingContext(
                name=STAGING,
                make_arena=MemoryFileArena,
                regions={region.name: region},
                rank=self._rank,
                world_size=self._world_size,
                clock=self._clock,
            )
        )
        with self._changed:
            self._staging, self._takes = staging, True
        return staged

    def stage(self, order: StageChunks) -> None:
        """Begin to copy."""
        region, _ = self._known
        with self._changed:
            if order.id in self._orders:
                _log.error("kvferry: two copies into the staging of the number %d", order.id)
                return
            under_way = self._orders[order.id] = _UnderWay(order)
            staging = self._staging if self._takes else None
        if staging is None:
            self._fail(under_way, ItemFault.CANCELLED, "the staging is not open")
            return
        size = self._layout.total_bytes
        columns = zip(order.tokens, order.from_slots, order.slots, strict=True)
        copies = [
            StageCopy(Span(region.name, source * size, self._bytes_of(tokens)), target * size)
            for tokens, source, target in columns
        ]
        try:
            ticket = staging.stage(copies, self._clock() + order.seconds)
        except Exception as error:  # noqa: BLE001 - an order ends whatever a staging does
            self._fail(under_way, fault_of(error), str(error))
            return
        with self._changed:
            under_way.ticket = ticket
            cancelled = under_way.cancelled
        if cancelled:
            ticket.cancel()
        ticket.on_done(
            lambda done: self._finish(under_way, *faults_of(done.results, TransferStatus.DONE, {}))
        )

    def cancel(self, number: int) -> bool:
        """End an order early; whether there is one of that number under way."""
        with self._changed:
            under_way = self._orders.get(number)
            if under_way is None:
                return False
            under_way.cancelled = True
            ticket = under_way.ticket
        if ticket is not None:
            ticket.cancel()
        return True

    def close(self) -> None:
        """End every order and give the memory back, however long that takes: until then somebody may be
        writing. Whoever read it has been stopped before. Idempotent."""
        with self._changed:
            self._takes = False
            staging = self._staging
        if staging is None:
            return
        level = logging.WARNING
        while True:
            try:
                staging.close(self._clock() + CLOSE_SECONDS)
                break
            except Exception as error:  # noqa: BLE001 - it is open still, whatever it raises
                _log.log(level, "kvferry: the staging does not end: %s", error)
                level = logging.DEBUG
                if not isinstance(error, KVFerryError) or error.kind is not ErrorKind.TIMEOUT:
                    time.sleep(AGAIN_SECONDS)
        with self._changed:
            self._staging = None
            left = list(self._orders.values())
        for under_way in left:
            self._fail(under_way, ItemFault.CANCELLED, "the staging was closed")
        with self._changed:
            while self._orders:  # other threads are telling of them
                self._changed.wait()

    @property
    def _known(self) -> tuple[Region, StageListener]:
        assert self._started is not None, "start() was not called"
        return self._started

    def _bytes_of(self, tokens: int) -> int:
        return self._layout.value_bytes(tokens, self._chunk_tokens)

    def _fail(self, under_way: _UnderWay, fault: ItemFault, reason: str) -> None:
        self._finish(under_way, dict.fromkeys(range(len(under_way.order.slots)), fault), reason)

    def _finish(self, under_way: _UnderWay, faults: dict[int, ItemFault], reason: str) -> None:
        with self._changed:
            if under_way.ended:
                return
            under_way.ended = True
        try:
            self._known[1].done(under_way.order.id, faults, reason)
        finally:
            with self._changed:
                del self._orders[under_way.order.id]
                self._changed.notify_all()
