"""A tier as the control plane sees it."""

from __future__ import annotations

from kvferry.api import EvictionPolicy
from kvferry.control.columns import Column
from kvferry.control.slots import SlotPool


class Tier:
    """The slots of one addressable tier, which entry has which, and who goes first when it is full.

    Kept apart from the entries, so that a further tier is another of these beside it.
    """

    def __init__(self, entries: int, slots: int, policy: EvictionPolicy) -> None:
        self.pool = SlotPool(slots)
        self.policy = policy
        self.slot = Column(entries)
        policy.open(entries)
