"""The parts beneath the channel: batches, threads, movements, Yama, facts."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.api import ErrorKind, HostEnvironment, KVFerryError
from kvferry_transport_local.batches import Batch, Outcome
from kvferry_transport_local.facts import CROSS_PROCESS, MAPPED, POSSIBLE, probe_facts
from kvferry_transport_local.moving import Copies, Movement, SystemMovement, choose_movement
from kvferry_transport_local.options import LocalOptions, Readers
from kvferry_transport_local.pool import Pool, Work
from kvferry_transport_local.tracers import Tracers

SECONDS = 20.0
MOVEMENTS = [SystemMovement(), choose_movement().movement]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 30), st.sampled_from([0, 1, 64, 4097])), max_size=20),
    st.sampled_from(MOVEMENTS),
    st.booleans(),
)
def test_every_movement_moves_exactly_the_bytes(
    pieces: list[tuple[int, int]], movement: Movement, across: bool
) -> None:
    total = sum(gap + length for gap, length in pieces) + 1
    source = np.random.default_rng(total).integers(0, 256, total, np.uint8)
    target = np.full(total, 0xA5, np.uint8)
    expected = target.copy()
    rows: list[tuple[int, int, int]] = []
    at = 0
    for gap, length in pieces:
        at += gap
        expected[at : at + length] = source[at : at + length]
        rows.append((target.ctypes.data + at, source.ctypes.data + at, length))
        at += length
    copies = Copies(*([row[column] for row in rows] for column in range(3)))
    if across:
        assert movement.read(os.getpid(), copies) == [length for _, length in pieces]
    else:
        movement.copy(copies)
    assert np.array_equal(target, expected)


@pytest.mark.parametrize("movement", MOVEMENTS, ids=lambda each: each.name)
def test_a_read_that_fails_says_why_and_leaves_the_others_alone(movement: Movement) -> None:
    source, target = np.arange(10, dtype=np.uint8), np.zeros(10, np.uint8)
    to, there = target.ctypes.data, source.ctypes.data
    assert movement.read(os.getpid(), Copies([to, to, to + 5], [there, 8, there + 5], [5, 5, 5])) == [
        5,
        -errno.EFAULT,
        5,
    ]
    assert np.array_equal(source, target)
    pid = os.posix_spawn("/bin/true", ["true"], os.environ)
    os.waitpid(pid, 0)
    assert movement.read(pid, Copies([to], [there], [5])) == [-errno.ESRCH]


ERROR = KVFerryError("it failed", kind=ErrorKind.IO)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_batch_ends_once_when_all_is_over_and_nothing_is_under_way(data: st.DataObject) -> None:
    """Against a plain model, for any order of what can happen to it."""
    count = data.draw(st.integers(1, 4))
    parts = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    ends: list[list[Outcome]] = []
    batch = Batch(count, 1.0, lambda outcomes: ends.append(list(outcomes)), lambda _number: None, None)
    for number, pieces in enumerate(parts):
        batch.expect(number, pieces)
    left, outcomes, busy = list(parts), [""] * count, 0
    calls = st.sampled_from(["begin", "pause", "advance", "fail", "abort", "revoke"])
    ended = False
    for call in data.draw(st.lists(calls, max_size=30)):
        number = data.draw(st.integers(0, count - 1))
        if call == "begin":
            live = batch.begin([number])
            busy += 1
            assert (number in live) == (not outcomes[number])
        elif call == "pause" and busy:
            busy -= 1
            batch.pause()
        elif call == "advance" and busy:  # whoever has a piece in place is still in the batch
            batch.advance([number])
            if not outcomes[number]:
                left[number] -= 1
                outcomes[number] = "" if left[number] else "done"
        elif call == "fail":
            batch.fail(number, ERROR)
            batch.end_if_over()
            outcomes[number] = outcomes[number] or "failed"
        elif call == "abort":
            batch.abort(ERROR)
            outcomes = [outcome or "failed" for outcome in outcomes]
        elif call == "revoke":
            assert batch.revoke([number], ERROR) == (not ended)
            if not ended:
                outcomes[number] = "failed"
        ended = ended or (all(outcomes) and busy == 0)
        assert len(ends) == ended
        if ended:
            break
    if ended:
        assert [("done" if error is None else "failed") for error in ends[0]] == outcomes


def test_what_is_done_is_asked_for_once_more_at_the_end() -> None:
    ends: list[list[Outcome]] = []
    batch = Batch(
        2, 1.0, lambda found: ends.append(list(found)), lambda number: ERROR if number else None, None
    )
    batch.advance([0, 1])
    batch.end_if_over()
    assert ends == [[None, ERROR]]


def test_small_work_does_not_wait_for_large() -> None:
    pool = Pool(1, "test")
    order: list[str] = []
    gate, done = threading.Event(), threading.Event()

    def step(name: str) -> Callable[[], None]:
        return lambda: order.append(name)

    def wait() -> None:
        gate.wait(SECONDS)

    pool.put(Work([wait, *[step("large")] * 50]))
    pool.open()
    pool.put(Work([step("small"), done.set]))
    gate.set()
    assert done.wait(SECONDS)
    assert pool.close(SECONDS)
    assert order.index("small") <= 2


def _writes_to(told: list[int]) -> Callable[[int], bool]:
    def tell(pid: int) -> bool:
        told.append(pid)
        return True

    return tell


def test_yama_is_told_one_peer_at_a_time_and_none_in_the_end() -> None:
    told: list[int] = []
    tracers = Tracers(Readers.PEER, _writes_to(told))
    tracers.open()
    tracers.allow(os.getpid())
    tracers.allow(11)
    tracers.allow(12)
    tracers.allow(11)
    tracers.release(11)
    assert told == [11]
    tracers.release(11)
    assert told == [11, 12]
    tracers.release(os.getpid())
    tracers.release(12)
    assert told == [11, 12, 0]


def test_yama_is_told_of_all_or_of_nobody_as_the_option_says() -> None:
    told: list[int] = []
    for readers in (Readers.ANY, Readers.NOBODY):
        tracers = Tracers(readers, _writes_to(told))
        tracers.open()
        tracers.allow(11)
        tracers.release(11)
        tracers.close()
    assert told == [-1, 0]


@pytest.mark.parametrize(
    ("scope", "told"),
    [("0", POSSIBLE), ("1", POSSIBLE), ("2", "administrators"), ("3", "forbids it to all"), ("x", POSSIBLE)],
)
def test_facts_say_whether_processes_can_read_each_other(tmp_path: Path, scope: str, told: str) -> None:
    folder = tmp_path / "proc/sys/kernel/yama"
    folder.mkdir(parents=True)
    (folder / "ptrace_scope").write_text(f"{scope}\n")
    facts = {fact.path: fact.value for fact in probe_facts(HostEnvironment(root=str(tmp_path)))}
    assert facts[MAPPED] == POSSIBLE
    assert told in str(facts[CROSS_PROCESS])


@pytest.mark.parametrize("threads", [0, 65])
def test_options_say_what_is_wrong(threads: int) -> None:
    with pytest.raises(ValueError, match=r"is below 1|is above 64"):
        LocalOptions(threads=threads)
