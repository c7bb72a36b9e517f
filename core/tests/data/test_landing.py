"""Everything that passes through the landing buffers arrives once, in order, and what fails is told."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence

import pytest
from attrs import define, field
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.control.orders import ItemFault
from kvferry.data.landing import Landed, Landing, Passage
from kvferry.data.pulls import LANDING, Reading
from kvferry.testing.fake_instance import wait_until

LONG = 20.0


@define(eq=False)
class Rig:
    """A landing whose readings put the numbers of the peer's slots into slots here, on other threads."""

    slots: int = 4
    faulty: frozenset[int] = frozenset()
    """Slots of the peer that cannot be read."""
    stubborn: frozenset[int] = frozenset()
    """Slots of the peer whose chunks cannot be taken out of the buffers."""
    chance: random.Random = field(factory=lambda: random.Random(1))
    held: bool = False
    """Readings do not end until they are cancelled, or this is false."""
    buffers: dict[int, int] = field(factory=dict)
    taken: dict[int, list[int]] = field(factory=dict)
    ends: dict[int, tuple[dict[int, ItemFault], str]] = field(factory=dict)
    wrong: list[str] = field(factory=list)
    cancelled: set[int] = field(factory=set)
    landing: Landing = field(init=False)
    _busy: set[int] = field(factory=set)
    _lock: threading.Lock = field(factory=threading.Lock)
    _threads: list[threading.Thread] = field(factory=list)

    def __attrs_post_init__(self) -> None:
        self.landing = Landing(self.slots, 1, self._read, self.cancelled.add)
        self.landing.start()

    def submit(self, number: int, slots: Sequence[int]) -> None:
        def empty(landed: Sequence[Landed]) -> Mapping[int, str]:
            failed = {}
            for each in landed:
                value = self.buffers.get(each.slot)
                if value != slots[each.place]:
                    self.wrong.append(f"{number}: {value} lies in {each.slot}, not {slots[each.place]}")
                if value in self.stubborn:
                    failed[each.place] = "stubborn"
                else:
                    self.taken.setdefault(number, []).append(each.place)
            with self._lock:
                self._busy -= {each.slot for each in landed}
            return failed

        def ended(faults: dict[int, ItemFault], reason: str) -> None:
            if number in self.ends:
                self.wrong.append(f"{number} ended twice")
            self.ends[number] = faults, reason

        self.landing.submit(
            Passage(
                id=number,
                peer="far",
                epoch=b"",
                region="arena",
                from_slots=tuple(slots),
                tokens=(16,) * len(slots),
                deadline=0.0,
                empty=empty,
                ended=ended,
            )
        )

    def wait(self, *numbers: int) -> None:
        wait_until(lambda: set(numbers) <= set(self.ends), LONG, "passages without an end")

    def stop(self) -> None:
        self.held = False
        assert self.landing.stop(LONG)
        for thread in self._threads:
            thread.join(LONG)
        assert self.wrong == []

    def _read(self, reading: Reading) -> None:
        assert reading.into == LANDING
        assert len(set(reading.slots)) == len(reading.slots)
        assert all(0 <= slot < self.slots for slot in reading.slots)
        with self._lock:
            if self._busy & set(reading.slots):
                self.wrong.append("a slot is read into that is not empty yet")
            bad = [at for at, slot in enumerate(reading.from_slots) if slot in self.faulty]
            self._busy |= {slot for at, slot in enumerate(reading.slots) if at not in bad}
        pause = self.chance.choice((0.0, 0.0, 0.001))
        thread = threading.Thread(target=self._carry, args=(reading, bad, pause))
        self._threads.append(thread)
        thread.start()

    def _carry(self, reading: Reading, bad: Sequence[int], pause: float) -> None:
        time.sleep(pause)
        while self.held and reading.id not in self.cancelled:
            time.sleep(0.001)
        if reading.id in self.cancelled:
            with self._lock:
                self._busy -= set(reading.slots)
            faults = dict.fromkeys(range(len(reading.slots)), ItemFault.CANCELLED)
            reading.listener.done(reading.id, faults, "cancelled")
            return
        for at, (source, slot) in enumerate(zip(reading.from_slots, reading.slots, strict=True)):
            if at not in bad:
                self.buffers[slot] = source
        reading.listener.done(reading.id, dict.fromkeys(bad, ItemFault.FAILED), "cannot be read")


@settings(max_examples=60, deadline=None)
@given(
    buffer=st.integers(2, 11),
    passages=st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=6),
    faulty=st.frozensets(st.integers(0, 40), max_size=2),
    stubborn=st.frozensets(st.integers(0, 40), max_size=2),
    seed=st.integers(0, 1000),
)
def test_every_chunk_arrives_once_or_is_said_to_have_failed(
    buffer: int, passages: list[list[int]], faulty: frozenset[int], stubborn: frozenset[int], seed: int
) -> None:
    rig = Rig(slots=buffer, faulty=faulty, stubborn=stubborn - faulty, chance=random.Random(seed))
    for number, slots in enumerate(passages):
        rig.submit(number, slots)
    rig.wait(*range(len(passages)))
    rig.stop()
    for number, slots in enumerate(passages):
        faults, reason = rig.ends[number]
        taken = rig.taken.get(number, [])
        assert taken == sorted(set(taken)), "out of order"
        assert sorted([*taken, *faults]) == list(range(len(slots)))
        bad = [place for place, slot in enumerate(slots) if slot in faulty | stubborn]
        assert bool(faults) == bool(bad) == bool(reason)
        assert all(place in faults for place in bad[:1])
        assert all(place >= min(bad) for place in faults)


def test_a_passage_that_is_cancelled_ends_soon_and_the_next_one_goes_on() -> None:
    rig = Rig(held=True)
    rig.submit(1, range(12))
    rig.submit(2, range(3))
    wait_until(lambda: bool(rig._threads), LONG, "a reading that never began")
    rig.landing.cancel(1)
    rig.wait(1)
    assert set(rig.ends[1][0].values()) == {ItemFault.CANCELLED}
    assert 2 not in rig.ends
    rig.held = False
    rig.wait(2)
    assert rig.ends[2] == ({}, "")
    rig.stop()


def test_what_waits_when_the_buffers_go_ends_and_so_does_what_comes_later() -> None:
    rig = Rig()
    for number in range(5):
        rig.submit(number, range(7))
    rig.stop()
    assert set(rig.ends) == set(range(5))
    rig.submit(9, range(2))
    assert set(rig.ends[9][0].values()) == {ItemFault.CANCELLED}


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_a_reading_begins_while_the_one_before_is_emptied(count: int) -> None:
    """With more than one chunk at least two batches are made of it, or nothing overlaps."""
    rig = Rig(slots=16)
    rig.submit(1, range(count))
    rig.wait(1)
    rig.stop()
    assert len(rig._threads) >= min(count, 5)
