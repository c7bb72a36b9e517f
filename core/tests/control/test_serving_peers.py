"""What peers are lent stays as it is, as long as it is lent and no longer."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pytest
from attrs import frozen
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvferry.api import Answer, Grant, PeerAsk, PeerId, Refusal, Refused
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.outcomes import ChunkWrite, WriteOutcome
from kvferry.control.serving import Asking, Serving, ServingSettings

CHUNK, BLOCK = 8, 4
SLOTS = 12
LEASE, LONGEST = 10.0, 25.0
PEERS = (PeerId("a", b"1" * 16), PeerId("a", b"2" * 16), PeerId("b", b"1" * 16))


def key(name: str, depth: int) -> bytes:
    return hashlib.sha256(f"{name}/{depth}".encode()).digest()


def half(name: str, depth: int) -> bytes:
    return hashlib.sha256(f"{name}/{depth}/half".encode()).digest()


def writes(name: str, count: int, *, tail: bool = False) -> list[ChunkWrite]:
    parents = [None, *(key(name, depth) for depth in range(count))]
    made = [
        ChunkWrite(key(name, depth), parents[depth], depth, CHUNK, ((half(name, depth), BLOCK),))
        for depth in range(count)
    ]
    if tail:
        made.append(ChunkWrite(half(name, count), parents[count], count, BLOCK))
    return made


def ask(number: int, name: str, count: int, *, skip: int = 0, tail: bool = False) -> PeerAsk:
    return PeerAsk(
        number=number,
        keys=tuple(key(name, depth) for depth in range(count)),
        tails=((half(name, count), BLOCK),) if tail else (),
        skip=skip,
        limit_tokens=count * CHUNK + (BLOCK if tail else 0),
    )


def make_manager(slots: int = SLOTS) -> CacheManager:
    manager = CacheManager(
        capacity=slots,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=3.0,
        write_seconds=3.0,
    )
    manager.grow(slots)
    return manager


def store(manager: CacheManager, items: Sequence[ChunkWrite], now: float = 0.0) -> dict[int, bytes]:
    """The slots that were filled, with what is in them."""
    answer = manager.reserve("writer", "", items, now)
    granted = {
        number: item.slot for number, item in enumerate(answer.items) if item.outcome is WriteOutcome.GRANTED
    }
    if answer.id is not None:
        manager.complete(answer.id, granted)
    return {slot: items[number].digest for number, slot in granted.items()}


def finish(asking: Asking, now: float) -> Answer | None:
    while asking.advance(now):
        pass
    return asking.answer


@frozen
class Held:
    peer: PeerId
    number: int
    grant: Grant
    first: float
    until: float


class Askers(RuleBasedStateMachine):
    """Peers that ask an instance which stores. Whoever derives from it looks up what was asked, and says what
    becomes of that."""

    def __init__(self, manager: CacheManager, serving: Serving) -> None:
        super().__init__()
        self.manager = manager
        self.serving = serving
        self.now = 0.0
        self.content: dict[int, bytes] = {}
        self.held: list[Held] = []
        self.open: list[tuple[Asking, PeerId, PeerAsk]] = []
        self.numbers = dict.fromkeys(PEERS, 0)
        self.ended: set[tuple[PeerId, int]] = set()

    @initialize()
    def has_something(self) -> None:
        for name in "xy":
            self.content |= store(self.manager, writes(name, 4, tail=True), self.now)

    @rule(name=st.sampled_from("xyz"), count=st.integers(1, 5), tail=st.booleans())
    def stores(self, name: str, count: int, tail: bool) -> None:
        self.content |= store(self.manager, writes(name, count, tail=tail), self.now)

    @rule(
        peer=st.sampled_from(PEERS),
        name=st.sampled_from("xyz"),
        count=st.sampled_from([0, 1, 2, 3, 4, 4, 4, 5]),
        skip=st.sampled_from([0, 0, 1, 2]),
        tail=st.booleans(),
        at_once=st.booleans(),
    )
    def asks(self, peer: PeerId, name: str, count: int, skip: int, tail: bool, at_once: bool) -> None:
        self.numbers[peer] += 1
        wanted = ask(self.numbers[peer], name, count, skip=skip, tail=tail)
        self.open.append((self.serving.ask(peer, wanted, self.now), peer, wanted))
        if at_once:
            while self.look(*self.open[-1]):
                pass

    def look(self, asking: Asking, peer: PeerId, wanted: PeerAsk) -> bool:
        """Go on with one ask; whether there is more to do for it."""
        raise NotImplementedError


class Lending(Askers):
    """Peers whose messages come late, twice or never, beside an instance that stores, drops and clears."""

    def __init__(self) -> None:
        manager = make_manager()
        made = ServingSettings(lease_seconds=LEASE, longest_seconds=LONGEST, most_leases=4, share=0.5)
        super().__init__(manager, Serving(manager, made))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), again=st.booleans())
    def looks_further(self, data: st.DataObject, again: bool) -> None:
        asking, peer, wanted = data.draw(st.sampled_from(self.open))
        if again:  # the message came twice
            twin = finish(self.serving.ask(peer, wanted, self.now), self.now)
            if (peer, wanted.number) in self.ended or isinstance(asking.answer, Refused):
                assert twin == Refused(wanted.number, Refusal.ENDED)
            else:
                assert twin == asking.answer
        self.look(asking, peer, wanted)

    def look(self, asking: Asking, peer: PeerId, wanted: PeerAsk) -> bool:
        if asking.advance(self.now):
            return True
        self.open.remove((asking, peer, wanted))
        answer = asking.answer
        assert answer is not None
        assert answer.number == wanted.number
        if (peer, wanted.number) in self.ended:
            assert isinstance(answer, Refused)
        if isinstance(answer, Grant):
            assert len(answer.chunks) == len(answer.slots) > 0
            wants = [*wanted.keys[wanted.skip :], *(digest for digest, _ in wanted.tails)]
            for chunk, digest in zip(answer.chunks, wants, strict=False):
                names = {chunk.digest, *(alias for alias, _ in chunk.aliases)}
                assert digest in names
            assert answer.tokens <= wanted.limit_tokens
            assert 0 < answer.seconds <= LEASE
            self.held.append(Held(peer, wanted.number, answer, self.now, self.now + answer.seconds))
        return False

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renews(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        seconds = self.serving.renew(held.peer, held.number, self.now)
        assert (seconds > 0) == (held.until > self.now)
        until = self.now + seconds
        assert until <= held.first + LONGEST
        if seconds:
            assert until >= held.until
            self.held[self.held.index(held)] = Held(held.peer, held.number, held.grant, held.first, until)

    @rule(peer=st.sampled_from(PEERS), ahead=st.integers(-3, 1))
    def is_done(self, peer: PeerId, ahead: int) -> None:
        """With what it has, had, asks for, or will ask for."""
        number = max(1, self.numbers[peer] + ahead)
        self.serving.done(peer, number, self.now)
        self.ended.add((peer, number))
        self.numbers[peer] = max(self.numbers[peer], number)
        self.held = [each for each in self.held if (each.peer, each.number) != (peer, number)]

    @rule(name=st.sampled_from("xyz"), depth=st.integers(0, 4))
    def drops(self, name: str, depth: int) -> None:
        self.manager.drop([key(name, depth)])

    @rule(really=st.integers(0, 3).map(lambda number: number == 0))
    def clears(self, really: bool) -> None:
        if really:  # or there is seldom anything to lend
            self.manager.clear()

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire(self.now)
        self.serving.expire(self.now)
        self.held = [each for each in self.held if each.until > self.now]

    @invariant()
    def what_is_lent_stays_as_it_is(self) -> None:
        for held in self.held:
            for slot, chunk in zip(held.grant.slots, held.grant.chunks, strict=True):
                assert self.content[slot] == chunk.digest

    @invariant()
    def no_more_is_lent_than_may_be(self) -> None:
        assert self.serving.leases == len(self.held) <= 4
        assert self.manager.stats().leases >= len(self.held)
        assert self.serving.slots == sum(len(each.grant.slots) for each in self.held) <= SLOTS // 2
        self.serving.check()
        self.manager.check()

    def teardown(self) -> None:
        for asking, _, _ in self.open:
            finish(asking, self.now)
        self.now += LONGEST + 10.0
        self.manager.expire(self.now)
        self.serving.expire(self.now)
        assert self.serving.leases == self.serving.slots == self.manager.stats().leases == 0
        assert self.serving.next_deadline() == float("inf")


TestLending = Lending.TestCase
TestLending.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.fixture
def serving() -> Serving:
    manager = make_manager()
    store(manager, writes("x", 4, tail=True))
    return Serving(manager, ServingSettings(lease_seconds=LEASE, longest_seconds=LONGEST))


def test_a_peer_gets_what_it_lacks_tail_included(serving: Serving) -> None:
    manager = make_manager(40)
    filled = store(manager, writes("x", 4, tail=True))
    roomy = Serving(manager, ServingSettings(lease_seconds=LEASE))
    answer = finish(roomy.ask(PEERS[0], ask(1, "x", 4, skip=2, tail=True), 0.0), 0.0)
    assert isinstance(answer, Grant)
    assert [chunk.digest for chunk in answer.chunks] == [key("x", 2), key("x", 3), half("x", 4)]
    assert [filled[slot] for slot in answer.slots] == [chunk.digest for chunk in answer.chunks]
    assert (answer.tokens, answer.seconds) == (4 * CHUNK + BLOCK, LEASE)


def test_an_answer_that_was_lost_is_given_again_with_the_time_that_is_left(serving: Serving) -> None:
    first = finish(serving.ask(PEERS[0], ask(1, "x", 2), 0.0), 0.0)
    again = finish(serving.ask(PEERS[0], ask(1, "x", 2), 4.0), 4.0)
    assert isinstance(first, Grant)
    assert isinstance(again, Grant)
    assert again.slots == first.slots
    assert again.seconds == LEASE - 4.0
    assert serving.leases == 1


def test_an_ask_that_comes_after_its_end_is_refused_and_lends_nothing(serving: Serving) -> None:
    serving.done(PEERS[0], 7, 0.0)
    assert finish(serving.ask(PEERS[0], ask(7, "x", 2), 1.0), 1.0) == Refused(7, Refusal.ENDED)
    assert serving.leases == 0
    assert isinstance(finish(serving.ask(PEERS[1], ask(7, "x", 2), 1.0), 1.0), Grant)


def test_no_peer_can_hold_more_than_its_share_and_the_rest_is_a_miss_at_once(serving: Serving) -> None:
    assert isinstance(finish(serving.ask(PEERS[0], ask(1, "x", 3), 0.0), 0.0), Grant)
    assert finish(serving.ask(PEERS[2], ask(1, "x", 1), 0.0), 0.0) == Refused(1, Refusal.BUSY)
    serving.done(PEERS[0], 1, 1.0)
    assert isinstance(finish(serving.ask(PEERS[2], ask(2, "x", 1), 1.0), 1.0), Grant)


def test_a_peer_that_was_silent_for_long_is_forgotten(serving: Serving) -> None:
    serving.done(PEERS[0], 7, 0.0)
    serving.expire(2 * LONGEST + 1.0)
    answer = finish(serving.ask(PEERS[0], ask(1, "x", 2), 2 * LONGEST + 2.0), 2 * LONGEST + 2.0)
    assert isinstance(answer, Grant)
