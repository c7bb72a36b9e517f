"""Slots of the staging memory, and the copies into them that are under way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from attrs import define

from kvferry.control.orders import CancelOrder, OrderResult, StageOrder
from kvferry.control.slots import SlotPool


@define(eq=False)
class _Copy:
    slots: tuple[int, ...]
    called_off: bool = False


class Stagings:
    """``slots`` slots, numbered alike on all ranks. ``next_order()`` gives numbers that no other order of the
    workers has. Under the manager's lock; no thread, socket or clock.

    A slot is taken from the moment in which workers are told to fill it until it is given back, and never
    given back before all ranks have told what became of that: whoever is called off may be writing still.
    """

    def __init__(self, slots: int, next_order: Callable[[], int]) -> None:
        self._pool = SlotPool(slots, slots)
        self._next_order = next_order
        self._copies: dict[int, _Copy] = {}
        self._orders: list[StageOrder | CancelOrder] = []

    @property
    def free(self) -> int:
        """Slots that nobody uses."""
        return self._pool.free

    @property
    def under_way(self) -> int:
        """Copies that have no result."""
        return len(self._copies)

    def begin(self, tokens: Sequence[int], from_slots: Sequence[int], seconds: float) -> int:
        """Have chunks of so many ``tokens`` copied out of these slots of the first tier; the order's number.
        The caller has looked at :attr:`free`."""
        slots = tuple(self._pool.take() for _ in tokens)
        number = self._next_order()
        self._copies[number] = _Copy(slots)
        self._orders.append(StageOrder(number, tuple(tokens), tuple(from_slots), slots, seconds))
        return number

    def call_off(self, order: int) -> None:
        """Nobody wants what is copied any more."""
        self._copies[order].called_off = True
        self._orders.append(CancelOrder(order, ""))

    def report(self, result: OrderResult) -> tuple[int, ...]:
        """What all ranks made of an order: the slots that are filled on each, up to the first that is not,
        or none if it was called off. The rest is free."""
        copy = self._copies.pop(result.id)
        good = 0 if copy.called_off else min(result.faults, default=len(copy.slots))
        self.give(copy.slots[good:])
        return copy.slots[:good]

    def give(self, slots: Sequence[int]) -> None:
        """Nobody reads these any more."""
        for slot in reversed(slots):
            self._pool.give(slot)

    def take_orders(self) -> list[StageOrder | CancelOrder]:
        """What is to be sent to the workers, in this order."""
        orders, self._orders = self._orders, []
        return orders

    def workers_lost(self) -> None:
        """No worker is left: nothing is copied any more, and no result will come."""
        for copy in self._copies.values():
            self.give(copy.slots)
        self._copies.clear()
        self._orders.clear()

    def check(self, lent: Collection[int]) -> None:
        """Audit; for tests. ``lent`` are the slots that peers may read."""
        taken = [*lent, *(slot for copy in self._copies.values() for slot in copy.slots)]
        free = self._pool.free_numbers()
        assert len(set(taken)) == len(taken), "a slot of the staging is in two hands"
        assert free.isdisjoint(taken), "a slot of the staging is free and in use"
        assert len(free) + len(taken) == self._pool.capacity, "a slot of the staging is lost"
