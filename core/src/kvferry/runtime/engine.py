"""Opens the two sides of an engine from a checked configuration."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Callable, Mapping, Sequence

from attrs import frozen

from kvferry.api import API_VERSION, KVGeometry
from kvferry.config import Config
from kvferry.control.chain_cache import ChainCache
from kvferry.control.identity import LoRAIdentity, Namespace
from kvferry.control.keys import KeyChain
from kvferry.control.manager import CacheManager
from kvferry.control.tokens import TokenPacker, pack_tokens
from kvferry.data.copy import choose_copier
from kvferry.data.engine_side import EngineGroup, EngineSide
from kvferry.data.native import find_native
from kvferry.data.store_side import StoreSide
from kvferry.data.wire import WIRE_VERSION
from kvferry.plugins import LoadedPlugins
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.admin import TierCard
from kvferry.runtime.events import FACTS_KEPT
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.instances import instance_card
from kvferry.runtime.requests import LoadMode
from kvferry.runtime.scheduler import SchedulerRuntime
from kvferry.runtime.worker import WorkerRuntime

LEASE_SECONDS = 60.0
"""How long a matched prefix waits for its request's turn; asking again renews it."""
WRITE_SECONDS = 60.0
"""How long a save may take before its slots are set aside until its result comes."""
QUICK_LOAD_BYTES = 128 << 20
"""What may be loaded in front of a forward pass of its own: about 10 ms of copying."""
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
) -> SchedulerRuntime:
    """Build and open the scheduler side. Raises :class:`KVFerryError`; does not wait for workers."""
    name, tier = next(iter(config.tiers.items()))
    factory = plugins.factory("eviction", tier.eviction.use)
    policy = factory() if tier.eviction.options is None else factory(tier.eviction.options)
    slot_bytes = engine.bytes_of(config.chunk_tokens)
    manager = CacheManager(
        capacity=max(1, tier.capacity // slot_bytes),
        chunk_tokens=config.chunk_tokens,
        block_tokens=engine.block_tokens,
        policy=policy,
        lease_seconds=LEASE_SECONDS,
        write_seconds=WRITE_SECONDS,
        quotas=policy if plugins.eviction(tier.eviction.use).quotas else None,
        slot_bytes=slot_bytes,
        max_pinned=tier.max_pinned,
        ttl=tier.ttl,
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
    )
    runtime.open()
    return runtime


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
    name, tier = next(iter(config.tiers.items()))
    backend = plugins.factory("backend", tier.use)(tier.options, tier.capacity)
    engine_side = EngineSide(groups, config.chunk_tokens)
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
    )
    runtime.open()
    return runtime


def new_chain_factory(
    config: Config, model_identity: str, revision: str, geometry: KVGeometry
) -> Callable[[str, LoRAIdentity | None], KeyChain]:
    """What makes the key chain of one request from its salt and adapter.

    The chains share a bounded cache, so a later turn of a conversation hashes its new tokens only.
    """
    namespace = Namespace(model=config.model_identity or model_identity, revision=revision, geometry=geometry)
    cache = ChainCache(CHAIN_CACHE_BYTES)
    pack = token_packer()

    def new_chain(salt: str, lora: LoRAIdentity | None) -> KeyChain:
        return KeyChain(namespace, salt=salt, lora=lora, pack=pack, cache=cache)

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
