"""Laws about registering memory and taking it back."""

from __future__ import annotations

import pytest

from kvferry.api import (
    ChannelSpec,
    ErrorKind,
    KVFerryError,
    MemoryKind,
    RemoteOp,
    Span,
    TransferStatus,
)
from kvferry.testing.conformance.base import needs
from kvferry.testing.conformance.channel_driver import Way, expect_failed, expect_raised, pattern, poke, told
from kvferry.testing.conformance.channel_subject import ChannelSubject, Workbench
from kvferry.testing.guarded import MEMORY, GuardedMemory

_SMALL = 1 << 16
_ROUNDS = 40
_BIG = 1 << 20
_OTHER_USE = b"\xc3"
"""What the memory holds once its owner has another use for it."""


class RegistrationLaws(ChannelSubject, kit=True):
    """What peers, and operations of ours, can name."""

    def test_a_connection_shows_what_the_peer_registered(self, bench: Workbench) -> None:
        """``regions()`` of a connection names the regions that were registered before it was made, with
        their lengths and kinds."""
        near, far = bench.open_bare(), bench.open_bare()
        for number in range(3):
            far.register(f"arena-{number}", _SMALL + number)
        regions = bench.way(near, far).connection.regions()
        assert set(regions) == {"arena-0", "arena-1", "arena-2"}
        for number in range(3):
            region = regions[f"arena-{number}"]
            told_of = (region.name, region.length, region.kind)
            assert told_of == (f"arena-{number}", _SMALL + number, MemoryKind.HOST)
        bench.end()

    def test_any_name_will_do(self, bench: Workbench) -> None:
        """Regions may bear every text of some length as their names."""
        names = ("a", "with space", "päge/ж/字", 'quo"te', "new\nline", "n" * 200)
        near, far = bench.open(), bench.open_bare()
        for name in names:
            far.register(name, _SMALL)
        way = bench.way(near, far)
        assert set(way.connection.regions()) == set(names)
        for number, memory in enumerate(far.memories):
            self._moves(bench, way, memory, pattern(100, number))
        bench.end()

    @needs("register_after_connect")
    def test_memory_may_be_registered_after_connecting(self, bench: Workbench) -> None:
        """What either side registers while a connection is there can be named over it."""
        near, far = bench.open_bare(), bench.open_bare()
        way = bench.way(near, far)
        near.channel.register(near.memory.region)
        memory = far.register("late", _SMALL)
        self._moves(bench, way, memory, pattern(3000))
        bench.end()

    def test_a_name_is_registered_once(self, bench: Workbench) -> None:
        """A second region of a name is refused with the kind ``INTERNAL``, and the first stays good."""
        way = bench.pair()
        for side in (way.near, way.far):
            with pytest.raises(KVFerryError) as caught:
                side.register(MEMORY, _SMALL)
            expect_raised(caught.value, "registering a name twice", ErrorKind.INTERNAL)
        for verb in bench.verbs:
            way.expect(verb, [pattern(_SMALL + 5, verb)])
        bench.end()

    def test_a_region_that_is_not_there_can_be_deregistered(self, bench: Workbench) -> None:
        """Taking back what was never registered, or twice, is no error."""
        side = bench.open()
        side.channel.deregister("nothing")
        side.channel.deregister(MEMORY)
        side.channel.deregister(MEMORY)
        bench.end()

    def test_what_the_peer_took_back_cannot_be_named(self, bench: Workbench) -> None:
        """After the peer's ``deregister`` operations over old and new connections fail with the kind
        ``PROTOCOL``, and other regions stay good."""
        near, far = bench.open(), bench.open()
        memory = far.register("arena", _SMALL)
        way = bench.way(near, far)
        self._moves(bench, way, memory, pattern(10))
        far.channel.deregister("arena")
        self._unknown(bench, way, "arena")
        again = bench.way(near, far)
        assert set(again.connection.regions()) == {MEMORY}
        self._unknown(bench, again, "arena")
        for verb in bench.verbs:
            way.expect(verb, [pattern(500, verb)])
        bench.end()

    def test_what_we_took_back_cannot_be_named(self, bench: Workbench) -> None:
        """After ``deregister`` our own operations that name the region fail with the kind ``PROTOCOL``."""
        way = bench.pair()
        remote = way.far.memory.take(pattern(100))
        way.near.channel.deregister(MEMORY)
        for verb in bench.verbs:
            operation = RemoteOp(Span(MEMORY, 0, 100), MEMORY, remote.offset)
            (result,) = way.wait(way.near.submit(verb, way.connection, [operation]))
            expect_failed(result, ErrorKind.PROTOCOL)
        way.far.memory.settle(remote)
        bench.end()

    def test_memory_that_we_took_back_is_left_alone(self, bench: Workbench) -> None:
        """When ``deregister`` returns, our operations that name the region have failed or were done: it is
        neither written nor read any more."""
        for verb in bench.verbs:
            self._taken_back_under_way(bench, verb, by_peer=False)
        bench.end()

    def test_memory_that_the_peer_took_back_is_left_alone(self, bench: Workbench) -> None:
        """When ``deregister`` returns, operations of peers that name the region have failed or were done: it
        is neither written nor read any more."""
        for verb in bench.verbs:
            self._taken_back_under_way(bench, verb, by_peer=True)
        bench.end()

    def test_a_name_may_be_registered_again_with_other_memory(self, bench: Workbench) -> None:
        """What a name means is what was registered last: a new connection finds it, and an old one finds it
        or fails. The memory that had the name before is not touched."""
        near, far = bench.open(), bench.open_bare()
        first = far.register("arena", _SMALL)
        way = bench.way(near, far)
        self._moves(bench, way, first, pattern(100, 1))
        far.channel.deregister("arena")
        kept = pattern(_SMALL, "kept")
        poke(first, 0, kept)
        second = far.register("arena", 4 * _SMALL)
        for verb in bench.verbs:  # where the old memory has bytes too
            place = second.take(pattern(300, verb))
            local = near.memory.take(pattern(300, "ours"))
            operation = RemoteOp(local, "arena", place.offset)
            (result,) = way.wait(near.submit(verb, way.connection, [operation]))
            if result.error is None:
                assert near.memory.bytes_of(local) == second.bytes_of(place), f"{verb} took other memory"
        self._moves(bench, bench.way(near, far), second, pattern(_SMALL + 100, 2))
        assert first.bytes_of(Span("arena", 0, _SMALL)) == kept, "memory that was given back was written"
        far.memories.remove(first)
        bench.end()

    def test_registering_and_taking_back_balance(self, bench: Workbench) -> None:
        """However often a region is registered and taken back, nothing runs out."""
        near, far = bench.open_bare(), bench.open_bare()
        limit = bench.capabilities.max_registered_bytes
        near.channel.register(near.memory.region)
        size = min(_BIG, limit) if limit is not None else _BIG
        memory = GuardedMemory("arena", size)
        for _ in range(_ROUNDS):
            far.channel.register(memory.region)
            far.channel.deregister("arena")
        far.channel.register(memory.region)
        far.memories.append(memory)
        self._moves(bench, bench.way(near, far), memory, pattern(200))
        bench.end()

    @needs("max_registered_bytes")
    def test_the_claimed_limit_is_the_limit(self, bench: Workbench) -> None:
        """``max_registered_bytes`` can be registered together; one byte more is refused with the kind
        ``CAPACITY`` and the number, and can be registered after something was taken back."""
        limit = bench.capabilities.max_registered_bytes
        assert limit is not None
        side = bench.open_bare()
        half = limit // 2
        side.register("first", half)
        side.register("second", limit - half)
        with pytest.raises(KVFerryError) as caught:
            side.register("third", 1)
        expect_raised(caught.value, "registering beyond the limit", ErrorKind.CAPACITY)
        assert str(limit) in str(caught.value), f"the error does not say how much is allowed: {caught.value}"
        peer = bench.open_bare()
        assert set(bench.way(peer, side).connection.regions()) == {"first", "second"}
        side.channel.deregister("first")
        side.register("third", half)
        bench.end()

    def test_memory_of_a_kind_that_is_not_claimed_is_refused(
        self, bench: Workbench, spec: ChannelSpec
    ) -> None:
        """A region of another kind than those of the claim ``memory`` is refused with the kind
        ``UNSUPPORTED``."""
        side = bench.open()
        for kind in set(MemoryKind) - spec.capabilities.memory:
            memory = GuardedMemory("strange", _SMALL)
            region = memory.region
            with pytest.raises(KVFerryError) as caught:
                side.channel.register(
                    type(region)(name="strange", address=region.address, length=8, kind=kind)
                )
            expect_raised(caught.value, f"registering memory of the kind {kind.name}", ErrorKind.UNSUPPORTED)
        bench.end()

    def _taken_back_under_way(self, bench: Workbench, verb: str, *, by_peer: bool) -> None:
        way = bench.pair()
        count = min(8, bench.limit)
        calls = [way.moves(verb, [pattern(_BIG // 8, call, n) for n in range(count)]) for call in range(8)]
        moves = [move for call in calls for move in call]
        under_way = [way.submit(verb, call) for call in calls]
        owner, other = (way.far, way.near) if by_peer else (way.near, way.far)
        owner.channel.deregister(MEMORY)
        owned = [move.remote if by_peer else move.local for move in moves]
        others = [move.local if by_peer else move.remote for move in moves]
        at_return = [owner.memory.bytes_of(span) for span in owned]
        for span in owned:
            poke(owner.memory, span.offset, _OTHER_USE * span.length)
        results = [result for ticket in under_way for result in way.wait(ticket)]
        into_owner = (verb == "write") == by_peer
        for move, result, before, span in zip(moves, results, at_return, others, strict=True):
            if result.error is not None:
                expect_failed(result, ErrorKind.PROTOCOL)
                continue
            arrived = before if into_owner else other.memory.bytes_of(span)
            assert arrived == move.data, f"a {verb} is DONE that was not when deregister returned"
        for span in owned:
            assert owner.memory.bytes_of(span) == _OTHER_USE * span.length, (
                f"a {verb} was still writing after deregister had returned"
            )

    def _moves(self, bench: Workbench, way: Way, memory: GuardedMemory, data: bytes) -> None:
        """These bytes go into this memory of the peer and come back from it."""
        for verb in bench.verbs:
            reading = verb == "read"
            remote = memory.take(data) if reading else memory.reserve(len(data))
            local = way.near.memory.reserve(len(data)) if reading else way.near.memory.take(data)
            operation = RemoteOp(local, memory.name, remote.offset)
            (result,) = way.wait(way.near.submit(verb, way.connection, [operation]))
            assert result.status is TransferStatus.DONE, f"{verb} of {memory.name!r}: {told([result])}"
            assert memory.bytes_of(remote) == way.near.memory.bytes_of(local) == data
            memory.settle(remote)
            way.near.memory.settle(local)

    def _unknown(self, bench: Workbench, way: Way, name: str) -> None:
        local = way.near.memory.take(b"x" * 50)
        for verb in bench.verbs:
            (result,) = way.wait(way.near.submit(verb, way.connection, [RemoteOp(local, name, 100)]))
            expect_failed(result, ErrorKind.PROTOCOL)
        way.near.memory.settle(local)
