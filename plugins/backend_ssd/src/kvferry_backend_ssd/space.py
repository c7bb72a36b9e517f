"""Which slots are free. One byte for each."""

from __future__ import annotations

from kvferry_backend_ssd.layout import GROUP_SLOTS

_FREE, _TAKEN, _LIMBO, _QUARANTINED = 0, 1, 2, 3


class Space:
    """Rows of slots, the lowest free ones first, so that a file grows no further than it must.

    A row never goes over the end of a group. Threads: the caller's lock.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.free = slots
        self._states = bytearray(slots)
        self._lowest = 0
        """No slot below is free."""

    def take(self, count: int, within: int) -> int | None:
        """The first of ``count`` free slots in a row below ``within``, now taken; ``None`` if there are
        none."""
        row = bytes(count)
        at = self._lowest
        while count <= self.free:
            at = self._states.find(row, at, within)
            if at < 0:
                return None
            end = (at // GROUP_SLOTS + 1) * GROUP_SLOTS
            if at + count <= end:
                self._set(at, count, _TAKEN)
                if at == self._lowest or count == 1:  # a search for one slot passed no free one
                    self._lowest = at + count
                return at
            at = end
        return None

    def claim(self, slot: int, count: int) -> bool:
        """Take these very slots, if all of them are free."""
        inside = slot % GROUP_SLOTS + count <= GROUP_SLOTS and slot + count <= self.slots
        if not inside or any(self._states[slot : slot + count]):
            return False
        self._set(slot, count, _TAKEN)
        return True

    def doubt(self, slot: int, count: int) -> None:
        """Taken slots become limbo: not to be used before the disk knows that they are free."""
        self._states[slot : slot + count] = bytes([_LIMBO]) * count

    def quarantine(self, slot: int, count: int) -> None:
        """What lies there is damaged."""
        self._states[slot : slot + count] = bytes([_QUARANTINED]) * count

    def give_back(self, slot: int, count: int) -> None:
        """Slots in any state become free."""
        self._states[slot : slot + count] = bytes(count)
        self.free += count
        self._lowest = min(self._lowest, slot)

    def is_quarantined(self, slot: int) -> bool:
        return self._states[slot] == _QUARANTINED

    @property
    def limbo(self) -> int:
        return self._states.count(_LIMBO)

    @property
    def quarantined(self) -> int:
        return self._states.count(_QUARANTINED)

    def _set(self, slot: int, count: int, state: int) -> None:
        self._states[slot : slot + count] = bytes([state]) * count
        self.free -= count
