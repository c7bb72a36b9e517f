"""The regions of this side: who may name them, and who is inside one right now."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from kvferry.api import ErrorKind, KVFerryError, MemoryKind, Region, Span
from kvferry_transport_tcp.sockets import Clock
from kvferry_transport_tcp.wire import MAX_NAME_BYTES, Header, Kind, RemotePiece

_SOON_SECONDS = 2.0
"""How long a peer that is inside a region which is taken back has to get to its end by itself."""


class Holder(Protocol):
    """Somebody who may be inside a region: a connection that we serve."""

    def cut(self) -> None:
        """Be out soon, whatever that costs."""
        ...


class Registered:
    """One region while it is registered. Who has one may look at its bytes until he lets go of it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        block = (ctypes.c_ubyte * region.length).from_address(region.address)
        block.keep_alive = region.keep_alive  # type: ignore[attr-defined]  # as long as the view
        self.view = memoryview(block).cast("B")
        self.gone = False
        self.holders: dict[Holder, int] = {}


class Registry:
    """Any thread. ``announce`` gets the frames that tell peers; it is called under the lock, so that
    all hear of every change in one order, and must not block."""

    def __init__(self, clock: Clock, announce: Callable[[bytes], None]) -> None:
        self._clock = clock
        self._announce = announce
        self._changed = threading.Condition(threading.RLock())
        self._regions: dict[str, Registered] = {}

    def add(self, region: Region) -> None:
        """See :meth:`kvferry.api.Channel.register`."""
        name = region.name.encode()
        if region.kind is not MemoryKind.HOST:
            raise _refusal(region, ErrorKind.UNSUPPORTED, "it is memory of a device, and sockets reach none")
        if len(name) > MAX_NAME_BYTES:
            raise _refusal(region, ErrorKind.CAPACITY, f"its name is longer than {MAX_NAME_BYTES} bytes")
        with self._changed:
            if region.name in self._regions:
                raise _refusal(region, ErrorKind.INTERNAL, "there is one of this name")
            self._regions[region.name] = Registered(region)
            self._announce(_told(region))

    def find(self, span: Span) -> Registered | None:
        """The region in which ``span`` lies wholly."""
        with self._changed:
            return self._find(span.region, span.offset, span.length)

    def _find(self, name: str, offset: int, length: int) -> Registered | None:
        found = self._regions.get(name)
        if found is None or offset < 0 or length < 0 or offset + length > found.region.length:
            return None
        return found

    def enter(self, holder: Holder, pieces: Sequence[RemotePiece]) -> list[Registered | None]:
        """The region of each piece, held for ``holder`` until :meth:`leave`; ``None`` for one that lies in
        none."""
        with self._changed:
            found = [self._find(piece.region, piece.offset, piece.length) for piece in pieces]
            for region in found:
                if region is not None:
                    region.holders[holder] = region.holders.get(holder, 0) + 1
            return found

    def leave(self, holder: Holder, entered: Sequence[Registered | None]) -> None:
        """Let go of what :meth:`enter` gave."""
        with self._changed:
            for region in entered:
                if region is None:
                    continue
                region.holders[holder] -= 1
                if not region.holders[holder]:
                    del region.holders[holder]
                    if region.gone:
                        self._changed.notify_all()

    def withdraw(self, name: str) -> Registered | None:
        """Let nobody enter the region any more, and tell peers. Those inside stay; see :meth:`drain`."""
        with self._changed:
            found = self._regions.pop(name, None)
            if found is not None:
                found.gone = True
                self._announce(_gone(name))
            return found

    def drain(self, region: Registered) -> None:
        """Wait until nobody is inside a region that was withdrawn; cut those who do not end soon."""
        soon = self._clock() + _SOON_SECONDS
        with self._changed:
            while region.holders and (left := soon - self._clock()) > 0:
                self._changed.wait(left)
            for holder in tuple(region.holders):
                holder.cut()
            while region.holders:
                self._changed.wait()

    def names(self) -> list[str]:
        with self._changed:
            return list(self._regions)

    def tell_all(self, tell: Callable[[bytes], None]) -> None:
        """Call ``tell`` with a frame for each region, and let no change come between or right behind:
        whoever is added to the listeners within ``tell`` misses none."""
        with self._changed:
            tell(b"".join(_told(found.region) for found in self._regions.values()))


def _told(region: Region) -> bytes:
    name = region.name.encode()
    return Header(Kind.REGION, body=len(name), number=region.length).to_bytes() + name


def _gone(name: str) -> bytes:
    encoded = name.encode()
    return Header(Kind.GONE, body=len(encoded)).to_bytes() + encoded


def _refusal(region: Region, kind: ErrorKind, why: str) -> KVFerryError:
    return KVFerryError(
        f"the region {region.name[:80]!r} cannot be registered",
        kind=kind,
        why=why,
        remedy="register memory of the host under a short name of its own",
    )
