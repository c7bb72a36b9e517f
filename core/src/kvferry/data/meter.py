"""How many bytes went through a tier, and how long that took."""

from __future__ import annotations

from attrs import define, frozen


@frozen(kw_only=True)
class TierStatistics:
    """Totals of one rank since the start, of chunks that came through. Seconds are those in which at least
    one order was under way, so bytes by seconds is what the tier achieved."""

    written_bytes: int = 0
    write_seconds: float = 0.0
    read_bytes: int = 0
    read_seconds: float = 0.0


@define
class Meter:
    """One direction. Not thread-safe."""

    bytes: int = 0
    seconds: float = 0.0
    _under_way: int = 0
    _since: float = 0.0

    def begin(self, now: float) -> None:
        """An order begins."""
        if not self._under_way:
            self._since = now
        self._under_way += 1

    def end(self, now: float, moved: int) -> None:
        """An order ended that moved so many bytes."""
        self._under_way -= 1
        self.bytes += moved
        if not self._under_way:
            self.seconds += now - self._since
