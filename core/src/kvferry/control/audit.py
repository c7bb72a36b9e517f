"""The invariants, checked the slow way."""

from __future__ import annotations

from collections import Counter

from kvferry.control.deadlines import NEVER
from kvferry.control.entries import ROOT, State
from kvferry.control.leases import LeaseTable, ReadLease
from kvferry.control.residency import Residency

_IN_TREE = (State.RESERVED, State.WRITTEN, State.VISIBLE)


def audit(residency: Residency, leases: LeaseTable) -> None:
    """Raise ``AssertionError`` with the first contradiction found."""
    entries = residency.entries
    free = entries.free_rows()
    used = [row for row in range(entries.rows) if row not in free]
    state = {row: State(entries.state.view[row]) for row in used}
    _audit_slots(residency, used)
    _audit_counts(residency, state, free)
    _audit_tree(residency, state)
    _audit_indexes(residency, state)
    _audit_leases(residency, leases, state)
    _audit_deadlines(residency, state)
    _audit_pins(residency, state)
    _audit_events(residency, state)
    salts = Counter(entries.salt.view[row] for row in used)
    assert entries.salts.users() == dict(salts), "salts are counted wrongly"
    models = Counter(entries.model.view[row] for row in used if entries.model.view[row])
    assert entries.models.users() == dict(models), "models are counted wrongly"


def _audit_slots(residency: Residency, used: list[int]) -> None:
    pool = residency.tier.pool
    owned = [residency.tier.slot.view[row] for row in used] + residency.withheld
    free = pool.free_numbers()
    assert len(free) == pool.free, "the free slots are miscounted"
    assert len(set(owned)) == len(owned), "two entries share a slot"
    assert not free & set(owned), f"slots {sorted(free & set(owned))} are free and in use"
    assert free | set(owned) == set(range(pool.usable)), "slots were lost"


def _audit_counts(residency: Residency, state: dict[int, State], free: set[int]) -> None:
    counted = Counter(state.values())
    for kind in State:
        have = residency.count[kind]
        real = len(free) if kind is State.FREE else counted[kind]
        assert have == real, f"{have} entries counted as {kind.name}, {real} found"
    for row in free:
        assert residency.entries.state.view[row] == State.FREE, f"free row {row} has a state"
        assert not residency.leases.view[row], f"free row {row} is leased"


def _audit_tree(residency: Residency, state: dict[int, State]) -> None:
    entries = residency.entries
    behind: dict[int, set[int]] = {}
    for row, is_now in state.items():
        if is_now not in _IN_TREE:
            continue
        parent = entries.parent.view[row]
        depth = entries.depth.view[row]
        if parent == ROOT:
            assert depth == 0, f"row {row} at depth {depth} has no parent"
            assert is_now is not State.WRITTEN, f"row {row} waits for nothing"
            continue
        behind.setdefault(parent, set()).add(row)
        before = state.get(parent)
        assert before in _IN_TREE, f"row {row} stands behind row {parent}, which is gone"
        assert entries.is_full(parent), f"row {row} stands behind a tail"
        assert entries.depth.view[parent] == depth - 1, f"row {row} has the wrong depth"
        if is_now is State.VISIBLE:
            assert before is State.VISIBLE, f"row {row} is visible, row {parent} before it is not"
        if is_now is State.WRITTEN:
            assert before is not State.VISIBLE, f"row {row} waits behind a visible chunk"
    for row in state:
        listed = entries.successors(row)
        assert len(set(listed)) == len(listed), f"successors of row {row} are listed twice"
        assert set(listed) == behind.get(row, set()), f"successors of row {row} are wrong"


def _audit_indexes(residency: Residency, state: dict[int, State]) -> None:
    entries = residency.entries
    digests = {row: entries.digests.digest(row) for row in state}
    visible = {
        digests[row]: row for row, is_now in state.items() if is_now is State.VISIBLE and entries.is_full(row)
    }
    listed = list(entries.digests.listed())
    assert len(listed) == len(entries.digests), "listed digests are miscounted"
    assert dict(listed) == visible, "the index differs from the visible chunks"
    pending = {
        digests[row]: row for row, is_now in state.items() if is_now in (State.RESERVED, State.WRITTEN)
    }
    assert entries.pending == pending, "the pending index differs from the pending chunks"
    attached = 0
    for row in state:
        attached += len(entries.partials.digests(row))
    assert attached == entries.partials.attached, "records of partial digests were lost"
    for digest, row in entries.partials.holders():
        assert state.get(row) is State.VISIBLE, f"a partial digest leads to hidden row {row}"
        assert digest in entries.partials.digests(row), "a partial digest leads astray"
    for row, is_now in state.items():
        if is_now is State.VISIBLE and not entries.is_full(row):
            assert entries.partials.find(digests[row]) == row, f"tail {row} cannot be found"


def _audit_leases(residency: Residency, leases: LeaseTable, state: dict[int, State]) -> None:
    held: Counter[int] = Counter()
    writing: Counter[int] = Counter()
    for lease in leases.all():
        if isinstance(lease, ReadLease):
            held.update(lease.rows.tolist())
        else:
            writing.update(lease.rows.values())
    for row, is_now in state.items():
        count = residency.leases.view[row]
        assert count == held[row], f"row {row} counts {count} leases, {held[row]} are open"
        if is_now is State.RETIRING:
            assert count > 0, f"row {row} retires although nobody reads it"
        if is_now in (State.RESERVED, State.QUARANTINED):
            assert writing[row] == 1, f"row {row} waits for a result of no reservation"
        elif is_now in (State.WRITTEN, State.VISIBLE, State.RETIRING):
            assert not writing[row], f"row {row} is done, but a reservation has it still"
        if count:
            assert is_now in (State.VISIBLE, State.RETIRING), f"row {row} is read while {is_now}"
    assert set(held) <= set(state), "a lease has a free row"
    assert set(writing) <= set(state), "a reservation has a free row"
    assert residency.leased == len(held), "leased slots are miscounted"
    for lease in leases.all():
        if not isinstance(lease, ReadLease) and lease.given_up:
            quarantined = all(state[row] is State.QUARANTINED for row in lease.rows.values())
            assert quarantined, f"reservation {lease.number} was given up but holds live chunks"


def _audit_deadlines(residency: Residency, state: dict[int, State]) -> None:
    entries, deadlines = residency.entries, residency.deadlines
    records = deadlines.records()
    for place, (time, row) in enumerate(records):
        assert records[(place - 1) // 2][0] <= time or not place, "the heap of ends is out of order"
        end = deadlines.end(row)
        assert time <= end, f"the record of row {row} is later than its end"
    places = {row: place for place, (_, row) in enumerate(records)}
    assert len(places) == len(records), "a row has two records of its end"
    assert places == deadlines.places(), "rows do not know their place among the ends"
    for row in range(entries.rows):
        end = deadlines.end(row)
        if row not in state or state[row] not in _IN_TREE:
            assert end == NEVER, f"row {row} is gone and still has an end"
            continue
        assert end == NEVER or row in places, f"the end of row {row} will never come"
        parent = entries.parent.view[row]
        if parent != ROOT:
            assert deadlines.end(parent) >= end, f"row {row} ends after what is before it"


def _audit_pins(residency: Residency, state: dict[int, State]) -> None:
    entries, pins = residency.entries, residency.pins
    covered = pins.covered()
    for row in range(entries.rows):
        count = pins.count.view[row]
        assert count == len(covered.get(row, ())), f"row {row} counts {count} pins wrongly"
    assert pins.pinned == len(covered), "pinned rows are miscounted"
    assert pins.pinned <= pins.limit, "more is pinned than may be"
    for row, holders in covered.items():
        assert state.get(row) in _IN_TREE, f"row {row} is gone and still pinned"
        parent = entries.parent.view[row]
        for pin in holders:
            known = parent == ROOT or pin in covered.get(parent, ())
            assert pin.ended or known, f"pin {pin.name} covers row {row} and not what is before it"
        tails = pins.holders_of_tail(row)
        expected = [] if entries.is_full(row) else holders
        assert set(map(id, tails)) == set(map(id, expected)), f"row {row} is wrong about being a tail"


def _audit_events(residency: Residency, state: dict[int, State]) -> None:
    entries, events = residency.entries, residency.events
    if events is None:
        return
    told = {row for row in range(entries.rows) if events.told.view[row]}
    assert events.told_count == len(told), "rows that were told of are miscounted"
    assert len(events) <= max(1, events.limit), "more facts are kept than may be"
    for row in told:
        assert state.get(row) is State.VISIBLE, f"row {row} was told of and cannot be found"
        assert entries.is_full(row), f"tail {row} was told of"
        parent = entries.parent.view[row]
        assert parent == ROOT or parent in told, f"row {row} was told of before what is before it"
    for row in events.waiting():
        assert state.get(row) in (*_IN_TREE[:2], State.QUARANTINED), f"content of row {row} was kept"
