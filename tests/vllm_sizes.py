"""What vLLM itself makes of a model's configuration, without running an engine.

``python -m tests.vllm_sizes MODEL...`` prints one JSON object: by model and number of ranks, the bytes of
one block on one rank. A process of its own, because importing vLLM shows all its warnings.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

BLOCK_TOKENS = 16
RANKS = (1, 2, 4)


def block_bytes(model: str, dtype: str, ranks: int) -> int:
    """Bytes of one block of all layers on one rank, from vLLM's own reading and its own page sizes."""
    from vllm.config import ModelConfig
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from kvferry_connector_vllm.engine import rank_block_bytes

    config = ModelConfig(model=model, skip_tokenizer_init=True, enforce_eager=True)
    parallel: Any = SimpleNamespace(tensor_parallel_size=ranks)
    page: dict[str, Any] = {
        "block_size": BLOCK_TOKENS,
        "num_kv_heads": config.get_num_kv_heads(parallel),
        "head_size": config.get_head_size(),
        "dtype": kv_cache_dtype_str_to_dtype(dtype, config),
    }
    window = config.get_sliding_window()
    kinds = getattr(config.hf_text_config, "layer_types", None)
    if kinds is None:
        kind = "full_attention" if window is None else "sliding_attention"
        kinds = [kind] * config.get_total_num_hidden_layers()
    specs: dict[str, KVCacheSpec] = {
        "full_attention": (MLAAttentionSpec if config.use_mla else FullAttentionSpec)(**page)
    }
    if window is not None:
        specs["sliding_attention"] = SlidingWindowSpec(**page, sliding_window=window)
    groups = [
        KVCacheGroupSpec([str(layer) for layer, each in enumerate(kinds) if each == kind], spec)
        for kind, spec in specs.items()
        if kind in kinds
    ]
    return sum(rank_block_bytes(KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups)))


def family_defaults(types: list[str]) -> dict[str, list[int | None]]:
    """By model type, the KV heads and head size of a file that gives neither, where transformers gives
    them a number whatever the other sizes are."""
    from transformers import CONFIG_MAPPING

    found = {}
    for name in types:
        if name not in CONFIG_MAPPING:  # newer than the installed transformers
            continue
        made = CONFIG_MAPPING[name]()
        heads, hidden = made.num_attention_heads, made.hidden_size
        wide = CONFIG_MAPPING[name](num_attention_heads=2 * heads, hidden_size=8 * hidden)
        kv_heads, size = wide.num_key_value_heads, getattr(wide, "head_dim", None)
        found[name] = [
            None if kv_heads == 2 * heads else kv_heads,
            None if size == 4 * hidden // heads else size,
        ]
    return found


def main() -> None:
    from kvferry.runtime.model_shape import FAMILY_DEFAULTS

    sizes = {
        model: {
            dtype: {ranks: block_bytes(model, dtype, ranks) for ranks in RANKS} for dtype in ("auto", "fp8")
        }
        for model in sys.argv[1:]
    }
    print(json.dumps({"sizes": sizes, "defaults": family_defaults(list(FAMILY_DEFAULTS))}))


if __name__ == "__main__":
    main()
