"""Copies that fail: told exactly, computed again, never tried twice, never found."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.plans import Direction
from kvferry.runtime import LoadMode, RequestOptions
from kvferry.testing.backends import MemoryBackend
from kvferry.testing.copiers import FaultyCopier
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, wait_until
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.fake_requests import FakeRequest

BLOCK, CHUNK, CHUNKS = 4, 16, 5
PROMPT = list(range(CHUNKS * CHUNK + 1))
NO_STORE = RequestOptions(store=False)


class Faulty:
    """An instance with a copier that fails on the last rank."""

    def __init__(self, open_instance: Any, **more: Any) -> None:
        self.copiers: list[FaultyCopier] = []
        engine = EngineSettings(
            prefix_cache=False,
            step_tokens=more.pop("step_tokens", 200),
            load_mode=more.pop("load_mode", LoadMode.ASYNC),
            overlapping=more.pop("overlapping", False),
        )
        self.instance: FakeInstance = open_instance(
            InstanceSettings(engine=engine, **more), make_copier=self._copier
        )
        self.engine = self.instance.engine

    def _copier(self, rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
        self.copiers.append(FaultyCopier(NumpyCopier(), backend.opened, slot_bytes))
        return self.copiers[-1]

    @property
    def faulty(self) -> FaultyCopier:
        return self.copiers[-1]

    def run(self, **options: Any) -> FakeRequest:
        request = self.engine.add(PROMPT, new_tokens=2, **options)
        self.engine.run()
        self.instance.settle()
        assert request.complete
        return request

    def slots(self) -> list[int]:
        """Slots of the stored prompt, chunk by chunk."""
        chain = self.instance.new_chain("", None)
        chain.extend(PROMPT)
        match = self.instance.manager.match("test", chain.keys, lambda _: (), 0.0, len(PROMPT))
        assert match.lease is not None
        self.instance.manager.release(match.lease)
        return list(match.slots)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("load_mode", [LoadMode.ASYNC, LoadMode.SYNC])
@pytest.mark.parametrize("overlapping", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_exactly_the_failed_chunk_is_reported_and_computed_again(
    open_instance: Any, world_size: int, load_mode: LoadMode, overlapping: bool, chunk: int
) -> None:
    faulty = Faulty(open_instance, world_size=world_size, load_mode=load_mode, overlapping=overlapping)
    faulty.run()
    faulty.faulty.fail_slots = {faulty.slots()[chunk]}
    faulty.faulty.directions = {Direction.LOAD}
    request = faulty.run(options=NO_STORE)
    per_chunk = CHUNK // BLOCK
    bad = frozenset(range(chunk * per_chunk, (chunk + 1) * per_chunk))
    assert request.failures == [bad]
    assert request.hits == [CHUNKS * CHUNK], "the load was tried again"
    assert faulty.faulty.failed >= 1
    totals = faulty.instance.scheduler.statistics()[0]
    assert (totals.failed_loads, totals.loaded_tokens) == (1, 0)
    # What failed is gone, with all behind it; what was before it is still found.
    faulty.faulty.fail_slots.clear()
    again = faulty.run(options=NO_STORE)
    assert sum(again.hits) == chunk * CHUNK
    assert not again.failures
    faulty.instance.check_idle()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_several_groups_are_told_request_by_request(open_instance: Any, chunk: int) -> None:
    groups = (FakeGroup(), FakeGroup(layers=1, fused=False), FakeGroup(heads=1))
    faulty = Faulty(open_instance, groups=groups, world_size=2)
    faulty.run()
    faulty.faulty.fail_slots = {faulty.slots()[chunk]}
    faulty.faulty.directions = {Direction.LOAD}
    request = faulty.run(options=NO_STORE)
    assert faulty.engine.failures == 1
    assert request.hits == [CHUNKS * CHUNK], "the load was tried again"
    faulty.instance.check_idle()


@pytest.mark.parametrize("load_mode", [LoadMode.ASYNC, LoadMode.SYNC])
def test_a_bug_in_a_copier_costs_its_own_hits_only(open_instance: Any, load_mode: LoadMode) -> None:
    faulty = Faulty(open_instance, load_mode=load_mode)
    faulty.run()
    faulty.faulty.directions = {Direction.LOAD}
    faulty.faulty.calls = 0
    faulty.faulty.fail_calls = {1}
    faulty.faulty.error = lambda: ZeroDivisionError("a bug")
    request = faulty.run(options=NO_STORE)
    assert request.failures == [frozenset(range(CHUNKS * CHUNK // BLOCK))]
    faulty.instance.check_idle()


def test_a_failed_load_may_be_tried_again_after_a_preemption(open_instance: Any) -> None:
    faulty = Faulty(open_instance)
    faulty.run()
    faulty.faulty.fail_slots = {faulty.slots()[2]}
    faulty.faulty.directions = {Direction.LOAD}
    request = faulty.engine.add(PROMPT, new_tokens=10, options=NO_STORE)
    while len(request.answer) < 2:
        faulty.engine.step()
    assert request.failures
    totals = faulty.instance.scheduler.statistics
    wait_until(lambda: totals()[0].failed_loads > 0, 10.0, "no failed load")
    faulty.engine.preempt(request)
    faulty.engine.run()
    faulty.instance.settle()
    assert request.hits == [CHUNKS * CHUNK, 2 * CHUNK]
    faulty.instance.check_idle()


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_what_one_rank_could_not_store_no_rank_finds(open_instance: Any, chunk: int) -> None:
    faulty = Faulty(open_instance, world_size=2)
    # Slots of an empty tier are given in order; what is offered again gets none but these either.
    faulty.faulty.fail_slots = set(range(chunk, 64))
    faulty.faulty.directions = {Direction.SAVE}
    first = faulty.engine.add(PROMPT)
    faulty.engine.run()
    faulty.instance.settle()
    assert first.complete
    assert faulty.faulty.failed
    assert not faulty.copiers[0].failed
    faulty.faulty.fail_slots.clear()
    again = faulty.run(options=NO_STORE)
    assert sum(again.hits) == chunk * CHUNK
    faulty.instance.check_idle()


def test_a_running_request_offers_again_what_could_not_be_stored(open_instance: Any) -> None:
    faulty = Faulty(open_instance, step_tokens=CHUNK)
    faulty.faulty.directions = {Direction.SAVE}
    faulty.faulty.fail_slots = {0}
    request = faulty.engine.add(PROMPT, new_tokens=30)
    faulty.engine.step()
    totals = faulty.instance.scheduler.statistics
    wait_until(lambda: totals()[0].failed_saves > 0, 10.0, "no failed save")
    faulty.faulty.fail_slots.clear()
    faulty.engine.run()
    faulty.instance.settle()
    assert request.complete
    assert sum(faulty.run(options=NO_STORE).hits) == CHUNKS * CHUNK
    faulty.instance.check_idle()


@pytest.mark.parametrize("overlapping", [False, True], ids=["", "overlapping"])
@pytest.mark.parametrize("chunk", [0, 2, CHUNKS - 1])
def test_what_was_computed_from_a_failed_load_is_never_found(
    open_instance: Any, overlapping: bool, chunk: int
) -> None:
    """The step that loads in vain also computes, and would save, chunks behind the missing bytes."""
    faulty = Faulty(
        open_instance, world_size=2, load_mode=LoadMode.SYNC, overlapping=overlapping, step_tokens=2 * CHUNK
    )
    faulty.run()
    faulty.faulty.fail_slots = {faulty.slots()[chunk]}
    faulty.faulty.directions = {Direction.LOAD}
    longer = [*PROMPT, *range(1000, 1000 + 4 * CHUNK)]
    request = faulty.engine.add(longer, new_tokens=2)
    faulty.engine.run()
    faulty.instance.settle()
    assert request.complete
    assert request.failures
    totals = faulty.instance.scheduler.statistics()[0]
    assert totals.failed_saves > 0, "nothing was dropped, so this test shows nothing"
    faulty.faulty.fail_slots.clear()
    # The engine compares every byte that it restores.
    again = faulty.engine.add([*longer, 5], options=NO_STORE)
    faulty.engine.run()
    faulty.instance.settle()
    assert again.complete
    assert not again.failures
    faulty.instance.check_idle()
