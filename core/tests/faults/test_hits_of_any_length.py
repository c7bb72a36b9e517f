"""Hits of every length: never the whole prompt, never over what the engine holds, never wrong."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import InstanceSettings

BLOCK, CHUNK = 4, 16
lengths = st.integers(0, 6 * CHUNK)

properties = settings(
    max_examples=100,
    # Every example makes its own scheduler side out of the factory.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def text(length: int, shared: int = 0) -> list[int]:
    """A prompt that begins with the numbers below ``shared`` and goes on with others."""
    return [*range(shared), *range(1000, 1000 + length - shared)]


@properties
@given(stored=lengths, asked=lengths, local=lengths, shared=lengths)
def test_a_hit_is_a_whole_number_of_blocks_that_leaves_a_token_and_no_lease(
    by_hand: Any, stored: int, asked: int, local: int, shared: int
) -> None:
    """A whole-prompt hit leaves the engine nothing to schedule (LMCache#3322, vllm#55113); a request
    that resumes with more than the hit must not load less than nothing (LMCache#2158)."""
    shared = min(stored, asked, shared)
    local = local // BLOCK * BLOCK
    driven = by_hand(16)
    driven.store("a", text(stored, shared))
    driven.add("b", [*range(shared), *range(5000, 5000 + asked - shared)], store=False)
    found = driven.match("b", local)
    common = max(0, min(shared // BLOCK * BLOCK, (asked - 1) // BLOCK * BLOCK))
    assert found == max(0, common - local)
    assert found == 0 or local + found < asked
    assert driven.manager.stats().leases == (found > 0)
    driven.runtime.allocated("b", 0, [[]])
    assert driven.manager.stats().leases == 0
    assert not driven.finish("b", computed=0)
    driven.check()


@properties
@given(tokens=st.integers(2, 6 * CHUNK), local=lengths)
def test_a_load_writes_only_blocks_behind_what_the_engine_holds(
    by_hand: Any, tokens: int, local: int
) -> None:
    """The engine's own prefix may end inside the chunk in which the hit ends (LMCache#2206)."""
    local = min(local, tokens - 1) // BLOCK * BLOCK
    driven = by_hand(16)
    driven.store("a", text(tokens))
    state = driven.add("b", text(tokens), store=False)
    found = driven.match("b", local)
    assert local + found == (tokens - 1) // BLOCK * BLOCK
    if found:
        driven.allocate("b", found, local)
        (transfer,) = driven.plan().loads
        (rows,) = transfer.groups
        own, lent = driven.tables["b"][: local // BLOCK], driven.tables["b"][local // BLOCK :]
        assert not {*own} & {*rows.block_column.tolist()}
        assert rows.block_column.tolist() == lent, "not every block of the hit exactly once"
        driven.report(transfer)
        driven.check_loaded(state, 0, local + found)
    driven.finish("b", computed=local + found)
    driven.check()


@properties
@given(stored=st.integers(1, 5 * CHUNK), more=st.integers(1, 3 * CHUNK))
def test_what_is_computed_behind_a_hit_that_ends_inside_a_chunk_is_stored_whole(
    by_hand: Any, stored: int, more: int
) -> None:
    """Computed tokens are counted in tokens, not in chunks or blocks of the hit (vllm#34616)."""
    driven = by_hand(16)
    driven.store("a", text(stored))
    longer = text(stored + more)
    driven.add("b", longer)
    found = driven.match("b")
    assert found == min(stored, stored + more - 1) // BLOCK * BLOCK
    if found:
        driven.allocate("b", found)
        for transfer in driven.plan().loads:
            driven.report(transfer)
    driven.compute("b", found, len(longer))
    driven.finish("b")
    for transfer in driven.plan().saves:
        driven.report(transfer)
    driven.check()
    assert driven.hit([*longer, 9]) == len(longer) // BLOCK * BLOCK
    # Chunks and perhaps one tail: nothing is kept twice.
    driven.check(resident=-(-(len(longer) // BLOCK) // (CHUNK // BLOCK)))


@pytest.mark.parametrize("prompt", [[], [7]])
def test_a_prompt_with_nothing_to_find_is_answered_at_once(by_hand: Any, prompt: list[int]) -> None:
    """No tokens, as of a request that brings embeddings only (vllm#53495), and no whole block."""
    driven = by_hand(4)
    driven.store("a", text(3 * CHUNK))
    driven.add("b", prompt)
    assert driven.match("b") == 0
    driven.compute("b", 0, len(prompt))
    assert driven.plan().saves == ()
    assert not driven.finish("b"), "the engine would wait for a report that never comes"
    driven.check()


def test_a_prompt_shorter_than_a_block_ends_without_a_report(open_instance: Any) -> None:
    """Where nothing is to be saved nobody may wait for the end of saving (LMCache#2459)."""
    instance = open_instance()
    for length in range(1, BLOCK + 1):
        assert instance.engine.add(text(length), new_tokens=1).hits == []
    instance.engine.run(most_steps=10 * BLOCK)
    instance.settle()
    instance.check_idle()


def test_every_length_up_to_forty_chunks_comes_back_as_it_was(open_instance: Any) -> None:
    """Exact multiples of a chunk, with and without a tail (LMCache#5151): the engine compares every
    byte that it attends to with what its tokens demand."""
    chunks = 40
    engine = EngineSettings(blocks=chunks * CHUNK // BLOCK + 8, step_tokens=200, prefix_cache=False)
    instance = open_instance(InstanceSettings(engine=engine, slots=chunks + 8))
    for count in range(1, chunks + 1):
        for tail in (0, 1, BLOCK + 1):
            prompt = text(count * CHUNK + tail)
            for _ in range(2):
                request = instance.engine.add(prompt)
                instance.engine.run()
                instance.settle()
            assert sum(request.hits) == (len(prompt) - 1) // BLOCK * BLOCK, (count, tail)
    instance.check_idle()


@pytest.mark.parametrize("chunks", [4, 5, 9])
def test_a_prompt_larger_than_the_tier_keeps_its_beginning(by_hand: Any, chunks: int) -> None:
    """What can never fit is refused at once and costs nothing of what fits (LMCache#4209)."""
    driven = by_hand(4)
    prompt = text(chunks * CHUNK + 1)
    for _ in range(3):
        driven.store("a", prompt, load=True)
        assert driven.hit(prompt) == 4 * CHUNK
    driven.check(resident=4)
