"""Instances that read from each other, under faults: right bytes, inside of leases; all counts return."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from tests.simulation.events import require
from tests.simulation.fleet import DIRECTORY, Fleet, FleetSettings
from tests.simulation.fleet_life import LEASE, LOAD, LONGEST, Life, Request
from tests.simulation.fleet_mutants import FLEET_MUTANTS, PROGRAM
from tests.simulation.fleet_parts import CHUNK, key
from tests.simulation.fleet_runs import EVENTS_PER_SEED, run_fleet
from tests.simulation.mutants import PACKAGE, Mutant, judge_all
from tests.simulation.runs import Report, run_seed

LONG = os.environ.get("KVFERRY_TEST_LONG") == "1"
EVENTS = 600_000 if LONG else 24_000
SEEDS = range(40) if LONG else range(2)
QUICK = (
    "a peer is told that all is read while something is read",
    "one rank's read stands for all",
    "what could not be read is found",
)
SEEN = (
    "find: somebody",
    "find: nobody",
    "find: deadline",
    "request: hit",
    "request: missed",
    "request: aborted",
    "cancelled under way",
    "read",
    "read: cancelled",
    "read: timeout",
    "parted",
    "stopped",
    "twin",
    "granted",
    "fetched",
    "failed",
    "late",
    "refused",
    "paused",
    "lent: done",
    "lent: expired",
    "lent: renewed",
    "lent: ended",
    "lent: nothing",
    "lost message",
    "late message",
    "doubled message",
    "reordered message",
    "slow read",
    "kill",
    "leave",
    "directory",
    "cut",
)


def test_nothing_goes_wrong_between_instances() -> None:
    told = run_fleet(1, EVENTS)
    print(told.text())
    assert told.report.failure is None, str(told.report.failure)
    happened = told.seen + told.counts + told.report.faults
    assert [name for name in SEEN if not happened[name]] == []


@pytest.mark.parametrize("seed", [4, 7])
def test_nothing_goes_wrong_where_requests_read_into_their_blocks(seed: int) -> None:
    assert FleetSettings.of(seed).delay
    told = run_fleet(seed, EVENTS_PER_SEED)
    assert told.report.failure is None, str(told.report.failure)
    assert told.seen["read into blocks"] > 0


def test_the_same_seed_is_the_same_history_of_a_fleet() -> None:
    digests = []
    for seed in (5, 5, 6):
        report = Report()
        run_seed(seed, 1500, report, lambda number, _settings: Fleet(number))
        assert report.failure is None, str(report.failure)
        digests.append(report.digests[seed])
    assert digests[0] == digests[1] != digests[2]


def test_mistakes_in_lending_and_borrowing_are_caught() -> None:
    chosen = [mutant for mutant in FLEET_MUTANTS if LONG or mutant.name in QUICK]
    outcomes = list(judge_all(chosen, events=400_000 if LONG else EVENTS_PER_SEED, program=PROGRAM))
    for outcome in outcomes:
        print(f"{outcome.mutant.name}: after {outcome.events:,} events by {outcome.check!r}")
    assert [outcome.mutant.name for outcome in outcomes if not outcome.check] == []


@pytest.mark.parametrize("mutant", FLEET_MUTANTS, ids=lambda mutant: mutant.name)
def test_the_code_still_holds_what_a_mutant_of_sharing_replaces(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} changed: mend the mutant {mutant.name!r}"
    compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


# Histories that are known by name. In each only that goes wrong which the test says.

TEXT, LENGTH = "p", 4
WHOLE = LENGTH * CHUNK


@pytest.fixture(params=SEEDS)
def fleet(request: pytest.FixtureRequest) -> Fleet:
    """Two ranks each; bob has a text, and the directory knows."""
    made = Fleet(request.param, FleetSettings(ranks=2, slots=16, one_sided=bool(request.param % 2)))
    has(made, "bob")
    return made


def has(fleet: Fleet, name: str, text: str = TEXT) -> Life:
    """Have it compute a text, until others can find that."""
    life = fleet.life(name)
    life.compute(text, LENGTH, tail=False)

    def told() -> bool:
        keys = {key(text, depth) for depth in range(LENGTH)}
        known = [
            set(fleet.desk.directory.keys_of(each.instance))
            for each in fleet.desk.directory.status(fleet.loop.now).instances
            if each.epoch == life.id.epoch.hex()
        ]
        return bool(known) and keys <= known[0]

    fleet.run_until(told, 20.0, "the directory knows what there is")
    return life


def until_ended(fleet: Fleet, *requests: Request) -> list[int]:
    """What they hit, in tokens. None waits longer than it may."""
    fleet.run_until(lambda: not any(each.waits for each in requests), LOAD + 1.0, "requests go on in time")
    return [each.hit for each in requests]


def hits(fleet: Fleet, name: str = "ann", text: str = TEXT) -> int:
    return until_ended(fleet, fleet.life(name).ask(text, LENGTH))[0]


def until_reading(fleet: Fleet, life: Life) -> None:
    fleet.run_until(
        lambda: all(worker.pulls for worker in life.workers) and fleet.seen["read"],
        LOAD,
        "something is read",
    )


def test_what_one_instance_has_another_one_hits(fleet: Fleet) -> None:
    assert hits(fleet) == WHOLE
    fleet.run_until(lambda: not fleet.life("bob").sharing.serving.leases, 1.0, "a lease is given back")
    fleet.drain()


def test_a_peer_that_is_killed_before_a_read_is_a_miss(fleet: Fleet) -> None:
    fleet.kill(fleet.life("bob"), noticed=False)
    assert hits(fleet) == 0
    fleet.drain()


def test_a_peer_that_is_killed_during_a_read_costs_what_was_not_read(fleet: Fleet) -> None:
    request = fleet.life("ann").ask(TEXT, LENGTH)
    until_reading(fleet, fleet.life("ann"))
    fleet.kill(fleet.life("bob"), noticed=bool(fleet.loop.random.getrandbits(1)))
    assert until_ended(fleet, request)[0] < WHOLE
    fleet.drain()


def test_what_was_read_from_a_peer_outlives_it(fleet: Fleet) -> None:
    assert hits(fleet) == WHOLE
    fleet.kill(fleet.life("bob"))
    assert hits(fleet) == WHOLE
    fleet.drain()


def test_a_peer_stopped_for_longer_than_its_lease_costs_no_more_than_the_wait(fleet: Fleet) -> None:
    ann, bob = fleet.life("ann"), fleet.life("bob")
    request = ann.ask(TEXT, LENGTH)
    until_reading(fleet, ann)
    fleet.stop(bob, LONGEST, workers=True)
    until_ended(fleet, request)
    ann.forget_all(new_weights=False)
    for text in "qrstuvw":
        ann.compute(text, LENGTH, tail=False)
    fleet.run_for(LONGEST + 1.0)
    fleet.drain()


def test_an_asker_stopped_for_longer_than_its_lease_takes_nothing_of_it(fleet: Fleet) -> None:
    ann, bob = fleet.life("ann"), fleet.life("bob")
    request = ann.ask(TEXT, LENGTH)
    until_reading(fleet, ann)
    fleet.stop(ann, LONGEST + 1.0, workers=True)
    fleet.run_for(LEASE + 1.0)
    for text in "qrstuvw":
        bob.compute(text, LENGTH, tail=False)
    fleet.run_until(lambda: not request.waits, LONGEST + LOAD + 2.0, "a request goes on in the end")
    fleet.drain()


def test_a_directory_that_starts_anew_is_told_everything(fleet: Fleet) -> None:
    fleet.kill_directory()
    assert hits(fleet) == 0
    fleet.restart_directory()
    fleet.run_until(fleet._told, 20.0, "the directory knows what there is")
    assert hits(fleet) == WHOLE
    fleet.drain()


@pytest.mark.parametrize("apart", [DIRECTORY, "bob"])
def test_a_partition_costs_hits_until_it_has_healed(fleet: Fleet, apart: str) -> None:
    fleet.cut.add(frozenset(("ann", apart)))
    assert hits(fleet) == 0
    fleet.cut.clear()
    fleet.run_until(lambda: hits(fleet) == WHOLE, 20.0, "hits come back")
    fleet.drain()


def test_a_done_that_is_lost_costs_the_rest_of_a_lease(fleet: Fleet) -> None:
    serving = fleet.life("bob").sharing.serving
    fleet.lost = lambda kind: kind.endswith("says Done")
    assert hits(fleet) == WHOLE
    fleet.run_for(0.5)
    assert serving.leases == 1
    fleet.run_until(lambda: not serving.leases, LEASE, "a lease ends by its time")
    fleet.drain()


@pytest.mark.parametrize("what", ["Done", "Ask", "Renew", "Hello"])
def test_messages_that_come_late_or_twice_change_nothing(fleet: Fleet, what: str) -> None:
    post = fleet.post

    def again(kind: str, arrive: Callable[[], object], *, can_be_lost: bool = True) -> None:
        post(kind, arrive, can_be_lost=can_be_lost)
        if kind.endswith(f"says {what}"):
            for _ in range(2):
                fleet.loop.after(fleet.loop.random.uniform(0.0, LEASE), f"{kind} again", arrive)

    fleet.post = again  # type: ignore[method-assign]
    ann = fleet.life("ann")
    for _ in range(4):
        assert hits(fleet) == WHOLE
        ann.forget_all(new_weights=False)
    fleet.run_for(LEASE)
    fleet.drain()


@pytest.mark.parametrize("same_address", [True, False])
def test_a_peer_that_started_anew_is_read_from_anew(fleet: Fleet, same_address: bool) -> None:
    assert hits(fleet) == WHOLE
    fleet.restart(fleet.life("bob"), same_address=same_address)
    fleet.life("ann").forget_all(new_weights=False)
    assert hits(fleet) == 0
    has(fleet, "bob")
    fleet.run_until(lambda: hits(fleet) == WHOLE, 20.0, "its second life is found")
    fleet.drain()


def test_of_two_instances_with_one_id_the_first_is_found_and_the_second_after_it(fleet: Fleet) -> None:
    first = fleet.life("bob")
    second = fleet.start("bob")
    second.compute("q", LENGTH, tail=False)
    fleet.run_for(2.0)
    assert hits(fleet) == WHOLE
    assert hits(fleet, text="q") == 0
    fleet.kill(first)
    fleet.run_until(lambda: hits(fleet, text="q") == WHOLE, 20.0, "the second is taken in")
    fleet.drain()


def test_twenty_requests_for_one_prefix_share_one_lease(fleet: Fleet) -> None:
    ann = fleet.life("ann")
    requests = [ann.ask(TEXT, LENGTH) for _ in range(20)]
    assert until_ended(fleet, *requests) == [WHOLE] * 20
    assert ann.borrowing.counts["granted"] == 1
    assert ann.borrowing.counts["fetched"] == LENGTH
    fleet.drain()


def test_a_request_may_end_at_any_moment(fleet: Fleet) -> None:
    ann = fleet.life("ann")
    for steps in range(0, 120, 3 if LONG else 8):
        request = ann.ask(TEXT, LENGTH)
        for _ in range(steps):
            fleet.step()
        ann.leave(request)
        fleet.run_until(lambda: ann.quiet, LEASE + 2.0, "nothing is left of a request")
        ann.forget_all(new_weights=False)
    require(ann.borrowing.counts["fetched"], "some were read", "none was")
    fleet.drain()


def test_who_has_new_weights_neither_lends_nor_borrows(fleet: Fleet) -> None:
    ann, bob = fleet.life("ann"), fleet.life("bob")
    bob.forget_all(new_weights=True)
    bob.compute(TEXT, LENGTH, tail=False)
    fleet.run_for(1.0)
    assert hits(fleet) == 0
    ann.compute("q", LENGTH, tail=False)
    fleet.run_for(1.0)
    assert hits(fleet, "bob", "q") == 0
    fleet.drain()
