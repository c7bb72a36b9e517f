"""Channels, memory and moves for tests of the local channel."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from kvferry.api import (
    ChannelContext,
    Connection,
    KVFerryError,
    Region,
    RemoteOp,
    Span,
    Ticket,
    TransferStatus,
)
from kvferry.data.mapping import MappedRegion, create_region, region_view
from kvferry_transport_local.channel import LocalChannel
from kvferry_transport_local.options import LocalOptions

SECONDS = 20.0
"""After so long something hangs."""
LENGTH = 6 << 20
NAME = "memory"


def context(instance: str = "one", **facts: Any) -> ChannelContext:
    return ChannelContext(name="local", instance=instance, epoch=os.urandom(16), **facts)


def soon(seconds: float = SECONDS) -> float:
    return time.monotonic() + seconds


@define(eq=False)
class End:
    """An open channel with one region of memory, which has a memory file or not."""

    channel: LocalChannel
    region: Region
    bytes: NDArray[np.uint8]
    _file: MappedRegion | None = None

    @classmethod
    def open(
        cls,
        *,
        memory_file: bool = True,
        options: LocalOptions | None = None,
        facts: dict[str, Any] | None = None,
        **parts: Any,
    ) -> End:
        channel = LocalChannel(options or LocalOptions(), **parts)
        channel.open(context(**(facts or {})))
        if memory_file:
            file = create_region(NAME, LENGTH)
            end = cls(channel, file.region, region_view(file.region), file)
        else:
            memory = np.zeros(LENGTH, np.uint8)
            region = Region(name=NAME, address=memory.ctypes.data, length=LENGTH, keep_alive=memory)
            end = cls(channel, region, memory)
        channel.register(end.region)
        return end

    def connect(self, peer: End) -> Connection:
        return self.channel.connect(peer.channel.export(), soon())

    def close(self) -> None:
        self.channel.close(soon())
        if self._file is not None:
            self._file.close()


@define
class Ends:
    """Closes what it opened."""

    opened: list[End] = field(factory=list)

    def open(self, **how: Any) -> End:
        self.opened.append(End.open(**how))
        return self.opened[-1]

    def close(self) -> None:
        while self.opened:
            self.opened.pop().close()


def whole(length: int = LENGTH, at: int = 0) -> list[RemoteOp]:
    """The same bytes on both sides, in one operation."""
    return [RemoteOp(Span(NAME, at, length), NAME, at)]


def submit(
    verb: str,
    near: End,
    connection: Connection,
    operations: Sequence[RemoteOp],
    deadline: float | None = None,
) -> Ticket[TransferStatus]:
    call = near.channel.read if verb == "read" else near.channel.write
    return call(connection, operations, soon() if deadline is None else deadline)


def errors(ticket: Ticket[TransferStatus]) -> list[KVFerryError | None]:
    """Of each operation, once all have ended."""
    assert ticket.wait(SECONDS), "the ticket does not end"
    return [result.error for result in ticket.results]


def only_error(ticket: Ticket[TransferStatus]) -> KVFerryError:
    """The one failure that all operations have in common."""
    found = errors(ticket)
    assert found
    assert all(error is not None for error in found), "it was done"
    kinds = {error.kind for error in found if error is not None}
    assert len(kinds) == 1, kinds
    first = found[0]
    assert first is not None
    return first


def fill(end: End, seed: int) -> None:
    end.bytes[:] = np.random.default_rng(seed).integers(0, 256, LENGTH, np.uint8)
