"""One life of one instance: a manager, the runtime's own halves of sharing over it, workers, requests."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import numpy as np
from attrs import define

from kvferry.api import PeerId
from kvferry.control.entries import State
from kvferry.control.grants import STAGING
from kvferry.control.loans import BorrowSettings, Standing
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.orders import ItemFault, OrderResult
from kvferry.control.outcomes import WriteOutcome
from kvferry.control.seeking import Wanted
from kvferry.control.serving import ServingSettings
from kvferry.data.wire import ChannelClosed, ChannelOpened, OrderDone, PullChunks, WorkerOrder
from kvferry.runtime.fair_lock import FairLock
from kvferry.runtime.grain import Grain, GroupShape
from kvferry.runtime.lower_tiers import LowerSetup, LowerTiers, StoreIdentity
from kvferry.runtime.sharing import Sharing, SharingSetup
from kvferry.runtime.windows import StoredWindows
from tests.simulation.events import EventLoop, require
from tests.simulation.fleet_carrier import FleetCarrier
from tests.simulation.fleet_parts import BLOCK, CHUNK, GARBAGE, Process, cell, chunks_of, half, key
from tests.simulation.fleet_workers import CHANNEL_BYTES, Worker

if TYPE_CHECKING:
    from tests.simulation.fleet import Fleet

NAMESPACE = b"one model".ljust(32, b".")
LOAD, LEASE, LONGEST, GUARD, PAUSE = 8.0, 2.0, 7.0, 0.3, 1.5
WRITE_SECONDS = 6.0
SERVICE_SECONDS, POLL_SECONDS, QUICK_SECONDS = 0.1, 0.08, 0.001
SLACK = 0.5
"""How much later than at its deadline a request may go on: it is asked every now and then."""


@define(eq=False)
class Request:
    """Somebody waits for a prefix."""

    number: str
    text: str
    length: int
    tail: bool
    rise: int
    until: float
    stops: int
    waits: bool = True
    hit: int = 0
    """Tokens that were found, when it has ended."""

    @property
    def keys(self) -> list[bytes]:
        return [key(self.text, depth) for depth in range(self.length)]

    def tails(self, at: int) -> list[tuple[bytes, int]]:
        return [(half(self.text, self.length), BLOCK)] if self.tail and at == self.length else []

    @property
    def limit(self) -> int:
        return self.length * CHUNK + (BLOCK if self.tail else 0)


class Life:
    """From a start to an end. Its clock began at some time and goes a little too fast or slow."""

    def __init__(self, world: Fleet, name: str, address: bytes, slots: int) -> None:
        self.world = world
        self.loop: EventLoop = world.loop
        self.address = address
        random = world.loop.random
        self.id = PeerId(name, random.randbytes(16))
        self.weights = 0
        self.slots = slots
        self.process = Process(world.loop)
        self.requests: dict[str, Request] = {}
        self.ended: dict[str, Request] = {}
        self.computing = 0
        self.loading = 0
        """Loads of requests out of peers' memory that have not ended."""
        self._offset = random.uniform(0.0, 1000.0)
        self._rate = random.uniform(0.97, 1.03)
        self._numbers = 0
        self._loads = 0
        self._awake = False
        self.carrier = FleetCarrier(self)
        self.workers = [Worker(self, rank, slots) for rank in range(world.ranks)]
        self.manager = CacheManager(
            capacity=slots,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            policy=LRU(),
            lease_seconds=LEASE,
            write_seconds=WRITE_SECONDS,
        )
        self.manager.grow(slots)
        borrow = BorrowSettings(
            slot_bytes=CHANNEL_BYTES,
            in_flight=CHANNEL_BYTES * random.choice((1, 1, 2, 5)),
            load_deadline=LOAD,
            guard_seconds=GUARD,
            pause_seconds=PAUSE,
            delay=world.settings.delay,
        )
        identity = StoreIdentity(
            instance=name, namespace=NAMESPACE, fresh=lambda: world.loop.random.randbytes(32)
        )
        lower = LowerSetup(identity=identity, tiers=(), borrow=borrow)
        lock = FairLock()
        numbers = itertools.count(1)
        windows = StoredWindows(Grain.of(CHUNK, (GroupShape(BLOCK),)))
        self.lower = LowerTiers(
            lower.build(self.manager, CHUNK, windows, lambda: next(numbers)),
            lock,
            identity,
            world_size=world.ranks,
            post=self._post,
            wake=self.wake,
            on_change=lambda: None,
            clock=self.clock,
            wall_clock=self.clock,
        )
        borrowing = self.lower.hierarchy.borrowing
        assert borrowing is not None
        self.borrowing = borrowing
        self.sharing = Sharing(
            SharingSetup(
                id=self.id,
                namespace=NAMESPACE,
                chunk_tokens=CHUNK,
                block_tokens=BLOCK,
                channel="simulated",
                carrier=self.carrier,
                serving=ServingSettings(
                    lease_seconds=LEASE,
                    longest_seconds=random.choice((LEASE, LONGEST)),
                    most_leases=5,
                    share=0.8,
                    staging_slots=world.settings.staging,
                    staging_seconds=LOAD,
                ),
            ),
            self.manager,
            borrowing,
            lock,
            world_size=world.ranks,
            post=self._post,
            wake=self.wake,
            next_order=lambda: next(numbers),
            clock=self.clock,
        )

    def __str__(self) -> str:
        return f"{self.id.instance}-{self.id.epoch.hex()[:4]}"

    # Time

    def clock(self) -> float:
        """Its monotonic seconds."""
        return self._offset + self._rate * self.loop.now

    def until(self, deadline: float) -> float:
        """Seconds of the world until its clock is at ``deadline``, or a little more."""
        return max(0.0, (deadline - self.clock()) / self._rate) + 1e-9

    def start(self) -> None:
        self.lower.open()
        self.sharing.open()
        self._serve_on()

    def _serve_on(self) -> None:
        self._service()
        due = self.until(min(self.manager.next_deadline(), self.sharing.next_deadline()))
        pause = min(self.loop.random.uniform(0.5, 1.5) * SERVICE_SECONDS, due)
        self.process.after(pause, "service", self._serve_on)

    def _service(self) -> None:
        """What the scheduler's service thread does."""
        while self.manager.next_deadline() <= self.clock():
            self.manager.expire(self.clock())
        self.lower.work()
        self.sharing.work()
        self.carrier.tick()

    def wake(self) -> None:
        """Have the service thread work soon."""
        if self._awake:
            return
        self._awake = True

        def work() -> None:
            self._awake = False
            self._service()

        self.process.after(self.loop.random.expovariate(1 / QUICK_SECONDS), "woken", work)

    def _post(self, rank: int, order: WorkerOrder) -> None:
        worker = self.workers[rank]
        name = type(order).__name__
        self.world.post_in_order(
            f"{self}/{rank}",
            f"{self}/{rank} {name}",
            lambda: worker.process.do(name, lambda: worker.take(order)),
        )

    def deliver(self, message: ChannelOpened | ChannelClosed | OrderDone) -> None:
        """A worker tells something."""
        if isinstance(message, OrderDone):
            self.lower.on_message(message)
            self.sharing.on_done(message)
        else:
            self.sharing.on_message(message)
        self.wake()

    # What its engine does

    def compute(self, text: str, count: int, *, tail: bool) -> None:
        """Store a prompt, and evict what it must."""
        now, random = self.clock(), self.loop.random
        items = chunks_of(text, count, tail=tail)
        answer = self.manager.reserve(f"computes {text}", "", items, now)
        granted = {
            number: item.slot
            for number, item in enumerate(answer.items)
            if item.outcome is WriteOutcome.GRANTED
        }
        if answer.id is None:
            return
        reservation, weights = answer.id, self.weights
        waiting = set(range(len(self.workers)))
        failed: set[int] = set()
        self.computing += 1

        def written(worker: Worker) -> None:
            for number, slot in granted.items():
                bad = not self.world.calm and self.loop.chance(0.03)
                if bad:
                    failed.add(number)
                content = GARBAGE if bad else cell(items[number].digest, worker.rank, weights)
                worker.memory.write(slot, content)
                worker.wrote(slot)
            self.process.after(random.expovariate(1 / QUICK_SECONDS), "saved", lambda: saved(worker.rank))

        def saved(rank: int) -> None:
            waiting.discard(rank)
            if not waiting:
                self.computing -= 1
                self.manager.complete(reservation, [each for each in granted if each not in failed])
                self.wake()

        for worker in self.workers:
            for slot in granted.values():
                worker.writing(slot)
                worker.memory.write(slot, GARBAGE)
            slow = not self.world.calm and self.loop.chance(0.03)
            pause = random.uniform(1.0, 9.0) if slow else random.expovariate(1 / 0.01)
            worker.process.after(pause, "save", lambda worker=worker: written(worker))

    def ask(self, text: str, length: int, *, tail: bool = False) -> Request:
        """A request comes; it waits for what others have, and goes on in time."""
        self._numbers += 1
        request = Request(f"request-{self._numbers}", text, length, tail, 0, math.inf, self.process.stops)
        self.requests[request.number] = request
        found = self._match(request)
        if found < request.limit:
            wanted = Wanted(
                request=request.number,
                salt="",
                keys=request.keys,
                tail_keys=request.tails,
                limit_tokens=request.limit,
                held_tokens=found,
                local_tokens=0,
            )
            request.rise, seconds = self.lower.seek(wanted)
            request.until = self.clock() + seconds
        self._poll(request)
        return request

    def _poll(self, request: Request) -> None:
        if request.number not in self.requests:
            return
        now = self.clock()
        if not request.rise or not self.lower.goes_on(request.rise) or now >= request.until:
            stood = self.process.stops > request.stops
            late = request.rise and now > request.until + SLACK and not stood
            require(not late, "no request waits beyond its deadline", f"{request.number} of {self}")
            self.leave(request, late=now >= request.until)
            return
        self.process.after(POLL_SECONDS, "asks again", lambda: self._poll(request))

    def leave(self, request: Request, *, late: bool = False) -> None:
        """It goes on with what is there, or is aborted."""
        if self.requests.pop(request.number, None) is None:
            return
        self.lower.leave(request.number, late=late)
        request.waits = False
        request.hit = max(self._match(request), self._load(request))
        self.ended[request.number] = request
        self.world.saw("request: hit" if request.hit else "request: missed")

    def _load(self, request: Request) -> int:
        """What a peer lends the request goes into its blocks; the end of that, as tokens from the start. Like
        an engine's steps, the order to read does not come by the way of all others."""
        loan = self.borrowing.take_kept(request.number)
        if loan is None:
            return 0
        if not loan.stands(self.clock()):
            loan.release()
            return 0
        loan.peer.fetching += len(loan.chunks)
        self.loading += 1
        self._loads -= 1
        slots = tuple(loan.slots[chunk.digest] for chunk in loan.chunks)
        order = PullChunks(
            id=self._loads,
            peer=loan.peer.id.instance,
            epoch=loan.peer.id.epoch,
            digests=tuple(chunk.digest for chunk in loan.chunks),
            tokens=tuple(chunk.tokens for chunk in loan.chunks),
            from_slots=slots,
            slots=slots,
            deadline=min(loan.until(), self.clock() + LOAD),
            region=loan.region,
        )
        waiting = set(range(len(self.workers)))
        faults: dict[int, ItemFault] = {}

        def told(rank: int, found: dict[int, ItemFault]) -> None:
            waiting.discard(rank)
            faults.update(found)
            if not waiting:
                self.loading -= 1
                loan.fetched(loan.chunks, OrderResult(0, faults, "simulated" if faults else ""), self.clock())
                loan.release()
                self.wake()

        for worker in self.workers:
            pause = self.loop.random.expovariate(1 / QUICK_SECONDS)
            worker.process.after(pause, "load", lambda worker=worker: worker.load(order, told))
        self.world.saw("request: lent")
        return loan.tokens

    def _match(self, request: Request) -> int:
        match = self.manager.match(request.number, request.keys, request.tails, self.clock(), request.limit)
        if match.lease is not None:
            self.manager.release(match.lease)
        return match.tokens

    def forget_all(self, *, new_weights: bool) -> None:
        """The cache is cleared, by an operator or because the weights change."""
        self.lower.clear_begins()
        if new_weights:
            self.lower.renew()
            self.sharing.retire()
            self.weights += 1
        self.manager.clear()
        self.lower.clear_ended()

    def drop(self, text: str) -> None:
        """Bytes of a text proved bad."""
        self.manager.drop([key(text, 0)])

    def kill(self) -> None:
        self.process.kill()
        for worker in self.workers:
            worker.process.kill()

    # What must hold

    def lends(self, peer: PeerId, region: str, slot: int, digest: bytes) -> bool:
        """Whether it lends this to a peer, and its own books say so, too."""
        known = self.sharing.serving._peers.get(peer)
        if known is None:
            return False
        residency = self.manager._residency
        leased = (residency.tier.slot.array == slot) & (residency.leases.array > 0)
        if region != STAGING and not leased.any():
            return False
        return any(
            (slot, digest) in zip(lent.slots, (each.digest for each in lent.chunks), strict=True)
            for lent in known.open.values()
            if (lent.lease is None) == (region == STAGING)
        )

    def visible(self) -> dict[bytes, int]:
        """Digests that are found, and their slots."""
        residency = self.manager._residency
        rows = np.flatnonzero(residency.entries.state.array == State.VISIBLE).tolist()
        slots = residency.tier.slot.view
        return {residency.entries.digests.digest(row): slots[row] for row in rows}

    def look(self) -> None:
        """After every event: what is found is right on every rank, what is lent as it was."""
        for digest, slot in self.visible().items():
            for worker in self.workers:
                right = worker.memory.cells[slot] == cell(digest, worker.rank, self.weights)
                require(right, "what is found is right on every rank", f"slot {slot} of {self}/{worker.rank}")
                require(
                    slot not in worker.written, "what is found is written no more", f"slot {slot} of {self}"
                )

    def audit(self) -> None:
        """Now and then: everything."""
        self.lower.hierarchy.check()
        self.sharing.serving.check()

    @property
    def peers_met(self) -> bool:
        """Whether workers know those that something may be read from, and nobody else."""
        agreed = {
            peer.instance: peer.epoch
            for peer, (standing, _) in self.borrowing.peers().items()
            if standing is Standing.AGREED
        }
        met = [{name: epoch for name, (epoch, _) in worker.met.items()} for worker in self.workers]
        return met == [agreed] * len(self.workers)

    @property
    def quiet(self) -> bool:
        """Whether all that it did has ended."""
        stats = self.manager.stats()
        held = stats.leases + stats.reservations + stats.leased + stats.retiring + stats.reserved
        busy = (
            self.requests
            or self.computing
            or self.loading
            or any(worker.pulls or worker.stagings for worker in self.workers)
        )
        return not busy and not held + stats.quarantined + self.sharing.serving.leases and self.at_rest

    @property
    def at_rest(self) -> bool:
        return self.lower.at_rest() and not self.lower._orders._orders and not self.sharing._orders._orders

    def left(self) -> str:
        """What has not ended, for people."""
        stats = self.manager.stats()
        pulls = [sorted(worker.pulls) for worker in self.workers]
        return (
            f"{self}: {len(self.requests)} requests, {self.computing} saves, pulls {pulls}, "
            f"{self.sharing.serving.leases} leases of peers, {stats}, at rest {self.at_rest}"
        )
