"""One worker, step by step: what it reports, when, and how often."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvferry.data.copy import NumpyCopier
from kvferry.data.engine_side import EngineSide
from kvferry.data.plans import Direction, StepPlan, Transfer
from kvferry.data.store_side import StoreSide
from kvferry.runtime import StepReport, WorkerRuntime
from kvferry.runtime.address import MeetingPlace
from kvferry.testing.backends import MemoryBackend, MemoryOptions
from kvferry.testing.copiers import SlowCopier
from kvferry.testing.fake_memory import FakeGroup, FakeMemory

NOTHING = StepReport()
SAVE, LOAD = Direction.SAVE, Direction.LOAD


def transfer(direction: Direction, request: str, slot: int, *blocks: int, number: int = 1) -> Transfer:
    count = len(blocks)
    return Transfer.of(number, request, direction, [slot] * count, range(count), [list(blocks)])


class Step:
    """Runs plans on a worker in the engine's order."""

    def __init__(self, worker: WorkerRuntime, copier: SlowCopier) -> None:
        self.worker = worker
        self.copier = copier

    def __call__(self, plan: StepPlan | None = None, failures_seen: int = 0) -> StepReport:
        plan = plan or StepPlan()
        self.worker.before_overwrite(plan)
        self.worker.start_loads(plan)
        self.worker.submit_saves(plan, failures_seen)
        return self.worker.report(plan)

    def until(self, *, sent: str = "", received: str = "") -> list[StepReport]:
        """Empty steps until that report comes, and three more; all reports that say something."""
        reports = []
        more = 3
        deadline = time.monotonic() + 10.0
        while more:
            assert time.monotonic() < deadline, "it was never reported"
            report = self(StepPlan(idle=True))
            seen = sent in report.finished_sending or received in report.finished_receiving
            if report != NOTHING:
                reports.append(report)
            if seen or more < 3:
                more -= 1
        return reports


@pytest.fixture
def step(folder: Path) -> Iterator[Step]:
    with open_worker(folder) as opened:
        yield opened


@contextmanager
def open_worker(folder: Path) -> Iterator[Step]:
    memory = FakeMemory([FakeGroup()], blocks=32, block_tokens=4)
    side = EngineSide(memory.engine_groups(), 16)
    size = side.layout.total_bytes
    copier = SlowCopier(NumpyCopier())
    worker = WorkerRuntime(
        side,
        StoreSide("memory", MemoryBackend(MemoryOptions(), 8 * size), size, 0),
        copier,
        MeetingPlace("alone", str(folder), {}),
        rank=0,
        world_size=1,
        epoch=1,
        fingerprint="fake",
    )
    worker.open()
    try:
        yield Step(worker, copier)
    finally:
        copier.gate.set()
        worker.close()
        worker.close()


def test_an_empty_step_says_nothing(step: Step) -> None:
    assert step() == NOTHING
    assert step(StepPlan(idle=True)) == NOTHING


def test_a_load_is_reported_once(step: Step) -> None:
    step.copier.gate.clear()
    assert step(StepPlan(loads=(transfer(LOAD, "a", 0, 1, 2),))) == NOTHING
    assert step() == NOTHING
    step.copier.gate.set()
    assert step.until(received="a") == [StepReport(finished_receiving=frozenset("a"))]


def test_a_load_that_failed_names_its_blocks_in_the_same_report(step: Step) -> None:
    step(StepPlan(loads=(transfer(LOAD, "a", -1, 7, 9),)))
    assert step.until(received="a") == [
        StepReport(
            finished_receiving=frozenset("a"),
            failed_receiving=frozenset("a"),
            invalid_blocks=frozenset({7, 9}),
        )
    ]


def test_a_synchronous_load_is_done_when_the_call_returns(step: Step) -> None:
    report = step(StepPlan(sync_loads=(transfer(LOAD, "a", 0, 1, 2), transfer(LOAD, "b", 99, 5))))
    assert report == StepReport(invalid_blocks=frozenset({5}))
    assert step.worker.failures == 1
    assert step() == NOTHING


def test_an_end_is_reported_once_and_after_the_last_save(step: Step) -> None:
    step.copier.gate.clear()
    saves = tuple(transfer(SAVE, "a", slot, slot, number=slot) for slot in range(3))
    assert step(StepPlan(saves=saves[:1])) == NOTHING
    assert step(StepPlan(saves=saves[1:], ended=("a", "b"))) == StepReport(finished_sending=frozenset("b"))
    assert step() == NOTHING
    step.copier.gate.set()
    assert step.until(sent="a") == [StepReport(finished_sending=frozenset("a"))]


def test_saves_are_dropped_until_the_scheduler_knows_of_a_failed_load(step: Step) -> None:
    saved = step.worker.statistics
    step(StepPlan(sync_loads=(transfer(LOAD, "bad", 99, 5),), saves=(transfer(SAVE, "a", 0, 1),)))
    step(StepPlan(saves=(transfer(SAVE, "a", 1, 2),), ended=("a",)), failures_seen=0)
    assert saved().saved_bytes == 0
    step(StepPlan(saves=(transfer(SAVE, "b", 2, 3),), ended=("b",)), failures_seen=1)
    step.until(sent="b")
    assert saved().saved_bytes > 0


def test_a_step_without_work_waits_a_moment_for_copies_and_no_longer(step: Step) -> None:
    step.copier.gate.clear()
    step(StepPlan(loads=(transfer(LOAD, "a", 0, 1),)))
    started = time.monotonic()
    assert step(StepPlan(idle=True)) == NOTHING
    assert time.monotonic() - started < 10.0
    step.copier.gate.set()
    step.until(received="a")


def test_closing_in_the_middle_of_a_copy_leaves_nothing(folder: Path) -> None:
    with open_worker(folder) as step:
        step(StepPlan(saves=tuple(transfer(SAVE, "a", slot, slot, number=slot) for slot in range(8))))


def test_it_opens_and_closes_without_any_scheduler(folder: Path) -> None:
    for _ in range(3):
        with open_worker(folder) as step:
            assert step() == NOTHING
