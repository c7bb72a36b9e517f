"""What the log says of lower tiers: everything, and never a flood."""

from __future__ import annotations

import logging
import re
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.runtime.tier_log import TierLog

SECONDS = 60.0
WORDS = {
    "skipped": "were not copied down",
    "no_space": "found no room",
    "failed_stores": "could not be copied down",
    "failed_fetches": "could not be brought up",
    "corrupt": "came back damaged",
}
STEPS = st.lists(
    st.tuples(st.integers(0, 100), st.sampled_from(sorted(WORDS)), st.integers(0, 1000)), max_size=30
)


def a_tier(**more: Any) -> Any:
    values = {
        "name": "ssd",
        "usable": True,
        "opening": 1,
        "counts": Counter[str](),
        "settings": SimpleNamespace(retry_after=30.0),
        "reason": "",
        "capacity": 256,
    }
    return SimpleNamespace(**{**values, **more})


def told(caplog: pytest.LogCaptureFixture, *words: str) -> list[str]:
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if all(word in line for word in words)]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_chunks_are_counted_in_at_most_one_line_of_a_level_at_a_time(
    caplog: pytest.LogCaptureFixture, steps: list[tuple[int, str, int]]
) -> None:
    caplog.clear()
    caplog.set_level(logging.INFO, "kvferry")
    log, tier, now = TierLog(SECONDS), a_tier(opening=0), 1000.0
    at: dict[int, list[float]] = {logging.INFO: [], logging.WARNING: []}

    def tell() -> None:
        before = len(caplog.records)
        log.tell([tier], now)
        for record in caplog.records[before:]:
            at[record.levelno].append(now)

    for seconds, name, more in steps:
        now += seconds
        tier.counts[name] += more
        tell()
    now += SECONDS
    tell()
    for times in at.values():
        assert all(later - before >= SECONDS for before, later in pairwise(times))
    for name, words in WORDS.items():
        found = [re.search(rf"(\d+) chunks {words}", line) for line in told(caplog)]
        assert sum(int(match[1]) for match in found if match) == tier.counts[name]


def test_an_opening_is_told_once_with_what_was_found_and_how_long_it_took(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    log, tier = TierLog(), a_tier(usable=False)
    log.asked("ssd", 1, 10.0)
    log.tell([tier], 11.0)
    assert told(caplog) == []
    tier.usable = True
    tier.counts.update(adopted=12, foreign=3)
    for now in (12.5, 13.0):
        log.tell([tier], now)
    assert told(caplog) == [
        "kvferry: tier ssd is open after 2.5 s: 12 chunks were found and 3 of others, 256 fit"
    ]
    tier.opening = 2
    log.asked("ssd", 2, 20.0)
    tier.counts.update(adopted=5)
    log.tell([tier], 20.1)
    assert told(caplog, "again") == [
        "kvferry: tier ssd is open again after 0.1 s: 5 chunks were found, 256 fit"
    ]


def test_a_failure_is_told_at_once_and_those_that_follow_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    log, tier = TierLog(SECONDS), a_tier()
    log.tell([tier], 0.0)
    tier.usable = False
    for number in range(10):
        tier.counts["failures"] += 1
        tier.reason = f"errno {number}"
        log.tell([tier], 1.0 + number)
    (line,) = told(caplog, "failed")
    assert line == "kvferry: tier ssd failed and is not used; it is opened again after 30 s: errno 0"
    log.tell([tier], 1.0 + SECONDS)
    assert told(caplog, "failed 9 times", "errno 9") != []
    # It worked in between: the next failure is news.
    tier.usable, tier.opening = True, 2
    log.tell([tier], 62.0)
    tier.usable = False
    tier.counts["failures"] += 1
    log.tell([tier], 63.0)
    assert len(told(caplog, "failed")) == 3


def test_faults_are_told_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    log, tier = TierLog(SECONDS), a_tier()
    tier.counts.update(failed_fetches=2, corrupt=1)
    log.failed("ssd", "rank 1: EIO")
    log.failed("ssd", "")
    log.tell([tier], 0.0)
    assert told(caplog, "2 chunks could not be brought up", "1 chunks came back damaged", "rank 1: EIO") != []
