"""The KV cache that a model needs, read from its Hugging Face ``config.json`` alone."""

from __future__ import annotations

import difflib
import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from kvferry.api import GroupGeometry, KVFerryError
from kvferry.runtime.layer_kinds import FULL, MLA, SLIDING, layer_windows, unknown_layout
from kvferry.runtime.no_size import brief, no_size

CONFIG_FILE = "config.json"
AUTO = "auto"
DTYPE_BYTES: Mapping[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
"""Bytes of one number of the KV cache."""

_TYPE = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LARGEST_FILE = 16 << 20
_LARGEST_NUMBER = 10**6
_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where models that see or hear keep what describes their language model."""
_KV_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_head_kv",
    "multi_query_group_num",
    "num_attention_groups",
)

FAMILY_DEFAULTS: Mapping[str, tuple[int | None, int | None]] = {
    "ernie4_5": (2, 128),
    "gemma": (16, 256),
    "gemma2": (4, 256),
    "gemma3_text": (4, 256),
    "glm": (2, 128),
    "glm4": (2, 128),
    "glm4_moe": (8, None),
    "gpt_oss": (8, 64),
    "llama4_text": (8, 128),
    "ministral": (8, None),
    "ministral3": (8, 128),
    "mistral": (8, None),
    "mixtral": (8, None),
    "phimoe": (8, None),
    "qwen2": (32, None),
    "qwen2_5_vl_text": (8, None),
    "qwen2_moe": (16, None),
    "qwen2_vl_text": (8, None),
    "qwen3": (32, 128),
    "qwen3_moe": (4, None),
    "qwen3_vl_moe_text": (16, None),
    "qwen3_vl_text": (32, 128),
    "seed_oss": (8, 128),
    "smollm3": (4, None),
    "starcoder2": (2, None),
}
"""By model type what a key means that is not there, as (KV heads, head size): files of several parts leave
out what equals the family's default (transformers 5). ``None`` and other types follow the usual rule."""


@frozen(kw_only=True)
class ModelShape:
    """What a model keeps per token, before any parallel split."""

    name: str
    """The model's type, such as ``qwen3``; may be empty."""
    attention_heads: int
    groups: tuple[GroupGeometry, ...]
    """Layers of one kind and window each. An engine may cut them into more groups, of the same bytes."""
    dtype: str
    notes: tuple[str, ...] = field(default=())
    """What the file does not say and was taken for granted, one sentence each."""


def read_model(path: Path, dtype: str = AUTO) -> ModelShape:
    """The shape that ``path`` describes, a ``config.json`` or the folder that holds one.

    Raises :class:`KVFerryError` when it cannot be read, lacks something, or describes a model whose bytes
    do not follow from it.
    """
    file = path / CONFIG_FILE if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            raw = opened.read(_LARGEST_FILE + 1)
    except (OSError, ValueError) as error:
        raise no_size(
            "the model's configuration cannot be read",
            str(file),
            getattr(error, "strerror", None) or str(error),
            f"name a Hugging Face {CONFIG_FILE}, or the folder that holds it",
        ) from error
    if len(raw) > _LARGEST_FILE:
        raise _not_a_config(file, f"it has more than {_LARGEST_FILE} bytes")
    try:
        data = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise _not_a_config(file, f"it is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise _not_a_config(file, "it holds no object")
    return model_shape(data, dtype, str(file))


def model_shape(data: Mapping[str, Any], dtype: str = AUTO, where: str = CONFIG_FILE) -> ModelShape:
    """The shape that a ``config.json`` describes. Pure; raises like :func:`read_model`."""
    if dtype not in (AUTO, *DTYPE_BYTES):
        raise _unknown_dtype(dtype, "--dtype")
    text = _Text(_language_part(data), where)
    reason = unknown_layout(data) or unknown_layout(text.data)
    if reason is not None:
        raise no_size(
            "how large this model's KV cache is does not follow from its configuration",
            where,
            reason,
            "start an engine with kvferry and ask 'kvferry live status', which says what a slot takes",
        )
    notes: list[str] = []
    layers, heads = text.number("num_hidden_layers"), text.number("num_attention_heads")
    found = _dtype(data, text, notes) if dtype == AUTO else dtype
    groups = _latents(text, layers, found) or _heads(text, layers, heads, found, notes)
    return ModelShape(name=text.type, attention_heads=heads, groups=groups, dtype=found, notes=tuple(notes))


@frozen
class _Text:
    """The part that describes the language model."""

    data: Mapping[str, Any]
    where: str

    @property
    def type(self) -> str:
        """One word, or nothing."""
        found = self.data.get("model_type")
        return found if isinstance(found, str) and _TYPE.fullmatch(found) else ""

    def optional(self, key: str) -> int | None:
        """A number of things; ``None`` where there is none, or null."""
        found = self.data.get(key)
        if found is None:
            return None
        if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= _LARGEST_NUMBER:
            raise no_size(
                f"{key} is not a whole number from 1 to {_LARGEST_NUMBER}",
                self.where,
                f"it is {brief(found)}",
                "take the file that came with the model",
            )
        return found

    def number(self, key: str) -> int:
        found = self.optional(key)
        if found is None:
            raise no_size(
                f"{key} is missing",
                self.where,
                "the file leaves it out, as files do that rely on defaults of the model's own code"
                if self.data.get("model_type")
                else f"this is not the {CONFIG_FILE} of a language model",
                "write the whole configuration: AutoConfig.from_pretrained(MODEL).to_json_file(FILE, "
                "use_diff=False) of transformers",
            )
        return found


def _language_part(data: Mapping[str, Any]) -> Mapping[str, Any]:
    for key in _NESTED:
        inner = data.get(key)
        if isinstance(inner, dict):
            return _language_part(inner)
    return data


def _latents(text: _Text, layers: int, dtype: str) -> tuple[GroupGeometry, ...]:
    """One group of latents, or nothing where the model has K and V."""
    latent = text.optional("kv_lora_rank")
    if latent is None:
        return ()
    size = latent + text.number("qk_rope_head_dim")
    return (GroupGeometry(kind=MLA, layers=layers, kv_heads=1, head_size=size, dtype=dtype),)


def _heads(text: _Text, layers: int, heads: int, dtype: str, notes: list[str]) -> tuple[GroupGeometry, ...]:
    """Full attention first, then windows."""
    kv_heads, head_size = _kv_heads(text, heads, notes), _head_size(text, heads, notes)
    counts = Counter(layer_windows(text.data, layers, text.where))
    return tuple(
        GroupGeometry(
            kind=FULL if window is None else SLIDING,
            layers=count,
            kv_heads=kv_heads,
            head_size=head_size,
            dtype=dtype,
            window=window,
        )
        for window, count in sorted(counts.items(), key=lambda pair: pair[0] or 0)
    )


def _kv_heads(text: _Text, heads: int, notes: list[str]) -> int:
    if text.data.get("multi_query") is True and text.data.get("new_decoder_architecture") is not True:
        return 1
    for key in _KV_HEADS:
        found = text.optional(key)
        if found is not None:
            return found
    default = None if "num_key_value_heads" in text.data else FAMILY_DEFAULTS.get(text.type, (None, None))[0]
    if default is not None:
        notes.append(f"num_key_value_heads is not given: {default} is the default of {text.type}")
        return default
    notes.append("num_key_value_heads is not given: every attention head has its own K and V")
    return heads


def _head_size(text: _Text, heads: int, notes: list[str]) -> int:
    # Some write 0 for what they do not set.
    found = None if text.data.get("head_dim") == 0 else text.optional("head_dim")
    if found is None:
        found = text.optional("hidden_size_per_head")
    if found is not None:
        return found
    default = None if "head_dim" in text.data else FAMILY_DEFAULTS.get(text.type, (None, None))[1]
    if default is not None:
        notes.append(f"head_dim is not given: {default} is the default of {text.type}")
        return default
    hidden = text.number("hidden_size")
    if hidden % heads:
        raise no_size(
            "head_dim is missing",
            text.where,
            f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})",
            "take the file that came with the model",
        )
    return hidden // heads


def _dtype(data: Mapping[str, Any], text: _Text, notes: list[str]) -> str:
    """What an engine takes for the KV cache when it is not told."""
    for part in (data, text.data):
        quantization = part.get("quantization_config")
        if isinstance(quantization, dict) and _quantized(quantization, text.where):
            notes.append("the checkpoint asks for a KV cache of fp8")
            return "fp8"
    for part, key in ((part, key) for part in (data, text.data) for key in ("dtype", "torch_dtype")):
        found = part.get(key)
        if found is None:
            continue
        name = str(found).removeprefix("torch.")
        if name == "float32":
            notes.append("engines serve models of float32 in 16 bits unless they are told otherwise")
            return "bfloat16"
        if name not in DTYPE_BYTES:
            raise _unknown_dtype(name, f"{text.where}: {key}")
        return name
    raise no_size(
        "the model's dtype is not given",
        text.where,
        "it has neither dtype nor torch_dtype",
        "say what the engine will keep, such as --dtype bfloat16",
    )


def _quantized(quantization: Mapping[str, Any], where: str) -> bool:
    """Whether the checkpoint was made for an fp8 KV cache, as compressed-tensors and ModelOpt write it."""
    parts = [quantization, quantization.get("quantization")]
    for part in parts:
        for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
            scheme = part.get(key) if isinstance(part, dict) else None
            if scheme is None:
                continue
            if isinstance(scheme, dict) and scheme.get("num_bits") == 8:
                return True
            if isinstance(scheme, str) and scheme.lower() == "fp8":
                return True
            raise no_size(
                f"the checkpoint asks for a KV cache that is not known here: {brief(scheme)}",
                f"{where}: {key}",
                f"known are {', '.join(DTYPE_BYTES)}",
                "say what the engine will keep, such as --dtype fp8",
            )
    return False


def _unknown_dtype(name: str, where: str) -> KVFerryError:
    near = difflib.get_close_matches(name.lower(), (AUTO, *DTYPE_BYTES), 1)
    hint = f"did you mean {near[0]}?" if near else "name one of them with --dtype"
    return no_size(f"unknown dtype {brief(name)}", where, f"known are {AUTO}, {', '.join(DTYPE_BYTES)}", hint)


def _not_a_config(file: Path, why: str) -> KVFerryError:
    return no_size(
        "this is not a model's configuration",
        str(file),
        why,
        f"name a Hugging Face {CONFIG_FILE}, or the folder that holds it",
    )
