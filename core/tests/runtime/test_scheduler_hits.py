"""How much of a prompt is found again, and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from kvferry.runtime import LoadMode, RequestOptions, SchedulerRuntime, StepPlan
from kvferry.testing.fake_engine import EngineSettings
from kvferry.testing.fake_instance import FakeInstance, InstanceSettings, wait_until
from kvferry.testing.fake_memory import FakeGroup

BLOCK = 4
CHUNK = 16
NO_STORE = RequestOptions(store=False)


def settings(**engine: Any) -> InstanceSettings:
    """No prefix cache of the engine's own, so that every hit is ours."""
    options = {"prefix_cache": False, "step_tokens": 200, **engine}
    return InstanceSettings(engine=EngineSettings(**options))


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


def store(instance: FakeInstance, tokens: list[int], new_tokens: int = 1, salt: str = "") -> list[int]:
    """Run a request until all it leaves is visible; its answer."""
    request = instance.engine.add(tokens, new_tokens=new_tokens, salt=salt)
    instance.engine.run()
    instance.settle()
    return request.answer


def hit(instance: FakeInstance, tokens: list[int], salt: str = "", load: bool = True) -> int:
    """Tokens that a request with this prompt restores; it leaves nothing."""
    request = instance.engine.add(tokens, salt=salt, options=RequestOptions(store=False, load=load))
    instance.engine.run()
    instance.settle()
    return sum(request.hits)


def expected(length: int) -> int:
    """Whole blocks, and one token left to compute."""
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("load_mode", LoadMode)
def test_a_hit_ends_at_a_block_and_leaves_a_token(open_instance: Any, load_mode: LoadMode) -> None:
    instance = open_instance(settings(load_mode=load_mode, quick_load_tokens=1000))
    store(instance, prompt(42 * BLOCK))
    for blocks in range(1, 41):
        for length in (blocks * BLOCK - 1, blocks * BLOCK, blocks * BLOCK + 1):
            assert hit(instance, prompt(length)) == expected(length), length
    instance.check_idle()


@pytest.mark.parametrize("shared", [0, 1, BLOCK, CHUNK - 1, CHUNK, 6 * BLOCK + 3, 3 * CHUNK])
def test_a_hit_ends_where_the_prompts_part(open_instance: Any, shared: int) -> None:
    instance = open_instance(settings())
    store(instance, prompt(5 * CHUNK))
    other = prompt(shared) + prompt(5 * CHUNK - shared, start=1000)
    assert hit(instance, other) == shared // BLOCK * BLOCK
    instance.check_idle()


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_short_and_exact_prompts_are_found_again(open_instance: Any, length: int) -> None:
    instance = open_instance(settings())
    store(instance, prompt(length))
    assert hit(instance, prompt(length)) == expected(length)
    assert hit(instance, prompt(length) + prompt(CHUNK, start=500)) == length // BLOCK * BLOCK
    instance.check_idle()


def test_a_full_chunk_takes_the_place_of_its_tail(open_instance: Any) -> None:
    instance = open_instance(settings())
    store(instance, prompt(CHUNK + 2 * BLOCK))
    assert instance.manager.stats().resident == 2
    store(instance, prompt(2 * CHUNK + 1))
    assert instance.manager.stats().resident == 2
    assert hit(instance, prompt(3 * CHUNK)) == 2 * CHUNK
    instance.check_idle()


def test_the_next_turn_of_a_conversation_finds_the_answer_too(open_instance: Any) -> None:
    instance = open_instance(settings())
    first = prompt(CHUNK + 3)
    answer = store(instance, first, new_tokens=2 * CHUNK)
    turn = [*first, *answer, *prompt(5, start=900)]
    known = len(first) + len(answer) - 1  # the last token of an answer is never computed
    assert hit(instance, turn) == known // BLOCK * BLOCK
    instance.check_idle()


def test_answers_are_left_alone_where_only_prompts_are_saved(open_instance: Any) -> None:
    chosen = settings()
    chosen.save_generated = False
    instance = open_instance(chosen)
    first = prompt(CHUNK + 3)
    answer = store(instance, first, new_tokens=2 * CHUNK)
    assert hit(instance, [*first, *answer]) == len(first) // BLOCK * BLOCK
    instance.check_idle()


def test_tenants_and_wishes_are_kept_apart(open_instance: Any) -> None:
    instance = open_instance(settings())
    store(instance, prompt(3 * CHUNK), salt="one")
    assert hit(instance, prompt(3 * CHUNK), salt="two") == 0
    assert hit(instance, prompt(3 * CHUNK)) == 0
    assert hit(instance, prompt(3 * CHUNK), salt="one", load=False) == 0
    assert hit(instance, prompt(3 * CHUNK), salt="one") == expected(3 * CHUNK)
    assert hit(instance, prompt(3 * CHUNK, start=700)) == 0  # no_store left nothing
    assert hit(instance, prompt(3 * CHUNK, start=700)) == 0
    instance.check_idle()


def test_only_what_the_engine_lacks_is_loaded(open_instance: Any) -> None:
    instance = open_instance(settings(prefix_cache=True))
    store(instance, prompt(4 * CHUNK))
    instance.engine.forget_prefixes()
    hit(instance, prompt(CHUNK + 2 * BLOCK + 1))
    local = CHUNK + 2 * BLOCK
    assert hit(instance, prompt(4 * CHUNK)) == expected(4 * CHUNK) - local
    assert hit(instance, prompt(4 * CHUNK)) == 0  # the engine holds all of it by now
    instance.check_idle()


def test_what_the_engine_found_by_itself_is_stored_too(open_instance: Any) -> None:
    instance = open_instance(settings(prefix_cache=True))
    request = instance.engine.add(prompt(2 * CHUNK), options=NO_STORE)
    instance.engine.run()
    assert not request.hits
    store(instance, prompt(3 * CHUNK))
    instance.engine.forget_prefixes()
    assert hit(instance, prompt(3 * CHUNK + 1)) == 3 * CHUNK
    instance.check_idle()


def test_a_waiting_request_is_matched_again_and_finds_what_came_meanwhile(open_instance: Any) -> None:
    instance = open_instance(settings())
    engine = instance.engine
    store(instance, prompt(CHUNK))
    waiting = engine.add(prompt(4 * CHUNK), options=NO_STORE)
    engine.admit = lambda request: request is not waiting
    for _ in range(5):
        engine.step()
        assert instance.manager.stats().leases == 1
    engine.waiting.remove(waiting)
    store_running = engine.add(prompt(3 * CHUNK))
    while store_running.id in engine.requests:
        engine.step()
    engine.waiting.append(waiting)
    instance.settle_saves()
    assert instance.manager.stats().leases == 1
    engine.admit = lambda _: True
    engine.run()
    instance.settle()
    assert waiting.hits == [3 * CHUNK]
    instance.check_idle()


def test_a_match_is_given_back_when_the_engine_has_it_all(open_instance: Any) -> None:
    instance = open_instance(settings(prefix_cache=True))
    engine = instance.engine
    store(instance, prompt(2 * CHUNK))
    engine.forget_prefixes()
    waiting = engine.add(prompt(2 * CHUNK), options=NO_STORE)
    engine.admit = lambda request: request is not waiting
    engine.step()
    assert instance.manager.stats().leases == 1
    engine.waiting.remove(waiting)
    other = engine.add(prompt(2 * CHUNK + 1), options=NO_STORE)
    while other.id in engine.requests:
        engine.step()
    wait_until(lambda: instance.manager.stats().leases == 1, 10.0, "a load without a result")
    engine.waiting.append(waiting)
    engine.step()
    assert instance.manager.stats().leases == 0
    engine.admit = lambda _: True
    engine.run()
    assert not waiting.hits
    instance.check_idle()


def test_a_hit_is_found_after_preemption(open_instance: Any) -> None:
    instance = open_instance(settings(step_tokens=20))
    engine = instance.engine
    request = engine.add(prompt(3 * CHUNK), new_tokens=20)
    while len(request.answer) < 10:
        engine.step()
    instance.settle_saves()
    engine.preempt(request)
    engine.run()
    instance.settle()
    assert request.preemptions == 1
    assert request.hits == [3 * CHUNK]
    assert len(request.answer) == 20
    instance.check_idle()


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("overlapping", [False, True])
def test_every_group_and_rank_gets_its_bytes_back(
    open_instance: Any, groups: int, world_size: int, overlapping: bool
) -> None:
    chosen = settings(overlapping=overlapping)
    chosen.groups = (FakeGroup(), FakeGroup(layers=3, fused=False, gap=8), FakeGroup(heads=1))[:groups]
    chosen.world_size = world_size
    chosen.verify = True
    instance = open_instance(chosen)
    store(instance, prompt(3 * CHUNK + 2 * BLOCK), new_tokens=7)
    assert hit(instance, prompt(4 * CHUNK)) == 3 * CHUNK + 2 * BLOCK
    for worker in instance.workers:
        seen = worker.statistics()
        assert seen.verified_blocks == groups * (3 * CHUNK // BLOCK + 2)
        assert seen.mismatched_blocks == 0
    instance.check_idle()


def test_new_weights_leave_nothing_of_the_old(open_instance: Any) -> None:
    """The engine itself checks each byte against the weights of its time."""
    instance = open_instance(settings(prefix_cache=True, step_tokens=20))
    engine = instance.engine
    store(instance, prompt(3 * CHUNK))
    engine.forget_prefixes()
    matched = engine.add(prompt(3 * CHUNK))
    engine.admit = lambda request: request is not matched
    engine.step()
    running = engine.add(prompt(3 * CHUNK, start=300), new_tokens=10)
    engine.waiting.rotate(1)
    while len(running.answer) < 2:
        engine.step()
    engine.reset()
    engine.admit = lambda _: True
    engine.run()
    instance.settle()
    assert matched.hits == []
    assert hit(instance, prompt(3 * CHUNK)) in (0, expected(3 * CHUNK))
    instance.check_idle()


def test_what_ran_through_a_clearing_is_not_stored(open_instance: Any) -> None:
    instance = open_instance(settings(step_tokens=20))
    engine = instance.engine
    running = engine.add(prompt(2 * CHUNK), new_tokens=2 * CHUNK)
    while len(running.answer) < 2:
        engine.step()
    instance.scheduler.clear()
    engine.run()
    instance.settle()
    assert running.complete
    assert instance.manager.stats().resident == 0
    instance.check_idle()


class PlanRecorder:
    """Keeps the plans that a scheduler makes."""

    def __init__(self, scheduler: SchedulerRuntime) -> None:
        self._scheduler = scheduler
        self.plans: list[StepPlan] = []

    def step_plan(self, running: Sequence[str]) -> StepPlan:
        self.plans.append(self._scheduler.step_plan(running))
        return self.plans[-1]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)


@pytest.mark.parametrize(
    ("quick", "others", "expected_loads"),
    [(1000, 0, (1, 0)), (CHUNK, 0, (0, 1)), (1000, 1, (0, 1))],
    ids=["short and alone", "long", "beside another request"],
)
def test_a_load_goes_in_front_only_when_it_delays_nobody(
    open_instance: Any, quick: int, others: int, expected_loads: tuple[int, int]
) -> None:
    instance = open_instance(settings(load_mode=LoadMode.AUTO, quick_load_tokens=quick))
    store(instance, prompt(5 * CHUNK))
    for number in range(others):
        instance.engine.add(prompt(CHUNK, start=1000 * (number + 1)), new_tokens=50)
        instance.engine.step()
    recorder = PlanRecorder(instance.scheduler)
    instance.engine.scheduler = recorder
    instance.engine.add(prompt(5 * CHUNK), new_tokens=1)
    instance.engine.step()
    assert (len(recorder.plans[0].sync_loads), len(recorder.plans[0].loads)) == expected_loads
    instance.engine.run()
    instance.settle()
    instance.check_idle()
