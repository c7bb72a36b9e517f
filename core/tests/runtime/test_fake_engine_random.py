"""Random lives of an engine: whatever happens, no answer is wrong and nothing is left over."""

from __future__ import annotations

import tempfile
from pathlib import Path

from attrs import frozen
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from kvferry.data.copy import NumpyCopier, SpanCopier
from kvferry.data.plans import Direction
from kvferry.runtime import LoadMode, RequestOptions
from kvferry.testing.backends import MemoryBackend
from kvferry.testing.copiers import FaultyCopier, SlowCopier
from kvferry.testing.fake_engine import EngineSettings, FakeEngine
from kvferry.testing.fake_instance import (
    FakeInstance,
    InstanceSettings,
    open_fake_instance,
    wait_until,
)
from kvferry.testing.fake_memory import FakeGroup
from kvferry.testing.fake_requests import FakeRequest, Status

BLOCK = 4
CHUNK = 16

LENGTHS = st.one_of(
    st.sampled_from([2 * CHUNK, 3 * CHUNK, 3 * CHUNK + 1, 4 * CHUNK, 4 * CHUNK - BLOCK]),
    st.sampled_from([1, 3, BLOCK, BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1]),
    st.integers(1, 70),
)


@frozen(kw_only=True)
class Add:
    family: int
    shared: int
    own: int
    length: int
    new_tokens: int
    salt: str
    store: bool
    load: bool

    def prompt(self) -> list[int]:
        """Begins like every prompt of its family and then goes its own way."""
        return [
            (self.family * 1000 if at < self.shared else 100_000 + self.own * 1000) + at
            for at in range(self.length)
        ]


@frozen
class Step:
    count: int


@frozen
class Abort:
    which: int


@frozen
class Preempt:
    which: int


@frozen
class Deny:
    """Allocations of waiting requests fail for some steps, so they are matched again."""

    steps: int


@frozen
class Lend:
    """Another connector loads into so many free blocks."""

    blocks: int


@frozen
class ForgetPrefixes:
    """The engine drops its own prefix cache."""


@frozen
class Reset:
    """New weights, as soon as no load is under way."""


@frozen
class Settle:
    """All results arrive before anything else happens."""


Action = Add | Step | Abort | Preempt | Deny | Lend | ForgetPrefixes | Reset | Settle

ADDS = st.builds(
    Add,
    family=st.sampled_from([0, 0, 0, 1]),
    shared=LENGTHS,
    own=st.integers(0, 3),
    length=LENGTHS,
    new_tokens=st.integers(1, 20),
    salt=st.sampled_from(["", "", "", "tenant"]),
    store=st.sampled_from([True, True, True, False]),
    load=st.sampled_from([True, True, True, False]),
)
# A round: some requests come, the engine works, and something happens to them.
EVENTS = st.one_of(
    st.builds(Step, st.integers(1, 6)),
    st.builds(Abort, st.integers(0, 5)),
    st.builds(Preempt, st.integers(0, 5)),
    st.builds(Deny, st.integers(1, 3)),
    st.builds(Lend, st.integers(1, 12)),
    st.just(ForgetPrefixes()),
    st.just(Reset()),
    st.just(Settle()),
)
ROUNDS = st.tuples(
    st.lists(ADDS, min_size=1, max_size=3),
    st.builds(Step, st.integers(1, 8)),
    st.lists(EVENTS, max_size=4),
).map(lambda round_: [*round_[0], round_[1], *round_[2]])
SCRIPTS = st.lists(ROUNDS, min_size=3, max_size=8).map(lambda rounds: [a for r in rounds for a in r])


@frozen(kw_only=True)
class Faults:
    calls: frozenset[int]
    slots: frozenset[int]
    loads_only: bool
    seconds: float


FAULTS = st.builds(
    Faults,
    calls=st.frozensets(st.integers(1, 12), max_size=4),
    slots=st.frozensets(st.integers(0, 8), max_size=2),
    loads_only=st.booleans(),
    seconds=st.sampled_from([0.0, 0.0, 0.0005]),
)
GROUPS = {
    "fused": (FakeGroup(),),
    "split": (FakeGroup(fused=False, gap=12),),
    "latent": (FakeGroup(heads=1, head_bytes=11, latent=True, gap=3),),
    "three": (FakeGroup(layers=1), FakeGroup(layers=2, heads=1, fused=False), FakeGroup(gap=4)),
    "window": (FakeGroup(window=10),),
    "hybrid": (FakeGroup(), FakeGroup(window=9, fused=False), FakeGroup(layers=1, window=23)),
    "latent beside a window": (FakeGroup(heads=1, latent=True), FakeGroup(heads=3, window=12)),
    "other blocks": (FakeGroup(heads=1), FakeGroup(window=13, block_tokens=8)),
    "windows of other blocks": (
        FakeGroup(window=6, gap=1),
        FakeGroup(window=31, block_tokens=8, fused=False),
        FakeGroup(window=1),
    ),
}


def by_request(groups: tuple[FakeGroup, ...]) -> bool:
    """What a load in front of a forward pass failed to bring could not be reported."""
    return len(groups) > 1 or groups[0].window is not None


@st.composite
def instances(draw: st.DrawFn) -> InstanceSettings:
    groups = GROUPS[draw(st.sampled_from(sorted(GROUPS)))]
    return InstanceSettings(
        engine=EngineSettings(
            blocks=draw(st.sampled_from([24, 32, 64])),
            block_tokens=BLOCK,
            step_tokens=draw(st.sampled_from([7, 16, 40, 200])),
            running=draw(st.integers(1, 4)),
            prefix_cache=draw(st.booleans()),
            overlapping=draw(st.booleans()),
            reuse_at_once=draw(st.booleans()),
            load_mode=LoadMode.ASYNC if by_request(groups) else draw(st.sampled_from(LoadMode)),
            quick_load_tokens=draw(st.sampled_from([0, 16, 1000])),
        ),
        groups=groups,
        world_size=draw(st.sampled_from([1, 1, 2])),
        slots=draw(st.sampled_from([2, 5, 12, 64])),
        save_generated=draw(st.sampled_from([True, True, False])),
        verify=draw(st.booleans()),
    )


def loading_after_a_step(engine: FakeEngine) -> bool:
    if engine.loading:
        engine.step()
    return bool(engine.loading)


def play(instance: FakeInstance, script: list[Action]) -> list[FakeRequest]:
    engine = instance.engine
    made: list[FakeRequest] = []
    denied = [0]
    engine.admit = lambda _: denied[0] <= 0
    for action in script:
        if isinstance(action, Add):
            made.append(
                engine.add(
                    action.prompt(),
                    new_tokens=action.new_tokens,
                    salt=action.salt,
                    options=RequestOptions(store=action.store, load=action.load),
                )
            )
        elif isinstance(action, Step):
            for _ in range(action.count):
                engine.step()
                denied[0] -= 1
        elif isinstance(action, Abort) and made:
            engine.abort(made[action.which % len(made)])
        elif isinstance(action, Preempt) and engine.running:
            engine.preempt(engine.running[action.which % len(engine.running)])
        elif isinstance(action, Deny):
            denied[0] = action.steps
        elif isinstance(action, Lend):
            engine.take_back()
            engine.lend(action.blocks)
        elif isinstance(action, ForgetPrefixes):
            engine.forget_prefixes()
        elif isinstance(action, Reset):
            denied[0] = 0
            wait_until(lambda: not loading_after_a_step(engine), 10.0, "loads without an end")
            engine.reset()
        elif isinstance(action, Settle):
            instance.settle_saves()
    denied[0] = 0
    engine.run()
    instance.settle()
    instance.check_idle()
    return made


def note_events(instance: FakeInstance, made: list[FakeRequest]) -> None:
    """For ``--hypothesis-show-statistics``: whether the lives were rich enough."""
    totals, manager = instance.scheduler.statistics()
    for name, seen in (
        ("a hit", totals.loaded_tokens > 0),
        ("a failed load", totals.failed_loads > 0),
        ("a failed load that the engine heard of", instance.engine.failures > 0),
        ("a failed save", totals.failed_saves > 0),
        ("an eviction", manager.evictions > 0),
        ("a refused save", totals.refused_saves > 0),
        ("a preemption", any(request.preemptions for request in made)),
        ("an abort", any(not request.complete for request in made)),
        ("two loads of one request", any(len(request.hits) > 1 for request in made)),
    ):
        if seen:
            event(name)


@settings(
    max_examples=60,
    phases=(Phase.explicit, Phase.generate),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(instances(), SCRIPTS, FAULTS)
def test_no_answer_is_wrong_and_nothing_is_left_over(
    instance_settings: InstanceSettings, script: list[Action], faults: Faults
) -> None:
    def make_copier(rank: int, backend: MemoryBackend, slot_bytes: int) -> SpanCopier:
        inner: SpanCopier = SlowCopier(NumpyCopier(), faults.seconds)
        if rank != instance_settings.world_size - 1:
            return inner
        copier = FaultyCopier(inner, backend.opened, slot_bytes)
        copier.fail_calls = set(faults.calls)
        copier.fail_slots = set(faults.slots)
        if faults.loads_only:
            copier.directions = {Direction.LOAD}
        return copier

    with (
        tempfile.TemporaryDirectory(prefix="kf") as folder,
        open_fake_instance(Path(folder), instance_settings, make_copier=make_copier) as instance,
    ):
        made = play(instance, script)
        for request in made:
            assert request.status is Status.FINISHED
        note_events(instance, made)
