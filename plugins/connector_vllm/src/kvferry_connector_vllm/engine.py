"""What kvferry must know of a vLLM engine, read from vLLM's own configuration."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

from kvferry.api import Fact, GroupGeometry, KVGeometry
from kvferry.runtime import GroupShape
from kvferry_connector_vllm.versions import FAILURES_BY_REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec

FULL = "full"
_WITHOUT_A_DRAFT = ("ngram", "suffix", "custom_class")
"""Ways of speculation that keep no KV cache of their own; for some, vLLM 0.32 names the target as the
draft."""
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
    # The second name is vLLM 0.23's, for the same.
    plain = all(
        getattr(each, "tokens_per_state", 1) == getattr(each, "compress_ratio", 1) == 1
        for each in layer_specs(spec)
    )
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
    if not FAILURES_BY_REQUEST and not one_plain_group(config):
        # This vLLM takes failed blocks alone: for one group only, and it goes on behind the last good one.
        return (
            "it has several KV cache groups or a sliding window, and this vLLM cannot be told that a load of "
            "such a model failed; take a newer vLLM, or disable_hybrid_kv_cache_manager where some of its "
            "layers have full attention"
        )
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


def one_plain_group(config: KVCacheConfig) -> bool:
    """Whether a load that failed can be told by its blocks.

    vLLM takes failed blocks for one group only, and goes on behind the last good one, whose window is
    not there any more.
    """
    shapes = group_shapes(config)
    return len(shapes) == 1 and shapes[0].window is None


def async_loads_because(vllm_config: VllmConfig, config: KVCacheConfig) -> str | None:
    """Why no load may run in front of a forward pass, or None. Its failure can be told by blocks only."""
    if not one_plain_group(config):
        return "the model has several KV cache groups or a sliding window"
    if (
        vllm_config.scheduler_config.async_scheduling
        or vllm_config.parallel_config.pipeline_parallel_size > 1
    ):
        # The step behind the failed one is scheduled by then, and vLLM would take its tokens.
        return "vLLM schedules ahead of results (async_scheduling or pipeline_parallel_size)"
    return None


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
    A draft model whose KV cache lies in the same blocks is part of it.
    """
    model = vllm_config.model_config
    described = [*_described(model), str(vllm_config.cache_config.cache_dtype)]
    speculative = vllm_config.speculative_config
    if speculative is not None and not speculative.method.startswith(_WITHOUT_A_DRAFT):
        draft = speculative.draft_model_config
        if draft is not None:
            described += [speculative.method, draft.model, str(draft.revision), *_described(draft)]
    digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
    return f"{model.model}#{digest}"


def _described(model: ModelConfig) -> list[str]:
    return [model.hf_config.to_json_string(use_diff=False), str(model.quantization), str(model.dtype)]


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
    real = getattr(spec, "real_page_size_bytes", spec.page_size_bytes)  # vLLM 0.23's name
    return int(getattr(spec, "unpadded_page_size_bytes", real))


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
        "engine.sync_loads": async_loads_because(vllm_config, config) or "possible",
        "engine.group_kinds": kinds,
        "engine.device": vllm_config.device_config.device_type,
        "engine.kv_role": transfer.kv_role,
        "engine.kv_load_failure_policy": policy,
        "engine.workers": vllm_config.parallel_config.local_world_size,
    }
    return [Fact(path=path, value=value, origin="vLLM") for path, value in values.items()]
