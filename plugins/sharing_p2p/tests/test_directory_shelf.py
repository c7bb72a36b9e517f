"""Sets of keys over one table, against plain sets."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry_sharing_p2p.directory.key_table import KeyTable, as_words
from kvferry_sharing_p2p.directory.shelf import Run, Shelf


def _digest(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


# Digests that share a bucket, or bucket and tag, or have a tag of zero, in greater numbers than one bucket
# takes; and ordinary ones.
AWKWARD = [
    np.array([first, second << 32, third, 7], np.uint64).tobytes()
    for first in (0, 1 << 40)
    for second in (0, 1, 5)
    for third in range(4)
]
UNIVERSE = AWKWARD + [_digest(number) for number in range(24)]
some_digests = st.lists(st.sampled_from(UNIVERSE), max_size=30)


def longest(
    served: dict[int, set[bytes]], digests: list[bytes], wanted: int, but: int | None
) -> list[tuple[int, set[int]]]:
    """What a reader of plain sets would answer."""
    lengths: dict[int, set[int]] = {}
    for slot, keys in served.items():
        length = next((at for at, digest in enumerate(digests) if digest not in keys), len(digests))
        if length and slot != but:
            lengths.setdefault(length, set()).add(slot)
    runs: list[tuple[int, set[int]]] = []
    for length in sorted(lengths, reverse=True):
        if sum(len(slots) for _, slots in runs) < wanted:
            runs.append((length, lengths[length]))
    return runs


class ShelfAgainstSets(RuleBasedStateMachine):
    """Each slot is a set; the served ones answer."""

    @initialize(extra=st.sampled_from([0, 62, 130]))
    def begin(self, extra: int) -> None:
        self.shelf = Shelf()
        self.sets: dict[int, set[bytes]] = {}
        self.served: set[int] = set()
        for _ in range(extra):
            self.open()

    @rule()
    def open(self) -> None:
        slot = self.shelf.open_slot()
        assert slot not in self.sets
        self.sets[slot] = set()

    @precondition(lambda self: self.sets)
    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.sets)))
        self.shelf.serve(slot)
        self.served.add(slot)

    @precondition(lambda self: self.sets)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.sets)))
        assert self.shelf.close_slot(slot) == len(self.sets.pop(slot))
        self.served.discard(slot)

    @precondition(lambda self: self.sets)
    @rule(data=st.data(), digests=some_digests, there=st.booleans())
    def change(self, data: st.DataObject, digests: list[bytes], there: bool) -> None:
        slots = data.draw(st.lists(st.sampled_from(sorted(self.sets)), min_size=1, max_size=2, unique=True))
        digests += digests[: data.draw(st.integers(0, 3))]
        if there:
            self.shelf.hold(b"".join(digests), slots)
        else:
            self.shelf.drop(b"".join(digests), slots)
        for slot in slots:
            (self.sets[slot].update if there else self.sets[slot].difference_update)(digests)

    @rule(data=st.data(), digests=some_digests, wanted=st.integers(1, 4))
    def find(self, data: st.DataObject, digests: list[bytes], wanted: int) -> None:
        but = data.draw(st.sampled_from([None, *sorted(self.sets)]))
        served = {slot: self.sets[slot] for slot in self.served}
        runs = self.shelf.longest(b"".join(digests), wanted, but)
        assert [(run.length, set(run.slots)) for run in runs] == longest(served, digests, wanted, but)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "shelf"):
            return
        self.shelf.audit()
        assert len(self.shelf) == len(set().union(*self.sets.values()))
        for slot, keys in self.sets.items():
            if keys:
                assert set(self.shelf.keys(slot)) == keys


ShelfAgainstSets.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestShelfAgainstSets = ShelfAgainstSets.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_many_keys_that_come_and_go_keep_their_rows(seed: int) -> None:
    """Grows through several sizes of the table, with rows that are used again."""
    chance = random.Random(seed)
    shelf = Shelf()
    slots = [shelf.open_slot() for _ in range(3)]
    sets: dict[int, set[bytes]] = {slot: set() for slot in slots}
    for slot in slots:
        shelf.serve(slot)
    for turn in range(30):
        slot = chance.choice(slots)
        start = chance.randrange(4000)
        keys = [_digest(number) for number in range(start, start + 800)]
        shelf.hold(b"".join(keys), [slot])
        sets[slot].update(keys)
        gone = chance.sample(sorted(sets[slot]), len(sets[slot]) // 3)
        shelf.drop(b"".join(gone), [slot])
        sets[slot].difference_update(gone)
        if turn % 10 == 9:
            shelf.audit()
    for slot in slots:
        assert set(shelf.keys(slot)) == sets[slot]
    assert len(shelf) == len(set().union(*sets.values()))
    for slot in slots:
        shelf.close_slot(slot)
    assert len(shelf) == 0
    shelf.audit()


def test_a_table_forgets_everything_it_was_told_to_and_finds_the_rest() -> None:
    table = KeyTable()
    words = as_words(b"".join(map(_digest, range(5000))))
    rows = table.add(words)
    assert len(set(rows.tolist())) == 5000
    table.remove(rows[::2])
    assert len(table) == 2500
    found = table.find(words)
    assert (found[::2] == -1).all()
    assert (found[1::2] == rows[1::2]).all()
    again = table.add(words)
    assert (again[1::2] == rows[1::2]).all(), "a digest keeps its row"
    assert len(set(again.tolist())) == 5000
    assert table.rows < 7500, "rows are used again"


def test_a_key_that_is_told_twice_in_one_message_counts_once() -> None:
    shelf = Shelf()
    a, b = shelf.open_slot(), shelf.open_slot()
    twice = b"".join(AWKWARD * 2)
    shelf.hold(twice, [a, b])
    assert (len(shelf), shelf.count(a), shelf.count(b)) == (len(AWKWARD), len(AWKWARD), len(AWKWARD))
    shelf.audit()
    shelf.drop(twice[: 20 * 32] * 2, [a])
    shelf.audit()
    assert shelf.count(a) == len(AWKWARD) - 20
    shelf.drop(twice, [b, a])
    assert len(shelf) == 0
    shelf.audit()


def test_a_key_costs_its_memory_once_however_many_have_it() -> None:
    shelf = Shelf()
    keys = b"".join(map(_digest, range(20_000)))
    first = shelf.open_slot()
    shelf.hold(keys, [first])
    alone = shelf.nbytes
    for _ in range(40):
        shelf.hold(keys, [shelf.open_slot()])
    assert shelf.nbytes == alone
    assert alone / 20_000 < 120


def test_who_has_only_what_comes_later_has_nothing_of_a_prefix() -> None:
    shelf = Shelf()
    a, b = shelf.open_slot(), shelf.open_slot()
    for slot in (a, b):
        shelf.serve(slot)
    digests = [_digest(number) for number in range(10)]
    shelf.hold(b"".join(digests[1:]), [a])
    shelf.hold(b"".join(digests[:2] + digests[3:]), [b])
    assert shelf.longest(b"".join(digests), 3) == [Run(2, (b,))]
    assert shelf.longest(b"".join(digests[1:]), 3) == [Run(9, (a,)), Run(1, (b,))]


def test_half_a_digest_is_refused() -> None:
    with pytest.raises(ValueError):
        as_words(bytes(33))
