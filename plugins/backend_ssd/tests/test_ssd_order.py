"""The order in which bytes become durable, and how batches share what that costs."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvferry.api import DeleteStatus, ErrorKind, KVFerryError, WriteStatus
from kvferry.testing.conformance.keyed_subject import Workbench
from kvferry_backend_ssd.block_io import BlockIO, Purpose
from kvferry_backend_ssd.committing import Committing
from kvferry_backend_ssd.writing import Values
from plugins.backend_ssd.tests.ssd_bench import MIB, Faults

VALUE, HEAD, TABLE = ("write", Purpose.VALUE), ("write", Purpose.HEAD), ("write", Purpose.TABLE)
FLUSH = ("flush", None)


def changes(faults: Faults) -> list[tuple[str, Purpose | None]]:
    """Writes and flushes, each run of equal ones once."""
    seen = [each for each in faults.seen if each[0] in ("write", "flush")]
    return [each for number, each in enumerate(seen) if number == 0 or seen[number - 1] != each]


def test_a_chunk_is_told_after_value_and_entry_are_durable_and_that_takes_one_flush(
    bench: Workbench, faults: Faults
) -> None:
    driver = bench.open()
    driver.store([bench.chunk(9, 100)])
    faults.seen.clear()
    told: list[int] = []
    ticket, spans = driver.submit_write([bench.chunk(0, 8192)])
    ticket.on_done(lambda _: told.append(len(faults.seen)))
    driver.finish(ticket, spans)
    *written, last = changes(faults)
    assert (set(written), last) == ({VALUE, HEAD, TABLE}, FLUSH)
    assert told == [len(faults.seen)]


def test_a_deletion_is_told_after_it_is_durable(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    driver.store([bench.chunk(0, 100)])
    faults.seen.clear()
    assert driver.delete([bench.key(0)]) == [DeleteStatus.DELETED]
    assert changes(faults) == [TABLE, FLUSH]


def test_a_slot_is_used_again_only_after_its_removal_is_durable(bench: Workbench, faults: Faults) -> None:
    bench.capacity = 2 * MIB
    driver = bench.open(max_value_bytes=MIB)
    driver.store([bench.chunk(0, MIB)])
    faults.seen.clear()
    deletion = driver.submit_delete([bench.key(0)])
    writing, spans = driver.submit_write([bench.chunk(1, MIB)])
    driver.finish(deletion)
    driver.finish(writing, spans)
    assert writing.results[0].status is WriteStatus.STORED
    removal, flush, *written, last = changes(faults)
    assert (removal, flush) == (TABLE, FLUSH)
    assert (set(written), last) == ({VALUE, HEAD, TABLE}, FLUSH)
    driver.expect([bench.chunk(1, MIB)])


def test_batches_that_wait_share_their_flushes(bench: Workbench, faults: Faults) -> None:
    driver = bench.open()
    driver.store([bench.chunk(1000, 100)])
    faults.held.clear()
    faults.flushing.clear()
    first = driver.submit_write([bench.chunk(0, 3000)])
    assert faults.flushing.wait(30)
    faults.seen.clear()
    rest = [driver.submit_write([bench.chunk(number, 3000)]) for number in range(1, 31)]
    faults.held.set()
    for ticket, spans in [first, *rest]:
        driver.finish(ticket, spans)
        assert ticket.results[0].status is WriteStatus.STORED
    # The one that was held, and few for the thirty that waited.
    assert faults.seen.count(FLUSH) < 10
    driver.expect(bench.chunks(31, 3000))


def test_closing_waits_no_longer_than_its_deadline_and_can_be_tried_again(
    bench: Workbench, faults: Faults
) -> None:
    driver = bench.open()
    driver.store([bench.chunk(9, 100)])
    faults.held.clear()
    faults.flushing.clear()
    ticket, spans = driver.submit_write([bench.chunk(0, 3000)])
    assert faults.flushing.wait(30)
    late, late_spans = driver.submit_write([bench.chunk(1, 3000)])
    with pytest.raises(KVFerryError) as caught:
        driver.backend.close(driver.context.clock() + 0.05)
    assert caught.value.kind is ErrorKind.TIMEOUT
    assert not ticket.done
    faults.held.set()
    driver.close()
    driver.finish(ticket, spans)
    driver.finish(late, late_spans)
    assert ticket.results[0].status is WriteStatus.STORED
    assert late.results[0].error is not None
    assert late.results[0].error.kind is ErrorKind.CLOSED


def test_uses_are_written_without_a_flush_of_their_own_while_there_is_work(
    bench: Workbench, faults: Faults
) -> None:
    driver = bench.open()
    chunks = bench.chunks(20, 3000)
    driver.store(chunks)
    faults.seen.clear()
    for chunk in chunks:
        driver.expect([chunk])
    assert changes(faults) == []
    driver.close()
    assert changes(faults) == [("write", Purpose.USES), FLUSH]


def test_what_is_written_while_another_lane_holds_the_table_is_committed_all_the_same(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = bench.open()
    driver.store([bench.chunk(9, 100)])
    begun, finishing = threading.Event(), threading.Event()
    write, write_uses = Values.write, Committing._write_uses

    def late(values: Values, writings: Any) -> None:
        begun.set()
        assert finishing.wait(30)
        write(values, writings)

    def long(commits: Committing, io: BlockIO) -> bool:
        if not finishing.is_set():
            finishing.set()
            deadline = time.monotonic() + 30
            while not commits._waiting:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            time.sleep(0.01)  # who brought it has tried the lock
        return write_uses(commits, io)

    monkeypatch.setattr(Values, "write", late)
    monkeypatch.setattr(Committing, "_write_uses", long)
    ticket, spans = driver.submit_write([bench.chunk(0, 3000)])
    assert begun.wait(30)
    driver.close()
    assert ticket.done
    driver.finish(ticket, spans)
    assert ticket.results[0].status is WriteStatus.STORED
