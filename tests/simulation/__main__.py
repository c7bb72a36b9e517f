"""``make simulate``: lets many events happen to the control plane, a fifth of them faults.

``--seed`` is the first seed; a failing one prints the command that repeats it.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Sequence

import kvferry
from tests.simulation.runs import Report, run, shorter

PROGRESS_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when nothing happened that must not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--json", action="store_true", help="print no more than what failed, as JSON")
    parser.add_argument("--cpu-seconds", type=int, help="end with SIGXCPU after so much processor time")
    parsed = parser.parse_args(arguments)
    if parsed.cpu_seconds:
        resource.setrlimit(resource.RLIMIT_CPU, (parsed.cpu_seconds, parsed.cpu_seconds + 10))
    last = time.monotonic()

    def progress(report: Report) -> None:
        nonlocal last
        if time.monotonic() - last > PROGRESS_SECONDS:
            last = time.monotonic()
            print(report.summary(), flush=True)

    if parsed.json:
        report = run(parsed.seed, parsed.events)
        failure = report.failure
        told = {
            "package": kvferry.__file__,
            "events": report.events,
            "check": failure and failure.check,
        }
        print(json.dumps(told))
        return int(failure is not None)
    report = run(parsed.seed, parsed.events, progress=progress)
    print(report.text())
    if report.failure is None:
        return 0
    print(shorter(report.failure))
    return 1


if __name__ == "__main__":
    sys.exit(main())
