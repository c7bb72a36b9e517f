"""Laws about time: tickets end once, closing ends everything, and nothing waits for ever."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.api import (
    ErrorKind,
    ItemResult,
    KVFerryError,
    ReadStatus,
    WriteStatus,
)
from kvferry.testing.conformance.driver import Driver, told
from kvferry.testing.conformance.keyed_subject import KeyedSubject, Workbench
from kvferry.testing.leaks import LeakGuard


class TicketLaws(KeyedSubject, kit=True):
    """Submitting, waiting, cancelling, opening and closing."""

    def test_every_ticket_ends_exactly_once(self, bench: Workbench, driver: Driver) -> None:
        """Each ticket is completed once, and its listener hears of it once, whatever the items do."""
        chunks = bench.chunks(20, 500)
        driver.store(chunks[:10])
        driver.write(chunks)
        driver.read([(header.key, header.size) for header, _ in chunks])
        driver.read([(bench.key("nobody"), 10)])
        driver.delete([header.key for header, _ in chunks])
        driver.delete([bench.key("nobody")])
        driver.close()
        assert driver.trespasses() == []

    def test_many_tickets_may_be_under_way(self, bench: Workbench, driver: Driver) -> None:
        """A caller that does not wait in between gets every result all the same."""
        chunks = bench.chunks(40, 800)
        writes = [driver.submit_write([chunk]) for chunk in chunks]
        for ticket, spans in writes:
            driver.finish(ticket, spans)
            assert [result.status for result in ticket.results] == [WriteStatus.STORED], told(*ticket.results)
        reads = [driver.submit_read([(header.key, header.size)]) for header, _ in chunks]
        for (reading, spans), (_, value) in zip(reads, chunks, strict=True):
            driver.finish(reading, spans)
            assert driver.memory.bytes_of(spans[0]) == value
        driver.close()
        assert driver.trespasses() == []

    def test_a_cancelled_ticket_ends_and_tells_the_truth(self, bench: Workbench, driver: Driver) -> None:
        """After cancelling, each item either happened or failed with the kind ``CANCELLED``."""
        batches = [bench.chunks(8, 700, first=8 * number) for number in range(8)]
        under_way = [driver.submit_write(batch) for batch in batches]
        for ticket, _ in under_way:
            ticket.cancel()
        for batch, (ticket, spans) in zip(batches, under_way, strict=True):
            driver.finish(ticket, spans)
            self._agree(driver, batch, ticket.results, ErrorKind.CANCELLED)
        driver.close()
        assert driver.trespasses() == []

    def test_cancelling_after_the_end_changes_nothing(self, bench: Workbench, driver: Driver) -> None:
        """Results stand once they are told."""
        chunk = bench.chunk(0, 100)
        ticket, spans = driver.submit_write([chunk])
        driver.finish(ticket, spans)
        before = ticket.results
        ticket.cancel()
        assert ticket.results == before
        driver.expect([chunk])
        driver.close()
        assert driver.trespasses() == []

    def test_a_deadline_that_passed_is_told(self, bench: Workbench, driver: Driver) -> None:
        """Work that comes too late still ends: each item happened or failed with the kind
        ``TIMEOUT``, and what failed is not found."""
        late = driver.context.clock() - 1.0
        batch = bench.chunks(4, 300)
        results = driver.write(batch, deadline=late)
        self._agree(driver, batch, results, ErrorKind.TIMEOUT)
        kept = bench.chunks(2, 300, first=10)
        driver.store(kept)
        for found, (_, value) in zip(
            driver.read([(header.key, 300) for header, _ in kept], deadline=late), kept, strict=True
        ):
            if found.status is ReadStatus.FOUND:
                assert found.data == value
            else:
                assert found.result.error is not None, told(found.result)
                assert found.result.error.kind is ErrorKind.TIMEOUT, told(found.result)
        driver.finish(driver.submit_delete([kept[0][0].key], deadline=late))
        driver.expect([kept[1]])

    def test_closing_ends_every_ticket(self, bench: Workbench, driver: Driver) -> None:
        """When ``close`` returns, nothing is under way: what did not happen failed, with the kind
        ``CLOSED``, and nothing changes afterwards."""
        batches = [bench.chunks(10, 900, first=10 * number) for number in range(12)]
        under_way = [driver.submit_write(batch) for batch in batches]
        driver.close()
        ends: list[tuple[ItemResult[WriteStatus], ...]] = []
        for ticket, spans in under_way:
            assert ticket.done, "close returned and left a ticket open"
            driver.finish(ticket, spans, scribble=True)
            ends.append(ticket.results)
        for result in (result for results in ends for result in results):
            if result.status is not WriteStatus.STORED:
                assert result.error is not None, told(result)
                assert result.error.kind is ErrorKind.CLOSED, told(result)
        if "persistent" in bench.claims:
            again = bench.open()
            for batch, results in zip(batches, ends, strict=True):
                self._agree(again, batch, results, ErrorKind.CLOSED)
        assert driver.trespasses() == []
        assert [ticket.results for ticket, _ in under_way] == ends

    def test_closing_twice_is_the_same_as_once(self, driver: Driver) -> None:
        """``close`` is idempotent."""
        driver.close()
        driver.close()

    def test_what_was_never_open_can_be_closed(self, bench: Workbench) -> None:
        """``close`` needs no ``open``."""
        bench.make().close()

    def test_closing_gives_everything_back(self, bench: Workbench) -> None:
        """No thread, descriptor or shared memory is left."""
        guard = LeakGuard()
        driver = bench.open()
        chunk = bench.chunk(0, 1000)
        driver.store([chunk])
        driver.expect([chunk])
        driver.close()
        assert guard.leaks() == []

    def test_only_an_open_backend_takes_work(self, bench: Workbench) -> None:
        """Before ``open`` and after ``close`` every call is refused with the kind ``CLOSED``."""
        driver = bench.make()
        self._refuses(bench, driver)
        driver.close()
        driver = bench.open()
        driver.close()
        self._refuses(bench, driver)

    def test_opening_twice_is_refused(self, bench: Workbench, driver: Driver) -> None:
        """A second ``open`` raises, and the first stays good."""
        with pytest.raises(KVFerryError):
            driver.backend.open(driver.context)
        chunk = bench.chunk(0, 100)
        driver.store([chunk])
        driver.expect([chunk])

    def _refuses(self, bench: Workbench, driver: Driver) -> None:
        calls: list[tuple[str, Any]] = [
            ("write", lambda: driver.submit_write([bench.chunk(0, 10)])),
            ("read", lambda: driver.submit_read([(bench.key(0), 10)])),
            ("delete", lambda: driver.submit_delete([bench.key(0)])),
        ]
        for name, call in calls:
            with pytest.raises(KVFerryError) as caught:
                call()
            assert caught.value.kind is ErrorKind.CLOSED, f"{name} raised {caught.value!r}"

    def _agree(self, driver: Driver, batch: Any, results: Any, kind: ErrorKind) -> None:
        """What was told of a batch is what a reader finds."""
        for (header, value), result in zip(batch, results, strict=True):
            if result.status is WriteStatus.STORED:
                driver.expect([(header, value)])
            else:
                assert result.status is WriteStatus.FAILED, told(result)
                assert result.error.kind is kind, told(result)
                driver.expect_missing([(header.key, header.size)])
