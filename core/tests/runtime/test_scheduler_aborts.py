"""A request that ends early, at any moment, leaves nothing and is reported once."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.runtime import RequestOptions
from kvferry.testing.copiers import SlowCopier
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, wait_until
from kvferry.testing.fake_requests import FakeRequest, Status

CHUNK = 16
PROMPT = list(range(3 * CHUNK))
NO_STORE = RequestOptions(store=False)


class Gated:
    """An instance whose copies can be stopped, with one prompt stored."""

    def __init__(self, open_instance: Any, *, overlapping: bool = False) -> None:
        self.copiers: list[SlowCopier] = []
        engine = EngineSettings(prefix_cache=False, step_tokens=100, overlapping=overlapping)
        self.instance: FakeInstance = open_instance(
            InstanceSettings(engine=engine, world_size=2), make_copier=self._copier
        )
        self.engine = self.instance.engine
        self.engine.add(PROMPT)
        self.engine.run()
        self.instance.settle()

    def _copier(self, rank: int, *_: object) -> SpanCopier:
        self.copiers.append(SlowCopier(NumpyCopier()))
        return self.copiers[-1]

    def stop(self) -> None:
        for copier in self.copiers:
            copier.entered.clear()
            copier.gate.clear()

    def go_on(self) -> None:
        for copier in self.copiers:
            copier.gate.set()

    def loading(self) -> FakeRequest:
        """A request whose load has begun on both ranks and cannot end."""
        self.stop()
        request = self.engine.add(PROMPT, options=NO_STORE)
        self.engine.step()
        assert request.status is Status.LOADING
        wait_until(lambda: all(copier.entered.is_set() for copier in self.copiers), 10.0, "no copy")
        return request

    def end(self) -> None:
        """Everything ends, nothing is out, and the engine still works."""
        self.go_on()
        self.engine.run()
        self.instance.settle()
        self.instance.check_idle()
        again = self.engine.add(PROMPT, options=NO_STORE)
        self.engine.run()
        self.instance.settle()
        assert again.hits == [3 * CHUNK - 4]
        self.instance.check_idle()


@pytest.fixture(params=[False, True], ids=["", "overlapping"])
def gated(request: pytest.FixtureRequest, open_instance: Any) -> Gated:
    return Gated(open_instance, overlapping=request.param)


def test_before_it_was_looked_at(gated: Gated) -> None:
    request = gated.engine.add(PROMPT)
    gated.engine.abort(request)
    gated.end()


def test_while_it_is_matched_and_waits(gated: Gated) -> None:
    gated.engine.admit = lambda _: False
    request = gated.engine.add(PROMPT)
    gated.engine.step()
    assert gated.instance.manager.stats().leases == 1
    gated.engine.abort(request)
    assert gated.instance.manager.stats().leases == 0
    gated.engine.admit = lambda _: True
    gated.end()


def test_while_it_loads(gated: Gated) -> None:
    request = gated.loading()
    gated.engine.abort(request)
    gated.engine.step()
    assert request.id in gated.engine.requests, "its blocks are still being written"
    gated.end()
    assert request.id not in gated.engine.requests


def test_while_it_loads_and_the_cache_is_cleared(gated: Gated) -> None:
    request = gated.loading()
    gated.instance.scheduler.clear()
    gated.engine.abort(request)
    gated.go_on()
    gated.engine.run()
    gated.instance.settle()
    gated.instance.check_idle()
    assert gated.instance.manager.stats().resident == 0


def test_after_its_load_but_before_it_runs(gated: Gated) -> None:
    request = gated.loading()
    gated.go_on()
    gated.engine.admit = lambda _: False
    wait_until(lambda: gated.engine.step() or request.received or not request.loading_ranks, 10.0, "")
    for _ in range(3):
        gated.engine.step()
    gated.engine.abort(request)
    gated.engine.admit = lambda _: True
    gated.end()


def test_while_it_loads_again_after_the_engine_was_reset(gated: Gated) -> None:
    """Preempted between two steps, matched and loading in the next, which also tells of the end of
    its old blocks."""
    request = gated.engine.add(PROMPT, new_tokens=8, options=NO_STORE)
    while len(request.answer) < 3:
        gated.engine.step()
    gated.engine.preempt(request)
    gated.stop()
    wait_until(lambda: gated.engine.step() or request.status is Status.LOADING, 10.0, "no load")
    gated.engine.abort(request)
    gated.end()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_while_it_runs(gated: Gated, steps: int) -> None:
    request = gated.engine.add(list(range(500, 500 + 3 * CHUNK)), new_tokens=20)
    for _ in range(steps):
        gated.engine.step()
    gated.engine.abort(request)
    gated.end()


def test_while_its_saves_are_under_way(gated: Gated) -> None:
    gated.stop()
    request = gated.engine.add(list(range(500, 500 + 3 * CHUNK)), new_tokens=20)
    for _ in range(3):
        gated.engine.step()
    gated.engine.abort(request)
    for _ in range(3):
        gated.engine.step()
    assert request.id in gated.engine.requests, "its blocks are still being read"
    gated.end()
    assert request.id not in gated.engine.requests


def test_an_end_is_told_once_by_each_rank_however_slow_one_of_them_is(gated: Gated) -> None:
    gated.copiers[1].gate.clear()
    request = gated.engine.add(list(range(500, 500 + 3 * CHUNK)), new_tokens=2)
    for _ in range(30):
        gated.engine.step()
    assert request.status is Status.FINISHED
    assert request.id in gated.engine.requests
    gated.end()
