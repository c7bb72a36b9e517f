"""Real models whose KV cache is not plain full attention: a hit answers like vLLM's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.demo.prompts import random_tokens
from tests.e2e.checks import BLOCK, assert_at_rest, assert_sized, difference, whole_blocks
from tests.e2e.conftest import Launch, make_model
from tests.engines import NO_LOAD, NO_STORE, UNUSED, Engine
from tests.models import ALL_WINDOWED, WINDOWED
from tests.vllm_features import FAILURES_BY_REQUEST


def assert_restores(engine: Engine, tokens: int, verified: int) -> None:
    """Store a new prompt, restore it, and compare with vLLM's own prefix hit; ``verified`` blocks of all
    groups must have come back, and no other."""
    prompt = random_tokens(tokens, tokens)
    engine.clear()
    assert engine.serve(prompt, NO_LOAD).cached_tokens == 0
    reference = engine.serve(prompt, UNUSED)
    before = engine.reset()
    ours = engine.serve(prompt)
    gained = difference(engine.reset(), before)
    assert ours.cached_tokens == reference.cached_tokens == gained["hit_tokens"] == whole_blocks(tokens)
    assert ours.same_as(reference)
    assert gained["verified_blocks"] == verified


@pytest.mark.vllm_has(*FAILURES_BY_REQUEST)
def test_of_sliding_windows_only_the_end_is_restored(launch: Launch, runtime_dir: Path) -> None:
    assert WINDOWED.window is not None
    window = WINDOWED.window // BLOCK
    described = launch(model=make_model("windowed"), max_num_batched_tokens=1024)
    with described as engine:
        for tokens in (129, 700, 1300, 3001):
            # Three groups of sliding layers and one of full attention, a layer each.
            hit = whole_blocks(tokens) // BLOCK
            assert_restores(engine, tokens, hit + 3 * min(hit, window))
        # A next turn, and a prompt that leaves the stored one early.
        prompt = random_tokens(5, 1500)
        answer = engine.serve(prompt, max_tokens=200)
        engine.reset()
        turn = prompt + answer.tokens + random_tokens(6, 100)
        assert engine.serve(turn).cached_tokens == (1500 + 199) // BLOCK * BLOCK
        engine.reset()
        other = prompt[: 9 * BLOCK] + random_tokens(7, 300)
        assert engine.serve(other).cached_tokens == 9 * BLOCK
        assert_sized(make_model("windowed"), runtime_dir)
        assert_at_rest(engine.reset())


@pytest.mark.vllm_has(*FAILURES_BY_REQUEST)
def test_a_model_of_sliding_windows_alone_is_restored_by_its_last_window(
    launch: Launch, runtime_dir: Path
) -> None:
    assert ALL_WINDOWED.window is not None
    window = ALL_WINDOWED.window // BLOCK
    described = launch(model=make_model("all-windowed"), max_num_batched_tokens=1024)
    with described as engine:
        for tokens in (129, 640, 700, 3001):
            # All layers are one group.
            assert_restores(engine, tokens, min(whole_blocks(tokens) // BLOCK, window))
        prompt = random_tokens(5, 1500)
        answer = engine.serve(prompt, max_tokens=200)
        for leaves, expected in ((1500 + 199, (1500 + 199) // BLOCK * BLOCK), (9 * BLOCK, 9 * BLOCK)):
            engine.reset()
            turn = (prompt + answer.tokens)[:leaves] + random_tokens(leaves, 300)
            ours = engine.serve(turn, NO_STORE)
            engine.reset()
            assert ours.cached_tokens == expected
            assert ours.tokens == engine.serve(turn, UNUSED).tokens
        assert_sized(make_model("all-windowed"), runtime_dir)
        assert_at_rest(engine.reset())


@pytest.mark.vllm_lacks(*FAILURES_BY_REQUEST)
def test_sliding_windows_are_left_alone_where_vllm_cannot_be_told_of_a_failure(launch: Launch) -> None:
    with launch(model=make_model("windowed"), max_num_batched_tokens=1024) as engine:
        assert_left_alone(engine, "cannot be told that a load of such a model failed")


@pytest.mark.vllm_lacks(*FAILURES_BY_REQUEST)
def test_sliding_windows_are_restored_as_full_attention_where_the_operator_wants_it(
    launch: Launch, runtime_dir: Path
) -> None:
    """As the message of the test above says: all blocks are kept then, in one group."""
    described = launch(
        model=make_model("windowed"), max_num_batched_tokens=1024, disable_hybrid_kv_cache_manager=True
    )
    with described as engine:
        for tokens in (129, 700, 1300):
            assert_restores(engine, tokens, whole_blocks(tokens) // BLOCK)
        assert_sized(make_model("windowed"), runtime_dir)
        assert_at_rest(engine.reset())


@pytest.mark.vllm_has("vllm.platforms.cpu", "CPU_MLA")
def test_latents_are_left_alone_where_vllm_cannot_go_on_from_a_hit(launch: Launch) -> None:
    """vLLM's MLA on CPU computes whole prompts only. A hit would give wrong answers."""
    with launch(model=make_model("latent")) as engine:
        assert_left_alone(engine, "MLA computes whole prompts only")


def assert_left_alone(engine: Engine, why: str) -> None:
    """There is no hit, one message says why, and requests run as without kvferry."""
    prompt = random_tokens(1, 700)
    cold = engine.serve(prompt)
    # Without vLLM's own prefix cache, where it has one.
    engine.reset()
    again = engine.serve(prompt)
    assert again.cached_tokens == 0
    assert again.same_as(cold)
    said = [line for line in engine.log.read_text().splitlines() if "nothing is cached" in line]
    assert len(said) == 1
    assert why in said[0]
