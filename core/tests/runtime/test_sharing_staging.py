"""An engine answers from the staging of another one, which lends what fits into it, and for no longer than it
must."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from core.tests.runtime.sharing_world import CHUNK, World, prompt, serve
from kvferry.api import PeerDesk, PeerId
from kvferry.control.serving import ServingSettings
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    SharingFake,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.memory_carrier import MemoryCarrier
from kvferry.testing.memory_channel import make_memory_channels
from kvferry.testing.memory_staging import MemoryStaging, MemoryStagingOptions
from kvferry.testing.sharing import ForwardingPeerDesk, ForwardingPeerHost

LONG = 20.0


@define(eq=False)
class Gate:
    """Copies wait for it."""

    opened: threading.Event = field(factory=threading.Event)
    reached: threading.Event = field(factory=threading.Event)

    def pass_through(self) -> None:
        self.reached.set()
        assert self.opened.wait(LONG), "nobody opened the gate"


class Deaf(ForwardingPeerHost):
    """Never hears that a peer is done."""

    @property
    def desk(self) -> PeerDesk:
        class Desk(ForwardingPeerDesk):
            def done(self, peer: PeerId, number: int) -> None:
                pass

        return Desk(super().desk)


class StagingWorld(World):
    """Instances with a staging, where they are given one."""

    def open(
        self,
        name: str,
        *,
        staging_slots: int | None = None,
        before_piece: Callable[[], object] = lambda: None,
        serving: Mapping[str, Any] | None = None,
        world_size: int = 1,
        slots: int = 64,
        **settings: Any,
    ) -> FakeInstance:
        options = MemoryStagingOptions(before_piece=before_piece)

        def make_staging(size: int) -> MemoryStaging:
            return MemoryStaging(options, max(size, 4096))

        sharing = SharingFake(
            id=PeerId(name, os.urandom(16)),
            carrier=MemoryCarrier(self.network),
            make_channel=make_memory_channels(self.channels),
            settings=settings,
            serving=ServingSettings(staging_slots=staging_slots, **(serving or {})),
            make_staging=None if staging_slots is None else make_staging,
        )
        made = InstanceSettings(
            engine=EngineSettings(),
            world_size=world_size,
            slots=slots,
            engine_id=name,
            sharing=sharing,
            verify=True,
        )
        instance = self.stack.enter_context(open_fake_instance(self.folder, made))
        wait_until(lambda: sharing.id in self.network.members, LONG, f"{name} never shared anything")
        return instance

    def settle(self, *instances: FakeInstance) -> None:
        super().settle(*instances)
        for instance in instances:
            sharing = instance.scheduler.sharing
            assert sharing is not None
            assert sharing.serving.copies == 0
            sharing.serving.check()


@pytest.fixture
def world(folder: Path) -> Iterator[StagingWorld]:
    with ExitStack() as stack:
        yield StagingWorld(folder, stack)


@pytest.fixture
def gate(world: StagingWorld) -> Gate:
    """Open at the end of the test."""
    gate = Gate()
    del world  # closed after this, or it would wait for the copies
    return gate


def counts(instance: FakeInstance) -> dict[str, int]:
    assert instance.scheduler.sharing is not None
    return dict(instance.scheduler.sharing.serving.counts)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("delay", [False, True], ids=["eager", "delayed"])
@pytest.mark.parametrize("staging_slots", [None, 8], ids=["the holder has one", "both have one"])
def test_what_one_engine_computed_another_one_loads(
    world: StagingWorld, world_size: int, delay: bool, staging_slots: int | None
) -> None:
    near = world.open("near", world_size=world_size, staging_slots=staging_slots, delay=delay)
    far = world.open("far", world_size=world_size, staging_slots=8)
    for number in (1, 2, 3):  # slots are used again
        serve(far, prompt(number))
    for number in (1, 2, 3):
        assert serve(near, prompt(number)) == [4 * CHUNK]
    world.settle(near, far)
    assert counts(far)["staged"] == counts(far)["chunks"] == 12


def test_as_much_comes_at_once_as_fits_and_the_rest_when_that_is_read(world: StagingWorld) -> None:
    near, far = world.open("near"), world.open("far", staging_slots=3)
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == [4 * CHUNK]
    assert (counts(far)["granted"], counts(far)["chunks"]) == (2, 4)
    world.settle(near, far)


def test_without_room_it_is_computed_and_nobody_waits(world: StagingWorld) -> None:
    near, far = world.open("near"), world.open("far", staging_slots=0)
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == []
    assert set(counts(far)) == {"busy"}
    world.settle(near, far)


def test_the_first_tier_may_evict_what_is_copied(world: StagingWorld) -> None:
    near, far = world.open("near"), world.open("far", slots=8, staging_slots=4)
    for number in range(1, 15):
        serve(far, prompt(number))
        serve(near, prompt(max(1, number - number % 3)))
    world.settle(near, far)


def test_both_ways_at_once(world: StagingWorld) -> None:
    near, far = world.open("near", staging_slots=8), world.open("far", staging_slots=8)
    for number in range(1, 9):
        serve((near, far)[number % 2], prompt(number))
    for number in range(1, 9):
        assert serve((far, near)[number % 2], prompt(number)) == [4 * CHUNK]
    world.settle(near, far)


def test_slots_that_are_written_still_are_lent_to_nobody(world: StagingWorld, gate: Gate) -> None:
    near = world.open("near", load_deadline=0.5)
    far = world.open("far", staging_slots=4, before_piece=gate.pass_through)
    world.stack.callback(gate.opened.set)
    assert far.scheduler.sharing is not None
    serving = far.scheduler.sharing.serving
    serve(far, prompt(1))
    serve(far, prompt(2))
    request = near.engine.add(prompt(1))
    near.engine.step()
    assert gate.reached.wait(LONG)
    near.engine.abort(request)
    near.engine.run()
    wait_until(lambda: counts(far).get("done") == 1, LONG, "a peer that never said that it is done")
    assert (serving.copies, serving.leases) == (1, 0)
    assert serve(near, prompt(2)) == []
    assert counts(far)["busy"] >= 1
    gate.opened.set()
    world.settle(near, far)
    assert "granted" not in counts(far)
    near.manager.clear()
    assert serve(near, prompt(1)) == [4 * CHUNK]
    world.settle(near, far)


def test_a_copy_that_takes_too_long_lends_what_it_has(world: StagingWorld, gate: Gate) -> None:
    near = world.open("near")
    far = world.open(
        "far", staging_slots=8, before_piece=gate.pass_through, serving={"staging_seconds": 0.05}
    )
    world.stack.callback(gate.opened.set)
    serve(far, prompt(1))

    def open_late() -> None:
        gate.reached.wait(LONG)
        time.sleep(0.2)  # beyond the deadline
        gate.opened.set()

    timer = threading.Thread(target=open_late)
    timer.start()
    # The first chunk had begun by the deadline. The others are copied once it is there.
    assert serve(near, prompt(1)) == [4 * CHUNK]
    timer.join()
    assert (counts(far)["staged"], counts(far)["not staged"], counts(far)["granted"]) == (4, 3, 2)
    world.settle(near, far)


def test_a_lease_ends_by_its_time_and_the_slots_are_lent_again(world: StagingWorld) -> None:
    near = world.open("near", guard_seconds=0.1)
    far = world.open("far", staging_slots=4, serving={"lease_seconds": 1.0})
    (member,) = (each for each in world.network.members.values() if each.card.id.instance == "far")
    member.host = Deaf(member.host)
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == [4 * CHUNK]
    assert counts(far)["granted"] == 1
    serve(far, prompt(2))
    # It is read once the slots are free again, which nobody says.
    assert serve(near, prompt(2)) == []
    wait_until(lambda: counts(far).get("expired") == 1, LONG, "a lease that never ended")
    serve(far, prompt(3))
    assert serve(near, prompt(3)) == [4 * CHUNK]
    world.settle(near, far)


def test_an_engine_whose_cache_was_reset_lends_nothing_any_more(world: StagingWorld) -> None:
    near, far = world.open("near"), world.open("far", staging_slots=8)
    serve(far, prompt(1))
    far.scheduler.clear()
    serve(far, prompt(1))
    assert serve(near, prompt(1)) == []
    world.settle(near, far)
