"""What kvferry must know of a vLLM engine, read from vLLM's own configuration."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from kvferry.api import Fact, GroupGeometry, KVGeometry
from kvferry.runtime import GroupShape

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

FULL = "full"
MLA = "mla"
SLIDING = "sliding"


def layer_specs(spec: KVCacheSpec) -> tuple[KVCacheSpec, ...]:
    """The specs of a group's layers, each once: workers see one per layer where page sizes differ, the
    scheduler sees the first."""
    inner = getattr(spec, "kv_cache_specs", None)
    return (spec,) if inner is None else tuple(inner.values())


def group_kind(spec: KVCacheSpec) -> str:
    """``full``, ``mla`` and ``sliding`` for what can be restored, else vLLM's own name of the kind."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
        get_kv_cache_spec_kind,
    )

    # Subclasses keep other state beside plain pages (sinks, hidden states, compressed tokens). A window
    # that vLLM treats as full attention in its block tables is full attention here too.
    kinds = {FullAttentionSpec: FULL, MLAAttentionSpec: MLA, SlidingWindowSpec: SLIDING}
    found = {kinds.get(type(each)) for each in layer_specs(spec)}
    plain = all(getattr(each, "tokens_per_state", 1) == 1 for each in layer_specs(spec))
    (kind,) = found if len(found) == 1 else (None,)
    return kind if kind is not None and plain else str(get_kv_cache_spec_kind(spec).value)


def window(spec: KVCacheSpec) -> int | None:
    """Tokens for which vLLM keeps the blocks of a sliding-window group, itself included."""
    if group_kind(spec) != SLIDING:
        return None
    first: Any = layer_specs(spec)[0]
    return int(first.sliding_window) + int(getattr(first, "extra_retained_tokens", 0))


def group_shapes(config: KVCacheConfig) -> tuple[GroupShape, ...]:
    """The groups as the scheduler side cuts them, in the order of vLLM's block tables."""
    return tuple(
        GroupShape(group.kv_cache_spec.block_size, window(group.kv_cache_spec))
        for group in config.kv_cache_groups
    )


def unsupported(vllm_config: VllmConfig, config: KVCacheConfig) -> str | None:
    """Why nothing of this model is cached, or None."""
    if not config.kv_cache_groups:
        return "the model keeps no KV cache"
    for number, group in enumerate(config.kv_cache_groups):
        why = _unsupported_group(group)
        if why is not None:
            return f"KV cache group {number} ({_some(group.layer_names)}) {why}"
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            return f"{name} is above 1, so that a block's tokens lie on several ranks"
    latents = any(group_kind(group.kv_cache_spec) == MLA for group in config.kv_cache_groups)
    if latents and not vllm_config.scheduler_config.enable_chunked_prefill:
        # vLLM turns it off, with its own prefix cache, where its MLA cannot look back while it prefills.
        return "its MLA computes whole prompts only (chunked prefill is off), so no hit could be gone on from"
    if getattr(config, "needs_kv_cache_zeroing", False):
        return "its groups differ in precision, so vLLM overwrites blocks before it lets a save finish"
    return None


def _unsupported_group(group: KVCacheGroupSpec) -> str | None:
    kind = group_kind(group.kv_cache_spec)
    if kind not in (FULL, MLA, SLIDING):
        return f"is of the kind {kind}, whose state kvferry cannot restore"
    if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
        return "is kept by vLLM outside of its paged device memory"
    if not getattr(group.kv_cache_spec, "prefix_cacheable", True):
        return "is scratch memory that no two requests may share"
    return None


def _some(layers: list[str]) -> str:
    return f"{layers[0]} and {len(layers) - 1} more" if len(layers) > 1 else "".join(layers)


def sync_loads(config: KVCacheConfig) -> bool:
    """Whether vLLM can be told that a load in front of the forward pass failed.

    It takes failed blocks for one group only, and goes on behind the last good one, whose window is
    not there any more.
    """
    shapes = group_shapes(config)
    return len(shapes) == 1 and shapes[0].window is None


def geometry(vllm_config: VllmConfig, config: KVCacheConfig, chunk_tokens: int) -> KVGeometry:
    """The model's global KV shape. Heads are the model's, not one rank's; layers are counted over
    all pipeline stages when there is one group."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    model = vllm_config.model_config
    groups = []
    for group in config.kv_cache_groups:
        spec = layer_specs(group.kv_cache_spec)[0]
        assert isinstance(spec, AttentionSpec)
        layers = len(group.layer_names)
        if len(config.kv_cache_groups) == 1:
            layers = model.get_total_num_hidden_layers()
        kind = group_kind(spec)
        groups.append(
            GroupGeometry(
                kind=kind,
                layers=layers,
                # Every rank holds the whole latent.
                kv_heads=1 if kind == MLA else model.get_total_num_kv_heads(),
                head_size=spec.head_size,
                dtype=str(spec.dtype).removeprefix("torch."),
                window=window(spec),
            )
        )
    return KVGeometry(groups=tuple(groups), chunk_tokens=chunk_tokens)


def model_identity(vllm_config: VllmConfig) -> str:
    """Model name or path, and a digest of everything in its configuration.

    The digest tells two checkpoints apart that were served from one path one after the other with
    different shapes or quantisation. Equal configurations with different weights are told apart by
    name or revision only, so an operator who replaces weights in place changes ``model_identity``.
    """
    model = vllm_config.model_config
    described = "\n".join(
        (
            model.hf_config.to_json_string(use_diff=False),
            str(model.quantization),
            str(model.dtype),
            str(vllm_config.cache_config.cache_dtype),
        )
    )
    return f"{model.model}#{hashlib.sha256(described.encode()).hexdigest()}"


def rank_block_bytes(config: KVCacheConfig) -> tuple[int, ...]:
    """Per group, bytes of one block over all its layers on this rank."""
    found = []
    for group in config.kv_cache_groups:
        # The scheduler sees the spec of the first layer alone; workers say what they really have.
        pages = [_page_bytes(spec) for spec in layer_specs(group.kv_cache_spec)]
        found.append(sum(pages) if len(pages) > 1 else len(group.layer_names) * pages[0])
    return tuple(found)


def _page_bytes(spec: KVCacheSpec) -> int:
    """Without what vLLM adds to make the pages of several groups equal."""
    return int(getattr(spec, "unpadded_page_size_bytes", spec.page_size_bytes))


def engine_facts(
    vllm_config: VllmConfig, config: KVCacheConfig, chunk_tokens: int, outer_policy: str | None
) -> Iterable[Fact]:
    """Facts for the checker, with vLLM as their origin.

    ``outer_policy`` is the load-failure policy of an enclosing MultiConnector, where it can be
    seen; it is the one that counts.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    blocks = [group.kv_cache_spec.block_size for group in config.kv_cache_groups]
    sizes = zip(rank_block_bytes(config), blocks, strict=True)
    kinds = tuple(group_kind(group.kv_cache_spec) for group in config.kv_cache_groups)
    if unsupported(vllm_config, config) is not None:
        # Rules about sizes that nothing will use must not refuse the start.
        kinds = tuple(f"{kind} (not cached)" for kind in kinds)
    policy: str | None = transfer.kv_load_failure_policy
    if outer_policy not in (None, "recompute"):
        policy = outer_policy
    values: dict[str, object] = {
        "engine.block_tokens": math.lcm(*blocks) if blocks else 0,
        "engine.chunk_bytes": sum(chunk_tokens // tokens * size for size, tokens in sizes),
        "engine.groups": len(config.kv_cache_groups),
        "engine.sync_loads": sync_loads(config),
        "engine.group_kinds": kinds,
        "engine.device": vllm_config.device_config.device_type,
        "engine.kv_role": transfer.kv_role,
        "engine.kv_load_failure_policy": policy,
        "engine.workers": vllm_config.parallel_config.local_world_size,
    }
    return [Fact(path=path, value=value, origin="vLLM") for path, value in values.items()]
