"""``make simulate-fleet``: lets many events happen to instances that read from each other.

``--seed`` is the first seed; a failing one prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
from collections import Counter
from collections.abc import Sequence

from attrs import define, field

import kvferry
from tests.simulation.fleet import Fleet
from tests.simulation.runs import Report, run, shorter
from tests.simulation.world import Settings

EVENTS_PER_SEED = 8000
"""What must have ended when all has ended shows at the end of each."""


@define
class FleetReport:
    """What happened in all seeds together. ``seen`` are things that a run has to see, ``counts`` those of
    borrowing and lending."""

    report: Report
    seen: Counter[str] = field(factory=Counter)
    counts: Counter[str] = field(factory=Counter)

    def text(self) -> str:
        """For people."""
        told = self.seen + self.counts + self.report.faults
        lines = [f"  {name:<44} {count:>9,}" for name, count in sorted(told.items())]
        return "\n".join([*lines, self.report.summary()])


def run_fleet(seed: int, events: int) -> FleetReport:
    """Run seeds from ``seed`` on until so many events have happened or one has failed."""
    fleets: list[Fleet] = []

    def make(seed: int, _settings: Settings) -> Fleet:
        fleets.append(Fleet(seed))
        return fleets[-1]

    told = FleetReport(run(seed, events, make_world=make, per_seed=EVENTS_PER_SEED))
    for fleet in fleets:
        told.seen += fleet.seen
        told.counts += fleet.counts()
    return told


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.fleet_runs", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--json", action="store_true", help="print no more than what failed, as JSON")
    parser.add_argument("--cpu-seconds", type=int, help="end with SIGXCPU after so much processor time")
    parsed = parser.parse_args(arguments)
    if parsed.cpu_seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (parsed.cpu_seconds, parsed.cpu_seconds + 10))
    told = run_fleet(parsed.seed, parsed.events)
    failure = told.report.failure
    if parsed.json:
        check = failure and failure.check
        print(json.dumps({"package": kvferry.__file__, "events": told.report.events, "check": check}))
        return int(failure is not None)
    print(told.text())
    if failure is None:
        return 0
    print(shorter(failure, lambda seed, _settings: Fleet(seed)))
    return 1


if __name__ == "__main__":
    sys.exit(main())
