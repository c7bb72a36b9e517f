"""Numbers of tiers below the first on their way from both runtimes to vLLM's metrics and log."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: make test installs it")
pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402

from kvferry.api import ChunkKey  # noqa: E402
from kvferry.testing.fake_engine import EngineSettings  # noqa: E402
from kvferry.testing.fake_instance import (  # noqa: E402
    FakeInstance,
    InstanceSettings,
    LowerFake,
    open_fake_instance,
)
from kvferry.testing.keyed_backends import Record, ShelfBackend  # noqa: E402
from kvferry_connector_vllm.scheduler_role import SchedulerRole  # noqa: E402
from kvferry_connector_vllm.startup import Startup  # noqa: E402
from kvferry_connector_vllm.stats import KVFerryStats  # noqa: E402
from kvferry_connector_vllm.worker_role import WorkerRole  # noqa: E402

CHUNK = 16
BLOCKS = 9
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
CACHES = KVCacheConfig(BLOCKS, [], [KVCacheGroupSpec(["layer"], SPEC)])
VLLM: Any = SimpleNamespace(
    parallel_config=SimpleNamespace(rank=0), kv_events_config=None, kv_transfer_config=None
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="kf") as name:
        yield Path(name)


def serve(instance: FakeInstance, chunks: int) -> None:
    instance.engine.add(list(range(chunks * CHUNK + 1)))
    instance.engine.run()
    instance.settle_lower()


def roles(monkeypatch: pytest.MonkeyPatch, instance: FakeInstance) -> tuple[SchedulerRole, WorkerRole]:
    """Both halves of the connector around the sides of a fake engine."""
    monkeypatch.setattr(Startup, "check", lambda _startup: None)
    monkeypatch.setattr(Startup, "open_scheduler", lambda _startup: instance.scheduler)
    monkeypatch.setattr(Startup, "open_worker", lambda _startup, _groups: instance.workers[0])
    scheduler, worker = SchedulerRole(VLLM, CACHES), WorkerRole(VLLM, CACHES)
    scheduler.open()
    worker.register({"layer": torch.zeros(BLOCKS, 2, 16, 16, dtype=torch.bfloat16)})
    return scheduler, worker


def both(scheduler: SchedulerRole, worker: WorkerRole) -> KVFerryStats:
    stats = KVFerryStats()
    for role in (scheduler, worker):
        told = role.take_stats()
        assert told is not None
        stats.aggregate(told)
    return stats


def test_both_halves_tell_of_every_tier(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf: dict[ChunkKey, Record] = {}
    settings = InstanceSettings(
        engine=EngineSettings(prefix_cache=False),
        lower=(LowerFake(make_backend=lambda _rank: ShelfBackend(shelf, 1 << 30), name="ssd"),),
    )
    with open_fake_instance(folder, settings) as instance:
        scheduler, worker = roles(monkeypatch, instance)
        both(scheduler, worker)
        serve(instance, 3)
        with instance.scheduler._lock:
            instance.manager.clear()
        serve(instance, 3)
        line = both(scheduler, worker).reduce()
    stored = sum(len(record.value) for record in shelf.values())
    assert (line["ssd.stored"], line["ssd.fetched"], line["ssd.chunks"], line["ssd.open"]) == (3, 3, 3, 1)
    assert (line["ssd.written_bytes"], line["ssd.read_bytes"]) == (stored, stored)
    assert line["risen_tokens"] == line["hit_tokens"] == 3 * CHUNK
    assert line["waits"] == 1


def test_without_such_tiers_nobody_tells_of_any(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_fake_instance(folder, InstanceSettings()) as instance:
        scheduler, worker = roles(monkeypatch, instance)
        serve(instance, 3)
        stats = both(scheduler, worker)
    assert set(stats.data) == {"scheduler", "rank 0"}
    assert not any("ris" in name or "wait" in name for name in stats.data["scheduler"]["now"])
