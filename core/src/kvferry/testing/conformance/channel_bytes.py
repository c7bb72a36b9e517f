"""Laws about bytes: they arrive as they were, and nothing around them is touched."""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.api import RemoteOp, Span, TransferStatus
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.channel_driver import Way, pattern, poke, told
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench
from kvferry.testing.conformance.driver import in_threads
from kvferry.testing.guarded import MEMORY

SIZES = (1, 2, 3, 7, 8, 63, 64, 65, 511, 4095, 4096, 4097, 65_537)
_LARGE = 16 << 20


class BytesLaws(ChannelSubject, kit=True):
    """Reading and writing."""

    @needs("read")
    def test_reading_brings_the_peer_s_bytes(self, bench: Workbench) -> None:
        """What a read is ``DONE`` with are the peer's bytes, whatever their number and wherever they lie."""
        way = bench.pair()
        self._expect_in_parts(bench, way, "read", [pattern(size, "read") for size in SIZES])
        bench.end()

    @needs("write")
    def test_writing_brings_our_bytes(self, bench: Workbench) -> None:
        """When a write is ``DONE`` the bytes lie in the peer's memory, and nothing around them changed."""
        way = bench.pair()
        self._expect_in_parts(bench, way, "write", [pattern(size, "write") for size in SIZES])
        bench.end()

    def test_each_side_may_connect_to_the_other(self, bench: Workbench) -> None:
        """Both sides read and write at the same time, each over a connection of its own."""
        there = bench.pair()
        back = bench.way(there.far, there.near)
        for verb in bench.verbs:
            under_way = []
            for number in range(8):
                for way in (there, back):
                    moves = way.moves(verb, [pattern(1000, verb, number, way is there)])
                    under_way.append((way, moves, way.submit(verb, moves)))
            for way, moves, ticket in under_way:
                way.finish_done(verb, ticket, moves)
        bench.end()

    def test_many_small_operations_are_kept_apart(self, bench: Workbench) -> None:
        """Many operations in one call are each their own, ``max_ops`` of them included."""
        way = bench.pair()
        for verb in bench.verbs:
            way.expect(verb, [pattern(1 + number % 97, verb, number) for number in range(bench.most)])
        bench.end()

    def test_a_large_operation_is_whole(self, bench: Workbench) -> None:
        """One operation may move many megabytes, from and to addresses that are no multiple of anything."""
        way = bench.pair()
        size = min(_LARGE, bench.memory_bytes // 3)
        for verb in bench.verbs:
            way.expect(verb, [pattern(size + 1, verb)])
        bench.end()

    def test_large_and_small_ones_may_be_mixed(self, bench: Workbench) -> None:
        """A large operation does no harm to its neighbours, in its call or in others."""
        way = bench.pair()
        sizes = (5, 300_001, 1, 70_000, 64)[: bench.limit]
        for verb in bench.verbs:
            calls = [way.moves(verb, [pattern(size, verb, call) for size in sizes]) for call in range(4)]
            under_way = [way.submit(verb, moves) for moves in calls]
            for moves, ticket in zip(calls, under_way, strict=True):
                way.finish_done(verb, ticket, moves)
        bench.end()

    def test_an_operation_without_bytes_is_done(self, bench: Workbench) -> None:
        """Length 0 is ``DONE`` anywhere inside of both regions, their ends included."""
        way = bench.pair()
        end = bench.memory_bytes
        places = [(0, 0), (0, end), (end, 0), (17, 33)]
        for verb in bench.verbs:
            for local, remote in places:
                operation = RemoteOp(Span(MEMORY, local, 0), MEMORY, remote)
                ticket = way.near.submit(verb, way.connection, [operation])
                (result,) = way.wait(ticket)
                assert result.status is TransferStatus.DONE, told([result])
            way.expect(verb, [b"", pattern(9, verb)][: bench.limit])
        bench.end()

    def test_the_last_byte_of_a_region_can_be_named(self, bench: Workbench) -> None:
        """A region reaches from its first byte to its last."""
        way = bench.pair()
        end = bench.memory_bytes
        for number, verb in enumerate(bench.verbs, 1):
            source, target = (way.far, way.near) if verb == "read" else (way.near, way.far)
            poke(source.memory, end - 1, bytes([number]))
            operation = RemoteOp(Span(MEMORY, end - 1, 1), MEMORY, end - 1)
            (result,) = way.wait(way.near.submit(verb, way.connection, [operation]))
            assert result.status is TransferStatus.DONE, f"{verb}: {told([result])}"
            assert target.memory.bytes_of(Span(MEMORY, end - 1, 1)) == bytes([number])
        bench.end()

    def test_a_call_without_operations_ends(self, bench: Workbench) -> None:
        """No operations are no work, and still a ticket that ends."""
        way = bench.pair()
        for verb in bench.verbs:
            assert way.attempt(verb, []) == ()
        bench.end()

    def test_memory_files_are_as_good(self, bench: Workbench) -> None:
        """Regions that have a descriptor, such as the arenas of tiers, are moved like any others."""
        way = bench.pair(memory_file=True)
        for verb in bench.verbs:
            self._expect_in_parts(bench, way, verb, [pattern(size, verb) for size in (*SIZES, 1 << 20)])
        bench.end()

    @needs("read")
    def test_one_source_may_be_read_by_many_operations(self, bench: Workbench) -> None:
        """Spans of the peer may overlap in one call of ``read``."""
        way = bench.pair()
        data = pattern(3000)
        source = way.far.memory.take(data)
        spans = [way.near.memory.reserve(1000 + number) for number in range(min(24, bench.limit))]
        operations = [
            RemoteOp(span, MEMORY, source.offset + number * 40) for number, span in enumerate(spans)
        ]
        results = way.wait(way.near.submit("read", way.connection, operations))
        for number, (span, result) in enumerate(zip(spans, results, strict=True)):
            assert result.status is TransferStatus.DONE, told(results)
            assert way.near.memory.bytes_of(span) == data[number * 40 :][: span.length]
        bench.end()

    def test_several_threads_may_submit_at_once(self, bench: Workbench) -> None:
        """Callers need not take turns, over one connection or over their own."""
        way = bench.pair()
        ways = [way, way, way, bench.way(way.near, way.far), bench.way(way.far, way.near)]

        def work(number: int) -> None:
            for turn in range(6):
                for verb in bench.verbs:
                    sizes = (700, 1, 40_000)[: bench.limit]
                    ways[number].expect(verb, [pattern(size, verb, number, turn) for size in sizes])

        in_threads(len(ways), work)
        bench.end()

    def _expect_in_parts(self, bench: Workbench, way: Way, verb: str, contents: Sequence[bytes]) -> None:
        """In one call if they are allowed in one, and each alone."""
        for first in range(0, len(contents), bench.limit):
            way.expect(verb, contents[first : first + bench.limit])
        for data in contents:
            way.expect(verb, [data])
