"""How much a model's KV cache takes, and how much of it fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.api import GroupGeometry, KVFerryError, KVGeometry
from kvferry.api.units import ByteSize
from kvferry.config import Config, Tier
from kvferry.config.schema import TierName
from kvferry.control.identity import Namespace
from kvferry.control.keys import KeyChain
from kvferry.runtime import EngineDescription, GroupShape, RequestOptions, RequestState
from kvferry.runtime.engine import header_bytes_of, slot_bytes_of
from kvferry.runtime.grain import Grain
from kvferry.runtime.model_shape import DTYPE_BYTES, model_shape, read_model
from kvferry.runtime.offers import offers
from kvferry.runtime.sizes import (
    RankSizes,
    TierSize,
    host_budget,
    need,
    prompt_size,
    rank_sizes,
    slot_sizes,
    tier_fit,
)

QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
    "torch_dtype": "bfloat16",
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
}
LLAMA_7B: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_size": 4096,
    "torch_dtype": "float16",
}
GEMMA3_12B: dict[str, Any] = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "hidden_size": 3840,
        "sliding_window": 1024,
    },
}


@st.composite
def geometries(draw: st.DrawFn) -> tuple[KVGeometry, int, int]:
    """A model, how many ranks can share it, and a block size of which a chunk is a multiple."""
    ranks = draw(st.sampled_from([1, 2, 4, 8, 16]))
    block = draw(st.sampled_from([1, 16, 48, 128]))
    dtype = draw(st.sampled_from(sorted(DTYPE_BYTES)))

    def group(kind: str, window: int | None = None) -> GroupGeometry:
        if kind == "mla":
            heads = 1
        else:
            heads = draw(st.sampled_from([1, 2, 8, 16, 48]))
            assume(heads % ranks == 0 or ranks % heads == 0)
        size = draw(st.integers(1, 600))
        return GroupGeometry(
            kind=kind,
            layers=draw(st.integers(1, 100)),
            kv_heads=heads,
            head_size=size,
            dtype=dtype,
            window=window,
        )

    kinds = draw(st.sampled_from([("full",), ("full", "sliding"), ("sliding",), ("mla",)]))
    groups = tuple(group(kind, 512 if kind == "sliding" else None) for kind in kinds)
    return KVGeometry(groups=groups, chunk_tokens=block * draw(st.integers(1, 8))), ranks, block


def sizes_of(described: tuple[KVGeometry, int, int]) -> RankSizes:
    geometry, ranks, block = described
    return rank_sizes(geometry, attention_heads=48 * ranks, ranks=ranks, block_tokens=block)


@given(geometries())
def test_ranks_together_keep_the_model_once_and_more_only_what_they_cannot_share(
    described: tuple[KVGeometry, int, int],
) -> None:
    """Every K and V of every head is somewhere, and the ranks together keep no fraction of a copy."""
    sizes = sizes_of(described)
    for group in sizes.groups:
        geometry = group.geometry
        planes = 1 if geometry.kind == "mla" else 2
        once = geometry.layers * geometry.kv_heads * geometry.head_size * planes * DTYPE_BYTES[geometry.dtype]
        assert sizes.ranks * group.token_bytes == group.copies * once
        assert group.copies == 1 or group.kv_heads == 1
    alone = sizes_of((described[0], 1, described[2]))
    assert alone.token_bytes <= sizes.ranks * sizes.token_bytes
    assert sizes.token_bytes <= alone.token_bytes


@given(geometries())
def test_a_chunk_is_as_large_as_the_slot_that_the_runtime_gives_it(
    described: tuple[KVGeometry, int, int],
) -> None:
    geometry, ranks, block = described
    sizes = sizes_of(described)
    assert sizes.chunk_bytes == geometry.chunk_tokens // block * sizes.block_bytes
    engine = EngineDescription(
        engine_id="e",
        world_size=ranks,
        groups=tuple(GroupShape(block, group.window) for group in geometry.groups),
        block_bytes=tuple(block * group.token_bytes for group in sizes.groups),
    )
    assert sizes.chunk_bytes == engine.bytes_of(geometry.chunk_tokens)
    assert sizes.block_bytes == engine.bytes_of(engine.block_tokens)


@given(geometries(), st.integers(1, 5000))
def test_a_prompt_takes_the_slots_of_what_the_runtime_stores_of_it(
    described: tuple[KVGeometry, int, int], tokens: int
) -> None:
    geometry, _, block = described
    prompt = prompt_size(tokens, sizes_of(described))
    assert 0 <= tokens - prompt.kept_tokens < block
    chain = KeyChain(Namespace(model="m", revision="r", geometry=geometry), salt="", lora=None)
    state = RequestState(
        id="r",
        tokens=range(tokens),
        prompt_tokens=tokens,
        chain=chain,
        salt="",
        options=RequestOptions(),
    )
    state.extend_chain(tokens)
    writes = offers(state, tokens, tokens, Grain.of(geometry.chunk_tokens, [GroupShape(block)]))
    assert prompt.chunks == len(writes)
    assert prompt.kept_tokens == sum(write.tokens for write in writes)


@given(geometries(), st.integers(1, 10**13), st.integers(0, 10**12), st.integers(1, 10**5), st.booleans())
def test_more_room_holds_more_and_never_more_than_fits(
    described: tuple[KVGeometry, int, int], capacity: int, more: int, tokens: int, addressable: bool
) -> None:
    sizes = sizes_of(described)
    prompt = prompt_size(tokens, sizes)
    tier = TierSize(name="t", capacity=ByteSize(capacity), addressable=addressable)
    slots = slot_sizes([tier], sizes)
    fit = tier_fit(tier, sizes, slots, prompt)
    larger = tier_fit(evolve(tier, capacity=ByteSize(capacity + more)), sizes, slots, prompt)
    assert fit.chunks * fit.slot_bytes <= capacity < (fit.chunks + 1) * fit.slot_bytes
    assert fit.tokens == fit.chunks * sizes.chunk_tokens
    assert larger.chunks >= fit.chunks
    assert fit.slot_bytes >= sizes.chunk_bytes
    assert (fit.prompts is None) == (prompt.chunks == 0)
    if fit.prompts is not None:
        assert need(tier, slots, prompt, fit.prompts).fits
        exact = evolve(tier, capacity=ByteSize(need(tier, slots, prompt, 3).rank_bytes))
        assert tier_fit(exact, sizes, slots, prompt).prompts == 3
        assert need(exact, slots, prompt, 3).fits
        assert not need(tier, slots, prompt, fit.prompts + 1).fits
        assert larger.prompts is not None
        assert larger.prompts >= fit.prompts


@given(geometries(), st.booleans())
def test_slots_are_as_large_as_an_engines_start_makes_them(
    described: tuple[KVGeometry, int, int], below: bool
) -> None:
    geometry, ranks, block = described
    sizes = sizes_of(described)
    cpu = TierSize(name="cpu", capacity=ByteSize(1), addressable=True)
    ssd = TierSize(name="ssd", capacity=ByteSize(1), addressable=False)
    slots = slot_sizes([cpu, ssd] if below else [cpu], sizes)
    names = ("cpu", "ssd") if below else ("cpu",)
    config = Config(
        chunk_tokens=geometry.chunk_tokens,
        tiers={TierName(name): Tier(use=name, capacity=ByteSize(1)) for name in names},
    )
    engine = EngineDescription(
        engine_id="e",
        world_size=ranks,
        groups=tuple(GroupShape(block, group.window) for group in geometry.groups),
        block_bytes=tuple(block * group.token_bytes for group in sizes.groups),
    )
    assert slots.of(cpu) == slot_bytes_of(config, engine)
    if below:
        assert slots.of(ssd) == slot_bytes_of(config, engine) + header_bytes_of(config, engine)
        assert slot_sizes([ssd], sizes) == slots


@given(st.integers(1, 64), st.integers(1, 2**50), st.integers(1, 2**40), st.integers(1, 2**50))
def test_a_host_holds_its_workers_tiers_in_memory_and_copies_under_way_are_part_of_them(
    workers: int, capacity: int, in_flight: int, memory: int
) -> None:
    cpu = TierSize(name="cpu", capacity=ByteSize(capacity), addressable=True)
    ssd = TierSize(name="ssd", capacity=ByteSize(2**60), addressable=False, in_flight=ByteSize(in_flight))
    budget = host_budget([cpu, ssd], workers, memory)
    assert budget.total_bytes == workers * capacity
    assert budget.in_flight_bytes == min(capacity, 2 * in_flight)
    assert budget.share == budget.total_bytes / memory
    assert host_budget([cpu], workers, None).share is None


@pytest.mark.parametrize(
    ("config", "ranks", "per_rank"),
    [
        (QWEN3_32B, 1, 256 << 10),
        (QWEN3_32B, 8, 32 << 10),
        (QWEN3_32B, 16, 32 << 10),  # two ranks hold the same head
        (DEEPSEEK_V3, 1, 61 * 576 * 2),
        (DEEPSEEK_V3, 16, 61 * 576 * 2),  # every rank holds the whole latent
        (LLAMA_7B, 1, 512 << 10),  # a head of K and V for each head
        (LLAMA_7B, 4, 128 << 10),
        (GEMMA3_12B, 1, 384 << 10),  # head_dim is the family's 256, not 3840 / 16
    ],
)
def test_known_models_have_their_known_sizes(config: dict[str, Any], ranks: int, per_rank: int) -> None:
    model = model_shape(config)
    geometry = KVGeometry(groups=model.groups, chunk_tokens=256)
    assert rank_sizes(geometry, model.attention_heads, ranks, 128).token_bytes == per_rank


@pytest.mark.parametrize(
    ("more", "kv_heads", "noted"),
    [
        ({}, 64, True),
        ({"num_key_value_heads": None}, 64, True),
        ({"num_kv_heads": 8}, 8, False),
        ({"multi_query_group_num": 2}, 2, False),
        ({"num_kv_heads": 64, "multi_query": True}, 1, False),
        ({"num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True}, 8, False),
        ({"model_type": "mistral"}, 8, True),
        ({"model_type": "mistral", "num_key_value_heads": None}, 64, True),
    ],
)
def test_kv_heads_are_found_under_every_name_and_a_guess_is_told(
    more: dict[str, Any], kv_heads: int, noted: bool
) -> None:
    config = {key: value for key, value in QWEN3_32B.items() if key != "num_key_value_heads"}
    model = model_shape({**config, "model_type": "other", **more})
    assert [group.kv_heads for group in model.groups] == [kv_heads]
    assert any("num_key_value_heads" in note for note in model.notes) == noted


@pytest.mark.parametrize(("dtype", "size"), sorted(DTYPE_BYTES.items()))
def test_a_named_dtype_takes_the_place_of_the_models_own(dtype: str, size: int) -> None:
    model = model_shape(QWEN3_32B, dtype)
    sizes = rank_sizes(KVGeometry(groups=model.groups, chunk_tokens=256), 64, 1, 128)
    assert sizes.token_bytes == 2 * 64 * 8 * 128 * size
    assert model.dtype == dtype


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        ({}, "bfloat16"),
        ({"torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": None, "dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "bfloat16"),
        ({"quantization_config": {"kv_cache_scheme": None}}, "bfloat16"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}, "fp8"),
        ({"quantization_config": {"quantization": {"kv_cache_quant_algo": "FP8"}}}, "fp8"),
    ],
)
def test_the_dtype_is_the_one_that_vllm_takes_by_itself(more: dict[str, Any], dtype: str) -> None:
    assert model_shape({**QWEN3_32B, **more}).dtype == dtype


def windows(more: dict[str, Any]) -> list[tuple[int, int | None]]:
    config = {**QWEN3_32B, "num_hidden_layers": 6, "sliding_window": 512, **more}
    return [(group.layers, group.window) for group in model_shape(config).groups]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, [(6, 512)]),
        ({"sliding_window": None}, [(6, None)]),
        ({"sliding_window": 0}, [(6, None)]),
        ({"use_sliding_window": False}, [(6, None)]),
        ({"use_sliding_window": True, "max_window_layers": 2}, [(2, None), (4, 512)]),
        ({"sliding_window_pattern": 3}, [(2, None), (4, 512)]),
        ({"sliding_window_pattern": "LLLG"}, [(1, None), (5, 512)]),
        ({"sliding_window_pattern": 3, "num_hidden_layers": 7}, [(2, None), (5, 512)]),
        ({"model_type": "gemma2"}, [(3, None), (3, 512)]),
        ({"layer_types": ["sliding_attention", "full_attention"] * 3}, [(3, None), (3, 512)]),
        ({"layer_types": ["full_attention"] * 6}, [(6, None)]),
        ({"layer_types": ["chunked_attention"] * 6, "sliding_window": None}, [(6, None)]),
    ],
)
def test_layers_have_the_windows_that_the_file_gives_them(
    more: dict[str, Any], expected: list[tuple[int, int | None]]
) -> None:
    assert windows(more) == expected


@given(st.integers(0, 6))
def test_windows_change_no_size(sliding: int) -> None:
    """kvferry stores whole blocks of every group."""
    kinds = ["sliding_attention"] * sliding + ["full_attention"] * (6 - sliding)
    model = model_shape({**QWEN3_32B, "num_hidden_layers": 6, "sliding_window": 64, "layer_types": kinds})
    sizes = rank_sizes(KVGeometry(groups=model.groups, chunk_tokens=256), 64, 2, 128)
    assert sizes.token_bytes == 2 * 6 * 4 * 128 * 2


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": "8"}, "num_attention_heads is not a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers is not a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is not a whole number"),
        ({"num_key_value_heads": -1}, "num_key_value_heads is not a whole number"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads is a list"),
        ({"head_dim": None, "hidden_size": None}, "hidden_size is missing"),
        ({"head_dim": None, "hidden_size": 5121}, "not a multiple of num_attention_heads"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"torch_dtype": None}, "dtype is not given"),
        ({"torch_dtype": "bfloat61"}, "did you mean bfloat16"),
        ({"layer_types": ["full_attention"]}, "layer_types does not fit"),
        ({"layer_types": ["linear_attention", []] * 32}, "caches nothing of this model"),
        ({"sliding_window": "512"}, "sliding_window is not a whole number"),
        ({"full_attention_interval": 4}, "keep a state"),
        ({"index_topk": 2048}, "further caches"),
        ({"v_head_dim": 64}, "V is not as wide as K"),
        ({"model_type": "minicpm3", "kv_lora_rank": 256}, "padded K and V"),
        ({"is_encoder_decoder": True}, "cross attention"),
        ({"num_kv_shared_layers": 10}, "keep nothing of their own"),
        ({"quantization_config": {"kv_cache_quant_algo": "NVFP4"}}, "not known here: 'NVFP4'"),
    ],
)
def test_a_file_that_does_not_tell_the_size_is_refused_with_its_place_and_a_remedy(
    more: dict[str, Any], says: str
) -> None:
    with pytest.raises(KVFerryError) as caught:
        model_shape({**QWEN3_32B, **more}, where="config.json")
    assert says in str(caught.value)
    assert caught.value.where.startswith("config.json")
    assert caught.value.why
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "says"),
    [
        (48, 8, 32, "48 attention heads cannot be shared by 32 ranks"),
        (24, 8, 3, "8 KV heads cannot be shared by 3 ranks"),
        (24, 8, 12, "8 KV heads cannot be shared by 12 ranks"),
    ],
)
def test_heads_that_cannot_be_shared_are_refused(heads: int, kv_heads: int, ranks: int, says: str) -> None:
    model = model_shape({**QWEN3_32B, "num_attention_heads": heads, "num_key_value_heads": kv_heads})
    with pytest.raises(KVFerryError, match=says):
        rank_sizes(KVGeometry(groups=model.groups, chunk_tokens=256), heads, ranks, 128)


def test_a_chunk_of_half_a_block_is_refused() -> None:
    model = model_shape(QWEN3_32B)
    with pytest.raises(KVFerryError, match="not whole blocks") as caught:
        rank_sizes(KVGeometry(groups=model.groups, chunk_tokens=200), 64, 1, 128)
    assert "256" in caught.value.remedy


def test_a_model_is_its_file_or_the_folder_that_holds_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA3_12B))
    assert read_model(tmp_path) == read_model(tmp_path / "config.json") == model_shape(GEMMA3_12B)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "it is not JSON"),
        (b"\xff\xfe\x00", "it is not JSON"),
        (b"[" * 100_000, "it is not JSON"),
        (b"[1]", "holds no object"),
        (b"{}", "num_hidden_layers is missing"),
        (b" " * (17 << 20), "more than"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, raw: bytes, says: str) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(KVFerryError) as caught:
        read_model(tmp_path)
    assert says in str(caught.value)
    assert str(tmp_path) in caught.value.where


json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
KEYS = [
    *DEEPSEEK_V3,
    *QWEN3_32B,
    "layer_types",
    "sliding_window",
    "sliding_window_pattern",
    "text_config",
    "quantization_config",
    "multi_query",
    "max_window_layers",
    "use_sliding_window",
    "v_head_dim",
]


@given(
    st.sampled_from([QWEN3_32B, DEEPSEEK_V3, GEMMA3_12B]), st.dictionaries(st.sampled_from(KEYS), json_values)
)
def test_whatever_a_file_holds_there_are_sizes_or_one_clear_error(
    config: dict[str, Any], more: dict[str, Any]
) -> None:
    try:
        model = model_shape({**config, **more})
    except KVFerryError as error:
        told = (error.what, error.where, error.why, error.remedy)
    else:
        told = ()
        sizes = rank_sizes(KVGeometry(groups=model.groups, chunk_tokens=256), model.attention_heads, 1, 128)
        assert sizes.token_bytes > 0
        assert model.groups
    assert all(told)
