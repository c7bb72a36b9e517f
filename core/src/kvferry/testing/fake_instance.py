"""A whole instance around a fake engine: manager, both runtimes, a tier per rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from attrs import define, field

from kvferry.api import (
    Backend,
    Channel,
    EvictionPolicy,
    GroupGeometry,
    KVGeometry,
    PeerCarrier,
    PeerId,
    QuotaPolicy,
    Staging,
)
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.loans import BorrowSettings
from kvferry.control.lower import LowerTierSettings
from kvferry.control.lru import LRU
from kvferry.control.manager import CacheManager
from kvferry.control.serving import ServingSettings
from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.peer_side import LandingSetup, PeerSide
from kvferry.data.private_memory import PrivateArena
from kvferry.data.staging_side import StagingSide
from kvferry.data.store_side import StoreSide
from kvferry.data.tier_side import TierSide
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.admin import TierCard
from kvferry.runtime.grain import Grain, GroupShape
from kvferry.runtime.lower_tiers import LowerSetup, StoreIdentity
from kvferry.runtime.scheduler import SchedulerRuntime
from kvferry.runtime.sharing import SharingSetup
from kvferry.runtime.sharing_statistics import SharingState
from kvferry.runtime.worker import WorkerRuntime
from kvferry.testing.backends import MemoryBackend, MemoryOptions
from kvferry.testing.fake_engine import EngineSettings, FakeEngine
from kvferry.testing.fake_memory import FakeGroup, FakeMemory
from kvferry.testing.memory_carrier import MemoryCarrier

MakeCopier = Callable[[int, MemoryBackend, int], SpanCopier]
"""Makes the copier of one rank from its number, its tier and the size of a slot."""


MakeKeyed = Callable[[int], Backend]
"""Makes a closed backend of one rank: a new one for every opening."""


@define(kw_only=True)
class LowerFake:
    """A tier below the first: ``chunks`` that its index thinks it holds, what makes its backends, and
    further fields of :class:`~kvferry.control.lower.LowerTierSettings`."""

    make_backend: MakeKeyed
    name: str = "lower"
    chunks: int = 256
    settings: Mapping[str, Any] = field(factory=dict)
    policy: Callable[[], EvictionPolicy] = LRU
    quotas: Callable[[], QuotaPolicy] | None = None
    """Instead of ``policy``, one that keeps owners apart."""
    ttl: float | None = None


@define(kw_only=True)
class SharingFake:
    """What an instance shares with others: ``carrier`` has its messages, ``make_channel`` makes the closed
    channel of a rank. ``settings`` are further fields of :class:`~kvferry.control.loans.BorrowSettings`."""

    id: PeerId
    carrier: PeerCarrier
    make_channel: Callable[[], Channel]
    settings: Mapping[str, Any] = field(factory=dict)
    serving: ServingSettings = field(factory=ServingSettings)
    make_staging: Callable[[int], Staging] | None = None
    """Makes the closed staging of a rank from its length in bytes; with ``serving.staging_slots``."""
    buffer_slots: int = 4
    """Of the landing buffers, where reads pass through some."""
    keep: bool = True


@define(kw_only=True)
class InstanceSettings:
    """``slots`` is the tier's capacity in chunks, ``chunk_blocks`` the size of a chunk in blocks. ``lower``
    are further tiers, fast to slow; ``alignment`` is that of slots."""

    engine: EngineSettings = field(factory=EngineSettings)
    groups: tuple[FakeGroup, ...] = (FakeGroup(),)
    world_size: int = 1
    chunk_blocks: int = 4
    slots: int = 64
    save_generated: bool = True
    verify: bool = False
    engine_id: str = "fake"
    lower: tuple[LowerFake, ...] = ()
    sharing: SharingFake | None = None
    alignment: int = 1
    namespace: str = "fake"
    clock: Callable[[], float] = time.monotonic
    """The scheduler's; that of workers is the system's."""

    @property
    def shapes(self) -> tuple[GroupShape, ...]:
        return tuple(group.shape(self.engine.block_tokens) for group in self.groups)


@define
class FakeInstance:
    """Everything a test may want to look at or to turn."""

    engine: FakeEngine
    scheduler: SchedulerRuntime
    workers: tuple[WorkerRuntime, ...]
    manager: CacheManager
    memories: tuple[FakeMemory, ...]
    new_chain: Callable[[str, LoRAIdentity | None], KeyChain]
    settings: InstanceSettings

    def settle(self, seconds: float = 10.0) -> None:
        """Wait until the scheduler has heard of everything that the workers did."""
        wait_until(self._quiet, seconds, "transfers without a result")

    def settle_saves(self, seconds: float = 10.0) -> None:
        """Step the engine until every save that was planned has its result."""

        def saved() -> bool:
            self.engine.step()
            return self.scheduler.statistics()[1].reservations == 0

        wait_until(saved, seconds, "saves without a result")

    def wait_ready(self, seconds: float = 10.0) -> None:
        """Wait until all workers are known and their whole tier is ready."""
        wait_until(self._ready, seconds, "workers that never became ready")

    def check_idle(self) -> None:
        """No lease, no reservation, no slot out of use; books and blocks agree."""
        stats = self.manager.stats()
        assert (stats.leases, stats.reservations, stats.leased) == (0, 0, 0), stats
        assert (stats.reserved, stats.retiring, stats.quarantined) == (0, 0, 0), stats
        self.manager.check()
        self.engine.check_idle()

    def lower_open(self) -> bool:
        """Whether every lower tier is in use."""
        return all(tier.health == "open" for tier in self.scheduler.lower_tiers())

    def settle_lower(self, seconds: float = 10.0) -> None:
        """Wait until nothing is on its way between tiers."""

        def settled() -> bool:
            return self._quiet() and self.scheduler.lower_at_rest()

        self.settle_saves(seconds)
        wait_until(settled, seconds, "copies between tiers without a result")

    def settle_told(self, seconds: float = 10.0) -> None:
        """The same, and wait until a carrier in memory has told peers of all that there is."""
        self.settle_lower(seconds)
        sharing = self.scheduler.sharing
        assert self.settings.sharing is not None, "nothing is shared"
        assert sharing is not None

        def told() -> bool:
            retired = sharing.statistics(0).state is SharingState.RETIRED
            return retired or not self.manager.copying.has_servable

        wait_until(told, seconds, "chunks that nobody was told of")
        carrier = self.settings.sharing.carrier
        assert isinstance(carrier, MemoryCarrier), "another carrier says for itself when it has told"
        assert carrier.flush(seconds), "a carrier that carries nothing"

    def _quiet(self) -> bool:
        stats = self.scheduler.statistics()[1]
        return stats.reservations == 0 and stats.leases == 0

    def _ready(self) -> bool:
        stats = self.scheduler.statistics()[1]
        return self.scheduler.workers_ready() and stats.capacity > 0


def wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    """Poll until ``condition()``; ``AssertionError`` with ``what`` at the deadline."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} after {seconds:g} s"
        time.sleep(0.001)


def numpy_copier(rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
    """The copier that works everywhere."""
    del rank, backend, slot_bytes
    return NumpyCopier()


@contextmanager
def open_fake_instance(
    folder: Path,
    settings: InstanceSettings | None = None,
    *,
    make_copier: MakeCopier = numpy_copier,
    policy: EvictionPolicy | None = None,
    watch: Callable[[CacheManager], object] | None = None,
    manager_options: Mapping[str, Any] | None = None,
    card: str = "",
) -> Iterator[FakeInstance]:
    """Open all of it, workers known and ready, and close all of it.

    ``folder`` must have a short path: a socket lies in it. ``watch`` is told of the manager, for a
    guard that looks for leaks. ``manager_options`` are further arguments of the manager; ``card`` is
    what operators read.
    """
    settings = settings or InstanceSettings()
    engine = settings.engine
    chunk_tokens = settings.chunk_blocks * engine.block_tokens
    manager = CacheManager(
        capacity=settings.slots,
        chunk_tokens=chunk_tokens,
        block_tokens=Grain.of(chunk_tokens, settings.shapes).block,
        policy=policy or LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
        **(manager_options or {}),
    )
    if watch is not None:
        watch(manager)
    with ExitStack() as stack:
        scheduler = SchedulerRuntime(
            manager,
            MeetingPlace(settings.engine_id, str(folder), {}),
            world_size=settings.world_size,
            fingerprint="fake",
            chunk_tokens=chunk_tokens,
            groups=settings.shapes,
            load_mode=engine.load_mode,
            quick_load_tokens=engine.quick_load_tokens,
            save_generated=settings.save_generated,
            tier=TierCard(name="memory", slot_bytes=(manager_options or {}).get("slot_bytes", 0)),
            card=card,
            events=bool((manager_options or {}).get("events")),
            lower=_lower_setup(settings) if settings.lower or settings.sharing else None,
            sharing=_sharing_setup(settings),
            clock=settings.clock,
        )
        scheduler.open()
        stack.callback(scheduler.close)
        memories = []
        workers = []
        for rank in range(settings.world_size):
            blocks = engine.pool_blocks(len(settings.groups))
            memory = FakeMemory(settings.groups, blocks=blocks, block_tokens=engine.block_tokens, rank=rank)
            worker = _worker(folder, settings, memory, rank, make_copier)
            worker.open()
            stack.callback(worker.close)
            memories.append(memory)
            workers.append(worker)
        new_chain = key_chains(settings)
        instance = FakeInstance(
            FakeEngine(engine, scheduler, workers, memories, new_chain),
            scheduler,
            tuple(workers),
            manager,
            tuple(memories),
            new_chain,
            settings,
        )
        instance.wait_ready()
        if settings.lower:
            wait_until(instance.lower_open, 10.0, "a lower tier that was never open")
        yield instance


def _worker(
    folder: Path, settings: InstanceSettings, memory: FakeMemory, rank: int, make_copier: MakeCopier
) -> WorkerRuntime:
    chunk_tokens = settings.chunk_blocks * settings.engine.block_tokens
    side = EngineSide(memory.engine_groups(), chunk_tokens, settings.alignment)
    slot_bytes = side.layout.total_bytes
    backend = MemoryBackend(MemoryOptions(), settings.slots * slot_bytes)
    return WorkerRuntime(
        side,
        StoreSide("memory", backend, slot_bytes, rank),
        make_copier(rank, backend, slot_bytes),
        MeetingPlace(settings.engine_id, str(folder), {}),
        rank=rank,
        world_size=settings.world_size,
        epoch=1000 + rank,
        fingerprint="fake",
        verify=settings.verify,
        tiers=[_tier_side(settings, side, rank, tier) for tier in settings.lower],
        peers=_peer_side(settings, side, rank),
    )


def _peer_side(settings: InstanceSettings, side: EngineSide, rank: int) -> PeerSide | None:
    if settings.sharing is None:
        return None
    return PeerSide(
        "fake",
        settings.sharing.make_channel,
        side,
        settings.chunk_blocks * settings.engine.block_tokens,
        rank=rank,
        world_size=settings.world_size,
        retry_seconds=0.1,
        landing=_landing_setup(settings, side),
        staging=_staging_side(settings, settings.sharing, side, rank),
    )


def _staging_side(
    settings: InstanceSettings, sharing: SharingFake, side: EngineSide, rank: int
) -> StagingSide | None:
    make_staging, slots = sharing.make_staging, sharing.serving.staging_slots
    if make_staging is None or slots is None:
        return None
    return StagingSide(
        lambda: make_staging(slots * side.layout.total_bytes),
        side,
        settings.chunk_blocks * settings.engine.block_tokens,
        rank=rank,
        world_size=settings.world_size,
    )


def _landing_setup(settings: InstanceSettings, side: EngineSide) -> LandingSetup | None:
    sharing = settings.sharing
    if sharing is None or not (sharing.settings.get("delay") or sharing.make_staging):
        return None
    return LandingSetup(
        capacity=sharing.buffer_slots * side.layout.total_bytes,
        make_arena=PrivateArena,
        copier=NumpyCopier(),
        verify=settings.verify,
    )


def _sharing_setup(settings: InstanceSettings) -> SharingSetup | None:
    sharing = settings.sharing
    if sharing is None:
        return None
    chunk_tokens = settings.chunk_blocks * settings.engine.block_tokens
    return SharingSetup(
        id=sharing.id,
        namespace=settings.namespace.encode().ljust(32, b"\x00"),
        chunk_tokens=chunk_tokens,
        block_tokens=Grain.of(chunk_tokens, settings.shapes).block,
        channel="fake",
        carrier=sharing.carrier,
        serving=sharing.serving,
        keep=sharing.keep,
    )


def _tier_side(settings: InstanceSettings, side: EngineSide, rank: int, tier: LowerFake) -> TierSide:
    chunk_tokens = settings.chunk_blocks * settings.engine.block_tokens
    return TierSide(
        tier.name,
        lambda: tier.make_backend(rank),
        side,
        chunk_tokens,
        rank=rank,
        world_size=settings.world_size,
    )


def _lower_setup(settings: InstanceSettings) -> LowerSetup:
    chunk_tokens = settings.chunk_blocks * settings.engine.block_tokens
    blocks = settings.chunk_blocks
    slot_bytes = sum(
        blocks * group.block_bytes
        for group in FakeMemory(
            settings.groups, blocks=2, block_tokens=settings.engine.block_tokens
        ).engine_groups()
    )

    def made(tier: LowerFake) -> tuple[LowerTierSettings, Callable[[], CacheManager]]:
        def make_index() -> CacheManager:
            quotas = None if tier.quotas is None else tier.quotas()
            index = CacheManager(
                capacity=tier.chunks,
                chunk_tokens=chunk_tokens,
                block_tokens=Grain.of(chunk_tokens, settings.shapes).block,
                policy=quotas or tier.policy(),
                lease_seconds=60.0,
                write_seconds=120.0,
                quotas=quotas,
                slot_bytes=slot_bytes,
                ttl=tier.ttl,
            )
            index.grow(tier.chunks)
            return index

        return LowerTierSettings(name=tier.name, slot_bytes=slot_bytes, **tier.settings), make_index

    identity = StoreIdentity(instance=settings.engine_id, namespace=_namespace(settings).digest)
    borrow = None
    if settings.sharing is not None:
        borrow = BorrowSettings(slot_bytes=slot_bytes, **settings.sharing.settings)
    return LowerSetup(identity=identity, tiers=tuple(made(tier) for tier in settings.lower), borrow=borrow)


def fake_geometry(groups: Sequence[FakeGroup], chunk_tokens: int) -> KVGeometry:
    """The shape of a model with these groups."""
    return KVGeometry(
        groups=tuple(
            GroupGeometry(
                kind=group.kind,
                layers=group.layers,
                kv_heads=group.heads,
                head_size=group.head_bytes,
                dtype="uint8",
                window=group.window,
            )
            for group in groups
        ),
        chunk_tokens=chunk_tokens,
    )


def key_chains(settings: InstanceSettings) -> Callable[[str, LoRAIdentity | None], KeyChain]:
    """What makes the key chains of such an instance's requests."""
    namespace = _namespace(settings)

    def new_chain(salt: str, lora: LoRAIdentity | None) -> KeyChain:
        return KeyChain(namespace, salt=salt, lora=lora)

    return new_chain


def _namespace(settings: InstanceSettings) -> Namespace:
    geometry = fake_geometry(settings.groups, settings.chunk_blocks * settings.engine.block_tokens)
    return Namespace(model=settings.namespace, revision="1", geometry=geometry)
