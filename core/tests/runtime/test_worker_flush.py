"""Blocks are only used for something else once no save reads them any more."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.runtime import RequestOptions
from kvferry.runtime.worker import FLUSH_SECONDS
from kvferry.testing.copiers import SlowCopier
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, wait_until

CHUNK = 16
FIRST = list(range(4 * CHUNK))
SECOND = list(range(500, 500 + 4 * CHUNK))
NO_STORE = RequestOptions(store=False)


@pytest.fixture
def copier() -> SlowCopier:
    return SlowCopier(NumpyCopier())


@pytest.fixture
def instance(open_instance: Any, copier: SlowCopier) -> FakeInstance:
    """Room for one of the two prompts at a time, so that the second takes the first one's blocks."""

    def make_copier(*_: object) -> SpanCopier:
        return copier

    engine = EngineSettings(prefix_cache=False, blocks=24, step_tokens=CHUNK)
    return open_instance(InstanceSettings(engine=engine), make_copier=make_copier)


def check(instance: FakeInstance) -> int:
    """Tokens of the first prompt that are found; the engine checks that they are right."""
    instance.engine.run()
    instance.settle()
    again = instance.engine.add([*FIRST, 1], options=NO_STORE)
    instance.engine.run()
    instance.settle()
    instance.check_idle()
    return sum(again.hits)


def preempt_with_saves_pending(instance: FakeInstance) -> None:
    """The first request loses its blocks to the second, with saves of its chunks in the queue."""
    engine = instance.engine
    request = engine.add(FIRST, new_tokens=2)
    for _ in range(3):
        engine.step()
    engine.preempt(request)
    engine.waiting.clear()
    engine.add(SECOND, options=NO_STORE)
    engine.waiting.append(request)


def test_saves_end_before_the_blocks_are_taken(instance: FakeInstance, copier: SlowCopier) -> None:
    copier.seconds = 0.02
    preempt_with_saves_pending(instance)
    assert instance.scheduler.statistics()[1].reservations > 0
    instance.engine.step()
    copier.seconds = 0.0
    assert check(instance) == 4 * CHUNK
    assert instance.scheduler.statistics()[0].failed_saves == 0


def test_saves_that_take_too_long_are_dropped_and_never_found(
    instance: FakeInstance, copier: SlowCopier
) -> None:
    copier.gate.clear()
    preempt_with_saves_pending(instance)
    assert copier.entered.wait(10.0)
    opener = threading.Timer(2 * FLUSH_SECONDS, copier.gate.set)
    opener.start()
    instance.engine.step()  # waits for the copy that had begun, and drops the rest
    opener.join()
    totals = instance.scheduler.statistics
    wait_until(lambda: totals()[0].failed_saves > 0, 10.0, "nothing was dropped")
    assert check(instance) == 4 * CHUNK  # stored again when it ran again


def test_a_finished_request_keeps_its_blocks_until_they_are_saved(
    instance: FakeInstance, copier: SlowCopier
) -> None:
    engine = instance.engine
    copier.gate.clear()
    first = engine.add(FIRST)
    while not first.complete:
        engine.step()
    second = engine.add(SECOND, options=NO_STORE)
    for _ in range(10):
        engine.step()
    assert first.id in engine.requests
    assert not second.complete, "it ran in blocks that are still being read"
    copier.gate.set()
    assert check(instance) == 4 * CHUNK
    assert second.complete
