"""The format in the file and the bookkeeping in memory, as properties."""

from __future__ import annotations

import itertools
import re
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import ChunkKey
from kvferry.testing.conformance.driver import digest, header_of
from kvferry_backend_ssd.entry import (
    EMPTY,
    HEADER_ROOM,
    Entry,
    head_bytes,
    plausible,
    read_header,
    read_rows,
)
from kvferry_backend_ssd.index import Index, Place
from kvferry_backend_ssd.layout import ENTRY_BYTES, GROUP_SLOTS, PAGE, TABLE_BYTES, USES_BYTES, Layout
from kvferry_backend_ssd.names import is_store_file, set_folder, store_file, store_tag
from kvferry_backend_ssd.space import Space
from kvferry_backend_ssd.superblock import Superblock, Verdict
from plugins.backend_ssd.tests.ssd_bench import workbench
from plugins.backend_ssd.tests.ssd_raw import StoredChunks

TAG = bytes(range(16))
PAGE_ON_FORMAT = Path(__file__).parents[3] / "docs/ssd-format.md"
SLOT_BYTES = st.integers(2, 5000).map(lambda pages: pages * PAGE)


def entry_of(number: int, header: bytes = b"h" * 300, size: int = 5000, slots: int = 1) -> Entry:
    key = ChunkKey(digest("space"), digest(number))
    pages = head_bytes(len(header)) // PAGE
    checksum = digest(number)[:16]
    return Entry(number, slots, number + 1, number, key, size, checksum, pages, len(header), header)


# -- layout ----------------------------------------------------------------------------------------


@given(SLOT_BYTES, st.integers(0, 3 * GROUP_SLOTS))
def test_nothing_in_a_file_overlaps(slot_bytes: int, slots: int) -> None:
    layout = Layout(slot_bytes)
    groups = range(-(-slots // GROUP_SLOTS))
    parts = [(0, 2 * PAGE)]
    parts += [(layout.table_at(group), TABLE_BYTES) for group in groups]
    parts += [(layout.uses_at(group), USES_BYTES) for group in groups]
    parts += [(layout.slot_at(slot), slot_bytes) for slot in range(slots)]
    parts.sort()
    assert all(at + length <= behind for (at, length), (behind, _) in itertools.pairwise(parts))
    assert sum(parts[-1]) == layout.bytes_for(slots)
    assert all(at % PAGE == 0 for at, _ in parts)


@given(SLOT_BYTES, st.integers(0, 10**13))
def test_as_many_slots_as_fit_and_not_one_more(slot_bytes: int, length: int) -> None:
    layout = Layout(slot_bytes)
    slots = layout.slots_within(length)
    assert slots == 0 or layout.bytes_for(slots) <= length
    assert layout.bytes_for(slots + 1) > length


# -- entries ---------------------------------------------------------------------------------------


@given(st.integers(0, 2**32 - 2), st.binary(min_size=1, max_size=HEADER_ROOM), st.integers(1, 2**40))
def test_an_entry_comes_back_as_it_was(number: int, header: bytes, size: int) -> None:
    entry = entry_of(number, header, size)
    rows, whole = read_rows(entry.to_bytes(TAG), number, TAG)
    assert whole.all()
    (row,) = rows
    assert row["namespace"].tobytes() + row["digest"].tobytes() == entry.key.to_bytes()
    assert (row["slot"], row["slots"]) == (entry.slot, entry.slots)
    assert (row["sequence"], row["settled"]) == (entry.sequence, entry.settled)
    assert (row["size"], row["head_pages"]) == (entry.size, entry.head_pages)
    assert (row["checksum"].tobytes(), row["header_bytes"]) == (entry.checksum, len(header))
    assert row["header"].tobytes()[: len(header)] == header


@given(st.integers(0, 8 * ENTRY_BYTES - 1))
def test_an_entry_with_any_flipped_bit_is_not_whole(bit: int) -> None:
    raw = bytearray(entry_of(7).to_bytes(TAG))
    raw[bit // 8] ^= 1 << bit % 8
    assert not read_rows(bytes(raw), 7, TAG)[1].any()


@given(st.integers(0, ENTRY_BYTES - 1), st.booleans())
def test_a_torn_entry_is_not_whole(cut: int, over_another: bool) -> None:
    new = entry_of(7).to_bytes(TAG)
    old = entry_of(7, size=9).to_bytes(TAG) if over_another else EMPTY
    torn = new[:cut] + old[cut:]
    assert torn in (new, old) or not read_rows(torn, 7, TAG)[1].any()


def test_an_entry_counts_in_its_own_slot_and_store_alone() -> None:
    raw = entry_of(7).to_bytes(TAG)
    assert read_rows(raw, 7, TAG)[1].all()
    assert not read_rows(raw, 8, TAG)[1].any()
    assert not read_rows(raw, 7, bytes(16))[1].any()
    assert not read_rows(EMPTY, 0, TAG)[1].any()


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"size": 0}, False),
        ({"size": 8192}, False),
        ({"size": 2**63}, False),
        ({"slots": 0}, False),
        ({"slots": GROUP_SLOTS + 1, "size": 1}, False),
        ({"slots": 2, "size": 8192}, True),
        ({"head_pages": 2}, False),
        ({"header_bytes": 2**32 - 1}, False),
    ],
)
def test_numbers_that_no_chunk_can_have_are_noticed(changes: dict[str, int], good: bool) -> None:
    rows, _ = read_rows(entry_of(7, size=4000).to_bytes(TAG), 7, TAG)
    rows = rows.copy()
    for name, value in changes.items():
        rows[name] = value
    assert plausible(rows, 2 * PAGE).tolist() == [good]


@given(st.integers(0, 5000))
def test_a_header_of_any_length_is_read_back(length: int) -> None:
    header = header_of(ChunkKey(digest("space"), digest(1)), 10, owner="o" * length)
    raw = header.to_bytes()
    assert read_header(raw) == header
    assert read_header(raw + b"\x00") is None
    assert read_header(raw[:-1]) is None
    assert head_bytes(len(raw)) % PAGE == 0
    assert head_bytes(len(raw)) >= ENTRY_BYTES + max(0, len(raw) - HEADER_ROOM)


# -- superblock ------------------------------------------------------------------------------------


@given(st.integers(0, 8 * 60 - 1))
def test_a_superblock_with_any_flipped_bit_is_damaged(bit: int) -> None:
    superblock = Superblock(1 << 20, TAG)
    page = bytearray(superblock.to_page())
    assert superblock.judge(bytes(page)) is Verdict.OURS
    page[bit // 8] ^= 1 << bit % 8
    assert superblock.judge(bytes(page)) is Verdict.DAMAGED


def test_a_whole_superblock_of_another_store_is_told_from_a_damaged_one() -> None:
    ours = Superblock(1 << 20, TAG)
    assert ours.judge(Superblock(1 << 21, TAG).to_page()) is Verdict.OTHER
    assert ours.judge(Superblock(1 << 20, bytes(16)).to_page()) is Verdict.OTHER
    assert ours.judge(bytes(PAGE)) is Verdict.DAMAGED
    assert ours.judge(b"") is Verdict.DAMAGED


# -- names -----------------------------------------------------------------------------------------


@given(st.text(max_size=300), st.integers(0, 10**6))
def test_a_folder_has_a_short_plain_name_whatever_the_instance_is_called(instance: str, rank: int) -> None:
    name = set_folder(instance, rank)
    assert re.fullmatch(r"[a-z0-9_-]{1,120}", name)


@given(st.tuples(st.text(), st.integers(0, 99)), st.tuples(st.text(), st.integers(0, 99)))
def test_two_ranks_or_instances_never_share_a_folder(one: tuple[str, int], other: tuple[str, int]) -> None:
    assert (set_folder(*one) == set_folder(*other)) == (one == other)


def test_a_name_that_no_file_system_takes_is_still_a_folder() -> None:
    for odd in ("\ud800", "\x00", "../..", "x" * 5000, "CON", "é" * 300):
        assert re.fullmatch(r"[a-z0-9_-]{1,120}", set_folder(odd, 0))


@given(st.binary(max_size=64), SLOT_BYTES)
def test_store_files_are_known_by_their_names(shard: bytes, slot_bytes: int) -> None:
    name = store_file(shard, slot_bytes)
    assert is_store_file(name)
    assert not is_store_file(name + "~")
    assert not is_store_file("../" + name)
    assert store_tag("a", 0, shard, slot_bytes) != store_tag("a", 1, shard, slot_bytes)


# -- memory ----------------------------------------------------------------------------------------

_STEPS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2)), max_size=200)


@given(_STEPS, st.booleans())
def test_the_index_acts_like_a_dictionary(steps: list[tuple[int, int]], crowded: bool) -> None:
    """``crowded``: all keys begin their search at the same place of the table."""
    slots = 24
    index, model = Index(slots), dict[ChunkKey, Place]()
    keys = [
        ChunkKey(digest("space", number % 2), (b"\x00" * 8 if crowded else b"") + digest(number))
        for number in range(31)
    ]
    keys = [ChunkKey(key.namespace, key.digest[:32]) for key in keys]
    for number, step in steps:
        key = keys[number]
        assert index.find(key) == model.get(key)
        free = sorted(set(range(slots)) - {place.slot for place in model.values()})
        if key in model and step == 1:
            index.remove(key)
            del model[key]
        elif key in model and step == 2:
            assert index.unlink(model[key].slot) == model.pop(key)
        elif key not in model and free:
            model[key] = Place(free[step % len(free)], 1, 1, 100 + number, digest(number)[:16])
            index.insert(key, model[key], number)
    assert index.count == len(model)
    assert {key: index.find(key) for key in keys if index.find(key)} == model
    for key, place in model.items():
        assert index.holds(place.slot, key, place.size)
        assert not index.holds(place.slot, key, place.size + 1)


def test_the_index_takes_few_bytes_for_a_chunk() -> None:
    slots = 1 << 16
    index = Index(slots)
    columns = [
        value for value in vars(index).values() if isinstance(value, bytearray) or hasattr(value, "itemsize")
    ]
    taken = sum(memoryview(column).nbytes for column in columns)
    assert len(columns) == 8
    assert taken / slots <= 100


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 3)), max_size=120))
def test_rows_of_slots_are_apart_and_in_one_group(steps: list[tuple[int, int]]) -> None:
    slots = 2 * GROUP_SLOTS + 50
    space = Space(slots)
    taken: dict[int, int] = {}
    for count, step in steps:
        if step == 0 and taken:
            slot = sorted(taken)[count % len(taken)]
            space.give_back(slot, taken.pop(slot))
            continue
        within = slots if step else GROUP_SLOTS
        at = space.take(count, within)
        used = {each for slot, length in taken.items() for each in range(slot, slot + length)}
        if at is None:
            free = [n not in used for n in range(within)]
            rows = [
                n
                for n in range(within - count + 1)
                if all(free[n : n + count]) and n // GROUP_SLOTS == (n + count - 1) // GROUP_SLOTS
            ]
            assert rows == []
            continue
        assert at + count <= within
        assert at // GROUP_SLOTS == (at + count - 1) // GROUP_SLOTS
        assert not used & set(range(at, at + count))
        taken[at] = count
    assert space.free == slots - sum(taken.values())


# -- whole files -----------------------------------------------------------------------------------


@settings(max_examples=6)
@given(cut=st.integers(0, 10**7))
def test_a_file_that_was_cut_off_anywhere_gives_right_chunks_or_none(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    path = tmp_path_factory.mktemp("cut")
    bench = workbench(path, capacity=5 << 20)
    driver = bench.open()
    chunks = bench.chunks(40, 9000)
    driver.store(chunks)
    driver.close()
    (file,) = StoredChunks(path).files()
    with open(file, "r+b") as opened:
        opened.truncate(cut % file.stat().st_size)
    again = bench.open()
    kept = {header.key for header in again.recovered}
    again.expect([chunk for chunk in chunks if chunk[0].key in kept])
    again.expect_missing([(header.key, 9000) for header, _ in chunks if header.key not in kept])
    again.store([chunk for chunk in chunks if chunk[0].key not in kept])
    again.expect(chunks)
    bench.close_all()


def test_the_page_on_the_format_describes_a_real_file(tmp_path: Path) -> None:
    """Reads a store by the tables of the page alone."""
    tables = _tables(PAGE_ON_FORMAT.read_text(encoding="utf-8"))
    bench = workbench(tmp_path)
    driver = bench.open()
    header, value = chunk = bench.chunk(3, 5000)
    driver.store([chunk])
    driver.close()
    (path,) = StoredChunks(tmp_path).files()
    raw = path.read_bytes()
    superblock = _fields(tables["superblock"], raw)
    assert superblock["magic"] == b"kvferry-store\x00\x00\x00"
    assert superblock["slot"] == 8192 + 4096
    table, slot = 8192, 8192 + 256 * 1024 + 4096
    for at in (table, slot):
        entry = _fields(tables["entry"], raw[at:])
        assert entry["magic"] == b"KVFE"
        assert entry["tag"] == superblock["tag"]
        assert entry["key"] == header.key.to_bytes()
        assert entry["size"] == len(value)
        assert entry["header"][: entry["header_bytes"]] == header.to_bytes()
    begin = slot + 4096 * entry["head_pages"]
    assert raw[begin : begin + 5000] == value
    assert set(raw[begin + 5000 : begin + 8192]) == {0xA5}


def _tables(text: str) -> dict[str, list[tuple[int, int, str]]]:
    """Offset, length and name of each field, by the table's title."""
    found: dict[str, list[tuple[int, int, str]]] = {}
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title = part.partition("\n")[0].strip().lower()
        rows = re.findall(r"^\| (\d+) \| (\d+) \| `(\w+)` \|", part, flags=re.MULTILINE)
        found[title] = [(int(at), int(length), name) for at, length, name in rows]
    return found


def _fields(rows: list[tuple[int, int, str]], raw: bytes) -> dict[str, object]:
    """Numbers of 2, 4 and 8 bytes, and bytes of any other length."""
    forms = {2: "<H", 4: "<I", 8: "<Q"}
    found: dict[str, object] = {}
    for at, length, name in rows:
        part = raw[at : at + length]
        number = length in forms and name != "magic"
        found[name] = struct.unpack(forms[length], part)[0] if number else part
    return found
