"""Laws about bytes: what is read is what was stored, and memory is touched only where it is lent."""

from __future__ import annotations

from kvferry.api import BackendSpec, ChunkKey, DeleteStatus, ErrorKind, ReadStatus, WriteStatus
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.driver import (
    Driver,
    digest,
    expect_status,
    header_of,
    in_threads,
    told,
    value_of,
)
from kvferry.testing.conformance.keyed_subject import KeyedSubject, Workbench

SIZES = (1, 2, 7, 511, 4095, 4096, 4097, 65_537)


class BytesLaws(KeyedSubject, kit=True):
    """Reading, writing and deleting."""

    def test_the_spec_does_not_claim_addressable(self, claims: frozenset[str]) -> None:
        """The spec says which kind of backend this is."""
        assert "addressable" not in claims

    def test_what_was_stored_is_read(self, bench: Workbench, driver: Driver) -> None:
        """Bytes come back as they were, whatever their number."""
        chunks = [bench.chunk(number, size) for number, size in enumerate(SIZES)]
        driver.store(chunks)
        driver.expect(chunks)
        driver.expect(list(reversed(chunks)))

    def test_many_small_chunks_are_kept_apart(self, bench: Workbench, driver: Driver) -> None:
        """Many chunks in one batch are each their own."""
        chunks = [bench.chunk(number, 1 + number % 97) for number in range(128)]
        driver.store(chunks)
        driver.expect(chunks)

    def test_a_large_value_is_kept_whole(self, bench: Workbench, driver: Driver, spec: BackendSpec) -> None:
        """One value may take a good part of the tier, up to the claimed limit."""
        size = min(self.capacity // 4, spec.capabilities.max_value_bytes or self.capacity)
        chunk = bench.chunk(0, size)
        driver.store([chunk])
        driver.expect([chunk])

    def test_an_unknown_key_is_a_miss(self, bench: Workbench, driver: Driver) -> None:
        """What was never stored is no error."""
        driver.expect_missing([(bench.key("nobody"), 100)])
        driver.store([bench.chunk(0, 100)])
        driver.expect_missing([(bench.key("nobody"), 100)])

    def test_every_item_of_a_batch_has_its_own_result(self, bench: Workbench, driver: Driver) -> None:
        """A miss or an existing chunk between others changes nothing for them."""
        kept = bench.chunks(2, 300)
        driver.store(kept)
        wanted = [(kept[0][0].key, 300), (bench.key("nobody"), 300), (kept[1][0].key, 300)]
        for found, read in zip(
            driver.read(wanted), (ReadStatus.FOUND, ReadStatus.MISS, ReadStatus.FOUND), strict=True
        ):
            expect_status(found.result, read)
        for result, write in zip(
            driver.write([kept[1], bench.chunk(7, 50), kept[0]]),
            (WriteStatus.EXISTS, WriteStatus.STORED, WriteStatus.EXISTS),
            strict=True,
        ):
            expect_status(result, write)
        gone = driver.delete([bench.key("nobody"), kept[0][0].key])
        assert gone == [DeleteStatus.ABSENT, DeleteStatus.DELETED]

    def test_single_calls_and_batches_do_the_same(self, bench: Workbench, driver: Driver) -> None:
        """What is written in a batch can be read one by one, and the other way round."""
        batch, singles = bench.chunks(6, 200), bench.chunks(6, 200, first=6)
        driver.store(batch)
        for chunk in singles:
            driver.store([chunk])
        for chunk in batch:
            driver.expect([chunk])
        driver.expect(singles)

    def test_an_empty_batch_ends(self, driver: Driver) -> None:
        """No items are no work, and still a ticket that ends."""
        assert driver.write([]) == []
        assert driver.read([]) == []
        assert driver.delete([]) == []

    @needs("max_value_bytes")
    def test_the_claimed_limit_is_the_limit(
        self, bench: Workbench, driver: Driver, spec: BackendSpec
    ) -> None:
        """A value of ``max_value_bytes`` is stored; one byte more fails with the kind ``CAPACITY``."""
        limit = spec.capabilities.max_value_bytes
        assert limit is not None
        fits, above = bench.chunk(0, limit), bench.chunk(1, limit + 1)
        assert limit + 1 <= self.capacity // 2, "give the suite a capacity of at least twice the limit"
        driver.store([fits])
        driver.expect([fits])
        (result,) = driver.write([above])
        assert result.status is WriteStatus.FAILED, (
            f"a value of {limit + 1} bytes is {told(result)}; the spec says max_value_bytes={limit}, which "
            "the backend finds in its context and has to refuse"
        )
        assert result.error is not None
        assert result.error.kind is ErrorKind.CAPACITY, told(result)
        driver.expect_missing([(above[0].key, above[0].size)])

    def test_a_key_that_exists_is_left_as_it_is(self, bench: Workbench, driver: Driver) -> None:
        """Writing a key again says ``EXISTS``, and neither replaces the bytes nor mixes them."""
        first = bench.chunk(0, 5000)
        driver.store([first])
        for size in (5000, 10, 9000):
            (result,) = driver.write([bench.chunk(0, size, edition=1)])
            expect_status(result, WriteStatus.EXISTS)
            driver.expect([first])

    def test_of_several_writers_of_a_key_one_wins(self, bench: Workbench, driver: Driver) -> None:
        """Batches that write one key at the same time never mix: one is stored whole."""
        for round_ in range(4):
            editions = [bench.chunk(round_, 6000, edition) for edition in range(6)]
            under_way = [driver.submit_write([chunk, chunk]) for chunk in editions]
            winners = []
            for edition, (ticket, spans) in enumerate(under_way):
                driver.finish(ticket, spans)
                statuses = [result.status for result in ticket.results]
                assert set(statuses) <= {WriteStatus.STORED, WriteStatus.EXISTS}, told(*ticket.results)
                winners += [edition] * statuses.count(WriteStatus.STORED)
            assert len(winners) == 1, f"{len(winners)} of {2 * len(editions)} writers were told STORED"
            driver.expect([editions[winners[0]]])

    def test_a_deleted_chunk_is_a_miss(self, bench: Workbench, driver: Driver) -> None:
        """After a deletion the key is not found, its neighbours are."""
        chunks = bench.chunks(3, 400)
        driver.store(chunks)
        assert driver.delete([chunks[1][0].key]) == [DeleteStatus.DELETED]
        driver.expect_missing([(chunks[1][0].key, 400)])
        driver.expect([chunks[0], chunks[2]])

    def test_deleting_twice_is_the_same_as_once(self, bench: Workbench, driver: Driver) -> None:
        """What is gone, or never was, is ``ABSENT`` and no error."""
        chunk = bench.chunk(0, 400)
        driver.store([chunk])
        key = chunk[0].key
        assert driver.delete([key, key, bench.key("nobody")]) == [
            DeleteStatus.DELETED,
            DeleteStatus.ABSENT,
            DeleteStatus.ABSENT,
        ]
        assert driver.delete([key]) == [DeleteStatus.ABSENT]

    def test_a_deleted_key_can_be_stored_again(self, bench: Workbench, driver: Driver) -> None:
        """Nothing of the first life shines through the second."""
        driver.store([bench.chunk(0, 5000)])
        driver.delete([bench.key(0)])
        for size in (3000, 7000):
            again = bench.chunk(0, size, edition=2)
            driver.store([again])
            driver.expect([again])
            driver.delete([bench.key(0)])

    def test_any_key_will_do(self, bench: Workbench, driver: Driver) -> None:
        """Keys of zeros, of ones, or full of separators are keys like others."""
        digests = [bytes(32), b"\xff" * 32, b"/" * 32, b"\n" * 32, b".." * 16, b"\x00" * 31 + b"\x01"]
        keys = [ChunkKey(bench.namespace, each) for each in digests]
        chunks = [(header_of(key, 64), value_of(key, 64)) for key in keys]
        driver.store(chunks)
        driver.expect(chunks)

    def test_other_namespaces_are_never_found(self, bench: Workbench, driver: Driver) -> None:
        """The same content hash in another namespace is another chunk."""
        chunk = bench.chunk(0, 256)
        driver.store([chunk])
        other = ChunkKey(digest(bench.namespace), chunk[0].key.digest)
        driver.expect_missing([(other, 256)])
        assert driver.delete([other]) == [DeleteStatus.ABSENT]
        driver.expect([chunk])

    def test_a_read_touches_its_span_alone(self, bench: Workbench, driver: Driver) -> None:
        """Not a byte before, behind or between the spans is changed, by hits, misses or failures."""
        chunks = [bench.chunk(number, size) for number, size in enumerate(SIZES)]
        driver.store(chunks)
        wanted = [(header.key, header.size) for header, _ in chunks]
        driver.read([*wanted, (bench.key("nobody"), 333), *reversed(wanted)])
        driver.read([(header.key, header.size + change) for header, _ in chunks for change in (-1, 1, 8)][1:])
        driver.close()
        assert driver.memory.trespasses() == []

    def test_a_span_of_another_length_is_not_found(self, bench: Workbench, driver: Driver) -> None:
        """A value is read whole or not at all: a span of another length is ``MISS`` or ``CORRUPT``, and
        does the value no harm."""
        chunk = bench.chunk(0, 4000)
        driver.store([chunk])
        for size in (3999, 4001, 1, 40_000):
            driver.expect_no_data(chunk[0].key, size, f" for a span of {size} bytes and a value of 4000")
            driver.expect([chunk])

    def test_memory_is_left_alone_once_a_ticket_ended(self, bench: Workbench, driver: Driver) -> None:
        """A span that was read into keeps its bytes, and one that was written from may change at once
        without changing what was stored."""
        chunks = bench.chunks(12, 2000)
        driver.store(chunks)  # scribbles over the spans as soon as the ticket ended
        driver.expect(chunks)
        driver.store(bench.chunks(12, 2000, first=12))
        driver.expect(chunks)
        driver.close()
        assert driver.memory.trespasses() == []

    def test_several_threads_may_submit_at_once(self, bench: Workbench, driver: Driver) -> None:
        """Callers need not take turns."""

        def work(number: int) -> None:
            mine = bench.chunks(10, 300, first=100 * number)
            driver.store(mine)
            driver.expect(mine)
            assert driver.delete([mine[0][0].key]) == [DeleteStatus.DELETED]
            driver.expect_missing([(mine[0][0].key, 300)])
            driver.expect(mine[1:])

        in_threads(4, work)
