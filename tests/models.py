"""Tiny models with random weights, made on the spot: nothing is downloaded.

The weights come from a seed, so every run serves the same model. Their scale is larger than that of
a freshly initialised model: with the usual one, greedy answers repeat one token whatever the prompt
was, and comparing such answers would prove nothing.
"""

from __future__ import annotations

import enum
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

FIRST_TOKEN = 3
"""Ids below stand for padding, begin and end."""
VOCABULARY = 512
BYTE_TOKENS = 256


class Family(enum.Enum):
    """Whose architecture a model has."""

    LLAMA = "llama"
    GEMMA3 = "gemma3"
    """Three layers with a sliding window to one with full attention."""
    MISTRAL = "mistral"
    """A sliding window in every layer."""
    DEEPSEEK = "deepseek"
    """One latent per token instead of K and V."""


@frozen(kw_only=True)
class ModelShape:
    """What tells one tiny model from another."""

    family: Family = Family.LLAMA

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    weight_scale: float
    head_size: int = 64
    positions: int = 8192
    seed: int = 20260
    window: int | None = None

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, two bytes a number (bfloat16)."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


DEMO = ModelShape(hidden=1024, layers=8, heads=16, kv_heads=8, intermediate=2816, weight_scale=0.06)
"""95 million parameters and 16 KiB of KV cache per token: prefill takes most of a request's time."""

SMALL = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512, weight_scale=0.1)
"""For tests that ask whether the answer is right, not how soon it comes."""

WINDOWED = evolve(SMALL, family=Family.GEMMA3, window=512)
ALL_WINDOWED = evolve(SMALL, family=Family.MISTRAL, window=512)
LATENT = evolve(SMALL, family=Family.DEEPSEEK, kv_heads=4)
NAMES = {
    "demo": DEMO,
    "small": SMALL,
    "windowed": WINDOWED,
    "all-windowed": ALL_WINDOWED,
    "latent": LATENT,
}


def make_model(folder: Path, shape: ModelShape) -> Path:
    """Make the model below ``folder``, or find it there, and return its path.

    The name tells the shape, so that a changed shape is made anew. A model that was left half made is
    never found: it is renamed when it is complete.
    """
    described = json.dumps(asdict(shape), sort_keys=True, default=lambda family: family.value)
    digest = hashlib.sha256(described.encode()).hexdigest()[:8]
    model = folder / f"{shape.family.value}-{shape.hidden}x{shape.layers}-{digest}"
    if model.is_dir():
        return model
    partial = model.with_name(f"{model.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    _save_weights(partial, shape)
    _save_tokenizer(partial)
    partial.rename(model)
    return model


def _save_weights(folder: Path, shape: ModelShape) -> None:
    import torch
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(shape.seed)
    _build(shape).to(torch.bfloat16).save_pretrained(folder)


def _build(shape: ModelShape) -> Any:
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.positions,
        "initializer_range": shape.weight_scale,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    model: Any
    if shape.family is Family.LLAMA:
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM
        return model(LlamaConfig(**common, head_dim=shape.head_size))
    if shape.family is Family.GEMMA3:
        from transformers import Gemma3ForCausalLM, Gemma3TextConfig

        kinds = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(shape.layers)]
        model = Gemma3ForCausalLM
        common["tie_word_embeddings"] = True  # vLLM serves no other Gemma
        return model(
            Gemma3TextConfig(
                **common,
                head_dim=shape.head_size,
                sliding_window=shape.window,
                layer_types=kinds,
                pad_token_id=0,
            )
        )
    if shape.family is Family.MISTRAL:
        from transformers import MistralConfig, MistralForCausalLM

        model = MistralForCausalLM
        return model(MistralConfig(**common, head_dim=shape.head_size, sliding_window=shape.window))
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    model = DeepseekV2ForCausalLM
    return model(
        DeepseekV2Config(
            **common,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            first_k_dense_replace=shape.layers,  # no experts in any layer
            n_routed_experts=2,
            n_shared_experts=1,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            moe_intermediate_size=64,
        )
    )


def _save_tokenizer(folder: Path) -> None:
    """One token per byte, no merges: a text of n characters of ASCII has n tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {f"<s{index}>": index for index in range(FIRST_TOKEN)}
    for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())):
        vocabulary[character] = FIRST_TOKEN + index
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped: Any = PreTrainedTokenizerFast
    wrapped(tokenizer_object=tokenizer, bos_token="<s1>", eos_token="<s2>", pad_token="<s0>").save_pretrained(
        folder
    )


def main() -> None:
    """``python -m tests.models FOLDER NAME``: for callers that do not want to import torch."""
    folder, name = sys.argv[1:]
    print(make_model(Path(folder), NAMES[name]))


if __name__ == "__main__":
    main()
