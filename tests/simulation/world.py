"""One host with everything in it: manager, runtime, engine, ranks, peers, fetches, and trouble."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from attrs import define, field

from kvferry.control.entries import State
from kvferry.control.lru import LRU
from kvferry.data.plans import Direction, TransferResult
from kvferry.data.wire import WIRE_VERSION, Beat, Bye, Done, FromWorker, Hello, Ready
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.requests import LoadMode, LoadState, RequestOptions
from kvferry.runtime.scheduler import SchedulerRuntime
from tests.simulation.coverage import Coverage, StateColumn
from tests.simulation.engine import Engine
from tests.simulation.events import EventLoop, SimulationFailure, require
from tests.simulation.network import Network, Weather
from tests.simulation.peers import Fetch, Peer, Surroundings
from tests.simulation.ranks import Job, Rank, Trouble, busy, empty_slots
from tests.simulation.truth import BLOCK, CHUNK, GARBAGE, Numbers, Truth, stored
from tests.simulation.watched import WatchedManager
from tests.simulation.wishes import GOING, Listener

LEASE_SECONDS, WRITE_SECONDS = 3.0, 5.0
WATCHDOG_SECONDS = 40.0
"""An engine whose worker owes a result for so long is ended by whoever watches over it."""
LONGEST_LEASE_SECONDS = 300.0
LARGEST_LAG = 0.05
MOST_FETCHES = 6
MOST_FACTS = 64
AUDIT_EVERY = 30
"""Events between two audits of everything."""


@define(kw_only=True)
class Settings:
    """The size of the world and how bad it is."""

    ranks: int = 2
    slots: int = 48
    blocks: int = 220
    load_mode: LoadMode = LoadMode.AUTO
    save_generated: bool = True
    weather: Weather = field(factory=Weather)
    trouble: Trouble = field(factory=Trouble)


class World:
    """Builds all parts and lets events happen. Deterministic: the same seed gives the same history."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self.loop = EventLoop(seed)
        self.settings = settings
        self.coverage = Coverage()
        self.truth = Truth(self.loop.random)
        self.network = Network(self.loop, settings.weather)
        self.memories = [empty_slots(settings.slots) for _ in range(settings.ranks)]
        self.ranks: list[Rank] = []
        self.engine: Engine | None = None
        self.runtime: SchedulerRuntime | None = None
        self.engines = 0
        self._numbers = Numbers()
        self._fetches: dict[int, Fetch] = {}
        self._latest_timers = 0.0
        self._dirty = False
        self._deaf_until = 0.0
        self.manager = WatchedManager(
            self.coverage,
            right=self.truth.right,
            holds=self.wrong_in_slot,
            busy=lambda slot: busy(self.ranks, slot),
            clock=lambda: self.loop.now,
            capacity=settings.slots,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            policy=LRU(),
            lease_seconds=LEASE_SECONDS,
            write_seconds=WRITE_SECONDS,
            max_pinned=0.12,
            events=MOST_FACTS,
        )
        self._listener = Listener(self.coverage)
        entries = self.manager._residency.entries
        entries.state.view = StateColumn(entries.state.view, self.coverage, self._slot_stepped)
        self._surroundings = Surroundings(
            self.loop,
            self.network,
            self.truth,
            self.manager,
            self.clock,
            lambda: tuple(self.ranks),
            LEASE_SECONDS,
        )
        self._start_engine()
        self._every(0.7, "timers", self._timers)
        self._every(1.0, "beats", self._beat)
        self._every(0.2, "listener", self._listen)
        self._every(0.03, "something", self._something)

    # -- time ---------------------------------------------------------------------------------------

    def clock(self) -> float:
        """Monotonic seconds as a caller hands them in: read before it waited for the lock, perhaps."""
        lag = self.loop.random.uniform(0.0, LARGEST_LAG) if self.loop.chance(0.2) else 0.0
        return max(0.0, self.loop.now - lag)

    def _every(self, seconds: float, kind: str, action: Callable[[], object]) -> None:
        def happen() -> None:
            if self.network.calm and kind == "something":
                return
            action()
            self.loop.after(self.loop.random.uniform(0.5, 1.5) * seconds, kind, happen)

        self.loop.after(seconds, kind, happen)

    def _timers(self) -> None:
        self._latest_timers = self.loop.now
        if self.runtime is not None:
            self.runtime.run_timers()
        elif self.manager.next_deadline() <= self.loop.now:
            self.manager.expire(self.loop.now)

    # -- engine and workers ---------------------------------------------------------------------------

    def _start_engine(self) -> None:
        settings = self.settings
        self.engines += 1
        self.runtime = runtime = SchedulerRuntime(
            self.manager,
            MeetingPlace("simulated", None, {}),
            world_size=settings.ranks,
            fingerprint="simulated",
            chunk_tokens=CHUNK,
            groups=(GroupShape(BLOCK),),
            load_mode=settings.load_mode,
            save_generated=settings.save_generated,
            quick_load_tokens=3 * CHUNK,
            clock=self.clock,
        )
        self.ranks = [
            Rank(
                self.loop,
                number,
                self.engines,
                self.memories[number],
                settings.blocks,
                settings.trouble,
                self._job_ended,
            )
            for number in range(settings.ranks)
        ]
        for rank in self.ranks:
            self.loop.after(self.loop.random.uniform(0, 0.2), "hello", lambda rank=rank: self._hello(rank))
        self.engine = Engine(
            self.loop, self.coverage, self.truth, runtime, self.ranks, settings.blocks, self._numbers
        )
        self.engine.start()

    def _hello(self, rank: Rank) -> None:
        if not rank.alive or self.runtime is None:
            return
        settings = self.settings
        hello = Hello(
            version=WIRE_VERSION,
            token="secret",
            rank=rank.number,
            world_size=settings.ranks,
            epoch=rank.epoch,
            fingerprint="simulated",
            slots=settings.slots,
            slot_bytes=1,
        )
        refusal = self.runtime.deliver(hello)
        require(refusal is None, "a worker's new life is welcome", str(refusal))
        for part in (3, 2, 1):
            ready = Ready(rank=rank.number, epoch=rank.epoch, slots=settings.slots // part)
            self._tell_runtime("ready", ready)

    def _tell_runtime(self, kind: str, message: FromWorker, *, can_be_lost: bool = False) -> None:
        def arrive() -> None:
            if self.runtime is not None:
                self.runtime.deliver(message)

        self.network.send(kind, arrive, can_be_lost=can_be_lost)

    def _beat(self) -> None:
        for rank in self.ranks:
            if self.loop.now >= rank.silent_until and rank.alive:
                self._tell_runtime("beat", Beat(rank=rank.number, epoch=rank.epoch), can_be_lost=True)

    def _job_ended(self, rank: Rank, job: Job) -> None:
        origin, number = job.id
        if origin == "fetch":
            if number in self._fetches:
                self._fetches[number].answered(rank, job)
            return
        if job.beside and self.engine is not None and rank in self.ranks:
            self.engine.job_ended(rank, job)
        if self.loop.chance(0.001) and not self.network.calm:
            self.loop.fault("lost result")
            self._watch_over()
            return
        failed = tuple(sorted(job.failed))
        if failed:
            self.loop.fault("failed result")
        result = TransferResult(id=number, failed_slots=failed, reason="simulated" if failed else "")
        kind = "load result" if job.direction is Direction.LOAD else "save result"
        self._tell_runtime(kind, Done(rank=rank.number, epoch=rank.epoch, results=(result,)))

    def _watch_over(self) -> None:
        life = self.engines
        self.loop.after(WATCHDOG_SECONDS, "watchdog", lambda: self._engine_fails(life))

    def _worker_fails(self) -> None:
        """One worker dies, in the middle of whatever it does; the engine notices a little later."""
        if not all(rank.alive for rank in self.ranks) or self.engine is None:
            return
        self.loop.fault("worker died")
        life = self.engines
        if self.loop.chance(0.4):
            for rank in self.ranks:
                rank.drop_everything()
                rank.stop()
                self._tell_runtime("bye", Bye(rank=rank.number, epoch=rank.epoch))
        else:
            self.loop.random.choice(self.ranks).die()
        pause = self.loop.random.uniform(0.0, 1.5)
        self.loop.after(pause, "engine fails", lambda: self._engine_fails(life))

    def _engine_fails(self, life: int) -> None:
        """All workers end, and the manager hears that nobody is at any slot; a new engine follows."""
        if life != self.engines or self.engine is None or self.runtime is None:
            return
        self.loop.fault("engine died")
        for rank in self.ranks:
            if rank.alive:
                rank.die()
        self.engine.die()
        ids = list(self.engine.requests)
        first = self.loop.chance(0.5)
        if first:
            self.manager.worker_lost()
        for request_id in ids:
            self.manager.release_owner(request_id)
        if not first:
            self.manager.worker_lost()
        self.runtime.close()
        self.engine = self.runtime = None
        if self.loop.chance(0.4):
            self.loop.note("memory lost")
            self.manager.clear()
            for memory in self.memories:
                for slot in memory:
                    slot[:] = [GARBAGE] * len(slot)
        self.loop.after(self.loop.random.uniform(0.1, 1.0), "engine starts", self._start_engine)

    # -- what happens ---------------------------------------------------------------------------------

    def _something(self) -> None:
        random = self.loop.random
        choices: Sequence[tuple[float, Callable[[], object]]] = (
            (20, self._client),
            (34, self._peer),
            (14, self._fetch),
            (2, lambda: self.manager.evict(random.randrange(1, 4))),
            (3, self._touch),
            (4, self._pin),
            (2.5, self._drop),
            (0.4, self._clear),
            (8, self._stale_call),
            (6, self._abort),
            (4, self._preempt),
            (0.3, self._silence),
            (0.5, self._worker_fails),
            (0.4, self._leap),
            (0.5, self._new_weights),
        )
        action = random.choices([c[1] for c in choices], [c[0] for c in choices])[0]
        action()

    def _prompt(self, text_tokens: int) -> int:
        return self.loop.random.randrange(1, text_tokens + 1)

    def _client(self) -> None:
        if self.engine is None or len(self.engine.waiting) >= self.engine.most_waiting:
            return
        random = self.loop.random
        text = self.truth.draw(random)
        total = random.randrange(2, len(text.tokens) + 1)
        prompt = max(1, total - random.randrange(1, 6))
        options = RequestOptions(store=random.random() < 0.95, load=random.random() < 0.95)
        self.engine.arrive(text, prompt, total, options)

    def _peer(self) -> None:
        text = self.truth.draw(self.loop.random)
        Peer(self._surroundings, f"peer-{self._numbers.next()}", text, self._prompt(len(text.tokens))).start()

    def _fetch(self) -> None:
        under_way = sum(not fetch.over for fetch in self._fetches.values())
        if under_way >= MOST_FETCHES or not all(rank.alive for rank in self.ranks):
            return
        text = self.truth.draw(self.loop.random)
        blocks = self.loop.random.randrange(1, min(len(text.blocks), 12) + 1)
        first = self.loop.random.choice((0, 0, 0, 1, 2))
        if first * CHUNK >= blocks * BLOCK:
            first = 0
        number = self._numbers.next()
        ttl = self.loop.random.choice((None, None, 1.0, 4.0, 12.0))
        fetch = Fetch(self._surroundings, number, text, first, blocks * BLOCK, ttl)
        self._fetches[number] = fetch
        fetch.start()
        if ttl is not None:
            # Somebody asks just when the chunks come to their end.
            peer = Peer(self._surroundings, f"peer-{self._numbers.next()}", text, blocks * BLOCK)
            self.loop.after(ttl + self.loop.random.uniform(-0.2, 0.4), "late peer", peer.start)
        for old in [n for n, known in self._fetches.items() if known.over and n < number - 100]:
            del self._fetches[old]

    def _touch(self) -> None:
        keys = self.truth.draw(self.loop.random).keys
        self.manager.touch(keys[self.loop.random.choice((0, 0, 1)) :])

    def _drop(self) -> None:
        self.loop.fault("bytes proved bad")
        text = self.truth.draw(self.loop.random)
        digests = [*text.keys, *(digest for tails in text.tails for digest, _ in tails)]
        self.manager.drop(self.loop.random.sample(digests, min(len(digests), 2)))

    def _pin(self) -> None:
        random, manager = self.loop.random, self.manager
        name = f"pin-{random.randrange(6)}"
        fate = random.random()
        if fate < 0.7:
            text = self.truth.draw(random)
            digest = random.choice([*text.keys[:4], *(digest for digest, _ in text.tails[0])])
            manager.pin(text.identity.salt, name, digest, random.uniform(0.5, 6.0), self.clock())
        elif fate < 0.85:
            manager.extend_pin(name, random.uniform(0.5, 6.0), self.clock())
        else:
            manager.unpin(name)

    def _listen(self) -> None:
        """Whoever keeps an index of this cache hears the news, or has no time for them."""
        random, manager = self.loop.random, self.manager
        if self.loop.now < self._deaf_until:
            return
        if self.loop.chance(0.03):
            self.loop.fault("deaf listener")
            self._deaf_until = self.loop.now + random.uniform(0.5, 5.0)
            return
        self._listener.listen(manager.take_events, random.choice((5, MOST_FACTS, MOST_FACTS)))
        if manager.events_behind and manager.tell(self.truth.draw(random).keys, 0, lambda index: index):
            self.coverage.wish("told: caught up")
            return
        events = manager._residency.events
        if events is not None and not len(events):
            self._listener.check(manager._residency)

    def _clear(self) -> None:
        salt = self.loop.random.choice(("", "red", "blue", "red", "blue", None))
        if self.loop.chance(0.5):
            self.coverage.wish("clear: in slices")
            cursor = self.manager.clear_in_slices(salt)

            def advance() -> None:
                if cursor.advance(2):
                    self.loop.after(0.001, "clear slice", advance)

            advance()
            return
        limit = self.loop.random.choice((None, 2))
        while True:
            gone = self.manager.clear(salt, limit)
            if limit is None or not gone.removed + gone.kept:
                return

    def _stale_call(self) -> None:
        """A message about a lease that ended long ago, or that never was."""
        self.loop.fault("stale call")
        manager, random = self.manager, self.loop.random
        number = random.choice(manager.ended) if manager.ended and random.random() < 0.8 else 10**9
        given_up = [n for n, write in manager.writes.items() if write.given_up]
        if given_up and random.random() < 0.3:
            manager.renew(random.choice(given_up), self.clock())
            return
        call = random.choice(
            (
                manager.release,
                manager.begin_load,
                manager.finish_load,
                manager.abandon,
                lambda n: manager.renew(n, self.clock()),
                lambda n: manager.complete(n, ()),
                lambda n: manager.release_owner("nobody"),
            )
        )
        call(number)

    def _abort(self) -> None:
        if self.engine is not None:
            self.engine.abort_one()

    def _preempt(self) -> None:
        if self.engine is not None:
            self.engine.preempt_one()

    def _silence(self) -> None:
        if self.ranks:
            self.loop.fault("silent worker")
            rank = self.loop.random.choice(self.ranks)
            rank.silent_until = self.loop.now + self.loop.random.uniform(5.0, 25.0)

    def _leap(self) -> None:
        self.loop.fault("clock leap")
        self.loop.leap(self.loop.random.uniform(0.5, 8.0))

    def _new_weights(self) -> None:
        if self.engine is not None:
            self.engine.reset_soon()

    # -- checks ---------------------------------------------------------------------------------------

    def wrong_in_slot(self, slot: int, blocks: Sequence[int]) -> str:
        for rank, memory in enumerate(self.memories):
            held = memory[slot]
            for position, block in enumerate(blocks):
                if held[position] != stored(block, rank, self.truth.weights):
                    return f"rank {rank} has other bytes in block {position} of slot {slot}"
        return ""

    def _slot_stepped(self, row: int, before: State, after: State) -> None:
        self._dirty = True
        residency = self.manager._residency
        entries, slot = residency.entries, residency.tier.slot.view[row]
        if after is State.VISIBLE:
            blocks = self.truth.right(entries.digests.digest(row))
            wrong = self.wrong_in_slot(slot, blocks)
            require(not wrong, "visible only when all ranks wrote", wrong)
        if after in GOING:
            evicted = before is State.VISIBLE and self.manager.evicting
            digest = entries.digests.digest(row)
            self.manager.pinned.leaves(digest, self.loop.now, evicted=evicted)
        if before is State.VISIBLE:
            behind = (entries.parent.array == row) & (entries.state.array == State.VISIBLE)
            require(not behind.any(), "tails go before heads", f"row {row} goes before what is behind it")
        if after is State.FREE:
            read = self.manager.slots_read[slot] > 0
            require(not read, "a leased slot stays", f"slot {slot} was freed under a read lease")
            name = "a slot that may be written stays"
            require(not busy(self.ranks, slot), name, f"a worker may still write slot {slot}")

    def check_event(self) -> None:
        """After every event: what can be looked at quickly."""
        if not self._dirty:
            return
        self._dirty = False
        stats = self.manager.stats()
        parts = stats.free + stats.resident + stats.retiring + stats.reserved + stats.quarantined
        require(parts == stats.capacity, "slots are counted rightly", str(stats))
        manager = self.manager
        counts = (len(manager.reads), len(manager.writes))
        require(
            (stats.leases, stats.reservations) == counts, "every lease ends", f"{stats}, due are {counts}"
        )
        leased = sum(count > 0 for count in manager.slots_read.values())
        require(stats.leased == leased, "leased slots are counted rightly", f"{stats}, due are {leased}")
        entries = manager._residency.entries
        visible = np.flatnonzero(entries.state.array == State.VISIBLE)
        parents = entries.parent.array[visible]
        parents = parents[parents >= 0]
        whole = bool((entries.state.array[parents] == State.VISIBLE).all())
        require(whole, "a visible chunk has all before it", "a chain has a hole")

    def audit(self) -> None:
        """Now and then: everything against everything."""
        try:
            self.manager.check()
        except AssertionError as error:
            raise SimulationFailure("the manager's own audit", str(error)) from error
        now = self.loop.now
        for number, read in self.manager.reads.items():
            late = not read.in_flight and read.deadline < self._latest_timers - LARGEST_LAG
            late |= now - read.opened > LONGEST_LEASE_SECONDS
            require(not late, "every lease ends", f"lease {number} of {read.owner} since {read.opened}")
            if read.owner.startswith("request-") and not read.in_flight and self.runtime is not None:
                state = self.runtime._requests.get(read.owner)
                matched = state is not None and state.load is LoadState.MATCHED and state.lease == number
                require(matched, "a match is given back at once", f"lease {number} of {read.owner}")
        for number, write in self.manager.writes.items():
            late = now - write.opened > LONGEST_LEASE_SECONDS
            require(not late, "every lease ends", f"reservation {number} of {write.owner}")
        residency = self.manager._residency
        for row in np.flatnonzero(residency.entries.state.array == State.VISIBLE).tolist():
            blocks = self.truth.right(residency.entries.digests.digest(row))
            wrong = self.wrong_in_slot(residency.tier.slot.view[row], blocks)
            require(not wrong, "visible chunks are right on all ranks", wrong)

    # -- running ----------------------------------------------------------------------------------------

    def run(self, events: int) -> None:
        """Let so many events happen. Raises :class:`SimulationFailure` at the first that must not."""
        end = self.loop.count + events
        while self.loop.count < end:
            self.loop.step()
            self.check_event()
            if self.loop.count % AUDIT_EVERY == 0:
                self.audit()

    def drain(self) -> None:
        """Nobody comes any more and nothing fails any more: all must end, and all counts return."""
        self.network.calm = True
        if self.engine is not None:
            self.engine.abort_all()
        deadline = self.loop.now + LONGEST_LEASE_SECONDS
        while not self._quiet():
            require(self.loop.now < deadline, "all counts return", self._what_is_left())
            self.loop.step()
            self.check_event()
        self.audit()
        assert self.engine is not None
        assert self.runtime is not None
        self.engine.check_empty()
        statistics = self.runtime.statistics()[1]
        self.manager.clear()
        stats = self.manager.stats()
        require(stats.free == stats.capacity == statistics.capacity, "all counts return", str(stats))
        self.manager.check()

    def _quiet(self) -> bool:
        stats = self.manager.stats()
        held = stats.leases + stats.reservations + stats.leased + stats.retiring + stats.reserved
        if self.engine is None or self.runtime is None or not self.engine.idle:
            return False
        forgotten = not self.runtime._requests and not self.runtime._in_flight._open
        return held + stats.quarantined == 0 and forgotten

    def _what_is_left(self) -> str:
        left = [request.id for request in self.engine.requests.values()] if self.engine else []
        return f"{self.manager.stats()}, requests {left}"
