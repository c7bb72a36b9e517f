"""Orders that every rank carries out, until all have told what they made of them."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import define, field, frozen

from kvferry.control.orders import ItemFault, OrderResult
from kvferry.data.wire import OrderDone

_WORST = list(ItemFault)


@define(eq=False)
class _UnderWay:
    name: str
    waiting: set[int]
    faults: dict[int, ItemFault] = field(factory=dict)
    reason: str = ""


@frozen
class EndOfAll:
    """All ranks have told. ``name`` is what :meth:`OrdersOfAll.begin` was given."""

    name: str
    result: OrderResult


class OrdersOfAll:
    """Orders by their numbers. Threads: one at a time."""

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._orders: dict[int, _UnderWay] = {}

    def __len__(self) -> int:
        """How many have not ended."""
        return len(self._orders)

    def begin(self, number: int, name: str) -> None:
        """All ranks are about to be told."""
        self._orders[number] = _UnderWay(name, set(self._ranks))

    def done(self, message: OrderDone) -> EndOfAll | None:
        """A rank has told: the end, if it was the last one. Of several faults of one chunk the worst counts.
        What is told twice, or of an order that is not of here, is passed over."""
        order = self._orders.get(message.id)
        if order is None or message.rank not in order.waiting:
            return None
        order.waiting.discard(message.rank)
        for place, name in message.faults.items():
            faults = [ItemFault(name), *([order.faults[place]] if place in order.faults else [])]
            order.faults[place] = max(faults, key=_WORST.index)
        order.reason = order.reason or told_by(message.rank, message.reason)
        if order.waiting:
            return None
        del self._orders[message.id]
        return EndOfAll(order.name, OrderResult(message.id, order.faults, order.reason))

    def clear(self) -> None:
        """Nobody will tell anything any more."""
        self._orders.clear()


def told_by(rank: int, reason: str) -> str:
    """A rank's reason, in one line; empty if it gave none."""
    lines = [" ".join(line.split()) for line in reason.splitlines()]
    return f"rank {rank}: {'; '.join(lines)}" if reason else ""
