"""One instance reads what others have computed, over messages that are late, lost and doubled, from holders
that store, evict and start anew: never a wrong chunk, nothing read outside a lease, nothing left over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count

import pytest
from attrs import define, evolve, field

from core.tests.control.test_hierarchy_machine import visible
from core.tests.control.test_serving_peers import BLOCK, CHUNK, finish, half, key, make_manager, store, writes
from kvferry.api import Answer, Candidate, Grant, PeerId, Refused
from kvferry.control.borrowing import Borrowing
from kvferry.control.hierarchy import Hierarchy
from kvferry.control.loans import BorrowSettings, Loan, Standing
from kvferry.control.orders import (
    CancelOrder,
    ForgetOrder,
    ItemFault,
    MeetOrder,
    OrderResult,
    PullOrder,
)
from kvferry.control.rises import Rises
from kvferry.control.seeking import Wanted
from kvferry.control.serving import Serving, ServingSettings
from kvferry.control.tells import FindHolders, Greet, Tell, TellAsk, TellDone, TellRenew

SLOT_BYTES = 10
LOAD, LEASE, LONGEST, GUARD, PAUSE = 9.0, 6.0, 20.0, 1.0, 4.0
ENDLESS = 1000.0
INSTANCES = ("x", "y")
REQUESTS = "12345678"
SEEDS, STEPS = 25, 600


@define(eq=False)
class Holder:
    """An instance in one life: its control plane, and what lies in its slots."""

    id: PeerId
    serving: Serving
    memory: dict[int, bytes] = field(factory=dict)
    alive: bool = True


@define(eq=False)
class ToAsker:
    """A message on its way to the asker: an answer, seconds of a renewal, or exports of an agreement."""

    peer: PeerId
    what: Answer | tuple[int, int, float] | tuple[bytes, ...]


@define(eq=False)
class Pull:
    """An order that the asker's worker has."""

    order: PullOrder
    until: float
    cancelled: bool = False


@define(eq=False)
class Load:
    """What goes out of a peer's memory into the engine's blocks."""

    loan: Loan
    until: float


Message = Tell | ToAsker


class World:
    """One asker, two holders, and a network that is ``faithful`` or is not: then messages get lost, doubled
    and late, holders start anew, reads fail. With ``delay`` what is lent goes into the engine's blocks."""

    def __init__(self, seed: int, *, faithful: bool, delay: bool = False) -> None:
        self.chance = random.Random(seed)
        self.faithful = faithful
        in_flight = self.chance.randint(1, 4)
        self.now = 0.0
        self.epochs = count(1)
        self.first = make_manager(12)
        self.memory: dict[int, bytes] = {}
        numbers = count(1)
        rises = Rises(self.first, lambda: next(numbers))
        made = BorrowSettings(
            slot_bytes=SLOT_BYTES,
            in_flight=in_flight * SLOT_BYTES,
            load_deadline=LOAD,
            guard_seconds=GUARD,
            pause_seconds=PAUSE,
            delay=delay,
        )
        self.loads: list[Load] = []
        self.borrowing = Borrowing(rises, made, CHUNK)
        self.tiers = Hierarchy(self.first, [], rises, CHUNK, self.borrowing)
        self.messages: list[Message] = []
        self.pulls: list[Pull] = []
        self.met: dict[str, bytes] = {}
        self.rise_of: dict[str, int] = {}
        self.holders: dict[str, Holder] = {}
        self.gone: list[Holder] = []
        for name in INSTANCES:
            self.start(name)

    # Holders

    def start(self, name: str) -> None:
        manager = make_manager(8)
        # Where nothing gets lost, no lease may end by its time.
        lasts = ENDLESS if self.faithful else LEASE
        made = ServingSettings(
            lease_seconds=lasts, longest_seconds=max(lasts, LONGEST), most_leases=3, share=1.0
        )
        epoch = next(self.epochs).to_bytes(16, "big")
        self.holders[name] = Holder(PeerId(name, epoch), Serving(manager, made))
        self.compute(name, "p", 4, True)

    def restart(self, name: str) -> None:
        self.holders[name].alive = False
        self.gone.append(self.holders[name])
        self.start(name)

    def compute(self, name: str, text: str, length: int, tail: bool) -> None:
        """A holder stores a prompt, and evicts what it must."""
        holder = self.holders[name]
        manager = holder.serving._manager
        holder.memory |= store(manager, writes(text, length, tail=tail), self.now)

    def drop(self, name: str, text: str) -> None:
        self.holders[name].serving._manager.drop([key(text, 0)])

    # The asker

    def ask(self, request: str, text: str, length: int, tail: bool) -> None:
        """A request looks for its prompt."""
        self.leave(request)
        keys = [key(text, depth) for depth in range(length)]
        tails = [(half(text, length), BLOCK)] if tail else []
        limit = length * CHUNK + (BLOCK if tail else 0)
        match = self.first.match(request, keys, lambda at: tails if at == length else (), self.now, limit)
        if match.lease is not None:
            self.first.release(match.lease)
        if match.tokens >= limit:
            return
        wanted = Wanted(
            request=request,
            salt="",
            keys=keys,
            tail_keys=lambda at: tails if at == length else (),
            limit_tokens=limit,
            held_tokens=match.tokens,
            local_tokens=0,
        )
        seek = self.tiers.seek(wanted)
        while seek.advance(self.now):
            pass
        if seek.rise:
            assert seek.wait_seconds == LOAD
            self.rise_of[request] = seek.rise
        keys.append(b"later")  # the request goes on, and its keys with it

    def forget_all(self) -> None:
        """The asker's own tier is cleared."""
        self.tiers.clear_begins()
        self.first.clear()
        self.tiers.clear_ended()

    def leave(self, request: str) -> None:
        if self.rise_of.pop(request, 0):
            self.tiers.rises.leave(request)
        self.borrowing.drop(request)

    def take(self, request: str) -> None:
        """The engine asks again, and has blocks for what was lent to the request."""
        if self.tiers.rises.goes_on(self.rise_of.get(request, 0)):
            return
        loan = self.borrowing.take_kept(request)
        if loan is None:
            return
        assert loan.first * CHUNK < loan.tokens <= (loan.first + len(loan.chunks)) * CHUNK
        if loan.stands(self.now):
            loan.peer.fetching += len(loan.chunks)
            self.loads.append(Load(loan, loan.until()))
        else:
            loan.release()

    def load(self) -> None:
        """The asker's worker fills blocks out of a peer's memory, or fails."""
        if self.loads:
            self.fill(self.loads.pop(self.chance.randrange(len(self.loads))))

    def fill(self, load: Load) -> None:
        loan = load.loan
        holder = self.holders[loan.peer.id.instance]
        faults = {}
        for place, chunk in enumerate(loan.chunks):
            if self.met.get(holder.id.instance) != loan.peer.id.epoch or holder.id != loan.peer.id:
                faults[place] = ItemFault.GONE
            elif self.now >= load.until:
                faults[place] = ItemFault.TIMEOUT
            else:
                there = holder.memory[loan.slots[chunk.digest]]
                assert there == chunk.digest, "it was read outside of its lease"
        loan.fetched(loan.chunks, OrderResult(0, faults, "injected" if faults else ""), self.now)
        loan.release()

    def work(self, times: int) -> None:
        for _ in range(times):
            if self.now >= self.tiers.next_deadline():
                self.tiers.expire(self.now)
            self.tiers.work(self.now)
        for order in self.tiers.take_orders():
            match order:
                case PullOrder():
                    assert order.deadline >= self.now
                    self.pulls.append(Pull(order, order.deadline))
                case MeetOrder(peer, epoch, _):
                    self.met[peer] = epoch
                case ForgetOrder(peer, epoch):
                    if self.met.get(peer) == epoch:
                        del self.met[peer]
                case CancelOrder(number, tier):
                    assert tier == ""
                    for pull in self.pulls:
                        pull.cancelled |= pull.order.id == number
        self.messages += self.borrowing.take()

    def carry_out(self) -> None:
        """The asker's worker reads what an order names, or fails."""
        if not self.pulls:
            return
        pull = self.pulls.pop(self.chance.randrange(len(self.pulls)))
        fault = self.chance.choice(list(ItemFault))
        wrong = not self.faithful and self.chance.random() < 0.2
        places = range(len(pull.order.chunks)) if wrong else ()
        self.read(pull, {place: fault for place in places if self.chance.random() < 0.5})

    def read(self, pull: Pull, faults: dict[int, ItemFault]) -> None:
        order = pull.order
        holder = self.holders[order.peer]
        for place, (chunk, source, slot) in enumerate(
            zip(order.chunks, order.from_slots, order.slots, strict=True)
        ):
            if place in faults:
                continue
            if pull.cancelled:
                faults[place] = ItemFault.CANCELLED
            elif self.met.get(order.peer) != order.epoch or holder.id.epoch != order.epoch:
                faults[place] = ItemFault.GONE
            elif self.now >= pull.until:
                faults[place] = ItemFault.TIMEOUT
            else:
                assert holder.memory[source] == chunk.digest, "it was read outside of its lease"
                self.memory[slot] = chunk.digest
        self.tiers.report(OrderResult(order.id, faults, "" if not faults else "injected"), self.now)

    # The network

    def deliver(self) -> None:
        """One arrives; in any order and perhaps not for the last time, unless all is faithful."""
        if not self.messages:
            return
        at = 0 if self.faithful else self.chance.randrange(len(self.messages))
        twice = not self.faithful and self.chance.random() < 0.1
        message = self.messages[at] if twice else self.messages.pop(at)
        self.arrive(message)

    def lose(self) -> None:
        if self.messages:
            self.messages.pop(self.chance.randrange(len(self.messages)))

    def run_well(self, rounds: int) -> None:
        """For a while nothing fails."""
        for _ in range(rounds):
            self.work(4)
            waiting, self.messages = self.messages, []
            for message in waiting:
                self.arrive(message)
            while self.pulls:
                self.read(self.pulls.pop(0), {})
            for request in REQUESTS:
                self.take(request)
            while self.loads:
                self.fill(self.loads.pop(0))

    def break_off(self, name: str) -> None:
        """The asker's connection to a peer breaks."""
        self.borrowing.lost(self.holders[name].id, "the connection broke", self.now)

    def arrive(self, message: Message) -> None:
        match message:
            case FindHolders(number, digests, _):
                found = self.candidates(digests, self.chance.random() < 0.2)
                self.chance.shuffle(found)
                self.borrowing.found(number, found, self.now)
            case Greet(peer, _):
                if self.holders[peer.instance].id == peer:
                    self.messages.append(ToAsker(peer, (b"export",)))
                else:
                    self.borrowing.lost(peer, "it is another one", self.now)
            case TellAsk(peer, ask):
                if self.holders[peer.instance].id == peer:
                    answer = finish(self.holders[peer.instance].serving.ask(ME, ask, self.now), self.now)
                    if answer is not None:
                        self.messages.append(ToAsker(peer, self.perhaps_untrue(answer)))
            case TellRenew(peer, number, turn):
                if self.holders[peer.instance].id == peer:
                    seconds = self.holders[peer.instance].serving.renew(ME, number, self.now)
                    self.messages.append(ToAsker(peer, (number, turn, seconds)))
            case TellDone(peer, number):
                if self.holders[peer.instance].id == peer:
                    self.holders[peer.instance].serving.done(ME, number, self.now)
            case ToAsker(peer, (int(number), int(turn), float(seconds))):
                self.borrowing.renewed(peer, number, turn, seconds)
            case ToAsker(peer, (bytes() as export,)):
                self.borrowing.agreed(peer, [export], self.now)
            case ToAsker(peer, (Grant() | Refused()) as answer):
                self.borrowing.answered(peer, answer, self.now)

    def perhaps_untrue(self, answer: Answer) -> Answer:
        if self.faithful or isinstance(answer, Refused) or self.chance.random() > 0.05:
            return answer
        first, *rest = answer.chunks
        wrong = self.chance.choice(
            [
                evolve(first, digest=key("q", first.depth + 1)),
                evolve(first, depth=first.depth + 1),
                evolve(first, parent=key("r", 0)),
                evolve(first, tokens=first.tokens - 1),
                evolve(first, seconds=float("nan")),
            ]
        )
        lies = [
            evolve(answer, chunks=(wrong, *rest)),
            evolve(answer, slots=answer.slots[1:]),
            evolve(answer, slots=(-1, *answer.slots[1:])),
            evolve(answer, seconds=float("inf")),
        ]
        return self.chance.choice(lies)

    def candidates(self, digests: Sequence[bytes], optimistic: bool) -> list[Candidate]:
        """Who has what, or had it, or never had."""
        found = []
        for holder in (*self.holders.values(), *self.gone[-1:]):
            here = visible(holder.serving._manager)
            length = len(digests) if optimistic else sum(digest in here for digest in digests)
            if length:
                found.append(Candidate(peer=holder.id, address=b"somewhere", chunks=length))
        return found

    def wait(self, seconds: float) -> None:
        """Time passes, and holders use every slot that is free for something else."""
        self.now += seconds
        for holder in self.holders.values():
            holder.serving.expire(self.now)
            if not self.faithful and self.chance.random() < 0.5:
                self.compute(holder.id.instance, f"filler {self.now}", 8, False)
                self.compute(holder.id.instance, "p", 4, True)

    def is_sound(self) -> None:
        self.tiers.check()
        for digest, slot in visible(self.first).items():
            assert self.memory[slot] == digest, "a chunk is found that is not there"
        for holder in self.holders.values():
            holder.serving.check()

    def end(self) -> None:
        """When nobody asks any more and the network is whole, everything ends and nothing is left."""
        if self.faithful:
            self.run_well(60)
            assert len(self.tiers.rises) == 0, "a request waits for nothing"
        for request in list(self.rise_of):
            self.leave(request)
        for _ in range(400):
            self.run_well(1)
            if not self.messages and self.tiers.at_rest:
                break
            self.now += 0.1
        assert self.tiers.at_rest, "something goes on for ever"
        if self.faithful:
            for holder in self.holders.values():
                assert holder.serving.leases == 0, "a peer was not told that all is done"
        agreed = {
            peer.instance: peer.epoch
            for peer, (standing, _) in self.borrowing.peers().items()
            if standing is Standing.AGREED
        }
        assert self.met == agreed, "workers keep a peer that nothing is read from"
        assert all(peer.fetching == 0 for peer in self.borrowing._peers.values())
        self.now += ENDLESS + LONGEST
        for holder in self.holders.values():
            holder.serving.expire(self.now)
            assert holder.serving.leases == 0
        self.is_sound()

    def step(self) -> None:
        chance = self.chance
        text = chance.choice("pppqr")
        name = chance.choice(INSTANCES)
        acts: dict[Callable[[], None], float] = {
            lambda: self.ask(chance.choice(REQUESTS), text, chance.randint(1, 5), chance.random() < 0.3): 4,
            lambda: self.leave(chance.choice(REQUESTS)): 1,
            lambda: self.work(chance.randint(1, 6)): 10,
            self.deliver: 12,
            self.carry_out: 6,
            lambda: self.take(chance.choice(REQUESTS)): 4,
            self.load: 2,
            lambda: self.run_well(chance.randint(1, 5)): 2,
            lambda: self.compute(name, text, chance.randint(1, 5), chance.random() < 0.3): 3,
            self.forget_all: 0.7,
            lambda: self.wait(chance.choice([0.1, 0.3, 2.0])): 2,
        }
        if not self.faithful:
            acts |= {
                lambda: self.wait(chance.choice([0.5, 1.0, 3.0, 7.0, 10.0])): 2,
                self.lose: 2,
                lambda: self.restart(name): 0.3,
                lambda: self.drop(name, text): 0.3,
                lambda: self.break_off(name): 0.3,
            }
        chance.choices(list(acts), list(acts.values()))[0]()
        self.is_sound()


ME = PeerId("me", b"m" * 16)


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("faithful", [True, False])
def test_chunks_of_others_are_the_right_ones_and_nothing_is_left(faithful: bool, delay: bool) -> None:
    happened: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = World(seed, faithful=faithful, delay=delay)
        try:
            for _ in range(STEPS):
                world.step()
            world.end()
        except BaseException as error:
            error.add_note(f"seed {seed}, faithful={faithful}, delay={delay}")
            raise
        happened += world.borrowing.counts
    rare = () if faithful else ("failed", "paused", "late", "untrue")
    for name in ("granted", "fetched", "nobody", "refused", *rare):
        assert happened[name] > 0, f"the world is too small for: {name}"
