"""Files that were cut, grown, or changed: what is whole is served, what is not is a miss, nothing hangs."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvferry.api import DeleteStatus, KVFerryError, ReadStatus
from kvferry_backend_ssd.layout import Layout
from kvferry_backend_ssd.options import IOPath
from plugins.backend_ssd.tests.ssd_crash import (
    SLOT_BYTES,
    Promises,
    Rig,
    check,
    chunk,
    chunks,
    key,
    statuses,
)
from plugins.backend_ssd.tests.ssd_raw import ENTRY, GROUP, PAGE, SUPERBLOCK, TABLE

SLOTS = 6
STORED = (0, 1, 2, 3, 4)
"""One in each of the first slots, and one slot is free."""
DELETED = 5
USES = SUPERBLOCK + TABLE
FIRST_SLOT = USES + PAGE
END = FIRST_SLOT + SLOTS * SLOT_BYTES


@pytest.fixture
def rig(quick_folder: Path) -> Rig:
    """A store with five chunks, in their order, and room where a sixth was."""
    rig = Rig(path=quick_folder / "store", io=IOPath.AUTO, slots=SLOTS)
    driver = rig.open()
    for number in (*STORED, DELETED):
        driver.store([chunk(number)])
    assert driver.delete([key(DELETED)]) == [DeleteStatus.DELETED]
    statuses(driver, STORED)
    driver.close()
    assert rig.store.stat().st_size == END
    return rig


# -- other lengths -----------------------------------------------------------------------------------


def inside(length: int) -> set[int]:
    """The chunks that lie wholly in so many bytes."""
    return {slot for slot in STORED if FIRST_SLOT + (slot + 1) * SLOT_BYTES <= length}


LENGTHS = {
    "nothing is left": 0,
    "one byte": 1,
    "half the first page": PAGE // 2,
    "one copy of the first page": PAGE,
    "the first pages but for a byte": SUPERBLOCK - 1,
    "the first pages": SUPERBLOCK,
    "within the first entry": SUPERBLOCK + 100,
    "the first entry": SUPERBLOCK + ENTRY,
    "within the table": SUPERBLOCK + TABLE // 2,
    "the table": USES,
    "within the uses": USES + 8,
    "all but slots": FIRST_SLOT,
    "within the first head": FIRST_SLOT + 100,
    "a head without its value": FIRST_SLOT + PAGE,
    "within a value": FIRST_SLOT + 2 * SLOT_BYTES + PAGE + 5,
    "three slots": FIRST_SLOT + 3 * SLOT_BYTES,
    "three slots and a byte": FIRST_SLOT + 3 * SLOT_BYTES + 1,
    "all but a byte": END - 1,
    "a byte more": END + 1,
    "twice as much": 2 * END,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_what_lies_wholly_in_a_file_of_another_length_is_served(rig: Rig, length: int) -> None:
    os.truncate(rig.store, length)
    expected = inside(length)
    assert (
        check(rig, Promises(stored=expected, deleted={DELETED, *STORED} - expected), range(SLOTS)) == expected
    )


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS)
def test_what_was_cut_off_does_not_come_back_when_the_file_grows_again(rig: Rig, length: int) -> None:
    os.truncate(rig.store, length)
    driver = rig.open()
    driver.store([chunk(100)])
    driver.close()
    expected = inside(length) | {100}
    found = check(rig, Promises(stored=expected, deleted={*STORED} - expected), [*range(SLOTS), 100])
    assert found == expected


def test_a_file_cut_within_its_second_group_keeps_the_first(quick_folder: Path) -> None:
    rig = Rig(path=quick_folder / "store", io=IOPath.AUTO, slots=GROUP + 4)
    numbers = range(100, 100 + GROUP + 4)
    driver = rig.open()
    driver.store(chunks(numbers))
    driver.close()
    layout = Layout(SLOT_BYTES)
    for length in (
        layout.table_at(1),
        layout.table_at(1) + 700,
        layout.uses_at(1),
        layout.slot_at(GROUP + 1),
    ):
        shutil.copytree(rig.path, quick_folder / "copy")
        copy = evolve(rig, path=quick_folder / "copy")
        os.truncate(copy.store, length)
        driver = copy.open()
        kept = layout.slots_within(length)
        assert [header.key for header in driver.recovered] == [key(number) for number in numbers[:kept]]
        driver.store([chunk(1)])
        driver.close()
        assert len(check(copy, Promises(stored={1, *numbers[:kept]}), [1, *numbers])) == kept + 1
        shutil.rmtree(copy.path)


def test_a_capacity_that_was_lowered_and_raised_again_does_not_bring_back_what_it_cost(rig: Rig) -> None:
    driver = evolve(rig, slots=2).open()
    assert {header.key for header in driver.recovered} == {key(0), key(1)}
    driver.close()
    driver = rig.open()
    driver.store([chunk(100)])
    driver.close()
    assert check(rig, Promises(stored={0, 1, 100}), [*range(SLOTS), 100]) == {0, 1, 100}


# -- other bytes -------------------------------------------------------------------------------------


def owner(at: int) -> int | None:
    """Whose byte that is; ``None`` for what belongs to nobody."""
    if SUPERBLOCK <= at < USES:
        return (at - SUPERBLOCK) // ENTRY
    return (at - FIRST_SLOT) // SLOT_BYTES if at >= FIRST_SLOT else None


REGIONS = st.one_of(
    st.integers(0, SUPERBLOCK - 1),
    st.integers(SUPERBLOCK, SUPERBLOCK + SLOTS * ENTRY - 1),
    st.integers(USES, USES + 8 * SLOTS),
    st.integers(FIRST_SLOT, END - 1),
    st.builds(lambda slot, at: FIRST_SLOT + slot * SLOT_BYTES + at, st.integers(0, 5), st.integers(0, ENTRY)),
)
FLIPS = st.lists(st.tuples(REGIONS, st.integers(0, 7)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FLIPS)
@example([(at, 0) for at in (40, PAGE + 40)])
@example([(at, 0) for at in (40, PAGE + 40, SUPERBLOCK + 1, FIRST_SLOT + SLOT_BYTES)])
def test_flipped_bits_hurt_nobody_but_whose_they_are(rig: Rig, flips: list[tuple[int, int]]) -> None:
    before = rig.store.read_bytes()
    changed = bytearray(before)
    for at, bit in flips:
        changed[at] ^= 1 << bit
    rig.store.write_bytes(changed)
    try:
        hurt = {owner(at) for at, _ in flips}
        _serve(rig, set(STORED) - hurt)
    finally:
        rig.store.write_bytes(before)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, END // PAGE - 1),
    st.integers(1, 80),
    st.one_of(st.binary(min_size=1, max_size=9), st.none()),
)
def test_pages_that_were_overwritten_hurt_nobody_else(
    rig: Rig, first: int, count: int, filler: bytes | None
) -> None:
    """With a pattern, or with other pages of the same file, as a disk does that writes to a wrong place."""
    before = rig.store.read_bytes()
    begin, end = first * PAGE, min(END, (first + count) * PAGE)
    length = end - begin
    source = (before * 2)[END - begin // 2 :] if filler is None else filler * length
    rig.store.write_bytes(before[:begin] + source[:length] + before[end:])
    try:
        hurt = {slot for slot in STORED if _touches(slot, begin, end)}
        _serve(rig, set(STORED) - hurt)
    finally:
        rig.store.write_bytes(before)


def _touches(slot: int, begin: int, end: int) -> bool:
    entry = SUPERBLOCK + slot * ENTRY
    at = FIRST_SLOT + slot * SLOT_BYTES
    return (entry < end and begin < entry + ENTRY) or (at < end and begin < at + SLOT_BYTES)


def _serve(rig: Rig, whole: Iterable[int]) -> None:
    """These are served as ever; of the rest each is right, or no data. All of them can be deleted, and then
    there is room for as many as there are slots."""
    driver = rig.open()
    listed = {header.key: header for header in driver.recovered}
    assert len(listed) == len(driver.recovered)
    mine = {key(number): chunk(number)[0] for number in range(SLOTS)}
    assert all(mine[each] == header for each, header in listed.items())
    assert {key(number) for number in whole} <= set(listed)
    driver.expect(chunks(whole))
    assert ReadStatus.FAILED not in statuses(driver, range(SLOTS))
    driver.delete(list(mine))
    driver.close()
    check(rig, Promises(deleted=set(range(SLOTS))), range(SLOTS))


# -- something else in its place ---------------------------------------------------------------------


def test_a_folder_in_place_of_the_file_is_told_and_once_it_is_gone_the_store_begins_anew(rig: Rig) -> None:
    store = rig.store
    store.unlink()
    store.mkdir()
    _refused(rig, str(store), "EISDIR")
    store.rmdir()
    check(rig, Promises(), range(SLOTS))


def test_a_file_in_place_of_a_folder_is_told(rig: Rig) -> None:
    folder = rig.store.parent
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    _refused(rig, str(folder), "ENOTDIR")
    folder.unlink()
    check(rig, Promises(), range(SLOTS))


def test_a_link_to_nowhere_is_told_and_a_link_to_the_folder_is_followed(rig: Rig) -> None:
    moved = rig.path.with_name("moved")
    rig.path.rename(moved)
    rig.path.symlink_to(moved)
    check(rig, Promises(stored=set(STORED)), range(SLOTS))
    shutil.rmtree(moved)
    _refused(rig, str(rig.path), "")


def test_a_folder_that_was_removed_between_close_and_open_begins_anew(rig: Rig) -> None:
    shutil.rmtree(rig.path)
    assert check(rig, Promises(deleted=set(STORED)), range(SLOTS)) == set()


def test_a_store_that_was_removed_between_close_and_open_begins_anew(rig: Rig) -> None:
    rig.store.unlink()
    assert check(rig, Promises(deleted=set(STORED)), range(SLOTS)) == set()


def _refused(rig: Rig, where: str, why: str) -> None:
    with pytest.raises(KVFerryError) as caught:
        rig.open()
    assert caught.value.where.startswith(where)
    assert why in caught.value.why
    assert caught.value.remedy
