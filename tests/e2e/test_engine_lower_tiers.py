"""A real vLLM whose requests wait for a tier below memory, here a third party's that is as slow as the
test wants. In float32, because requests that are served together are computed in other shapes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.demo.prompts import random_tokens
from tests.e2e.checks import assert_at_rest, assert_close, difference, live, whole_blocks
from tests.e2e.conftest import Launch
from tests.e2e.slow_tier import SlowTier
from tests.engines import UNUSED, Engine

CHUNK = 256
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def slow() -> Iterator[SlowTier]:
    with tempfile.TemporaryDirectory(prefix="kvf-") as folder:
        yield SlowTier(Path(folder))


@pytest.fixture(scope="module")
def shared_engine(launch: Launch, slow: SlowTier) -> Iterator[Engine]:
    described = launch(config=slow.config("load_deadline: 2s"), environment=slow.environment, dtype="float32")
    with described as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine) -> Iterator[Engine]:
    """The shared engine with empty caches; at rest afterwards, with its tier in use."""
    shared_engine.clear()
    yield shared_engine
    left = shared_engine.reset()
    assert_at_rest(left)
    assert left["lower_open"] == 1
    assert left["lower_storing"] == left["lower_fetching"] == left["lower_corrupt"] == 0


def store_below(engine: Engine, runtime_dir: Path, *prompts: tuple[int, ...]) -> dict[str, float]:
    """Have these prompts in the lower tier and nowhere else."""
    for prompt in prompts:
        engine.serve(prompt)
    engine.reset()
    live(runtime_dir, "clear", "--tier", "cpu")
    counters = engine.reset()
    assert counters["resident_chunks"] == 0
    return counters


def test_a_hit_below_memory_answers_like_an_own_prefix_hit(
    engine: Engine, slow: SlowTier, runtime_dir: Path
) -> None:
    prompt = random_tokens(1, 5 * CHUNK + 40)
    engine.serve(prompt)
    reference = engine.serve(prompt, UNUSED)
    before = store_below(engine, runtime_dir)
    with slow.seconds_per_chunk(0.02):
        ours = engine.serve(prompt)
    gained = difference(engine.reset(), before)
    assert ours.cached_tokens == reference.cached_tokens == gained["hit_tokens"] == 5 * CHUNK
    assert ours.same_as(reference)
    assert gained["lower_fetched"] == 5
    assert gained["risen_tokens"] == 5 * CHUNK
    # It stays in memory.
    assert engine.serve(prompt).cached_tokens == 5 * CHUNK
    assert difference(engine.reset(), before)["lower_fetched"] == 5


def test_requests_for_one_prefix_share_one_load(engine: Engine, slow: SlowTier, runtime_dir: Path) -> None:
    shared = random_tokens(2, 5 * CHUNK)
    prompts = [shared + random_tokens(10 + index, 100) for index in range(4)]
    alone = [engine.serve(prompt, UNUSED) for prompt in prompts]
    engine.reset()
    before = store_below(engine, runtime_dir, shared + random_tokens(3, 1))
    with slow.seconds_per_chunk(0.05):
        answers = engine.generate(prompts)
    gained = difference(engine.reset(), before)
    assert gained["lower_fetched"] == 5
    assert gained["rises_shared"] >= 1
    for answer, lone in zip(answers, alone, strict=True):
        assert answer.cached_tokens == 5 * CHUNK
        assert_close(answer, lone, TOLERANCE)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_request_that_is_aborted_while_its_chunks_rise_leaves_nothing_behind(
    engine: Engine, slow: SlowTier, runtime_dir: Path, steps: int
) -> None:
    prompt = random_tokens(4 + steps, 8 * CHUNK + 1)
    before = store_below(engine, runtime_dir, prompt)
    with slow.seconds_per_chunk(0.2):
        assert engine.abort([prompt], steps=steps) == 1
        gained = difference(engine.settle(), before)
    assert gained["lower_fetched"] < 8
    assert gained["hit_tokens"] == 0
    assert engine.serve(prompt).cached_tokens == 8 * CHUNK


def test_a_load_that_takes_too_long_is_given_up_and_computed(
    engine: Engine, slow: SlowTier, runtime_dir: Path
) -> None:
    prompt = random_tokens(6, 6 * CHUNK + 1)
    alone = engine.serve(prompt, UNUSED)
    engine.reset()
    before = store_below(engine, runtime_dir, prompt)
    with slow.seconds_per_chunk(1.0):
        answer = engine.serve(prompt)
    assert answer.cached_tokens < 6 * CHUNK
    assert_close(answer, alone, TOLERANCE)
    assert difference(engine.reset(), before)["lower_fetched"] < 6


def test_others_go_on_while_chunks_rise(engine: Engine, slow: SlowTier, runtime_dir: Path) -> None:
    busy, long = random_tokens(7, 100), random_tokens(8, 8 * CHUNK + 1)
    alone = [engine.serve(busy, UNUSED, max_tokens=120), engine.serve(long, UNUSED)]
    engine.reset()
    store_below(engine, runtime_dir, long)
    with slow.seconds_per_chunk(0.1):
        trace = engine.trace([busy, long], max_tokens=[120, 8], after=[0, 5])
    waited = trace.until_first_token(1)
    assert trace.answers[1].cached_tokens == whole_blocks(len(long))
    # From the step in which it came to the one before its first token, most of it waiting.
    assert waited[-1][0] - waited[0][0] >= 8
    for answer, lone in zip(trace.answers, alone, strict=True):
        assert_close(answer, lone, TOLERANCE)
