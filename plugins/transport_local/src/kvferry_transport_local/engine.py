"""An open channel: its parts, and what becomes of a batch."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.api import ChannelContext, ItemResult, RemoteOp, Ticket, TransferStatus
from kvferry_transport_local.active import Active
from kvferry_transport_local.asking import Asking
from kvferry_transport_local.batches import Batch, Outcome
from kvferry_transport_local.copying import Copier, Piece
from kvferry_transport_local.failures import cancelled, closed, defect, taken_back
from kvferry_transport_local.frames import Codec
from kvferry_transport_local.link import Link
from kvferry_transport_local.meeting import Meeting
from kvferry_transport_local.moving import Movement
from kvferry_transport_local.options import LocalOptions
from kvferry_transport_local.planning import Planner
from kvferry_transport_local.pool import Pool, Work
from kvferry_transport_local.probing import Prober
from kvferry_transport_local.reception import Reception
from kvferry_transport_local.regions import Regions
from kvferry_transport_local.service import Service
from kvferry_transport_local.serving import Serving
from kvferry_transport_local.tracers import Tracers

_DONE = ItemResult(TransferStatus.DONE)


class Engine:
    """Made open: raises :class:`kvferry.api.KVFerryError` or ``OSError``, and leaves nothing then.

    Threads: ``close`` from one, the rest from any.
    """

    def __init__(
        self,
        context: ChannelContext,
        options: LocalOptions,
        movement: Movement,
        prober: Prober,
        tracers: Tracers,
    ) -> None:
        where = f"channel {context.name}"
        clock = context.clock
        self.context = context
        self.where = where
        self.meeting = Meeting(context, Codec(), options.mechanism, prober, tracers, where)
        self.regions = Regions(where)
        try:
            listener = self.meeting.listen()
        except BaseException:
            self.regions.close()
            raise
        self.active = Active(clock, where)
        self._copier = Copier(self.regions, movement, options.threads, clock, where)
        self._planner = Planner(self.regions, where)
        self._pool = Pool(options.threads, context.name)
        self._asking = Asking(clock, where)
        serving = Serving(self.regions, self._copier, self._pool, self.active, clock, where)
        self.reception = Reception(
            context, options.mechanism, self.meeting, self.regions, self.active, serving, self._asking
        )
        try:
            self.service = Service(self.reception, listener, context.name)
        except BaseException:
            listener.close()
            self.regions.close()
            raise
        self.active.wake = self.service.wake
        self._pool.open()
        self.service.open()

    def submit(
        self, link: Link, operations: Sequence[RemoteOp], deadline: float, reading: bool
    ) -> Ticket[TransferStatus]:
        """The ticket of a batch that is under way."""
        ticket: Ticket[TransferStatus] = Ticket(len(operations))

        def finish(outcomes: Sequence[Outcome]) -> None:
            self.active.remove(batch)
            if not reading:
                self._asking.forget(batch)
            ticket.complete(
                [_DONE if error is None else ItemResult(TransferStatus.FAILED, error) for error in outcomes]
            )

        def start() -> None:
            try:
                self._start(batch, link, operations, reading)
            except Exception as error:  # noqa: BLE001 - no fault may keep a ticket from ending
                batch.abort(defect(error, "planning", self.where))

        batch = Batch(
            len(operations), deadline, finish, lambda number: self._still(batch, link, number), link
        )
        batch.ticket = ticket
        self.active.add(batch)
        ticket.on_cancel(lambda _: batch.abort(cancelled(self.where)))
        if not link.alive:
            batch.abort(link.error())
        elif self._planner.knows(link, operations):
            start()
        else:
            self.reception.after_news(link, start)
        return ticket

    def close(self, deadline: float) -> bool:
        """Whether everything was over by then. May be called again if not."""
        error = closed("channel", self.where)
        # Before peers can see it: what they do then would end our operations with another error.
        self.active.close(error)
        for link in self.reception.everybody():
            link.finish(error)
        self.regions.say_closed()
        copied = self._pool.close(deadline - self.context.clock())
        if not self.service.close(max(0.5, deadline - self.context.clock())) or not copied:
            return False
        for registered in self.regions.all():
            self.regions.take_back(registered.region.name)
        self.regions.close()
        self.meeting.close()
        return True

    def _start(self, batch: Batch, link: Link, operations: Sequence[RemoteOp], reading: bool) -> None:
        pieces = self._planner.plan(batch, link, operations, reading)
        if reading:
            self._pool.put(Work(self._copier.steps(batch, link, pieces)))
        elif pieces and not batch.ended:
            self._asking.ask(batch, link, [(piece.number, _row(piece)) for piece in pieces])
        batch.end_if_over()

    def _still(self, batch: Batch, link: Link, number: int) -> Outcome:
        """Asked at the end of what is done: an end that comes later than the memory was taken back must not
        say so."""
        sides = batch.sides[number]
        if sides is None:
            return None
        local, remote = sides
        if local.gone:
            return taken_back(local.region.name, self.where)
        if not remote.current:
            return link.error() if link.look() else taken_back(remote.name, link.where)
        return None


def _row(piece: Piece) -> tuple[int, ...]:
    return (
        piece.remote.slot,
        piece.remote.generation,
        piece.source,
        piece.local.slot,
        piece.local.generation,
        piece.to,
        piece.length,
    )
