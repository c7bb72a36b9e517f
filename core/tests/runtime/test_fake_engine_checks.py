"""The fake engine sees what it is there to see."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.data.bounds import AddressColumn
from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.mapping import region_view
from kvferry.data.plans import Direction, StepPlan
from kvferry.runtime import StepReport
from kvferry.runtime.requests import LoadMode
from kvferry.testing.backends import MemoryBackend
from kvferry.testing.copiers import FaultyCopier
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings
from kvferry.testing.fake_memory import FakeGroup, FakeMemory, TokenHistory

CHUNK = 16
PROMPT = list(range(2 * CHUNK + 3))
SETTINGS = InstanceSettings(engine=EngineSettings(prefix_cache=False))


def stored(instance: FakeInstance) -> None:
    instance.engine.add(PROMPT)
    instance.engine.run()
    instance.settle()


def stored_twice(instance: FakeInstance) -> None:
    stored(instance)
    stored(instance)


def drain(instance: FakeInstance) -> None:
    """Let what is under way end, whatever the engine thinks of it."""
    for memory in instance.memories:
        memory.strays = lambda _: []  # type: ignore[method-assign, assignment]
        memory.right = lambda *_: True  # type: ignore[method-assign, assignment]
        memory.first_wrong = lambda *_: None  # type: ignore[method-assign, assignment]
    for request in list(instance.engine.requests.values()):
        instance.engine.abort(request)
    for _ in range(50):
        instance.engine.step()
    instance.settle()


def test_content_is_a_function_of_all_tokens_before_and_of_the_tenant() -> None:
    same = [TokenHistory([1, 2, 3, 4], "a").states(0, 4).tolist() for _ in range(2)]
    assert same[0] == same[1]
    assert TokenHistory([9, 2, 3, 4], "a").states(1, 4).tolist() != same[0][1:]
    assert TokenHistory([1, 2, 3, 4], "b").states(0, 1).tolist() != same[0][:1]
    assert TokenHistory([1, 2], "a").tokens(9) == TokenHistory([1, 2], "a").tokens(9)
    memories = [FakeMemory([FakeGroup()], blocks=2, block_tokens=4, rank=rank) for rank in (0, 1)]
    states = TokenHistory([1, 2, 3, 4], "a").states(0, 4)
    for memory in memories:
        memory.write(0, 0, 0, states)
        assert memory.right(0, 0, states)
        assert not memory.right(0, 1, states[:1])
    pages = [region_view(side) for memory in memories for side in _regions(memory)]
    assert len({page.tobytes() for page in pages}) == len(pages), "ranks or layers look alike"


def _regions(memory: FakeMemory) -> list[Any]:
    from kvferry.data.engine_side import EngineSide

    return EngineSide(memory.engine_groups(), 16).regions()


def test_a_stray_byte_is_seen(open_instance: Any) -> None:
    instance = open_instance(SETTINGS)
    region = _regions(instance.memories[0])[1]
    region_view(region)[77] ^= 1
    with pytest.raises(AssertionError, match="somebody wrote into group 0 block"):
        instance.engine.step()
    region_view(region)[77] ^= 1


def test_a_stray_byte_between_pages_is_seen() -> None:
    memory = FakeMemory([FakeGroup(gap=4)], blocks=2, block_tokens=4)
    region = _regions(memory)[0]
    plane = memory.engine_groups()[0].planes[0]
    assert not memory.strays([{0, 1}])
    region_view(region)[plane.page_bytes + 1] ^= 1
    assert memory.strays([{0, 1}]) == ["group 0 block 0"]


class Corrupting:
    """Copies, and then changes a byte of what it wrote."""

    name = "corrupting"

    def __init__(self, direction: Direction, backend: MemoryBackend, slot_bytes: int) -> None:
        self._sides = FaultyCopier(NumpyCopier(), backend.opened, slot_bytes)
        self._direction = direction

    def copy(self, destination: AddressColumn, source: AddressColumn, length: AddressColumn) -> None:
        self._sides.copy(destination, source, length)
        if self._sides._slots(destination, source)[0] is self._direction:
            from kvferry.api import Region

            at = Region(name="byte", address=int(destination[-1]), length=int(length[-1]))
            region_view(at)[3] ^= 1


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("load_mode", [LoadMode.ASYNC, LoadMode.SYNC])
def test_wrong_bytes_that_nobody_reports_are_seen(
    open_instance: Any, direction: Direction, load_mode: LoadMode
) -> None:
    def make_copier(rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
        return Corrupting(direction, backend, slot_bytes)

    settings = InstanceSettings(engine=EngineSettings(prefix_cache=False, load_mode=load_mode))
    instance = open_instance(settings, make_copier=make_copier)
    stored(instance)
    instance.engine.add(PROMPT)
    with pytest.raises(AssertionError, match="wrong"):
        instance.engine.run()
    drain(instance)


def test_a_second_report_of_an_end_is_seen(open_instance: Any) -> None:
    instance = open_instance(SETTINGS)
    worker = instance.workers[0]
    honest = worker.report
    ended: set[str] = set()

    def report(plan: StepPlan) -> StepReport:
        ended.update(honest(plan).finished_sending)
        return StepReport(finished_sending=frozenset(ended))

    worker.report = report
    with pytest.raises((AssertionError, KeyError)):
        stored_twice(instance)
    worker.report = honest
    instance.settle()


def test_a_hit_that_is_too_long_is_seen(open_instance: Any) -> None:
    instance = open_instance(SETTINGS)
    stored(instance)
    honest = instance.scheduler.match
    instance.scheduler.match = lambda *arguments: honest(*arguments) + 4
    instance.engine.add(PROMPT[: 2 * CHUNK + 1])
    with pytest.raises(AssertionError, match="nothing is left to compute"):
        instance.engine.step()
    instance.scheduler.match = honest
    instance.engine.run()
    instance.settle()
