"""A fake engine over the two sides that a real configuration opens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from attrs import frozen

from kvferry.runtime import (
    EngineDescription,
    Prepared,
    SavingOptions,
    SchedulerRuntime,
    namespace,
    new_chain_factory,
    open_scheduler,
    open_worker,
)
from kvferry.testing.fake_engine import EngineSettings, FakeEngine
from kvferry.testing.fake_instance import fake_geometry, wait_until
from kvferry.testing.fake_memory import FakeGroup, FakeMemory


@frozen
class ConfiguredEngine:
    """What stands for an engine, the scheduler side it drives, and what both sides were told of it."""

    engine: FakeEngine
    scheduler: SchedulerRuntime
    description: EngineDescription


@contextmanager
def open_configured_engine(
    prepared: Prepared,
    settings: EngineSettings,
    *,
    engine_id: str,
    environment: Mapping[str, str],
) -> Iterator[ConfiguredEngine]:
    """Open both sides for one rank with one plain group, as a connector does, and close them again.

    The worker is known then and a part of its tier is ready.
    """
    group = FakeGroup()
    memory = FakeMemory((group,), blocks=settings.pool_blocks(1), block_tokens=settings.block_tokens, rank=0)
    groups = memory.engine_groups()
    description = EngineDescription(
        engine_id=engine_id,
        world_size=1,
        groups=memory.shapes,
        block_bytes=tuple(each.block_bytes for each in groups),
    )
    geometry = fake_geometry((group,), prepared.config.chunk_tokens)
    opening = (prepared.config, prepared.plugins, description, SavingOptions(), environment)
    space = namespace(prepared.config, "fake", "1", geometry)
    with ExitStack() as stack:
        scheduler = open_scheduler(*opening, space)
        stack.callback(scheduler.close)
        worker = open_worker(*opening, rank=0, groups=groups)
        stack.callback(worker.close)
        new_chain = new_chain_factory(space)
        engine = FakeEngine(settings, scheduler, [worker], [memory], new_chain)
        wait_until(
            lambda: scheduler.workers_ready() and scheduler.statistics()[1].capacity > 0,
            10.0,
            "a worker that never became ready",
        )
        yield ConfiguredEngine(engine, scheduler, description)
