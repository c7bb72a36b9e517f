"""One real vLLM: what it answers with a restored KV cache, and what requests may ask for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.demo.prompts import random_tokens
from tests.e2e.checks import (
    BLOCK,
    assert_at_rest,
    assert_reuses,
    difference,
    whole_blocks,
)
from tests.e2e.conftest import Launch
from tests.engines import NO_LOAD, NO_STORE, UNUSED, Engine
from tests.models import SMALL


@pytest.fixture(scope="module")
def shared_engine(launch: Launch) -> Iterator[Engine]:
    with launch() as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine with empty caches; at rest afterwards."""
    shared_engine.clear()
    yield shared_engine
    assert_at_rest(shared_engine.reset())


@pytest.mark.parametrize("tokens", [129, 200, 256, 257, 1280, 2176, 3001])
def test_hit_answers_like_an_own_prefix_hit(engine: Engine, tokens: int) -> None:
    assert_reuses(engine, random_tokens(tokens, tokens))


def test_answers_depend_on_the_restored_tokens(engine: Engine) -> None:
    """Otherwise all comparisons here would pass whatever was restored."""
    end = random_tokens(1, 100)
    first = engine.serve(random_tokens(2, 1024) + end)
    second = engine.serve(random_tokens(3, 1024) + end)
    assert first.tokens != second.tokens
    assert len(set(first.tokens)) > 2


@pytest.mark.parametrize("tokens", [1, 128])
def test_prompt_without_a_whole_block_to_spare_is_only_computed(engine: Engine, tokens: int) -> None:
    prompt = random_tokens(4, tokens)
    cold = engine.serve(prompt)
    engine.reset()
    again = engine.serve(prompt)
    assert again.cached_tokens == 0
    assert again.same_as(cold)


def test_shared_beginning_within_a_chunk_is_found(engine: Engine) -> None:
    shared = 3 * BLOCK
    first = random_tokens(5, 900)
    engine.serve(first)
    engine.reset()
    assert engine.serve(first[:shared] + random_tokens(6, 500)).cached_tokens == shared


def test_tokens_of_an_own_prefix_hit_are_kept_too(engine: Engine) -> None:
    """vLLM computed them for a request that asked us not to store; a later one brings them to us."""
    prompt = random_tokens(7, 1000)
    engine.serve(prompt, NO_STORE)
    assert engine.serve(prompt).cached_tokens == whole_blocks(1000)
    engine.reset()
    assert engine.serve(prompt).cached_tokens == whole_blocks(1000)


def test_next_turn_finds_the_generated_tokens(engine: Engine) -> None:
    prompt = random_tokens(8, 1000)
    answer = engine.serve(prompt, max_tokens=200)
    engine.reset()
    turn = prompt + answer.tokens + random_tokens(9, 100)
    # The last token of an answer was never computed on.
    assert engine.serve(turn).cached_tokens == (1000 + 199) // BLOCK * BLOCK


def test_no_store_leaves_nothing(engine: Engine) -> None:
    prompt = random_tokens(10, 700)
    before = engine.reset()
    engine.serve(prompt, NO_STORE)
    after = engine.reset()
    assert after["saved_tokens"] == before["saved_tokens"]
    assert engine.serve(prompt, NO_STORE).cached_tokens == 0


def test_no_load_computes(engine: Engine) -> None:
    prompt = random_tokens(11, 700)
    engine.serve(prompt)
    before = engine.reset()
    assert engine.serve(prompt, NO_LOAD).cached_tokens == 0
    assert difference(engine.reset(), before)["queries"] == 0


def test_cache_salts_are_apart(engine: Engine) -> None:
    prompt = random_tokens(12, 700)
    engine.serve(prompt, salt="one tenant")
    found = {}
    for salt in (None, "another tenant", "one tenant"):
        engine.reset()
        found[salt] = engine.serve(prompt, NO_STORE, salt=salt).cached_tokens
    assert found == {None: 0, "another tenant": 0, "one tenant": whole_blocks(700)}


def test_clearing_the_connector_forgets_all(engine: Engine) -> None:
    prompt = random_tokens(13, 700)
    engine.serve(prompt)
    engine.clear()
    assert engine.serve(prompt).cached_tokens == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_aborted_requests_leave_nothing_behind(engine: Engine, steps: int) -> None:
    """Half of them are being restored, half computed, when the client goes away."""
    known = [random_tokens(20 + index, 1500) for index in range(4)]
    engine.generate(known)
    engine.reset()
    aborted = engine.abort([*known, *(random_tokens(30 + i, 1500) for i in range(4))], steps=steps)
    assert aborted == 8
    assert_at_rest(engine.reset())
    assert_reuses(engine, random_tokens(40 + steps, 1300))


def test_many_requests_at_once_are_restored(engine: Engine) -> None:
    prompts = [random_tokens(50 + index, 300 + 150 * index) for index in range(12)]
    cold = engine.generate(prompts)
    engine.reset()
    again = engine.generate(prompts)
    assert [answer.cached_tokens for answer in again] == [whole_blocks(len(p)) for p in prompts]
    # Batches differ between the two, and so does rounding; the bytes are compared by digest. Here
    # it is about requests not being mixed up: every answer begins as that prompt's.
    matching = sum(mine.tokens[0] == theirs.tokens[0] for mine, theirs in zip(again, cold, strict=True))
    assert matching >= len(prompts) - 2


def test_statistics_count_what_happened(engine: Engine) -> None:
    prompt = random_tokens(70, 1300)
    hit = whole_blocks(1300)
    before = engine.reset()
    engine.serve(prompt)
    after = engine.reset()
    stored = difference(after, before)
    assert stored["saved_tokens"] == hit
    assert stored["saved_bytes"] == hit * SMALL.kv_bytes_per_token
    assert after["resident_chunks"] == -(-hit // 256)
    before = after
    engine.serve(prompt, NO_STORE)
    loaded = difference(engine.reset(), before)
    assert loaded["queries"] == 1
    assert loaded["query_tokens"] == loaded["hit_tokens"] == loaded["loaded_tokens"] == hit
    assert loaded["loaded_bytes"] == hit * SMALL.kv_bytes_per_token
    assert loaded["saved_tokens"] == 0


def test_requests_in_which_kvferry_has_no_part_change_no_counter(engine: Engine) -> None:
    before = engine.reset()
    engine.serve(random_tokens(71, 600), UNUSED)
    assert set(difference(engine.reset(), before).values()) == {0}
