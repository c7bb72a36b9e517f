"""Which slots of an arena are free."""

from __future__ import annotations

from kvferry.control.columns import Column


class SlotPool:
    """Numbers below ``capacity``, handed out and taken back; only those below ``usable`` exist yet.

    Fresh numbers come in ascending order, so that a prompt stored at once lies in neighbouring
    slots; returned ones come first, last in first out, because their pages are warm. Every
    operation takes constant time. Not thread-safe.
    """

    def __init__(self, capacity: int, usable: int = 0) -> None:
        self.capacity = capacity
        self.usable = usable
        self._returned = Column(capacity)
        self._count = 0
        self._fresh = 0

    @property
    def free(self) -> int:
        """How many can be taken now."""
        return self._count + self.usable - self._fresh

    def grow(self, usable: int) -> None:
        """Numbers below ``usable`` exist now. Never shrinks; clipped to the capacity."""
        self.usable = max(self.usable, min(usable, self.capacity))

    def take(self) -> int:
        """A free number. The caller has looked at :attr:`free`; raises ``IndexError`` if none."""
        if self._count:
            self._count -= 1
            return self._returned.view[self._count]
        if self._fresh >= self.usable:
            raise IndexError("no free slot")
        self._fresh += 1
        return self._fresh - 1

    def give(self, slot: int) -> None:
        """Return a number that was taken. The caller guarantees that nobody uses it any more."""
        self._returned.view[self._count] = slot
        self._count += 1

    def free_numbers(self) -> set[int]:
        """All free numbers, for audits; slow."""
        returned = self._returned.array[: self._count].tolist()
        return set(returned) | set(range(self._fresh, self.usable))
