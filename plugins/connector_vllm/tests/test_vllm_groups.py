"""Which models are cached, and how vLLM's KV cache groups are cut."""

from __future__ import annotations

from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from vllm.v1 import kv_cache_interface  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvferry.runtime import GroupShape  # noqa: E402
from kvferry_connector_vllm.engine import (  # noqa: E402
    async_loads_because,
    engine_facts,
    geometry,
    group_shapes,
    rank_block_bytes,
    unsupported,
)
from tests.vllm_features import FAILURES_BY_REQUEST  # noqa: E402

PLAIN: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
FULL = FullAttentionSpec(**PLAIN)
WINDOW = SlidingWindowSpec(**PLAIN, sliding_window=100)
LATENT = MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1, "head_size": 40})
STATE = MambaSpec(block_size=64, shapes=((4, 4),), dtypes=(torch.float32,))
INTERFACE = "vllm.v1.kv_cache_interface"
STATES = "tokens_per_state"
"""How vLLM calls compressed tokens, after it called them compress_ratio."""
by_request = pytest.mark.vllm_has(*FAILURES_BY_REQUEST)


def config(*specs: KVCacheSpec, layers: int = 3) -> KVCacheConfig:
    groups = [
        KVCacheGroupSpec([f"layers.{layer}.of.{number}" for layer in range(layers)], spec)
        for number, spec in enumerate(specs)
    ]
    return KVCacheConfig(num_blocks=9, kv_cache_tensors=[], kv_cache_groups=groups)


def engine(chunked_prefill: bool = True, async_scheduling: bool = False, **parallel: int) -> Any:
    sizes = {
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "local_world_size": 1,
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**{**sizes, **parallel}),
        scheduler_config=SimpleNamespace(
            enable_chunked_prefill=chunked_prefill, async_scheduling=async_scheduling
        ),
        device_config=SimpleNamespace(device_type="cpu"),
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", kv_load_failure_policy="recompute"),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 7, get_total_num_kv_heads=lambda: 4),
    )


def newer(name: str) -> Any:
    return pytest.mark.vllm_has(INTERFACE, name)


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param((FULL,), id="full"),
        pytest.param((WINDOW,), id="window", marks=by_request),
        pytest.param((LATENT,), id="latent"),
        pytest.param((FULL, WINDOW, WINDOW), id="hybrid", marks=by_request),
        pytest.param((LATENT, WINDOW), id="latent and window", marks=by_request),
    ],
)
def test_pages_and_windows_are_cached(specs: tuple[KVCacheSpec, ...]) -> None:
    assert unsupported(engine(), config(*specs)) is None


@pytest.mark.vllm_lacks(*FAILURES_BY_REQUEST)
@pytest.mark.parametrize(
    "specs", [(WINDOW,), (FULL, WINDOW, WINDOW), (FULL, FULL)], ids=["window", "hybrid", "two groups"]
)
def test_where_failures_are_told_by_blocks_only_one_plain_group_is_cached(
    specs: tuple[KVCacheSpec, ...],
) -> None:
    reason = unsupported(engine(), config(*specs))
    assert reason is not None
    assert "cannot be told that a load" in reason
    assert "disable_hybrid_kv_cache_manager" in reason


@pytest.mark.parametrize(
    ("spec", "more", "kind"),
    [
        ("MambaSpec", None, "mamba"),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 64}, "chunked_local_attention"),
        ("CrossAttentionSpec", {}, "cross_attention"),
        ("EncoderOnlyAttentionSpec", {}, "encoder_only_attention"),
        ("SinkFullAttentionSpec", {"sink_len": 4}, "sink_full_attention"),
        ("SlidingWindowMLASpec", {"sliding_window": 100}, "sliding_window_mla"),
        pytest.param("RSWASpec", {"rswa_window": 64}, "full_attention", marks=newer("RSWASpec")),
        pytest.param("MLAAttentionSpec", {STATES: 4}, "mla_attention", marks=newer(STATES)),
        pytest.param(
            "MLAAttentionSpec",
            {"compress_ratio": 4},
            "mla_attention",
            marks=pytest.mark.vllm_lacks(INTERFACE, STATES),
        ),
        pytest.param("FullAttentionSpec", {STATES: Fraction(1, 2)}, "full_attention", marks=newer(STATES)),
    ],
)
def test_anything_else_is_not_cached_and_the_reason_names_the_group(
    spec: str, more: dict[str, Any] | None, kind: str
) -> None:
    made = STATE if more is None else getattr(kv_cache_interface, spec)(**PLAIN, **more)
    reason = unsupported(engine(), config(FULL, made))
    assert reason is not None
    assert "group 1 (layers.0.of.1 and 2 more)" in reason
    assert kind in reason
    facts = {fact.path: fact.value for fact in engine_facts(engine(), config(FULL, made), 256, None)}
    assert not any(name in ("full", "mla", "sliding") for name in facts["engine.group_kinds"])


def test_what_vllm_keeps_elsewhere_or_splits_over_ranks_is_not_cached() -> None:
    ephemeral = config(FULL)
    ephemeral.kv_cache_groups[0].enable_kv_transfer = False
    assert unsupported(engine(), ephemeral) is not None
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        assert name in (unsupported(engine(**{name: 2}), config(FULL)) or "")
    assert unsupported(engine(), config()) is not None


def test_latents_that_can_only_be_computed_from_the_start_are_not_cached() -> None:
    """Going on from a hit would give wrong answers there, without any error."""
    assert "whole prompts only" in (unsupported(engine(chunked_prefill=False), config(LATENT)) or "")
    assert unsupported(engine(chunked_prefill=False), config(FULL)) is None


@by_request  # else they are refused for being several
def test_groups_whose_blocks_vllm_overwrites_before_it_asks_are_not_cached() -> None:
    other = SlidingWindowSpec(**{**PLAIN, "dtype": torch.float32}, sliding_window=100)
    assert "precision" in (unsupported(engine(), config(FULL, other)) or "")


@pytest.mark.parametrize(
    "more", [{}, pytest.param({"extra_retained_tokens": 3}, marks=newer("extra_retained_tokens"))], ids=str
)
def test_shapes_follow_the_block_tables(more: dict[str, int]) -> None:
    wide = SlidingWindowSpec(**{**PLAIN, "block_size": 32}, sliding_window=100, **more)
    assert group_shapes(config(FULL, WINDOW, wide, LATENT)) == (
        GroupShape(16),
        GroupShape(16, 100),
        GroupShape(32, 100 + sum(more.values())),
        GroupShape(16),
    )


def test_layers_of_several_page_sizes_in_one_group_are_one_shape() -> None:
    larger = FullAttentionSpec(**{**PLAIN, "head_size": 16})
    names = [f"layers.{layer}" for layer in range(3)]
    mixed = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs=dict(zip(names, (FULL, larger, FULL), strict=True))
    )
    found = KVCacheConfig(9, [], [KVCacheGroupSpec(names, mixed)])
    assert unsupported(engine(), found) is None
    assert group_shapes(found) == (GroupShape(16),)
    assert rank_block_bytes(found) == (2 * FULL.page_size_bytes + larger.page_size_bytes,)
    mixed.kv_cache_specs["layers.1"] = STATE
    assert unsupported(engine(), found) is not None


def test_loads_run_in_front_of_a_step_only_where_vllm_can_be_told_of_a_failure() -> None:
    assert async_loads_because(engine(), config(FULL)) is None
    assert async_loads_because(engine(), config(LATENT)) is None
    for others in ((WINDOW,), (FULL, FULL)):
        assert "groups or a sliding window" in (async_loads_because(engine(), config(*others)) or "")


@pytest.mark.parametrize("ahead", [{"async_scheduling": True}, {"pipeline_parallel_size": 2}], ids=str)
def test_no_load_runs_in_front_of_a_step_where_vllm_would_take_tokens_of_the_step_behind_it(
    ahead: dict[str, int],
) -> None:
    """vLLM drops what the step with the failure sampled, and keeps what the one behind it made of that."""
    reason = async_loads_because(engine(**ahead), config(FULL))
    assert reason is not None
    assert next(iter(ahead)) in reason
    facts = {fact.path: fact.value for fact in engine_facts(engine(**ahead), config(FULL), 256, None)}
    assert facts["engine.sync_loads"] == reason


@by_request
def test_facts_speak_of_a_common_block_and_of_all_groups() -> None:
    wide = SlidingWindowSpec(**{**PLAIN, "block_size": 32}, sliding_window=100)
    facts = {fact.path: fact.value for fact in engine_facts(engine(), config(FULL, wide), 256, None)}
    assert facts["engine.block_tokens"] == 32
    assert facts["engine.group_kinds"] == ("full", "sliding")
    assert facts["engine.chunk_bytes"] == 3 * (16 * FULL.page_size_bytes + 8 * wide.page_size_bytes)


def test_a_latent_has_one_head_on_every_rank_and_a_window_is_part_of_the_geometry() -> None:
    latent, window = geometry(engine(), config(LATENT, WINDOW), 256).groups
    assert (latent.kind, latent.kv_heads, latent.window) == ("mla", 1, None)
    assert (window.kind, window.kv_heads, window.window) == ("sliding", 4, 100)
