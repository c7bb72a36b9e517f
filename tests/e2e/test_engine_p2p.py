"""Two real vLLM and a controller: one answers from the memory of the other, bit for bit as from its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.controllers import running_controller
from tests.demo.prompts import random_tokens
from tests.demo_p2p.modes import DELAYED, EAGER, STAGED, Way
from tests.e2e.checks import difference, live, whole_blocks
from tests.e2e.conftest import Launch
from tests.e2e.peers import CHUNK, Pair, open_pair, served_by_the_other

WAYS = (Way(mode=EAGER, channel="tcp"), Way(mode=DELAYED, channel="local"), Way(mode=STAGED, channel="tcp"))


@pytest.fixture(scope="module", params=WAYS, ids=str)
def pair(request: pytest.FixtureRequest, launch: Launch) -> Iterator[Pair]:
    with running_controller() as url, ExitStack() as stack:
        yield open_pair(stack, launch, request.param, url)


def test_an_engine_answers_from_the_memory_of_another(pair: Pair, runtime_dir: Path) -> None:
    prompt = random_tokens(11, 5 * CHUNK + 140)
    near, far = pair.near, pair.far
    borrowed, lent = served_by_the_other(pair.url, near, far, prompt)
    tokens = whole_blocks(len(prompt))
    chunks = math.ceil(tokens / CHUNK)
    assert borrowed["borrowed_tokens"] == tokens
    assert (borrowed["borrow_granted"], borrowed["borrow_fetched"]) == (1, chunks)
    assert borrowed["risen_tokens"] == borrowed["borrow_failed"] == 0
    assert borrowed["borrowed_seconds"] > 0
    status = live(runtime_dir, "status", near.name)
    slot = status["slot_bytes"]
    assert tokens * slot // CHUNK <= borrowed["borrowed_bytes"] <= chunks * slot
    assert (lent["lend_granted"], lent["lend_chunks"], lent["lend_done"]) == (1, chunks, 1)
    assert lent["lend_staged"] == (chunks if pair.way.mode is STAGED else 0)
    assert far.engine.settle()["lend_slots"] == 0
    (peer,) = status["sharing"]["peers"]
    assert (peer["peer"], peer["standing"], peer["reason"]) == (far.name, "agreed", "")
    assert status["sharing"]["borrowed"]["tokens"] == near.engine.settle()["borrowed_tokens"]


def test_and_the_other_way_round(pair: Pair) -> None:
    prompt = random_tokens(12, 9 * CHUNK + 130)
    borrowed, lent = served_by_the_other(pair.url, pair.far, pair.near, prompt)
    assert borrowed["borrowed_tokens"] == whole_blocks(len(prompt))
    assert (lent["lend_granted"], lent["lend_done"]) == (1, 1)


def test_what_was_read_is_kept_and_found_here_the_next_time(pair: Pair) -> None:
    prompt = random_tokens(13, 3 * CHUNK + 1)
    served_by_the_other(pair.url, pair.near, pair.far, prompt)
    before = pair.near.engine.reset()
    pair.near.engine.serve(prompt)
    again = difference(pair.near.engine.settle(), before)
    assert again["hit_tokens"] == 3 * CHUNK
    assert again["borrowed_tokens"] == again["borrow_quests"] == 0
