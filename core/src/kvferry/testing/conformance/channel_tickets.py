"""Laws about time: tickets end once, closing ends everything, and nothing waits for ever."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from kvferry.api import ErrorKind, KVFerryError, RemoteOp, Span
from kvferry.testing.conformance.channel_driver import Move, Side, Way, expect_failed, expect_raised, pattern
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench
from kvferry.testing.guarded import MEMORY
from kvferry.testing.leaks import LeakGuard

_BIG = 3 << 20


class TicketLaws(ChannelSubject, kit=True):
    """Submitting, waiting, cancelling, opening and closing."""

    def test_every_ticket_ends_exactly_once(self, bench: Workbench) -> None:
        """Each ticket is completed once, and its listener hears of it once, whatever the operations do."""
        way = bench.pair()
        for verb in bench.verbs:
            for number in range(20):
                way.expect(verb, [pattern(500, verb, number)])
            bad = RemoteOp(Span(MEMORY, 0, 10), "nothing", 0)
            way.wait(way.near.submit(verb, way.connection, [bad]))
            way.attempt(verb, [])
        bench.end()

    def test_many_tickets_may_be_under_way(self, bench: Workbench) -> None:
        """A caller that does not wait in between gets every result all the same."""
        way = bench.pair()
        for verb in bench.verbs:
            calls = [way.moves(verb, [pattern(800, verb, number)]) for number in range(60)]
            under_way = [way.submit(verb, moves) for moves in calls]
            for moves, ticket in zip(calls, under_way, strict=True):
                way.finish_done(verb, ticket, moves)
        bench.end()

    def test_memory_is_left_alone_once_a_ticket_ended(self, bench: Workbench) -> None:
        """A span that was read into keeps its bytes, and one that was written from may change at once
        without changing what arrived."""
        way = bench.pair()
        for turn in range(10):
            for verb in bench.verbs:  # sources are scribbled over as soon as the ticket ended
                way.expect(
                    verb, [pattern(30_000, verb, turn, number) for number in range(min(4, bench.limit))]
                )
        bench.end()

    def test_a_cancelled_ticket_ends_and_tells_the_truth(self, bench: Workbench) -> None:
        """After cancelling, each operation either happened or failed with the kind ``CANCELLED``, and
        nothing is written afterwards."""
        way = bench.pair()
        for verb in bench.verbs:
            calls = [way.moves(verb, [pattern(200_000, verb, call)]) for call in range(16)]
            under_way = [way.submit(verb, moves) for moves in calls]
            for ticket in under_way:
                ticket.cancel()
            for moves, ticket in zip(calls, under_way, strict=True):
                for result in way.finish(verb, ticket, moves):
                    if result.error is not None:
                        expect_failed(result, ErrorKind.CANCELLED)
            way.expect(verb, [pattern(1000, verb)])
        bench.end()

    def test_cancelling_ends_what_has_not_begun(self, bench: Workbench) -> None:
        """Of much work that is cancelled at once, not all is done first."""
        way = bench.pair()
        count = min(bench.limit, 8)
        for verb in bench.verbs:
            source, target = (way.far, way.near) if verb == "read" else (way.near, way.far)
            from_span, to_span = source.memory.take(pattern(_BIG)), target.memory.reserve(_BIG)
            local, remote = (to_span, from_span) if verb == "read" else (from_span, to_span)
            operations = [RemoteOp(local, MEMORY, remote.offset)] * count
            # On a machine that is busy everything may be done before the first ticket is cancelled.
            assert any(self._some_cancelled(way, verb, operations, 128 // count) for _ in range(5)), (
                f"128 {verb}s of {_BIG} bytes were cancelled at once, and every one was done first"
            )
        bench.end()

    def test_cancelling_after_the_end_changes_nothing(self, bench: Workbench) -> None:
        """Results stand once they are told."""
        way = bench.pair()
        for verb in bench.verbs:
            moves = way.moves(verb, [pattern(100, verb)])
            ticket = way.submit(verb, moves)
            before = way.finish(verb, ticket, moves)
            ticket.cancel()
            assert ticket.results == before
            way.expect(verb, [pattern(100, verb, "again")])
        bench.end()

    def test_a_deadline_that_passed_is_told(self, bench: Workbench) -> None:
        """What comes too late fails with the kind ``TIMEOUT``, and no byte moves: the peer's memory may have
        another use by then."""
        way = bench.pair()
        late = way.near.context.clock() - 1.0
        for verb in bench.verbs:
            contents = [pattern(300, verb, number) for number in range(min(4, bench.limit))]
            moves = way.moves(verb, contents)
            before = [self._at_destination(way, verb, move) for move in moves]
            results = way.wait(way.submit(verb, moves, late))
            for result in results:
                expect_failed(result, ErrorKind.TIMEOUT)
            assert [self._at_destination(way, verb, move) for move in moves] == before
            way.expect(verb, contents)
        bench.end()

    def test_closing_ends_every_ticket(self, bench: Workbench) -> None:
        """When ``close`` returns, nothing is under way: what did not happen failed with the kind
        ``CLOSED``, and nothing is written or completed afterwards, on either side."""
        for verb in bench.verbs:
            way = bench.pair()
            calls = [way.moves(verb, [pattern(300_000, verb, number)]) for number in range(12)]
            under_way = [way.submit(verb, moves) for moves in calls]
            way.near.close()
            ends = []
            for moves, ticket in zip(calls, under_way, strict=True):
                assert ticket.done, "close returned and left a ticket open"
                for result in way.finish(verb, ticket, moves):
                    if result.error is not None:
                        expect_failed(result, ErrorKind.CLOSED)
                for move, result in zip(moves, ticket.results, strict=True):
                    if verb == "write" and result.error is not None:
                        way.far.memory.settle(move.remote)  # the connection is closed too
                ends.append(ticket.results)
            way.far.close()
            assert [ticket.results for ticket in under_way] == ends
        bench.end()

    def test_a_peer_that_closes_ends_our_operations(self, bench: Workbench) -> None:
        """When the peer closes in the middle of them, operations happened or fail with the kind ``IO``, as
        do all later ones, and the connection is not alive any more."""
        for verb in bench.verbs:
            way = bench.pair()
            calls = [way.moves(verb, [pattern(300_000, verb, number)]) for number in range(12)]
            under_way = [way.submit(verb, moves) for moves in calls]
            way.far.close()
            for moves, ticket in zip(calls, under_way, strict=True):
                for result in way.finish(verb, ticket, moves):
                    if result.error is not None:
                        expect_failed(result, ErrorKind.IO)
            way.expect_all_failed(verb, [pattern(100)], ErrorKind.IO)
            assert not way.connection.alive
        bench.end()

    def test_closing_twice_is_the_same_as_once(self, bench: Workbench) -> None:
        """``close`` is idempotent."""
        side = bench.open()
        side.close()
        side.close()
        bench.end()

    def test_what_was_never_open_can_be_closed(self, bench: Workbench) -> None:
        """``close`` needs no ``open``."""
        bench.make().close()

    def test_closing_gives_everything_back(self, bench: Workbench) -> None:
        """No thread, descriptor or shared memory is left."""
        guard = LeakGuard()
        way = bench.pair()
        back = bench.way(way.far, way.near)
        for verb in bench.verbs:
            way.expect(verb, [pattern(70_000, verb)])
            back.expect(verb, [pattern(70_000, verb)])
        bench.end()
        assert guard.leaks() == []

    def test_only_an_open_channel_takes_work(self, bench: Workbench) -> None:
        """Before ``open`` and after ``close`` every call is refused with the kind ``CLOSED``."""
        way = bench.pair()
        export = way.far.channel.export()
        closed = bench.pair()
        closed.near.close()
        self._refuses(bench, bench.make(), way, export)
        self._refuses(bench, closed.near, closed, export)
        bench.end()

    def test_opening_twice_is_refused(self, bench: Workbench) -> None:
        """A second ``open`` raises, and the first stays good."""
        way = bench.pair()
        with pytest.raises(KVFerryError):
            way.near.channel.open(way.near.context)
        for verb in bench.verbs:
            way.expect(verb, [pattern(100, verb)])
        bench.end()

    def _at_destination(self, way: Way, verb: str, move: Move) -> bytes:
        if verb == "read":
            return way.near.memory.bytes_of(move.local)
        return way.far.memory.bytes_of(move.remote)

    def _some_cancelled(self, way: Way, verb: str, operations: Sequence[RemoteOp], calls: int) -> bool:
        under_way = [way.near.submit(verb, way.connection, operations) for _ in range(calls)]
        for ticket in reversed(under_way):
            ticket.cancel()
        results = [result for ticket in under_way for result in way.wait(ticket)]
        failed = [result for result in results if result.error is not None]
        for result in failed:
            expect_failed(result, ErrorKind.CANCELLED)
        return bool(failed)

    def _refuses(self, bench: Workbench, side: Side, way: Way, export: bytes) -> None:
        operations = [RemoteOp(Span(MEMORY, 0, 8), MEMORY, 0)]
        calls: list[tuple[str, Callable[[], Any]]] = [
            ("export", side.channel.export),
            ("connect", lambda: side.channel.connect(export, side.deadline())),
            ("register", lambda: side.channel.register(side.memory.region)),
        ]
        for verb in bench.verbs:
            calls += [(verb, functools.partial(side.submit, verb, way.connection, operations))]
        for name, call in calls:
            with pytest.raises(KVFerryError) as caught:
                call()
            # Before it was opened it has no connection, so whatever it is given is another's too.
            other = (ErrorKind.INTERNAL,) if name in bench.verbs and way.near is not side else ()
            expect_raised(caught.value, name, ErrorKind.CLOSED, *other)
