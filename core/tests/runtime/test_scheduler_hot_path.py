"""What the scheduler's step costs others: no hook calls, and the lock only for moments."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvferry.api import HostEnvironment
from kvferry.config import ConfigSources
from kvferry.control.lru import LRU
from kvferry.control.manager import SLICE_KEYS, CacheManager
from kvferry.control.outcomes import ChunkWrite
from kvferry.runtime import (
    EngineDescription,
    RequestOptions,
    RequestState,
    SavingOptions,
    SchedulerRuntime,
    open_scheduler,
    open_worker,
)
from kvferry.runtime.address import MeetingPlace
from kvferry.runtime.grain import GroupShape
from kvferry.runtime.requests import LoadMode
from kvferry.runtime.startup import read
from kvferry.testing.fake_distributions import distributions_in, fake_distribution, importable
from kvferry.testing.fake_engine import EngineSettings, FakeEngine
from kvferry.testing.fake_instance import InstanceSettings, key_chains, wait_until
from kvferry.testing.fake_memory import FakeMemory
from kvferry.testing.leaks import LeakGuard

SETTINGS = InstanceSettings()
BLOCK = SETTINGS.engine.block_tokens
CHUNK = SETTINGS.chunk_blocks * BLOCK
CHUNKS = 2000
NEW_CHAIN = key_chains(SETTINGS)
SPACE = NEW_CHAIN("", None).namespace


class WaitingClock:
    """The time. Whoever asks for it the ``stop_at``-th time from now is held up by ``on_stop``."""

    def __init__(self) -> None:
        self.asked = 0
        self.stop_at = -1
        self.on_stop: Callable[[], object] = lambda: None

    def __call__(self) -> float:
        self.asked += 1
        if self.asked == self.stop_at:
            self.on_stop()
        return time.monotonic()


def long_request(manager: CacheManager) -> RequestState:
    """A request of 2,000 chunks, all of which are resident already."""
    tokens = list(range(1, CHUNKS * CHUNK + 2))
    chain = NEW_CHAIN("", None)
    chain.extend(tokens)
    writes = [
        ChunkWrite(digest=key, parent=chain.keys[at - 1] if at else None, depth=at, tokens=CHUNK)
        for at, key in enumerate(chain.keys)
    ]
    granted = manager.reserve("somebody", "", writes, now=0.0)
    assert granted.id is not None
    manager.complete(granted.id, range(len(writes)))
    return RequestState(
        id="long",
        tokens=tokens,
        prompt_tokens=len(tokens),
        chain=NEW_CHAIN("", None),
        salt="",
        options=RequestOptions(),
    )


@pytest.fixture
def clock() -> WaitingClock:
    return WaitingClock()


@pytest.fixture
def manager(leak_guard: LeakGuard) -> CacheManager:
    manager = CacheManager(
        capacity=CHUNKS,
        chunk_tokens=CHUNK,
        block_tokens=BLOCK,
        policy=LRU(),
        lease_seconds=60.0,
        write_seconds=60.0,
    )
    manager.grow(CHUNKS)
    return leak_guard.watch(manager)


@pytest.fixture
def runtime(
    folder: Path, manager: CacheManager, clock: WaitingClock, raw_worker: Any
) -> Iterator[SchedulerRuntime]:
    place = MeetingPlace("hot", str(folder), {})
    runtime = SchedulerRuntime(
        manager,
        place,
        world_size=1,
        fingerprint="fake",
        chunk_tokens=CHUNK,
        groups=(GroupShape(BLOCK),),
        load_mode=LoadMode.ASYNC,
        save_generated=True,
        clock=clock,
    )
    runtime.open()
    raw_worker(place)
    wait_until(runtime.workers_ready, 10.0, "no worker")
    yield runtime
    runtime.close()


def test_a_long_match_lets_a_waiting_thread_in_between_its_slices(
    runtime: SchedulerRuntime, manager: CacheManager, clock: WaitingClock
) -> None:
    state = long_request(manager)
    runtime.add_request(state)
    state.extend_chain(len(state.tokens))
    about_to_ask = threading.Event()
    order: list[str] = []

    def ask() -> None:
        about_to_ask.set()
        runtime.statistics()
        order.append("asked")

    other = threading.Thread(target=ask)

    def hold_up() -> None:
        other.start()
        assert about_to_ask.wait(10.0)
        time.sleep(0.05)  # lets it reach the lock, which the match holds

    clock.stop_at = clock.asked + 2
    clock.on_stop = hold_up
    asked_before = clock.asked
    assert runtime.match("long", 0, 0, len(state.tokens)) == CHUNKS * CHUNK
    order.append("matched")
    other.join()
    assert clock.asked - asked_before > CHUNKS // SLICE_KEYS
    assert order == ["asked", "matched"]
    runtime.finished("long", [[]], 0, 0)


def test_no_hook_is_called_in_ten_thousand_operations(folder: Path) -> None:
    site = folder / "site"
    site.mkdir()
    fake_distribution(
        site,
        "acme-memory",
        entry_points={"memory": "acme_memory"},
        source={"acme_memory.py": PLUGIN},
    )
    config_file = folder / "kvferry.yaml"
    config_file.write_text(CONFIG)
    with importable(site):
        reading = read(
            ConfigSources(file=config_file, environment={}, overrides={}),
            distributions=lambda: distributions_in(site),
        )
    assert reading.config is not None, reading.config_faults
    config, plugins = reading.config, reading.plugins
    hooks: list[str] = []
    undo = plugins.monitor_hook_calls(hooks.append)
    plugins.facts(HostEnvironment())
    assert hooks, "the monitor sees nothing"

    memory = FakeMemory(SETTINGS.groups, blocks=65, block_tokens=BLOCK)
    description = EngineDescription(
        engine_id="counted",
        world_size=1,
        groups=(GroupShape(BLOCK),),
        block_bytes=(memory.engine_groups()[0].block_bytes,),
    )
    environment = {"XDG_RUNTIME_DIR": str(folder)}
    scheduler = open_scheduler(config, plugins, description, SavingOptions(), environment, SPACE)
    worker = open_worker(
        config,
        plugins,
        description,
        SavingOptions(),
        environment,
        rank=0,
        groups=memory.engine_groups(),
    )
    try:
        wait_until(lambda: scheduler.statistics()[1].capacity > 0, 10.0, "no worker")
        hooks.clear()
        settings = EngineSettings(prefix_cache=False)
        engine = FakeEngine(settings, scheduler, [worker], [memory], NEW_CHAIN)
        counted = Counted(scheduler)
        engine.scheduler = counted  # type: ignore[assignment]
        turn = 0
        while counted.calls < 10_000:
            turn += 1
            for start in (0, 0, 1000 * turn):
                engine.add(range(start, start + 100), new_tokens=20)
            engine.run()
        wait_until(lambda: scheduler.statistics()[1].reservations == 0, 10.0, "saves without an end")
        assert scheduler.statistics()[0].loaded_tokens > 0
        assert hooks == []
    finally:
        undo()
        worker.close()
        scheduler.close()


class Counted:
    """Counts the calls of an object's methods."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += 1
        return getattr(self._inner, name)


PLUGIN = """
    from kvferry.api import BackendCapabilities, BackendSpec, Fact, Manifest, hookimpl

    MANIFEST = Manifest(name="memory", api=">=1.0,<2", rule_prefix="MEM")

    @hookimpl
    def kvferry_backends():
        return [
            BackendSpec(
                name="memory",
                factory="kvferry.testing.backends:MemoryBackend",
                options="kvferry.testing.backends:MemoryOptions",
                capabilities=BackendCapabilities(addressable=True),
            )
        ]

    @hookimpl
    def kvferry_facts(env):
        return [Fact(path="memory.there", value=True, origin="probe")]
"""
CONFIG = """
plugins: [memory]
chunk_tokens: 16
tiers:
  memory: {use: memory, capacity: 64KiB}
"""
