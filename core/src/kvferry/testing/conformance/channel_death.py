"""Laws about peers in processes of their own, which are killed, stopped and started again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from kvferry.api import ErrorKind, KVFerryError, TransferStatus
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.channel_bytes import SIZES
from kvferry.testing.conformance.channel_driver import Lane, Side, expect_failed, expect_raised, pattern, told
from kvferry.testing.conformance.channel_process import PeerProcess, soon
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench
from kvferry.testing.guarded import BLANK
from kvferry.testing.leaks import LeakGuard

StartPeer = Callable[..., PeerProcess]

_STOPPED_SECONDS = 0.4
"""The deadline of operations with a peer that is stopped."""

_ENOUGH = 40
"""How many calls are under way when the peer is killed: more than can be done until then."""


class DeathLaws(ChannelSubject, kit=True):
    """What becomes of us when a process at the other end dies or stands still."""

    @pytest.fixture
    def start_peer(self, bench: Workbench) -> Iterator[StartPeer]:
        """Starts a peer whose channel is open; it is gone at the end of the test."""
        peers: list[PeerProcess] = []

        def start(instance: str = "peer") -> PeerProcess:
            peers.append(PeerProcess(bench.subject, bench.patience))
            peers[-1].open(instance, os.urandom(16), bench.memory_bytes)
            return peers[-1]

        yield start
        for peer in peers:
            peer.close()

    @needs("subject")
    def test_a_peer_in_another_process_is_as_good(self, bench: Workbench, start_peer: StartPeer) -> None:
        """Bytes arrive between processes, whichever of them asks."""
        side, peer = bench.open(), start_peer()
        lane = self._lane(side, peer)
        back = peer.connect(side.channel.export())
        for verb in bench.verbs:
            lane.expect(verb, [pattern(size, verb) for size in SIZES][: bench.limit])
            data = pattern(30_001, verb, "back")
            reading = verb == "read"
            ours = side.memory.take(data) if reading else side.memory.reserve(len(data))
            theirs = peer.memory.reserve(len(data)) if reading else peer.memory.take(data)
            assert peer.move(verb, back, theirs, ours.offset) == "DONE"
            assert side.memory.bytes_of(ours) == peer.memory.bytes_of(theirs) == data
            side.memory.settle(ours)
        assert peer.memory.trespasses() == []
        bench.end()

    @needs("subject")
    def test_a_killed_peer_is_gone(self, bench: Workbench, start_peer: StartPeer) -> None:
        """After SIGKILL between operations, later ones fail with the kind ``IO`` and soon, the connection is
        not alive, and nobody can be connected to; other peers stay good."""
        side, other, peer = bench.open(), bench.open(), start_peer()
        lane, kept = self._lane(side, peer), bench.way(side, other)
        for verb in bench.verbs:
            lane.expect(verb, [pattern(1000, verb)])
        prepared = {verb: lane.moves(verb, [pattern(2000, verb)]) for verb in bench.verbs}
        peer.kill()
        lane.gone = True
        for verb, moves in prepared.items():
            ticket = lane.submit(verb, moves)
            assert ticket.wait(bench.grace), f"the peer is dead, and a {verb} goes on"
            for result in lane.finish(verb, ticket, moves):
                expect_failed(result, ErrorKind.IO)
        assert soon(lambda: not lane.connection.alive, bench.grace)
        with pytest.raises(KVFerryError) as caught:
            side.channel.connect(peer.exported, side.deadline())
        expect_raised(caught.value, "connecting to a dead peer", ErrorKind.IO, ErrorKind.PROTOCOL)
        for verb in bench.verbs:
            kept.expect(verb, [pattern(1000, verb)])
        bench.end()

    @needs("subject")
    def test_a_peer_killed_in_the_middle_ends_what_is_under_way(
        self, bench: Workbench, start_peer: StartPeer
    ) -> None:
        """After SIGKILL during operations, each was done or fails with the kind ``IO``, soon; what is
        ``DONE`` has the right bytes, and nothing is written afterwards."""
        side = bench.open()
        for verb in bench.verbs:
            peer = start_peer()
            lane = self._lane(side, peer)
            moves = lane.moves(
                verb, [pattern(200_000, verb, number) for number in range(min(10, bench.limit))]
            )
            under_way = [lane.submit(verb, moves) for _ in range(_ENOUGH)]
            peer.kill()
            lane.gone = True
            end = time.monotonic() + bench.grace
            done = set()
            for ticket in under_way:
                assert ticket.wait(end - time.monotonic()), f"the peer is dead, and a {verb} goes on"
                for number, result in enumerate(ticket.results):
                    if result.error is None:
                        done.add(number)
                    else:
                        expect_failed(result, ErrorKind.IO)
            for number, move in enumerate(moves):
                arrived = side.memory.bytes_of(move.local) == move.data
                assert arrived or number not in done, f"a {verb} is DONE with other bytes"
                side.memory.settle(move.local, scribble=True)
        bench.end()

    @needs("subject")
    def test_a_stopped_peer_costs_no_more_than_the_deadline(
        self, bench: Workbench, start_peer: StartPeer
    ) -> None:
        """While the peer is stopped, operations are done or fail soon after their deadline, with the kind
        ``TIMEOUT`` or ``IO``; when it goes on, nothing comes of them: neither are our spans written, nor
        those of the peer."""
        side, peer = bench.open(), start_peer()
        for verb in bench.verbs:
            lane = self._lane(side, peer)
            lane.expect(verb, [pattern(1000, verb)])
            calls = [lane.moves(verb, [pattern(90_000, verb, number)]) for number in range(6)]
            peer.stop()
            under_way = [lane.submit(verb, moves, side.deadline(_STOPPED_SECONDS)) for moves in calls]
            end = time.monotonic() + _STOPPED_SECONDS + bench.grace
            for ticket in under_way:
                assert ticket.wait(end - time.monotonic()), f"a {verb} waits beyond its deadline"
            left = max(0.0, end - bench.grace - time.monotonic())
            time.sleep(left)  # what failed at once may be applied until its deadline
            # Our memory is settled while the peer stands still, so whatever comes later shows.
            results = [(move, ticket.results[0]) for (move,), ticket in zip(calls, under_way, strict=True)]
            for move, result in results:
                arrived = side.memory.bytes_of(move.local) == move.data
                assert verb == "write" or result.error is not None or arrived, "DONE with other bytes"
                side.memory.settle(move.local, scribble=True)
            peer.go_on()
            self._settled(bench, side, peer)
            for move, result in results:
                if result.error is not None:
                    expect_failed(result, ErrorKind.TIMEOUT, ErrorKind.IO)
                if verb == "write":
                    untouched = bytes([BLANK]) * len(move.data)
                    expected = move.data if result.error is None else untouched
                    assert peer.memory.bytes_of(move.remote) == expected, (
                        f"{told([result])}, and the peer's memory says otherwise once it goes on"
                    )
            lane.connection.close()
        bench.end()

    @needs("subject")
    def test_connecting_to_a_stopped_peer_ends_at_the_deadline(
        self, bench: Workbench, start_peer: StartPeer
    ) -> None:
        """``connect`` to a peer that does not answer raises the kind ``TIMEOUT`` or ``IO``, soon after its
        deadline, unless it needs no answer; afterwards the peer can be connected to."""
        side, peer = bench.open(), start_peer()
        peer.stop()
        began = time.monotonic()
        try:
            side.channel.connect(peer.exported, side.deadline(_STOPPED_SECONDS)).close()
        except KVFerryError as error:
            expect_raised(error, "connecting to a stopped peer", ErrorKind.TIMEOUT, ErrorKind.IO)
        assert time.monotonic() - began < _STOPPED_SECONDS + bench.grace
        peer.go_on()
        self._settled(bench, side, peer)
        bench.end()

    @needs("subject")
    def test_closing_does_not_wait_for_a_stopped_peer(self, bench: Workbench, start_peer: StartPeer) -> None:
        """``close`` ends everything although the peer does not answer: operations with it have failed with
        the kind ``CLOSED``, or were done."""
        peer = start_peer()
        for verb in bench.verbs:
            side = bench.open()
            lane = self._lane(side, peer)
            moves = lane.moves(verb, [pattern(90_000, verb)])
            peer.stop()
            ticket = lane.submit(verb, moves)
            side.channel.close(side.deadline(bench.grace))
            assert ticket.done, "close returned and left a ticket open"
            (result,) = ticket.results
            if result.error is not None:
                expect_failed(result, ErrorKind.CLOSED)
            peer.go_on()
        bench.end()

    @needs("subject", "reconnect")
    def test_a_peer_started_again_is_another(self, bench: Workbench, start_peer: StartPeer) -> None:
        """A peer that was killed and started again, with the same instance, is not reached over what was
        known of it before, and can be connected to anew."""
        side, peer = bench.open(), start_peer("same")
        lane = self._lane(side, peer)
        for verb in bench.verbs:
            lane.expect(verb, [pattern(500, verb)])
        peer.kill()
        again = start_peer("same")
        old = Lane(side, again.memory, lane.connection)
        for verb in bench.verbs:
            moves = old.moves(verb, [pattern(700, verb)])
            target = side.memory if verb == "read" else again.memory
            place = moves[0].local if verb == "read" else moves[0].remote
            before = target.bytes_of(place)
            (result,) = old.wait(old.submit(verb, moves))
            expect_failed(result, ErrorKind.IO)
            assert target.bytes_of(place) == before, f"a failed {verb} touched the peer's successor"
        with pytest.raises(KVFerryError) as caught:
            side.channel.connect(peer.exported, side.deadline())
        expect_raised(caught.value, "connecting to an epoch that is over", ErrorKind.IO, ErrorKind.PROTOCOL)
        fresh = self._lane(side, again)
        for verb in bench.verbs:
            fresh.expect(verb, [pattern(500, verb, "again")])
        bench.end()

    @needs("subject")
    def test_a_peer_that_dies_while_we_serve_it_leaves_nothing(
        self, bench: Workbench, start_peer: StartPeer
    ) -> None:
        """When a peer is killed in the middle of its own operations with our memory, the memory is left
        alone soon after, others are served, and nothing is held for it any more."""
        side, other = bench.open(), bench.open()
        peers = [start_peer() for _ in bench.verbs]
        for number in range(3):  # what is made once and kept may be made now
            self._served(bench, side, other, number)
        guard = LeakGuard()
        for verb, peer in zip(bench.verbs, peers, strict=True):
            connection = peer.connect(side.channel.export())
            data = pattern(150_000, verb)
            ours = side.memory.take(data)
            peer.move_for_ever(verb, connection, peer.memory.take(data), ours.offset)
            self._served(bench, side, other, "meanwhile")
            peer.kill()
            assert soon(lambda: guard.leaks(settle_seconds=0.0) == [], bench.grace), "\n".join(guard.leaks())
            side.memory.settle(ours, scribble=True)
            self._served(bench, side, other, "afterwards")
        bench.end()

    def _served(self, bench: Workbench, side: Side, other: Side, when: object) -> None:
        """Another peer reads and writes our memory, over a connection of its own."""
        way = bench.way(other, side)
        for verb in bench.verbs:
            way.expect(verb, [pattern(5000, verb, when)])
        way.connection.close()

    def _lane(self, side: Side, peer: PeerProcess) -> Lane:
        return Lane(side, peer.memory, side.channel.connect(peer.exported, side.deadline()))

    def _settled(self, bench: Workbench, side: Side, peer: PeerProcess) -> None:
        """The peer works again, and had time for whatever it was late with."""
        fresh = self._lane(side, peer)
        for verb in bench.verbs:
            for number in range(5):
                (result,) = fresh.attempt(verb, [pattern(100, verb, number)])
                assert result.status is TransferStatus.DONE, told([result])
        time.sleep(0.1)
        fresh.connection.close()
