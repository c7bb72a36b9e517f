"""What kinds of layers a Hugging Face configuration describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.runtime.no_size import brief, no_size

FULL = "full"
MLA = "mla"
SLIDING = "sliding"

_KINDS: Mapping[str, bool] = {
    "full_attention": False,
    "sliding_attention": True,
    # Engines keep every block of these unless they are told otherwise.
    "chunked_attention": False,
}
"""By the name of a layer's kind, whether it has a window."""
_PATTERNS: Mapping[str, int] = {"cohere2": 4, "gemma2": 2, "gemma3_text": 6}
"""By model type, every how many layers one sees everything, where the file does not say it."""

_STATE = "its layers keep a state beside or instead of K and V, and kvferry caches nothing of such a model"
_UNLIKE = "its layers differ in shape"
_BESIDE = "its attention keeps further caches beside K and V"
_UNKNOWN: Mapping[str, str] = {
    "attn_layer_period": _STATE,
    "full_attention_interval": _STATE,
    "hybrid_override_pattern": _STATE,
    "layers_block_type": _STATE,
    "linear_attn_config": _STATE,
    "mamba_d_state": _STATE,
    "ssm_cfg": _STATE,
    "state_size": _STATE,
    "block_configs": _UNLIKE,
    "global_head_dim": _UNLIKE,
    "hybrid_layer_pattern": _UNLIKE,
    "num_global_key_value_heads": _UNLIKE,
    "per_layer_config": _UNLIKE,
    "swa_head_dim": _UNLIKE,
    "swa_num_key_value_heads": _UNLIKE,
    "compress_ratios": _BESIDE,
    "index_head_dim": _BESIDE,
    "index_topk": _BESIDE,
}
"""Keys with which a cache does not follow from heads and layers, and why."""


def unknown_layout(data: Mapping[str, Any]) -> str | None:
    """Why the bytes of this model do not follow from its heads and layers, or None."""
    for key, why in _UNKNOWN.items():
        if data.get(key) is not None:
            return f"{key} is given: {why}"
    if data.get("is_encoder_decoder") is True:
        return "is_encoder_decoder is true: cross attention is kept apart, and kvferry caches none of it"
    if data.get("num_kv_shared_layers"):
        return "num_kv_shared_layers is given: some layers keep nothing of their own"
    if data.get("model_type") == "minicpm3":
        return "minicpm3 keeps padded K and V in place of its latents"
    for key in ("num_key_value_heads", "num_attention_heads", "head_dim"):
        if isinstance(data.get(key), list):
            return f"{key} is a list: {_UNLIKE}"
    values, size = data.get("v_head_dim"), data.get("head_dim")
    if data.get("kv_lora_rank") is None and values is not None and values != size:
        return f"v_head_dim is {brief(values)}: V is not as wide as K"
    return None


def layer_windows(data: Mapping[str, Any], layers: int, where: str) -> list[int | None]:
    """For each layer its window in tokens, or None where it sees everything.

    Raises :class:`kvferry.api.KVFerryError` for a description that cannot be right, and for layers that
    are not attention.
    """
    window = data.get("sliding_window")
    kinds = data.get("layer_types")
    sliding = _by_pattern(data, layers) if kinds is None else _named(kinds, layers, where)
    # Some write 0 for no window at all.
    if not window or data.get("use_sliding_window") is False or not any(sliding):
        return [None] * layers
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise no_size(
            "sliding_window is not a whole number above zero",
            where,
            f"it is {brief(window)}, and {sum(sliding)} layers have a window",
            "take the file that came with the model",
        )
    return [window if slides else None for slides in sliding]


def _named(kinds: Any, layers: int, where: str) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        length = f"{len(kinds)} entries" if isinstance(kinds, list) else "no list"
        raise no_size(
            "layer_types does not fit num_hidden_layers",
            where,
            f"it is {length} for {layers} layers",
            "take the file that came with the model",
        )
    names = [str(kind) for kind in kinds]
    other = sorted(set(names) - _KINDS.keys())
    if other:
        raise no_size(
            "kvferry caches nothing of this model",
            where,
            f"layer_types has {brief(', '.join(other))}, and only {', '.join(_KINDS)} can be restored",
            "size a model whose layers are all attention",
        )
    return [_KINDS[name] for name in names]


def _by_pattern(data: Mapping[str, Any], layers: int) -> list[bool]:
    pattern = data.get("sliding_window_pattern", data.get("_sliding_window_pattern"))
    if pattern is None:
        pattern = _PATTERNS.get(str(data.get("model_type")))
    if isinstance(pattern, str) and pattern:
        return [pattern[layer % len(pattern)] == "L" for layer in range(layers)]
    if isinstance(pattern, int) and not isinstance(pattern, bool) and pattern > 0:
        return [(layer + 1) % pattern != 0 for layer in range(layers)]
    first = data.get("max_window_layers")
    if data.get("use_sliding_window") is True and isinstance(first, int):
        return [layer >= first for layer in range(layers)]
    return [True] * layers
