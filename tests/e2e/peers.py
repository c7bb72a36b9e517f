"""Two engines of which one answers out of the other's memory."""

from __future__ import annotations

import time
from contextlib import ExitStack

from attrs import frozen

from tests.controllers import keys_told
from tests.demo_p2p.modes import Way, config
from tests.e2e.checks import assert_at_rest, difference, whole_blocks
from tests.e2e.conftest import Launch
from tests.engines import UNUSED, Engine

CHUNK = 256
PATIENCE = 30.0


@frozen
class Party:
    """An engine and its instance's name."""

    name: str
    engine: Engine


@frozen
class Pair:
    """``near`` reads from ``far`` in this way; what ``far`` reads from ``near`` it reads eagerly. ``url`` is
    the controller's."""

    way: Way
    url: str
    near: Party
    far: Party


def open_pair(stack: ExitStack, launch: Launch, way: Way, url: str, **more: object) -> Pair:
    """Both engines, started together and open until ``stack`` ends. ``more`` is for :data:`Launch`."""

    def described(name: str, *, lends: bool) -> Party:
        settings = {**config(way, url, name=name, lends=lends), "verify": True}
        return Party(name, launch(config=settings, **more))

    pair = Pair(way, url, described("near", lends=False), described("far", lends=True))
    for party in (pair.near, pair.far):
        stack.callback(party.engine.close)
        party.engine.start()
    for party in (pair.near, pair.far):
        party.engine.wait_ready()
    return pair


def served_by_the_other(
    url: str, near: Party, far: Party, prompt: tuple[int, ...]
) -> tuple[dict[str, float], dict[str, float]]:
    """``far`` computes a prompt; ``near`` answers as ``far`` does out of its own prefix cache. What was added
    to the counters of both for it."""
    deadline = time.monotonic() + PATIENCE
    while near.name not in keys_told(url) or not near.engine.settle()["sharing_open"]:
        assert time.monotonic() < deadline, f"{near.name} shares nothing"
    expected = keys_told(url).get(far.name, 0) + len(prompt) // CHUNK
    far.engine.serve(prompt)
    reference = far.engine.serve(prompt, UNUSED)
    lender = far.engine.settle()
    while keys_told(url).get(far.name, 0) < expected:
        assert time.monotonic() < deadline, "the directory was never told"
    borrower = near.engine.settle()
    answer = near.engine.serve(prompt)
    borrowed = difference(near.engine.settle(), borrower)
    assert borrowed["hit_tokens"] == whole_blocks(len(prompt)) == reference.cached_tokens
    assert answer.same_as(reference)
    while (counters := far.engine.settle())["lend_leases"]:
        assert time.monotonic() < deadline, "what was lent never came back"
    for party in (near, far):
        assert_at_rest(party.engine.settle())
    return borrowed, difference(counters, lender)
