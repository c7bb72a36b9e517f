"""What kvferry must know of a vLLM engine, read from vLLM's own configuration."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from kvferry.api import Fact, GroupGeometry, KVGeometry

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

FULL = "full"


def group_kind(spec: KVCacheSpec) -> str:
    """``full`` for groups whose every block matters, else vLLM's own name of the kind."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, get_kv_cache_spec_kind

    # Subclasses of full attention keep other state beside plain pages (sinks, hidden states). A window
    # that vLLM treats as full attention in its block tables is full attention here too.
    if type(spec) is FullAttentionSpec:
        return FULL
    return str(get_kv_cache_spec_kind(spec).value)


def supported(config: KVCacheConfig) -> bool:
    """Whether every group is plain full attention, with one block size."""
    specs = [group.kv_cache_spec for group in config.kv_cache_groups]
    return (
        bool(specs)
        and all(group_kind(spec) == FULL for spec in specs)
        and len({spec.block_size for spec in specs}) == 1
    )


def geometry(vllm_config: VllmConfig, config: KVCacheConfig, chunk_tokens: int) -> KVGeometry:
    """The model's global KV shape. Heads are the model's, not one rank's; layers are counted over
    all pipeline stages when there is one group."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    model = vllm_config.model_config
    groups = []
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        assert isinstance(spec, AttentionSpec)
        layers = len(group.layer_names)
        if len(config.kv_cache_groups) == 1:
            layers = model.get_total_num_hidden_layers()
        groups.append(
            GroupGeometry(
                kind=FULL,
                layers=layers,
                kv_heads=model.get_total_num_kv_heads(),
                head_size=spec.head_size,
                dtype=str(spec.dtype).removeprefix("torch."),
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


def rank_block_bytes(config: KVCacheConfig) -> int:
    """Bytes of one block over all layers of this rank."""
    return sum(
        len(group.layer_names) * group.kv_cache_spec.page_size_bytes for group in config.kv_cache_groups
    )


def engine_facts(
    vllm_config: VllmConfig, config: KVCacheConfig, chunk_tokens: int, outer_policy: str | None
) -> Iterable[Fact]:
    """Facts for the checker, with vLLM as their origin.

    ``outer_policy`` is the load-failure policy of an enclosing MultiConnector, where it can be
    seen; it is the one that counts.
    """
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None
    block = config.kv_cache_groups[0].kv_cache_spec.block_size if config.kv_cache_groups else 0
    policy: str | None = transfer.kv_load_failure_policy
    if outer_policy not in (None, "recompute"):
        policy = outer_policy
    values: dict[str, object] = {
        "engine.block_tokens": block,
        "engine.chunk_bytes": rank_block_bytes(config) * chunk_tokens // block if block else 0,
        "engine.groups": len(config.kv_cache_groups),
        "engine.group_kinds": tuple(group_kind(group.kv_cache_spec) for group in config.kv_cache_groups),
        "engine.device": vllm_config.device_config.device_type,
        "engine.kv_role": transfer.kv_role,
        "engine.kv_load_failure_policy": policy,
        "engine.workers": vllm_config.parallel_config.local_world_size,
    }
    return [Fact(path=path, value=value, origin="vLLM") for path, value in values.items()]
