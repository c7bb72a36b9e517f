"""kvferry's events in vLLM's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from kvferry.runtime import RemovedChunks, StoredRun

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_utils import ExternalBlockHash

    from kvferry.runtime import CacheEvent

MEDIUM = "CPU"
"""As vLLM's own offloading names host memory, in every release; only later ones have a constant."""


def kv_cache_event(event: CacheEvent, chunk_tokens: int) -> KVCacheEvent:
    """A "block" is a full chunk here, so ``block_size`` is the tokens of a chunk. Tails are not told of.

    The hashes are kvferry's keys: equal for equal content on every instance with the same model, and
    different from those of vLLM's own blocks. A lost event clears everything, vLLM's own blocks
    included: the format has no smaller word for it.
    """
    if isinstance(event, StoredRun):
        parent = None if event.parent is None else _hash(event.parent)
        return BlockStored(
            block_hashes=[_hash(digest) for digest in event.digests],
            parent_block_hash=parent,
            token_ids=[token for content in event.contents for token in content.token_ids],
            block_size=chunk_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=event.model or None,
            extra_keys=_extra_keys(event, chunk_tokens),
        )
    if isinstance(event, RemovedChunks):
        return BlockRemoved(block_hashes=[_hash(digest) for digest in event.digests], medium=MEDIUM)
    return AllBlocksCleared()


def _hash(digest: bytes) -> ExternalBlockHash:
    """As bytes, or as the number that vLLM's own events have where it is told to publish numbers."""
    return maybe_convert_block_hash(BlockHash(digest))


def _extra_keys(run: StoredRun, chunk_tokens: int) -> list[tuple[Any, ...] | None] | None:
    """Per chunk, in vLLM's order: the adapter, media items with their place in the chunk, and at the
    start of a prompt the cache salt."""
    found: list[tuple[Any, ...] | None] = []
    for number, content in enumerate(run.contents, run.depth):
        keys: list[Any] = [run.model] if run.model else []
        keys += [(item.identifier, item.start - number * chunk_tokens) for item in content.media]
        keys += [run.salt] if run.salt and number == 0 else []
        found.append(tuple(keys) or None)
    return found if any(found) else None
