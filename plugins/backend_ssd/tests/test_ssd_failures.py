"""What a caller sees when the disk fails, and what is left of the store afterwards."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import DeleteStatus, ErrorKind, ItemResult, ReadStatus, WriteStatus
from kvferry.testing.conformance.driver import Driver
from kvferry.testing.conformance.keyed_subject import Workbench
from kvferry_backend_ssd.backend import SSDBackend
from kvferry_backend_ssd.block_io import Purpose
from kvferry_backend_ssd.superblock import Superblock
from kvferry_backend_ssd.table import Table
from plugins.backend_ssd.tests.ssd_bench import MIB, Faults
from plugins.backend_ssd.tests.ssd_raw import ENTRY, PAGE, SUPERBLOCK, TABLE, StoredChunks, places

BIG = 1 << 20


def failed(result: ItemResult[Any], name: str) -> None:
    """The item failed as the system said, and its error tells what to do."""
    assert result.error is not None, result
    assert result.error.kind is ErrorKind.IO
    assert name in result.error.why
    assert result.error.remedy
    assert result.error.where


def counters(driver: Driver) -> Any:
    assert isinstance(driver.backend, SSDBackend)
    return driver.backend.counters


# -- writing ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("purpose", [Purpose.VALUE, Purpose.HEAD, Purpose.TABLE])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_write_that_fails_anywhere_fails_its_item_and_is_never_found(
    bench: Workbench, faults: Faults, purpose: Purpose, number: int
) -> None:
    driver = bench.open()
    kept, lost, late = bench.chunks(3, 8192)
    driver.store([kept])
    faults.wrong["write", purpose] = [number]
    (result,) = driver.write([lost])
    failed(result, errno.errorcode[number])
    driver.expect_missing([(lost[0].key, lost[0].size)])
    driver.store([late])
    driver.expect([kept, late])
    again = bench.reopen(driver)
    assert {header.key for header in again.recovered} == {kept[0].key, late[0].key}
    again.store([lost])
    again.expect([kept, lost, late])


def test_one_failed_value_leaves_the_others_of_its_batch_alone(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    faults.wrong["write", Purpose.VALUE] = [0, errno.ENOSPC, 0]
    chunks = bench.chunks(3, 8192)
    results = driver.write(chunks)
    assert [result.status for result in results] == [
        WriteStatus.STORED,
        WriteStatus.FAILED,
        WriteStatus.STORED,
    ]
    driver.expect([chunks[0], chunks[2]])


def test_a_flush_that_fails_fails_what_it_should_have_covered(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    kept = bench.chunk(9, 8192)
    driver.store([kept])
    faults.wrong["flush", None] = [errno.EIO]
    lost = bench.chunks(3, 8192)
    for result in driver.write(lost):
        failed(result, "EIO")
    driver.expect_missing([(header.key, header.size) for header, _ in lost])
    again = bench.reopen(driver)
    assert [header.key for header in again.recovered] == [kept[0].key]
    again.store(lost)
    again.expect([kept, *lost])


def test_slots_that_the_disk_may_still_name_are_not_used_until_it_forgot_them(
    bench: Workbench, faults: Faults
) -> None:
    bench.capacity = 2 * MIB
    driver = bench.open(max_value_bytes=BIG)
    driver.store([bench.chunk(0, BIG)])
    driver.delete([bench.key(0)])
    # Neither the entry becomes durable nor its removal: the room must stay out of use.
    faults.wrong["flush", None] = [errno.EIO, errno.EIO]
    failed(driver.write([bench.chunk(2, BIG)])[0], "EIO")
    assert driver.write([bench.chunk(3, BIG)])[0].status is WriteStatus.NO_SPACE
    assert driver.delete([bench.key("nobody")]) == [DeleteStatus.ABSENT]
    number = _stored_at_last(bench, driver, 4)
    driver.expect([bench.chunk(number, BIG)])


def _stored_at_last(bench: Workbench, driver: Driver, first: int) -> int:
    """Which chunk from ``first`` on finds room, when the table has forgotten what is in doubt."""
    for number in range(first, first + 100):
        (result,) = driver.write([bench.chunk(number, BIG)])
        if result.status is WriteStatus.STORED:
            return number
        assert result.status is WriteStatus.NO_SPACE
    raise AssertionError("the room stays out of use")


def test_a_defect_while_entries_are_written_loses_no_slot(
    bench: Workbench, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.capacity = 2 * MIB
    driver = bench.open(max_value_bytes=BIG)
    faults.wrong["flush", None] = [errno.EIO, errno.EIO]
    failed(driver.write([bench.chunk(0, BIG)])[0], "EIO")
    # The room of that one is in doubt, and now the attempt to clear it meets a defect.
    real, broken = Table.put, [True]

    def put(table: Table, *what: Any) -> dict[int, OSError]:
        if broken and broken.pop():
            raise RuntimeError("a defect")
        return real(table, *what)

    monkeypatch.setattr(Table, "put", put)
    assert driver.delete([bench.key("nobody")]) == [DeleteStatus.ABSENT]
    _stored_at_last(bench, driver, 1)
    assert not broken


def test_a_delete_that_fails_is_told_and_can_be_tried_again(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    chunk = bench.chunk(0, 8192)
    driver.store([chunk])
    faults.wrong["write", Purpose.TABLE] = [errno.EIO]
    ticket = driver.submit_delete([chunk[0].key])
    driver.finish(ticket)
    failed(ticket.results[0], "EIO")
    assert driver.delete([chunk[0].key]) == [DeleteStatus.DELETED]
    assert bench.reopen(driver).recovered == []


def test_a_disk_that_fills_up_early_makes_the_tier_smaller(
    bench: Workbench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    bench.capacity = 200 * MIB
    driver = bench.open(max_value_bytes=BIG)
    driver.store([bench.chunk(0, BIG)])
    faults.wrong["allocate", None] = [errno.ENOSPC] * 100
    with caplog.at_level(logging.WARNING):
        results = [driver.write(bench.chunks(23, BIG, first)) for first in range(1, 70, 23)]
    statuses = [each.status for batch in results for each in batch]
    assert statuses.index(WriteStatus.NO_SPACE) > 50
    assert set(statuses) == {WriteStatus.STORED, WriteStatus.NO_SPACE}
    (told,) = caplog.messages
    assert "ENOSPC" in told
    driver.delete([bench.key(0)])
    driver.store([bench.chunk(0, BIG, edition=1)])
    driver.expect([bench.chunk(0, BIG, edition=1)])


# -- reading ---------------------------------------------------------------------------------------


def test_a_read_that_fails_leaves_the_others_of_its_batch_alone(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    chunks = bench.chunks(3, 8192)
    driver.store(chunks)
    faults.wrong["read", Purpose.VALUE] = [0, errno.EIO, 0]
    found = driver.read([(header.key, header.size) for header, _ in chunks])
    assert [each.status for each in found] == [ReadStatus.FOUND, ReadStatus.FAILED, ReadStatus.FOUND]
    failed(found[1].result, "EIO")
    driver.expect(chunks)


def test_damage_is_told_counted_and_kept_out_of_use_until_it_is_deleted(
    bench: Workbench, tmp_path: Path
) -> None:
    bench.capacity = 2 * MIB
    driver = bench.open(max_value_bytes=BIG)
    chunk = bench.chunk(0, BIG)
    driver.store([chunk])
    raw = StoredChunks(tmp_path)
    (name,) = raw.names()
    good = raw.read(name)
    raw.write(name, good[:-1] + bytes([good[-1] ^ 1]))
    for _ in range(2):
        driver.expect_no_data(chunk[0].key, BIG)
    assert driver.read_one(chunk[0].key, BIG).status is ReadStatus.CORRUPT
    assert counters(driver).corrupt == 1
    assert driver.write([chunk])[0].status is WriteStatus.EXISTS
    assert driver.write([bench.chunk(1, BIG)])[0].status is WriteStatus.NO_SPACE
    assert driver.delete([chunk[0].key]) == [DeleteStatus.DELETED]
    driver.store([chunk])
    driver.expect([chunk])


# -- the whole store -------------------------------------------------------------------------------


@pytest.mark.parametrize("renamed", [False, True])
def test_after_the_folder_vanished_everything_fails_clearly_and_a_new_backend_begins_anew(
    bench: Workbench, tmp_path: Path, renamed: bool
) -> None:
    driver = bench.open()
    chunks = bench.chunks(2, 8192)
    driver.store(chunks)
    (folder,) = [path.parent for path in StoredChunks(tmp_path).files()]
    if renamed:
        folder.rename(tmp_path / "elsewhere")
    else:
        shutil.rmtree(folder)
    failed(driver.write([bench.chunk(7, 8192)])[0], "ENOENT")
    failed(driver.read([(chunks[0][0].key, 8192)])[0].result, "ENOENT")
    ticket = driver.submit_delete([chunks[0][0].key])
    driver.finish(ticket)
    failed(ticket.results[0], "ENOENT")
    again = bench.reopen(driver)
    assert again.recovered == []
    again.store(chunks)
    again.expect(chunks)


def test_what_is_flushed_into_a_folder_that_vanished_meanwhile_is_not_told_as_stored(
    bench: Workbench, faults: Faults, tmp_path: Path
) -> None:
    driver = bench.open()
    driver.store([bench.chunk(9, 100)])
    faults.held.clear()
    faults.flushing.clear()
    ticket, spans = driver.submit_write([bench.chunk(0, 8192)])
    assert faults.flushing.wait(30)
    shutil.rmtree(tmp_path)
    faults.held.set()
    driver.finish(ticket, spans)
    failed(ticket.results[0], "ENOENT")


def test_a_store_whose_table_cannot_be_read_at_all_says_so(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    chunk = bench.chunk(0, 8192)
    driver.store([chunk])
    driver.close()
    faults.wrong["read", Purpose.TABLE] = [errno.EIO] * 10
    faults.wrong["read", Purpose.HEAD] = [errno.EIO] * 10_000
    with pytest.raises(Exception, match="cannot be read") as caught:
        bench.open()
    assert "EIO" in str(caught.value)
    faults.wrong.clear()
    bench.open().expect([chunk])


def test_direct_io_that_is_refused_ends_in_the_page_cache_with_one_warning(
    bench: Workbench, faults: Faults, caplog: pytest.LogCaptureFixture
) -> None:
    faults.wrong["read", Purpose.SUPERBLOCK] = [errno.EINVAL]
    with caplog.at_level(logging.WARNING):
        driver = bench.open()
    assert [message for message in caplog.messages if "EINVAL" in message and "direct" in message]
    assert len(caplog.messages) == 1
    assert isinstance(driver.backend, SSDBackend)
    assert not driver.backend.direct
    chunks = [bench.chunk(number, size) for number, size in enumerate((1, 4095, 4096, 70_000))]
    driver.store(chunks)
    driver.expect(chunks)


# -- healing ---------------------------------------------------------------------------------------


def test_a_damaged_entry_is_found_again_in_its_slot(bench: Workbench, tmp_path: Path) -> None:
    driver = bench.open()
    chunks = bench.chunks(9, 8192)
    driver.store(chunks)
    driver.close()
    (path,) = StoredChunks(tmp_path).files()
    with open(path, "r+b") as file:
        for slot in (1, 6):
            os.pwrite(file.fileno(), b"\xff" * 40, places(file.fileno(), slot)[0] + 100)
    again = bench.open()
    assert {header.key for header in again.recovered} == {header.key for header, _ in chunks}
    assert counters(again).healed == 2
    again.expect(chunks)
    assert counters(bench.reopen(again)).healed == 0


def test_a_lost_table_and_superblock_are_rebuilt_from_the_slots(bench: Workbench, tmp_path: Path) -> None:
    driver = bench.open()
    chunks = [*bench.chunks(300, 100), bench.chunk(1000, 50_000)]
    driver.store(chunks)
    driver.close()
    (path,) = StoredChunks(tmp_path).files()
    with open(path, "r+b") as file:
        second = places(file.fileno(), 256)[0]
        os.pwrite(file.fileno(), bytes(TABLE), second)
        os.pwrite(file.fileno(), bytes(SUPERBLOCK + TABLE), 0)
    again = bench.open()
    assert {header.key for header in again.recovered} == {header.key for header, _ in chunks}
    again.expect(chunks)
    assert path.read_bytes()[:PAGE] == path.read_bytes()[PAGE:SUPERBLOCK] != bytes(PAGE)
    again = bench.reopen(again)
    assert counters(again).healed == 0
    again.expect(chunks)


def test_one_good_copy_of_the_superblock_is_enough(bench: Workbench, tmp_path: Path) -> None:
    driver = bench.open()
    driver.store(bench.chunks(3, 100))
    driver.close()
    (path,) = StoredChunks(tmp_path).files()
    for at in (0, PAGE):
        with open(path, "r+b") as file:
            os.pwrite(file.fileno(), b"\x00" * 100, at)
        driver = bench.open()
        assert counters(driver).healed == 0
        assert len(driver.recovered) == 3
        driver.close()


def test_a_store_of_another_format_is_begun_anew(bench: Workbench, tmp_path: Path) -> None:
    driver = bench.open()
    driver.store(bench.chunks(3, 100))
    driver.close()
    (path,) = StoredChunks(tmp_path).files()
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), Superblock(12288, b"another store!!!").to_page() * 2, 0)
    again = bench.open()
    assert again.recovered == []
    again.expect_missing([(bench.key(0), 100)])
    again.store(bench.chunks(3, 100))


def test_a_remnant_never_beats_the_chunk_that_took_its_room(bench: Workbench, tmp_path: Path) -> None:
    driver = bench.open()
    old = bench.chunk(0, 20_000)
    driver.store([old])
    (path,) = StoredChunks(tmp_path).files()
    with open(path, "rb") as file:
        entry_at = places(file.fileno(), 0)[0]
        remnant = os.pread(file.fileno(), ENTRY, entry_at)
    driver.delete([old[0].key])
    driver.store([bench.chunk(1, 100), bench.chunk(2, 100), bench.chunk(3, 100)])
    driver.delete([bench.key(1)])
    driver.close()
    with open(path, "r+b") as file:
        os.pwrite(file.fileno(), remnant, entry_at)  # its second slot belongs to chunk 2 now
    again = bench.open()
    assert {header.key for header in again.recovered} == {bench.key(2), bench.key(3)}
    again.expect([bench.chunk(2, 100), bench.chunk(3, 100)])
