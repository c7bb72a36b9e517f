"""A real vLLM under pressure: chunked prefill, no prefix cache of its own, too few blocks, a tier that
is too small, many requests at once.

In float32, because the shapes of the computations differ from run to run here: sums in another order
differ in the seventh digit, and a wrong block in the first.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.demo.prompts import random_tokens
from tests.e2e.checks import assert_at_rest, assert_close, difference, whole_blocks
from tests.e2e.conftest import Launch
from tests.engines import NO_LOAD, UNUSED, Engine
from tests.models import SMALL

TOLERANCE = 2e-3
PROMPTS = 24
FLOAT32_BYTES_PER_TOKEN = 2 * SMALL.kv_bytes_per_token
TIER_MIB = 24
"""About a quarter of what the prompts need."""


@pytest.fixture(scope="module")
def engine(launch: Launch) -> Iterator[Engine]:
    described = launch(
        config={"capacity": f"{TIER_MIB}MiB"},
        dtype="float32",
        enable_prefix_caching=False,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        num_gpu_blocks_override=72,
    )
    with described as engine:
        yield engine


def test_chunked_prefill_is_saved_and_restored(engine: Engine) -> None:
    prompt = random_tokens(1, 1900)
    cold = engine.serve(prompt)
    before = engine.settle()
    again = engine.serve(prompt)
    assert again.cached_tokens == whole_blocks(1900)
    assert_close(again, cold, TOLERANCE)
    assert difference(engine.settle(), before)["verified_blocks"] == whole_blocks(1900) / 128


def test_crowd_in_a_tier_that_is_too_small(engine: Engine) -> None:
    prompts = [random_tokens(100 + index, 1018 - index % 3) for index in range(PROMPTS)]
    assert PROMPTS * 1018 * FLOAT32_BYTES_PER_TOKEN > 3 * TIER_MIB << 20
    alone = [engine.serve(prompt, UNUSED, max_tokens=24) for prompt in prompts]
    before = engine.settle()
    preempted = engine.counters("vllm:num_preemptions")
    for turn in (prompts, list(reversed(prompts)), prompts):
        expected = alone if turn[0] == prompts[0] else list(reversed(alone))
        answers = engine.generate(turn, max_tokens=24)
        for answer, lone in zip(answers, expected, strict=True):
            assert_close(answer, lone, TOLERANCE)
    after = engine.settle()
    gained = difference(after, before)
    assert gained["hit_tokens"] > 0
    assert gained["hit_tokens"] < 2 * PROMPTS * whole_blocks(1016)
    assert gained["evictions"] > 0
    assert_at_rest(after)
    assert sum(engine.counters("vllm:num_preemptions").values()) > sum(preempted.values())


@pytest.mark.parametrize("steps", [2, 6, 12])
def test_requests_that_a_reset_puts_back_are_stored_and_answered_right(engine: Engine, steps: int) -> None:
    """Their blocks go to others at once, those that are being saved included."""
    prompts = [random_tokens(1000 * steps + index, 1018 - index) for index in range(5)]
    alone = [engine.serve(prompt, UNUSED, max_tokens=24) for prompt in prompts]
    interrupted, answers = engine.interrupt(prompts, steps=steps, max_tokens=24)
    assert interrupted == len(prompts)
    before = engine.settle()
    again = engine.generate(prompts, max_tokens=24)
    for answer, restored, lone in zip(answers, again, alone, strict=True):
        assert_close(answer, lone, TOLERANCE)
        assert_close(restored, lone, TOLERANCE)
    after = engine.settle()
    assert difference(after, before)["hit_tokens"] > 0
    assert_at_rest(after)


def test_wrong_bytes_would_be_seen(engine: Engine) -> None:
    """The tolerance is far below what another prompt's KV cache does to an answer."""
    end = random_tokens(2, 100)
    first = engine.serve(random_tokens(3, 1024) + end, NO_LOAD)
    second = engine.serve(random_tokens(4, 1024) + end, NO_LOAD)
    with pytest.raises((AssertionError, KeyError)):
        assert_close(first, second, 50 * TOLERANCE)
