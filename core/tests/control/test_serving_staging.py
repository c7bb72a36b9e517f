"""What peers are lent of the staging is what the first tier held, on every rank, and stays so."""

from __future__ import annotations

import itertools

from attrs import define, field
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from core.tests.control.test_serving_peers import (
    BLOCK,
    CHUNK,
    LEASE,
    LONGEST,
    PEERS,
    Askers,
    Held,
    ask,
    finish,
    half,
    key,
    make_manager,
    store,
    writes,
)
from kvferry.api import Answer, Grant, PeerAsk, PeerId, Refusal, Refused
from kvferry.control.manager import CacheManager
from kvferry.control.orders import CancelOrder, ItemFault, OrderResult, StageOrder
from kvferry.control.serving import Asking, Serving, ServingSettings

SLOTS = 10
STAGED = 6
RANKS = 2


@define(eq=False)
class Job:
    """What one rank makes of an order."""

    order: StageOrder
    rank: int
    digests: list[bytes]
    copied: int = 0
    cancelled: bool = False


@define(eq=False)
class UnderWay:
    jobs: list[Job]
    faults: dict[int, ItemFault] = field(factory=dict)


class Staging(Askers):
    """Ranks that copy as slowly as they like, beside an instance that evicts and peers that come and go."""

    def __init__(self) -> None:
        manager = make_manager(SLOTS)
        made = ServingSettings(
            lease_seconds=LEASE, longest_seconds=LONGEST, most_leases=4, share=0.8, staging_slots=STAGED
        )
        super().__init__(manager, Serving(manager, made, itertools.count(1).__next__))
        self.staged: list[dict[int, bytes]] = [{} for _ in range(RANKS)]
        self.waiting: dict[tuple[PeerId, int], PeerAsk] = {}
        """Whose answer follows."""
        self.orders: dict[int, UnderWay] = {}

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def looks_further(self, data: st.DataObject) -> None:
        self.look(*data.draw(st.sampled_from(self.open)))

    def look(self, asking: Asking, peer: PeerId, wanted: PeerAsk) -> bool:
        if asking.advance(self.now):
            return True
        self.open.remove((asking, peer, wanted))
        assert not isinstance(asking.answer, Grant), "nothing of it has been copied"
        if asking.answer is None:
            assert (peer, wanted.number) not in self.ended
            self.waiting[peer, wanted.number] = wanted
        self.takes_orders()
        return False

    @precondition(lambda self: self.waiting or self.held)
    @rule(data=st.data())
    def asks_again(self, data: st.DataObject) -> None:
        known = [*self.waiting, *((each.peer, each.number) for each in self.held)]
        peer, number = data.draw(st.sampled_from(known))
        answer = finish(self.serving.ask(peer, ask(number, "x", 1), self.now), self.now)
        if (peer, number) in self.waiting:
            assert answer is None, "it has one answer, and that follows"
            return
        (held,) = [each for each in self.held if (each.peer, each.number) == (peer, number)]
        assert isinstance(answer, Grant)
        assert (answer.slots, answer.region) == (held.grant.slots, "staging")
        assert answer.seconds == held.until - self.now

    def takes_orders(self) -> None:
        for order in self.serving.take_orders():
            if isinstance(order, CancelOrder):
                for job in self.orders[order.id].jobs:
                    job.cancelled = True
                continue
            digests = [self.content[slot] for slot in order.from_slots]
            jobs = [Job(order, rank, list(digests)) for rank in range(RANKS)]
            self.orders[order.id] = UnderWay(jobs)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), count=st.integers(1, 5))
    def a_rank_copies(self, data: st.DataObject, count: int) -> None:
        job = data.draw(st.sampled_from([job for each in self.orders.values() for job in each.jobs]))
        for _ in range(min(count, len(job.digests) - job.copied)):
            source, target = job.order.from_slots[job.copied], job.order.slots[job.copied]
            assert self.content[source] == job.digests[job.copied], "it was evicted while it was copied"
            # Until the rank has told of its end it may write, whatever became of the order meanwhile.
            self.staged[job.rank][target] = self.content[source]
            job.copied += 1

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), fails=st.sampled_from([None, None, None, 0, 1, 2]))
    def a_rank_ends(self, data: st.DataObject, fails: int | None) -> None:
        job = data.draw(st.sampled_from([job for each in self.orders.values() for job in each.jobs]))
        self.end(job, fails)
        self.hears()

    def end(self, job: Job, fails: int | None) -> None:
        under_way = self.orders[job.order.id]
        under_way.jobs.remove(job)
        places = range(job.copied, len(job.digests))
        under_way.faults.update(dict.fromkeys(places, ItemFault.CANCELLED))
        if fails is not None and fails < job.copied:
            under_way.faults[fails] = ItemFault.FAILED
        if not under_way.jobs:
            del self.orders[job.order.id]
            self.serving.report(OrderResult(job.order.id, under_way.faults, ""), self.now)

    def hears(self) -> None:
        for peer, answer in self.serving.take_answers():
            wanted = self.waiting.pop((peer, answer.number))
            if isinstance(answer, Refused):
                assert answer.reason is Refusal.BUSY
                continue
            self.check_grant(answer, wanted)
            self.held.append(Held(peer, wanted.number, answer, self.now, self.now + answer.seconds))

    def check_grant(self, grant: Grant, wanted: PeerAsk) -> None:
        assert (grant.region, grant.seconds) == ("staging", LEASE)
        assert len(grant.chunks) == len(grant.slots) > 0
        wants = [*wanted.keys[wanted.skip :], *(digest for digest, _ in wanted.tails)]
        for chunk, digest in zip(grant.chunks, wants, strict=False):
            assert digest in {chunk.digest, *(alias for alias, _ in chunk.aliases)}
        tail = len(grant.chunks) == len(wanted.keys) - wanted.skip + 1
        full = len(grant.chunks) - tail + wanted.skip
        assert grant.tokens == full * CHUNK + tail * BLOCK <= wanted.limit_tokens

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def renews(self, data: st.DataObject) -> None:
        held = data.draw(st.sampled_from(self.held))
        seconds = self.serving.renew(held.peer, held.number, self.now)
        assert (seconds > 0) == (held.until > self.now)
        assert self.now + seconds <= held.first + LONGEST
        self.held[self.held.index(held)] = Held(
            held.peer, held.number, held.grant, held.first, max(held.until, self.now + seconds)
        )

    @rule(peer=st.sampled_from(PEERS), ahead=st.integers(-3, 1))
    def is_done(self, peer: PeerId, ahead: int) -> None:
        number = max(1, self.numbers[peer] + ahead)
        self.serving.done(peer, number, self.now)
        self.ended.add((peer, number))
        self.numbers[peer] = max(self.numbers[peer], number)
        self.waiting.pop((peer, number), None)
        self.held = [each for each in self.held if (each.peer, each.number) != (peer, number)]
        self.takes_orders()
        assert finish(self.serving.ask(peer, ask(number, "x", 1), self.now), self.now) == Refused(
            number, Refusal.ENDED
        )

    @rule(name=st.sampled_from("xyz"), depth=st.integers(0, 4))
    def drops(self, name: str, depth: int) -> None:
        self.manager.drop([key(name, depth)])

    @rule(really=st.integers(0, 5).map(lambda number: number == 0))
    def loses_its_workers(self, really: bool) -> None:
        if not really:
            return
        self.manager.worker_lost()
        self.serving.workers_lost()
        self.orders.clear()
        self.held.clear()
        self.hears()
        assert not self.waiting

    @rule(seconds=st.sampled_from([0.25, 1.0, 4.0, 8.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire(self.now)
        self.serving.expire(self.now)
        self.held = [each for each in self.held if each.until > self.now]

    @invariant()
    def every_rank_has_what_was_lent(self) -> None:
        for held in self.held:
            for slot, chunk in zip(held.grant.slots, held.grant.chunks, strict=True):
                assert [staged.get(slot) for staged in self.staged] == [chunk.digest] * RANKS

    @invariant()
    def no_slot_is_in_two_hands(self) -> None:
        written = [slot for each in self.orders.values() for slot in each.jobs[0].order.slots]
        lent = [slot for held in self.held for slot in held.grant.slots]
        assert len({*written, *lent}) == len(written) + len(lent) <= STAGED
        assert self.serving.copies == len(self.orders)
        assert self.serving.leases == len(self.held) + len(self.waiting) <= 4
        assert self.serving.slots == len(written)
        self.serving.check()
        self.manager.check()

    def teardown(self) -> None:
        while self.open:
            self.look(*self.open[0])
        for under_way in list(self.orders.values()):
            for job in list(under_way.jobs):
                self.end(job, None)
        self.hears()
        assert not self.waiting
        self.now += LONGEST + 10.0
        self.manager.expire(self.now)
        self.serving.expire(self.now)
        self.serving.check()
        assert self.serving.leases == self.serving.slots == self.serving.copies == 0
        assert self.manager.stats().leases == 0
        assert self.serving.next_deadline() == float("inf")


TestStaging = Staging.TestCase
TestStaging.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@define
class Holder:
    """One that lends ``x``, of four chunks and a tail, out of a staging of so many slots."""

    staging_slots: int = 8
    slots: int = 20
    share: float = 1.0
    manager: CacheManager = field(init=False)
    serving: Serving = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.manager = make_manager(self.slots)
        store(self.manager, writes("x", 4, tail=True))
        made = ServingSettings(
            lease_seconds=LEASE,
            longest_seconds=LONGEST,
            share=self.share,
            staging_slots=self.staging_slots,
        )
        self.serving = Serving(self.manager, made, itertools.count(7).__next__)

    def asked(self, number: int = 1, peer: PeerId = PEERS[0], skip: int = 0) -> Answer | None:
        wanted = ask(number, "x", 4, skip=skip, tail=True)
        return finish(self.serving.ask(peer, wanted, 0.0), 0.0)

    def ordered(self) -> StageOrder:
        (order,) = self.serving.take_orders()
        assert isinstance(order, StageOrder)
        return order

    def told(self, order: StageOrder, faults: dict[int, ItemFault] | None = None, now: float = 1.0) -> Answer:
        self.serving.report(OrderResult(order.id, faults or {}), now)
        ((_, answer),) = self.serving.take_answers()
        return answer


def test_the_lease_begins_with_the_answer_and_the_tier_is_free_by_then() -> None:
    holder = Holder()
    assert holder.asked(skip=2) is None
    order = holder.ordered()
    assert (order.id, order.tokens) == (7, (CHUNK, CHUNK, BLOCK))
    assert holder.manager.stats().leases == 1
    grant = holder.told(order, now=5.0)
    assert isinstance(grant, Grant)
    assert (grant.region, grant.slots, grant.seconds) == ("staging", order.slots, LEASE)
    assert [chunk.digest for chunk in grant.chunks] == [key("x", 2), key("x", 3), half("x", 4)]
    assert grant.tokens == 4 * CHUNK + BLOCK
    assert holder.manager.stats().leases == 0
    assert holder.serving.renew(PEERS[0], 1, 12.0) == LEASE


def test_as_much_is_lent_as_fits_and_nothing_at_once_where_nothing_does() -> None:
    holder = Holder(staging_slots=3)
    assert holder.asked() is None
    order = holder.ordered()
    assert order.tokens == (CHUNK,) * 3
    assert holder.asked(1, PEERS[2]) == Refused(1, Refusal.BUSY)
    grant = holder.told(order)
    assert isinstance(grant, Grant)
    assert grant.tokens == 3 * CHUNK
    holder.serving.done(PEERS[0], 1, 2.0)
    assert holder.asked(2, PEERS[2]) is None


def test_a_copy_may_take_longer_than_any_lease_lasts() -> None:
    holder = Holder(slots=5)
    holder.asked()
    order = holder.ordered()
    holder.manager.expire(1000.0)
    holder.serving.expire(1000.0)
    assert not store(holder.manager, writes("y", 1), 1000.0), "a slot that is being copied was given away"
    assert isinstance(holder.told(order, now=1001.0), Grant)
    assert store(holder.manager, writes("y", 1), 1001.0)


def test_copies_hold_no_more_of_the_tier_than_peers_may_be_lent() -> None:
    holder = Holder(slots=8, share=0.25)
    holder.asked()
    order = holder.ordered()
    assert order.tokens == (CHUNK, CHUNK)
    assert holder.asked(1, PEERS[2]) == Refused(1, Refusal.BUSY)
    grant = holder.told(order)
    assert isinstance(grant, Grant)
    assert grant.tokens == 2 * CHUNK
    assert holder.asked(2, PEERS[2]) is None, "what is copied is not the tier's any more"


def test_a_copy_that_failed_on_some_rank_ends_the_grant_before_it() -> None:
    holder = Holder()
    holder.asked()
    order = holder.ordered()
    grant = holder.told(order, {2: ItemFault.FAILED, 4: ItemFault.TIMEOUT})
    assert isinstance(grant, Grant)
    assert (grant.slots, grant.tokens) == (order.slots[:2], 2 * CHUNK)
    holder.asked(2)
    assert holder.ordered().slots[:3] == order.slots[2:], "slots that failed are not free"


def test_where_nothing_could_be_copied_nothing_is_lent() -> None:
    holder = Holder()
    holder.asked()
    order = holder.ordered()
    assert holder.told(order, {0: ItemFault.FAILED}) == Refused(1, Refusal.BUSY)
    assert holder.serving.leases == holder.serving.slots == holder.manager.stats().leases == 0


def test_who_is_done_while_it_is_copied_gives_nothing_back_before_the_result() -> None:
    holder = Holder(staging_slots=5)
    holder.asked()
    order = holder.ordered()
    holder.serving.done(PEERS[0], 1, 1.0)
    assert holder.serving.take_orders() == [CancelOrder(order.id, "")]
    holder.serving.done(PEERS[0], 1, 1.0)
    assert holder.serving.take_orders() == [], "it is called off once"
    assert holder.asked(1, PEERS[2]) == Refused(1, Refusal.BUSY), "somebody may be writing still"
    assert holder.manager.stats().leases == 1
    holder.serving.report(OrderResult(order.id, {}), 2.0)
    assert holder.serving.take_answers() == []
    assert holder.manager.stats().leases == 0
    assert holder.asked(2, PEERS[2]) is None


def test_an_ask_that_comes_twice_is_answered_once_and_later_the_same_again() -> None:
    holder = Holder()
    assert holder.asked() is holder.asked() is None
    grant = holder.told(holder.ordered())
    again = holder.asked()
    assert isinstance(grant, Grant)
    assert isinstance(again, Grant)
    assert (again.slots, again.region) == (grant.slots, "staging")


def test_a_chunk_whose_time_ended_while_it_was_copied_is_not_lent() -> None:
    manager = make_manager(8)
    answer = manager.reserve("writer", "", writes("x", 2), 0.0)
    assert answer.id is not None
    manager.complete(answer.id, [0, 1])
    again = manager.reserve("writer", "", writes("x", 3)[2:], 0.0, ttl=4.0)
    assert again.id is not None
    manager.complete(again.id, [0])
    serving = Serving(manager, ServingSettings(share=1.0, staging_slots=4), itertools.count(1).__next__)
    assert finish(serving.ask(PEERS[0], ask(1, "x", 3), 0.0), 0.0) is None
    (order,) = serving.take_orders()
    serving.report(OrderResult(order.id, {}), 4.0)
    ((_, grant),) = serving.take_answers()
    assert isinstance(grant, Grant)
    assert [chunk.digest for chunk in grant.chunks] == [key("x", 0), key("x", 1)]
    serving.check()


def test_results_of_orders_that_are_not_of_here_are_passed_over() -> None:
    holder = Holder()
    holder.asked()
    holder.serving.report(OrderResult(6, {}), 1.0)
    assert holder.serving.copies == 1


def test_a_holder_without_workers_lends_nothing_any_more() -> None:
    holder = Holder()
    holder.asked()
    holder.told(holder.ordered())
    holder.asked(2)
    holder.manager.worker_lost()
    holder.serving.workers_lost()
    assert holder.serving.take_answers() == [(PEERS[0], Refused(2, Refusal.BUSY))]
    assert holder.serving.renew(PEERS[0], 1, 2.0) == 0.0
    assert holder.serving.leases == holder.serving.slots == holder.serving.copies == 0
    holder.serving.check()
