"""The ways to peers while a channel is open, and the pulls that go over them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from attrs import define, field

from kvferry.api import (
    Channel,
    ChannelContext,
    Connection,
    ErrorKind,
    ItemResult,
    KVFerryError,
    Ticket,
    TransferStatus,
)
from kvferry.control.orders import ItemFault
from kvferry.data.item_faults import fault_of, faults_of
from kvferry.data.priorities import leave_the_engines_core
from kvferry.data.pulls import PullPlan, Reading
from kvferry.data.wire import ForgetPeer, MeetPeer

_log = logging.getLogger(__name__)

FORGOTTEN_KEPT = 256
"""Lives of peers that are remembered as gone: what comes for one of them later is not early."""
_CLOSING = "the channel is being closed"


class PullMeter(Protocol):
    """Hears when bytes are under way. Called from any thread."""

    def reading_began(self) -> None: ...

    def reading_ended(self, moved: int) -> None: ...


@define(eq=False)
class _Pull:
    reading: Reading
    ticket: Ticket[TransferStatus] | None = None
    cancelled: bool = False
    ended: bool = False
    """Somebody is about to tell the listener, or has done so."""


@define(eq=False)
class _Link:
    """The way to a peer in one epoch of it."""

    peer: str
    epoch: bytes
    export: bytes
    connection: Connection | None = None
    connecting: bool = False
    waiting: list[_Pull] = field(factory=list)
    """For the connection that is being made."""
    retry_at: float = float("-inf")
    """Until then, what failed last time counts."""
    fault: ItemFault = ItemFault.FAILED
    reason: str = ""
    forgotten: bool = False

    def take_waiting(self) -> list[_Pull]:
        waiting, self.waiting = self.waiting, []
        return waiting


class PeerLinks:
    """The peers that were met over one open ``channel``, each in one epoch, and what is read from them.

    ``plan(reading, length)`` says what to read from a peer whose region has so many bytes. ``later(job)`` has
    a job done soon that may block for a moment, on another thread, which calls :meth:`expire` then.

    Threads: :meth:`meet` and :meth:`forget` from one, :meth:`pull` and :meth:`cancel` from any. None blocks.
    Connecting has a thread for each peer, as long as it takes.
    """

    def __init__(
        self,
        channel: Channel,
        context: ChannelContext,
        plan: Callable[[Reading, int], PullPlan],
        meter: PullMeter,
        later: Callable[[Callable[[], None]], None],
        retry_seconds: float,
    ) -> None:
        self._channel = channel
        self._context = context
        self._plan = plan
        self._meter = meter
        self._later = later
        self._retry_seconds = retry_seconds
        self._changed = threading.Condition()
        """Guards all that follows. Nobody else's code is called under it."""
        self._links: dict[str, _Link] = {}
        self._early: dict[tuple[str, bytes], list[_Pull]] = {}
        """What waits for the word of its peer."""
        self._forgotten: deque[tuple[str, bytes]] = deque(maxlen=FORGOTTEN_KEPT)
        self._pulls: dict[int, _Pull] = {}
        """What has not been told of to the end."""
        self._closing = False

    # Peers

    def meet(self, order: MeetPeer) -> None:
        """Know a peer from now on, in place of an earlier epoch of it, and connect to it."""
        with self._changed:
            known = self._links.get(order.peer)
            if self._closing:
                return
            if known is not None and (known.epoch, known.export) == (order.epoch, order.export):
                return
            waiting = [] if known is None else self._drop(known)
            link = _Link(order.peer, order.epoch, order.export, connecting=True)
            name = order.peer, order.epoch
            link.waiting = self._early.pop(name, [])
            if name in self._forgotten:
                self._forgotten.remove(name)
            self._links[order.peer] = link
        if known is not None:
            self._gone(known, waiting)
        self._start_connecting(link)

    def forget(self, order: ForgetPeer) -> None:
        """Know a peer no more, if it is known in this epoch."""
        with self._changed:
            name = order.peer, order.epoch
            self._forgotten.append(name)
            early = self._early.pop(name, [])
            link = self._links.get(order.peer)
            waiting = [] if link is None or link.epoch != order.epoch else self._drop(link)
        self._fail(early, ItemFault.GONE, _not_known(order.peer))
        if link is not None and link.forgotten:
            self._gone(link, waiting)

    def _drop(self, link: _Link) -> list[_Pull]:
        """Take a link out, under the lock; the pulls that waited for it."""
        del self._links[link.peer]
        link.forgotten = True
        return link.take_waiting()

    def _gone(self, link: _Link, waiting: Sequence[_Pull]) -> None:
        """What is to be done for a link that was taken out."""
        self._fail(waiting, ItemFault.GONE, _not_known(link.peer))
        if link.connection is not None:
            self._later(partial(_give_up, link.connection))

    def _start_connecting(self, link: _Link) -> None:
        thread = threading.Thread(target=self._connect, args=(link,), name="kvferry-connect", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self._not_connected(link, error)

    def _connect(self, link: _Link) -> None:
        leave_the_engines_core()  # it is short, and requests wait for it: not behind the engine
        context = self._context
        try:
            connection = self._channel.connect(link.export, context.clock() + context.operation_seconds)
        except Exception as error:  # noqa: BLE001 - pulls wait for it
            self._not_connected(link, error)
            return
        with self._changed:
            link.connecting = False
            wanted = not link.forgotten and not self._closing
            if wanted:
                link.connection = connection
            waiting = link.take_waiting()
        if not wanted:
            _give_up(connection)
        for pull in waiting:
            self._submit(link, pull, connection)

    def _not_connected(self, link: _Link, error: Exception) -> None:
        fault = as_fault(error, f"the peer {link.peer} cannot be connected to")
        _log.debug("kvferry: channel %s: no way to %s: %s", self._context.name, link.peer, fault)
        with self._changed:
            link.connecting = False
            link.fault, link.reason = fault_of(fault), str(fault)
            link.retry_at = self._context.clock() + self._retry_seconds
            waiting = link.take_waiting()
        self._fail(waiting, link.fault, link.reason)

    def _drop_dead_connection(self, link: _Link) -> None:
        """Let the next pull connect anew."""
        connection = link.connection
        if connection is None or connection.alive:
            return
        with self._changed:
            if link.connection is not connection:  # another thread was faster
                return
            link.connection = None
        self._later(partial(_give_up, connection))

    # Pulls

    def pull(self, reading: Reading) -> None:
        """Begin to read."""
        with self._changed:
            if reading.id in self._pulls:
                _log.error("kvferry: channel %s: two pulls of the number %d", self._context.name, reading.id)
                return
            pull = self._pulls[reading.id] = _Pull(reading)
            link = self._links.get(reading.peer)
            closing = self._closing
            name = reading.peer, reading.epoch
            known = link is not None and link.epoch == reading.epoch
            early = reading.may_be_early and not (known or closing or name in self._forgotten)
            if early:
                self._early.setdefault(name, []).append(pull)
        if early:
            self._later(_nothing)  # its deadline may be the next
        elif closing:
            self._fail([pull], ItemFault.CANCELLED, _CLOSING)
        elif link is None or link.epoch != reading.epoch:
            self._fail([pull], ItemFault.GONE, _not_known(reading.peer))
        else:
            self._drop_dead_connection(link)
            self._send(link, pull)

    def _send(self, link: _Link, pull: _Pull) -> None:
        """Read at once, or when there is a connection."""
        with self._changed:
            connection = link.connection
            refused = self._closing or (
                connection is None and not link.connecting and self._context.clock() < link.retry_at
            )
            waits = connection is None and not refused
            connects = waits and not link.connecting
            if waits:
                link.connecting = True
                link.waiting.append(pull)
        if connection is not None:
            self._submit(link, pull, connection)
        elif refused:
            fault = (ItemFault.CANCELLED, _CLOSING) if self._closing else (link.fault, link.reason)
            self._fail([pull], *fault)
        elif connects:
            self._start_connecting(link)
        if waits:
            self._later(_nothing)  # its deadline may be the next

    def cancel(self, number: int) -> None:
        """End a pull early, if it is under way."""
        with self._changed:
            pull = self._pulls.get(number)
            if pull is None:
                return
            pull.cancelled = True
            ticket = pull.ticket
            waits = [link.waiting for link in self._links.values()] + list(self._early.values())
            waited = [waiting for waiting in waits if pull in waiting]
            for waiting in waited:
                waiting.remove(pull)
        if ticket is not None:
            ticket.cancel()
        elif waited:
            self._fail([pull], ItemFault.CANCELLED, "the pull was cancelled")

    def expire(self) -> float | None:
        """End what waited for a connection beyond its deadline. Seconds until it has to be called again."""
        now = self._context.clock()
        with self._changed:
            links = list(self._links.values())
            waiting = [pull for link in links for pull in link.waiting]
            waiting += [pull for early in self._early.values() for pull in early]
            late = [pull for pull in waiting if pull.reading.deadline <= now]
            for link in links:
                link.waiting = [pull for pull in link.waiting if pull not in late]
            for name, early in list(self._early.items()):
                self._early[name] = [pull for pull in early if pull not in late]
                if not self._early[name]:
                    del self._early[name]
            due = min((pull.reading.deadline for pull in waiting if pull not in late), default=None)
        self._fail(late, ItemFault.TIMEOUT, "the deadline was over before the peer was connected to")
        return None if due is None else due - now

    def _submit(self, link: _Link, pull: _Pull, connection: Connection) -> None:
        try:
            plan = self._plan(pull.reading, _length_of(connection, link.peer, pull.reading.region))
        except Exception as error:  # noqa: BLE001 - a pull ends whatever a channel does
            self._fail([pull], fault_of(error), str(error))
            return
        if not plan.operations:
            self._finish(pull, plan.faults, plan.reason)
            return

        def told(ticket: Ticket[TransferStatus]) -> None:
            pairs = zip(plan.operations, ticket.results, strict=True)
            moved = sum(each.local.length for each, result in pairs if result.status is TransferStatus.DONE)
            self._meter.reading_ended(moved)
            self._finish(pull, *_faults(plan, ticket.results, link.forgotten))

        self._meter.reading_began()
        try:
            ticket = self._channel.read(connection, plan.operations, pull.reading.deadline)
        except Exception as error:  # noqa: BLE001 - a pull ends whatever a channel does
            self._meter.reading_ended(0)
            fault = ItemFault.GONE if link.forgotten else fault_of(error)
            self._fail([pull], fault, str(error))
            return
        with self._changed:
            pull.ticket = ticket
            cancelled = pull.cancelled
        if cancelled:
            ticket.cancel()
        ticket.on_done(told)

    # Ends

    def begin_closing(self) -> None:
        """Take nothing any more, and end what waits. The channel may be closed then."""
        with self._changed:
            self._closing = True
            waiting = [pull for link in self._links.values() for pull in link.take_waiting()]
            waiting += [pull for early in self._early.values() for pull in early]
            self._links.clear()
            self._early.clear()
        self._fail(waiting, ItemFault.CANCELLED, _CLOSING)

    def finish_closing(self) -> None:
        """The channel is closed: end what it never told of, and wait until all has been told."""
        with self._changed:
            left = list(self._pulls.values())
        self._fail(left, ItemFault.CANCELLED, _CLOSING)
        with self._changed:
            while self._pulls:  # other threads are telling of them
                self._changed.wait()

    def _fail(self, pulls: Sequence[_Pull], fault: ItemFault, reason: str) -> None:
        for pull in pulls:
            self._finish(pull, dict.fromkeys(range(len(pull.reading.slots)), fault), reason)

    def _finish(self, pull: _Pull, faults: dict[int, ItemFault], reason: str) -> None:
        reading = pull.reading
        with self._changed:
            if pull.ended:
                return
            pull.ended = True
        try:
            good = [slot for place, slot in enumerate(reading.slots) if place not in faults]
            if good:
                reading.listener.filled(good)
            reading.listener.done(reading.id, faults, reason)
        finally:
            with self._changed:
                del self._pulls[reading.id]
                self._changed.notify_all()


def as_fault(error: Exception, what: str) -> KVFerryError:
    """``error``, or one of ours if it is a channel's mistake."""
    if isinstance(error, KVFerryError):
        return error
    return KVFerryError(what, kind=ErrorKind.INTERNAL, why=repr(error))


def _length_of(connection: Connection, peer: str, name: str) -> int:
    """Bytes of the peer's region of that name."""
    region = connection.regions().get(name)
    if region is None:
        raise KVFerryError(f"the peer {peer} has registered no region {name}", kind=ErrorKind.PROTOCOL)
    return region.length


def _nothing() -> None:
    pass


def _faults(
    plan: PullPlan, results: Sequence[ItemResult[TransferStatus]], forgotten: bool
) -> tuple[dict[int, ItemFault], str]:
    """What failed, by its place in the order. What ended with the connection of a peer that was forgotten is
    gone, as if it had been asked for later."""
    found, reason = faults_of(results, TransferStatus.DONE, {})
    faults = dict(plan.faults)
    for number, fault in found.items():
        error = results[number].error
        gone = forgotten and error is not None and error.kind is ErrorKind.CLOSED
        faults[plan.places[number]] = ItemFault.GONE if gone else fault
    return faults, plan.reason or reason


def _not_known(peer: str) -> str:
    return f"the peer {peer} is not known here in that epoch"


def _give_up(connection: Connection) -> None:
    try:
        connection.close()
    except Exception as error:  # noqa: BLE001 - nobody uses it any more
        _log.debug("kvferry: a connection could not be closed: %s", error)
