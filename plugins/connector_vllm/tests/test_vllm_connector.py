"""The parts of the connector that need vLLM but no engine."""

from __future__ import annotations

import inspect
import pickle

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    supports_hma,
)

from kvferry.runtime import StepPlan
from kvferry_connector_vllm.connector import (
    KVFerryConnector,
    KVFerryMetadata,
    KVFerryWorkerMetadata,
)
from kvferry_connector_vllm.register import NAME, register
from kvferry_connector_vllm.stats import COUNTERS, GAUGES, KVFerryPromMetrics, KVFerryStats


def test_registering_again_changes_nothing() -> None:
    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name(NAME) is KVFerryConnector


def test_the_constructor_has_the_names_that_vllm_checks() -> None:
    parameters = inspect.signature(KVFerryConnector.__init__).parameters
    assert list(parameters)[1:] == ["vllm_config", "role", "kv_cache_config"]


def test_every_abstract_method_is_there_and_no_override_has_a_stray_name() -> None:
    assert not KVFerryConnector.__abstractmethods__
    public = {name for name in vars(KVFerryConnector) if not name.startswith("_")}
    known = set(dir(KVConnectorBase_V1)) | {"request_finished_all_groups"}
    assert public <= known


def test_the_hybrid_allocator_may_stay_on() -> None:
    assert supports_hma(KVFerryConnector)


def test_step_metadata_survives_the_way_to_a_worker() -> None:
    metadata = KVFerryMetadata(StepPlan(flush=("r",), idle=True), {0: 1})
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_worker_metadata_of_all_ranks_is_kept() -> None:
    first, second = KVFerryWorkerMetadata({0: 1}), KVFerryWorkerMetadata({1: 2})
    assert first.aggregate(second).failures == {0: 1, 1: 2}


def test_statistics_add_up_and_gauges_take_the_latest() -> None:
    first = KVFerryStats(data={"hit_tokens": 10, "resident_chunks": 1})
    second = KVFerryStats(data={"hit_tokens": 5, "saved_bytes": 7, "resident_chunks": 3})
    total = first.aggregate(second)
    assert total.data == {"hit_tokens": 15, "saved_bytes": 7, "resident_chunks": 3}
    assert KVFerryStats().is_empty()
    # vLLM drops empty statistics, and after a clear only gauges have changed.
    assert not KVFerryStats(data={"resident_chunks": 0}).is_empty()


def test_statistics_survive_serialisation() -> None:
    sent = KVFerryStats(data={"hit_tokens": 3})
    assert KVFerryConnector.build_kv_connector_stats(sent.to_dict()) == sent


def test_prometheus_sees_every_name_once_per_engine() -> None:
    registry = CollectorRegistry()

    def kind(metric: type) -> object:
        return lambda **arguments: metric(**arguments, registry=registry)

    metrics = KVFerryPromMetrics(
        type("Config", (), {"kv_transfer_config": None})(),
        {Counter: kind(Counter), Gauge: kind(Gauge), Histogram: kind(Histogram)},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )
    metrics.observe({"hit_tokens": 4, "free_slots": 9}, engine_idx=1)
    metrics.observe({"hit_tokens": 2, "free_slots": 8}, engine_idx=1)
    text = generate_latest(registry).decode()
    assert 'kvferry:hit_tokens_total{engine="1"} 6.0' in text
    assert 'kvferry:free_slots{engine="1"} 8.0' in text
    assert 'kvferry:hit_tokens_total{engine="0"} 0.0' in text
    assert all(f"kvferry:{name}" in text for name in [*COUNTERS, *GAUGES])
