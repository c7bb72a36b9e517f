"""Tiny Llama models with random weights, made on the spot: nothing is downloaded.

The weights come from a seed, so every run serves the same model. Their scale is larger than that of
a freshly initialised model: with the usual one, greedy answers repeat one token whatever the prompt
was, and comparing such answers would prove nothing.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from attrs import asdict, frozen

FIRST_TOKEN = 3
"""Ids below stand for padding, begin and end."""
VOCABULARY = 512
BYTE_TOKENS = 256


@frozen(kw_only=True)
class ModelShape:
    """What tells one tiny model from another."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    weight_scale: float
    head_size: int = 64
    positions: int = 8192
    seed: int = 20260

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, two bytes a number (bfloat16)."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_size


DEMO = ModelShape(hidden=1024, layers=8, heads=16, kv_heads=8, intermediate=2816, weight_scale=0.06)
"""95 million parameters and 16 KiB of KV cache per token: prefill takes most of a request's time."""

SMALL = ModelShape(hidden=256, layers=4, heads=4, kv_heads=2, intermediate=512, weight_scale=0.1)
"""For tests that ask whether the answer is right, not how soon it comes."""


def make_model(folder: Path, shape: ModelShape) -> Path:
    """Make the model below ``folder``, or find it there, and return its path.

    The name tells the shape, so that a changed shape is made anew. A model that was left half made is
    never found: it is renamed when it is complete.
    """
    digest = hashlib.sha256(json.dumps(asdict(shape), sort_keys=True).encode()).hexdigest()[:8]
    model = folder / f"llama-{shape.hidden}x{shape.layers}-{digest}"
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
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(shape.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_size,
        max_position_embeddings=shape.positions,
        initializer_range=shape.weight_scale,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    )
    model: Any = LlamaForCausalLM
    model(config).to(torch.bfloat16).save_pretrained(folder)


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
    """``python -m tests.models FOLDER demo|small``: for callers that do not want to import torch."""
    folder, name = sys.argv[1:]
    print(make_model(Path(folder), {"demo": DEMO, "small": SMALL}[name]))


if __name__ == "__main__":
    main()
