"""Laws about peers: who can be connected to, and what becomes of a connection when its peer goes."""

from __future__ import annotations

import time

import pytest

from kvferry.api import MAX_EXPORT_BYTES, ErrorKind, KVFerryError, TransferStatus
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.channel_driver import Side, Way, expect_failed, expect_raised, pattern
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench
from kvferry.testing.leaks import LeakGuard

_GONE = (ErrorKind.IO, ErrorKind.PROTOCOL)
"""How ``connect`` fails when the epoch is over: nobody is there, or somebody else."""
_DAMAGED = (ErrorKind.PROTOCOL, ErrorKind.IO, ErrorKind.TIMEOUT, ErrorKind.COMPATIBILITY)
"""How it fails for something like an export whose damage cannot always be told from another address."""


class PeerLaws(ChannelSubject, kit=True):
    """Exporting, connecting and losing peers."""

    def test_an_export_is_short_and_stays_the_same(self, bench: Workbench) -> None:
        """``export`` gives at most ``MAX_EXPORT_BYTES``, and while the channel is open, what was exported
        first goes on to be valid, whatever is registered."""
        near, far = bench.open(), bench.open_bare()
        first = far.channel.export()
        far.channel.register(far.memory.region)
        far.register("arena", 1 << 16)
        assert 0 < len(first) <= MAX_EXPORT_BYTES
        assert len(far.channel.export()) <= MAX_EXPORT_BYTES
        way = Way.between(near, far, near.channel.connect(first, near.deadline()))
        for verb in bench.verbs:
            way.expect(verb, [pattern(100, verb)])
        bench.end()

    def test_several_connections_to_one_peer_are_independent(self, bench: Workbench) -> None:
        """Closing one connection does no harm to others of the same channel, to the same peer or not."""
        first = bench.pair()
        second, third = bench.way(first.near, first.far), bench.way(first.near, bench.open())
        for verb in bench.verbs:
            for way in (first, second, third):
                way.expect(verb, [pattern(900, verb)])
        first.connection.close()
        assert second.connection.alive
        assert third.connection.alive
        for verb in bench.verbs:
            for way in (second, third):
                way.expect(verb, [pattern(901, verb)])
        bench.end()

    def test_a_closed_connection_takes_no_work(self, bench: Workbench) -> None:
        """Operations over a connection that was closed fail with the kind ``CLOSED``; closing it twice is
        the same as once, and another one can be made."""
        way = bench.pair()
        way.connection.close()
        way.connection.close()
        assert not way.connection.alive
        again = bench.way(way.near, way.far)
        for verb in bench.verbs:
            way.expect_all_failed(verb, [pattern(100, verb)], ErrorKind.CLOSED)
            again.expect(verb, [pattern(100, verb, "again")])
        bench.end()

    def test_closing_a_connection_ends_its_operations(self, bench: Workbench) -> None:
        """What is under way over it happened, or fails with the kind ``CLOSED`` and soon; neither side is
        written afterwards."""
        for verb in bench.verbs:
            way = bench.pair()
            calls = [way.moves(verb, [pattern(400_000, verb, number)]) for number in range(12)]
            under_way = [way.submit(verb, moves) for moves in calls]
            way.connection.close()
            ends = time.monotonic() + bench.grace
            for moves, ticket in zip(calls, under_way, strict=True):
                assert ticket.wait(ends - time.monotonic()), "the connection is closed, and a ticket goes on"
                for move, result in zip(moves, way.finish(verb, ticket, moves), strict=True):
                    if result.error is not None:
                        expect_failed(result, ErrorKind.CLOSED)
                        if verb == "write":
                            way.far.memory.settle(move.remote, scribble=True)
        bench.end()

    def test_what_nobody_exported_is_refused(self, bench: Workbench) -> None:
        """``connect`` raises the kind ``PROTOCOL`` for no bytes, random bytes, and an export that was cut
        short or has something behind it."""
        way = bench.pair()
        export = way.far.channel.export()
        cut = sorted({0, 1, 2, 4, 8, len(export) // 2, len(export) - 1})
        wrong = [export[:length] for length in cut if length < len(export)]
        wrong += [export + b"\0", export + export, bytes(len(export)), pattern(len(export)), pattern(5000)]
        wrong += [b"{}", b"\xff" * 16, export[::-1], b"GET / HTTP/1.1\r\n\r\n", bytes(MAX_EXPORT_BYTES)]
        for data in wrong:
            with pytest.raises(KVFerryError) as caught:
                way.near.channel.connect(data, way.near.deadline())
            expect_raised(caught.value, f"connecting to {data[:60]!r}", ErrorKind.PROTOCOL)
        self._still_good(bench, way)
        bench.end()

    def test_a_damaged_export_does_no_harm(self, bench: Workbench) -> None:
        """With a byte of an export changed ``connect`` raises a fault of a kind that tells of the peer, or
        reaches the very peer that exported it."""
        way = bench.pair()
        export = way.far.channel.export()
        step = max(1, len(export) // 24)
        for at in (*range(min(8, len(export))), *range(8, len(export), step)):
            damaged = export[:at] + bytes([export[at] ^ 0x15]) + export[at + 1 :]
            try:
                connection = way.near.channel.connect(damaged, way.near.deadline(0.2))
            except KVFerryError as error:
                expect_raised(error, f"connecting with byte {at} of an export changed", *_DAMAGED)
                continue
            self._still_good(bench, Way.between(way.near, way.far, connection))
            connection.close()
        self._still_good(bench, way)
        bench.end()

    def test_nobody_is_told_as_such(self, bench: Workbench) -> None:
        """Connecting to a channel that has closed raises, and what was open before stays good."""
        way, gone = bench.pair(), bench.open()
        export = gone.channel.export()
        gone.close()
        with pytest.raises(KVFerryError) as caught:
            way.near.channel.connect(export, way.near.deadline())
        expect_raised(caught.value, "connecting to a channel that was closed", *_GONE)
        self._still_good(bench, way)
        bench.end()

    @needs("reconnect")
    def test_a_restarted_peer_is_another(self, bench: Workbench) -> None:
        """When a peer closes and comes back in a new epoch, its old export is refused, operations over old
        connections fail with the kind ``IO`` and touch nothing of it, and a new connection is good."""
        way = bench.pair()
        before = way.far.channel.export()
        instance = way.far.context.instance
        way.far.close()
        again = bench.open(instance=instance)
        with pytest.raises(KVFerryError) as caught:
            way.near.channel.connect(before, way.near.deadline())
        expect_raised(caught.value, "connecting to an epoch that is over", *_GONE)
        over_old = Way.between(way.near, again, way.connection)
        for verb in bench.verbs:
            moves = over_old.moves(verb, [pattern(200, verb)])
            target = moves[0].local if verb == "read" else moves[0].remote
            memory = way.near.memory if verb == "read" else again.memory
            blank = memory.bytes_of(target)
            (result,) = over_old.wait(over_old.submit(verb, moves))
            expect_failed(result, ErrorKind.IO)
            assert memory.bytes_of(target) == blank, f"a {verb} over a connection to an epoch that is over"
        assert not way.connection.alive
        self._still_good(bench, bench.way(way.near, again))
        bench.end()

    def test_a_connection_can_be_made_in_no_time_or_not_at_all(self, bench: Workbench) -> None:
        """``connect`` with a deadline that has passed raises the kind ``TIMEOUT``, unless it need not wait;
        nothing is left of it."""
        near, far = bench.open(), bench.open()
        for _ in range(3):  # what is made once and kept may be made now
            self._once(bench, near, far)
        guard = LeakGuard()
        try:
            connection = near.channel.connect(far.channel.export(), near.context.clock() - 1)
        except KVFerryError as error:
            expect_raised(error, "connecting too late", ErrorKind.TIMEOUT)
        else:
            connection.close()
        assert guard.leaks() == []
        self._once(bench, near, far)
        bench.end()

    def test_many_connections_leave_nothing(self, bench: Workbench) -> None:
        """Connections that were made and closed hold nothing on either side."""
        near, far = bench.open(), bench.open()
        for _ in range(3):  # what is made once and kept may be made now
            self._once(bench, near, far)
        guard = LeakGuard()
        for _ in range(20):
            self._once(bench, near, far)
        assert guard.leaks() == []
        bench.end()

    def _once(self, bench: Workbench, near: Side, far: Side) -> None:
        way = bench.way(near, far)
        self._still_good(bench, way)
        way.connection.close()

    def _still_good(self, bench: Workbench, way: Way) -> None:
        for verb in bench.verbs:
            (result,) = way.attempt(verb, [pattern(64, verb)])
            assert result.status is TransferStatus.DONE, str(result.error)
