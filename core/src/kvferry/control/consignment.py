"""Chunks that one order moves into a tier, and the reservations that give them their place there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import define, field

from kvferry.control.manager import CacheManager
from kvferry.control.orders import ItemFault
from kvferry.control.outcomes import ChunkFacts, Reservation, WriteOutcome


@define(eq=False)
class Consignment:
    """An order to store or to fetch, being put together or under way, as the tier ``into`` sees it.

    ``chunks`` and ``slots`` are parallel. Each of ``reservations`` has the place in the order of every item
    that was granted.
    """

    into: CacheManager
    chunks: list[ChunkFacts] = field(factory=list)
    slots: list[int] = field(factory=list)
    reservations: list[tuple[int, dict[int, int]]] = field(factory=list)

    def add(
        self, reservation: Reservation, offered: Iterable[tuple[ChunkFacts, int]]
    ) -> list[tuple[ChunkFacts, int]]:
        """Take in what was granted of a reservation for ``offered``, chunks with the slots of the first tier
        that they are moved from or to. What was taken in."""
        granted: list[tuple[ChunkFacts, int]] = []
        places: dict[int, int] = {}
        for item, (pair, answer) in enumerate(zip(offered, reservation.items, strict=True)):
            if answer.outcome is WriteOutcome.GRANTED:
                places[item] = len(self.chunks) + len(granted)
                granted.append(pair)
        if reservation.id is not None:
            self.reservations.append((reservation.id, places))
        self.chunks += [chunk for chunk, _ in granted]
        self.slots += [slot for _, slot in granted]
        return granted

    def complete_one(self, faults: Mapping[int, ItemFault]) -> bool:
        """The order has ended: let the chunks of one more reservation be found, but for those at the places
        of ``faults``. ``False`` once there is none left."""
        if not self.reservations:
            return False
        reservation, places = self.reservations.pop(0)
        self.into.complete(reservation, [item for item, place in places.items() if place not in faults])
        return True

    def abort(self) -> None:
        """Nobody was told of the order."""
        for reservation, _ in self.reservations:
            self.into.abort(reservation)
