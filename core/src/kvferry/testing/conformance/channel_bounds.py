"""Laws about bounds: only registered memory can be named, on either side."""

from __future__ import annotations

import pytest

from kvferry.api import ErrorKind, KVFerryError, RemoteOp, Span, TransferStatus
from kvferry.testing.conformance.channel_driver import Way, expect_failed, pattern, told
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench
from kvferry.testing.guarded import MEMORY

_HUGE = (1 << 31, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64)
"""Offsets at which sums of native numbers overflow."""


class BoundsLaws(ChannelSubject, kit=True):
    """What lies outside of a registered region."""

    def test_memory_that_the_peer_did_not_register_is_refused(self, bench: Workbench) -> None:
        """A name that the peer does not know fails with the kind ``PROTOCOL``, and no byte moves."""
        way = bench.pair()
        for verb in bench.verbs:
            local = way.near.memory.take(pattern(100))
            for name in ("nothing", "", "memory2", "memor", "Memory", "ж" * 40):
                self._refused(way, verb, RemoteOp(local, name, 0))
            way.near.memory.settle(local)
        bench.end()

    def test_memory_beyond_the_peer_s_region_is_refused(self, bench: Workbench) -> None:
        """An operation that leaves the peer's region, be it by one byte, fails with the kind ``PROTOCOL``,
        and no byte moves, not even of the part that lies inside."""
        way = bench.pair()
        end = bench.memory_bytes
        inside = way.far.memory.reserve(64)
        way.far.memory.settle(inside)
        for verb in bench.verbs:
            local = way.near.memory.take(pattern(100))
            for offset in (end - 99, end - 1, end, end + 1, -1, -100, -(1 << 63), *_HUGE):
                self._refused(way, verb, RemoteOp(local, MEMORY, offset))
            way.near.memory.settle(local)
            nothing = Span(MEMORY, 0, 0)
            for offset in (end + 1, -1, *_HUGE):
                self._refused(way, verb, RemoteOp(nothing, MEMORY, offset))
        bench.end()

    def test_memory_that_we_did_not_register_is_refused(self, bench: Workbench) -> None:
        """A local span whose region is not registered with our channel fails with the kind ``PROTOCOL``."""
        way = bench.pair()
        remote = way.far.memory.take(pattern(100))
        for verb in bench.verbs:
            for name in ("nothing", "", "memory2"):
                self._refused(way, verb, RemoteOp(Span(name, 0, 100), MEMORY, remote.offset))
        way.far.memory.settle(remote)
        bench.end()

    def test_memory_beyond_our_region_is_refused(self, bench: Workbench) -> None:
        """A local span that leaves our region fails with the kind ``PROTOCOL``, as does one of negative
        length, and no byte moves."""
        way = bench.pair()
        end = bench.memory_bytes
        remote = way.far.memory.take(pattern(200))
        spans = [Span(MEMORY, offset, 100) for offset in (end - 99, end, -1, -100, *_HUGE)]
        spans += [Span(MEMORY, 0, length) for length in (-1, -(1 << 63), end + 1, *_HUGE)]
        spans += [Span(MEMORY, 100, -100), Span(MEMORY, end + 1, 0), Span(MEMORY, -1, 0)]
        for verb in bench.verbs:
            for span in spans:
                self._refused(way, verb, RemoteOp(span, MEMORY, remote.offset))
        way.far.memory.settle(remote)
        bench.end()

    def test_one_wrong_operation_leaves_the_others_alone(self, bench: Workbench) -> None:
        """What is refused has a result of its own; the rest of its call is done."""
        way = bench.pair()
        count = min(bench.limit, 9)
        for verb in bench.verbs:
            for wrong in {0, count // 2, count - 1}:
                moves = way.moves(verb, [pattern(500, verb, wrong, number) for number in range(count)])
                operations = [move.operation for move in moves]
                local = operations[wrong].local
                operations[wrong] = RemoteOp(local, MEMORY, bench.memory_bytes - 499)
                before = way.near.memory.bytes_of(local)
                results = way.wait(way.near.submit(verb, way.connection, operations))
                expect_failed(results[wrong], ErrorKind.PROTOCOL)
                assert way.near.memory.bytes_of(local) == before, "bytes of a refused read arrived"
                for number, (move, result) in enumerate(zip(moves, results, strict=True)):
                    assert number == wrong or result.status is TransferStatus.DONE, told(results)
                    way.settle(verb, move, result)
        bench.end()

    def test_a_connection_of_another_channel_is_refused(self, bench: Workbench) -> None:
        """``read`` and ``write`` raise the kind ``INTERNAL`` for a connection that is not theirs."""
        way, other = bench.pair(), bench.open()
        for verb in bench.verbs:
            for side in (way.far, other):
                with pytest.raises(KVFerryError) as caught:
                    side.submit(verb, way.connection, [RemoteOp(Span(MEMORY, 0, 8), MEMORY, 0)])
                assert caught.value.kind is ErrorKind.INTERNAL, f"{verb} raised {caught.value!r}"
        bench.end()

    def _refused(self, way: Way, verb: str, operation: RemoteOp) -> None:
        results = way.wait(way.near.submit(verb, way.connection, [operation]))
        error = results[0].error
        assert error is not None, f"{verb} of {operation} is DONE"
        assert error.kind is ErrorKind.PROTOCOL, (
            f"{verb} of {operation} has to fail as PROTOCOL: {told(results)}"
        )
