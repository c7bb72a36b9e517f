"""An engine answers from the memory of another one: everything but the network, which is in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import PeerId
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    SharingFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.memory_carrier import MemoryCarrier, PeerNetwork
from kvferry.testing.memory_channel import MemoryNetwork, make_memory_channels

CHUNK = 16
OpenPeer = Callable[..., FakeInstance]


def prompt(number: int, tokens: int = 4 * CHUNK + 3) -> list[int]:
    return [1000 * number + token for token in range(tokens)]


class World:
    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self.stack = stack
        self.network = PeerNetwork()
        self.channels = MemoryNetwork()

    def open(self, name: str, *, world_size: int = 1, slots: int = 64, **settings: Any) -> FakeInstance:
        sharing = SharingFake(
            id=PeerId(name, os.urandom(16)),
            carrier=MemoryCarrier(self.network),
            make_channel=make_memory_channels(self.channels),
            settings=settings,
        )
        made = InstanceSettings(
            engine=EngineSettings(), world_size=world_size, slots=slots, engine_id=name, sharing=sharing
        )
        instance = self.stack.enter_context(open_fake_instance(self.folder, made))
        wait_until(lambda: sharing.id in self.network.members, 10.0, f"{name} never shared anything")
        return instance

    def settle(self, *instances: FakeInstance) -> None:
        for instance in instances:
            instance.settle_lower()
            sharing = instance.scheduler.sharing
            assert sharing is not None
            wait_until(lambda sharing=sharing: sharing.serving.leases == 0, 10.0, "leases of peers")  # type: ignore[misc]
            instance.check_idle()


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    with ExitStack() as stack:
        yield World(folder, stack)


def serve(instance: FakeInstance, tokens: list[int]) -> list[int]:
    """What the request hit, load by load. The engine compares every byte that it reads."""
    request = instance.engine.add(tokens)
    instance.engine.run()
    instance.settle_lower()
    return request.hits


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_one_engine_computed_another_one_loads(world: World, world_size: int) -> None:
    near = world.open("near", world_size=world_size)
    far = world.open("far", world_size=world_size)
    assert serve(far, prompt(1)) == []
    world.settle(far)
    assert serve(near, prompt(1)) == [4 * CHUNK]
    world.settle(near, far)
    assert near.manager.stats().resident >= 4, "what was read is not kept"


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
        other = World(world.folder, stack)
        other.network, other.channels = world.network, world.channels
        serve(other.open("far"), prompt(1))
    assert serve(near, prompt(1)) == []
    world.settle(near)


def test_a_peer_that_started_anew_is_met_anew(world: World) -> None:
    near = world.open("near", pause_seconds=0.05)
    with ExitStack() as stack:
        first = World(world.folder, stack)
        first.network, first.channels = world.network, world.channels
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
