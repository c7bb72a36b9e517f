"""Everything that peers say, and everything that is said to all of them."""

from __future__ import annotations

import itertools
import os
import socket
import threading
from collections.abc import Callable

from kvferry.api import ChannelContext, ErrorKind, KVFerryError, Retry
from kvferry_transport_local.active import Active
from kvferry_transport_local.asking import Asking
from kvferry_transport_local.frames import (
    Announce,
    Frame,
    Hello,
    Listed,
    Refused,
    Sync,
    Synced,
    Welcome,
    Withdraw,
    WriteRequest,
    WriteStop,
    Written,
)
from kvferry_transport_local.link import Broken, Link
from kvferry_transport_local.meeting import Meeting
from kvferry_transport_local.options import Mechanism
from kvferry_transport_local.regions import Regions, Registered
from kvferry_transport_local.serving import Serving

_MOST_STRANGERS = 64
"""Callers that have not introduced themselves yet."""


class Reception:
    """The :class:`kvferry_transport_local.service.Handler` of a channel. Threads: any, except for the three
    methods of the handler, which the service thread calls."""

    def __init__(
        self,
        context: ChannelContext,
        mechanism: Mechanism,
        meeting: Meeting,
        regions: Regions,
        active: Active,
        serving: Serving,
        asking: Asking,
    ) -> None:
        self.notices = threading.RLock()
        """Held while the table of regions changes and its peers are told, so that all hear it in order."""
        self._context = context
        self._mechanism = mechanism
        self._meeting = meeting
        self._regions = regions
        self._active = active
        self._serving = serving
        self._asking = asking
        self._links: set[Link] = set()
        self._strangers: set[Link] = set()
        self._syncs: dict[tuple[Link, int], Callable[[], None]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    # -- to peers ----------------------------------------------------------------------------------

    def everybody(self) -> tuple[Link, ...]:
        with self._lock:
            return (*self._links, *self._strangers)

    def call(self, link: Link, hello: Hello) -> None:
        """Introduce us on a connection that we made."""
        link.on_end = self._parted
        with self.notices:
            link.send(hello, self._regions.page_fd)
            self._list(link)

    def registered(self, made: Registered) -> None:
        """Under ``notices``."""
        for link in self._greeted():
            self._announce(link, made)

    def taken_back(self, taken: Registered) -> None:
        """Under ``notices``."""
        for link in self._greeted():
            link.send(Withdraw(taken.slot, taken.generation))

    def after_news(self, link: Link, then: Callable[[], None]) -> None:
        """Call ``then`` once whatever the peer has said by now is known here; never when it is gone."""
        with self._lock:
            number = next(self._numbers)
            self._syncs[link, number] = then
        link.send(Sync(number))
        if not link.alive:
            self._forget_syncs(link)

    def _greeted(self) -> tuple[Link, ...]:
        with self._lock:
            return tuple(self._links)

    def _list(self, link: Link) -> None:
        with self._lock:
            self._links.add(link)
        for made in self._regions.all():
            self._announce(link, made)
        link.send(Listed())

    def _announce(self, link: Link, made: Registered) -> None:
        region = made.region
        fd = region.fd if made.in_file >= 0 else -1
        link.send(
            Announce(
                region.name,
                region.kind.value,
                region.length,
                region.address,
                made.slot,
                made.generation,
                made.in_file,
            ),
            fd,
        )

    # -- for the service thread --------------------------------------------------------------------

    def accepted(self, end: socket.socket) -> Link | None:
        if len(self._strangers) >= _MOST_STRANGERS:
            end.close()
            return None
        link = self._meeting.answer(end)
        if link is not None:
            link.on_end = self._parted
            with self._lock:
                self._strangers.add(link)
        return link

    def sweep(self) -> float | None:
        now = self._context.clock()
        with self._lock:
            due = {link: link.hello_by for link in self._strangers if link.hello_by is not None}
        for link, by in due.items():
            if now >= by:
                link.finish(
                    KVFerryError(
                        "a caller did not introduce itself", kind=ErrorKind.TIMEOUT, where=link.where
                    )
                )
        looks = [by - now for by in due.values() if by > now]
        if (seconds := self._active.sweep()) is not None:
            looks.append(seconds)
        return min(looks, default=None)

    def handle(self, link: Link, frame: Frame, fd: int) -> None:
        if isinstance(frame, Announce):
            link.announced(frame, fd, self._mechanism)
            return
        if isinstance(frame, Hello | Welcome):
            self._met(link, frame, fd)
            return
        if fd >= 0:
            os.close(fd)
            raise Broken("it passed a descriptor with a frame that has none")
        if isinstance(frame, Refused) and link.calling:
            link.finish(_refused(link.where, frame))
            return
        if link.hello_by is not None:
            raise Broken("it did not introduce itself first")
        self._said(link, frame)

    def _said(self, link: Link, frame: Frame) -> None:
        if isinstance(frame, WriteRequest) and not link.calling:
            self._serving.request(link, frame)
        elif isinstance(frame, WriteStop) and not link.calling:
            self._serving.stop(link, frame)
        elif isinstance(frame, Written) and link.calling:
            self._asking.answered(link, frame)
        elif isinstance(frame, Withdraw):
            link.withdrawn(frame)
        elif isinstance(frame, Listed):
            link.listed.set()
        elif isinstance(frame, Sync):
            link.send(Synced(frame.number))
        elif isinstance(frame, Synced):
            with self._lock:
                then = self._syncs.pop((link, frame.number), None)
            if then is not None:
                then()
        else:
            raise Broken("it sent a frame that is not for this side")

    def _met(self, link: Link, frame: Hello | Welcome, fd: int) -> None:
        if isinstance(frame, Welcome) and link.calling:
            self._meeting.welcomed(link, frame, fd)
            return
        if not isinstance(frame, Hello) or link.hello_by is None:
            if fd >= 0:
                os.close(fd)
            raise Broken("it introduced itself twice, or as the wrong side")
        refusal = self._meeting.greeted(link, frame, fd)
        if refusal is not None:
            link.send(Refused(refusal.kind.value, refusal.what))
            link.finish(refusal)
            return
        with self.notices:
            with self._lock:
                self._strangers.discard(link)
            link.send(self._meeting.welcome(), self._regions.page_fd)
            self._list(link)

    def _parted(self, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
            self._strangers.discard(link)
        self._meeting.parted(link)
        self._forget_syncs(link)
        self._active.end_with(link, link.error())
        self._asking.drop(link)

    def _forget_syncs(self, link: Link) -> None:
        with self._lock:
            for key in [key for key in self._syncs if key[0] is link]:
                del self._syncs[key]


def _refused(where: str, frame: Refused) -> KVFerryError:
    protocol = frame.kind == ErrorKind.PROTOCOL.value
    return KVFerryError(
        "the peer refuses the connection",
        kind=ErrorKind.PROTOCOL if protocol else ErrorKind.COMPATIBILITY,
        where=where,
        why=frame.why,
        remedy="ask again who it is" if protocol else "use one version of the channel on both sides",
        retry=Retry.LATER if protocol else Retry.AFTER_CHANGE,
    )
