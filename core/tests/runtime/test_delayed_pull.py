"""Chunks of a peer go into the engine's blocks while they are read, through two buffers in turns."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from core.tests.runtime.sharing_world import CHUNK, World, prompt, serve
from kvferry.testing.faults import Delay, Drop, Effect, Fail, Fault, Stall


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(folder, stack)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("chunks", [1, 2, 4, 7])
def test_the_engines_blocks_are_filled_out_of_a_peer(world: World, world_size: int, chunks: int) -> None:
    near = world.open("near", delay=True, world_size=world_size)
    far = world.open("far", delay=True, world_size=world_size)
    tokens = prompt(1, chunks * CHUNK + 3)
    assert serve(far, tokens) == []
    assert serve(near, tokens) == [chunks * CHUNK]
    world.settle(near, far)
    statistics = near.workers[0].statistics()
    assert statistics.verified_blocks > 0
    assert statistics.mismatched_blocks == 0
    assert near.manager.stats().resident >= chunks, "what was read is not kept"
    assert serve(near, tokens + prompt(2)) == [], "the engine has it, and the tier what is behind it"
    world.settle(near, far)


def test_without_keep_the_first_tier_gets_only_what_was_computed(world: World) -> None:
    near, far = world.open("near", delay=True, keep=False), world.open("far", delay=True)
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == [4 * CHUNK]
    world.settle(near, far)
    assert near.manager.stats().resident == 0
    near.engine.forget_prefixes()
    assert serve(near, prompt(1)) == [4 * CHUNK], "it comes from the peer again"
    world.settle(near, far)


def test_the_beginning_comes_from_here_and_the_rest_from_a_peer(world: World) -> None:
    near, far = world.open("near", delay=True), world.open("far", delay=True)
    serve(near, prompt(1, 2 * CHUNK + 5))
    serve(far, prompt(1, 6 * CHUNK + 1))
    near.engine.forget_prefixes()
    assert serve(near, prompt(1, 6 * CHUNK + 1)) == [6 * CHUNK]
    sharing = near.scheduler.sharing
    assert sharing is not None
    assert sharing.counts()["fetched"] == 4
    world.settle(near, far)


def test_a_hit_ends_within_a_chunk(world: World) -> None:
    near, far = world.open("near", delay=True), world.open("far", delay=True)
    serve(far, prompt(1, 4 * CHUNK))
    assert serve(near, prompt(1, 3 * CHUNK + 9)) == [3 * CHUNK + 8]
    world.settle(near, far)


def test_of_a_prompt_of_whole_chunks_all_but_a_block_is_hit(world: World) -> None:
    near, far = world.open("near", delay=True), world.open("far", delay=True)
    serve(far, prompt(1, 4 * CHUNK))
    assert serve(near, prompt(1, 4 * CHUNK)) == [4 * CHUNK - 4]
    world.settle(near, far)


def test_requests_for_one_prefix_borrow_each_for_itself(world: World) -> None:
    near, far = world.open("near", delay=True), world.open("far", delay=True)
    serve(far, prompt(1))
    requests = [near.engine.add(prompt(1)) for _ in range(5)]
    near.engine.run()
    assert [4 * CHUNK] in [request.hits for request in requests]
    world.settle(near, far)


@pytest.mark.parametrize("steps", range(6))
def test_a_request_that_ends_at_any_step_leaves_nothing(world: World, steps: int) -> None:
    near, far = world.open("near", delay=True), world.open("far", delay=True)
    serve(far, prompt(1))
    request = near.engine.add(prompt(1))
    for _ in range(steps):
        near.engine.step()
    near.engine.abort(request)
    near.engine.run()
    world.settle(near, far)


def test_a_peer_that_is_gone_is_a_miss(world: World) -> None:
    near = world.open("near", delay=True)
    with ExitStack() as stack:
        other = world.beside(stack)
        serve(other.open("far", delay=True), prompt(1))
    assert serve(near, prompt(1)) == []
    world.settle(near)


def test_a_peer_that_does_not_answer_costs_its_hits_and_no_more(world: World) -> None:
    near = world.open("near", delay=True, load_deadline=0.3, pause_seconds=0.2)
    far = world.open("far", delay=True)
    serve(far, prompt(1))
    (far_id,) = (each for each in world.network.members if each.instance == "far")
    world.network.cut.add(far_id)
    assert serve(near, prompt(1)) == []
    world.network.cut.clear()
    world.settle(near, far)


def test_a_holder_that_evicts_meanwhile_costs_hits_and_never_bytes(world: World) -> None:
    near, far = (
        world.open("near", delay=True, slots=32, buffer_slots=2),
        world.open("far", delay=True, slots=8),
    )
    for number in range(1, 20):
        serve(far, prompt(number))
        serve(near, prompt(max(1, number - number % 3)))
    world.settle(near, far)


@pytest.mark.parametrize("effect", [Fail(), Drop(), Stall(), Delay(0.05)], ids=repr)
def test_what_cannot_be_read_is_computed(world: World, effect: Effect) -> None:
    """The engine looks at every byte that it computes with."""
    faults = [Fault("read", effect, nth) for nth in (2, 3, 7)]
    near = world.open("near", delay=True, keep=False, faults=faults, load_deadline=0.4, pause_seconds=0.01)
    far = world.open("far")
    for number in range(1, 6):
        serve(far, prompt(number))
    for number in range(1, 6):
        serve(near, prompt(number))
    statistics, _ = near.scheduler.statistics()
    assert statistics.loaded_tokens > 0
    sharing = near.scheduler.sharing_statistics()
    assert sharing is not None
    if isinstance(effect, Fail | Drop | Stall):
        assert statistics.failed_loads > 0
        assert sharing.borrowed["failed"] > 0
    world.settle(near, far)
