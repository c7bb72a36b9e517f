"""Slots against a set: each is handed out to one at a time, and none is lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.control.slots import SlotPool

CAPACITY = 12


class SlotMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(CAPACITY)
        self.usable = 0
        self.taken: list[int] = []
        self.returned: list[int] = []
        self.fresh = 0
        """Slots that were never taken begin here."""

    @rule(slots=st.integers(-1, CAPACITY + 3))
    def grow(self, slots: int) -> None:
        self.pool.grow(slots)
        self.usable = max(self.usable, min(slots, CAPACITY))

    @rule(count=st.integers(1, 5))
    def take(self, count: int) -> None:
        """Warm slots come back first; fresh ones come in ascending order."""
        for _ in range(count):
            if self.returned:
                expected = self.returned.pop()
            elif self.fresh < self.usable:
                expected = self.fresh
                self.fresh += 1
            else:
                with pytest.raises(IndexError, match="no free slot"):
                    self.pool.take()
                return
            assert self.pool.take() == expected
            assert expected not in self.taken
            self.taken.append(expected)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken.remove(slot)
        self.returned.append(slot)
        self.pool.give(slot)

    @invariant()
    def every_slot_is_free_or_taken(self) -> None:
        assert self.pool.usable == self.usable
        assert self.pool.free == self.usable - len(self.taken)
        assert self.pool.free_numbers() == set(range(self.usable)) - set(self.taken)


TestSlotMachine = SlotMachine.TestCase
TestSlotMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
