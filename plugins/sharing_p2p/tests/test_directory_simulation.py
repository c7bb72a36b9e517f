"""Whatever the network and the processes do, the directory ends up with what the publishers have."""

from __future__ import annotations

from collections import Counter

import pytest

from kvferry_sharing_p2p.directory.answers import SyncState
from kvferry_sharing_p2p.directory.publisher import PublisherState
from plugins.sharing_p2p.tests.directory_world import (
    CALM,
    CHAINS,
    DIGESTS,
    NAMESPACES,
    Process,
    Weather,
    World,
)

SEEDS = range(30)
INSTANCES = ("a", "b", "c", "d")
SILENCE = Weather(lost=1.0)
STORM = Weather(lost=0.15, doubled=0.15, seconds=0.6)


def check_answers(world: World) -> None:
    """Whoever is named has had the keys it is named for, in this very life, and is what an honest reader of
    the directory's own sets would name."""
    known = world.known()
    for each in world.directory.status(world.now).instances:
        assert known[each.instance] <= world.lives[bytes.fromhex(each.epoch)].ever
    for namespace in NAMESPACES:
        chain = world.chance.choice(CHAINS)
        asker = world.chance.choice(INSTANCES)
        found = world.find(chain, asker, namespace, limit=3)
        for holder in found.holders:
            life = world.lives[holder.epoch]
            assert holder.instance == life.identity.instance != asker
            assert (holder.address, holder.ranks) == (life.identity.address, life.identity.ranks)
            assert life.identity.namespace == namespace
            assert set(chain[: holder.chunks]) <= life.ever
        lengths = sorted(
            (
                next((at for at, digest in enumerate(chain) if digest not in keys), len(chain))
                for instance, keys in known.items()
                if instance != asker and instance in members_of(world, namespace)
            ),
            reverse=True,
        )
        assert [holder.chunks for holder in found.holders] == [length for length in lengths if length][:3]


def members_of(world: World, namespace: bytes) -> set[str]:
    status = world.directory.status(world.now)
    return {each.instance for each in status.instances if each.namespace == namespace.hex()}


def happen(world: World) -> None:
    """One thing out of many."""
    chance = world.chance
    alive = list(world.processes.values())
    roll = chance.random()
    if roll < 0.55 and alive:
        process = chance.choice(alive)
        chain = chance.choice(CHAINS)
        stored = chain[: chance.randrange(len(chain) + 1)] if chance.random() < 0.6 else []
        kept = chance.randrange(len(chain) + 1)
        world.change(process, stored, chain[kept:] if chance.random() < 0.5 else [])
    elif roll < 0.85 and alive:
        # A log is often read late, and only in part.
        world.read_log(chance.choice(alive), chance.choice([1, 3, None]))
    elif roll < 0.88 and alive:
        process = chance.choice(alive)
        process.cut = not process.cut
    elif roll < 0.90 and alive:
        process = chance.choice(alive)
        (world.leave if chance.random() < 0.3 else world.kill)(process)
    elif roll < 0.93:
        # Another of the same name may be there.
        world.start(chance.choice(INSTANCES), chance.choice(NAMESPACES))
    elif roll < 0.94:
        world.restart_directory()
    elif roll < 0.96 and alive:
        chance.choice(alive).publisher.changes_lost()
    elif roll < 0.98 and alive:
        chance.choice(alive).publisher.reconnected(world.now)
    else:
        world.weather = chance.choice([CALM, STORM, Weather(lost=0.5), Weather(seconds=2.0), SILENCE])


def heal(world: World) -> dict[str, Process]:
    """Everything works again, each name is there once, and time passes."""
    by_name: dict[str, Process] = {}
    for process in list(world.processes.values()):
        process.cut = False
        if process.identity.instance in by_name:
            world.kill(process)
        else:
            by_name[process.identity.instance] = process
    world.weather = CALM
    world.run(25.0)
    return by_name


def storm(seed: int) -> World:
    """A world in which a lot has happened."""
    world = World(seed)
    for name in INSTANCES:
        world.start(name, world.chance.choice(NAMESPACES))
    for number in range(400):
        happen(world)
        world.advance(world.chance.choice([0.0, 0.01, 0.1, 0.3]))
        check_answers(world)
        if number % 20 == 0:
            world.directory.status(world.now)
            world.directory.audit()
    return world


@pytest.mark.parametrize("seed", SEEDS)
def test_after_the_network_has_healed_the_directory_has_exactly_what_the_publishers_have(seed: int) -> None:
    world = storm(seed)
    alive = heal(world)

    assert world.known() == {name: process.manager.served() for name, process in alive.items()}
    assert all(
        process.publisher.status(world.now).state is PublisherState.CURRENT for process in alive.values()
    )
    status = world.directory.status(world.now)
    assert all(each.sync is SyncState.CURRENT and not each.lag for each in status.instances)
    assert all(not each.incoming_keys for each in status.instances)
    per_namespace = {
        namespace: {
            key
            for process in alive.values()
            if process.identity.namespace == namespace
            for key in process.manager.served()
        }
        for namespace in NAMESPACES
    }
    assert status.keys == sum(len(keys) for keys in per_namespace.values())
    for namespace in NAMESPACES:
        assert world.find(DIGESTS[:1], "nobody", namespace).settled
    world.directory.audit()


def test_a_directory_that_knows_all_hears_heartbeats_alone() -> None:
    world = World(1)
    process = world.start("a")
    world.change(process, DIGESTS)
    world.run(10.0)
    before = world.directory.status(world.now).totals
    world.run(20.0)
    after = world.directory.status(world.now)
    assert after.totals == before
    assert after.instances[0].keys == len(DIGESTS)


@pytest.mark.parametrize("seed", range(8))
def test_keys_are_served_all_the_time_while_they_are_told_anew(seed: int) -> None:
    """Nothing that stays where it is goes missing in between, and changes meanwhile are seen."""
    world = World(seed)
    process = world.start("a")
    world.change(process, DIGESTS)
    world.run(5.0)
    world.weather = Weather(lost=0.1, doubled=0.1, seconds=0.3)
    stays = CHAINS[0]
    process.publisher.changes_lost()
    resyncs = process.publisher.status(world.now).resyncs
    for _ in range(100):
        digest = world.chance.choice(DIGESTS[len(stays) :])
        stored = world.chance.random() < 0.5
        world.change(process, [digest] if stored else [], [] if stored else [digest])
        world.read_log(process)
        world.advance(0.05)
        (holder,) = world.find(stays, "b", NAMESPACES[0]).holders
        assert holder.chunks == len(stays)
    world.weather = CALM
    world.run(5.0)
    assert process.publisher.status(world.now).resyncs > resyncs
    assert world.known() == {"a": process.manager.served()}


def test_a_backlog_that_grew_too_long_is_made_good_by_telling_everything_once() -> None:
    world = World(3)
    process = world.start("a")
    world.run(5.0)
    process.cut = True
    for digest in DIGESTS * 3:
        world.change(process, [digest])
        world.change(process, [], [digest])
        world.change(process, [digest])
        world.run(0.05)
    status = process.publisher.status(world.now)
    assert status.overflows == 1
    assert status.gathered_keys == 0
    assert status.unacknowledged == 0
    process.cut = False
    world.run(5.0)
    assert world.known() == {"a": set(DIGESTS)}
    assert process.publisher.status(world.now).resyncs == 2


def test_a_lost_batch_is_sent_again_and_not_everything() -> None:
    world = World(4)
    process = world.start("a")
    world.change(process, DIGESTS[:10])
    world.run(5.0)
    process.cut = True
    world.change(process, DIGESTS[10:20])
    world.run(0.5)
    process.cut = False
    world.run(3.0)
    assert world.known() == {"a": set(DIGESTS[:20])}
    assert process.publisher.status(world.now).resyncs == 1


def test_a_directory_that_starts_again_is_told_everything() -> None:
    world = World(5)
    processes = [world.start(name) for name in "abc"]
    for process, chain in zip(processes, CHAINS, strict=False):
        world.change(process, chain)
    world.run(3.0)
    world.restart_directory()
    assert world.find(CHAINS[0], "z", NAMESPACES[0]).settled is False
    world.run(3.0)
    assert world.known() == {"a": set(CHAINS[0]), "b": set(CHAINS[1]), "c": set(CHAINS[2])}
    world.run(3.0)
    assert world.find(CHAINS[0], "z", NAMESPACES[0]).settled is True


def test_of_two_with_one_name_the_living_one_stays_until_it_is_silent() -> None:
    world = World(6)
    first = world.start("a")
    world.change(first, CHAINS[0])
    world.run(2.0)
    second = world.start("a")
    world.change(second, CHAINS[1])
    world.run(10.0)
    assert world.known() == {"a": set(CHAINS[0])}
    refused = second.publisher.status(world.now)
    assert refused.state is PublisherState.REFUSED
    assert "'a'" in refused.refusal
    world.kill(first)
    world.run(10.0)
    assert world.known() == {"a": set(CHAINS[1])}
    assert second.publisher.status(world.now).refusal == ""
    (holder,) = world.find(CHAINS[1], "b", NAMESPACES[0]).holders
    assert holder.epoch == second.identity.epoch


def test_the_storms_have_everything_in_them() -> None:
    """The seeds above would prove little if nothing went wrong in them."""
    seen: Counter[str] = Counter()
    for seed in range(100, 105):
        world = storm(seed)
        world.note_totals()
        for process in list(world.processes.values()):
            world.kill(process)
        seen += world.seen
    for name in (
        "gaps",
        "duplicates",
        "expired_keys",
        "resyncs",
        "abandoned_resyncs",
        "refused",
        "overflows",
    ):
        assert seen[name] > 2, f"{name} happened {seen[name]} times"
    assert seen["hits"] > 200
