"""Which entries a restart believes without a look at their values."""

from __future__ import annotations

import errno
import struct
from pathlib import Path

from kvferry.api import WriteStatus
from kvferry.testing.conformance.keyed_subject import Workbench
from kvferry_backend_ssd.block_io import Purpose
from plugins.backend_ssd.tests.ssd_bench import Faults
from plugins.backend_ssd.tests.ssd_raw import ENTRY, PAGE, StoredChunks, places

SECTOR = 512
_SEQUENCES = struct.Struct("<16xQQ")


def sequences(folder: Path) -> dict[int, tuple[int, int]]:
    """``sequence`` and ``settled`` of the entry in each slot."""
    stored = StoredChunks(folder)
    return {
        int(name.rpartition(":")[2]): _SEQUENCES.unpack_from(stored.read(name)) for name in stored.names()
    }


def spoil(folder: Path, slot: int) -> None:
    """A value that never came to the disk."""
    (path,) = StoredChunks(folder).files()
    with open(path, "r+b") as file:
        _, slot_at = places(file.fileno(), slot)
        file.seek(slot_at + PAGE)
        file.write(b"other")


def test_only_what_was_written_last_is_looked_at(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    chunks = bench.chunks(20, 8192)
    for chunk in chunks:
        driver.store([chunk])
    faults.seen.clear()
    again = bench.reopen(driver)
    assert len(again.recovered) == 20
    assert faults.seen.count(("read", Purpose.VALUE)) == 1
    again.expect(chunks)


def test_a_value_that_did_not_come_with_its_entry_is_no_chunk(
    bench: Workbench, faults: Faults, tmp_path: Path
) -> None:
    driver = bench.open()
    kept, lost = bench.chunks(2, 8192)
    driver.store([kept])
    driver.store([lost])
    driver.close()
    spoil(tmp_path, 1)
    again = bench.open()
    assert [header.key for header in again.recovered] == [kept[0].key]
    again.store([lost])
    again.expect([kept, lost])


def test_a_value_that_cannot_be_read_at_a_restart_is_left_to_those_who_want_it(
    bench: Workbench, faults: Faults
) -> None:
    driver = bench.open()
    chunks = bench.chunks(3, 8192)
    driver.store(chunks)
    driver.close()
    faults.wrong["read", Purpose.VALUE] = [0, errno.EIO]
    again = bench.open()
    assert len(again.recovered) == 3
    again.expect(chunks)


def test_an_entry_that_may_still_be_there_is_settled_by_none_that_follows(
    bench: Workbench, faults: Faults, tmp_path: Path
) -> None:
    driver = bench.open()
    driver.store([bench.chunk(0, 8192)])
    faults.wrong["flush", None] = [errno.EIO, errno.EIO]
    (failed,) = driver.write([bench.chunk(1, 8192)])
    assert failed.status is WriteStatus.FAILED
    driver.store([bench.chunk(2, 8192)])
    driver.store([bench.chunk(3, 8192)])
    found = sorted(sequences(tmp_path).values())
    assert [settled == sequence for sequence, settled in found] == [True, False, True]
    assert found[0][0] < found[1][1] < found[1][0]


def test_an_entry_that_a_restart_could_not_drop_is_settled_by_none_that_follows(
    bench: Workbench, faults: Faults, tmp_path: Path
) -> None:
    driver = bench.open()
    driver.store([bench.chunk(0, 8192)])
    driver.store([bench.chunk(1, 8192)])
    driver.close()
    lost = sequences(tmp_path)[1][0]
    spoil(tmp_path, 1)
    faults.wrong["write", Purpose.TABLE] = [errno.EIO]
    again = bench.open()
    assert len(again.recovered) == 1
    again.store([bench.chunk(2, 8192)])
    again.store([bench.chunk(3, 8192)])
    assert max(sequences(tmp_path).values())[1] <= lost


def test_a_torn_entry_does_not_bring_back_what_was_in_its_slot_before(
    bench: Workbench, tmp_path: Path
) -> None:
    """The slot still has a chunk that was deleted, whole: nothing else of the new one was written."""
    driver = bench.open()
    driver.store([bench.chunk(0, 8192)])
    driver.delete([bench.key(0)])
    (path,) = StoredChunks(tmp_path).files()
    before = path.read_bytes()
    driver.store([bench.chunk(1, 8192)])
    driver.close()
    with open(path, "r+b") as file:
        entry_at, slot_at = places(file.fileno(), 0)
        file.seek(slot_at)
        file.write(before[slot_at : slot_at + PAGE + 8192])
        file.seek(entry_at + SECTOR)
        file.write(bytes(ENTRY - SECTOR))
    assert bench.open().recovered == []
