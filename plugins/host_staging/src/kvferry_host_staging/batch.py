"""A batch of copies, cut into what one call copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.api import ItemResult, KVFerryError, StageCopy, Ticket, TransferStatus
from kvferry_host_staging.moving import Copies

Locate = Callable[[StageCopy], tuple[int, int]]
"""The addresses between which a copy goes: to and from. Raises :class:`KVFerryError` for one that must not
be made."""


class Batch:
    """Copies in their order. ``locate`` is asked when a copy begins. Threads: one."""

    def __init__(self, copies: Sequence[StageCopy], deadline: float, locate: Locate) -> None:
        self.deadline = deadline
        self.ticket: Ticket[TransferStatus] = Ticket(len(copies))
        self._copies = copies
        self._locate = locate
        self._errors: dict[int, KVFerryError] = {}
        self._begun = 0
        """Copies up to this one have been handed out by :meth:`take`, or failed."""
        self._within = 0
        """Bytes of the next one that have been, too."""
        self._ended = 0
        """Copies up to this one are done or have failed."""

    @property
    def over(self) -> bool:
        """Whether no copy is left."""
        return self._ended == len(self._copies)

    def take(self, most: int) -> Copies:
        """What comes next, of so many bytes together at the most. :meth:`advance` when it is copied."""
        to: list[int] = []
        sources: list[int] = []
        lengths: list[int] = []
        while most and self._begun < len(self._copies):
            copy = self._copies[self._begun]
            try:
                target, source = self._locate(copy)
            except KVFerryError as error:
                self._errors[self._begun] = error.with_traceback(None)
                self._begun, self._within = self._begun + 1, 0
                continue
            length = min(most, copy.source.length - self._within)
            to.append(target + self._within)
            sources.append(source + self._within)
            lengths.append(length)
            most -= length
            self._within += length
            if self._within == copy.source.length:
                self._begun, self._within = self._begun + 1, 0
        return Copies(to, sources, lengths)

    def advance(self) -> None:
        """What was taken is in place."""
        self._ended = self._begun

    def fail_rest(self, error: KVFerryError) -> None:
        """Nothing more of it is copied."""
        for number in range(self._ended, len(self._copies)):
            self._errors.setdefault(number, error)
        self._ended = len(self._copies)

    def complete(self) -> None:
        """Tell what became of it."""
        done = ItemResult(TransferStatus.DONE)
        self.ticket.complete(
            [
                ItemResult(TransferStatus.FAILED, self._errors[number]) if number in self._errors else done
                for number in range(len(self._copies))
            ]
        )
