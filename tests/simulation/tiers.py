"""The tiers below the first of a world: their stores, their workers, and what must hold of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define

from kvferry.config import StoreWhen
from kvferry.control.entries import State
from kvferry.control.lower import Health, LowerTier, LowerTierSettings
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.data.wire import FetchChunks, FromWorker, StoreChunks, TierOrder
from kvferry.runtime.lower_tiers import LowerSetup, StoreIdentity
from kvferry.runtime.scheduler import SchedulerRuntime
from tests.simulation.checks import LARGEST_LAG
from tests.simulation.events import SimulationFailure, require
from tests.simulation.ranks import Rank
from tests.simulation.shelves import Expected, Shelf, ShelfWorker, StoreTrouble
from tests.simulation.truth import BLOCK, CHUNK, GARBAGE, stored

if TYPE_CHECKING:
    from tests.simulation.world import World

NAMESPACE = b"a world of its own".ljust(32, b".")
OTHERS = b"another world".ljust(32, b".")
LOAD_SECONDS, STORE_SECONDS, RETRY_SECONDS = 1.5, 5.0, 2.0
SLOT_BYTES = 1
QUICK_SECONDS = 0.001


@define(frozen=True, kw_only=True)
class TierSize:
    """``chunks`` that its index thinks it holds, ``room`` for what each rank's store really holds."""

    when: StoreWhen
    chunks: int
    room: int
    in_flight: int


class HostedRuntime(SchedulerRuntime):
    """A scheduler whose orders a simulated network carries."""

    def __init__(self, tiers: Tiers, *positional: Any, **named: Any) -> None:
        self._tiers = tiers
        super().__init__(*positional, **named)

    def _post(self, rank: int, order: TierOrder) -> None:
        self._tiers.post(rank, order)

    def _wake(self) -> None:
        self._tiers.wake()


class Tiers:
    """All of one world, which go on while engines come and go."""

    def __init__(self, world: World, sizes: Sequence[TierSize]) -> None:
        self.world = world
        self._sizes = {f"lower{index}": size for index, size in enumerate(sizes)}
        self._shelves = {
            name: [Shelf(size.room) for _ in range(world.settings.ranks)]
            for name, size in self._sizes.items()
        }
        self._workers: dict[tuple[str, int], ShelfWorker] = {}
        self._ranks: Sequence[Rank] = ()
        self._runtime: SchedulerRuntime | None = None
        self._health: dict[str, Health] = {}
        self._sent_until: dict[tuple[str, int], float] = {}
        self._generation = 0
        self._awake = False
        self._counted: dict[str, float] = {}

    # Engines come and go

    def setup(self) -> LowerSetup | None:
        """For a runtime."""
        if not self._sizes:
            return None
        made = []
        for name, size in self._sizes.items():
            settings = LowerTierSettings(
                name=name,
                slot_bytes=SLOT_BYTES,
                store=size.when,
                in_flight=size.in_flight * SLOT_BYTES,
                load_deadline=LOAD_SECONDS,
                store_deadline=STORE_SECONDS,
                retry_after=RETRY_SECONDS,
            )
            made.append((settings, lambda chunks=size.chunks: _index(chunks)))
        identity = StoreIdentity(instance="a", namespace=NAMESPACE, fresh=self._fresh)
        return LowerSetup(identity=identity, tiers=tuple(made))

    def _fresh(self) -> bytes:
        self._generation += 1
        return b"generation %d".ljust(32, b".") % self._generation

    def attach(self, runtime: SchedulerRuntime, ranks: Sequence[Rank]) -> None:
        """A new life of engine and workers, over the old stores."""
        self._runtime, self._ranks = runtime, ranks
        self._sent_until.clear()
        self._health = dict.fromkeys(self._sizes, Health.PAUSED)
        self._counted.clear()
        self._workers = {
            (name, rank.number): ShelfWorker(
                self.world.loop,
                self.world.coverage,
                rank,
                name,
                shelves[rank.number],
                StoreTrouble(),
                lambda: self.world.network.calm,
                lambda message, rank=rank: self._tell(rank, message),
            )
            for name, shelves in self._shelves.items()
            for rank in ranks
        }

    def rank_ends(self, rank: Rank) -> None:
        """In good order."""
        for (_, number), worker in self._workers.items():
            if number == rank.number:
                worker.end()

    def crash(self) -> None:
        """Everything ends at once. What was not acknowledged may be there or not, and chunks of old weights
        are those of another model by the next start."""
        runtime, self._runtime = self._runtime, None
        if runtime is None or runtime._lower is None:
            return
        runtime._lower.workers_lost()
        self._look_at_health(Health.PAUSED)
        self._workers.clear()
        loop = self.world.loop
        for shelves in self._shelves.values():
            for rank, shelf in enumerate(shelves):
                if lost := shelf.crash(lambda: loop.chance(0.5)):
                    loop.fault("lost writes")
                    self.world.coverage.tier("crash: writes lost")
                    loop.note(f"{lost} lost")
                shelf.belong_to(NAMESPACE)
                for key, (chunk, cells) in list(shelf.chunks.items()):
                    if chunk is not None and GARBAGE not in cells and cells != self._right(key, rank):
                        shelf.remove(key)
                        shelf.chunks[OTHERS + key] = (None, cells)
                        self.world.coverage.tier("crash: others' chunks left")

    # Messages

    def post(self, rank: int, order: TierOrder) -> None:
        """An order for one rank; they arrive in the order of their sending."""
        target = self._ranks[rank]
        expected: Expected = {}
        if isinstance(order, StoreChunks):
            expected = {
                slot: self._right(chunk.digest, rank)
                for chunk, slot in zip(order.chunks, order.slots, strict=True)
            }
        elif isinstance(order, FetchChunks):
            target.will_write(order.slots)
        worker = self._workers[order.tier, rank]
        self._carry(("to", rank), "order", lambda: worker.take(order, expected), self._pause())

    def _tell(self, rank: Rank, message: FromWorker) -> None:
        runtime = self._runtime

        def arrive() -> None:
            if self._runtime is runtime and runtime is not None:
                runtime.deliver(message)
                self.wake()

        loop = self.world.loop
        late = not self.world.network.calm and loop.chance(0.01)
        pause = loop.random.uniform(0.2, 6.0) if late else self._pause()
        self._carry(("from", rank.number), "tier result", arrive, pause, "late message" if late else "")
        if not self.world.network.calm and loop.chance(0.35):
            at = self._sent_until["from", rank.number] + loop.random.uniform(0.0, 1.0)
            loop.after(at - loop.now, "tier result", arrive, fault="doubled message")

    def _pause(self) -> float:
        return self.world.loop.random.expovariate(1 / QUICK_SECONDS)

    def _carry(self, way: tuple[str, int], kind: str, arrive: Any, pause: float, fault: str = "") -> None:
        loop = self.world.loop
        at = max(loop.now + pause, self._sent_until.get(way, 0.0))
        self._sent_until[way] = at
        loop.after(at - loop.now, kind, arrive, fault=fault)

    def wake(self) -> None:
        """Have the service thread work soon."""
        if self._awake or self._runtime is None or self._runtime._lower is None:
            return
        self._awake = True
        runtime = self._runtime

        def work() -> None:
            self._awake = False
            if self._runtime is runtime and runtime._lower is not None:
                runtime._lower.work()

        self.world.loop.after(3 * self._pause(), "service", work)

    # Trouble

    def trouble(self) -> None:
        """Something happens to a store that nobody ordered."""
        if not self._shelves:
            return
        loop = self.world.loop
        shelf = loop.random.choice(loop.random.choice(list(self._shelves.values())))
        own = [key for key, (chunk, _) in shelf.chunks.items() if chunk is not None]
        if loop.chance(0.12):
            loop.fault("store is ill")
            shelf.ill_until = loop.now + loop.random.uniform(0.5, 4.0)
        elif own:
            key = loop.random.choice(own)
            chunk, cells = shelf.chunks[key]
            loop.fault("stored chunk lost")
            if loop.chance(0.5):
                shelf.chunks[key] = (chunk, (GARBAGE, *cells[1:]))
            else:
                shelf.remove(key)
            shelf.damaged.add(key)

    # What must hold

    def _right(self, digest: bytes, rank: int) -> tuple[int, ...]:
        truth = self.world.truth
        return tuple(stored(block, rank, truth.weights) for block in truth.right(digest))

    def lower(self) -> Sequence[LowerTier]:
        runtime = self._runtime
        return () if runtime is None or runtime._lower is None else runtime._lower.hierarchy.lower

    def after_event(self) -> None:
        """What can be looked at quickly."""
        self._look_at_health()
        for tier in self.lower():
            if not 0 <= max(tier.storing, tier.fetching) <= tier.settings.chunks_in_flight:
                raise SimulationFailure("no more is on its way than may be", f"{tier.report_of()}")
        if self._runtime is not None and self._runtime._lower is not None:
            rises = self._runtime._lower.hierarchy.rises
            for step, count in (("rise: shared", rises.shared), ("rise: took too long", rises.expired)):
                if count > self._counted.get(step, 0):
                    self._counted[step] = count
                    self.world.coverage.tier(step)

    def _look_at_health(self, now: Health | None = None) -> None:
        healths = {tier.name: tier.health for tier in self.lower()}
        for name, before in self._health.items():
            after = now or healths.get(name, before)
            if before is not after:
                self.world.coverage.tier(f"{before.value} -> {after.value}")
                self._health[name] = after

    def audit(self) -> None:
        """Everything against everything."""
        if self._runtime is None or self._runtime._lower is None:
            return
        hierarchy = self._runtime._lower.hierarchy
        try:
            for tier in hierarchy.lower:
                tier.check()
        except AssertionError as error:
            raise SimulationFailure("the tiers' own audit", str(error)) from error
        now = self.world.loop.now
        for rise in hierarchy.rises._open.values():
            late = not rise.cancelled and rise.deadline < self.world.latest_timers - LARGEST_LAG
            require(not late, "no rise goes on beyond its deadline", f"rise {rise.id} at {now}")
            waited_for = rise.cancelled or any(name in self._runtime._requests for name in rise.waiters)
            require(waited_for, "what nobody waits for is called off", f"rise {rise.id} at {now}")
        for tier in hierarchy.lower:
            for digest in _visible(tier.index) if tier.usable else ():
                for rank, shelf in enumerate(self._shelves[tier.name]):
                    held = shelf.chunks.get(digest)
                    if digest not in shelf.damaged and (held is None or held[1] != self._right(digest, rank)):
                        what = f"{tier.name} of rank {rank}: {'other bytes' if held else 'nothing'}"
                        raise SimulationFailure("what an index says is in the store", what)

    @property
    def quiet(self) -> bool:
        """Nothing is on its way."""
        if self._runtime is None or self._runtime._lower is None:
            return True
        lower = self._runtime._lower
        return lower.hierarchy.at_rest and not lower._orders

    def check_empty(self) -> None:
        """After everything came to its end: a store holds what its index says, and what is others'."""
        for tier in self.lower():
            require(not tier._writing and not tier._leaving, "all counts return", f"{tier.name}")
            stats = tier.index.stats()
            held = stats.leases + stats.reservations + stats.leased + stats.quarantined
            require(not held, "all counts return", f"{tier.name}: {stats}")
            if not tier.usable or tier._doomed or tier.index.copying.has_freed:
                continue
            known = set(_visible(tier.index)) | set(tier._foreign)
            for shelf in self._shelves[tier.name]:
                strange = set(shelf.chunks) - known - shelf.damaged
                require(not strange, "stores hold what is known", f"{tier.name}: {len(strange)} more")


def _index(chunks: int) -> CacheManager:
    index = CacheManager(
        capacity=chunks,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
    )
    index.grow(chunks)
    return index


def _visible(manager: CacheManager) -> list[bytes]:
    residency = manager._residency
    rows = np.flatnonzero(residency.entries.state.array == State.VISIBLE)
    return [residency.entries.digests.digest(row) for row in rows.tolist()]
