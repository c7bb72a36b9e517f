"""Opens the two sides of an engine from a checked configuration."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from kvferry.api import API_VERSION, KVGeometry, PeerCarrier, PeerId
from kvferry.api.units import round_up
from kvferry.config import DEFAULT_INSTANCE, Config, Tier
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.loans import BorrowSettings
from kvferry.control.lower import LowerTierSettings
from kvferry.control.manager import CacheManager
from kvferry.control.serving import ServingSettings
from kvferry.control.tokens import TokenPacker, pack_tokens
from kvferry.data.copy import choose_copier
from kvferry.data.engine_side import EngineGroup, EngineSide
from kvferry.data.native import find_native
from kvferry.data.peer_side import LandingSetup, PeerSide
from kvferry.data.private_memory import PrivateArena
from kvferry.data.staging_side import StagingSide
from kvferry.data.store_side import StoreSide
from kvferry.data.tier_side import TierSide
from kvferry.data.wire import WIRE_VERSION
from kvferry.plugins import LoadedPlugins
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.admin import TierCard
from kvferry.runtime.events import FACTS_KEPT
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.instances import instance_card
from kvferry.runtime.lower_tiers import LowerSetup, StoreIdentity
from kvferry.runtime.requests import LoadMode
from kvferry.runtime.scheduler import SchedulerRuntime
from kvferry.runtime.sharing import SharingSetup
from kvferry.runtime.worker import WorkerRuntime

LEASE_SECONDS = 60.0
"""How long a matched prefix waits for its request's turn; asking again renews it."""
WRITE_SECONDS = 60.0
"""How long a save may take before its slots are set aside until its result comes."""
QUICK_LOAD_BYTES = 128 << 20
"""What may be loaded in front of a forward pass of its own: about 10 ms of copying."""
EPOCH_BYTES = 16
LEASES_AT_MOST = 10
"""As long as so many leases one read of a peer may last, renewed all the time."""
PEER_RETRY_SECONDS = 1.0
"""How long a peer that could not be connected to is left alone."""
PAGE_BYTES = 4096
"""What direct file I/O is aligned to everywhere."""
HEADER_BYTES, ALIAS_BYTES = 1024, 36
"""Of the header that stands beside a chunk's bytes (:class:`kvferry.api.ChunkHeader`): its fixed part with
texts of usual length, and each digest of a beginning."""
CHAIN_CACHE_BYTES = 64 << 20
"""Bound of the memory that lets a later turn hash its new tokens only."""


@frozen(kw_only=True)
class EngineDescription:
    """What both sides must know of the engine. The scheduler's and the workers' must agree."""

    engine_id: str
    world_size: int
    groups: tuple[GroupShape, ...]
    """The KV cache groups in the order of the engine's block tables."""
    block_bytes: tuple[int, ...]
    """Per group, of one block over all its layers on the rank with the most of them."""
    data_parallel_rank: int = 0
    """Engines of one deployment that share a configuration are told apart by it, also after a restart."""

    @property
    def block_tokens(self) -> int:
        """Tokens that are whole blocks in every group: the grain of hits."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    def bytes_of(self, tokens: int) -> int:
        """Bytes of so many tokens, whole blocks in every group."""
        sizes = zip(self.groups, self.block_bytes, strict=True)
        return sum(tokens // group.block_tokens * size for group, size in sizes)


@frozen(kw_only=True)
class SavingOptions:
    """What a connector's options say about saving and loading."""

    load: LoadMode = LoadMode.AUTO
    save_generated: bool = True
    verify: bool = False
    events: bool = False
    """Whether the host publishes what becomes of the tier's content."""


def open_scheduler(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    options: SavingOptions,
    environment: Mapping[str, str],
    space: Namespace,
) -> SchedulerRuntime:
    """Build and open the scheduler side. Raises :class:`KVFerryError`; does not wait for workers."""
    (name, tier), *lower = config.tiers.items()
    slot_bytes = slot_bytes_of(config, engine)
    manager = _manager(
        config,
        plugins,
        engine,
        tier,
        slots=tier.capacity // slot_bytes,
        write_seconds=WRITE_SECONDS,
        events=FACTS_KEPT if options.events else 0,
    )
    runtime = SchedulerRuntime(
        manager,
        MeetingPlace(engine.engine_id, config.runtime_dir, environment),
        world_size=engine.world_size,
        fingerprint=fingerprint(config, plugins),
        chunk_tokens=config.chunk_tokens,
        groups=engine.groups,
        load_mode=options.load,
        save_generated=options.save_generated,
        quick_load_tokens=QUICK_LOAD_BYTES * engine.block_tokens // engine.bytes_of(engine.block_tokens),
        tier=TierCard(name=name, slot_bytes=slot_bytes),
        card=instance_card(config, engine.engine_id),
        events=options.events,
        lower=_lower_setup(config, plugins, engine, space, lower) if lower or config.p2p.use else None,
        sharing=_sharing_setup(config, plugins, engine, space, environment),
    )
    runtime.open()
    return runtime


def _manager(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    tier: Tier,
    *,
    slots: int,
    write_seconds: float,
    events: int = 0,
) -> CacheManager:
    factory = plugins.factory("eviction", tier.eviction.use)
    policy = factory() if tier.eviction.options is None else factory(tier.eviction.options)
    return CacheManager(
        capacity=max(1, slots),
        chunk_tokens=config.chunk_tokens,
        block_tokens=engine.block_tokens,
        policy=policy,
        lease_seconds=LEASE_SECONDS,
        write_seconds=write_seconds,
        quotas=policy if plugins.eviction(tier.eviction.use).quotas else None,
        slot_bytes=slot_bytes_of(config, engine),
        max_pinned=tier.max_pinned,
        ttl=tier.ttl,
        events=events,
    )


def slot_bytes_of(config: Config, engine: EngineDescription) -> int:
    """From one slot of the first tier to the next, on the rank with the most bytes."""
    return round_up(engine.bytes_of(config.chunk_tokens), alignment_of(config))


def alignment_of(config: Config) -> int:
    """What slots of the first tier are aligned to: tiers below it read and write them directly."""
    return PAGE_BYTES if len(config.tiers) > 1 else 1


def header_bytes_of(config: Config, engine: EngineDescription) -> int:
    """Room for the header of a chunk: a digest for each of its beginnings that end at a block, and texts of
    usual length."""
    beginnings = config.chunk_tokens // engine.block_tokens
    return round_up(HEADER_BYTES + ALIAS_BYTES * beginnings, PAGE_BYTES)


def _lower_setup(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    space: Namespace,
    tiers: Sequence[tuple[str, Tier]],
) -> LowerSetup:
    slot_bytes = slot_bytes_of(config, engine)
    header_bytes = header_bytes_of(config, engine)

    def made(name: str, tier: Tier) -> tuple[LowerTierSettings, Callable[[], CacheManager]]:
        slots = max(1, tier.capacity // (slot_bytes + header_bytes))

        def make_index() -> CacheManager:
            index = _manager(
                config,
                plugins,
                engine,
                tier,
                slots=slots,
                write_seconds=WRITE_SECONDS + 2 * tier.store_deadline,
            )
            index.grow(slots)
            return index

        settings = LowerTierSettings(
            name=name,
            slot_bytes=slot_bytes,
            store=tier.store,
            in_flight=tier.in_flight,
            load_deadline=tier.load_deadline,
            store_deadline=tier.store_deadline,
            min_load_tokens=tier.min_load_tokens,
            retry_after=tier.retry_after,
        )
        return settings, make_index

    instance = _of_its_rank(config.instance or DEFAULT_INSTANCE, engine)
    identity = StoreIdentity(instance=instance, namespace=space.digest, header_bytes=header_bytes)
    p2p = config.p2p
    borrow = None
    if p2p.use is not None:
        borrow = BorrowSettings(
            slot_bytes=slot_bytes,
            in_flight=p2p.in_flight,
            load_deadline=p2p.load_deadline,
            guard_seconds=p2p.guard,
            min_load_tokens=p2p.min_load_tokens,
            pause_seconds=p2p.pause,
            delay=_lands_on_device(config, engine),
        )
    return LowerSetup(identity=identity, tiers=tuple(made(name, tier) for name, tier in tiers), borrow=borrow)


def _of_its_rank(instance: str, engine: EngineDescription) -> str:
    """The name of an instance, other for each data-parallel rank. None can have such a name of its own."""
    return f"{instance}/dp{engine.data_parallel_rank}" if engine.data_parallel_rank else instance


def _lands_on_device(config: Config, engine: EngineDescription) -> bool:
    """Whether what peers lend goes into the engine's blocks at once. Where a group has a window it does not:
    what a slot lacks is known only to whoever filled it."""
    return config.p2p.delay and all(group.window is None for group in engine.groups)


def _sharing_setup(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    space: Namespace,
    environment: Mapping[str, str],
) -> SharingSetup | None:
    """What reads from other instances, where the configuration has it."""
    p2p = config.p2p
    if p2p.use is None:
        return None
    carrier: PeerCarrier = plugins.factory("source", p2p.use)(p2p.options, config.lookup.options, environment)
    instance = _of_its_rank(config.instance or engine.engine_id, engine)
    return SharingSetup(
        id=PeerId(instance, secrets.token_bytes(EPOCH_BYTES)),
        namespace=space.digest,
        chunk_tokens=config.chunk_tokens,
        block_tokens=engine.block_tokens,
        channel=config.channel.use or "",
        carrier=carrier,
        serving=ServingSettings(
            lease_seconds=p2p.lease,
            longest_seconds=LEASES_AT_MOST * p2p.lease,
            share=p2p.max_lent,
            staging_slots=_staging_slots(config, engine),
            # Who asked waits so long as a rule, and computes what it has not got by then.
            staging_seconds=p2p.load_deadline,
        ),
        keep=p2p.keep,
    )


def _staging_slots(config: Config, engine: EngineDescription) -> int | None:
    """How many chunks fit into the staging of every rank, if there is one."""
    if config.staging.use is None:
        return None
    return config.staging.capacity // slot_bytes_of(config, engine)


def open_worker(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    options: SavingOptions,
    environment: Mapping[str, str],
    *,
    rank: int,
    groups: Sequence[EngineGroup],
) -> WorkerRuntime:
    """Build and open one rank's side over the engine's registered memory.

    Raises :class:`KVFerryError`; does not wait for the scheduler.
    """
    (name, tier), *lower = config.tiers.items()
    backend = plugins.factory("backend", tier.use)(tier.options, tier.capacity)
    engine_side = EngineSide(groups, config.chunk_tokens, alignment_of(config))
    runtime = WorkerRuntime(
        engine_side,
        StoreSide(name, backend, engine_side.layout.total_bytes, rank),
        choose_copier().copier,
        MeetingPlace(engine.engine_id, config.runtime_dir, environment),
        rank=rank,
        world_size=engine.world_size,
        epoch=secrets.randbits(62),
        fingerprint=fingerprint(config, plugins),
        verify=options.verify,
        tiers=[_tier_side(config, plugins, engine, engine_side, rank, name, tier) for name, tier in lower],
        peers=_peer_side(config, plugins, engine, engine_side, rank, environment, verify=options.verify),
    )
    runtime.open()
    return runtime


def _tier_side(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    side: EngineSide,
    rank: int,
    name: str,
    tier: Tier,
) -> TierSide:
    """What carries out orders of one lower tier. A new backend is made for every opening."""
    factory = plugins.factory("backend", tier.use)
    return TierSide(
        name,
        lambda: factory(tier.options, tier.capacity),
        side,
        config.chunk_tokens,
        rank=rank,
        world_size=engine.world_size,
        most=plugins.backend(tier.use).capabilities.max_value_bytes,
    )


def _peer_side(
    config: Config,
    plugins: LoadedPlugins,
    engine: EngineDescription,
    side: EngineSide,
    rank: int,
    environment: Mapping[str, str],
    *,
    verify: bool,
) -> PeerSide | None:
    """What reads from peers, where there is a channel. A new one is made for every opening."""
    name, options = config.channel.use, config.channel.options
    if name is None:
        return None
    factory = plugins.factory("channel", name)
    return PeerSide(
        name,
        lambda: factory(options),
        side,
        config.chunk_tokens,
        rank=rank,
        world_size=engine.world_size,
        retry_seconds=PEER_RETRY_SECONDS,
        max_ops=plugins.channel(name).capabilities.max_ops,
        variables=environment,
        landing=_landing_setup(config, engine, verify),
        staging=_staging_side(config, plugins, engine, side, rank),
    )


def _staging_side(
    config: Config, plugins: LoadedPlugins, engine: EngineDescription, side: EngineSide, rank: int
) -> StagingSide | None:
    """What peers read in place of the first tier, where the configuration has it."""
    staging = config.staging
    if staging.use is None:
        return None
    factory = plugins.factory("staging", staging.use)
    return StagingSide(
        lambda: factory(staging.options, staging.capacity),
        side,
        config.chunk_tokens,
        rank=rank,
        world_size=engine.world_size,
    )


def _landing_setup(config: Config, engine: EngineDescription, verify: bool) -> LandingSetup | None:
    """The buffers that reads of peers pass through, where they do."""
    if not _lands_on_device(config, engine) and config.staging.use is None:
        return None
    return LandingSetup(
        capacity=config.p2p.buffer, make_arena=PrivateArena, copier=choose_copier().copier, verify=verify
    )


def namespace(config: Config, model_identity: str, revision: str, geometry: KVGeometry) -> Namespace:
    """Whose chunks these are: nothing is ever found across namespaces."""
    return Namespace(model=config.model_identity or model_identity, revision=revision, geometry=geometry)


def new_chain_factory(space: Namespace) -> Callable[[str, LoRAIdentity | None], KeyChain]:
    """What makes the key chain of one request from its salt and adapter.

    The chains share a bounded cache, so a later turn of a conversation hashes its new tokens only.
    """
    cache = ChainCache(CHAIN_CACHE_BYTES)
    pack = token_packer()

    def new_chain(salt: str, lora: LoRAIdentity | None) -> KeyChain:
        return KeyChain(space, salt=salt, lora=lora, pack=pack, cache=cache)

    return new_chain


def token_packer() -> TokenPacker:
    """The native packer where it is installed, the same bytes in Python elsewhere."""
    native = find_native()
    return pack_tokens if native.module is None else native.module.pack_tokens


def fingerprint(config: Config, plugins: LoadedPlugins) -> str:
    """What the sides of one engine must have in common: configuration, plugins, versions."""
    parts = [f"api {API_VERSION}", f"wire {WIRE_VERSION}"]
    parts += [f"{leaf.path}={leaf.value!r}" for leaf in config.leaves]
    parts += [f"{record.name} {record.distribution}" for record in plugins.records if record.listed]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
