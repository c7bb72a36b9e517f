"""An engine answers from the memory of another one: everything but the network, which is in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.tests.runtime.sharing_world import CHUNK, World, prompt, serve
from kvferry.testing.fake_instance import wait_until


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(folder, stack)


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_one_engine_computed_another_one_loads(world: World, world_size: int) -> None:
    near = world.open("near", world_size=world_size)
    far = world.open("far", world_size=world_size)
    assert serve(far, prompt(1)) == []
    world.settle(far)
    assert serve(near, prompt(1)) == [4 * CHUNK]
    world.settle(near, far)
    assert near.manager.stats().resident >= 4, "what was read is not kept"


def test_of_a_prompt_of_whole_chunks_all_but_a_block_is_hit(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1, 4 * CHUNK))
    assert serve(near, prompt(1, 4 * CHUNK)) == [4 * CHUNK - 4]
    world.settle(near, far)


def test_what_nobody_has_is_computed(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1))
    assert serve(near, prompt(2)) == []
    world.settle(near, far)


def test_the_rest_of_a_prefix_comes_from_a_peer(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1, 6 * CHUNK + 1))
    serve(near, prompt(1, 2 * CHUNK + 1))
    # Two chunks are in the engine itself; the first tier gets what is behind them, and what it has stays.
    assert serve(near, prompt(1, 6 * CHUNK + 1)) == [4 * CHUNK]
    assert near.manager.stats().resident >= 6
    world.settle(near, far)


def test_a_peer_that_does_not_answer_costs_its_hits_and_no_more(world: World) -> None:
    near = world.open("near", load_deadline=0.3, pause_seconds=0.2)
    far = world.open("far")
    serve(far, prompt(1))
    (far_id,) = (each for each in world.network.members if each.instance == "far")
    world.network.cut.add(far_id)
    assert serve(near, prompt(1)) == []
    world.network.cut.clear()
    world.settle(near, far)


def test_a_peer_that_is_gone_is_a_miss(world: World) -> None:
    near = world.open("near")
    with ExitStack() as stack:
        other = world.beside(stack)
        serve(other.open("far"), prompt(1))
    assert serve(near, prompt(1)) == []
    world.settle(near)


def test_a_peer_that_started_anew_is_met_anew(world: World) -> None:
    near = world.open("near", pause_seconds=0.05)
    with ExitStack() as stack:
        first = world.beside(stack)
        far = first.open("far")
        serve(far, prompt(1))
        assert serve(near, prompt(1)) == [4 * CHUNK]
    again = world.open("far")
    serve(again, prompt(2))
    assert serve(near, prompt(2)) == [4 * CHUNK]
    world.settle(near, again)


def test_requests_for_one_prefix_share_what_is_read(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1))
    requests = [near.engine.add(prompt(1)) for _ in range(5)]
    near.engine.run()
    assert [4 * CHUNK] in [request.hits for request in requests]
    sharing = near.scheduler.sharing
    assert sharing is not None
    assert sharing.counts()["granted"] == 1
    assert sharing.counts()["fetched"] == 4
    world.settle(near, far)


def test_a_request_that_ends_while_it_waits_leaves_nothing(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1))
    request = near.engine.add(prompt(1))
    near.engine.step()
    near.engine.abort(request)
    near.engine.run()
    world.settle(near, far)


def test_an_engine_whose_cache_was_reset_shares_nothing_any_more(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    serve(far, prompt(1))
    # Its weights may be others from here on.
    far.scheduler.clear()
    serve(far, prompt(1))
    serve(far, prompt(2))
    assert serve(near, prompt(1)) == []
    assert serve(near, prompt(2)) == []
    wait_until(lambda: len(world.network.members) == 1, 10.0, "it never left")
    serve(near, prompt(3))
    far.scheduler.clear()
    assert serve(far, prompt(3)) == []
    world.settle(near, far)


def test_both_ways_at_once(world: World) -> None:
    near, far = world.open("near"), world.open("far")
    for number in range(1, 9):
        serve((near, far)[number % 2], prompt(number))
    for number in range(1, 9):
        assert serve((far, near)[number % 2], prompt(number)) == [4 * CHUNK]
    world.settle(near, far)


def test_a_holder_that_evicts_meanwhile_costs_hits_and_never_bytes(world: World) -> None:
    near, far = world.open("near", slots=32), world.open("far", slots=8)
    for number in range(1, 20):
        serve(far, prompt(number))
        serve(near, prompt(max(1, number - number % 3)))
    world.settle(near, far)


@pytest.mark.parametrize("delay", [False, True])
def test_a_prefix_comes_from_the_first_tier_a_lower_one_and_a_peer(world: World, delay: bool) -> None:
    near, far = world.open("near", slots=8, shelf={}, delay=delay), world.open("far")
    serve(near, prompt(1, 2 * CHUNK + 1))
    for number in range(2, 6):  # the first tier has room for other prompts only
        serve(near, prompt(number))
    serve(far, prompt(1, 5 * CHUNK + 1))
    near.engine.forget_prefixes()
    assert serve(near, prompt(1, 5 * CHUNK + 1)) == [5 * CHUNK]
    world.settle(near, far)
    statistics = near.scheduler.lower_statistics()
    assert statistics is not None
    assert statistics.risen_tokens == 2 * CHUNK
    sharing = near.scheduler.sharing_statistics()
    assert sharing is not None
    assert sharing.borrowed_tokens == 3 * CHUNK


def test_what_lies_in_a_lower_tier_alone_is_not_offered(world: World) -> None:
    near, far = world.open("near"), world.open("far", slots=20, shelf={})
    for number in range(1, 8):
        serve(far, prompt(number))
    assert serve(near, prompt(1)) == []
    assert serve(near, prompt(7)) == [4 * CHUNK]
    far.engine.forget_prefixes()
    assert serve(far, prompt(1)) == [4 * CHUNK], "it is there, in the lower tier"
    assert serve(near, prompt(1)) == [], "near has computed it, and the engine keeps it"
    world.settle(near, far)
