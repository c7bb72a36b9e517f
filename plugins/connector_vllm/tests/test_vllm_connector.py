"""The parts of the connector that need vLLM but no engine."""

from __future__ import annotations

import inspect
import pickle
from typing import Any

import attrs
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="vLLM is not installed: make test installs it")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    supports_hma,
)

from kvferry.api import PeerId
from kvferry.runtime import LowerTierReport, SharingState, SharingStatistics, StepPlan, TierStatistics
from kvferry.runtime.sharing_statistics import BORROW_COUNTS, LEND_COUNTS, PeerState
from kvferry_connector_vllm.connector import (
    KVFerryConnector,
    KVFerryMetadata,
    KVFerryWorkerMetadata,
)
from kvferry_connector_vllm.register import NAME, register
from kvferry_connector_vllm.stats import (
    COUNTERS,
    GAUGES,
    LOWER_COUNTERS,
    LOWER_GAUGES,
    KVFerryPromMetrics,
    KVFerryStats,
    Totals,
    scheduler_lower,
    scheduler_sharing,
    tier_of,
    worker_lower,
    worker_sharing,
)
from kvferry_connector_vllm.versions import FAILURES_BY_REQUEST


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
    if not FAILURES_BY_REQUEST:
        known |= {"get_transfer_results", "requires_kv_delivery"}
    assert public <= known


def test_the_hybrid_allocator_may_stay_on() -> None:
    assert supports_hma(KVFerryConnector)


def test_step_metadata_survives_the_way_to_a_worker() -> None:
    metadata = KVFerryMetadata(StepPlan(flush=("r",), idle=True), {0: 1})
    assert pickle.loads(pickle.dumps(metadata)) == metadata


def test_worker_metadata_of_all_ranks_is_kept() -> None:
    first, second = KVFerryWorkerMetadata({0: 1}), KVFerryWorkerMetadata({1: 2})
    assert first.aggregate(second).failures == {0: 1, 1: 2}


def test_an_interval_shows_what_was_added_by_all_sources_and_the_latest_gauges() -> None:
    scheduler, worker = Totals("scheduler"), Totals("rank 0")
    scheduler.report({"hit_tokens": 100, "resident_chunks": 9})  # an earlier interval
    reports = [
        scheduler.report({"hit_tokens": 110, "resident_chunks": 1}),
        worker.report({"saved_bytes": 7}),
        scheduler.report({"hit_tokens": 115, "resident_chunks": 3}),
    ]
    interval = KVFerryStats()
    for report in reports:
        interval.aggregate(report)
    assert interval.reduce() == {"hit_tokens": 15, "saved_bytes": 7, "resident_chunks": 3}


def test_ranks_are_added_up() -> None:
    total = Totals("rank 0").report({"saved_bytes": 3}).aggregate(Totals("rank 1").report({"saved_bytes": 4}))
    assert total.reduce() == {"saved_bytes": 7}


def lower_report(**numbers: Any) -> LowerTierReport:
    names = attrs.fields_dict(LowerTierReport)
    texts = {"name": "ssd", "health": "open", "reason": ""}
    return LowerTierReport(**{**dict.fromkeys(names, 0), **texts, **numbers})


def test_every_number_of_a_tier_below_the_first_is_told_by_somebody() -> None:
    told = {**scheduler_lower(lower_report()), **worker_lower(TierStatistics())}
    assert set(told) == {*LOWER_COUNTERS, *LOWER_GAUGES}


def sharing_statistics(**numbers: Any) -> SharingStatistics:
    shown: dict[str, Any] = {
        "id": PeerId("a", bytes(16)),
        "channel": "tcp",
        "state": SharingState.OPEN,
        "reason": "",
        "peers": (),
        "borrowed_tokens": 0,
        "loans": 0,
        "borrowed": dict.fromkeys(BORROW_COUNTS, 0),
        "leases": 0,
        "slots": 0,
        "lent": dict.fromkeys(LEND_COUNTS, 0),
    }
    return SharingStatistics(**{**shown, **numbers})


def test_every_number_of_other_instances_is_told_by_somebody() -> None:
    told = {**scheduler_sharing(sharing_statistics()), **worker_sharing(TierStatistics())}
    about_others = ("borrow", "lend", "peers", "sharing")
    assert set(told) == {name for name in {**COUNTERS, **GAUGES} if name.startswith(about_others)}
    assert {f"borrow_{name}" for name in BORROW_COUNTS} | {f"lend_{name}" for name in LEND_COUNTS} <= set(
        told
    )


def test_numbers_of_other_instances_reach_the_log_and_ranks_are_added_up() -> None:
    now = sharing_statistics(
        peers=tuple(
            PeerState(id=PeerId(name, bytes(16)), standing=standing, reason="")
            for name, standing in (("b", "agreed"), ("c", "paused"), ("d", "agreed"), ("e", "greeting"))
        ),
        borrowed_tokens=512,
        loans=2,
        borrowed={"fetched": 3, "a count that is new": 1},
        lent={"done": 4},
        slots=6,
    )
    stats = Totals("scheduler").report(scheduler_sharing(now))
    for rank in range(2):
        read = TierStatistics(read_bytes=100 + rank, read_seconds=0.25)
        stats.aggregate(Totals(f"rank {rank}").report(worker_sharing(read)))
    assert stats.reduce() == {
        "borrowed_tokens": 512,
        "borrowed_bytes": 201,
        "borrowed_seconds": 0.5,
        "borrow_loans": 2,
        "borrow_fetched": 3,
        "lend_done": 4,
        "lend_slots": 6,
        "peers_agreed": 2,
        "peers_paused": 1,
        "sharing_open": 1,
    }
    retired = scheduler_sharing(sharing_statistics(state=SharingState.RETIRED))
    assert retired["sharing_open"] == 0


def test_tiers_below_the_first_are_told_apart_and_ranks_are_added_up() -> None:
    scheduler = Totals("scheduler").report(
        {"hit_tokens": 5},
        {
            "ssd": scheduler_lower(lower_report(fetched=3, capacity=9)),
            "far": scheduler_lower(lower_report(name="far", fetched=4, health="paused")),
        },
    )
    for rank in range(2):
        written = TierStatistics(written_bytes=100 + rank, write_seconds=0.25)
        scheduler.aggregate(Totals(f"rank {rank}").report({}, {"ssd": worker_lower(written)}))
    assert scheduler.reduce() == {
        "hit_tokens": 5,
        "ssd.fetched": 3,
        "ssd.capacity": 9,
        "ssd.open": 1,
        "ssd.written_bytes": 201,
        "ssd.write_seconds": 0.5,
        "far.fetched": 4,
    }


def test_prometheus_has_a_series_for_each_tier_below_the_first_and_shows_what_is_0() -> None:
    registry = CollectorRegistry()
    metrics = prometheus(registry)
    source = Totals("scheduler")

    def observe(health: str, **numbers: int) -> None:
        lower = {"ssd": scheduler_lower(lower_report(health=health, **numbers))}
        metrics.observe(source.report({"risen_tokens": 7}, lower).data, engine_idx=1)

    def value(name: str) -> float | None:
        return registry.get_sample_value(f"kvferry:{name}", {"engine": "1", "tier": "ssd"})

    observe("open", stored=3, chunks=3)
    assert (value("lower_stored_total"), value("lower_chunks"), value("lower_open")) == (3, 3, 1)
    assert value("lower_failures_total") == 0
    observe("closing", stored=5, failures=1)
    assert (value("lower_stored_total"), value("lower_chunks"), value("lower_open")) == (5, 0, 0)
    assert value("lower_failures_total") == 1
    assert registry.get_sample_value("kvferry:risen_tokens_total", {"engine": "1"}) == 7
    assert registry.get_sample_value("kvferry:lower_stored_total", {"engine": "0", "tier": "ssd"}) is None


@given(tier=st.text(min_size=1))
def test_the_tier_of_a_source_is_the_one_that_it_is_about(tier: str) -> None:
    data = Totals("rank 3").report({"saved_bytes": 1}, {tier: {"lower_read_bytes": 2}}).data
    assert sorted(map(tier_of, data)) == ["", tier]


def test_an_interval_without_a_change_is_empty_and_a_changed_gauge_is_a_change() -> None:
    totals = Totals("scheduler")
    assert KVFerryStats().is_empty()
    assert not totals.report({"hit_tokens": 3, "resident_chunks": 2}).is_empty()
    assert totals.report({"hit_tokens": 3, "resident_chunks": 2}).is_empty()
    # After a clear only gauges have changed.
    assert not totals.report({"hit_tokens": 3, "resident_chunks": 0}).is_empty()


def test_statistics_survive_serialisation() -> None:
    sent = Totals("scheduler").report({"hit_tokens": 3})
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(sent.data))
    assert KVFerryConnector.build_kv_connector_stats(payload) == sent


def prometheus(registry: CollectorRegistry) -> KVFerryPromMetrics:
    """What the front end of an instance with two engines builds."""

    def kind(metric: type) -> object:
        return lambda **arguments: metric(**arguments, registry=registry)

    return KVFerryPromMetrics(
        type("Config", (), {"kv_transfer_config": None})(),
        {Counter: kind(Counter), Gauge: kind(Gauge), Histogram: kind(Histogram)},
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )


def test_prometheus_sees_every_name_once_per_engine() -> None:
    registry = CollectorRegistry()
    metrics = prometheus(registry)
    first, second = Totals("scheduler"), Totals("scheduler")
    metrics.observe(first.report({"hit_tokens": 4, "free_slots": 9}).data, engine_idx=1)
    metrics.observe(first.report({"hit_tokens": 6, "free_slots": 8}).data, engine_idx=1)
    metrics.observe(second.report({"hit_tokens": 5, "free_slots": 7}).data, engine_idx=0)
    text = generate_latest(registry).decode()
    assert 'kvferry:hit_tokens_total{engine="1"} 6.0' in text
    assert 'kvferry:free_slots{engine="1"} 8.0' in text
    assert 'kvferry:hit_tokens_total{engine="0"} 5.0' in text
    assert all(f"kvferry:{name}" in text for name in [*COUNTERS, *GAUGES])


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["scheduler", "rank 0", "rank 1"]), st.integers(0, 9), st.booleans()),
        min_size=1,
    )
)
def test_lost_reports_are_made_up_for_by_the_next_of_the_same_source(
    steps: list[tuple[str, int, bool]],
) -> None:
    registry = CollectorRegistry()
    metrics = prometheus(registry)
    sources = {name: Totals(name) for name, _, _ in steps}
    totals = dict.fromkeys(sources, 0)
    for name, more, lost in steps:
        totals[name] += more
        report = sources[name].report({"saved_bytes": totals[name]})
        if not lost:
            metrics.observe(report.data)
    for name, source in sources.items():
        metrics.observe(source.report({"saved_bytes": totals[name]}).data)
    assert registry.get_sample_value("kvferry:saved_bytes_total", {"engine": "0"}) == sum(totals.values())


def test_a_source_that_began_anew_is_counted_from_zero() -> None:
    registry = CollectorRegistry()
    metrics = prometheus(registry)
    metrics.observe(Totals("rank 0").report({"saved_bytes": 50, "loaded_bytes": 1}).data)
    metrics.observe(Totals("rank 0").report({"saved_bytes": 20, "loaded_bytes": 4}).data)
    for name, value in {"saved_bytes": 70, "loaded_bytes": 5}.items():
        assert registry.get_sample_value(f"kvferry:{name}_total", {"engine": "0"}) == value
