"""One host with everything in it: manager, runtime, engine, ranks, peers, fetches, and trouble."""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, field

from kvferry.api import UNLIMITED
from kvferry.control.lru import LRU
from kvferry.data.plans import Direction, TransferResult
from kvferry.data.wire import WIRE_VERSION, Beat, Bye, Done, FromWorker, Hello, Ready
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.requests import LoadMode
from kvferry_eviction_policies.isolated_lru import IsolatedLRU
from kvferry_eviction_policies.options import IsolatedLRUOptions
from tests.simulation.checks import LARGEST_LAG, LONGEST_LEASE_SECONDS, Checks
from tests.simulation.coverage import Coverage, StateColumn
from tests.simulation.engine import Engine
from tests.simulation.events import EventLoop, require
from tests.simulation.happenings import MOST_FACTS, Happenings
from tests.simulation.network import Network, Weather
from tests.simulation.peers import Fetch, Surroundings
from tests.simulation.quotas import SLOT_BYTES, QuotaModel, WatchedQuotas
from tests.simulation.ranks import Job, Rank, Trouble, busy, empty_slots
from tests.simulation.tiers import HostedRuntime, Tiers, TierSize
from tests.simulation.truth import BLOCK, CHUNK, GARBAGE, Numbers, Truth
from tests.simulation.watched import WatchedManager

LEASE_SECONDS, WRITE_SECONDS = 3.0, 5.0
WATCHDOG_SECONDS = 40.0
"""An engine whose worker owes a result for so long is ended by whoever watches over it."""
EPOCH = 1.7e9
"""When the world began, in seconds since 1970."""
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
    quotas: bool = False
    """Whether the policy keeps owners apart."""
    tiers: tuple[TierSize, ...] = ()
    """Below the first, fast to slow."""
    weather: Weather = field(factory=Weather)
    trouble: Trouble = field(factory=Trouble)


class World:
    """Builds all parts and lets events happen. Deterministic: the same seed gives the same history."""

    target = "simulate"
    """What ``make`` calls it."""

    def __init__(self, seed: int, settings: Settings) -> None:
        self.loop = EventLoop(seed)
        self.settings = settings
        self.coverage = Coverage()
        self.truth = Truth(self.loop.random)
        self.network = Network(self.loop, settings.weather)
        self.memories = [empty_slots(settings.slots) for _ in range(settings.ranks)]
        self.ranks: list[Rank] = []
        self.engine: Engine | None = None
        self.runtime: HostedRuntime | None = None
        self.engines = 0
        self.numbers = Numbers()
        self.fetches: dict[int, Fetch] = {}
        self.latest_timers = 0.0
        self.checks = Checks(self)
        model = QuotaModel(self.coverage)
        apart = WatchedQuotas(IsolatedLRU(IsolatedLRUOptions(default=UNLIMITED)), model)
        self.manager = WatchedManager(
            self.coverage,
            right=self.truth.right,
            holds=self.checks.wrong_in_slot,
            busy=lambda slot: busy(self.ranks, slot),
            clock=lambda: self.loop.now,
            capacity=settings.slots,
            chunk_tokens=CHUNK,
            block_tokens=BLOCK,
            model=model,
            policy=apart if settings.quotas else LRU(),
            quotas=apart if settings.quotas else None,
            slot_bytes=SLOT_BYTES,
            lease_seconds=LEASE_SECONDS,
            write_seconds=WRITE_SECONDS,
            max_pinned=0.12,
            events=MOST_FACTS,
        )
        entries = self.manager._residency.entries
        entries.state.view = StateColumn(entries.state.view, self.coverage, self.checks.slot_stepped)
        self.surroundings = Surroundings(
            self.loop,
            self.network,
            self.truth,
            self.manager,
            self.clock,
            lambda: tuple(self.ranks),
            LEASE_SECONDS,
        )
        self.tiers = Tiers(self, settings.tiers)
        self.happenings = Happenings(self)
        self._start_engine()
        self._every(0.7, "timers", self._timers)
        self._every(1.0, "beats", self._beat)
        self._every(0.2, "listener", self.happenings.listen)
        self._every(0.03, "something", self.happenings.something)

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
        self.latest_timers = self.loop.now
        if self.runtime is not None:
            self.runtime.run_timers()
        elif self.manager.next_deadline() <= self.loop.now:
            self.manager.expire(self.loop.now)

    # -- engine and workers ---------------------------------------------------------------------------

    def _start_engine(self) -> None:
        settings = self.settings
        self.engines += 1
        self.runtime = runtime = HostedRuntime(
            self.tiers,
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
            lower=self.tiers.setup(),
            wall_clock=lambda: EPOCH + self.loop.now,
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
        self.tiers.attach(runtime, self.ranks)
        for rank in self.ranks:
            self.loop.after(self.loop.random.uniform(0, 0.2), "hello", lambda rank=rank: self._hello(rank))
        self.engine = Engine(
            self.loop, self.coverage, self.truth, runtime, self.ranks, settings.blocks, self.numbers
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
                self.tiers.wake()

        self.network.send(kind, arrive, can_be_lost=can_be_lost)

    def _beat(self) -> None:
        for rank in self.ranks:
            if self.loop.now >= rank.silent_until and rank.alive:
                self._tell_runtime("beat", Beat(rank=rank.number, epoch=rank.epoch), can_be_lost=True)

    def _job_ended(self, rank: Rank, job: Job) -> None:
        origin, number = job.id
        if origin == "fetch":
            if number in self.fetches:
                self.fetches[number].answered(rank, job)
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

    def worker_fails(self) -> None:
        """One worker dies, in the middle of whatever it does; the engine notices a little later."""
        if not all(rank.alive for rank in self.ranks) or self.engine is None:
            return
        self.loop.fault("worker died")
        life = self.engines
        if self.loop.chance(0.4):
            for rank in self.ranks:
                rank.drop_everything()
                self.tiers.rank_ends(rank)
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
        self.tiers.crash()
        self.runtime.close()
        self.engine = self.runtime = None
        if self.loop.chance(0.4):
            self.loop.note("memory lost")
            self.manager.clear()
            for memory in self.memories:
                for slot in memory:
                    slot[:] = [GARBAGE] * len(slot)
        self.loop.after(self.loop.random.uniform(0.1, 1.0), "engine starts", self._start_engine)

    def check_event(self) -> None:
        """After every event."""
        self.checks.after_event()
        self.tiers.after_event()

    # -- running ----------------------------------------------------------------------------------------

    def run(self, events: int) -> None:
        """Let so many events happen. Raises :class:`SimulationFailure` at the first that must not."""
        end = self.loop.count + events
        while self.loop.count < end:
            self.loop.step()
            self.check_event()
            if self.loop.count % AUDIT_EVERY == 0:
                self.checks.audit()
                self.tiers.audit()

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
        self.checks.audit()
        self.tiers.audit()
        self.tiers.check_empty()
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
        return held + stats.quarantined == 0 and forgotten and self.tiers.quiet

    def _what_is_left(self) -> str:
        left = [request.id for request in self.engine.requests.values()] if self.engine else []
        return f"{self.manager.stats()}, requests {left}"
