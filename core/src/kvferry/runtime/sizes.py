"""How much a model's KV cache takes, and how much of it fits: arithmetic without an engine.

A chunk takes one slot in a tier, and a slot holds whole blocks of every KV cache group: layers with a
sliding window count like all others. How an engine cuts layers into groups changes no sum.
"""

from __future__ import annotations

from collections.abc import Sequence

from attrs import field, frozen

from kvferry.api import GroupGeometry, KVFerryError, KVGeometry
from kvferry.api.units import ByteSize, round_up
from kvferry.config import Config
from kvferry.runtime.engine import PAGE_BYTES, EngineDescription, header_bytes_of
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.layer_kinds import MLA
from kvferry.runtime.model_shape import DTYPE_BYTES
from kvferry.runtime.no_size import no_size


@frozen(kw_only=True)
class RankGroup:
    """What one rank keeps of a group of layers. All sizes are bytes over all layers of the group."""

    geometry: GroupGeometry
    kv_heads: int
    """On one rank."""
    copies: int
    """How many ranks hold the same bytes: 1 where heads are split, the number of ranks for latents."""
    token_bytes: int


@frozen(kw_only=True)
class RankSizes:
    """What every rank keeps. All ranks of a tensor-parallel engine keep equally much.

    Sizes are bytes; a method's plain number is one rank's, times :attr:`ranks` it is that of all.
    """

    ranks: int
    block_tokens: int
    chunk_tokens: int
    groups: tuple[RankGroup, ...]

    @property
    def token_bytes(self) -> int:
        return sum(group.token_bytes for group in self.groups)

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes

    @property
    def chunk_bytes(self) -> int:
        """A slot holds so much."""
        return self.chunk_tokens // self.block_tokens * self.block_bytes


@frozen(kw_only=True)
class TierSize:
    """How large a tier is. ``capacity`` is per rank, as in a configuration."""

    name: str
    capacity: ByteSize
    addressable: bool
    """Whether its slots are plain memory; else each chunk also has a header, and takes whole pages."""
    in_flight: ByteSize | None = None
    """Of a tier below the first: memory of the first that copies to it may take at once, and as much
    again copies from it."""


@frozen(kw_only=True)
class SlotSizes:
    """What a chunk takes on one rank, in bytes: in a tier that is plain memory, and in one where a header
    stands beside it."""

    memory: int
    keyed: int

    def of(self, tier: TierSize) -> int:
        return self.memory if tier.addressable else self.keyed


@frozen(kw_only=True)
class PromptSize:
    """Tokens of one request with its answer, and how they are kept: whole blocks, and a slot for the
    chunk that is not full, too."""

    tokens: int
    kept_tokens: int
    chunks: int


@frozen(kw_only=True)
class TierFit:
    """What a tier holds. Counts are the engine's, not a rank's: a chunk has a slot on every rank."""

    tier: TierSize
    slot_bytes: int
    """On one rank."""
    chunks: int
    tokens: int
    prompts: int | None
    """How many prompts that share nothing it holds; None where no prompt was given or nothing of it is
    kept."""


@frozen(kw_only=True)
class Need:
    """What so many prompts that share nothing take in one tier."""

    tier: TierSize
    rank_bytes: int
    fits: bool


@frozen(kw_only=True)
class HostBudget:
    """What kvferry takes of one host's memory. Copies under way take slots of the first tier, so that
    they are part of ``worker_bytes``."""

    workers: int
    worker_bytes: int
    in_flight_bytes: int
    """The most that copies to and from tiers below hold of ``worker_bytes`` at one time."""
    memory_bytes: int | None
    memory_origin: str = field(default="")

    @property
    def total_bytes(self) -> int:
        return self.workers * self.worker_bytes

    @property
    def share(self) -> float | None:
        """Of the host's memory; above 1 it cannot be had."""
        return None if self.memory_bytes is None else self.total_bytes / self.memory_bytes


def rank_sizes(geometry: KVGeometry, attention_heads: int, ranks: int, block_tokens: int) -> RankSizes:
    """One rank's share of the model.

    Raises :class:`KVFerryError` when heads cannot be shared among so many ranks, and when a chunk is not
    whole blocks.
    """
    if geometry.chunk_tokens % block_tokens:
        raise no_size(
            f"a chunk of {geometry.chunk_tokens} tokens is not whole blocks of {block_tokens}",
            "--chunk-tokens, --block-tokens",
            "kvferry stores whole blocks of the engine",
            "choose a multiple of the engine's block size, such as "
            f"{round_up(geometry.chunk_tokens, block_tokens)}",
        )
    if attention_heads % ranks:
        raise _heads(f"{attention_heads} attention heads", ranks, "an engine gives each rank equally many")
    return RankSizes(
        ranks=ranks,
        block_tokens=block_tokens,
        chunk_tokens=geometry.chunk_tokens,
        groups=tuple(_rank_group(group, ranks) for group in geometry.groups),
    )


def prompt_size(tokens: int, sizes: RankSizes) -> PromptSize:
    """How one prompt is kept that shares nothing with others."""
    kept = tokens // sizes.block_tokens * sizes.block_tokens
    return PromptSize(tokens=tokens, kept_tokens=kept, chunks=-(-kept // sizes.chunk_tokens))


def slot_sizes(tiers: Sequence[TierSize], sizes: RankSizes) -> SlotSizes:
    """What a chunk takes in tiers that are used together, exactly as an engine's start works it out."""
    below = len(tiers) > 1 or not all(tier.addressable for tier in tiers)
    alignment = PAGE_BYTES if below else 1  # tiers below read and write slots of the first one directly
    memory = round_up(sizes.chunk_bytes, alignment)
    header = header_bytes_of(Config(chunk_tokens=sizes.chunk_tokens), _engine(sizes))
    return SlotSizes(memory=memory, keyed=memory + header)


def tier_fit(tier: TierSize, sizes: RankSizes, slots: SlotSizes, prompt: PromptSize | None) -> TierFit:
    """What fits into the tier. For a tier that is not plain memory it is the most: a backend may need
    room of its own."""
    slot_bytes = slots.of(tier)
    chunks = tier.capacity // slot_bytes
    return TierFit(
        tier=tier,
        slot_bytes=slot_bytes,
        chunks=chunks,
        tokens=chunks * sizes.chunk_tokens,
        prompts=chunks // prompt.chunks if prompt is not None and prompt.chunks else None,
    )


def need(tier: TierSize, slots: SlotSizes, prompt: PromptSize, requests: int) -> Need:
    """What so many prompts take in the tier."""
    rank_bytes = requests * prompt.chunks * slots.of(tier)
    return Need(tier=tier, rank_bytes=rank_bytes, fits=rank_bytes <= tier.capacity)


def host_budget(
    tiers: Sequence[TierSize], workers: int, memory_bytes: int | None, memory_origin: str = ""
) -> HostBudget:
    """What so many workers take. Tiers that are not plain memory take none beyond their copies' slots."""
    memory = sum(tier.capacity for tier in tiers if tier.addressable)
    in_flight = sum(2 * tier.in_flight for tier in tiers if tier.in_flight is not None)
    return HostBudget(
        workers=workers,
        worker_bytes=memory,
        in_flight_bytes=min(in_flight, memory),
        memory_bytes=memory_bytes,
        memory_origin=memory_origin,
    )


def _rank_group(group: GroupGeometry, ranks: int) -> RankGroup:
    latent = group.kind == MLA
    if latent:
        heads, copies = 1, ranks  # every rank works on the whole latent
    elif group.kv_heads >= ranks:
        if group.kv_heads % ranks:
            raise _heads(f"{group.kv_heads} KV heads", ranks, "an engine gives each rank equally many")
        heads, copies = group.kv_heads // ranks, 1
    else:
        if ranks % group.kv_heads:
            raise _heads(f"{group.kv_heads} KV heads", ranks, "an engine gives each head to equally many")
        heads, copies = 1, ranks // group.kv_heads
    planes = 1 if latent else 2  # K and V
    token_bytes = planes * heads * group.head_size * DTYPE_BYTES[group.dtype] * group.layers
    return RankGroup(geometry=group, kv_heads=heads, copies=copies, token_bytes=token_bytes)


def _engine(sizes: RankSizes) -> EngineDescription:
    """An engine with one group of all layers: what it takes is the same."""
    return EngineDescription(
        engine_id="",
        world_size=sizes.ranks,
        groups=(GroupShape(sizes.block_tokens),),
        block_bytes=(sizes.block_bytes,),
    )


def _heads(what: str, ranks: int, why: str) -> KVFerryError:
    return no_size(
        f"{what} cannot be shared by {ranks} ranks",
        "--tp",
        why,
        "choose a number of ranks that divides the heads, or a multiple of the KV heads",
    )
