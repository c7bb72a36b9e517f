"""Threads of ours run where the process may, whatever the thread that started them is bound to."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from kvferry.data.priorities import (
    STEPS_BEHIND,
    allowed_cores,
    leave_the_engines_core,
    stand_behind_the_engine,
)

CORES = os.sched_getaffinity(0)


@pytest.fixture
def bound() -> Iterator[int]:
    """This thread runs on one core, while another one of the process may run on all."""
    if len(CORES) < 2:
        pytest.skip("this machine gives the tests one core")
    free = threading.Event()
    other = threading.Thread(target=free.wait)
    other.start()
    core = min(CORES)
    os.sched_setaffinity(0, {core})
    try:
        yield core
    finally:
        os.sched_setaffinity(0, CORES)
        free.set()
        other.join()


def test_a_thread_leaves_the_core_that_it_inherited(bound: int) -> None:
    found: list[set[int]] = []

    def run(*, leave: bool) -> None:
        if leave:
            leave_the_engines_core()
        found.append(os.sched_getaffinity(0))

    for leave in (False, True):
        thread = threading.Thread(target=run, kwargs={"leave": leave})
        thread.start()
        thread.join()
    assert found == [{bound}, CORES]
    assert os.sched_getaffinity(0) == {bound}


def test_nobody_gets_a_core_that_no_thread_had(bound: int) -> None:
    assert allowed_cores() == CORES


def test_a_thread_of_a_lower_tier_and_those_that_it_starts_let_others_go_first() -> None:
    before = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    found: list[int] = []

    def note() -> None:
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    def serve() -> None:
        stand_behind_the_engine()
        note()
        inner = threading.Thread(target=note)
        inner.start()
        inner.join()

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert found == [min(19, before + STEPS_BEHIND)] * 2
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
