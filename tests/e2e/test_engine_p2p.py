"""Two real vLLM and a controller: one answers from the memory of the other, bit for bit as from its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from attrs import define

from tests.controllers import keys_told, running_controller
from tests.demo.prompts import random_tokens
from tests.e2e.checks import assert_at_rest, whole_blocks
from tests.e2e.conftest import Launch
from tests.engines import UNUSED, Engine

CHUNK = 256
PATIENCE = 20.0


@define
class Pair:
    url: str
    near: Engine
    far: Engine

    def told(self, name: str) -> int:
        return keys_told(self.url).get(name, 0)


@pytest.fixture(scope="module")
def engines(launch: Launch) -> Iterator[Pair]:
    with running_controller() as url, ExitStack() as stack:

        def described(name: str) -> Engine:
            more = (
                f"instance: {name}\n"
                "channel: {use: tcp}\n"
                f"lookup: {{use: controller, url: '{url}'}}\n"
                "p2p: {use: p2p}\n"
            )
            plugins = ["transport_tcp", "sharing_p2p"]
            return launch(config={"plugins": plugins, "more": more, "verify": True})

        near, far = described("near"), described("far")
        stack.callback(near.close)
        stack.callback(far.close)
        near.start()
        far.start()
        near.wait_ready()
        far.wait_ready()
        yield Pair(url, near, far)


def served_by_the_other(near: Engine, far: Engine, prompt: tuple[int, ...], told: Callable[[], int]) -> None:
    """``far`` computes a prompt; ``near`` answers as ``far`` does out of its own prefix cache. ``told`` is
    how many keys the directory has of ``far``."""
    expected = told() + len(prompt) // CHUNK
    far.serve(prompt)
    reference = far.serve(prompt, UNUSED)
    far.settle()
    deadline = time.monotonic() + PATIENCE
    while told() < expected:
        assert time.monotonic() < deadline, "the directory was never told"
    before = near.settle()
    answer = near.serve(prompt)
    hit = near.settle()["hit_tokens"] - before["hit_tokens"]
    assert hit == whole_blocks(len(prompt) - 1) == reference.cached_tokens
    assert answer.same_as(reference)
    for engine in (near, far):
        assert_at_rest(engine.settle())


def test_an_engine_answers_from_the_memory_of_another(engines: Pair) -> None:
    prompt = random_tokens(11, 5 * CHUNK + 40)
    served_by_the_other(engines.near, engines.far, prompt, lambda: engines.told("far"))


def test_and_the_other_way_round(engines: Pair) -> None:
    prompt = random_tokens(12, 9 * CHUNK + 130)
    served_by_the_other(engines.far, engines.near, prompt, lambda: engines.told("near"))
