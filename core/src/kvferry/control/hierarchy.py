"""The tiers of one instance together: the first, whose slots are memory, and those below it."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.config import StoreWhen
from kvferry.control.borrowing import Borrowing
from kvferry.control.lower import CLIMBED_AT_ONCE, LowerTier, LowerTierReport
from kvferry.control.manager import CacheManager
from kvferry.control.orders import Order, OrderResult
from kvferry.control.rises import Rises
from kvferry.control.seeking import Seek, Wanted

LEAST_SPARE = 4
"""Slots that are kept free, where the first tier is not too small, while chunks are copied down as they
are evicted: somebody who needs room must not wait for a disk."""


class Hierarchy:
    """Couples tiers whose indexes are independent.

    Each index is closed under prefixes by itself: wherever a chunk is found, all before it are found in
    the same tier. So a tier that fails, is cleared, or is restored after a restart, concerns no other.
    Bytes pass through slots of the first tier alone.

    Like the managers it has no thread, socket or clock, and is called under their lock. It gives work to
    the lower tiers as orders, which :meth:`take_orders` hands out, and hears of their end.
    """

    def __init__(
        self,
        first: CacheManager,
        lower: Sequence[LowerTier],
        rises: Rises,
        chunk_tokens: int,
        borrowing: Borrowing | None = None,
    ) -> None:
        self.first = first
        self.lower = tuple(lower)
        self.rises = rises
        self.borrowing = borrowing
        """What other instances have; ``None`` if there are none."""
        self.settled = 0
        """Grows whenever results of orders were taken in."""
        self._chunk_tokens = chunk_tokens
        self._on_evict = [tier for tier in lower if tier.settings.store is StoreWhen.WRITE_ON_EVICT]
        self._through = [tier for tier in lower if tier.settings.store is StoreWhen.WRITE_THROUGH]
        if self._through:
            first.copying.watch_published()

    # Loads

    def seek(self, wanted: Wanted) -> Seek:
        """Look below, and then at other instances, for what the first tier does not have, and have it
        brought up."""
        return Seek(self.rises, self.lower, wanted, self._chunk_tokens, self.borrowing)

    def touch(self, keys: Sequence[bytes]) -> None:
        """These chunks of one chain, from its head, were used above; below they were, too."""
        for tier in self.lower:
            known = tier.index.copying.used_run(keys) if tier.usable else len(keys)
            if known < len(keys) and tier in self._through:
                tier.remember(keys[-1])

    # Clearing

    def clear_begins(
        self, salt: str | None = None, model: str | None = None, only: str | None = None
    ) -> list[LowerTier]:
        """Nothing moves down until :meth:`clear_ended`, nothing more rises of what was asked for, and nothing
        of the salt and the model (``None`` for any) that a lower tier's store holds by now is ever found
        again. Meanwhile the caller clears the index of each of these tiers, the lowest first, and then the
        first tier. With ``only``, all this is about the lower tier of that name."""
        self.rises.stop_all()
        tiers = [tier for tier in reversed(self.lower) if only in (None, tier.name)]
        for tier in tiers:
            tier.clear_begins(salt, model)
        return tiers

    def clear_ended(self, only: str | None = None) -> None:
        """They were cleared."""
        for tier in self.lower:
            if only in (None, tier.name):
                tier.clear_ended()

    # What happens meanwhile

    def work(self, now: float) -> bool:
        """Do a bounded part of what is to be done; whether there is more."""
        if self.rises.settle(now) or any(tier.settle(now) for tier in self.lower):
            self.settled += 1
            return True
        for tier in self.lower:
            if tier.work(now):
                return True
        for digest in self.first.copying.take_published(1):
            for tier in self._through:
                tier.offer(digest, now)
            return True
        for tier in self.lower:
            tier.flush(now)
        if self._set_aside(now):
            return True
        return self.rises.advance(now)

    def _set_aside(self, now: float) -> bool:
        """Copy down what would be evicted next, while the first tier has little room left."""
        copying = self.first.copying
        spare = min(max(LEAST_SPARE, copying.usable // 32), copying.usable // 4)
        tier = next((tier for tier in self._on_evict if tier.room_for(1)), None)
        if tier is None or copying.free + tier.storing >= spare:
            return False
        lent = copying.set_aside(f"tier {tier.name}", 1)
        if lent is None:
            return False
        (chunk,) = lent.chunks
        # What stands before it stays for now. A copy that cannot be found without it would be of no use.
        before: list[bytes] = []
        every = not tier.knows(chunk.digest)
        if chunk.parent is not None and every:
            before, every = copying.missing_before(chunk.parent, tier.knows, CLIMBED_AT_ONCE)
        if not every or not tier.room_for(len(before) + 1):
            self.first.finish_load(lent.lease)
            return True
        first = copying.lend(f"tier {tier.name}", before)
        tier.store([lent] if first is None else [first, lent], now)
        return True

    @property
    def at_rest(self) -> bool:
        """Whether nothing moves between tiers, nor is about to."""
        moves = self.first.copying.has_published or len(self.rises)
        at_others = self.borrowing is not None and not self.borrowing.at_rest
        return not moves and not at_others and all(tier.at_rest for tier in self.lower)

    def take_orders(self) -> list[Order]:
        """What is to be sent to the workers, in this order."""
        orders: list[Order] = []
        for tier in self.lower:
            orders += tier.orders
            tier.orders = []
        if self.borrowing is not None:
            orders += self.borrowing.orders
            self.borrowing.orders.clear()
        return orders

    def report(self, result: OrderResult, now: float) -> None:
        """The end of an order, from all ranks. What it brought is found after some more :meth:`work`."""
        if not self.rises.report(result):
            for tier in self.lower:
                if tier.report(result, now):
                    break

    def expire(self, now: float) -> None:
        """End what has run past its time; a little of it at once."""
        self.rises.expire(now)
        for tier in self.lower:
            tier.expire(now)
        if self.borrowing is not None:
            self.borrowing.expire(now)

    def next_deadline(self) -> float:
        deadlines = [self.rises.next_deadline(), *(tier.next_deadline() for tier in self.lower)]
        if self.borrowing is not None:
            deadlines.append(self.borrowing.next_deadline())
        return min(deadlines)

    def open(self) -> None:
        """Every worker is there: have the lower tiers opened."""
        for tier in self.lower:
            tier.open()

    def workers_lost(self) -> None:
        """No worker is left. The first tier's manager was told before."""
        self.rises.workers_lost()
        if self.borrowing is not None:
            self.borrowing.workers_lost()
        for tier in self.lower:
            tier.workers_lost()

    def reports(self) -> tuple[LowerTierReport, ...]:
        return tuple(tier.report_of() for tier in self.lower)

    def tier(self, name: str) -> LowerTier:
        """Raises ``KeyError`` if there is no lower tier of that name."""
        for tier in self.lower:
            if tier.name == name:
                return tier
        raise KeyError(name)

    def check(self) -> None:
        """Audit everything; for tests."""
        self.first.check()
        for tier in self.lower:
            tier.check()
        if self.borrowing is not None:
            self.borrowing.check()
