"""Laws about the store: restarts, damage, identity, capacity, and what is not claimed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from attrs import evolve

from kvferry.api import (
    ChunkHeader,
    ChunkKey,
    DeleteStatus,
    ErrorKind,
    ItemResult,
    KVFerryError,
    ProbeStatus,
    ReadStatus,
    WriteStatus,
)
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.damage import FLIPPED_BITS, OTHER_LENGTHS, Damage
from kvferry.testing.conformance.driver import Driver, digest, expect_status, told
from kvferry.testing.conformance.keyed_subject import Chunk, KeyedSubject, Workbench
from kvferry.testing.conformance.raw import RawStore

_ODD_TEXTS = ("", "a/b", "../..", "\x00", "\n", "sälz", "\N{ELEPHANT}", "\ud800", "x" * 3000, "%s{}")


class StoreLaws(KeyedSubject, kit=True):
    """What holds of the store behind the backend."""

    # -- restarts --------------------------------------------------------------------------------

    @needs("persistent")
    def test_a_restart_finds_everything_that_was_stored(self, bench: Workbench, driver: Driver) -> None:
        """Whatever was acknowledged is there after a restart, with every fact of its header."""
        chunks = [bench.chunk(number, 100 + 611 * number) for number in range(12)]
        driver.store(chunks)
        driver.delete([chunks[3][0].key])
        left = [*chunks[:3], *chunks[4:]]
        again = bench.reopen(driver)
        self._recovered(bench, again, left)
        again.expect(left)
        again.expect_missing([(chunks[3][0].key, chunks[3][0].size)])
        expect_status(again.write([left[0]])[0], WriteStatus.EXISTS)
        once_more = bench.reopen(again)
        self._recovered(bench, once_more, left)

    @needs("persistent")
    def test_headers_hold_any_text_and_number(self, bench: Workbench, driver: Driver) -> None:
        """Owners and labels may be any text, counts any count, and all of it survives a restart."""
        chunks = [
            bench.chunk(number, 40, owner=text, model=text, depth=number + 1, parent=digest(number))
            for number, text in enumerate(_ODD_TEXTS)
        ]
        header, value = bench.chunk(len(chunks), 40)
        aliases = tuple((digest("alias", number), 16 * number + 16) for number in range(60))
        chunks.append((evolve(header, depth=2**31, tokens=2**31, parent=bytes(32), aliases=aliases), value))
        driver.store(chunks)
        again = bench.reopen(driver)
        self._recovered(bench, again, chunks)
        again.expect(chunks)

    @needs("persistent")
    def test_a_second_opener_is_refused_or_welcome(self, bench: Workbench, driver: Driver) -> None:
        """While a backend is open, ``open`` of a second one for the same instance, rank and shard over
        the same store refuses, unless ``shared`` is claimed: then both find the same."""
        chunk = bench.chunk(0, 100)
        driver.store([chunk])
        if "shared" in bench.claims:
            bench.open().expect([chunk])
            return
        self._expect_refusal(bench)
        driver.expect([chunk])
        bench.reopen(driver).expect([chunk])

    @needs("persistent")
    def test_capacity_counts_what_a_restart_found(
        self, bench: Workbench, driver: Driver, raw: RawStore
    ) -> None:
        """A tier that is full stays full over a restart."""
        stored = self._fill(bench, driver, raw)
        again = bench.reopen(driver)
        more = bench.chunks(4, self.capacity // 16, first=1000)
        for result in again.write(more):
            expect_status(result, WriteStatus.NO_SPACE)
        again.expect(stored)
        again.close()
        assert raw.used_bytes() <= self.capacity

    def test_what_is_not_claimed_to_outlive_starts_empty(self, bench: Workbench, driver: Driver) -> None:
        """A backend that claims neither ``persistent`` nor ``shared`` finds nothing of its last life;
        one that claims either finds all."""
        chunk = bench.chunk(0, 100)
        driver.store([chunk])
        again = bench.reopen(driver)
        if bench.outlives:
            again.expect([chunk])
        else:
            again.expect_missing([(chunk[0].key, 100)])

    def test_recover_is_there_exactly_when_claimed(self, bench: Workbench) -> None:
        """Without ``persistent``, ``recover`` refuses with the kind ``UNSUPPORTED``."""
        driver = bench.open()
        if "persistent" in bench.claims:
            assert [each for each in driver.recovered if each.key.namespace == bench.namespace] == []
            return
        with pytest.raises(KVFerryError) as caught:
            list(driver.backend.recover())
        assert caught.value.kind is ErrorKind.UNSUPPORTED

    # -- sharing and identity --------------------------------------------------------------------

    def test_probe_is_there_exactly_when_claimed(self, bench: Workbench, driver: Driver) -> None:
        """With ``shared``, ``probe`` tells what is there; without, it refuses with the kind
        ``UNSUPPORTED``."""
        chunk = bench.chunk(0, 100)
        driver.store([chunk])
        keys = [chunk[0].key, bench.key("nobody")]
        if "shared" in bench.claims:
            assert driver.probe(keys) == [ProbeStatus.PRESENT, ProbeStatus.ABSENT]
            assert driver.probe([]) == []
            return
        with pytest.raises(KVFerryError) as caught:
            driver.submit_probe(keys)
        assert caught.value.kind is ErrorKind.UNSUPPORTED

    @needs("shared")
    def test_instances_find_each_other_s_chunks(self, bench: Workbench, driver: Driver) -> None:
        """What one instance stored, another of the same shard reads, and both may delete."""
        other = bench.open(instance="other")
        chunks = bench.chunks(3, 500)
        driver.store(chunks)
        other.expect(chunks)
        expect_status(other.write([chunks[0]])[0], WriteStatus.EXISTS)
        assert other.delete([chunks[0][0].key]) == [DeleteStatus.DELETED]
        driver.expect_missing([(chunks[0][0].key, 500)])

    def test_ranks_keep_apart(self, bench: Workbench, driver: Driver) -> None:
        """Ranks with the same options may be open at the same time, and one key holds what each rank
        stored under it."""
        self._keep_apart(bench, driver, "another rank", rank=1, world_size=2, shard=digest("shard", 1))

    def test_ranks_of_one_shard_keep_apart(self, bench: Workbench, driver: Driver) -> None:
        """Two ranks may hold the same share of the model. Each still has a store of its own, unless
        ``shared`` is claimed: then they find each other's chunks."""
        self._keep_apart(bench, driver, "another rank of the same shard", rank=1, world_size=2)

    def test_instances_keep_apart(self, bench: Workbench, driver: Driver) -> None:
        """Two instances with the same options, for example on one host, each have a store of their own,
        unless ``shared`` is claimed: then they find each other's chunks."""
        self._keep_apart(bench, driver, "another instance", instance="other")

    def test_another_shard_is_never_found(self, bench: Workbench, driver: Driver) -> None:
        """Bytes that were stored with another layout of the rank are no data for this one."""
        chunk = bench.chunk(0, 600)
        driver.store([chunk])
        driver.close()
        other = bench.open(shard=digest("another layout"))
        assert [each for each in other.recovered if each.key == chunk[0].key] == []
        other.expect_missing([(chunk[0].key, 600)])

    # -- damage ----------------------------------------------------------------------------------

    def test_a_flipped_bit_is_never_data(self, bench: Workbench, driver: Driver, raw: RawStore) -> None:
        """Whichever byte of a stored record changes, a read gives the right bytes or none."""
        self._damage(bench, driver, raw, FLIPPED_BITS)

    def test_a_record_of_another_length_is_never_data(
        self, bench: Workbench, driver: Driver, raw: RawStore
    ) -> None:
        """A record that was cut off, or that goes on behind its end, is no data."""
        self._damage(bench, driver, raw, OTHER_LENGTHS)

    def test_a_record_under_another_key_is_never_data(
        self, bench: Workbench, driver: Driver, raw: RawStore
    ) -> None:
        """A record that lies where another chunk should be is recognised by its full key, in this
        namespace and between namespaces."""
        foreign, _ = bench.chunk(2, 2000)
        pairs = [
            (bench.chunk(0, 2000), bench.chunk(1, 2000)),
            (bench.chunk(2, 2000), (evolve(foreign, key=_foreign(foreign.key)), bench.chunk(2, 2000, 1)[1])),
        ]
        for victim, intruder in pairs:
            mine, driver = self._records(bench, driver, raw, victim)
            theirs, driver = self._records(bench, driver, raw, intruder)
            assert len(mine) == len(theirs), "the side door shows other records for one chunk than another"
            swapped: dict[str, bytes | None] = dict(zip(mine, theirs.values(), strict=True))
            about = " where the record of another key lies"
            if raw.live:
                # A restart would find the record first, and a check there can hide that reads have none.
                self._change(raw, swapped)
                found = driver.read_one(victim[0].key, 2000)
                if found.data != victim[1]:  # which may have been kept in memory
                    assert found.status in (ReadStatus.CORRUPT, ReadStatus.MISS), (
                        f"expected MISS or CORRUPT{about}, got {told(found.result)}"
                    )
            driver = self._behind(bench, driver, raw, swapped)
            driver.expect_no_data(victim[0].key, 2000, about)
            assert [each for each in driver.recovered if each.key == victim[0].key] == []
            driver.delete([victim[0].key, intruder[0].key])

    def test_a_lost_record_is_a_miss(self, bench: Workbench, driver: Driver, raw: RawStore) -> None:
        """A chunk whose record vanished is a miss, and the others stay."""
        lost, kept = bench.chunk(0, 1500), bench.chunk(1, 1500)
        driver.store([kept])
        records, driver = self._records(bench, driver, raw, lost)
        driver = self._behind(bench, driver, raw, dict.fromkeys(records))
        driver.expect_no_data(lost[0].key, 1500, " for a lost record")
        driver.expect([kept])

    # -- capacity --------------------------------------------------------------------------------

    def test_the_capacity_is_never_exceeded(self, bench: Workbench, driver: Driver, raw: RawStore) -> None:
        """A tier takes what fits, says ``NO_SPACE`` to the rest, and holds what it took."""
        stored = self._fill(bench, driver, raw)
        assert sum(header.size for header, _ in stored) >= self.capacity // 2, "half of the room is lost"
        driver.expect(stored)
        if "persistent" in bench.claims:
            driver.close()
            assert raw.used_bytes() <= self.capacity

    def test_room_comes_back(self, bench: Workbench, driver: Driver, raw: RawStore) -> None:
        """What is deleted makes room for as much again, and a refused write leaves nothing behind."""
        size = self.capacity // 16
        stored = self._fill(bench, driver, raw)
        for turn in range(1, 4):
            gone, stored = stored[:4], stored[4:]
            driver.delete([header.key for header, _ in gone])
            more = bench.chunks(4, size, first=1000 * turn)
            driver.store(more)
            stored += more
            (result,) = driver.write([bench.chunk(999, size)])
            expect_status(result, WriteStatus.NO_SPACE)
            driver.expect_missing([(bench.key(999), size)])
        driver.expect(stored)

    def test_a_value_above_the_capacity_is_not_stored(self, bench: Workbench, driver: Driver) -> None:
        """What can never fit is refused, and does no harm."""
        small, big = bench.chunk(0, 100), bench.chunk(1, self.capacity + 1)
        driver.store([small])
        (result,) = driver.write([big])
        expect_status(result, WriteStatus.NO_SPACE, WriteStatus.FAILED)
        driver.expect_missing([(big[0].key, 100)])
        driver.expect([small])

    # -- helpers ---------------------------------------------------------------------------------

    def _fill(self, bench: Workbench, driver: Driver, raw: RawStore) -> list[Chunk]:
        """Write more than fits, several batches at once; what was stored."""
        chunks = bench.chunks(24, self.capacity // 16)
        under_way = [driver.submit_write(chunks[at : at + 3]) for at in range(0, len(chunks), 3)]
        results: list[ItemResult[WriteStatus]] = []
        for ticket, spans in under_way:
            if raw.live:
                assert raw.used_bytes() <= self.capacity
            driver.finish(ticket, spans)
            results += ticket.results
        statuses = {result.status for result in results}
        assert statuses == {WriteStatus.STORED, WriteStatus.NO_SPACE}, told(*results)
        stored = [
            chunk
            for chunk, result in zip(chunks, results, strict=True)
            if result.status is WriteStatus.STORED
        ]
        assert sum(header.size for header, _ in stored) <= self.capacity
        if raw.live:
            assert raw.used_bytes() <= self.capacity
        return stored

    def _expect_refusal(self, bench: Workbench) -> None:
        meant = "open() has to refuse with a KVFerryError, by a lock for example: "
        try:
            bench.open()
        except KVFerryError:
            return
        except Exception as error:
            raise AssertionError(f"{meant}it raised {error!r} for a second opener") from error
        pytest.fail(f"{meant}a second backend of the same instance, rank and shard was let in")

    def _keep_apart(self, bench: Workbench, driver: Driver, who: str, **facts: Any) -> None:
        other = bench.open_beside(who, **facts)
        mine, theirs = bench.chunk(0, 600), bench.chunk(0, 600, edition=1)
        driver.store([mine])
        if "shared" in bench.claims and "shard" not in facts:
            other.expect([mine])
            return
        (found,) = other.read([(theirs[0].key, 600)])
        assert found.status is ReadStatus.MISS, f"{who} found what is not its own: {told(found.result)}"
        other.store([theirs])
        driver.expect([mine])
        other.expect([theirs])
        assert other.delete([theirs[0].key]) == [DeleteStatus.DELETED]
        driver.expect([mine])
        other = bench.reopen(other, **facts)
        assert [each for each in other.recovered if each.key == mine[0].key] == []

    def _damage(self, bench: Workbench, driver: Driver, raw: RawStore, damages: Sequence[Damage]) -> None:
        kept = bench.chunk(1000, 1800)
        driver.store([kept])
        for number, damage in enumerate(damages):
            header, value = bench.chunk(number, 1800)
            records, driver = self._records(bench, driver, raw, (header, value))
            changed = {name: damage.change(data) for name, data in records.items()}
            driver = self._behind(bench, driver, raw, changed)
            lengths = " and ".join(str(len(data)) for data in records.values())
            about = f" after {damage.name}, of a record of {lengths} bytes"
            driver.expect_no_data(header.key, header.size, about)
            headers = [each for each in driver.recovered if each.key.namespace == bench.namespace]
            assert set(headers) <= {header, kept[0]}, f"recover gave a header that nobody wrote{about}"
            driver.expect([kept])
            driver.delete([header.key])
            driver.store([(header, value)])
            driver.expect([(header, value)])
            driver.delete([header.key])

    def _records(
        self, bench: Workbench, driver: Driver, raw: RawStore, chunk: Chunk
    ) -> tuple[dict[str, bytes], Driver]:
        """Store a chunk; its records, and the backend that is open afterwards."""
        before, driver = self._snapshot(bench, driver, raw)
        driver.store([chunk])
        after, driver = self._snapshot(bench, driver, raw)
        new = {name: data for name, data in after.items() if before.get(name) != data}
        assert new, "the side door shows no record for a chunk that was stored"
        return new, driver

    def _snapshot(self, bench: Workbench, driver: Driver, raw: RawStore) -> tuple[dict[str, bytes], Driver]:
        if not raw.live:
            driver.close()
        found = {name: raw.read(name) for name in raw.names()}
        return found, driver if raw.live else bench.open()

    def _behind(
        self, bench: Workbench, driver: Driver, raw: RawStore, changes: Mapping[str, bytes | None]
    ) -> Driver:
        """Change records behind the backend's back; restarts it where it could otherwise not know."""
        restarts = bench.outlives or not raw.live
        if restarts:
            driver.close()
        self._change(raw, changes)
        return bench.open() if restarts else driver

    def _change(self, raw: RawStore, changes: Mapping[str, bytes | None]) -> None:
        for name, data in changes.items():
            if data is None:
                raw.delete(name)
            else:
                raw.write(name, data)

    def _recovered(self, bench: Workbench, driver: Driver, chunks: list[Chunk]) -> None:
        def order(header: ChunkHeader) -> bytes:
            return header.key.to_bytes()

        found = [each for each in driver.recovered if each.key.namespace == bench.namespace]
        assert sorted(found, key=order) == sorted((header for header, _ in chunks), key=order)


def _foreign(key: ChunkKey) -> ChunkKey:
    return ChunkKey(digest(key.namespace), key.digest)
