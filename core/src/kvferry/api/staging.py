"""The contract of a staging: memory that a channel registers in place of a tier, and copies into it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from attrs import frozen

from kvferry.api.memory import ArenaFactory, Region, Span
from kvferry.api.tickets import Ticket, TransferStatus


class StageCopy(NamedTuple):
    """``source.length`` bytes of a region of the context, to ``offset`` of the staging's own."""

    source: Span
    offset: int


@frozen(kw_only=True)
class StagingContext:
    """What core hands a staging when it opens."""

    name: str
    """The region must bear it."""
    make_arena: ArenaFactory
    regions: Mapping[str, Region]
    """The memory that sources may name."""
    rank: int = 0
    """The worker's rank in its instance, from 0."""
    world_size: int = 1
    """How many ranks the instance has."""
    clock: Callable[[], float] = time.monotonic
    """Deadlines are times of this clock, in seconds."""
    operation_seconds: float = 10.0
    """How long something may take for which the contract gives no deadline."""


class Staging(Protocol):
    """One region of bounded length, and copies into it: what peers read where a channel cannot register the
    tier that they are lent chunks of. Core says which part of it is whose, and for how long.

    The factory of the spec is called as ``factory(options, capacity)``: an instance of the spec's options
    class, and the length of the region in bytes, which is core's key and no option.

    **Submitting.** ``stage`` takes copies and returns a ticket without waiting. Copies begin in the order of
    the batch, so of one that ends early the beginning is there. Each has a result of its own: one that lies
    outside of a region fails with the kind ``PROTOCOL``, one from memory that the staging cannot read with
    ``UNSUPPORTED``, and one into memory that is not there yet, because its first touch is under way, with
    ``CAPACITY``. A copy of length 0 is done. Where two copies under way go to the same bytes, either may be
    there in the end: core sees to it that none do.

    **Ends.** A ticket is completed exactly once, from any thread. ``deadline`` is a time of the context's
    clock: what has not begun by then fails with the kind ``TIMEOUT``, and what has begun ends soon after.
    After :meth:`kvferry.api.Ticket.cancel` it ends soon as well, with ``CANCELLED`` for what is not done.
    Of a copy that is ``DONE`` the bytes are in place, for every thread and for whatever device reads them.
    Once a ticket has ended, nothing reads its sources or writes where its copies go any more.

    Threads: ``open`` and ``close`` from one, ``stage`` from any. Before ``open`` and after ``close`` it
    raises :class:`kvferry.api.KVFerryError` of kind ``CLOSED``.
    """

    def open(self, context: StagingContext) -> Region:
        """Map the memory. It need not be touched yet.

        Raises :class:`kvferry.api.KVFerryError` when the system refuses, and nothing is left open then; of
        kind ``INTERNAL`` the second time.
        """
        ...

    def stage(self, copies: Sequence[StageCopy], deadline: float) -> Ticket[TransferStatus]:
        """Begin to copy."""
        ...

    def close(self, deadline: float) -> None:
        """End everything: copies that have not begun fail with the kind ``CLOSED``, and the memory is given
        back. Idempotent; ``open`` need not have been called. The caller sees to it that nobody else uses the
        memory any more.

        Raises :class:`kvferry.api.KVFerryError` of kind ``TIMEOUT`` when something is under way still at the
        deadline; the memory stays then, and ``close`` may be called again.
        """
        ...
