"""Clients of the manager beside the engine, over a network that loses messages: peers that read slots
under a lease, and fetches that write slots on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from attrs import define, field

from kvferry.control.outcomes import Match, Reservation, WriteOutcome
from kvferry.data.plans import Direction
from tests.simulation.events import EventLoop, require
from tests.simulation.network import Network
from tests.simulation.ranks import Job, Rank, Row
from tests.simulation.truth import BLOCK, CHUNK, CHUNK_BLOCKS, Text, Truth, chunks_of, stored
from tests.simulation.watched import WatchedManager

GUARD_SECONDS = 0.6
"""A peer stops so long before its lease ends. More than its clock may step during one lease, and than
the time that the manager is handed may lag behind."""
LARGEST_CLOCK_STEP = 0.5
READ_SECONDS = 0.03
RETRY_SECONDS = (0.1, 0.5)


@define
class Surroundings:
    """What peers and fetches see of the world."""

    loop: EventLoop
    network: Network
    truth: Truth
    manager: WatchedManager
    clock: Callable[[], float]
    ranks: Callable[[], Sequence[Rank]]
    lease_seconds: float


@define(eq=False)
class Peer:
    """Asks for a prompt, reads the slots that it was told one by one, gives the lease back.

    It may vanish at any moment; then its lease ends at its deadline, or when somebody notices.
    """

    world: Surroundings
    name: str
    text: Text
    tokens: int
    clock_offset: float = 0.0
    heard: set[int] = field(factory=set)
    gone: bool = False

    def start(self) -> None:
        asked = self._now()
        self.world.network.send("peer asks", lambda: self._asked(asked))

    def _now(self) -> float:
        """By its own clock."""
        return self.world.loop.now + self.clock_offset

    def _asked(self, sent: float) -> None:
        manager, loop = self.world.manager, self.world.loop
        full = self.tokens // CHUNK
        cursor = manager.match_in_slices(
            self.name,
            self.text.keys[:full],
            lambda chunk: self.text.tail_keys(chunk, self.tokens),
            self.tokens,
            slice_keys=loop.random.choice((1, 2, 100)),
        )

        weights, ranks = self.world.truth.weights, self.world.ranks()

        def advance() -> None:
            if weights != self.world.truth.weights or not all(rank.alive for rank in ranks):
                return  # whoever asked is told to ask again; what was leased by now ends by itself
            if cursor.advance(self.world.clock()):
                loop.after(0.001, "match slice", advance)
                return
            if cursor.match.lease is not None and loop.chance(0.2):
                self._be_sent(cursor.match, weights, ranks)
                return
            # Ranks as they are now: an answer from before a restart says nothing about their next life.
            self.world.network.send("peer hears", lambda: self._read(cursor.match, sent, weights, ranks))

        advance()

    def _read(self, match: Match, sent: float, weights: int, ranks: Sequence[Rank]) -> None:
        loop = self.world.loop
        if self.gone or match.lease is None or match.lease in self.heard:
            return
        self.heard.add(match.lease)
        if loop.chance(0.15):
            self._vanish()
            return
        until = sent + self.world.lease_seconds - GUARD_SECONDS
        reading = _Reading(self, match, until, weights, ranks)
        if loop.chance(0.1):
            loop.fault("clock step")
            self.clock_offset += loop.random.uniform(-LARGEST_CLOCK_STEP, LARGEST_CLOCK_STEP)
        reading.read()

    def _be_sent(self, match: Match, weights: int, ranks: Sequence[Rank]) -> None:
        """The workers send the slots themselves: a load in flight, which ends with their word alone."""
        lease, manager, loop = match.lease, self.world.manager, self.world.loop
        assert lease is not None
        manager.begin_load(lease)

        def sent() -> None:
            if all(rank.alive for rank in ranks):
                self.check(match, range(len(match.slots)), weights, ranks)
            self.world.network.send("sent", lambda: manager.finish_load(lease), can_be_lost=False)

        loop.after(loop.random.expovariate(1.0), "workers send", sent)
        if loop.chance(0.5):
            self.world.network.send("peer releases", lambda: manager.release(lease))

    def check(self, match: Match, chunks: Iterable[int], weights: int, ranks: Sequence[Rank]) -> None:
        """What lies in the slots of these chunks now must be what was asked for."""
        for chunk in chunks:
            slot, tokens = match.pieces[chunk]
            for rank in ranks:
                for position in range(tokens // BLOCK):
                    block = self.text.blocks[chunk * CHUNK_BLOCKS + position]
                    require(
                        rank.slots[slot][position] == stored(block, rank.number, weights),
                        "right bytes under a lease",
                        f"{self.name} read wrong bytes from slot {slot} of rank {rank.number}",
                    )

    def _vanish(self) -> None:
        """Without a word. Perhaps its connection breaks, and the manager hears of that."""
        self.world.loop.fault("client vanished")
        self.gone = True
        if self.world.loop.chance(0.5):
            manager = self.world.manager
            self.world.network.send("peer lost", lambda: manager.release_owner(self.name))


@define(eq=False)
class _Reading:
    peer: Peer
    match: Match
    until: float
    weights: int
    ranks: Sequence[Rank]
    at: int = 0

    def read(self) -> None:
        """The next slot, soon."""
        loop = self.peer.world.loop
        pause = loop.random.expovariate(1 / READ_SECONDS)
        if loop.chance(0.05):
            pause = loop.random.uniform(0.5, 3.0)
            loop.after(pause, "peer reads", self._piece, fault="stalled read")
        else:
            loop.after(pause, "peer reads", self._piece)

    def _piece(self) -> None:
        """One slot on every rank, unless the lease may have ended by now or the workers have."""
        peer, world = self.peer, self.peer.world
        if peer.gone or not all(rank.alive for rank in self.ranks):
            return
        if peer._now() >= self.until:
            world.loop.note("too late")
            return
        peer.check(self.match, (self.at,), self.weights, self.ranks)
        self.at += 1
        if world.loop.chance(0.02):
            peer._vanish()
        elif self.at == len(self.match.slots):
            self._send("peer releases", world.manager.release)
        else:
            if self.until - peer._now() < world.lease_seconds / 2:
                self._renew()
            self.read()

    def _renew(self) -> None:
        world, sent = self.peer.world, self.peer._now()

        def heard() -> None:
            self.until = max(self.until, sent + world.lease_seconds - GUARD_SECONDS)

        def arrived(lease: int) -> None:
            if world.manager.renew(lease, world.clock()).value == "ok":
                world.network.send("peer hears", heard)

        self._send("peer renews", arrived)

    def _send(self, kind: str, arrive: Callable[[int], object]) -> None:
        lease = self.match.lease
        assert lease is not None
        self.peer.world.network.send(kind, lambda: arrive(lease))


@define(eq=False)
class Fetch:
    """Brings chunks from elsewhere into slots of every rank. Its plans and their results may be lost, so
    it repeats a plan until each rank has answered or is gone."""

    world: Surroundings
    number: int
    text: Text
    first: int
    tokens: int
    ttl: float | None = None
    ranks: Sequence[Rank] = ()
    reservation: int = 0
    granted: dict[int, int] = field(factory=dict)
    failed: dict[int, set[int]] = field(factory=dict)
    jobs: dict[int, Job] = field(factory=dict)
    over: bool = False
    completed: bool = False

    @property
    def owner(self) -> str:
        return f"fetch-{self.number}"

    def start(self) -> None:
        world, text = self.world, self.text
        writes = [
            text.write(chunk, min(CHUNK, self.tokens - chunk * CHUNK))
            for chunk in range(self.first, chunks_of(self.tokens))
        ]
        answer = world.manager.reserve(
            self.owner,
            text.identity.salt,
            writes,
            world.clock(),
            ttl=self.ttl,
            content=lambda write: write.depth,
        )
        world.loop.note(",".join(item.outcome.value for item in answer.items))
        if answer.id is None:
            self.over = True
            return
        self.reservation = answer.id
        if world.loop.chance(0.06):
            world.loop.fault("writer gave up")
            world.manager.abort(answer.id)
            self.over = True
            return
        self._make_jobs(answer)
        self._ask()
        self._trouble()

    def _make_jobs(self, answer: Reservation) -> None:
        world = self.world
        self.ranks = world.ranks()
        for item, (outcome, slot) in enumerate(answer.items):
            if outcome is WriteOutcome.GRANTED:
                self.granted[item] = slot
        for rank in self.ranks:
            rows = [
                Row(slot, position, -1, stored(self._block(item, position), rank.number, world.truth.weights))
                for item, slot in self.granted.items()
                for position in range(self._held(item))
            ]
            job = Job(("fetch", self.number), self.owner, Direction.SAVE, rows)
            rank.expect(job)
            self.jobs[rank.number] = job

    def _held(self, item: int) -> int:
        """Blocks of a write."""
        return min(CHUNK, self.tokens - (self.first + item) * CHUNK) // BLOCK

    def _block(self, item: int, position: int) -> int:
        return self.text.blocks[(self.first + item) * CHUNK_BLOCKS + position]

    def _ask(self) -> None:
        """Tell, or tell again, every rank that has not answered."""
        if not all(rank.alive for rank in self.ranks):
            self.over = True
        if self.over:
            return
        for rank in self.ranks:
            if rank.number not in self.failed:
                job = self.jobs[rank.number]
                self.world.network.send("fetch plan", lambda rank=rank, job=job: self._told(rank, job))
        pause = self.world.loop.random.uniform(*RETRY_SECONDS)
        self.world.loop.after(pause, "fetch retries", self._ask)

    def _told(self, rank: Rank, job: Job) -> None:
        if rank.alive and not self.over:
            rank.submit_once(job)

    def answered(self, rank: Rank, job: Job) -> None:
        """A rank ended its job, or says again that it had."""
        failed = set(job.failed)
        self.world.network.send("fetch result", lambda: self._result(rank, failed))

    def _result(self, rank: Rank, failed: set[int]) -> None:
        if self.over:
            if self.completed and self.world.loop.chance(0.2):
                # The last answer was on its way twice, and whoever takes it does not remember.
                self.world.manager.complete(self.reservation, ())
            return
        self.failed[rank.number] = failed
        if failed:
            self.world.loop.fault("failed result")
        if len(self.failed) < len(self.ranks):
            return
        self.over = self.completed = True
        bad = set().union(*self.failed.values())
        good = [item for item, slot in self.granted.items() if slot not in bad]
        self.world.manager.complete(self.reservation, good)
        for each in self.ranks:
            each.forget(("fetch", self.number))

    def _trouble(self) -> None:
        """What may happen to a writer while its plans are under way."""
        world = self.world
        fate = world.loop.random.random()
        pause = world.loop.random.uniform(0.0, 3.0)
        if fate < 0.08:
            world.loop.after(
                pause,
                "fetch abandoned",
                lambda: world.manager.abandon(self.reservation),
                fault="writer gave up",
            )
        elif fate < 0.2:
            keep = world.loop.chance(0.4)
            world.loop.after(
                pause,
                "fetch vanishes",
                lambda: world.manager.release_owner(self.owner, keep_writes=keep),
                fault="client vanished",
            )
        elif fate < 0.4:
            world.loop.after(
                pause, "fetch renews", lambda: world.manager.renew(self.reservation, world.clock())
            )
