"""Work on many chunks that is cut into slices, so that the lock is never held for long."""

from __future__ import annotations

from kvferry.control.entries import NOBODY, State
from kvferry.control.outcomes import Removed
from kvferry.control.quotas import Quotas
from kvferry.control.residency import STEPS_AT_ONCE, Residency

SLICE_CHUNKS = 12
"""Chunks that one slice removes."""
EVICTED_CHUNKS = 8
"""Chunks that one slice evicts, or owners that it looks at."""
_SCANNED_ROWS = 8192
"""Rows that one slice looks at while it finds nothing to remove.

``tests/bench/holds.py`` measures what slices take. These sizes keep the median below 100 microseconds."""


class ClearCursor:
    """Removes all chunks of a salt, of a model, or all, tails before heads.

    Call :meth:`advance` under the manager's lock until it returns ``False``; then everything that was
    there before the first call is gone. A chunk that is stored meanwhile may go too, and does go if it
    stands on one that goes: a chunk is only removed once nothing stands behind it any more, so the
    invariants hold between any two slices. A cursor may be left alone at any time.
    """

    def __init__(self, residency: Residency, salt: str | None, model: str | None) -> None:
        self._residency = residency
        self._salt = salt
        self._model = model
        self._scanned = 0
        self._at = NOBODY
        """A chunk that has to go, together with all before it."""
        self._found = NOBODY
        """The last row that was found by looking at all of them."""
        self._steps = STEPS_AT_ONCE
        self.removed = Removed(0, 0, 0)
        """What became of the chunks so far."""

    def advance(self, chunks: int = SLICE_CHUNKS) -> bool:
        """Remove up to ``chunks`` chunks. ``True`` while there may be more to do."""
        end = chunks + self.removed.chunks
        while self.removed.chunks < end:
            if self._at != NOBODY and self._chosen(self._at):
                left = end - self.removed.chunks
                self._at, gone = self._residency.drop_from_end(self._at, left, self._steps)
                if not gone.chunks:
                    return True
                self.removed += gone
                continue
            found, self._at = self._found, self._scan()
            if self._at == NOBODY:
                return self._scanned < self._residency.entries.rows
            # The same row again: the way to its end was lost, so go all of it at once this time.
            self._steps = self._residency.entries.rows if self._at == found else STEPS_AT_ONCE
            self._found = self._at
        return True

    def _chosen(self, row: int) -> bool:
        entries = self._residency.entries
        return (
            entries.in_tree(row)
            and (self._salt is None or entries.salts.name(entries.salt.view[row]) == self._salt)
            and (self._model is None or entries.model_name(row) == self._model)
        )

    def _scan(self) -> int:
        """The next row that has to go; ``NOBODY`` if there is none among the rows of one slice. The
        row is looked at again next time, so that it is left only once it has gone."""
        entries = self._residency.entries
        part = slice(self._scanned, self._scanned + _SCANNED_ROWS)
        states = entries.state.array[part]
        chosen = (states >= State.RESERVED) & (states <= State.VISIBLE)
        if self._salt is not None:
            chosen &= entries.salt.array[part] == entries.salts.find(self._salt)
        if self._model is not None:
            # The base model's number is 0, and so is that of a name that nobody uses.
            number = entries.models.find(self._model)
            chosen &= (entries.model.array[part] == number) & bool(number or not self._model)
        place = int(chosen.argmax()) if len(chosen) else 0
        if not len(chosen) or not chosen[place]:
            self._scanned += len(chosen)
            return NOBODY
        self._scanned += place
        return self._scanned


class QuotaCursor:
    """Evicts what owners hold beyond their quotas, of one owner or of all.

    Call :meth:`advance` under the manager's lock until it returns ``False``. What is in use stays and
    goes at its owner's next reservation.
    """

    def __init__(self, residency: Residency, quotas: Quotas, owner: str | None) -> None:
        self._residency = residency
        self._quotas = quotas
        self._last = 0
        self._more = owner is None
        self._owners = [] if owner is None else [owner]
        self.evicted = 0

    def advance(self, chunks: int = EVICTED_CHUNKS) -> bool:
        """Look at up to ``chunks`` owners, or evict up to ``chunks`` chunks of one. ``True`` while there
        may be more to do."""
        if not self._owners:
            if not self._more:
                return False
            self._owners, self._last = self._residency.entries.salts.some(self._last, chunks)
            self._more = self._last > 0
        while self._owners:
            need = min(self._quotas.excess(self._owners[-1]), chunks)
            if need:
                evicted = self._residency.evict(need, self._owners[-1])
                self.evicted += evicted
                if evicted == need:
                    return True
            self._owners.pop()
        return self._more
