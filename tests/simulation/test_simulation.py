"""The control plane under faults: right bytes, leases that end, counts that return, one seed one history."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.simulation.coverage import LEASE_STEPS, SLOT_STEPS
from tests.simulation.events import SimulationFailure
from tests.simulation.mutants import REPOSITORY
from tests.simulation.runs import Failure, Report, run, run_seed, settings_of, shorter
from tests.simulation.world import World

EVENTS = 200_000
FIRST_SEED = 1


@pytest.fixture(scope="module")
def report() -> Report:
    """One long run that several tests look at."""
    return run(FIRST_SEED, EVENTS)


def test_nothing_goes_wrong_under_faults(report: Report) -> None:
    print(report.text())
    assert report.failure is None, str(report.failure)
    assert report.events >= EVENTS


def test_a_fifth_of_all_events_are_faults(report: Report) -> None:
    assert report.share_of_faults >= 0.2, report.summary()
    wanted = {
        "lost message",
        "late message",
        "doubled message",
        "reordered message",
        "failed result",
        "refused plan",
        "client vanished",
        "worker died",
        "engine died",
        "clock leap",
        "clock step",
    }
    assert wanted <= set(report.faults), wanted - set(report.faults)


def test_every_step_of_slots_leases_and_requests_is_taken(report: Report) -> None:
    assert report.coverage.missing() == []
    assert report.coverage.unknown() == []


def test_the_same_seed_is_the_same_history(report: Report) -> None:
    again = Report()
    run_seed(FIRST_SEED, 3000, again)
    program = (
        "from tests.simulation.runs import Report, run_seed\n"
        f"report = Report()\nrun_seed({FIRST_SEED}, 3000, report)\nprint(report.digests[{FIRST_SEED}])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == again.digests[FIRST_SEED]
    other = Report()
    run_seed(FIRST_SEED + 1, 3000, other)
    assert other.digests[FIRST_SEED + 1] != again.digests[FIRST_SEED]
    assert len(set(report.digests.values())) == len(report.digests)


class _Careless(World):
    """Fails at one event."""

    def check_event(self) -> None:
        super().check_event()
        if self.loop.count == 500:
            raise SimulationFailure("a test", "made to fail")


class _Forgetful(World):
    """Leaves something behind once more than 700 events have happened."""

    def drain(self) -> None:
        if self.loop.count > 700:
            raise SimulationFailure("a test", "something is left")
        super().drain()


def test_a_failing_seed_says_how_to_repeat_it() -> None:
    failed = run(5, 30_000, make_world=_Careless).failure
    assert failed is not None
    assert (failed.seed, failed.events, failed.check) == (5, 500, "a test")
    assert failed.command == "make simulate SEED=5 EVENTS=500"
    assert failed.last[-1].startswith("500 ")
    assert failed.command in str(failed)
    assert run(failed.seed, failed.events, make_world=_Careless).failure == failed
    assert run(failed.seed, failed.events).failure is None


def test_a_failure_at_the_end_is_shortened() -> None:
    failed = run(5, 3000, make_world=_Forgetful).failure
    assert isinstance(failed, Failure)
    assert failed.events == 3000
    assert 700 < shorter(failed, _Forgetful).events <= 1500


def test_worlds_differ_in_size() -> None:
    sizes = {(settings.ranks, settings.slots) for settings in map(settings_of, range(50))}
    assert {ranks for ranks, _ in sizes} == {1, 2, 3}
    assert len(sizes) > 6
    assert len(SLOT_STEPS) == 10
    assert len(LEASE_STEPS) == len(set(LEASE_STEPS))
